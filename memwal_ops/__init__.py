"""Maintain LanceDB and Lance tables beside their writers: compact, update indexes, expire versions, merge logs.

``open_table`` opens a table of any installed format, ``run_job`` runs one of its jobs; docs/api.md has examples,
and lists the stable API. :mod:`memwal_ops.spark` has the functions that need a Spark session.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memwal_ops.version import __version__

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.core.protocols import Table
    from memwal_ops.core.registry import open_table
    from memwal_ops.core.report import Report
    from memwal_ops.core.run import run_job
    from memwal_ops.errors import (
        InvalidUsageError,
        JobPluginError,
        MemwalOpsError,
        TableNotFoundError,
        WalCorrupt,
        WriterFenced,
    )

__all__ = [
    "InvalidUsageError",
    "JobPluginError",
    "MemwalOpsError",
    "Report",
    "RunContext",
    "Table",
    "TableNotFoundError",
    "WalCorrupt",
    "WriterFenced",
    "__version__",
    "open_table",
    "run_job",
]

# All others are errors.
_MODULES = {
    "Report": "memwal_ops.core.report",
    "RunContext": "memwal_ops.core.context",
    "Table": "memwal_ops.core.protocols",
    "open_table": "memwal_ops.core.registry",
    "run_job": "memwal_ops.core.run",
}


_SUBMODULES = frozenset({"errors", "legacy", "memwal", "spark"})


def __getattr__(name: str) -> Any:
    # Not at import: a scheduler that only refers to a job must not load the clients of stores.
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "memwal_ops.errors")), name)
