"""The candidates of gc in a Lance table: their kinds, and the fields that name them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.candidates import UNKNOWN, Candidate, Gate
from memwal_ops.core.gc_report import KindText

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID


class Kind(enum.StrEnum):
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
    Kind.GENERATION: KindText("generations"),
    Kind.ORPHAN: KindText("orphan directories"),
    Kind.WAL_ENTRY: KindText("WAL entries", ("WAL entry", "WAL entries")),
    Kind.REGION_MANIFEST: KindText("region manifest versions", ("region manifest version", "region manifest versions")),
    Kind.SNAPSHOT: KindText("external snapshots"),
    Kind.LEFTOVER: KindText("leftovers of killed commits"),
    Kind.QUARANTINE: KindText("kept by repair", ("object kept by repair", "objects kept by repair")),
    Kind.UNKNOWN: KindText("unknown"),
}
DIRECTORIES = frozenset({Kind.GENERATION, Kind.ORPHAN})
"""Kinds that are a directory with all its objects."""


@dataclass(frozen=True, slots=True)
class LanceCandidate(Candidate):
    """A candidate in a Lance table: a file, or a directory with all its objects.

    Attributes:
        region_id: None if it does not belong to a region.
        generation: None if it does not belong to a generation.
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
    return LanceCandidate(Kind.UNKNOWN, path, size, objects, (Gate(met=False, text=why),), region_id=region_id)
