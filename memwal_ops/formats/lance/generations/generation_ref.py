"""Name a flushed generation: its region, its number, its folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.wire.names import region_folder

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration


@dataclass(frozen=True, slots=True)
class GenerationRef:
    """A generation as its region manifest lists it (S0-049), not opened.

    ``bytes`` and ``rows`` are those in the manifest; None if the writer's release did not record them.
    """

    region_id: UUID
    generation: int
    path: str
    rows: int | None
    bytes: int | None

    @property
    def folder(self) -> str:
        """The path of its directory, relative to the table's root."""
        return f"{region_folder(self.region_id)}/{self.path}"

    def __str__(self) -> str:
        return f"generation {self.generation} of region {self.region_id} ({self.path})"


def generation_ref(region_id: UUID, flushed: FlushedGeneration) -> GenerationRef:
    """The reference to one entry of a region manifest."""
    return GenerationRef(region_id, flushed.generation, flushed.path, flushed.physical_rows, flushed.accounted_bytes)
