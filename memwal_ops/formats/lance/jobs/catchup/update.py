"""The catch-up job: bring the base table's indexes up to the merged generations, one after the other.

For each index: read the progress, let pylance build the missing segments without publishing them, check that they cover
the fragments and that a vector index kept its codebook, publish them as exactly the next version together with the
index's entry in ``index_catchup``. A merge that is published in between does not invalidate the build: it stays
correct, and the next run adds the rest.

An entry in ``index_catchup`` is computed from the fragments, whatever it was before: all merged generations if every
fragment is covered; else those that were merged in the version that the index was built on, if the index still covers
that version; else none.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.formats.lance.commit.commit import (
    CommitLostError,
    CommitNote,
    IndexChange,
    check_rewritable,
    publish_change,
)
from memwal_ops.formats.lance.commit.index_build import IndexBuild, discard
from memwal_ops.formats.lance.commit.rebased_commit import drop_index, lacks_columns
from memwal_ops.formats.lance.generations.backlog import BlockedRegion, backlog_of, with_listed_log
from memwal_ops.formats.lance.indexes import codebook, index_arguments, index_faults
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, base_indexes, coverage
from memwal_ops.formats.lance.indexes.snapshots import catchup_entry, stale_entries
from memwal_ops.formats.lance.jobs.answers_guard import AnswerComparison, compare_answers, refuse_worse
from memwal_ops.formats.lance.jobs.catchup import building, tiers
from memwal_ops.formats.lance.jobs.catchup.publishing import publish_build, publish_rebased
from memwal_ops.formats.lance.jobs.catchup.report import CatchupDecision, CatchupReport, IndexReport, Partitions
from memwal_ops.formats.lance.retention.damage import name_damage
from memwal_ops.formats.lance.retention.garbage import sweep_leftovers
from memwal_ops.formats.lance.wire.memwal_index import with_catchup
from memwal_ops.log import get_logger
from memwal_ops.storage.errors import NotSupportedError
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from uuid import UUID

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.options import CatchupOptions
    from memwal_ops.formats.lance.policy import SegmentDebt
    from memwal_ops.formats.lance.table import Table


@dataclass(slots=True)
class _Run:
    """State of a run. ``table`` is the newest version that it has read.

    By index, ``methods``: how it was built; ``compared``: how it answered; ``reasons``: why it was trained anew;
    ``written``: the bytes of its new segments, also of those that were not published.
    """

    table: Table
    options: CatchupOptions
    note: CommitNote
    context: RunContext
    builders: building.Builders
    retry: CommitRetry = field(default_factory=CommitRetry)
    methods: dict[str, str] = field(default_factory=dict)
    compared: dict[str, AnswerComparison] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    written: Counter[str] = field(default_factory=Counter)


def plan_catch_up(table: Table, options: CatchupOptions, context: RunContext) -> CatchupReport:
    """Report what :func:`catch_up` would do, without changes: decision ``dry_run``."""
    note = CommitNote("catchup")
    _check_options(table, options)
    check_rewritable(table)
    if options.engine == "spark":
        from memwal_ops.core.spark.session import check_environment  # noqa: PLC0415 - Spark only

        check_environment()
    wanted = {index.name: index for index in _wanted(table, options)}
    debts = tiers.debts_of(table, options)
    builders = building.Builders(options, context)
    reports: list[IndexReport] = []
    for name in _in_order(table, wanted, options):
        report = _planned(table, wanted[name], debts[name], builders, options, context)
        written = sum(report.bytes_written for report in reports)
        if report.decision == "would_update" and _exceeds(options, written, report.bytes_written):
            why = "The run would use its --max-bytes; the next run would continue."
            report = replace(report, decision="over_budget", why=why, method=None, engine=None, bytes_written=0)
        reports.append(report)
    updated = [wanted[report.name].covered for report in reports if report.decision == "would_update"]
    return CatchupReport(
        decision=CatchupDecision.DRY_RUN,
        rows=coverage(frozenset.intersection(*updated), table.manifest).uncovered_rows if updated else 0,
        run_id=note.run_id,
        indexes=tuple(reports),
        version=table.version,
        seconds=note.seconds,
        blocked=_replaced(table),
        keeps_codebooks=table.log.keeps_codebooks,
    )


def _planned(
    table: Table,
    index: BaseIndex,
    debt: SegmentDebt,
    builders: building.Builders,
    options: CatchupOptions,
    context: RunContext,
) -> IndexReport:
    need = _need(table, index, options)
    method, why = _method(table, index, options, context)
    if method != "update":
        need = "update"
    error = building.refused(table, index, options, method) if need == "update" else None
    if need == "unchanged":
        need = _next_need(table, index, options)
    decision = "failed" if error else "would_update" if need == "update" else need
    built = method if need == "update" else None
    report = replace(_report(table, table, index.name, options, decision), error=error, why=why, method=built)
    if decision != "would_update":
        return report
    arguments = building.rebuild_arguments(table, index) if method == "rebuild" else None
    choice, _ = builders.choose(table, index, method, arguments)
    return replace(report, bytes_written=_would_write(index, method, debt), engine=choice)


def _would_write(index: BaseIndex, method: str, debt: SegmentDebt) -> int:
    return debt.bytes if method == "update" else max(debt.bytes, tiers.bytes_of(index.segments))


def catch_up(table: Table, options: CatchupOptions, context: RunContext) -> CatchupReport:
    """Bring the indexes up to date, or build them anew."""
    note = CommitNote("catchup")
    _check_options(table, options)
    check_rewritable(table)
    if table.is_at_rest(options.rest_after):
        options = replace(options, rest_after=timedelta(0))  # also after its own commits
    with building.Builders(options, context) as builders:
        return _catch_up_all(_Run(table, options, note, context, builders))


def _catch_up_all(run: _Run) -> CatchupReport:
    table, options, context = run.table, run.options, run.context
    wanted = [index.name for index in _wanted(table, options)]
    may_write = any(_next_need(table, index, options) == "update" for index in _wanted(table, options))
    if may_write or options.retrain == building.AUTO:
        probe_conditional_writes(table.store)
        if table.listed.has_detached:
            sweep_leftovers(table)
    outcomes = []
    if wanted:
        run.table = table.newest()
    for name in _in_order(run.table, wanted, options):
        context.checkpoint()
        why = "The run has used its --max-bytes; the next run continues."
        left = _Outcome(name, run.table, "over_budget", None, 0.0, why=why)
        outcomes.append(_catch_up(run, name) if _in_budget(run, name) else left)
        context.advance("catching up", "indexes", total=len(wanted))
    recorded = _record(run, wanted)
    reports = [_finish(run, outcome, recorded=outcome.name in recorded) for outcome in outcomes]
    context.figures["conflicts"] += run.retry.conflicts
    context.figures["indexes_updated"] += sum(report.decision == "updated" for report in reports)
    return CatchupReport(
        decision=_decide(reports),
        run_id=run.note.run_id,
        indexes=tuple(reports),
        version=run.table.version,
        commit_conflicts=run.retry.conflicts,
        seconds=run.note.seconds,
        blocked=_replaced(run.table),
        keeps_codebooks=run.table.log.keeps_codebooks,
    )


def _in_order(table: Table, names: Iterable[str], options: CatchupOptions) -> list[str]:
    """The indexes as they are built; with a budget so that each has its turn: by the rows that they lack, then by age.

    Indexes that are built anew lack none; those built longest ago are first, as the last run came no further.
    """
    if options.max_bytes is None:
        return [*names]
    indexes = base_indexes(table)
    lacking = {name: coverage(one.covered, table.manifest).uncovered_rows for name, one in indexes.items()}
    built = {name: min(entry.dataset_version for entry in one.segments) for name, one in indexes.items()}
    return sorted(names, key=lambda name: (-lacking.get(name, 0), built.get(name, 0), name))


def _in_budget(run: _Run, name: str) -> bool:
    """Whether an index may be built with what is left of ``max_bytes``; the first that a run builds may always be."""
    written, index = run.written.total(), base_indexes(run.table).get(name)
    if run.options.max_bytes is None or not written or index is None:
        return True
    if _next_need(run.table, index, run.options) != "update":
        return True
    debt = tiers.debts_of(run.table, run.options)[name]
    method, _ = _method(run.table, index, run.options, run.context)
    return not _exceeds(run.options, written, _would_write(index, method, debt))


def _exceeds(options: CatchupOptions, written: int, more: int) -> bool:
    return options.max_bytes is not None and written > 0 and written + more > options.max_bytes


def _check_options(table: Table, options: CatchupOptions) -> None:
    if options.retrain == building.ALWAYS and table.log.keeps_codebooks:
        raise errors.InvalidUsageError(
            f"{table.location.uri} has a log: distances from unmerged generations, which have the old centroids, could "
            "not be compared with those from retrained indexes.",
            remedy="Use --migrate-codebook OLD NEW.",
        )


def _replaced(table: Table) -> tuple[BlockedRegion, ...]:
    """Regions that reuse the id of a merged region: ``index_catchup`` entries under this id belong to the old one."""
    if not table.index.merged_generations:
        return ()
    table = with_listed_log(table)
    regions = table.index.merged_generations.keys() & set(table.regions.region_ids)
    blocked = backlog_of(table, regions).blocked if regions else ()
    return tuple(fault for fault in blocked if isinstance(fault.error, errors.RegionReplacedError))


def _decide(reports: Iterable[IndexReport]) -> CatchupDecision:
    decisions = {report.decision for report in reports}
    if not decisions:
        return CatchupDecision.NO_INDEXES
    if "failed" in decisions:
        return CatchupDecision.INCOMPLETE
    if "answers_worse" in decisions:
        return CatchupDecision.ANSWERS_WORSE
    return CatchupDecision.CAUGHT_UP if decisions & {"updated", "recorded"} else CatchupDecision.UNCHANGED


def _wanted(table: Table, options: CatchupOptions) -> tuple[BaseIndex, ...]:
    indexes = base_indexes(table)
    unknown = sorted(set(options.indexes) - set(indexes))
    if unknown:
        raise errors.InvalidUsageError(
            f"{table.location.uri} has no index {', '.join(unknown)}.",
            remedy=f"Its indexes: {', '.join(indexes) or 'none'}.",
        )
    return tuple(indexes[name] for name in (sorted(set(options.indexes)) or indexes))


def _need(table: Table, index: BaseIndex, options: CatchupOptions) -> str:
    """The decision for an index: update, below_threshold or unchanged."""
    covers = coverage(index.covered, table.manifest)
    too_many = len(index.segments) > 1 and tiers.has_too_many_segments(table, index, options)
    if too_many or tiers.finds_old_values(table, index) or building.method_of(table, index, options) != "update":
        return "update"
    if covers.complete:
        return "unchanged"
    return "below_threshold" if covers.uncovered_rows < options.min_uncovered_rows else "update"


def _next_need(table: Table, index: BaseIndex, options: CatchupOptions) -> str:
    """As :func:`_need`; a stale entry in ``index_catchup`` counts as an update."""
    need = _need(table, index, options)
    return "update" if need != "update" and stale_entries(table, [index.name]) else need


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result for one index. ``first`` is the version at its start."""

    name: str
    first: Table
    decision: str
    error: errors.MemwalOpsError | None
    seconds: float
    method: str | None = None
    answers: AnswerComparison | None = None
    why: str | None = None
    bytes_written: int = 0


