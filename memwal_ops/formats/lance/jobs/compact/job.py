"""The compact job: rewrite small or much-deleted base fragments, and preserve the MemWAL index.

Planning, rewriting and committing are pylance's own. Its commit is rebased over concurrent commits: it succeeds over a
merge that only added rows, and conflicts with one that changed a rewritten fragment, or with a change of indexes; then
everything is planned again. Two checks are added. A rebase ignores versions that are missing
(docs/upstream/updates_double_rows_beside_a_cleanup.py), so nothing is committed if one is missing. And pylance changes
the MemWAL index, which :mod:`memwal_ops.formats.lance.jobs.compact.corrections` restores; a plain table has none. The
rewriting itself may run on Spark; all else is the same there.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lance.optimize import Compaction

from memwal_ops import errors
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import RunContext, record
from memwal_ops.core.options import EngineChoice, choose_engine
from memwal_ops.core.outlook import rates_of, seconds_at
from memwal_ops.formats.lance.commit.commit import CommitNote, check_rewritable, fixed_dictionaries
from memwal_ops.formats.lance.commit.publication import CommitLostError, refuse_gaps, refuse_missing_files
from memwal_ops.formats.lance.commit.rebased_commit import refuse_auto_cleanup
from memwal_ops.formats.lance.engines.merge.rewrite import dictionary_columns, with_new_dictionaries
from memwal_ops.formats.lance.files.blobs import holds_blobs
from memwal_ops.formats.lance.files.datasets import is_commit_conflict, lance_errors, open_dataset
from memwal_ops.formats.lance.files.version_files import DATA_FOLDER, read_version_manifest
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.snapshots import is_external, snapshot_path
from memwal_ops.formats.lance.jobs.catchup.tiers import debts_of
from memwal_ops.formats.lance.jobs.catchup.update import catch_up
from memwal_ops.formats.lance.jobs.compact import corrections, planning
from memwal_ops.formats.lance.jobs.compact.report import CompactDecision, CompactReport
from memwal_ops.formats.lance.options import DEFAULT_TARGET_ROWS, CatchupOptions, CompactOptions
from memwal_ops.formats.lance.retention.damage import name_damage, names_damage, naming_damage, newest_damage
from memwal_ops.formats.lance.retention.garbage import sweep_leftovers, sweep_staged
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import size_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import lance
    from lance.optimize import CompactionTask, RewriteResult

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

# After this many conflicts in a row, fragments that other writers changed meanwhile are left for the next run.
_CONFLICTS_UNTIL_SKIPPED = 3

__all__ = ["CompactOptions", "CompactReport", "apply", "backlog", "plan"]


class TaskExecutor(Protocol):
    """Rewrites groups of fragments. A task only adds files that no version names; the job commits its results."""

    @property
    def name(self) -> str:
        """The value of ``--engine`` that selects it."""

    @property
    def rows_per_commit(self) -> int:
        """A commit holds the old and the new address of every row, to remap the indexes: some 90 bytes per row."""

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """The results of tasks that were planned on ``dataset``, which is ``table``'s version."""


class LocalExecutor:
    """One task after the other, in this process."""

    name = "local"
    rows_per_commit = 8 << 20

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """See :class:`TaskExecutor`."""
        for task in tasks:
            with (
                naming_damage(table, partial(_fragments_of, task)),
                lance_errors("write compacted fragments of", table.location.uri),
            ):
                result = task.execute(dataset)
            yield result


def _fragments_of(task: CompactionTask) -> list[int]:
    return [fragment.id for fragment in task.fragments]


