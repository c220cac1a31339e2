"""Operators, a sensor and a trigger for Apache Airflow 3 (docs/airflow.md).

A DAG file that imports this package loads neither pylance nor any client of a store: that happens in the
task's own process, when it runs. (A process that is forked after pylance started its threads hangs.)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memwal_ops.airflow.operators import (
        MemWalBacklogSensor,
        MemWalCatchupOperator,
        MemWalCompactOperator,
        MemWalExpireOperator,
        MemWalGcOperator,
        MemWalJobOperator,
        MemWalMaintainOperator,
        MemWalMergeOperator,
        MemWalSnapshotOperator,
    )
    from memwal_ops.airflow.triggers import MemWalBacklogTrigger

__all__ = [
    "MemWalBacklogSensor",
    "MemWalBacklogTrigger",
    "MemWalCatchupOperator",
    "MemWalCompactOperator",
    "MemWalExpireOperator",
    "MemWalGcOperator",
    "MemWalJobOperator",
    "MemWalMaintainOperator",
    "MemWalMergeOperator",
    "MemWalSnapshotOperator",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that the package can be imported without Airflow: the import of an operator then raises an ImportError.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'triggers' if name.endswith('Trigger') else 'operators'}"), name)
