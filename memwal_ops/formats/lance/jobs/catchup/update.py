"""The catch-up job: bring the base table's indexes up to the merged generations, one after the other.

For each index: read the progress, let pylance build the missing segments without publishing them, check
that they cover the fragments and that a vector index kept its codebook, publish them as exactly the
next version together with the index's entry in ``index_catchup``. A merge that is published in between does not
invalidate the build: it stays correct, and the next run adds the rest.

An entry in ``index_catchup`` is computed from the fragments, whatever it was before: all merged generations if
every fragment is covered; else those that were merged in the version that the index was built on,
if the index still covers that version; else none.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import (
    CodebookChangedError,
    CommitStateUnknownError,
    IndexesBehindError,
    InvalidUsageError,
    InvariantViolatedError,
    LeaseLostError,
    MemwalOpsError,
    ObjectNotFoundError,
    RegionReplacedError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, IndexChange, check_rewritable
from memwal_ops.formats.lance.commit.index_build import IndexBuild, create_index, discard, update_index
from memwal_ops.formats.lance.commit.rebased_commit import drop_index, lacks_columns
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.generations.backlog import Blocked, backlog_of, with_listed_log
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, base_indexes, coverage, covered_by
from memwal_ops.formats.lance.indexes.catchup_entries import catchup_entry, stale_entries
from memwal_ops.formats.lance.indexes.codebook import Codebook, read_codebook
from memwal_ops.formats.lance.indexes.index_faults import fault_of
from memwal_ops.formats.lance.indexes.index_refusals import DotProductIndexError, refusal
from memwal_ops.formats.lance.jobs.catchup.publishing import publish_build, publish_change, publish_rebased
from memwal_ops.formats.lance.jobs.catchup.report import CatchupDecision, CatchupReport, IndexReport, Partitions
from memwal_ops.formats.lance.retention.damage import name_damage
from memwal_ops.formats.lance.retention.leftovers import sweep_leftovers
from memwal_ops.formats.lance.wire.memwal_index import with_catchup
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import lance

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.options import CatchupOptions
    from memwal_ops.formats.lance.table import Table

_ARGUMENTS: Mapping[str, Literal["BTREE", "ZONEMAP", "BLOOMFILTER"]] = {
    "BTree": "BTREE",
    "ZoneMap": "ZONEMAP",
    "BloomFilter": "BLOOMFILTER",
}
"""The types of index that may lack rows, as arguments of pylance."""


@dataclass(slots=True)
class _Run:
    """State of a run; ``table`` is the newest version that it has read.

    ``keep_codebook``: build vector indexes anew with their codebook where pylance cannot add rows to them.
    """

    table: Table
    options: CatchupOptions
    note: CommitNote
    keep_codebook: bool = False
    retry: CommitRetry = field(default_factory=CommitRetry)


def plan_catch_up(table: Table, options: CatchupOptions) -> CatchupReport:
    """Report what :func:`catch_up` would do, without changes: decision ``dry_run``."""
    started = time.monotonic()
    _check_options(table, options)
    check_rewritable(table)
    reports = []
    for index in _wanted(table, options):
        need = _need(table, index, options)
        refused = _refused(table, index, options) if need == "update" else None
        if need == "unchanged":
            need = _next_need(table, index, options)
        decision = "failed" if refused else "would_update" if need == "update" else need
        reports.append(replace(_report(table, table, index.name, options, decision), error=refused))
    seconds = time.monotonic() - started
    return CatchupReport(
        CatchupDecision.DRY_RUN,
        str(uuid.uuid4()),
        tuple(reports),
        table.version,
        0,
        seconds,
        _replaced(table),
        table.memwal is None,
    )


def catch_up(
    table: Table, options: CatchupOptions, context: RunContext, *, keep_codebook: bool = False
) -> CatchupReport:
    """Bring the indexes up to date; ``keep_codebook`` as in :class:`_Run`."""
    started = time.monotonic()
    _check_options(table, options)
    check_rewritable(table)
    run = _Run(table, options, CommitNote.new("catchup"), keep_codebook)
    wanted = [index.name for index in _wanted(table, options)]
    if any(_next_need(table, index, options) == "update" for index in _wanted(table, options)):
        probe_conditional_writes(table.store)
        if table.listed.has_detached:
            sweep_leftovers(table)
    outcomes = []
    if wanted:
        run.table = table.newest()
    for name in wanted:
        context.checkpoint()
        outcomes.append(_catch_up(run, name))
        context.advance("catching up", "indexes", total=len(wanted))
    recorded = _record(run, wanted)
    reports = [_finish(run, outcome, recorded=outcome.name in recorded) for outcome in outcomes]
    decision = _decide(reports)
    context.figures["conflicts"] += run.retry.conflicts
    context.figures["indexes_updated"] += sum(report.decision == "updated" for report in reports)
    return CatchupReport(
        decision=decision,
        run_id=run.note.run_id,
        indexes=tuple(reports),
        version=run.table.version,
        lost_races=run.retry.conflicts,
        seconds=time.monotonic() - started,
        blocked=_replaced(run.table),
        plain=run.table.memwal is None,
    )


def _check_options(table: Table, options: CatchupOptions) -> None:
    if options.retrain and table.memwal is not None:
        raise InvalidUsageError(
            f"{table.location.uri} has a log: distances from unmerged generations, which have the old centroids, could "
            "not be compared with those from retrained indexes.",
            remedy="Use --migrate-codebook OLD NEW.",
        )


def _replaced(table: Table) -> tuple[Blocked, ...]:
    """Regions that reuse the id of a merged region: ``index_catchup`` entries under this id belong to the old one."""
    if not table.index.merged_generations:
        return ()
    table = with_listed_log(table)
    regions = table.index.merged_generations.keys() & set(table.regions.region_ids)
    blocked = backlog_of(table, regions).blocked if regions else ()
    return tuple(fault for fault in blocked if isinstance(fault.error, RegionReplacedError))


def _decide(reports: Iterable[IndexReport]) -> CatchupDecision:
    decisions = {report.decision for report in reports}
    if not decisions:
        return CatchupDecision.NO_INDEXES
    if "failed" in decisions:
        return CatchupDecision.INCOMPLETE
    return CatchupDecision.CAUGHT_UP if decisions & {"updated", "recorded"} else CatchupDecision.UNCHANGED


def _wanted(table: Table, options: CatchupOptions) -> tuple[BaseIndex, ...]:
    indexes = base_indexes(table)
    unknown = sorted(set(options.indexes) - set(indexes))
    if unknown:
        raise InvalidUsageError(
            f"{table.location.uri} has no index {', '.join(unknown)}.",
            remedy=f"Its indexes: {', '.join(indexes) or 'none'}.",
        )
    return tuple(indexes[name] for name in (sorted(set(options.indexes)) or indexes))


def _need(table: Table, index: BaseIndex, options: CatchupOptions) -> str:
    """The decision for an index: update, below_threshold or unchanged."""
    covers = coverage(index.covered, table.manifest)
    if len(index.segments) > options.max_segments or (options.retrain and index.is_vector) or _lacks_rows(table, index):
        return "update"
    if covers.complete:
        return "unchanged"
    return "below_threshold" if covers.uncovered_rows < options.min_uncovered_rows else "update"


def _lacks_rows(table: Table, index: BaseIndex) -> bool:
    """Whether an index lacks rows that it claims to cover: it is built anew, as an update would keep the gap."""
    fault = fault_of(table, index)
    return fault is not None and fault.proven


def _refused(table: Table, index: BaseIndex, options: CatchupOptions) -> MemwalOpsError | None:
    """The error with which an update of the index would fail before it began; for a plan."""
    try:
        return refusal(table, index, options)
    except UnsupportedFeatureError as error:
        return error


def _next_need(table: Table, index: BaseIndex, options: CatchupOptions) -> str:
    """As :func:`_need`; a stale entry in ``index_catchup`` counts as an update."""
    need = _need(table, index, options)
    return "update" if need != "update" and stale_entries(table, [index.name]) else need


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result for one index: the version at its start, the decision, and the error if it failed."""

    name: str
    first: Table
    decision: str
    error: MemwalOpsError | None
    seconds: float


