"""Compute the backlog: per region, the flushed generations above its merge progress, in order.

Only the region manifest defines which generations were flushed, and only the MemWAL index which were merged (S0-157,
S0-158). Order and completeness are enforced here: pylance accepts a jump over unmerged generations and an unknown
region.

If the MemWAL index was removed and made again, as ``unset_lsm_write_spec()`` and ``set_lsm_write_spec()`` of lancedb
do, region specs and progress are restored; the regions stay. Timeline of the loss without this: generation 3 is merged;
the index is made again; a merge that begins at generation 1 writes the old values of its keys over newer rows of the
base. Without its spec, a region has no values, by which rows are routed to it.

Proof: the newest version descends, without an overwrite and by transactions that exist, from the one that has it. For
progress also that the region is the one that was merged there; a spec id is never given to another spec (S0-082).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import DrainedElsewhereError, GenerationMissingError, MemwalOpsError, RegionReplacedError
from memwal_ops.formats.lance.generations.generation import GenerationRef, generation_ref
from memwal_ops.formats.lance.generations.region_identity import UNDECIDED_RECORD, check_identity, lost_progress
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.layouts import mixed_regions
from memwal_ops.formats.lance.regions.manifests import REGION_FAULTS, Drop, NoRegionManifestError, listed_log
from memwal_ops.formats.lance.regions.specs import MANUAL
from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex, with_catchup, with_maintained_indexes, with_progress
from memwal_ops.text import known_sum, paragraph, span_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionRecord


_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True)
class BlockedRegion:
    """A blocked region, with the error.

    ``generation`` is the first one that cannot be merged; None if the region as a whole is unreadable. ``drops``:
    the generations from there on that another program dropped, which is ``program`` by the base version of that time.
    """

    region_id: UUID
    generation: int | None
    error: MemwalOpsError
    drops: tuple[Drop, ...] = ()
    program: str = ""

    def out_of_order(self, pending: Iterable[GenerationRef]) -> bool:
        """Whether generations wait that came before those that were dropped, and were listed then."""
        return any(ref.path in drop.kept for drop in self.drops for ref in pending)

    def to_json(self) -> dict[str, object]:
        """The ``blocked`` entry of a report."""
        return blocked_entry(str(self.region_id), self.generation, self.error)

    def describe(self, heading: str) -> str:
        """Why it is blocked and what to do, indented below ``heading region ID``."""
        where = "" if self.generation is None else f" at generation {self.generation}"
        remedy = f"What to do: {self.error.remedy} (runbooks/merge-blocked.md)"
        texts = [paragraph(text, indent="    ") for text in (str(self.error), remedy)]
        return "\n".join([f"{heading} region {self.region_id}{where}: {self.error.reason}", *texts])


def blocked_entry(region_id: str, generation: int | None, error: MemwalOpsError) -> dict[str, object]:
    """The ``blocked`` entry of a report, for a region of any layout."""
    return {
        "region_id": region_id,
        "generation": generation,
        "reason": error.reason,
        "detail": f"{error} {error.remedy}",
        "remedy": error.remedy,
    }


@dataclass(frozen=True, slots=True)
class RegionBacklog:
    """The backlog of one region. ``pending``: the generations to merge, ascending."""

    manifest: RegionManifest
    merged: int
    pending: tuple[GenerationRef, ...]

    def before(self, generation: int) -> RegionBacklog:
        """The same, of which only the generations before this one can be merged."""
        return replace(self, pending=tuple(ref for ref in self.pending if ref.generation < generation))


@dataclass(frozen=True, slots=True)
class _Read:
    """A region as read. ``record``: that the table should have; ``replaced``: why it must not be merged."""

    manifest: RegionManifest
    record: RegionRecord | None
    replaced: RegionReplacedError | None


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of all regions, ascending by id. A blocked region keeps the generations before the fault.

    ``unrecorded`` are records of regions that the table should have, and does not have yet (:func:`check_identity`).
    """

    regions: Mapping[UUID, RegionBacklog]
    blocked: tuple[BlockedRegion, ...]
    unrecorded: Mapping[UUID, RegionRecord] = field(default_factory=dict)

    @property
    def pending(self) -> tuple[GenerationRef, ...]:
        """Everything that can be merged, by region, ascending within each."""
        return tuple(ref for region in self.regions.values() for ref in region.pending)

    def to_json(self) -> dict[str, int | None]:
        """Sizes: generations that the regions list above their progress, mergeable or not. None: not known."""
        by_region = [region.manifest.unmerged(region.merged) for region in self.regions.values()]
        waiting = [flushed for listed in by_region for flushed in listed]
        return {
            "regions": sum(map(bool, by_region)),
            "generations": len(waiting),
            "rows": known_sum(flushed.physical_rows for flushed in waiting),
            "bytes": known_sum(flushed.accounted_bytes for flushed in waiting),
        }


