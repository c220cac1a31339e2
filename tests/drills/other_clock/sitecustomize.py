"""On the path of a process, its clock is wrong by the seconds in ``CLOCK``: Python imports this before all else."""

from __future__ import annotations

import datetime
import os

_real = datetime.datetime
_shift = datetime.timedelta(seconds=float(os.environ.get("CLOCK", "0")))


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real)


class _Shifted(_real, metaclass=_Kind):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return _real.now(tz) + _shift


if _shift:
    datetime.datetime = _Shifted  # type: ignore[misc]
