"""The migrate job: migrate a table with the legacy MemWAL index to a current layout, or back.

See :mod:`memwal_ops.formats.lance.legacy.adoption` for the order of its steps. Tables of the current layouts are
migrated by :mod:`memwal_ops.formats.lance.jobs.migrate.layout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops import errors
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import RunContext
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, check_rewritable
from memwal_ops.formats.lance.engines.merge.locate import scan_keys
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.jobs.migrate import layout as migrate_layout, report, store as migrate_store
from memwal_ops.formats.lance.legacy import adoption, index
from memwal_ops.formats.lance.legacy.mem_tables import MemTables, with_key
from memwal_ops.formats.lance.legacy.states import Change, set_owner
from memwal_ops.formats.lance.log.region_columns import region_columns
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.formats.lance.wire.legacy_index import MemWal, State
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memwal_ops.formats.lance.jobs.migrate.store import StoreReport
    from memwal_ops.formats.lance.options import MigrateOptions
    from memwal_ops.formats.lance.table import Table

_CLAIM = "memwal-ops migrate"
_FAULTS = (errors.GenerationMissingError, errors.GenerationCorruptError, errors.SchemaProjectionError)
_KEY_CHUNK_BYTES = 16 << 20


@names_damage
def plan(
    table: Table, options: MigrateOptions, context: RunContext | None = None
) -> report.MigrateReport | report.LayoutReport | StoreReport:
    """What :func:`apply` would do. Opens every MemTable that is to be adopted, and changes nothing."""
    if options.to == migrate_store.S3:
        return migrate_store.plan(table, options, context)
    del context
    note = CommitNote("migrate")
    if (target := migrate_layout.target_of(table, options)) is not None:
        return migrate_layout.plan(table, target, options)
    if options.rollback or table.log.exists:
        return _on_migrated(table, options, note)
    if (emptied := index.find_emptied(table)) is not None:
        if not options.restore:
            raise emptied.error("migrate")
        return report.MigrateReport.of(report.MigrateDecision.PLANNED, table, options, note, restored=emptied.source)
    table = _checked(table, options)
    regions = _regions(table, options)
    decision = (
        report.MigrateDecision.BLOCKED if any(region.blocked for region in regions) else report.MigrateDecision.PLANNED
    )
    return report.MigrateReport.of(decision, table, options, note, regions)


@names_damage
def apply(
    table: Table, options: MigrateOptions, context: RunContext | None = None
) -> report.MigrateReport | report.LayoutReport | StoreReport:
    """Migrate, or roll back. Safe to kill and to repeat; of two at once one migrates, and the other finds it done.

    Raises:
        TableCorruptError: the newest version was emptied, and ``options.restore`` is not given.
        NoPrimaryKeyError: the key is not known.
        DuplicateKeysError: the key that was given is not unique.
        CommitConflictError: too many commit conflicts in a row.
        MemwalOpsError: any other refusal; the table is as it was, or has other owners of MemWALs.
    """
    if options.to == migrate_store.S3:
        return migrate_store.apply(table, options, context)
    context = context or RunContext()
    note = CommitNote("migrate")
    retry = CommitRetry()
    restored: int | None = None
    if (target := migrate_layout.target_of(table, options)) is not None:
        return migrate_layout.apply(table, target, options, context)
    while True:
        try:
            if options.rollback:
                return _roll_back(table, options, note)
            if table.log.exists:
                return _on_migrated(table, options, note)
            probe_conditional_writes(table.store)
            if (emptied := index.find_emptied(table)) is not None:
                if not options.restore:
                    raise emptied.error("migrate")
                index.restore_emptied(table, emptied, note)
                restored = emptied.source
                table = retry.landed(table)
                continue
            keyed = _checked(table, options)
            regions = _regions(keyed, options)
            if any(region.blocked for region in regions):
                return report.MigrateReport.of(
                    report.MigrateDecision.BLOCKED, table, options, note, regions, restored=restored
                )
            if (claim := _claim(table)).updated:
                index.publish(table, claim, note)
                table = retry.landed(table)
                continue
            context.checkpoint()
            done, kept = _migrate(keyed, options, note)
            context.figures["conflicts"] += retry.conflicts
            newest = retry.landed(table)
            return report.MigrateReport.of(
                report.MigrateDecision.MIGRATED, newest, options, note, done, restored=restored, kept=kept.path
            )
        except (CommitLostError, errors.ObjectNotFoundError) as error:
            table = retry.conflict_or_expired(table, error)


def _on_migrated(table: Table, options: MigrateOptions, note: CommitNote) -> report.MigrateReport:
    """The report for a table that has the current index: nothing to do, or what a rollback would do."""
    if not options.rollback:
        if options.given():
            options.refuse_legacy()
        return report.MigrateReport.of(report.MigrateDecision.NOTHING_TO_MIGRATE, table, options, note)
    if not table.log.exists:
        raise errors.InvalidUsageError(f"{table.location.uri} has the legacy index: there is nothing to roll back.")
    kept = adoption.read_kept(table)
    return report.MigrateReport.of(report.MigrateDecision.PLANNED, table, options, note, kept=kept.path)


def _roll_back(table: Table, options: MigrateOptions, note: CommitNote) -> report.MigrateReport:
    if not table.log.exists:
        return report.MigrateReport.of(report.MigrateDecision.NOTHING_TO_MIGRATE, table, options, note)
    kept = adoption.read_kept(table)
    probe_conditional_writes(table.store)
    adoption.seal_regions(table, kept)
    adoption.publish_rolled_back(table, kept, note)
    return report.MigrateReport.of(report.MigrateDecision.ROLLED_BACK, table.newest(), options, note, kept=kept.path)


def _checked(table: Table, options: MigrateOptions) -> Table:
    """The table with its key. Refuses, before any work, a table that cannot be published, or an invalid key."""
    check_rewritable(table)
    keyed = with_key(table, options)
    if table.regions.region_ids and not _are_ours(table):
        raise errors.InvalidUsageError(
            f"{table.location.uri} has the legacy index, and _mem_wal/ has regions of another table.",
            remedy="Find out to which table they belong, and move _mem_wal to a place outside this one.",
        )
    if not table.primary_key:
        _refuse_no_key(keyed)
    region_columns(keyed)
    return keyed


def _are_ours(table: Table) -> bool:
    """Whether an earlier migration of this table created all existing regions."""
    ids = {
        adoption.region_id_of(table.store, region, record=False)
        for region in {mem_wal.id.region for mem_wal in index.mem_wals_of(table)}
    }
    return {*table.regions.region_ids} <= ids


def _refuse_no_key(table: Table) -> None:
    """Refuse columns that are to be marked as the key, but have NULL or duplicate values. Memory: the columns."""
    columns = [*table.primary_key]
    with lance_errors("read the keys of", table.location.uri):
        keys = pa.Table.from_batches(
            [batch.select(columns) for batch in scan_keys(table.dataset, columns, _KEY_CHUNK_BYTES, stable=False)],
            schema=pa.schema([table.schema.field(name) for name in columns]),
        )
    for name in columns:
        if keys.column(name).null_count:
            raise errors.InvalidUsageError(
                f"{name} is NULL in {keys.column(name).null_count:,} rows of {table.location.uri}: it is not a key.",
                remedy="Give another --primary-key, or delete these rows first.",
            )
    counts = keys.group_by(columns, use_threads=False).aggregate([([], "count_all")])
    if counts.num_rows < keys.num_rows:
        raise errors.DuplicateKeysError(
            f"{', '.join(columns)} has {keys.num_rows - counts.num_rows:,} values twice or more in "
            f"{table.location.uri}: it is not a key.",
            remedy="Give the columns that identify a row as --primary-key; or remove the duplicate rows first.",
        )


def _claim(table: Table) -> Change:
    """The change that sets this job as the owner of every MemWAL that is not flushed; empty if it is already."""
    mem_wals = index.mem_wals_of(table)
    change = Change()
    for mem_wal in mem_wals:
        if mem_wal.state < State.FLUSHED and mem_wal.owner_id != _CLAIM:
            change |= set_owner(mem_wals, mem_wal.id, _CLAIM)
    return change


def _regions(table: Table, options: MigrateOptions) -> tuple[report.RegionMigration, ...]:
    """The planned migration of each region; opens every MemTable that is to be adopted."""
    mem_wals = index.mem_wals_of(table)
    meanings = index.Meanings(table, options.flushed_means)
    with MemTables(table, options) as mem_tables:
        return tuple(
            _region(table, region, mem_wals, meanings, mem_tables)
            for region in sorted({mem_wal.id.region for mem_wal in mem_wals})
        )


def _region(
    table: Table, region: str, mem_wals: Sequence[MemWal], meanings: index.Meanings, mem_tables: MemTables
) -> report.RegionMigration:
    region_id = adoption.region_id_of(table.store, region, record=False)
    found = index.unmerged(mem_wals, region, meanings)
    if found.fault is not None:
        return report.RegionMigration(region, region_id, 0, 0, (), found.fault)
    adopted: list[report.Adopted] = []
    for mem_wal in found.mem_wals:
        try:
            generation = (
                mem_tables.generation(mem_wal) if mem_wal.state is State.FLUSHED else mem_tables.drained(mem_wal)
            )
        except _FAULTS as error:
            return report.RegionMigration(
                region, region_id, 0, 0, (), index.BlockedMemWal(region, mem_wal.id.generation, error)
            )
        rows = 0 if generation is None else generation.physical_rows
        adopted.append(report.Adopted(mem_wal, mem_wal.id.generation + 1, rows))
    # The next writer continues in an OPEN MemWAL without rows; all others keep their numbers, with or without rows.
    if adopted and adopted[-1].mem_wal.state is State.OPEN and not adopted[-1].rows:
        adopted.pop()
    highest = max([found.done, *(flushed.mem_wal.id.generation for flushed in adopted)]) + 1
    merged = adopted[0].number - 1 if adopted else highest
    return report.RegionMigration(region, region_id, merged, highest + 1, tuple(adopted), None)


def _migrate(
    table: Table, options: MigrateOptions, note: CommitNote
) -> tuple[tuple[report.RegionMigration, ...], adoption.Kept]:
    """Write generations and region manifests, and publish the current kind of details.

    A region's newest manifest is read before the table's version is checked: if another run then publishes a manifest
    for a later version, this run finds the next number taken.
    """
    mem_wals = index.mem_wals_of(table)
    names = sorted({mem_wal.id.region for mem_wal in mem_wals})
    ids = {name: adoption.region_id_of(table.store, name, record=True) for name in names}
    before = {
        name: adoption.newest_manifest(table, region_id) for name, region_id in ids.items() if region_id is not None
    }
    if table.newest().version != table.version:
        raise CommitLostError(f"{table.location.uri} was changed while it was migrated.")
    columns = region_columns(table)
    plans: dict[str, adoption.RegionPlan] = {}
    manifests: dict[str, int] = {}
    done: list[report.RegionMigration] = []
    with MemTables(table, options) as mem_tables:
        for region in _regions(table, options):
            region_id = ids[region.region]
            assert region_id is not None  # noqa: S101 - it was recorded
            adopter = adoption.Adopter(table, region_id, columns, options.layout)
            flushed = []
            for adopted in region.adopted:
                opened = mem_tables.generation if adopted.mem_wal.state is State.FLUSHED else mem_tables.drained
                generation = opened(adopted.mem_wal) or mem_tables.empty(adopted.mem_wal)
                flushed.append(adopter.adopt(generation, adopted.number, adoption.next_epoch(before[region.region])))
            made = adoption.RegionPlan(region_id, region.merged, region.current, tuple(flushed))
            plans[region.region] = made
            manifests[region.region] = adoption.publish_region(table, made, before[region.region], adopter.last_entry)
            done.append(region.with_paths(region_id, flushed))
    kept = adoption.keep(table, plans, manifests, options.layout)
    adoption.publish_migrated(table, plans, kept, note)
    return tuple(done), kept