def _catch_up(run: _Run, name: str) -> _Outcome:
    """Catch up one index; an error of this index is part of its outcome."""
    started = time.monotonic()
    first = run.table
    error: errors.MemwalOpsError | None = None
    try:
        decision = _update(run, name)
    except (errors.CommitStateUnknownError, errors.LeaseLostError):
        raise
    except errors.AnswersWorseError as worse:
        get_logger(__name__).warning("answers_worse", table=first.location.uri, index=name, error=str(worse))
        decision, error = "answers_worse", worse
    except errors.MemwalOpsError as failed:
        failure = name_damage(first, failed)
        get_logger(__name__).warning("index_failed", table=first.location.uri, index=name, error=str(failure))
        decision, error = "failed", failure
        run.table = run.table.newest()
    seconds = time.monotonic() - started
    found = run.methods.get(name), run.compared.get(name), run.reasons.get(name)
    return _Outcome(name, first, decision, error, seconds, *found, run.written[name])


def _finish(run: _Run, outcome: _Outcome, *, recorded: bool) -> IndexReport:
    decision = "recorded" if recorded and outcome.decision == "unchanged" else outcome.decision
    report = _report(outcome.first, run.table, outcome.name, run.options, decision)
    engine, stages = run.builders.choices.get(outcome.name), run.builders.figures.get(outcome.name, {})
    names = ("error", "seconds", "method", "answers", "why", "bytes_written")
    return replace(report, engine=engine, stages=stages, **{name: getattr(outcome, name) for name in names})


