"""On the path of a process, memwal_ops tells a time there that is wrong by the seconds in ``CLOCK``.

Python imports this before all else. The clock is shifted for memwal_ops alone: much of what is written in C would
crash over a class of datetime that it does not know.
"""

from __future__ import annotations

import datetime
import os
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_real = datetime.datetime
_shift = datetime.timedelta(seconds=float(os.environ.get("CLOCK", "0")))
_execute = SourceFileLoader.exec_module


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real)


class _Shifted(_real, metaclass=_Kind):
    __slots__ = ()

    @classmethod  # gives real ones, so that whatever is made of them is as ever
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return _real.now(tz) + _shift


def _execute_shifted(loader: SourceFileLoader, module: ModuleType) -> None:
    _execute(loader, module)
    if module.__name__.startswith("memwal_ops") and getattr(module, "datetime", None) is _real:
        # Any module may be met here, and mypy knows of none that it has the name.
        module.datetime = _Shifted  # type: ignore[attr-defined]


if _shift:
    # The one place that every import of ours passes, before anything of it runs.
    SourceFileLoader.exec_module = _execute_shifted  # type: ignore[assignment,method-assign]
