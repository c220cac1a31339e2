"""The catch-up job: bring the base table's indexes up to what was merged, one after the other.

For each index: read the progress, let pylance build what is missing without publishing it, check
that it covers what it should and that a vector index kept its codebook, publish it as exactly the
next version together with its entry in ``index_catchup``. A merge that lands in between does not
spoil the work: what was built stays true, and the next run takes the rest.

``index_catchup`` says what the fragments say, whoever wrote it before us: all that is merged where
every fragment is covered; where not, what was merged in the version that the index was built on,
if it still covers that version; else nothing.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.base_indexes import BaseIndex, base_indexes, coverage, covered_by
from memwal_ops.core.catchup_claims import claim, wrong_claims
from memwal_ops.core.codebook import Codebook, read_codebook
from memwal_ops.core.commit import CommitLostError, CommitNote, IndexChange, check_rewritable
from memwal_ops.core.index_build import IndexBuild, discard, update_index
from memwal_ops.core.leftovers import sweep_leftovers
from memwal_ops.errors import (
    CodebookChangedError,
    CommitStateUnknownError,
    IndexesBehindError,
    InvalidUsageError,
    InvariantViolatedError,
    LeaseLostError,
    MemwalOpsError,
    ObjectNotFoundError,
)
from memwal_ops.format.memwal_index import with_catchup
from memwal_ops.jobs.catchup_report import CatchupReport, IndexReport, Partitions
from memwal_ops.jobs.index_publishing import publish_build, publish_change
from memwal_ops.jobs.races import Races
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from memwal_ops.core.table import Table

DEFAULT_MAX_SEGMENTS = 8
DEFAULT_RETRAIN_IMBALANCE = 20.0


@dataclass(frozen=True, slots=True)
class CatchupOptions:
    """What a user may ask of a catch-up.

    Attributes:
        indexes: only these; empty for all.
        min_uncovered_rows: leave an index alone that is behind by fewer rows.
        max_segments: an index of more segments gets them merged into one.
        retrain_imbalance_threshold: report an IVF index whose largest partition has more than this
            many times the rows of its smallest (S4-038).
    """

    indexes: tuple[str, ...] = ()
    min_uncovered_rows: int = 0
    max_segments: int = DEFAULT_MAX_SEGMENTS
    retrain_imbalance_threshold: float = DEFAULT_RETRAIN_IMBALANCE

    def __post_init__(self) -> None:
        if self.min_uncovered_rows < 0:
            raise InvalidUsageError(f"--min-uncovered-rows must not be below 0, as {self.min_uncovered_rows} is.")
        if self.max_segments < 1:
            raise InvalidUsageError(f"--max-segments must be above 0, not {self.max_segments}.")
        if not self.retrain_imbalance_threshold >= 1:
            raise InvalidUsageError("--retrain-imbalance-threshold must be at least 1.")


@dataclass(slots=True)
class _Run:
    """The table as it moves on under the run."""

    table: Table
    options: CatchupOptions
    note: CommitNote
    races: Races = field(default_factory=Races)


def dry_run(table: Table, options: CatchupOptions) -> CatchupReport:
    """The report of a run that changes nothing: decision ``dry_run``."""
    started = time.monotonic()
    check_rewritable(table)
    reports = []
    for index in _wanted(table, options):
        need = _need(table, index, options)
        if need == "unchanged":
            need = _next_need(table, index, options)
        reports.append(_report(table, table, index.name, options, "would_update" if need == "update" else need))
    return CatchupReport("dry_run", str(uuid.uuid4()), tuple(reports), table.version, 0, time.monotonic() - started)


def apply(table: Table, options: CatchupOptions, *, on_index: Callable[[str], None] = lambda _: None) -> CatchupReport:
    """Bring the indexes up to date, and ``index_catchup`` in line with them (S0-179 to S0-181).

    Args:
        table: any version of the table; the newest is read as the run goes on.
        options: see :class:`CatchupOptions`.
        on_index: called with each index's name before it is worked on.

    Returns:
        The report. An index that failed is in it, with the reason; the others went on.

    Raises:
        InvalidUsageError: an index that the table does not have.
        UnsupportedFeatureError: a table whose manifest must not be rewritten here.
        CommitStateUnknownError: the store lost the answer to a commit; run it again.
    """
    started = time.monotonic()
    check_rewritable(table)
    run = _Run(table, options, CommitNote(job="catchup", run_id=str(uuid.uuid4()), release=__version__))
    wanted = [index.name for index in _wanted(table, options)]
    if any(_next_need(table, index, options) == "update" for index in _wanted(table, options)):
        probe_conditional_writes(table.store)
        sweep_leftovers(table)
    outcomes = []
    for name in wanted:
        on_index(name)
        outcomes.append(_catch_up(run, name))
    recorded = _record(run, wanted)
    reports = [_finish(run, outcome, recorded=outcome.name in recorded) for outcome in outcomes]
    return CatchupReport(
        decision=_decide(reports),
        run_id=run.note.run_id,
        indexes=tuple(reports),
        version=run.table.version,
        lost_races=run.races.lost,
        seconds=time.monotonic() - started,
    )


def _decide(reports: Iterable[IndexReport]) -> str:
    decisions = {one.decision for one in reports}
    if not decisions:
        return "no_indexes"
    if "failed" in decisions:
        return "incomplete"
    return "caught_up" if decisions & {"updated", "recorded"} else "unchanged"


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
    """What is to be done with an index: update, below_threshold or unchanged."""
    behind = coverage(index.covered, table.manifest)
    if len(index.segments) > options.max_segments:
        return "update"
    if behind.complete:
        return "unchanged"
    return "below_threshold" if behind.uncovered_rows < options.min_uncovered_rows else "update"


def _next_need(table: Table, index: BaseIndex, options: CatchupOptions) -> str:
    """As :func:`_need`; an entry in ``index_catchup`` that is to be set right counts as an update."""
    need = _need(table, index, options)
    return "update" if need != "update" and wrong_claims(table, [index.name]) else need


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one index: from which version on, what was decided, and why it failed."""

    name: str
    first: Table
    decision: str
    error: MemwalOpsError | None
    seconds: float