def _catch_up(run: _Run, name: str) -> _Outcome:
    """Catch up one index; an error of this index is part of its outcome."""
    started = time.monotonic()
    first = run.table
    error: MemwalOpsError | None = None
    try:
        decision = _update(run, name)
    except (CommitStateUnknownError, LeaseLostError):
        raise
    except MemwalOpsError as failed:
        failure = name_damage(first, failed)
        get_logger(__name__).warning("index_failed", table=first.location.uri, index=name, error=str(failure))
        decision, error = "failed", failure
        run.table = run.table.newest()
    return _Outcome(name, first, decision, error, time.monotonic() - started)


def _finish(run: _Run, outcome: _Outcome, *, recorded: bool) -> IndexReport:
    decision = "recorded" if recorded and outcome.decision == "unchanged" else outcome.decision
    report = _report(outcome.first, run.table, outcome.name, run.options, decision)
    return replace(report, error=outcome.error, seconds=outcome.seconds)


def _report(first: Table, last: Table, name: str, options: CatchupOptions, decision: str) -> IndexReport:
    """The report of one index, from its states in two versions."""
    before, after = base_indexes(first).get(name), base_indexes(last).get(name)
    covers = coverage(frozenset() if before is None else before.covered, first.manifest)
    latest = after or before
    return IndexReport(
        name=name,
        type="unknown" if latest is None else latest.type,
        uncovered_fragments=len(covers.uncovered),
        uncovered_rows=covers.uncovered_rows,
        segments=0 if after is None else len(after.segments),
        before=first.index.index_catchup.get(name, {}),
        after=last.index.index_catchup.get(name, {}),
        decision=decision if after is not None else "dropped",
        partitions=None if after is None else _partitions(last, after, options),
        error=None,
        seconds=0.0,
    )