def _report(first: Table, last: Table, name: str, options: CatchupOptions, decision: str) -> IndexReport:
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
    )


def _partitions(table: Table, index: BaseIndex, options: CatchupOptions) -> Partitions | None:
    if not index.is_vector:
        return None
    try:
        segments = [codebook.read_codebook(table, entry).sizes for entry in index.segments]
    except errors.MemwalOpsError:
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
            if not table.log.strict_commits and lacks_columns(table, index):
                run.table = drop_index(table, name)
                continue
            if published:
                return "updated"
            need = _need(table, index, run.options)
            method, why = _method(table, index, run.options, run.context)
            if need != "update" and method == "update":
                return need
            run.reasons.pop(name, None)
            if why is not None:
                run.reasons[name] = why
            built = _build_and_publish(run, table, index, method)
            if built != "updated":
                return built
            if table.log.strict_commits:
                return "updated"
            published = True  # pylance may have rebased it over the removal of its column
        except (CommitLostError, errors.ObjectNotFoundError) as error:
            newest = run.table.newest()
            if isinstance(error, errors.ObjectNotFoundError) and newest.manifest == table.manifest:
                raise  # not a file of a version that was cleaned up meanwhile, or of a table that was made again
            run.table = run.retry.conflict(newest, error)


def _method(table: Table, index: BaseIndex, options: CatchupOptions, context: RunContext) -> tuple[str, str | None]:
    """How an index is built, and by which evidence; of an update, what is wrong nevertheless."""
    method = building.method_of(table, index, options)
    if method != "update":
        return method, None
    if _may_retrain(table, index, options) and (why := tiers.why_retrain(table, index, context)):
        return "rebuild", why
    if _need(table, index, options) != "update":
        return method, None
    if anew := (
        index_arguments.has_no_update(index)
        or index_faults.outdated_zones(table, index)
        or (tiers.unlike_segments(table, index, options) if index.is_vector else None)
        or (_OLD_VALUES if tiers.finds_old_values(table, index) else None)
    ):
        return "rebuild", anew
    found = tiers.misfit(table, index, context)
    if found is None:
        return method, None
    return "rebuild" if found.anew else method, found.why