def _catch_up(run: _Run, name: str) -> _Outcome:
    """One index; whatever is wrong with it stays with it."""
    started = time.monotonic()
    run.table = first = run.table.newest()
    error: MemwalOpsError | None = None
    try:
        decision = _update(run, name)
    except (CommitStateUnknownError, LeaseLostError):
        raise
    except MemwalOpsError as failure:
        get_logger(__name__).warning("index_failed", table=first.location.uri, index=name, error=str(failure))
        decision, error = "failed", failure
        run.table = run.table.newest()
    return _Outcome(name, first, decision, error, time.monotonic() - started)


def _finish(run: _Run, outcome: _Outcome, *, recorded: bool) -> IndexReport:
    decision = "recorded" if recorded and outcome.decision == "unchanged" else outcome.decision
    report = _report(outcome.first, run.table, outcome.name, run.options, decision)
    return replace(report, error=outcome.error, seconds=outcome.seconds)


def _report(first: Table, last: Table, name: str, options: CatchupOptions, decision: str) -> IndexReport:
    """What became of an index between two versions."""
    found, left = base_indexes(first).get(name), base_indexes(last).get(name)
    behind = coverage(frozenset() if found is None else found.covered, first.manifest)
    one = left or found
    return IndexReport(
        name=name,
        type="unknown" if one is None else one.type,
        uncovered_fragments=len(behind.uncovered),
        uncovered_rows=behind.uncovered_rows,
        segments=0 if left is None else len(left.segments),
        before=first.index.index_catchup.get(name, {}),
        after=last.index.index_catchup.get(name, {}),
        decision=decision if left is not None else "dropped",
        partitions=None if left is None else _partitions(last, left, options),
        error=None,
        seconds=0.0,
    )


def _partitions(table: Table, index: BaseIndex, options: CatchupOptions) -> Partitions | None:
    if not index.is_vector:
        return None
    try:
        segments = [read_codebook(table, entry).sizes for entry in index.segments]
    except MemwalOpsError:
        return None  # what cannot be read is an error where the codebook is needed, not here
    sizes = [sum(rows) for rows in zip_longest(*segments, fillvalue=0)]
    return Partitions(len(sizes), max(sizes), min(sizes), options.retrain_imbalance_threshold) if sizes else None