def _partitions(table: Table, index: BaseIndex, options: CatchupOptions) -> Partitions | None:
    if not index.is_vector:
        return None
    try:
        segments = [read_codebook(table, entry).sizes for entry in index.segments]
    except MemwalOpsError:
        return None  # only for the report; where the codebook is needed, this is an error
    sizes = [sum(rows) for rows in zip_longest(*segments, fillvalue=0)]
    return Partitions(len(sizes), max(sizes), min(sizes), options.retrain_imbalance_threshold) if sizes else None


def _update(run: _Run, name: str) -> str:
    """Build and publish until the index covers the version that it was built on; return the decision."""
    published = False
    while True:
        table = run.table
        index = base_indexes(table).get(name)
        if index is None:
            return "dropped"
        try:
            if table.memwal is None and lacks_columns(table, index):
                run.table = drop_index(table, name)
                continue
            if published:
                return "updated"
            need = _need(table, index, run.options)
            if need != "update":
                return need
            built = _build_and_publish(run, table, index)
            if built != "updated":
                return built
            if table.memwal is not None:
                return "updated"
            published = True  # pylance may have rebased it over the removal of its column
        except (CommitLostError, ObjectNotFoundError) as error:
            newest = run.table.newest()
            if isinstance(error, ObjectNotFoundError) and newest.version == table.version:
                raise  # not a file of an old version that was cleaned up meanwhile
            run.table = run.retry.conflict(newest, error)


def _build_and_publish(run: _Run, table: Table, index: BaseIndex) -> str:
    """Build once and publish; return the decision: updated, or why there was nothing to publish."""
    refused = refusal(table, index, run.options)
    if refused is not None and not (run.keep_codebook and isinstance(refused, DotProductIndexError)):
        raise refused
    retrain = run.options.retrain and index.is_vector and table.memwal is None
    emptied = index.covered.isdisjoint(fragment.id for fragment in table.manifest.manifest.fragments)
    codebooks = None if retrain or (emptied and table.memwal is None) else _codebooks(table, index)
    build = _build_anew(table, index) if _lacks_rows(table, index) else None
    if codebooks and (emptied or refused is not None):
        build = _build_with_codebook(table, index)
    if build is None:
        build = update_index(table, index.name, merge=_segments_to_merge(index, run.options), retrain=retrain)
    if build is None:
        _refuse_unbuilt(table, index)
        return "unchanged"
    if codebooks is None and not build.covered:  # there are too few rows to train with, and the segment is empty
        discard(table, build)
        return "below_threshold"
    kept = [entry for entry in index.segments if UUID(bytes=entry.uuid.uuid) not in build.removed]
    covered = build.covered | covered_by(kept)
    try:
        _check(table, index, build, covered, codebooks)
    except MemwalOpsError:
        discard(table, build)
        raise

    if table.memwal is None:
        run.table = publish_rebased(table, index.name, build, run.note, run.retry)
        return "updated"

    def change(newest: Table) -> IndexChange:
        generations = catchup_entry(newest, covered, progress_when_built=table.index.merged_generations)
        details = with_catchup(newest.index.details, {index.name: generations})
        return IndexChange(details, added=build.added, removed=build.removed)

    run.table = publish_build(table, index.name, build, change, run.note, run.retry)
    return "updated"