def with_listed_log(table: Table) -> Table:
    """The table with a store that serves the first listings of its log from one page; for planning alone."""
    return replace(table, store=listed_log(table.store, table.location.scheme))


def read_backlog(table: Table, region_ids: Iterable[UUID] | None = None) -> Backlog:
    """Read the newest manifest of every region (or of ``region_ids``) and subtract the progress.

    Requests: a listing; one hint and one manifest per region, at most 8 at a time; and per region a listing, if the log
    has 1,000 objects or more.
    """
    return backlog_of(with_listed_log(table), region_ids)


def backlog_of(table: Table, region_ids: Iterable[UUID] | None = None) -> Backlog:
    """:func:`read_backlog` for a caller that listed the log (:func:`with_listed_log`)."""
    known = table.regions.region_ids if table.log.shows_progress else ()
    ids = sorted(known if region_ids is None else region_ids)
    regions: dict[UUID, RegionBacklog] = {}
    blocked: list[BlockedRegion] = []
    unrecorded: dict[UUID, RegionRecord] = {}
    mixed = mixed_regions(table.store, ids, migrated=table.layout_record is not None)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        outcomes = pool.map(lambda region_id: mixed.get(region_id) or _read_region(table, region_id), ids)
        for region_id, outcome in zip(ids, outcomes, strict=True):
            if outcome is None:
                continue
            if isinstance(outcome, MemwalOpsError):
                blocked.append(BlockedRegion(region_id, None, outcome))
                continue
            merged = table.index.merged_generations.get(region_id, 0)
            if outcome.record is not None:
                unrecorded[region_id] = outcome.record
            if outcome.replaced is not None:
                regions[region_id] = RegionBacklog(outcome.manifest, merged, ())
                blocked.append(BlockedRegion(region_id, None, outcome.replaced))
                continue
            region, fault = subtract(outcome.manifest, merged)
            if fault is not None:
                fault = _told_apart(table, region, fault)
                # Those before it that were listed then would be put over what was merged out of order.
                region = region.before(0) if fault.out_of_order(region.pending) else region
                blocked.append(fault)
            regions[region_id] = region
    return Backlog(regions, still_blocked(table, blocked), unrecorded)


def still_blocked(table: Table, blocked: Sequence[BlockedRegion]) -> tuple[BlockedRegion, ...]:
    """The faults except those of generations that were merged and collected since the table was opened."""
    if all(fault.generation is None for fault in blocked):
        return tuple(blocked)
    merged = table.newest().index.merged_generations
    return tuple(
        fault for fault in blocked if fault.generation is None or fault.generation > merged.get(fault.region_id, 0)
    )


def _read_region(table: Table, region_id: UUID) -> _Read | MemwalOpsError | None:
    """A region as read, the error if it cannot be read, or None for a region that no writer has claimed yet."""
    region = table.region(region_id)
    try:
        manifest = region.latest(checked=True)
    except NoRegionManifestError as error:
        return error if region.is_claimed() else None
    except REGION_FAULTS as error:
        return error
    try:
        return _Read(manifest, check_identity(table, manifest, created=region.created), None)
    except RegionReplacedError as error:
        return _Read(manifest, UNDECIDED_RECORD if error.undecided else None, error)
    except REGION_FAULTS as error:
        return error


def subtract(manifest: RegionManifest, merged: int) -> tuple[RegionBacklog, BlockedRegion | None]:
    """Unmerged generations up to the first that is missing from the list.

    Every number between the progress and ``current_generation`` was flushed (S0-036, S0-150), so a
    number that is neither merged nor listed has rows of a writer, and is never skipped. This applies to the
    newest ones, too: a base table from a backup may be older than the collection of generations.
    """
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
            return region, BlockedRegion(manifest.region_id, generation, error)
        pending.append(generation_ref(manifest.region_id, flushed))
    return RegionBacklog(manifest, merged, tuple(pending)), None


