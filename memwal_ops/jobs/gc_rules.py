"""What every proof of the collector rests on, as of one moment: the table, who may read it, the clock.

A proof is never older than one batch of deletions: before each, all of this is read again
(:meth:`Rules.again`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.catchup_claims import covered_generations
from memwal_ops.errors import InvalidUsageError
from memwal_ops.jobs.collectables import Gate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.core.retention import Retention
    from memwal_ops.core.table import Table

_SAFE_READER_GRACE = timedelta(minutes=1)
_SAFE_ORPHAN_AGE = timedelta(hours=1)
_SAFE_FENCE_RETENTION = timedelta(days=1)
_SAFE_MANIFESTS = 2


@dataclass(frozen=True, slots=True)
class GcOptions:
    """How careful the collector is.

    Attributes:
        reader_grace: how long a reader may go on with the region manifest that it has read.
        orphan_min_age: how long a flush, or a commit, may be under way.
        manifest_retention: newest region manifest versions that are kept.
        fence_retention: how long a writer that was fenced may be stalled and wake again.
        max_deletes: most objects deleted in one run; None: no limit.
        allow_unsafe: take values that lose data on the timelines which :meth:`check` tells.
    """

    reader_grace: timedelta = timedelta(minutes=15)
    orphan_min_age: timedelta = timedelta(days=3)
    manifest_retention: int = 20
    fence_retention: timedelta = timedelta(days=30)
    max_deletes: int | None = None
    allow_unsafe: bool = False

    def __post_init__(self) -> None:
        dangers = self.dangers()
        if dangers and not self.allow_unsafe:
            raise InvalidUsageError(
                " ".join(dangers), remedy="Give a larger value, or --allow-unsafe if nobody else uses the table."
            )
        if self.manifest_retention < 1:
            raise InvalidUsageError(
                "--manifest-retention must be at least 1: the newest version is the region's truth."
            )
        if self.max_deletes is not None and self.max_deletes < 1:
            raise InvalidUsageError(f"--max-deletes must be at least 1, not {self.max_deletes}.")

    def dangers(self) -> tuple[str, ...]:
        """For each value below its safe minimum, the timeline that loses data."""
        found = []
        if self.reader_grace < _SAFE_READER_GRACE:
            found.append(
                f"--reader-grace below {_short(_SAFE_READER_GRACE)}: a reader reads the manifest, a merge lands, "
                "the generation is collected, and the reader, which still wants to open it, fails or misses its rows."
            )
        if self.orphan_min_age < _SAFE_ORPHAN_AGE:
            found.append(
                f"--orphan-min-age below {_short(_SAFE_ORPHAN_AGE)}: a writer has written a generation's files, they "
                "are collected as an orphan, and the writer publishes a generation that is not there."
            )
        if self.manifest_retention < _SAFE_MANIFESTS:
            found.append(
                f"--manifest-retention below {_SAFE_MANIFESTS}: a reader was told version N by the hint, a writer "
                "publishes N+1, N is collected, and the reader finds no version at all."
            )
        if self.fence_retention < _SAFE_FENCE_RETENTION:
            found.append(
                f"--fence-retention below {_short(_SAFE_FENCE_RETENTION)}: a writer stalls, two others claim the "
                "region, the entry at its position is collected, and it wakes: its next write is acknowledged and lost."
            )
        return tuple(found)


@dataclass(frozen=True)
class Rules:
    """All inputs of a proof that do not belong to one region.

    Attributes:
        table: the newest version when this was read.
        retention: who may open which version.
        covered: per base index and region the generation up to which queries by it need none.
        now: when the run began, by the slower of our clock and the store's.
        options: how careful to be.
    """

    table: Table
    retention: Retention
    covered: Mapping[str, Mapping[UUID, int]]
    now: datetime
    options: GcOptions

    def again(self) -> Rules:
        """The same, read anew. The moment stays: nothing gets older by our own doing."""
        table = self.table.newest()
        self.retention.refresh(table, self.now)
        covered = self.covered if table.version == self.table.version else covered_generations(table)
        return replace(self, table=table, covered=covered)

    def with_retention(self, retention: Retention) -> Rules:
        """The same as if these versions were all that may be opened."""
        return replace(self, retention=retention)

    def nobody_needs(self, region_id: UUID, generation: int) -> tuple[Gate, ...]:
        """The gates of a generation that do not depend on its region's manifest (S0-184, S0-188, S0-189)."""
        merged = self.table.index.merged_generations.get(region_id, 0)
        if generation > merged:
            return (Gate(met=False, text=f"not merged yet: the base table holds generations up to {merged}"),)
        gates = [Gate(met=True, text=f"merged: the base table holds generations up to {merged}")]
        behind = {name: reached.get(region_id, 0) for name, reached in self.covered.items()}
        gates += [
            Gate(met=False, text=f"index {name} covers generations only up to {reached} (memwal-ops catchup)")
            for name, reached in sorted(behind.items())
            if reached < generation
        ]
        if all(reached >= generation for reached in behind.values()):
            names = ", ".join(sorted(behind))
            gates.append(Gate(met=True, text=f"covered by index {names}" if names else "there is no index to catch up"))
        needed = self.retention.needs(region_id, generation)
        if needed is None:
            gates.append(Gate(met=True, text="merged in every version, tag, branch and hold that may be opened"))
        else:
            text = f"needed by {needed}: not merged there, or its search indexes lack it"
            gates.append(Gate(met=False, text=f"{text} (memwal-ops expire)" if needed.startswith("version") else text))
        return tuple(gates)

    @property
    def base_points_into_mem_wal(self) -> bool:
        """Whether a version of the base table may have data files below ``_mem_wal/``: then nothing there may go."""
        return self.retention.points_into_mem_wal

    def older(self, what: str, written: datetime, limit: timedelta) -> Gate:
        """The gate of an age."""
        age = self.now - written
        if age >= limit or not limit:
            return Gate(met=True, text=f"{what}, {_short(max(age, timedelta()))} ago; kept for {_short(limit)}")
        return Gate(met=False, text=f"{what}, {_short(max(age, timedelta()))} ago; kept for {_short(limit)}")


def _short(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
