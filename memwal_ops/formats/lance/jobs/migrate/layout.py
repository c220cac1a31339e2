"""Migrate a table between the current layouts: shard to region, or back.

Nothing is converted. The rows in regions of the other layout are merged into the base table, as they would be anyway,
and new writers create new regions. The order of steps; the run may be killed after any of them:

1. Merge what these regions list, while their writers continue. A generation that cannot be merged is found here, before
   any writer is fenced.
2. Seal each (:mod:`memwal_ops.formats.lance.log.region_seal`), and merge what that flushed.
3. Publish version V + 1, which records the layout, if at V each such region is sealed and merged. If another
   writer published V + 1 first, everything is planned again.
4. List the regions again: one that a writer created since step 2 is sealed and merged as well. Until then it is safe:
   each region is read, merged and collected by its own layout.

A region without an entry is not sealed on the way from the region layout: its writer may be pylance's, which opened the
table before it had that layout. Timeline if it was: pylance publishes the region's first manifest; the region is sealed
with an entry ``1.lance``; pylance puts ``1.arrow``, is not fenced by the other name, and the rows that it acknowledges
stay in the log of a sealed region. A writer of the region layout looks itself, beside the first entry that it puts.

Progress is never changed: each region's id keeps it, and is never used again.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import CommitConflictError, InvalidUsageError, MemwalOpsError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, check_committable, commit_details
from memwal_ops.formats.lance.generations.backlog import BlockedRegion, read_backlog
from memwal_ops.formats.lance.generations.wal import unflushed_entries, unflushed_rows
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.snapshots import covered_generations, is_external, snapshot_path
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.migrate.report import LayoutRegion, LayoutReport, MigrateDecision
from memwal_ops.formats.lance.layouts import Layout, layout_named, layout_of_region
from memwal_ops.formats.lance.legacy.adoption import CONFIG_KEY
from memwal_ops.formats.lance.log.region_seal import seal_region
from memwal_ops.formats.lance.options import MergeOptions, MigrateOptions
from memwal_ops.formats.lance.regions.transforms import TRANSFORMS
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.memwal_index import with_catchup
from memwal_ops.formats.lance.wire.names import LayoutRecord, with_layout_record
from memwal_ops.storage.api import concurrently
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import known_sum

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

# Each round merges and seals; a second one merges what sealing flushed. More only if writers create new regions.
_MAX_ROUNDS = 20
_CONCURRENT_SEALS = 8
# Keys that pylance's writer can hash; it takes rows with others, and fails when it flushes them.
_SHARD_KEYS = (
    pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
    pa.types.is_large_binary,
)  # fmt: skip


def target_of(table: Table, options: MigrateOptions) -> Layout | None:
    """The layout to which a table of a current layout is to be migrated; None: no such migration was requested.

    Raises ``OptionError``: options for legacy tables were given.
    """
    if not table.log.exists:
        return None
    record = table.layout_record
    if not options.rollback:
        target = None if options.to is None else layout_named(options.to)
    elif record is None or (record.before is None and CONFIG_KEY in table.manifest.manifest.config):
        return None  # it may have been migrated from the legacy layout
    else:
        target = layout_named(record.before or record.layout)
    if target is not None:
        options.refuse_legacy()
    return target


def plan(table: Table, target: Layout, options: MigrateOptions) -> LayoutReport:
    """What :func:`apply` would do; reads only."""
    run = _Run(target, options, table.layout.name)
    _check(table, target)
    opened, blocked = _read(table, target)
    if blocked:
        return run.report(MigrateDecision.BLOCKED, table, opened, blocked)
    nothing = table.layout is target and not opened
    return run.report(MigrateDecision.NOTHING_TO_MIGRATE if nothing else MigrateDecision.PLANNED, table, opened)


def apply(table: Table, target: Layout, options: MigrateOptions, context: RunContext) -> LayoutReport:
    """Migrate. Safe to kill and to repeat; of two at once one publishes, and the other finds it done.

    Raises ``UnsupportedFeatureError``: the table cannot be committed to, or has region specs that the layout cannot
    route by; nothing was changed; ``CommitConflictError``: writers keep claiming or creating regions; or too many
    commit conflicts; ``MemwalOpsError``: as a merge.
    """
    run = _Run(target, options, table.layout.name)
    _check(table, target)
    probe_conditional_writes(table.store)
    retry = CommitRetry()
    handled: dict[UUID, LayoutRegion] = {}
    changed, rounds = False, 0
    while True:
        context.checkpoint()
        opened, blocked = _read(table, target)
        handled = {region.region_id: region for region in opened} | handled
        if opened and not blocked:
            changed, rounds = True, rounds + 1
            if rounds > _MAX_ROUNDS:
                raise CommitConflictError(
                    f"Writers keep creating regions of the {table.layout.name} layout in {table.location.uri}.",
                    remedy="Stop them, and run it again.",
                )
            waiting = tuple(region.region_id for region in opened if region.unmerged)
            blocked = merge.apply(table, MergeOptions(regions=waiting), context).blocked if waiting else ()
            table = table.newest()
            if not blocked:
                _seal(table, opened, context)
        if blocked:
            return run.report(MigrateDecision.BLOCKED, table, tuple(handled.values()), blocked)
        if opened:
            continue
        if table.layout is target:
            done = MigrateDecision.ROLLED_BACK if options.rollback else MigrateDecision.MIGRATED
            decision = done if changed else MigrateDecision.NOTHING_TO_MIGRATE
            return run.report(decision, table, tuple(handled.values()))
        try:
            _publish(table, target, run)
        except CommitLostError as error:
            table = retry.conflict(table, error)
            context.figures["conflicts"] += 1
        else:
            changed, table = True, retry.landed(table)


class _Run:
    """The values that all reports of a run share."""

    def __init__(self, target: Layout, options: MigrateOptions, before: str) -> None:
        self.note = CommitNote("migrate")
        self.rollback, self.before = options.rollback, before
        self._target = target

    def report(
        self,
        decision: MigrateDecision,
        table: Table,
        regions: Sequence[LayoutRegion],
        blocked: Sequence[BlockedRegion] = (),
    ) -> LayoutReport:
        return LayoutReport(
            decision, self.note.run_id, table.location.uri, self.before, self._target.name, self.rollback,
            table.primary_key, tuple(sorted(regions, key=attrgetter("region_id"))), tuple(blocked), table.version,
            self.note.seconds,
        )  # fmt: skip


def _check(table: Table, target: Layout) -> None:
    """Refuse, before any work, a table that could not be merged, published, or written to afterwards."""
    check_committable(table)
    if not target.generations_in_log:
        kinds = {name: table.schema.field(name).type for name in table.primary_key}
        refused = [f"{name} ({kind})" for name, kind in kinds.items() if not any(takes(kind) for takes in _SHARD_KEYS)]
        if refused and table.layout is not target:
            raise UnsupportedFeatureError(
                f"No writer of the shard layout can flush rows of {table.location.uri}: pylance hashes no key of the "
                f"type of {', '.join(refused)}.",
                remedy="Leave the table in the region layout.",
            )
        return
    columns = {column.id: column.name for column in table.manifest.manifest.fields}
    for spec in table.index.region_specs:
        for field in spec.fields:
            unknown = field.HasField("transform") and field.transform not in TRANSFORMS
            others = [columns.get(source, str(source)) for source in field.source_ids]
            others = [column for column in others if column not in table.primary_key]
            if unknown or others:
                why = (
                    f"{field.transform!r} is not among its transforms" if unknown else f"{others[0]} is not in the key"
                )
                raise UnsupportedFeatureError(
                    f"{table.location.uri} has region spec {spec.spec_id}, by which no writer of the region layout can "
                    f"route rows: {why}.",
                    remedy="Leave the table in the shard layout.",
                )


def _read(table: Table, target: Layout) -> tuple[tuple[LayoutRegion, ...], tuple[BlockedRegion, ...]]:
    """The regions of the other layout, and those that cannot be migrated; the manifests are read after the version."""
    shown = {region: layout_of_region(table.store, region) for region in table.regions.region_ids}
    others = [region for region, layout in shown.items() if (layout or table.layout) is not target]
    backlog = read_backlog(table, others)
    blocked = [*backlog.blocked]
    opened: list[LayoutRegion] = []
    for region_id, region in sorted(backlog.regions.items()):
        if any(fault.region_id == region_id for fault in blocked):
            continue
        try:
            unflushed = unflushed_entries(table, region.manifest)
            if region.manifest.sealed and unflushed:
                if unflushed_rows(table, region.manifest):
                    raise _unreachable_rows(region.manifest)
                unflushed = 0
        except MemwalOpsError as error:
            blocked.append(BlockedRegion(region_id, None, error))
            continue
        manifest = region.manifest
        idle = shown[region_id] is None and not (unflushed or manifest.replay_after_wal_id)
        if region.pending or not (manifest.sealed or (idle and table.layout.generations_in_log)):
            waiting = tuple(generation.generation for generation in region.pending)
            current, rows = manifest.current_generation, known_sum(generation.rows for generation in region.pending)
            opened.append(LayoutRegion(region_id, region.merged, current, waiting, rows, unflushed, manifest.sealed))
    return tuple(opened), tuple(blocked)


def _unreachable_rows(manifest: RegionManifest) -> InvalidUsageError:
    return InvalidUsageError(
        f"Region {manifest.region_id} is sealed, and its log has rows behind entry {manifest.replay_after_wal_id or 0} "
        "that no generation has: a writer that ignores fencing put them after the region was sealed.",
        remedy="Copy the region's wal folder to a safe place, and put the rows that are still needed again, with a new "
        "writer. Then move these entries to a place outside the table, and run it again.",
    )


def _seal(table: Table, regions: Sequence[LayoutRegion], context: RunContext) -> None:
    waiting = [region.region_id for region in regions if not region.sealed]
    _ = table.layout  # read once, before the threads use it

    def seal(region_id: UUID) -> None:
        seal_region(table, region_id)
        context.advance("sealing", "regions", 1, total=len(waiting))

    for _ in concurrently(seal, waiting, threads=_CONCURRENT_SEALS):
        context.checkpoint()


def _publish(table: Table, target: Layout, run: _Run) -> int:
    """Publish the next version, which records the layout. Progress, specs and maintained indexes do not change."""
    details = memwal_pb2.MemWalIndexDetails()
    details.CopyFrom(table.index.details)
    # A snapshot has the columns that readers of the old layout expect. pylance counts its buckets in num_regions.
    if details.HasField("inline_snapshots") or (
        is_external(table) and table.store.head(snapshot_path(table.index.uuid)) is not None
    ):
        details.ClearField("inline_snapshots")
        details.num_regions = 0
    if target.unlisted_index_is_caught_up and not table.layout.unlisted_index_is_caught_up:
        unlisted = base_indexes(table).keys() - table.index.index_catchup.keys()
        if unlisted and table.index.merged_generations:
            covered = covered_generations(table)
            details = with_catchup(details, {name: covered[name] for name in unlisted})
    record = LayoutRecord(target.name, None if run.rollback else table.layout.name)
    manifest = with_layout_record(table.manifest.manifest, record)
    manifest.config.pop(CONFIG_KEY, None)  # the legacy index cannot be restored any more
    return commit_details(table, manifest, details.SerializeToString(deterministic=True), run.note)