@dataclass(slots=True)
class _Totals:
    """Totals of the commits that were published so far."""

    removed: int = 0
    added: int = 0
    rows: int = 0
    bytes: int = 0
    bytes_read: int = 0

    def count(self, tasks: Collection[CompactionTask], results: Collection[RewriteResult]) -> None:
        self.bytes_read += sum(
            file.file_size_bytes or 0 for task in tasks for old in task.fragments for file in old.files
        )
        for result in results:
            self.removed += result.metrics.fragments_removed
            self.added += result.metrics.fragments_added
            self.rows += sum(fragment.physical_rows for fragment in result.new_fragments)
            self.bytes += sum(file.file_size_bytes or 0 for fragment in result.new_fragments for file in fragment.files)


@dataclass(slots=True)
class _Scope:
    """The fragments that a run may rewrite: ``limit`` without ``busy``; ``own`` are those that it wrote itself."""

    limit: set[int]
    busy: set[int] = field(default_factory=set)
    own: set[int] = field(default_factory=set)

    def widened(self, *, first: bool) -> bool:
        """Whether there are more, once nothing else is left to rewrite: ``first``, and nothing was rewritten at all."""
        if self.busy and first:
            self.busy.clear()  # they are tried again
            return True
        more = not self.own <= self.limit
        self.limit |= self.own
        return more


