"""The inputs of gc's proofs at one point in time: the table, the versions that may be opened, the clock.

A proof is never older than one batch of deletions: before each, all inputs are read again
(:meth:`CurrentEvidence.renew`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memwal_ops.core.candidates import UNKNOWN, Candidate, Gate, KindText, age_gate
from memwal_ops.formats.lance.indexes.snapshots import covered_generations
from memwal_ops.formats.lance.retention.damage import require_complete
from memwal_ops.formats.lance.retention.identity import table_anchor
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from memwal_ops.formats.lance.retention.merged_since import merged_before
from memwal_ops.text import duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

    from memwal_ops.core.anchors import Anchor
    from memwal_ops.formats.lance.options import RetentionOptions
    from memwal_ops.formats.lance.table import Table


class CandidateKind(enum.StrEnum):
    """The kinds of candidates; ``gc --json`` prints the value."""

    GENERATION = "generation"
    ORPHAN = "orphan"
    WAL_ENTRY = "wal_entry"
    REGION_MANIFEST = "region_manifest"
    SNAPSHOT = "snapshot"
    LEFTOVER = "leftover"
    QUARANTINE = "quarantine"
    UNKNOWN = UNKNOWN
    # Used by the why job only: pylance deletes these, not gc.
    BASE = "base"


KINDS: Mapping[str, KindText] = {
    CandidateKind.GENERATION: KindText("generations"),
    CandidateKind.ORPHAN: KindText("orphan directories"),
    CandidateKind.WAL_ENTRY: KindText("WAL entries", ("WAL entry", "WAL entries")),
    CandidateKind.REGION_MANIFEST: KindText(
        "region manifest versions", ("region manifest version", "region manifest versions")
    ),
    CandidateKind.SNAPSHOT: KindText("external snapshots"),
    CandidateKind.LEFTOVER: KindText("leftovers of killed commits"),
    CandidateKind.QUARANTINE: KindText("kept by repair", ("object kept by repair", "objects kept by repair")),
    CandidateKind.UNKNOWN: KindText("unknown"),
}
DIRECTORIES = frozenset({CandidateKind.GENERATION, CandidateKind.ORPHAN})
"""Kinds that are a directory with all its objects."""


@dataclass(frozen=True, slots=True)
class LanceCandidate(Candidate):
    """A candidate in a Lance table: a file, or a directory with all its objects.

    ``region_id``: None if it does not belong to a region. ``generation``: None if it does not belong to a generation.
    """

    region_id: UUID | None = None
    generation: int | None = None

    @property
    def name(self) -> str:
        """The last segment of its path."""
        return self.path.rsplit("/", 1)[-1]

    def labels(self) -> Mapping[str, Any]:
        """See :meth:`Candidate.labels`."""
        return {"region_id": None if self.region_id is None else str(self.region_id), "generation": self.generation}


def unrecognized(path: str, size: int, why: str, *, region_id: UUID | None = None, objects: int = 1) -> LanceCandidate:
    """A candidate that cannot be classified; it is kept."""
    return LanceCandidate(CandidateKind.UNKNOWN, path, size, objects, (Gate(met=False, text=why),), region_id=region_id)


@dataclass(frozen=True)
class GcEvidence:
    """All inputs of a proof that do not belong to one region.

    ``table``: the newest version when this was read. ``retention``: which versions may be opened, and by what.
    ``covered``: per base index and region the last generation that the index covers in the base. ``now``: when the run
    began, by the slower of the local clock and the store's. ``options``: grace periods and minimum ages.
    """

    table: Table
    retention: LiveVersions
    covered: Mapping[str, Mapping[UUID, int]]
    now: datetime
    options: RetentionOptions

    def reread(self) -> GcEvidence:
        """The same, read again. ``now`` stays: candidates do not age during a run.

        The table is opened again only if the listing of versions, which the retention needs anyway, does not end with
        the version that is open. A version is immutable, and that it is still the same file is what the run's anchor
        proves right before each write and each deletion.
        """
        self.retention.refresh(self.table, self.now)
        if self.retention.newest == self.table.version:
            return self
        table = self.table.newest()
        self.retention.refresh(table, self.now)  # after the table was read, so that it has all that the table follows
        covered = self.covered if table.version == self.table.version else covered_generations(table)
        return replace(self, table=table, covered=covered)

    def generation_gates(self, region_id: UUID, generation: int) -> tuple[Gate, ...]:
        """The gates of a generation that do not depend on its region's manifest (S0-184, S0-188, S0-189)."""
        merged = self.table.index.merged_generations.get(region_id, 0)
        if generation > merged:
            return (Gate(met=False, text=f"not merged yet: the base table has generations up to {merged}"),)
        gates = [Gate(met=True, text=f"merged: the base table has generations up to {merged}")]
        reached_by_index = {name: reached.get(region_id, 0) for name, reached in self.covered.items()}
        gates += [
            Gate(met=False, text=f"index {name} covers generations only up to {reached} (memwal-ops catchup)")
            for name, reached in sorted(reached_by_index.items())
            if reached < generation
        ]
        if all(reached >= generation for reached in reached_by_index.values()):
            names = ", ".join(sorted(reached_by_index))
            gates.append(Gate(met=True, text=f"covered by index {names}" if names else "there is no index to catch up"))
        needed = self.retention.needs(region_id, generation)
        if needed is None:
            gates.append(Gate(met=True, text="merged in every version, tag, branch and hold that may be opened"))
        else:
            text = f"needed by {needed}: not merged there, or its search indexes lack it"
            gates.append(Gate(met=False, text=f"{text} (memwal-ops expire)" if needed.startswith("version") else text))
        return tuple(gates)

    def drain_gates(self, region_id: UUID, generation: int) -> tuple[Gate, ...]:
        """The gates of taking a generation off its region's list: also readers that keep an older version open."""
        gates, after = self.generation_gates(region_id, generation), self.options.drain_after
        if not after:
            return gates
        met = self._merged_before.get(region_id, 0) >= generation
        period = f"--drain-after ({duration_text(after)})"
        text = (
            f"merged at least {period} ago"
            if met
            else f"merged less than {period} ago, as far as versions and earlier runs of gc show: a reader that keeps "
            "an older version open finds it by the list"
        )
        return (*gates, Gate(met, text))

    @cached_property
    def _merged_before(self) -> Mapping[UUID, int]:
        return merged_before(self.table.store, self.retention, self.now - self.options.drain_after)

    def age_gate(self, what: str, written: datetime, limit: timedelta) -> Gate:
        """The gate of an age; see :func:`memwal_ops.core.candidates.age_gate`."""
        return age_gate(what, written, limit, self.now)

    def unfinished_gate(self, written: datetime, what: str = "a commit may be in progress: written") -> Gate:
        """The gate of an object that no version names, whose writer may be about to publish it."""
        return self.age_gate(what, written, self.options.orphan_min_age)


