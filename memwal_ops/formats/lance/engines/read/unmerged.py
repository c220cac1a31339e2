"""Read the unmerged rows of a table: each region's generations, log and MemTable (S0-194, S0-195, S0-199)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops import errors
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError
from memwal_ops.formats.lance.files.blobs import holds_blobs
from memwal_ops.formats.lance.generations import generation, projection, region_identity
from memwal_ops.formats.lance.generations.backlog import subtract
from memwal_ops.formats.lance.generations.wal import wal_entry_path
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.log.region_log import read_log, read_shard_log
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError, list_regions
from memwal_ops.formats.lance.regions.specs import MANUAL
from memwal_ops.formats.lance.retention.schema_history import Flush, SchemaHistory, WriterVersion
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.storage.api import results_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.engines.read.pruning import Wanted
    from memwal_ops.formats.lance.log.memtable import InMemory
    from memwal_ops.formats.lance.log.region_files import WalEntry
    from memwal_ops.formats.lance.log.region_writer import RegionWriter
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.memwal_index import RegionRow, RegionState
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

Consistency = Literal["strong", "manifests", "snapshot"]
CONSISTENCIES: tuple[Consistency, ...] = ("strong", "manifests", "snapshot")
_CONCURRENT_READS = 16
_ATTEMPTS = 10
# Errors that may mean that a generation was collected meanwhile, that the version was expired, or that a region was
# adopted.
_RETRIED_AT_NEWEST = (
    *(errors.GenerationMissingError, errors.GenerationCorruptError, BlockedRegionsError),
    *(errors.ObjectNotFoundError, errors.RegionReplacedError),
)
_TOMBSTONE_FIELD = pa.field(projection.TOMBSTONE, pa.bool_(), nullable=False)
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class RegionRead:
    """One region at one time.

    Attributes:
        region_id: the region.
        values: by which rows are routed to it; None: rows are not routed by values, or these are not known.
        flushed: its unmerged generations, ascending.
        merged: those that are merged and still listed, ascending.
        current: the number of the generation that will have the rows in memory; 0: not known.
        memory: rows that no generation has, with ``_tombstone``, in the order of writes; None: not read.
        writer: the writer of this process that has them; None: they are from the log.
    """

    region_id: UUID
    values: region_identity.RegionValues | None
    flushed: tuple[generation.GenerationRef, ...]
    merged: tuple[generation.GenerationRef, ...] = ()
    current: int = 0
    memory: pa.Table | None = None
    writer: RegionWriter | None = None

    def __str__(self) -> str:
        return f"the {'log' if self.writer is None else 'memory of the writer'} of region {self.region_id}"


@dataclass(frozen=True)
class Unmerged:
    """The unmerged rows of a version, at one time. ``pruned`` are regions that have no rows that the read needs."""

    table: Table
    regions: tuple[RegionRead, ...]
    pruned: tuple[UUID, ...]


def read_unmerged(
    table: Table, consistency: Consistency, *, wanted: Wanted | None = None, writers: Iterable[RegionWriter] = ()
) -> Unmerged:
    """Read the unmerged rows of a version.

    Args:
        consistency: ``strong``: manifests and logs of all regions, and so every durable row that was acknowledged
            before. ``manifests``: no log. ``snapshot``: the regions of the index's snapshot, and no request for each;
            in the shard layout, whose snapshots have no more than the ids, their manifests.
        wanted: regions without such rows are left out (S0-200).
        writers: of this process; of their regions the manifest and the rows in memory are read in any case.

    Raises:
        GenerationMissingError: one is neither merged in this version nor listed; see :func:`at_newest`.
        RegionReplacedError: a region is not the one that was merged; an operator has to decide.
        UnsupportedFeatureError: a log whose entries cannot be read here.
        MemwalOpsError: a manifest, or an entry that is not the last, is missing or damaged.
    """
    own = {writer.region_id: writer for writer in writers}
    rows: dict[UUID, RegionRow | None]
    if consistency == "snapshot":
        snapshot = read_snapshot(table)
        rows = {region.region_id: region for region in (() if snapshot is None else snapshot.regions)}
    else:
        # Listed again for each call: a region that was created since the version has acknowledged rows as well.
        rows = dict.fromkeys(list_regions(table.store).region_ids)
    # A writer may have made its region after the regions were listed.
    region_ids = sorted({*rows, *own})
    history = SchemaHistory.of(table)

    def read_one(region_id: UUID) -> RegionRead | None:
        row = rows.get(region_id)
        if row is not None and row.state is not None and region_id not in own:
            return _of_snapshot(table, row, row.state)
        return _of_manifest(table, history, region_id, wanted, own.get(region_id), log=consistency == "strong")

    read = results_of(read_one, region_ids, threads=_CONCURRENT_READS)
    regions = [region for region in read if region is not None]
    kept = [region for region in regions if _may_have(region.values, wanted)]
    return Unmerged(table, tuple(kept), tuple(region.region_id for region in regions if region not in kept))


def at_newest(table: Table, read: Callable[[Table], _Read]) -> _Read:
    """Read a version, or a newer one if generations that it needs were merged and collected since (S0-197).

    Timeline otherwise: a reader opens version 5; generation 3 is merged as version 6, drained and deleted; version 5
    has no row of it, and the region's manifest does not list it any more: its rows would be in neither.
    """
    for _ in range(_ATTEMPTS):
        try:
            return read(table)
        except _RETRIED_AT_NEWEST:
            newest = table.newest()
            if newest.version == table.version:
                raise
            table = newest
    return read(table)


def _may_have(values: region_identity.RegionValues | None, wanted: Wanted | None) -> bool:
    return values is None or wanted is None or wanted.may_be_in(values)


def _of_snapshot(table: Table, row: RegionRow, state: RegionState) -> RegionRead:
    merged = table.index.merged_generations.get(row.region_id, 0)
    listed = sorted(state.flushed_generations, key=lambda flushed: flushed.generation)
    refs = [generation.generation_ref(row.region_id, flushed) for flushed in listed]
    values = None if row.region_spec_id == MANUAL else _values(lambda: _values_of_row(table, row))
    pending, done = (tuple(ref for ref in refs if (ref.generation > merged) is waits) for waits in (True, False))
    return RegionRead(row.region_id, values, pending, done, state.current_generation)


def _of_manifest(
    table: Table,
    history: SchemaHistory,
    region_id: UUID,
    wanted: Wanted | None,
    writer: RegionWriter | None,
    *,
    log: bool,
) -> RegionRead | None:
    """The region by its manifest, with the rows in memory, unless it cannot have rows that the read needs."""
    region = table.region(region_id)
    for _ in range(_ATTEMPTS):
        try:
            manifest = region.latest(checked=True)
        except NoRegionManifestError:
            if region.is_claimed():
                raise
            return None
        held = None if writer is None or writer.epoch != manifest.writer_epoch else writer.in_memory()
        # Otherwise rows were flushed in between: neither listed in this manifest nor in memory any more. Rows that are
        # both listed and in memory do not matter: those in memory are as new, or newer.
        if held is None or held.generation <= manifest.current_generation:
            break
    else:
        raise errors.CommitConflictError(f"Region {region_id}: its writer flushed {_ATTEMPTS} times while it was read.")
    values = None
    # pylance uses another hash for values: its regions are never pruned.
    if manifest.region_spec_id != MANUAL and table.layout_of(region_id).generations_in_log:
        values = _values(lambda: region_identity.region_values_of(table, manifest))
    needed = _may_have(values, wanted)
    backlog, fault = subtract(manifest, table.index.merged_generations.get(region_id, 0))
    if needed:
        # Timeline without it: a region is merged up to generation 3, and its folder removed; a new region of that id
        # flushes generation 1, which counts as merged: rows of acknowledged writes would be missing in the result.
        region_identity.check_record(table, manifest)
        if fault is not None:
            raise fault.error
    listed = (flushed for flushed in manifest.flushed_generations if flushed.generation <= backlog.merged)
    merged = tuple(generation.generation_ref(region_id, flushed) for flushed in listed)
    memory = None
    if needed:
        if held is not None:
            memory = _held(table, history, region_id, held)
        elif log:
            memory = _log(table, history, manifest)
    writer, current = None if held is None else writer, manifest.current_generation
    return RegionRead(region_id, values, backlog.pending, merged, current, memory, writer)


def _values(read: Callable[[], region_identity.RegionValues | None]) -> region_identity.RegionValues | None:
    """The region's values; None if they are not known: such a region is never pruned."""
    try:
        return read()
    except errors.MemwalOpsError:
        return None


