"""Restore what a table lost with its MemWAL index, when that was removed and made again: region specs and progress.

``unset_lsm_write_spec()`` and ``set_lsm_write_spec()`` of lancedb do so; the regions stay. Timeline of the loss without
this: generation 3 is merged; the index is made again; a merge that begins at generation 1 writes the old values of its
keys over newer rows of the base. Without its spec, a region has no values, by which rows are routed to it.

Proof: the newest version descends, without an overwrite and by transactions that exist, from the one that has it. For
progress also that the region is the one that was merged there; a spec id is never given to another spec (S0-082).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.formats.lance.generations.region_identity import lost_progress
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.catchup_entries import covered_generations
from memwal_ops.formats.lance.regions.specs import MANUAL
from memwal_ops.formats.lance.wire.memwal_index import with_catchup, with_maintained_indexes, with_progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionRecord


@dataclass(frozen=True, slots=True)
class RestoredIndex:
    """A MemWAL index with what the table lost.

    Attributes:
        details: of the index.
        progress: per region, the last merged generation that was restored.
        records: of these regions, as far as they are known.
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

    Args:
        table: its newest version.
        regions: those whose specs are needed.
        without_progress: those whose progress may be lost.
    """
    removed = None if table.index_removed_after is None else table.history.index_of(table.index_removed_after)
    details = deepcopy(table.index.details) if removed is None else _settings(removed)
    specs = _add_specs(table, details, {one.region_spec_id for one in regions})
    found = {one.region_id: lost_progress(table, one) for one in without_progress}
    lost = {region_id: one for region_id, one in found.items() if one is not None}
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

    Raises:
        InvariantViolatedError: the progress is not more than the details have.
    """
    if not progress:
        return details
    details = with_progress(details, progress)
    merged = {UUID(bytes=one.region_id.uuid): one.generation for one in details.merged_generations}
    raised_table = replace(table, memwal=replace(table.index, merged_generations=merged))
    return with_catchup(details, covered_generations(raised_table))


def _add_specs(table: Table, details: memwal_pb2.MemWalIndexDetails, needed: AbstractSet[int]) -> tuple[int, ...]:
    """Add the needed specs that the details lack; returns the ids of those that were found."""
    added = []
    for spec_id in sorted(needed - {MANUAL, *(one.spec_id for one in details.region_specs)}):
        found = table.history.index_with(spec_id)
        for one in () if found is None else found.region_specs:
            if one.spec_id == spec_id:
                details.region_specs.append(one)
                added.append(spec_id)
    return tuple(added)


def _settings(index: MemWalIndex) -> memwal_pb2.MemWalIndexDetails:
    """The details without what belongs to the regions: progress, catch-up and snapshot."""
    details = deepcopy(index.details)
    for name in ("merged_generations", "index_catchup", "inline_snapshots", "num_regions"):
        details.ClearField(name)
    return details