def _refuse_unbuilt(table: Table, index: BaseIndex) -> None:
    """Raise if the index is behind although pylance built nothing: it silently skips an index with missing files."""
    covers = coverage(index.covered, table.manifest)
    if covers.uncovered_rows:
        raise IndexesBehindError(
            f"pylance built nothing for index {index.name} and raised no error, although the index does not cover "
            f"{covers.uncovered_rows:,} rows in fragments {sorted(covers.uncovered)}.",
            remedy="Its files may be missing or damaged. Merge all, then create it again (runbooks/index-behind.md).",
        )


def _segments_to_merge(index: BaseIndex, options: CatchupOptions) -> int | None:
    """How many segments the new rows are merged with; see :func:`update_index`.

    A vector index gets a new segment each time, until there are too many; a scalar index is merged
    as pylance does it, into one.
    """
    if len(index.segments) >= options.max_segments:
        return len(index.segments)
    return 0 if index.is_vector else None


def _build_anew(table: Table, index: BaseIndex) -> IndexBuild | None:
    """Build a scalar index anew, with pylance's default parameters: an update would keep what its files have."""
    with lance_errors("read the indexes of", table.location.uri):
        described = next(one for one in table.dataset.describe_indices() if one.name == index.name)
    (column,) = described.field_names

    def create(dataset: lance.LanceDataset) -> None:
        dataset.create_scalar_index(column, _ARGUMENTS[index.type], name=index.name, replace=True)

    return create_index(table, index.name, create)


def _build_with_codebook(table: Table, index: BaseIndex) -> IndexBuild | None:
    """Build a vector index anew with its current codebook; None if pylance accepts no codebook of that kind.

    Where all rows under an index were deleted or moved, pylance's update of it trains another one.
    """
    from memwal_ops.formats.lance.log.generation_indexes import planned_index  # noqa: PLC0415 - rarely needed

    try:
        like = planned_index(table, index)
    except UnsupportedFeatureError:
        return None
    (column,) = like.columns
    arguments = {"name": index.name, "replace": True, **like.arguments}
    return create_index(table, index.name, lambda dataset: dataset.create_index(column, **arguments))


def _codebooks(table: Table, index: BaseIndex) -> frozenset[Codebook]:
    return frozenset(read_codebook(table, entry) for entry in index.segments) if index.is_vector else frozenset()


def _check(
    table: Table, index: BaseIndex, build: IndexBuild, covered: frozenset[int], before: frozenset[Codebook] | None
) -> None:
    """Refuse a build that does not cover its version, or has another codebook (``before`` is None: that is allowed)."""
    uncovered = coverage(covered, table.manifest).uncovered
    if uncovered:
        raise InvariantViolatedError(
            f"pylance updated index {index.name}, but it does not cover fragments {sorted(uncovered)}."
        )
    if before is None:
        return
    after = frozenset(read_codebook(table, entry) for entry in build.added) if index.is_vector else frozenset()
    if after - before:
        old, new = (sorted(codebook.partitions for codebook in codebooks) for codebooks in (before, after))
        raise CodebookChangedError(
            f"pylance changed the codebook of index {index.name} (partitions before {old}, after {new}); "
            "that build was not published."
        )


def _record(run: _Run, names: Collection[str]) -> frozenset[str]:
    """Make ``index_catchup`` agree with the fragments, in one commit; return the indexes with stale entries."""
    stale: dict[str, dict[UUID, int]] = {}

    def change(table: Table) -> IndexChange | None:
        stale.clear()
        stale.update(stale_entries(table, names))
        return IndexChange(with_catchup(table.index.details, stale)) if stale else None

    run.table = publish_change(run.table, change, run.note, run.retry)
    return frozenset(stale)