def _values_of_row(table: Table, row: RegionRow) -> region_identity.RegionValues:
    spec = region_identity.table_spec(table, row.region_spec_id)
    return region_identity.RegionValues(spec, tuple(row.fields.get(field.field_id) for field in spec.fields))


def _held(table: Table, history: SchemaHistory, region_id: UUID, held: InMemory) -> pa.Table | None:
    now, name = time.time_ns(), f"rows in memory of region {region_id}"
    put = [_Rows(rows, columns.ids, name, partial(Flush, now, now, columns.opened)) for rows, columns in held.fragments]
    return _in_order(table, put, history, region_id, "Flush the writer.")


def _log(table: Table, history: SchemaHistory, manifest: RegionManifest) -> pa.Table | None:
    region_id, layout = manifest.region_id, table.layout_of(manifest.region_id)
    if layout.generations_in_log:
        entries = [entry for entry in read_log(table.store, manifest) if not entry.cut]
        flush = "Open a RegionWriter on the region, and flush it."
    else:
        entries = read_shard_log(table, manifest)
        flush = (
            f'Flush it by pylance\'s writer: lance.dataset(URI).mem_wal_writer("{region_id}").close(), with the limits '
            "(max_memtable_rows) of the writer that wrote it. It fences a writer that is running."
        )

    def put(entry: WalEntry) -> Flush:
        if entry.opened == WriterVersion.of(table):
            return Flush(None, 0, entry.opened)  # which decides
        meta = table.store.head(wal_entry_path(region_id, entry.entry_id, layout))
        return Flush(None, 0 if meta is None else nanoseconds(meta.last_modified), entry.opened)

    def rows(entry: WalEntry) -> _Rows:
        name, writer = f"WAL entry {entry.entry_id} of region {region_id}", (entry.opened, entry.writer_epoch)
        return _Rows(entry.rows, entry.field_ids, name, partial(put, entry), writer)

    logged = [*map(rows, entries)]
    return _in_order(table, logged, history, region_id, flush)


