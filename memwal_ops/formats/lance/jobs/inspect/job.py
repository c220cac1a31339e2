"""The inspect job: report a table's state, its backlog, and its faults. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.context import RunContext
from memwal_ops.core.outlook import NextRun, next_run, rates_of
from memwal_ops.errors import MemwalOpsError, ObjectNotFoundError
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.files.datasets import branch_folder, lance_errors, list_branches
from memwal_ops.formats.lance.generations.backlog import BlockedRegion, RegionBacklog, backlog_of, with_listed_log
from memwal_ops.formats.lance.generations.generation_files import CheckedBacklog, GenerationFiles, checked_backlog
from memwal_ops.formats.lance.generations.wal import log_fault, unflushed_entries
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.index_faults import fault_of, last_writer
from memwal_ops.formats.lance.jobs.catchup.tiers import catchup_figures
from memwal_ops.formats.lance.jobs.compact.planning import Planner, compaction_debt, dropped_bytes
from memwal_ops.formats.lance.jobs.inspect import report
from memwal_ops.formats.lance.options import DEFAULT_INSPECT_LIMIT, CompactOptions, InspectOptions
from memwal_ops.formats.lance.regions.manifests import REGION_FAULTS
from memwal_ops.formats.lance.retention.damage import check_versions, names_damage
from memwal_ops.formats.lance.wire.memwal_index import MEMWAL_INDEX_NAME
from memwal_ops.formats.lance.wire.names import parse_version_manifest_name
from memwal_ops.formats.lance.wire.region_manifest import MERGED_ELSEWHERE
from memwal_ops.storage.api import LinkError, ObjectMeta, results_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from memwal_ops.core.past_runs import PastRuns
    from memwal_ops.core.protocols import TableBranch
    from memwal_ops.formats.lance.table import Table

_CONCURRENT_REGIONS = 16
_EARLIER_VERSIONS = 16


@names_damage
def plan(
    table: Table, options: InspectOptions | None = None, context: RunContext | None = None
) -> report.TableInspection:
    """One version of a table, and the newest state of its regions."""
    context, options = context or RunContext(), options or InspectOptions()
    found = inspect(table, limit=options.limit)
    branches = _branches(table, datetime.now(UTC) - options.stale)
    return replace(
        found,
        branches=branches,
        next_runs=_next_runs(table, context.past_runs),
        dropped=dropped_bytes(table),
        dropped_indexes=_dropped_indexes(table),
        merged_elsewhere=_merged_elsewhere(table, found),
    )


def _merged_elsewhere(table: Table, found: report.TableInspection) -> report.MergedElsewhere | None:
    """The other program that merges the table, too, and what it did, where a job found it or the regions show it."""
    program = dict(table.manifest.manifest.config).get(MERGED_ELSEWHERE)
    dropped = [region.fault.program for region in found.regions if region.fault and region.fault.drops]
    if not found.regions or not (dropped or version_files.is_shared(table.manifest)):
        return None
    from memwal_ops.formats.lance.jobs.drained import overwritten  # noqa: PLC0415 - where another program merges

    older = overwritten(table, [region.backlog.manifest for region in found.regions if region.backlog])
    if program is None and not dropped and not older:
        return None
    return report.MergedElsewhere(program or next(iter(dropped), table.history.program(table.version)), older)


apply = plan


def inspect(table: Table, *, limit: int = DEFAULT_INSPECT_LIMIT) -> report.TableInspection:
    """One version of a table, and the newest state of its regions.

    Args:
        limit: the maximum of generations, and of strays, in the report; missing and unmerged generations come first.

    Requests: those of the backlog; for each region with unmerged generations a listing, and one for each of these; and
    for every region those to find the end of its log, and one or two for each of the first entries behind its flush.
    """
    table = with_listed_log(table)
    checked = checked_backlog(table, backlog_of(table))
    backlog = checked.backlog
    faults = {fault.region_id: fault for fault in backlog.blocked}
    region_ids = sorted({*backlog.regions, *faults})
    read = map(backlog.regions.get, region_ids)
    logs = results_of(lambda region: _unflushed(table, region), read, threads=_CONCURRENT_REGIONS)
    regions = tuple(
        _region(region_id, backlog.regions.get(region_id), log, faults.get(region_id), checked, limit)
        for region_id, log in zip(region_ids, logs, strict=True)
    )
    regions = _bounded(regions, limit)
    if (refusal := table.refusal) is not None:
        regions = _left_over(table, refusal)
    versions, writer = check_versions(table), last_writer(table)
    fragments = len(table.manifest.manifest.fragments)
    indexes = index_states(table, table.index.index_catchup)
    return report.TableInspection(table, _rows(table), fragments, regions, indexes, backlog, versions, limit, writer)


def _left_over(table: Table, refusal: MemwalOpsError) -> tuple[report.InspectedRegion, ...]:
    """The regions of a table that was at this place before; what of them is merged is not known."""

    def read(region_id: UUID) -> report.InspectedRegion:
        try:
            backlog = RegionBacklog(table.region(region_id).latest(), 0, ())
        except REGION_FAULTS as error:
            return report.InspectedRegion(region_id, None, {}, (), None, BlockedRegion(region_id, None, error))
        return report.InspectedRegion(region_id, backlog, {}, (), None, BlockedRegion(region_id, None, refusal))

    return tuple(results_of(read, sorted(table.regions.region_ids), threads=_CONCURRENT_REGIONS))


def _dropped_indexes(table: Table) -> report.DroppedIndexes | None:
    """The indexes that an overwrite dropped, if the table has none since; up to 16 earlier versions are read."""
    later = table.manifest
    for version in range(table.version - 1, max(0, table.version - 1 - _EARLIER_VERSIONS), -1):
        if any(one.name != MEMWAL_INDEX_NAME for one in later.index_entries):
            return None
        if (earlier := table.manifest_of(version)) is None:
            return None
        transaction = version_files.transaction_of(table.store, later)
        if transaction is not None and version_files.operation_of(transaction) == "overwrite":
            names = {one.name for one in earlier.index_entries} - {MEMWAL_INDEX_NAME}
            return report.DroppedIndexes(version + 1, tuple(sorted(names))) if names else None
        later = earlier
    return None


def _rows(table: Table) -> int:
    fragments = table.manifest.manifest.fragments
    if all(one.physical_rows for one in fragments):
        return sum(one.physical_rows - one.deletion_file.num_deleted_rows for one in fragments)
    with lance_errors("read the fragments of", table.location.uri):  # older releases did not record their rows
        return int(table.dataset.count_rows())


def _bounded(regions: tuple[report.InspectedRegion, ...], limit: int) -> tuple[report.InspectedRegion, ...]:
    ranked = [
        (report.STATES.index(generation.state), at, generation)
        for at, region in enumerate(regions)
        for generation in region.generations
    ]
    kept: dict[int, list[report.GenerationState]] = {}
    for _, at, generation in sorted(ranked, key=lambda entry: entry[:2])[:limit]:
        kept.setdefault(at, []).append(generation)
    return tuple(
        replace(
            region, generations=tuple(sorted(kept.get(at, ()), key=lambda kept_state: kept_state.flushed.generation))
        )
        for at, region in enumerate(regions)
    )


def _unflushed(table: Table, region: RegionBacklog | None) -> tuple[int | None, MemwalOpsError | None]:
    """The number of a region's log entries that are in no generation, and why its log cannot be replayed."""
    if region is None:
        return None, None
    try:
        unflushed = unflushed_entries(table, region.manifest)
        return unflushed, log_fault(table, region.manifest, unflushed)
    except LinkError as error:
        return None, error


