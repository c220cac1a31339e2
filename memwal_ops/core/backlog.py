"""What waits to be merged: per region, the flushed generations above its progress, in order.

The region manifest says what was flushed, the MemWAL index says what was merged (S0-157, S0-158);
nothing else is believed. Order and completeness are ours to enforce: pylance accepts a jump over
unmerged generations and an unknown region (landmine 4).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.generations import GenerationRef, generation_ref
from memwal_ops.core.regions import NoRegionManifestError
from memwal_ops.errors import (
    GenerationMissingError,
    MemwalOpsError,
    RegionManifestCorruptError,
    RegionManifestGapError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from memwal_ops.core.table import Table
    from memwal_ops.format.region_manifest import RegionManifest

_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True)
class Blocked:
    """A region that cannot go on, and why.

    ``generation`` is the first one that cannot be merged; None where the region as a whole is unreadable.
    """

    region_id: UUID
    generation: int | None
    error: MemwalOpsError

    def to_json(self) -> dict[str, object]:
        """The ``blocked`` entry of a report."""
        return {
            "region_id": str(self.region_id),
            "generation": self.generation,
            "reason": self.error.reason,
            "detail": f"{self.error} {self.error.remedy}",
        }


@dataclass(frozen=True, slots=True)
class RegionBacklog:
    """One region: its newest manifest, its progress, and the generations to merge in ascending order."""

    manifest: RegionManifest
    merged: int
    pending: tuple[GenerationRef, ...]


@dataclass(frozen=True, slots=True)
class Backlog:
    """All regions looked at, ascending by id; a blocked region keeps what can go before the fault."""

    regions: Mapping[UUID, RegionBacklog]
    blocked: tuple[Blocked, ...]

    @property
    def pending(self) -> tuple[GenerationRef, ...]:
        """Everything that can be merged, by region, ascending within each."""
        return tuple(ref for region in self.regions.values() for ref in region.pending)

    def to_json(self) -> dict[str, int]:
        """Sizes of the backlog: generations the regions list above their progress, mergeable or not."""
        waiting = [
            flushed
            for region in self.regions.values()
            for flushed in region.manifest.flushed_generations
            if flushed.generation > region.merged
        ]
        return {
            "regions": sum(
                any(flushed.generation > region.merged for flushed in region.manifest.flushed_generations)
                for region in self.regions.values()
            ),
            "generations": len(waiting),
            "rows": sum(flushed.physical_rows or 0 for flushed in waiting),
            "bytes": sum(flushed.accounted_bytes or 0 for flushed in waiting),
        }


def read_backlog(table: Table, region_ids: Iterable[UUID] | None = None) -> Backlog:
    """Read the newest manifest of every region (or of ``region_ids``) and subtract the progress.

    Requests: one listing, one hint and one manifest per region, at most 8 at a time.
    """
    ids = sorted(table.regions.region_ids if region_ids is None else region_ids)
    regions: dict[UUID, RegionBacklog] = {}
    blocked: list[Blocked] = []
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for region_id, outcome in zip(ids, pool.map(lambda one: _read_manifest(table, one), ids), strict=True):
            if outcome is None:
                continue
            if isinstance(outcome, MemwalOpsError):
                blocked.append(Blocked(region_id, None, outcome))
                continue
            region, fault = _subtract(outcome, table.index.merged_generations.get(region_id, 0))
            regions[region_id] = region
            if fault is not None and not _merged_meanwhile(table, fault):
                blocked.append(fault)
    return Backlog(regions, tuple(blocked))


def foreign_progress(manifest: RegionManifest, merged: int) -> RegionManifestCorruptError:
    """The error of a region whose table says that more was merged than the region ever flushed."""
    return RegionManifestCorruptError(
        f"Region {manifest.region_id}: generation {merged} is said to be merged, but the region is only about to make "
        f"generation {manifest.current_generation}. The progress belongs to another region of this id: one that was "
        "removed, or that of the table from which this branch or clone was made.",
        remedy="Write to a region of a new id. What this one holds can be read, and put into the other.",
    )


def _read_manifest(table: Table, region_id: UUID) -> RegionManifest | MemwalOpsError | None:
    """The newest manifest, why it cannot be read, or None for a region that no writer has claimed yet."""
    region = table.region(region_id)
    try:
        return region.latest(checked=True)
    except NoRegionManifestError as error:
        return error if region.is_claimed() else None
    except (RegionManifestCorruptError, RegionManifestGapError) as error:
        return error


def _merged_meanwhile(table: Table, fault: Blocked) -> bool:
    """Whether others merged it since the table was opened, and a collector took it off the list."""
    if fault.generation is None:
        return False
    return fault.generation <= table.newest().index.merged_generations.get(fault.region_id, 0)


def _subtract(manifest: RegionManifest, merged: int) -> tuple[RegionBacklog, Blocked | None]:
    """Unmerged generations up to the first that is missing from the list.

    Every number between the progress and ``current_generation`` was flushed (S0-036, S0-150), so a
    number that is neither merged nor listed holds rows that somebody wrote: never step over it. The
    newest ones are missed too: a base table from a backup may be older than what was collected since.
    """
    if merged >= manifest.current_generation:
        # Branches and clones inherit the progress of a table, and none of its regions.
        region = RegionBacklog(manifest, merged, ())
        return region, Blocked(manifest.region_id, None, foreign_progress(manifest, merged))
    listed = {flushed.generation: flushed for flushed in manifest.flushed_generations}
    top = max(manifest.current_generation - 1, max(listed, default=0))
    pending: list[GenerationRef] = []
    for generation in range(merged + 1, top + 1):
        flushed = listed.get(generation)
        if flushed is None:
            error = GenerationMissingError(
                f"Generation {generation} of region {manifest.region_id} is not merged (progress is {merged}) and not "
                f"listed in manifest version {manifest.version}, but generation {top} was flushed."
            )
            region = RegionBacklog(manifest, merged, tuple(pending))
            return region, Blocked(manifest.region_id, generation, error)
        pending.append(generation_ref(manifest.region_id, flushed))
    return RegionBacklog(manifest, merged, tuple(pending)), None