@dataclass
class CurrentEvidence:
    """The current evidence, shared by all collectors of a run.

    ``anchors``: of the table that was read first; empty for a plan, which deletes nothing.
    """

    evidence: GcEvidence
    anchors: tuple[Anchor, ...] = ()
    _complete: bool = False

    def renew(self) -> None:
        """Read all inputs of proofs again; called before each drain and each batch of deletions.

        The first call checks that the newest version is complete: a generation that it has merged may be the only other
        copy of the rows in a file that it lacks.

        An anchor is checked right before each deletion, and once more before a newer one replaces it: since it
        still exists after the newer version was read, that version is of the same table.

        Raises:
            TableCorruptError: the newest version lacks a file.
            TableReplacedError: the table may have been replaced.
        """
        evidence, anchors = self.evidence.reread(), self.anchors
        if not self._complete:
            require_complete(evidence.table)
            self._complete = True
        if evidence.table.version != self.evidence.table.version:
            anchors = (table_anchor(evidence.table),)
            self.check()
        self.evidence, self.anchors = evidence, anchors

    def check(self) -> None:
        """Raise ``TableReplacedError`` if the table may have been replaced; called right before each write."""
        for anchor in self.anchors:
            anchor.check(self.evidence.table.store)


def read_evidence(table: Table, options: RetentionOptions, now: datetime) -> GcEvidence:
    """All inputs of proofs but the regions, as of now."""
    retention = LiveVersions()
    retention.refresh(table, now)
    return GcEvidence(table, retention, covered_generations(table), now, options)