@dataclass(slots=True)
class _Attempt:
    """The work of one commit, with a dataset handle of its own: pylance moves it to the version that it commits."""

    table: Table
    limit: Collection[int]
    options: CompactOptions
    guard: corrections.AnswersGuard
    known: planning.Planner
    demanded: Collection[int] = ()
    tasks: list[CompactionTask] = field(default_factory=list)
    results: list[RewriteResult] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that it has rewritten."""
        return sum(fragment.physical_rows for result in self.results for fragment in result.new_fragments)

    def run(
        self, executor: TaskExecutor, rows: int, max_bytes: int | None, context: RunContext, *, first: bool
    ) -> int | None:
        """Plan (:meth:`planning.Planner.tasks`), rewrite and commit; return the version, or None: nothing to do."""
        table, uri = self.table, self.table.location.uri
        table.refuse_damaged_deletions()
        with lance_errors("plan the compaction of", uri):
            dataset = open_dataset(table.location, version=table.version)
            known = self.known.table is table and not self.demanded
            planner = self.known if known else planning.Planner(table, self.options, self.demanded)
            self.tasks = planner.tasks(dataset, self.limit, rows, max_bytes, first=first)
        if not self.tasks:
            return None
        _refuse_broken_indexes(table)
        results = executor.execute(table, dataset, self.tasks)
        renewed = self.demanded and dictionary_columns(dataset.schema) and not fixed_dictionaries(table)
        if renewed and not any(map(holds_blobs, dataset.schema)):
            results = with_new_dictionaries(table, dataset, results)
        for result in results:
            self.results.append(result)
            context.advance("rewriting", "groups of fragments")
            context.checkpoint()
        table.guard.check()  # here, since the commit may be pylance's own and bypass our store
        refuse_gaps(table)
        refuse_auto_cleanup(table)
        written = (file for result in self.results for fragment in result.new_fragments for file in fragment.files)
        paths = [f"{DATA_FOLDER}/{file.path}" for file in written if file.base_id is None]
        refuse_missing_files(table, paths)
        table.guard.register(paths)  # pylance deletes them if its commit fails
        version = self.guard.commit(
            table, dataset, lambda handle: Compaction.commit(handle, self.results, planning.COMMIT_OPTIONS)
        )
        record(version)
        return version

    @property
    def files(self) -> frozenset[str]:
        """The rewritten data files."""
        made = (fragment for result in self.results for fragment in result.new_fragments)
        return frozenset(file.path for fragment in made for file in fragment.files)

    def landed_as(self, newest: Table) -> int | None:
        """The first version that names the rewritten files, if any: the commit succeeded although pylance raised."""
        files = self.files
        if not files or not _with_files(newest.manifest, files):
            return None
        for version in range(self.table.version + 1, newest.version):
            try:
                manifest = read_version_manifest(newest.store, version, newest.naming)
            except errors.ObjectNotFoundError:
                continue  # cleaned up meanwhile
            if _with_files(manifest, files):
                return version
        return newest.version


@names_damage
def plan(table: Table, options: CompactOptions, context: RunContext | None = None) -> CompactReport:
    """Report what a compaction would do, without writing: decision ``dry_run``."""
    context = context or RunContext()
    note = CommitNote("compact")
    check_rewritable(table)
    refuse_auto_cleanup(table)
    planning.refuse_settings(table, options)
    if options.engine == "spark":
        from memwal_ops.core.spark.session import check_environment  # noqa: PLC0415 - Spark only

        check_environment()
    planner = planning.Planner(table, options)
    due, run = planner.debt(), planner.next_run()
    if run.fragments and (damage := newest_damage(table)) is not None and damage.folder != INDICES_FOLDER:
        raise damage.error  # as a run would, which reads them
    engine = _choose(options, run)
    rates = rates_of("compact", context.past_runs(table.location.address, "compact"))
    fragments = len(table.manifest.manifest.fragments)
    return CompactReport(
        decision=CompactDecision.DRY_RUN,
        run_id=note.run_id,
        engine=engine.name,
        engine_reason=engine.reason,
        why=_planned_why(planner, run, options) if due.fragments else planner.why(),
        fragments_before=fragments,
        fragments_after=fragments - run.fragments + run.after,
        fragments_removed=run.fragments,
        fragments_added=run.after,
        rows_rewritten=run.rows,
        bytes_read=run.bytes_read,
        bytes_written=run.bytes_written,
        debt=due.bytes_written,
        dropped_column_bytes=run.dropped,
        settings=planner.settings,
        version=table.version,
        seconds=note.seconds,
        expected_seconds=seconds_at(run.rows, rates),
        indexed_again=tuple(sorted(planner.indexed_again)) if run.fragments else (),
        indexes_behind=tuple(planner.indexes_behind) if run.fragments else (),
    )


@names_damage
def apply(
    table: Table, options: CompactOptions, context: RunContext | None = None, *, only: Collection[int] | None = None
) -> CompactReport:
    """Rewrite small or much-deleted fragments that existed when the call began, a bounded number per commit.

    What it wrote itself may be due in turn, and is rewritten, too, so that a run directly after this one finds nothing.
    Fragments that others add meanwhile are left for the next run, so that a run concurrent with a merger ends.
    Indexes that pylance does not move with rows are caught up at the end, except with ``only``, whose caller does that.
    Files of attempts with a commit conflict are left to pylance's clean-up, which deletes them when no version can
    name them any more.

    Args:
        table: any version of the table; the newest is read after each commit and each conflict.
        context: can stop the run after each group of fragments that has been rewritten.
        only: ids of the fragments that are rewritten, and no others, with the dictionary values in use alone; None:
            those that are due.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
        IndexesBehindError: an index cannot be opened, so that its coverage would be lost.
        InvariantViolatedError: merge progress is lower than it was.
        SparkUnavailableError, SparkJobFailedError: Spark is missing or failed.
        InvalidUsageError: pylance refuses a setting of the table for compactions.
        UnsupportedFeatureError: a table whose manifest must not be rewritten here, or a setting that is refused.
    """
    context, note = context or RunContext(), CommitNote("compact")
    table = _checked_settings(table, options)
    if table.is_at_rest(options.rest_after):
        options = replace(options, rest_after=timedelta(0))  # also after its own commits
    engine = _choose(options, (planner := planning.Planner(table, options)).next_run())
    with _executor(engine, options, context) as executor:
        return replace(_compact_all(planner, options, executor, context, note, only), engine_reason=engine.reason)


def _choose(options: CompactOptions, run: planning.Debt) -> EngineChoice:
    return choose_engine(options, "fragments to rewrite", run.bytes_read)


@contextmanager
def _executor(engine: EngineChoice, options: CompactOptions, context: RunContext) -> Iterator[TaskExecutor]:
    if engine.name == "spark":
        from memwal_ops.formats.lance.engines.spark.indexing import SparkExecutor  # noqa: PLC0415 - Spark only

        with SparkExecutor(options.master, context) as executor:
            yield executor
    else:
        yield LocalExecutor()


def _compact_all(
    planner: planning.Planner,
    options: CompactOptions,
    executor: TaskExecutor,
    context: RunContext,
    note: CommitNote,
    only: Collection[int] | None,
) -> CompactReport:
    before = len((table := planner.table).manifest.manifest.fragments)
    had_snapshot = is_external(table) and _has_file(table)
    if before:
        if only or _may_write(planner):
            probe_conditional_writes(table.store)
        sweep_staged(table)
        if table.listed.has_detached:
            sweep_leftovers(table)
    scope = _Scope(set(table.fragment_ids if only is None else only))
    run = _Run(table, options, executor, context, scope, planner, only or (), note)
    done, guard = run.done, run.guard
    run.table = corrections.exclude_dropped_rows(
        corrections.clear_coverage(table, note, run.retry), None, note, run.retry
    )
    run.rewrite()
    while done.removed and only is None and run.index_again() and run.error is None:
        run.rewrite()  # what all indexes cover now may be due with its neighbors
    table = run.table
    context.figures["conflicts"] += run.retry.conflicts
    context.figures["bytes_compacted"] += done.bytes + run.index_bytes
    planner = planning.Planner(table, options)
    due = planner.debt()
    why = _unfinished(done, due.fragments, options, run.scope.busy) if done.removed else planner.why()
    is_worse = isinstance(run.error, errors.AnswersWorseError)
    done_as = CompactDecision.COMPACTED if done.removed else CompactDecision.UNCHANGED
    return CompactReport(
        decision=CompactDecision.ANSWERS_WORSE if is_worse else done_as,
        run_id=note.run_id,
        engine=executor.name,
        why=None if is_worse else why,
        fragments_before=before,
        fragments_after=len(table.manifest.manifest.fragments),
        fragments_removed=done.removed,
        fragments_added=done.added,
        rows_rewritten=done.rows,
        bytes_read=done.bytes_read,
        bytes_written=done.bytes + run.index_bytes,
        debt=due.bytes_written,
        dropped_column_bytes=due.dropped,
        settings=planner.settings,
        snapshot_lost=had_snapshot and is_external(table) and not _has_file(table),
        version=table.version,
        commit_conflicts=run.retry.conflicts,
        seconds=note.seconds,
        answers=tuple(guard.compared),
        error=run.error,
        exit_code=0 if run.error is None else run.error.exit_code,
        indexed_again=tuple(sorted(run.indexed_again)),
        indexes_behind=tuple(sorted(run.indexes_behind)),
    )


@dataclass(slots=True)
class _Run:
    """State of a run. ``table``: the newest version that it has read; ``index_bytes``: what ``index_again`` took."""

    table: Table
    options: CompactOptions
    executor: TaskExecutor
    context: RunContext
    scope: _Scope
    planner: planning.Planner
    demanded: Collection[int]
    note: CommitNote
    retry: CommitRetry = field(default_factory=CommitRetry)
    done: _Totals = field(default_factory=_Totals)
    error: errors.MemwalOpsError | None = None
    index_bytes: int = 0
    indexed_again: set[str] = field(default_factory=set)
    indexes_behind: list[str] = field(default_factory=list)
    guard: corrections.AnswersGuard = field(init=False)
    budget: int | None = field(init=False)

    def __post_init__(self) -> None:
        """Take the budget of the first version: without what its indexes take at the end."""
        self.guard = corrections.AnswersGuard(self.options.answers, self.note, self.context)
        self.budget = self.planner.budget

    def _left(self, budget: int | None) -> int | None:
        """Bytes that may still be rewritten; None: any number. What was written counts where no sizes are recorded."""
        return None if budget is None else budget - max(self.done.bytes_read, self.done.bytes) - self.index_bytes

    def rewrite(self) -> None:
        """Rewrite what is due, commit by commit, until nothing is, or the budget is used."""
        table, scope, done, retry = self.table, self.scope, self.done, self.retry
        rows = self.executor.rows_per_commit
        while (left := self._left(self.budget)) is None or left > 0:
            attempt = _Attempt(table, scope.limit - scope.busy, self.options, self.guard, self.planner, self.demanded)
            try:
                version = attempt.run(self.executor, rows, left, self.context, first=not done.removed)
            except errors.AnswersWorseError as error:
                get_logger(__name__).warning("answers_worse", table=table.location.uri, error=str(error))
                self.error, table = error, table.newest()
                break
            except (CommitLostError, errors.StorageError, errors.TableNotFoundError) as error:
                newest = table.newest()
                version = attempt.landed_as(newest)
                if version is not None:
                    record(version)
                else:
                    newest = _conflict(retry, table, newest, error)
                    if retry.consecutive >= _CONFLICTS_UNTIL_SKIPPED:
                        scope.busy |= scope.limit & _changed(table, newest)
                    # So that next to busy writers each conflict wastes less work.
                    table, rows = newest, min(rows, attempt.rows) // 2
                    continue
            else:
                if version is None:
                    if scope.widened(first=not done.removed):
                        continue
                    break
                newest = table.newest()
            scope.own |= _with_files(newest.manifest, attempt.files)
            done.count(attempt.tasks, attempt.results)
            retry.consecutive, rows = 0, self.executor.rows_per_commit
            newest = corrections.restore_memwal_index(table, newest, version, self.note, retry)
            table = corrections.exclude_dropped_rows(newest, attempt.table, self.note, retry)
            get_logger(__name__).info("fragments_compacted", table=table.location.uri, version=table.version)
        self.table = table

    def index_again(self) -> bool:
        """Catch up the indexes that pylance did not move with the rows, as far as the budget goes; whether any was."""
        behind = [
            index for index in corrections.left_behind(self.table) if not self.table.fragment_ids <= index.covered
        ]
        debts = debts_of(self.table, CatchupOptions())
        left = self._left(self.options.max_bytes)
        names = planning.affordable(
            {index.name: debts[index.name].bytes for index in behind}, planning.index_budget(self.options, left or 0)
        )
        self.indexes_behind = [index.name for index in behind if index.name not in names]
        if not names:
            return False
        chosen = CatchupOptions(
            indexes=tuple(names), answers=self.options.answers, engine=self.options.engine, master=self.options.master
        )
        report = catch_up(self.table, chosen, self.context)
        self.table = self.table.newest()
        self.index_bytes += sum(index.bytes_written for index in report.indexes)
        self.indexed_again |= {index.name for index in report.indexes}
        for index in report.indexes:
            if index.error is not None and self.error is None:
                self.error = errors.IndexesBehindError(
                    f"Index {index.name} does not cover what was rewritten: {index.error}", remedy=index.error.remedy
                )
        return any(index.decision == "updated" for index in report.indexes)


def _may_write(planner: planning.Planner) -> bool:
    """Whether a run may commit anything: a table to which nothing is due is not written to."""
    entry = find_memwal_entry(planner.table.manifest.indexes)
    return bool((entry and entry.fragment_bitmap) or corrections.unchecked_segments(planner.table) or planner.groups())


def _unfinished(done: _Totals, due: int, options: CompactOptions, busy: Collection[int]) -> str | None:
    """Why a run that rewrote something did not rewrite all, or rewrote more than it was allowed to."""
    reasons = [_too_large(done.bytes_read, options)]
    if due and busy:
        reasons.append("Fragments that other writers kept changing are left for the next run.")
    elif due and options.max_bytes is not None:
        reasons.append("The run has used its --max-bytes; the next run continues.")
    return " ".join(reason for reason in reasons if reason) or None


def _planned_why(planner: planning.Planner, run: planning.Debt, options: CompactOptions) -> str | None:
    """What a dry run says of a run that would not rewrite all, or more than it is allowed to."""
    left = planning.debt(planner.groups(), planner.policy).bytes_read > run.bytes_read
    why = "The run would use its --max-bytes; the next run would continue."
    return _too_large(run.bytes_read, options) or (why if left else None)


def _too_large(rewritten: int, options: CompactOptions) -> str | None:
    if options.max_bytes is None or rewritten <= options.max_bytes:
        return None
    return (
        f"Nothing that is due fits --max-bytes ({size_text(options.max_bytes)}): the smallest group of fragments, of "
        f"{size_text(rewritten)}, is rewritten alone."
    )


def _changed(old: Table, new: Table) -> set[int]:
    """Fragments of ``old`` that are gone in ``new``, or have other deletions or files."""
    current = {fragment.id: fragment for fragment in new.manifest.manifest.fragments}
    return {fragment.id for fragment in old.manifest.manifest.fragments if current.get(fragment.id) != fragment}


def _refuse_broken_indexes(table: Table) -> None:
    """Raise if an index cannot be opened: Lance could not remap its rows, and would only log that it drops them."""
    for name in base_indexes(table):
        try:
            with lance_errors("open an index of", table.location.uri):
                table.dataset.stats.index_stats(name)
        except errors.StorageError as error:
            raise errors.IndexesBehindError(
                f"Index {name} cannot be opened, and a compaction would make pylance drop its coverage: {error}",
                remedy="See runbooks/index-behind.md, then run it again.",
            ) from error


def _checked_settings(table: Table, options: CompactOptions) -> Table:
    """The table, or a newer version if it was expired meanwhile, with settings by which it can be compacted."""
    while True:
        check_rewritable(table)
        refuse_auto_cleanup(table)
        try:
            planning.refuse_settings(table, options)
        except (errors.ObjectNotFoundError, errors.TableNotFoundError):
            newest = table.newest()
            if newest.version <= table.version:
                raise
            table = newest
        else:
            return table


def _conflict(retry: CommitRetry, table: Table, newest: Table, error: errors.MemwalOpsError) -> Table:
    """The version to plan on after a commit conflict; raises ``error`` if it is not a conflict."""
    # If there is a newer version, this one was cleaned up meanwhile; else the table is missing.
    gone = isinstance(error, (errors.ObjectNotFoundError, errors.TableNotFoundError)) and newest.version > table.version
    if isinstance(error, CommitLostError) or gone or is_commit_conflict(error):
        # A file to which the newest version refers is missing: a retry cannot succeed.
        if gone and (named := name_damage(newest, error)) is not error:
            raise named from error
        return retry.conflict(table, error)
    raise error


def _with_files(manifest: VersionManifest, files: Collection[str]) -> set[int]:
    return {
        fragment.id for fragment in manifest.manifest.fragments if any(file.path in files for file in fragment.files)
    }


def _has_file(table: Table) -> bool:
    return table.store.head(snapshot_path(table.index.uuid)) is not None


def backlog(table: Table) -> Mapping[str, float]:
    """The size of the base, its small fragments and deleted rows, and what a compaction would rewrite.

    Live rows and bytes as the manifest records them; without what an old release did not record.
    """
    fragments = table.manifest.manifest.fragments
    small = sum(fragment.physical_rows < DEFAULT_TARGET_ROWS for fragment in fragments)
    deleted = sum(fragment.deletion_file.num_deleted_rows for fragment in fragments)
    counts = {"fragments": len(fragments), "small_fragments": small, "deleted_rows": deleted}
    if all(fragment.physical_rows for fragment in fragments):
        counts["table_rows"] = sum(fragment.physical_rows for fragment in fragments) - deleted
    sizes = [file.file_size_bytes for fragment in fragments for file in fragment.files]
    return {**counts, **({"table_bytes": sum(sizes)} if all(sizes) else {}), **planning.compaction_debt(table)}