_OLD_VALUES = "another program let it find rows by values from before a column was changed in place"


def _may_retrain(table: Table, index: BaseIndex, options: CatchupOptions) -> bool:
    return options.retrain == building.AUTO and index.is_vector and not table.log.keeps_codebooks


def _build_and_publish(run: _Run, table: Table, index: BaseIndex, method: str) -> str:
    """Build once and publish; return the decision: updated, or why there was nothing to publish."""
    build = _build_and_compare(run, table, index, method)
    if isinstance(build, str):
        return build
    if not table.log.strict_commits:
        run.table = publish_rebased(table, index.name, build, run.note, run.retry)
        return "updated"
    covered = building.covered_after(index, build)

    def change(newest: Table) -> IndexChange:
        generations = catchup_entry(newest, covered, progress_when_built=table.index.merged_generations)
        details = with_catchup(newest.index.details, {index.name: generations})
        return IndexChange(details, added=build.added, removed=build.removed)

    run.table = publish_build(table, index.name, build, change, run.note, run.retry)
    return "updated"


def _build_and_compare(run: _Run, table: Table, index: BaseIndex, method: str) -> IndexBuild | str:
    """Build segments with which the index answers no worse.

    Arguments and errors are those of :func:`building.build_segments`; also raises ``AnswersWorseError``.
    """
    try:
        build = building.build_segments(table, index, run.options, method, run.builders)
    except NotSupportedError as error:
        if method != "update":
            raise
        run.reasons[index.name] = f"it cannot be updated: {error}"
        return _build_and_compare(run, table, index, "rebuild")
    if isinstance(build, str):
        return build
    run.methods[index.name] = method
    run.written[index.name] += tiers.bytes_of(build.added)
    try:
        _compare_answers(run, table, index, build)
    except errors.AnswersWorseError as worse:
        other = _other_method(table, index, method, run.options)
        if other is None:
            raise
        earlier = f"{run.reasons[index.name]}; but built anew: " if other == "update" else ""
        run.reasons[index.name] = f"{earlier}{worse}"
        return _build_and_compare(run, table, index, other)
    return build


def _other_method(table: Table, index: BaseIndex, method: str, options: CatchupOptions) -> str | None:
    """What remains where the build by a method would answer worse: an update after a build anew by evidence alone."""
    if _may_retrain(table, index, options):
        return "rebuild" if method == "update" else None
    return "update" if method == "rebuild" and building.method_of(table, index, options) == "update" else None


def _compare_answers(run: _Run, table: Table, index: BaseIndex, build: IndexBuild) -> None:
    """Refuse, by ``AnswersWorseError``, segments with which the index would answer worse; their files are deleted."""
    accepted = False
    try:
        entries = [*building.kept_segments(index, build), *build.added]
        compared = compare_answers(table, index, entries, run.options.answers, run.note, run.context)
        run.compared[index.name] = compared
        refuse_worse(index, compared, _way_out(table, index, run.methods[index.name]))
        accepted = True
    finally:
        if not accepted:
            discard(table, build)


def _way_out(table: Table, index: BaseIndex, method: str) -> str:
    """What to do about an index that would answer worse if it was built by ``method``."""
    if method == "update":
        return f"Build it anew: memwal-ops catchup URI --index {index.name} --rebuild."
    if index.is_vector and table.log.keeps_codebooks:
        return f"Replace it by one with a new codebook: memwal-ops catchup URI --migrate-codebook {index.name} NEW."
    return "The old one stays; memwal-ops verify URI --answers shows how well that answers. If badly, drop it."


def _record(run: _Run, names: Collection[str]) -> frozenset[str]:
    """Make ``index_catchup`` agree with the fragments, in one commit; return the indexes with stale entries."""
    stale: dict[str, dict[UUID, int]] = {}

    def change(table: Table) -> IndexChange | None:
        stale.clear()
        stale.update(stale_entries(table, names))
        return IndexChange(with_catchup(table.index.details, stale)) if stale else None

    run.table = publish_change(run.table, change, run.note, run.retry)
    return frozenset(stale)