@dataclass(frozen=True)
class _Rows:
    """Rows that one writer put.

    ``rows``: as they are stored. ``ids``: the field ids of their columns; None: not stored. ``name``: for errors.
    ``flush``: when they were put. ``writer``: equal for rows that were put by one writer.
    """

    rows: pa.Table
    ids: tuple[int, ...] | None
    name: str
    flush: Callable[[], Flush]
    writer: Hashable = None

    @property
    def columns(self) -> Hashable:
        """Equal for rows of the same columns."""
        return self.ids, self.rows.schema, self.writer


def _in_order(
    table: Table, fragments: Sequence[_Rows], history: SchemaHistory, region_id: UUID, flush: str
) -> pa.Table | None:
    """Rows in the columns of the table, with ``_tombstone``; None: there are none.

    A tombstone is NULL in columns that require a value, so that these are nullable here.

    Args:
        flush: how the rows become a generation, for errors.
    """
    if not fragments:
        return None
    schema = table.schema
    if any(map(holds_blobs, schema)):
        raise errors.UnsupportedFeatureError(
            f"{fragments[0].name} has blobs, which are not read from a log.", remedy=flush
        )
    wanted = pa.schema([field.with_nullable(field.name not in table.primary_key) for field in schema])
    projections: dict[Hashable, projection.Projection] = {}
    parts = []
    for fragment in fragments:
        if fragment.columns not in projections:
            try:
                with generation.named(fragment.name):
                    projections[fragment.columns] = _projection(table, wanted, fragment, history, region_id)
            except projection.UndecidedColumnsError as error:
                error.remedy = f"{flush} Then: {error.remedy}"
                raise
        parts += [
            pa.RecordBatch.from_arrays([*rows.columns, _tombstones(batch)], schema=wanted.append(_TOMBSTONE_FIELD))
            for batch in fragment.rows.combine_chunks().to_batches()
            for rows in [projections[fragment.columns].apply(batch)]
        ]
    return pa.Table.from_batches(parts, wanted.append(_TOMBSTONE_FIELD))


def _tombstones(rows: pa.RecordBatch) -> pa.Array:
    if projection.TOMBSTONE not in rows.schema.names:
        return pa.repeat(pa.scalar(value=False), rows.num_rows)
    return pc.fill_null(rows.column(projection.TOMBSTONE), fill_value=False)  # NULL means not deleted


def _projection(
    table: Table, wanted: pa.Schema, logged: _Rows, history: SchemaHistory, region_id: UUID
) -> projection.Projection:
    """How the columns of logged rows become the table's: by field id, or, where none are stored, by name."""
    base = projection.nodes(table.dataset)
    kinds = {node.name: node.type for node in base}
    stored = pa.schema([field for field in logged.rows.schema if field.name != projection.TOMBSTONE])
    ids = logged.ids
    if ids is not None and len(stored) < len(logged.rows.schema):
        ids = ids[:-1]
    if ids is None and any(kinds.get(field.name) != field.type for field in stored):
        raise errors.UnsupportedFeatureError(
            f"{logged.name} has columns that the table does not have, and no field ids to identify them."
        )
    known = tuple(node for node in base if node.name in stored.names)
    source = known if ids is None else projection.nodes_of(stored, ids)
    nullable = [replace(node, nullable=node.name not in table.primary_key) for node in base]
    same = generation.same_fields(table, history, region_id, logged.flush())
    return projection.plan_projection(source, nullable, wanted, table.primary_key, same)