def _region(
    region_id: UUID,
    backlog: RegionBacklog | None,
    log: tuple[int | None, MemwalOpsError | None],
    fault: BlockedRegion | None,
    checked: CheckedBacklog,
    limit: int,
) -> report.InspectedRegion:
    """The region's state, with the first fault that would block it, as far as it shows without reading rows."""
    unflushed, error = log
    if fault is None and error is not None:
        fault = BlockedRegion(region_id, None, error)
    files = checked.files.get(region_id)
    counts, generations = _generations(backlog, files, limit)
    roots = () if files is None else files.foreign_roots.values()
    return report.InspectedRegion(region_id, backlog, counts, generations, unflushed, fault, next(iter(roots), None))


def _generations(
    region: RegionBacklog | None, files: GenerationFiles | None, limit: int
) -> tuple[Mapping[str, int], tuple[report.GenerationState, ...]]:
    """The number of generations per state, and the first ``limit`` of each."""
    if region is None:
        return {}, ()
    counts: Counter[str] = Counter()
    first: list[report.GenerationState] = []
    for flushed in region.manifest.flushed_generations:
        state = "merged" if flushed.generation <= region.merged or files is None else files.state(flushed.generation)
        counts[state] += 1
        if counts[state] <= limit:
            first.append(report.GenerationState(flushed, state))
    return counts, tuple(first)