def _update(run: _Run, name: str) -> str:
    """Build and publish until the index covers the version that it was built on; gives the decision."""
    while True:
        table = run.table
        index = base_indexes(table).get(name)
        need = "dropped" if index is None else _need(table, index, run.options)
        if index is None or need != "update":
            return need
        try:
            return "updated" if _build_and_publish(run, table, index) else "unchanged"
        except (CommitLostError, ObjectNotFoundError) as error:
            newest = run.table.newest()
            if isinstance(error, ObjectNotFoundError) and newest.version == table.version:
                raise  # not a file of an old version that was cleaned up under our feet
            run.table = run.races.lose(newest, error)


def _build_and_publish(run: _Run, table: Table, index: BaseIndex) -> bool:
    """One build, published; False: nothing to build."""
    codebooks = _codebooks(table, index)
    build = update_index(table, index.name, merge=_segments_to_merge(index, run.options))
    if build is None:
        _refuse_silence(table, index)
        return False
    kept = [entry for entry in index.segments if UUID(bytes=entry.uuid.uuid) not in build.removed]
    covered = build.covered | covered_by(kept)
    try:
        _check(table, index, build, covered, codebooks)
    except MemwalOpsError:
        discard(table, build)
        raise

    def change(newest: Table) -> IndexChange:
        said = claim(newest, covered, progress_when_built=table.index.merged_generations)
        details = with_catchup(newest.index.details, {index.name: said})
        return IndexChange(details, added=build.added, removed=build.removed)

    run.table = publish_build(table, index.name, build, change, run.note, run.races)
    return True


def _refuse_silence(table: Table, index: BaseIndex) -> None:
    """Pylance passes over an index whose files are gone without a word: that is no index that has caught up."""
    behind = coverage(index.covered, table.manifest)
    if behind.uncovered_rows:
        raise IndexesBehindError(
            f"pylance left index {index.name} as it was and did not say why, although it lacks "
            f"{behind.uncovered_rows:,} rows in fragments {sorted(behind.uncovered)}.",
            remedy="Its files may be gone or damaged. Merge all, then create it again (runbooks/index-behind.md).",
        )


def _segments_to_merge(index: BaseIndex, options: CatchupOptions) -> int | None:
    """How many segments the new rows are merged with; see :func:`update_index`.

    A vector index gets a new segment each time, until there are too many; a scalar index is merged
    as pylance does it, into one.
    """
    if len(index.segments) >= options.max_segments:
        return len(index.segments)
    return 0 if index.is_vector else None


def _codebooks(table: Table, index: BaseIndex) -> frozenset[Codebook]:
    return frozenset(read_codebook(table, entry) for entry in index.segments) if index.is_vector else frozenset()


def _check(
    table: Table, index: BaseIndex, build: IndexBuild, covered: frozenset[int], before: frozenset[Codebook]
) -> None:
    """Refuse a build that does not cover its version, or has another codebook."""
    left_out = coverage(covered, table.manifest).uncovered
    if left_out:
        raise InvariantViolatedError(
            f"pylance brought index {index.name} up to date, but it leaves out fragments {sorted(left_out)}."
        )
    after = frozenset(read_codebook(table, entry) for entry in build.added) if index.is_vector else frozenset()
    if after - before:
        old, new = (sorted(one.partitions for one in books) for books in (before, after))
        raise CodebookChangedError(
            f"Index {index.name} came back with another codebook (partitions before {old}, after {new}); "
            "it was not published, and the table is as it was."
        )


def _record(run: _Run, names: Collection[str]) -> frozenset[str]:
    """Bring ``index_catchup`` in line with the fragments, in one commit; which indexes it was wrong about."""
    wrong: dict[str, dict[UUID, int]] = {}

    def change(table: Table) -> IndexChange | None:
        wrong.clear()
        wrong.update(wrong_claims(table, names))
        return IndexChange(with_catchup(table.index.details, wrong)) if wrong else None

    run.table = publish_change(run.table, change, run.note, run.races)
    return frozenset(wrong)
