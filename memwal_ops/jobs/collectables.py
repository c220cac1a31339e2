"""What a collector says of one thing that stands in the store: it may go, it is held, or nobody knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID


class Kind(enum.StrEnum):
    """The kinds of things; the value is what ``gc --json`` prints."""

    GENERATION = "generation"
    ORPHAN = "orphan"
    WAL_ENTRY = "wal_entry"
    REGION_MANIFEST = "region_manifest"
    SNAPSHOT = "snapshot"
    LEFTOVER = "leftover"
    UNKNOWN = "unknown"
    # Only asked for by why: pylance's to delete, not ours.
    BASE = "base"


class Verdict(enum.StrEnum):
    """What is to happen to a thing."""

    DELETE = "delete"
    HELD = "held"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition of a deletion: whether it is met, and a sentence that says by what or by whom not."""

    met: bool
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    """One thing: a file, or a directory with all that is in it.

    Attributes:
        path: below the table's root; without a trailing slash.
        region_id: None for what belongs to no region.
        generation: None for what belongs to no generation.
        bytes: size of all its objects.
        objects: how many objects it is.
        gates: what its deletion depends on. None of them: unknown.
        drain: whether only its place in the region manifest's list, and time, keep it.
    """

    kind: Kind
    path: str
    region_id: UUID | None
    generation: int | None
    bytes: int
    objects: int
    gates: tuple[Gate, ...]
    drain: bool = False

    @property
    def verdict(self) -> Verdict:
        """Deleted is what passes every gate."""
        if self.kind is Kind.UNKNOWN:
            return Verdict.UNKNOWN
        return Verdict.DELETE if all(gate.met for gate in self.gates) else Verdict.HELD

    @property
    def why(self) -> str:
        """The proof of what may go; of all others what is in the way."""
        wanted = self.verdict is Verdict.DELETE
        return "; ".join(gate.text for gate in self.gates if gate.met is wanted)

    def to_json(self) -> dict[str, object]:
        """An entry of ``delete``, ``held`` or ``unknown``."""
        return {
            "kind": self.kind.value,
            "path": self.path,
            "region_id": None if self.region_id is None else str(self.region_id),
            "generation": self.generation,
            "bytes": self.bytes,
            "objects": self.objects,
            "proof" if self.verdict is Verdict.DELETE else "because": self.why,
        }


def unknown(path: str, size: int, why: str, *, region_id: UUID | None = None, objects: int = 1) -> Item:
    """Something that nobody can classify; it is kept."""
    return Item(Kind.UNKNOWN, path, region_id, None, size, objects, (Gate(met=False, text=why),))
