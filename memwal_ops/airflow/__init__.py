"""Operators, a sensor and a trigger for Apache Airflow 3. docs/airflow.md is their page.

What a DAG file imports from here loads neither pylance nor any client of a store: that happens in the
task's own process, when it runs. (A process that is forked after pylance started its threads hangs.)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memwal_ops.airflow.operators import (
        MemWalCatchupOperator,
        MemWalCompactOperator,
        MemWalExpireOperator,
        MemWalGcOperator,
        MemWalJobOperator,
        MemWalMaintainOperator,
        MemWalMergeOperator,
        MemWalSnapshotOperator,
    )
    from memwal_ops.airflow.sensors import MemWalBacklogSensor
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

_ENDINGS = {"Operator": "operators", "Sensor": "sensors", "Trigger": "triggers"}


def __getattr__(name: str) -> Any:
    # Late, so that the package can be imported where there is no Airflow: whoever asks for an operator is told.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next(module for ending, module in _ENDINGS.items() if name.endswith(ending))
    return getattr(import_module(f"{__name__}.{module}"), name)
