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

import random
import time
import uuid
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.base_indexes import BaseIndex, base_indexes, coverage, covered_by
from memwal_ops.core.catchup_claims import claim, wrong_claims
from memwal_ops.core.codebook import Codebook, read_codebook
from memwal_ops.core.commit import CommitLostError, CommitNote, IndexChange, check_rewritable, commit_indexes
from memwal_ops.core.index_build import IndexBuild, discard, still_fits, update_index
from memwal_ops.core.leftovers import sweep_leftovers
from memwal_ops.core.snapshots import is_external
from memwal_ops.errors import (
    CodebookChangedError,
    CommitConflictError,
    CommitStateUnknownError,
    InvalidUsageError,
    InvariantViolatedError,
    MemwalOpsError,
    ObjectNotFoundError,
)
from memwal_ops.format.memwal_index import with_catchup
from memwal_ops.jobs.catchup_report import CatchupReport, IndexReport, Partitions
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from memwal_ops.core.table import Table

DEFAULT_MAX_SEGMENTS = 8
DEFAULT_RETRAIN_IMBALANCE = 20.0
MAX_LOST_RACES = 24
_BACKOFF_SECONDS = 0.02


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
    """The table as it moves on under the run, and the races that were lost."""

    table: Table
    options: CatchupOptions
    note: CommitNote
    lost_races: int = 0

    def lose(self, lost_in_a_row: int, error: MemwalOpsError) -> None:
        """Wait a little, and take the newest version; raises where too many races were lost in a row."""
        self.lost_races += 1
        get_logger(__name__).info("commit_lost", table=self.table.location.uri, version=self.table.version + 1)
        if lost_in_a_row > MAX_LOST_RACES:
            raise CommitConflictError(
                f"Lost {lost_in_a_row} races in a row for the next version of {self.table.location.uri}."
            ) from error
        time.sleep(random.uniform(0, _BACKOFF_SECONDS * 2 ** min(lost_in_a_row, 6)))  # noqa: S311 - jitter
        self.table = self.table.newest()


def dry_run(table: Table, options: CatchupOptions) -> CatchupReport:
    """The report of a run that changes nothing: decision ``dry_run``."""
    started = time.monotonic()
    check_rewritable(table)
    reports = []
    for index in _wanted(table, options):
        need = _need(table, index, options)
        if need == "unchanged" and wrong_claims(table, [index.name]):
            need = "update"
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
    if wanted:
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
        lost_races=run.lost_races,
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
    except CommitStateUnknownError:
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
    lost_in_a_row = 0
    while True:
        table = run.table
        index = base_indexes(table).get(name)
        if index is None:
            return "dropped"
        need = _need(table, index, run.options)
        if need != "update":
            return need
        try:
            if not _build_and_publish(run, table, index):
                return "unchanged"
        except (CommitLostError, ObjectNotFoundError) as error:
            if isinstance(error, ObjectNotFoundError) and table.newest().version == table.version:
                raise  # not a file of an old version that was cleaned up under our feet
            lost_in_a_row += 1
            run.lose(lost_in_a_row, error)
        else:
            return "updated"


def _build_and_publish(run: _Run, table: Table, index: BaseIndex) -> bool:
    """One build, and as many attempts to publish it as it stays right for; False: nothing to build."""
    codebooks = _codebooks(table, index)
    build = update_index(table, index.name, merge=_segments_to_merge(index, run.options))
    if build is None:
        return False
    published = False
    keep = False
    try:
        _check(table, index, build, codebooks)
        lost_in_a_row = 0
        while not published:
            newest = run.table
            if not still_fits(build, table, newest, index.name):
                raise CommitLostError(f"Index {index.name} was changed while it was brought up to date.")
            try:
                commit_indexes(newest, _change(newest, table, index, build), run.note)
                published = True
            except CommitLostError as error:
                keep = keep or not error.files_are_ours
                lost_in_a_row += 1
                run.lose(lost_in_a_row, error)
    except CommitStateUnknownError:
        keep = True
        raise
    finally:
        if not published and not keep:
            discard(table, build)
    run.table = run.table.newest()
    return True


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


def _check(table: Table, index: BaseIndex, build: IndexBuild, before: frozenset[Codebook]) -> None:
    """Refuse a build that does not cover its version, or has another codebook."""
    kept = [entry for entry in index.segments if UUID(bytes=entry.uuid.uuid) not in build.removed]
    remaining = coverage(build.covered | covered_by(kept), table.manifest)
    if not remaining.complete:
        raise InvariantViolatedError(
            f"pylance brought index {index.name} up to date, but it leaves out fragments {sorted(remaining.uncovered)}."
        )
    if not index.is_vector:
        return
    after = frozenset(read_codebook(table, entry) for entry in build.added)
    if after - before:
        old = ", ".join(sorted(str(one.partitions) for one in before))
        new = ", ".join(sorted(str(one.partitions) for one in after))
        raise CodebookChangedError(
            f"Index {index.name} came back with another codebook ({old} partitions before, {new} after); "
            "it was not published, and the table is as it was."
        )


def _change(newest: Table, built_on: Table, index: BaseIndex, build: IndexBuild) -> IndexChange:
    kept = [entry for entry in index.segments if UUID(bytes=entry.uuid.uuid) not in build.removed]
    covered = build.covered | covered_by(kept)
    said = claim(newest, covered, progress_when_built=built_on.index.merged_generations)
    details = with_catchup(newest.index.details, {index.name: said})
    return IndexChange(details, uuid=_new_id(newest), added=build.added, removed=build.removed)


def _record(run: _Run, names: Collection[str]) -> frozenset[str]:
    """Bring ``index_catchup`` in line with the fragments, in one commit; which indexes it was wrong about."""
    lost_in_a_row = 0
    while True:
        claims = wrong_claims(run.table, names)
        if not claims:
            return frozenset()
        change = IndexChange(with_catchup(run.table.index.details, claims), uuid=_new_id(run.table))
        try:
            commit_indexes(run.table, change, run.note)
        except CommitLostError as error:
            lost_in_a_row += 1
            run.lose(lost_in_a_row, error)
        else:
            run.table = run.table.newest()
            return frozenset(claims)


def _new_id(table: Table) -> UUID | None:
    """A new id for the MemWAL entry, by which a version's descendants can be told; not where a file has its name."""
    return None if is_external(table) else uuid.uuid4()
