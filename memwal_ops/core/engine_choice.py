"""Choose the engine of a job by the bytes that it works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine, and why. ``fell_back`` if Spark would have been selected and cannot run."""

    name: str
    reason: str
    fell_back: bool = False


class EngineOptions(Protocol):
    """The options of a job by which the engine is chosen."""

    @property
    def engine(self) -> str:
        """``local``, ``spark`` or ``auto``."""

    @property
    def spark_above(self) -> int:
        """Bytes above which ``auto`` selects Spark."""


def choose_engine(options: EngineOptions, work: str, size: int) -> EngineChoice:
    """Choose the engine; starts nothing, and checks for Spark only if it would be selected.

    Args:
        options: of the job.
        work: what the job works on, for the reason: ``a backlog``.
        size: of that, in bytes.
    """
    if options.engine != "auto":
        return EngineChoice(options.engine, "requested")
    if size <= options.spark_above:
        return EngineChoice("local", f"{work} of {size:,} bytes is not above {options.spark_above:,}")
    above = f"{work} of {size:,} bytes is above {options.spark_above:,}"
    from memwal_ops.core.spark.environment import why_not  # noqa: PLC0415 - not for small work

    missing = why_not()
    if missing is not None:
        return EngineChoice("local", f"{above}, but Spark cannot run here: {missing}", fell_back=True)
    return EngineChoice("spark", above)
