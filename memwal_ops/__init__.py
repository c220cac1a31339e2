"""Maintenance jobs for Lance tables with MemWAL: merge, snapshot, catch up, collect.

``open_table`` is the way in; jobs live in :mod:`memwal_ops.jobs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.version import __version__

if TYPE_CHECKING:
    from memwal_ops.core.table import Table, open_table

__all__ = ["Table", "__version__", "open_table"]


def __getattr__(name: str) -> Any:
    # Not before somebody asks: schedulers that only name a job must not load pylance and start its threads.
    if name in {"Table", "open_table"}:
        from memwal_ops.core import table  # noqa: PLC0415

        return getattr(table, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
