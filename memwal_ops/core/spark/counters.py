"""Count what the tasks of a stage have processed, for progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext


@dataclass(frozen=True, slots=True)
class Counters:
    """Spark accumulators, for progress: what finished tasks have processed."""

    rows: Accumulator[int]
    bytes: Accumulator[int]

    @classmethod
    def of(cls, context: SparkContext) -> Self:
        """New ones."""
        return cls(context.accumulator(0), context.accumulator(0))

    @property
    def values(self) -> tuple[int, int]:
        """Rows and bytes, on the driver."""
        return self.rows.value, self.bytes.value

    def add(self, rows: int, size: int) -> None:
        """Count rows and bytes, in a task."""
        self.rows.add(rows)
        self.bytes.add(size)