def _told_apart(table: Table, region: RegionBacklog, fault: BlockedRegion) -> BlockedRegion:
    """The fault; with ``DrainedElsewhereError`` if it is proven that another program dropped the generations.

    Timeline without the versions: a merge records 3; gc drops 1 to 3; the table is restored to before. The region's
    manifest is the same, and its rows are in no base version any more.
    """
    generation, program = fault.generation or 0, ""
    drops: list[Drop] = []
    listed = {flushed.generation for flushed in region.manifest.flushed_generations}
    for drop in table.region(fault.region_id).drops_from(generation):
        if drop.flushed.generation in listed:
            break
        if not drops or drop.version != drops[-1].version:
            version = table.history.newest_without(fault.region_id, drop.flushed.generation, drop.at)
            if version is None:
                break
            program = table.history.program(version)
        drops.append(drop)
    if not drops:
        return fault
    error = DrainedElsewhereError(
        f"Region {fault.region_id}: version {drops[-1].version} of its manifest dropped generations "
        f"{span_text(generation, drops[-1].flushed.generation)} from its list at {drops[-1].at:%Y-%m-%d %H:%M:%S} UTC, "
        f"while progress was below. Another program ({program}) merged them, and recorded no progress."
    )
    return replace(fault, error=error, drops=tuple(drops), program=program)


@dataclass(frozen=True, slots=True)
class RestoredIndex:
    """A MemWAL index with what the table lost.

    Attributes:
        progress: per region, the last merged generation that was restored, and ``records`` of them, if they are known.
        specs: ids of the region specs that were restored.
    """

    details: memwal_pb2.MemWalIndexDetails
    progress: Mapping[UUID, int]
    records: Mapping[UUID, RegionRecord]
    specs: tuple[int, ...]


def restored_index(
    table: Table, regions: Iterable[RegionManifest], without_progress: Iterable[RegionManifest]
) -> RestoredIndex | None:
    """The MemWAL index with specs and progress that the table lost; None: nothing is lost, or it is not proven.

    If the table has none, as it was removed (:attr:`Table.index_removed_after`), it has the settings of the last one.
    Of one that was made again, settings are as they were given, but those that older releases could not give.

    The specs of ``regions`` are needed; the progress of ``without_progress`` may be lost.
    """
    removed = None if table.index_removed_after is None else table.history.index_of(table.index_removed_after)
    details = deepcopy(table.index.details) if removed is None else _settings(removed)
    specs = _add_specs(table, details, {region.region_spec_id for region in regions})
    recorded = {region.region_id: lost_progress(table, region) for region in without_progress}
    lost = {region_id: merged for region_id, merged in recorded.items() if merged is not None}
    if removed is None and not specs and not lost:
        return None
    names = [*details.maintained_indexes]
    if not names and (details.maintain_all_indexes or not details.HasField("maintain_all_indexes")):
        names += table.history.last_maintained()  # else the list was given as empty
    existing = base_indexes(table)
    names = [name for name in names if name in existing]
    progress = {region_id: merged for region_id, (merged, _) in lost.items()}
    details = raised(table, with_maintained_indexes(details, names), progress)
    records = {region_id: record for region_id, (_, record) in lost.items() if record is not None}
    return RestoredIndex(details, progress, records, specs)


def raised(
    table: Table, details: memwal_pb2.MemWalIndexDetails, progress: Mapping[UUID, int]
) -> memwal_pb2.MemWalIndexDetails:
    """Details with more progress, without a change of rows, and with the catch-up entries that it makes necessary.

    Timeline without these: an index covers no row of generation 3, which is merged; the progress is restored, and by
    the specification an index without an entry is caught up (S0-079): a query by it finds the rows nowhere.

    Raises ``InvariantViolatedError``: the progress is not more than the details have.
    """
    if not progress:
        return details
    from memwal_ops.formats.lance.indexes.snapshots import covered_generations  # noqa: PLC0415 - if progress was lost

    details = with_progress(details, progress)
    merged = {UUID(bytes=entry.region_id.uuid): entry.generation for entry in details.merged_generations}
    raised_table = replace(table, memwal=replace(table.index, merged_generations=merged))
    return with_catchup(details, covered_generations(raised_table))


def _add_specs(table: Table, details: memwal_pb2.MemWalIndexDetails, needed: AbstractSet[int]) -> tuple[int, ...]:
    """Add the needed specs that the details lack; returns the ids of those that were found."""
    added = []
    for spec_id in sorted(needed - {MANUAL, *(spec.spec_id for spec in details.region_specs)}):
        index = table.history.index_with(spec_id)
        for spec in () if index is None else index.region_specs:
            if spec.spec_id == spec_id:
                details.region_specs.append(spec)
                added.append(spec_id)
    return tuple(added)


def _settings(index: MemWalIndex) -> memwal_pb2.MemWalIndexDetails:
    """The details without what belongs to the regions: progress, catch-up and snapshot."""
    details = deepcopy(index.details)
    for name in ("merged_generations", "index_catchup", "inline_snapshots", "num_regions"):
        details.ClearField(name)
    return details