def index_states(table: Table, recorded: Mapping[str, Mapping[UUID, int]]) -> tuple[report.IndexState, ...]:
    """The state of each base index; ``recorded`` is the table's ``index_catchup``."""
    states = []
    for index in base_indexes(table).values():
        covers = coverage(index.covered, table.manifest)
        missing, entry = len(covers.uncovered), recorded.get(index.name, {})
        covered, fault = covers.fragments - missing, fault_of(table, index)
        states.append(report.IndexState(index.name, index.type, covered, missing, covers.uncovered_rows, entry, fault))
    return tuple(states)


def _next_runs(table: Table, past: PastRuns) -> Mapping[str, NextRun]:
    """What the next runs of these jobs cost, by their names; nothing of one that does not apply, or is refused."""
    found: dict[str, NextRun] = {}
    for name, figures in {"compact": compaction_debt(table), "catchup": catchup_figures(table)}.items():
        spec = table.jobs.get(name)
        if spec is not None and figures:
            why = Planner(table, CompactOptions()).why() if name == "compact" else None
            run = next_run(spec, figures, rates_of(name, past(table.location.address, name)), why)
            found |= {} if run is None else {name: run}
    return found


def _branches(table: Table, before: datetime) -> tuple[report.BranchState, ...]:
    """The branches of a table that was opened at its root, ascending by name.

    Requests: a listing of their records; for each branch a request and a listing, for one that was written last before
    ``before`` two of each. Of a table opened at a branch, or of an export, nothing is read.
    """
    if table.branch_name is not None or table.location.files is not None:
        return ()
    return tuple(_branch(table, record, before) for record in list_branches(table.store))


def _branch(table: Table, record: TableBranch, before: datetime) -> report.BranchState:
    folder = branch_folder(record.name)
    named = (
        (parse_version_manifest_name(meta.path.rpartition("/")[2]), meta)
        for meta in table.store.list(f"{folder}/{version_files.VERSIONS_FOLDER}")
    )
    versions = {name.version: meta for name, meta in named if name is not None and not name.detached}
    if not versions:
        return report.BranchState(record, None, 0, None, record.created < before)
    newest = versions[max(versions)]
    state = report.BranchState(
        record, max(versions), len(versions), newest.last_modified, newest.last_modified < before
    )
    if not state.stale:
        return state
    objects = list(table.store.list(folder))
    kept = _kept_bytes(table, newest, objects, folder)
    size = sum(meta.size for meta in objects)
    return report.BranchState(record, state.version, state.versions, state.written, state.stale, size, kept)


def _kept_bytes(table: Table, newest: ObjectMeta, objects: Iterable[ObjectMeta], folder: str) -> int:
    try:
        manifest = version_files.decode_named(newest.path, table.store.get(newest.path)).manifest
    except ObjectNotFoundError:
        return 0  # expired since it was listed
    below = f"{folder}/{version_files.DATA_FOLDER}/"
    elsewhere = {meta.path.removeprefix(below) for meta in objects if meta.path.startswith(below)}
    elsewhere |= {file.path for fragment in table.manifest.manifest.fragments for file in fragment.files}
    files = {file.path: file.file_size_bytes for fragment in manifest.fragments for file in fragment.files}
    return sum(size for path, size in files.items() if path not in elsewhere)
