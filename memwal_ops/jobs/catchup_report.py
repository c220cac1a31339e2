"""What a catch-up says of itself: one entry per index, and the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import CodebookChangedError, IndexesBehindError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.errors import MemwalOpsError


@dataclass(frozen=True, slots=True)
class Partitions:
    """Balance of an IVF index over all its segments, in rows."""

    count: int
    largest: int
    smallest: int
    threshold: float

    @property
    def imbalance(self) -> float:
        """Largest by smallest; an empty partition counts as one row."""
        return self.largest / max(self.smallest, 1)

    def to_json(self) -> dict[str, object]:
        """The ``partitions`` entry of an index."""
        return {
            "count": self.count,
            "largest": self.largest,
            "smallest": self.smallest,
            "imbalance": round(self.imbalance, 3),
            "retrain": self.imbalance > self.threshold,
        }


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What a run did with one index.

    Attributes:
        name: the index.
        type: as pylance shows it.
        uncovered_fragments: fragments that it did not cover when the run came to it.
        uncovered_rows: live rows in them.
        segments: segments at the end.
        before: ``index_catchup`` when the run began: per region the generation.
        after: and at the end.
        decision: updated, recorded, unchanged, below_threshold, failed, dropped (by its owner meanwhile), or
            would_update in a dry run.
        partitions: balance of an IVF index; None for others, and where it could not be read.
        error: why it failed.
        seconds: spent on this index.
    """

    name: str
    type: str
    uncovered_fragments: int
    uncovered_rows: int
    segments: int
    before: Mapping[UUID, int]
    after: Mapping[UUID, int]
    decision: str
    partitions: Partitions | None
    error: MemwalOpsError | None
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The ``indexes`` entry of a report."""
        return {
            "name": self.name,
            "type": self.type,
            "uncovered_fragments": self.uncovered_fragments,
            "uncovered_rows": self.uncovered_rows,
            "segments": self.segments,
            "before": {str(region_id): generation for region_id, generation in sorted(self.before.items())},
            "after": {str(region_id): generation for region_id, generation in sorted(self.after.items())},
            "decision": self.decision,
            "partitions": None if self.partitions is None else self.partitions.to_json(),
            "error": None
            if self.error is None
            else {"reason": self.error.reason, "detail": f"{self.error} {self.error.remedy}"},
            "seconds": round(self.seconds, 6),
        }


@dataclass(frozen=True, slots=True)
class CatchupReport:
    """What a run did. ``decision`` is one of caught_up, unchanged, no_indexes, incomplete, dry_run."""

    decision: str
    run_id: str
    indexes: tuple[IndexReport, ...]
    version: int
    lost_races: int
    seconds: float

    @property
    def failures(self) -> tuple[MemwalOpsError, ...]:
        """Why indexes failed."""
        return tuple(one.error for one in self.indexes if one.error is not None)

    @property
    def exit_code(self) -> int:
        """What the command exits with."""
        if not self.failures:
            return 0
        refused = all(isinstance(error, CodebookChangedError) for error in self.failures)
        return CodebookChangedError.exit_code if refused else IndexesBehindError.exit_code

    def to_json(self) -> dict[str, object]:
        """The document of ``catchup --json``."""
        return {
            "decision": self.decision,
            "indexes": [one.to_json() for one in self.indexes],
            "version": self.version,
            "seconds": round(self.seconds, 6),
            "lost_races": self.lost_races,
            "run_id": self.run_id,
        }
