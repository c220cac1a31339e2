"""The erase job: delete rows, and remove all that still holds rows which were deleted, with a proof.

Each step is one of an existing job: merge, delete, compact of just the fragments that hold such rows, catch-up of the
indexes that may hold them, expire of the versions that do, gc. What is left is found by reading the table anew, so a
killed run leaves no state that the next one needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import lance
import numpy as np

from memwal_ops.core.byte_scan import ErasedValues, ScanScope
from memwal_ops.core.certificate import NOT_SEEN, CheckReport, Erasure, run_erasure
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import RunContext
from memwal_ops.core.erasure import EraseDecision, EraseReport, RowHolder
from memwal_ops.core.run import run_job
from memwal_ops.errors import MemwalOpsError, ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import (
    CommitLostError,
    CommitNote,
    check_rewritable,
    commit_strict,
    fixed_dictionaries,
    fixed_dictionary_error,
)
from memwal_ops.formats.lance.commit.publication import deleted_unless_named
from memwal_ops.formats.lance.commit.rebased_commit import commit_deletion
from memwal_ops.formats.lance.engines.merge.rewrite import BaseVersion as Base, delete_superseded, deletion_path
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup.update import catch_up
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.erase.log import identity_columns
from memwal_ops.formats.lance.jobs.erase.scan import compared, prefixes, scanned
from memwal_ops.formats.lance.jobs.erase.survey import Survey, Surveyor
from memwal_ops.formats.lance.jobs.erase.target import Target
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions, EraseOptions, ExpireOptions, MergeOptions
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.formats.lance.retention.garbage import sweep_leftovers, sweep_staged
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memwal_ops.formats.lance.jobs.catchup.report import IndexReport
    from memwal_ops.formats.lance.table import Table


@dataclass
class TableErasure(Erasure):
    """The erasure of rows of a Lance table.

    Attributes:
        table: the newest version that it has read.
        targets: the rows that must be gone; and those that are to be deleted in addition, as they are too old.
    """

    table: Table
    targets: Sequence[Target]
    surveyor: Surveyor
    _left: Survey | None = field(default=None, init=False)
    surveyor_of: ClassVar[type[Surveyor]] = Surveyor
    not_seen: ClassVar[tuple[str, ...]] = (
        *NOT_SEEN,
        "files outside of the table to which external blobs refer",
        "shallow clones of this table elsewhere",
        "values of dropped or overwritten columns, not looked for, in data files that were not rewritten since",
        "averages in vector indexes: centroids and codebooks, which are kept where there is a log",
    )

    @classmethod
    def begin(
        cls, table: Table, options: EraseOptions, context: RunContext | None, *, changes: bool = False
    ) -> TableErasure:
        """Check a table and the options, and begin an erasure, which may change the table or not."""
        now = datetime.now(UTC)
        cut = options.cut(now)
        if cut is not None and changes:  # the store's clock may be behind ours
            cut = min(cut, store_time(table.store))
        too_old = options.ttl.expression(now)
        ignored = [name.strip() for name in (options.ignore_columns or "").split(",")]
        values = ErasedValues([*filter(None, ignored)])
        kept = values if options.where is not None or options.certificate is not None else None
        targets = [Target(options.where, cut, kept, identity_columns(table), partial(prefixes, table))]
        targets += [] if too_old is None else [Target(too_old, None)]
        for column, value in compared(options.where or ""):
            targets[0].keep(column, value)
        for target in targets:
            target.check(table.dataset, table.location.uri)
        check_rewritable(table)
        if fixed := fixed_dictionaries(table):
            listed = (target.living_values(table).values() for target in targets)
            if any(every - used for values in listed for every, used in values):
                raise fixed_dictionary_error(table, fixed, "a value that no row has stays in each version")
        if changes:
            cls.check(table)
            probe_conditional_writes(table.store)
            now = store_time(table.store)
        surveyor = cls.surveyor_of(targets, table.store, options, now)
        return cls(table.newest(), targets, surveyor, options=options, context=context or RunContext(), values=values)

    @staticmethod
    def check(table: Table) -> None:
        """Refuse a table that cannot be changed so."""

    @property
    def has_log(self) -> bool:
        """Whether rows may be in a log."""
        return self.table.log.exists

    @property
    def before(self) -> datetime | None:
        """See the base class."""
        return self.targets[0].before

    def scanned(self) -> ScanScope:
        """See the base class."""
        return scanned(self.table, self.options.where)

    def survey(self) -> Survey:
        """All that holds such rows; read again only after a step that changed something."""
        self.context.checkpoint()
        newest = self.table.newest()
        if self._left is None or newest.version != self._left.table.version:
            self._left = self.surveyor.survey(newest)
        self.table = newest
        return self._left

    def count(self, name: str, number: int) -> None:
        """See the base class."""
        super().count(name, number)
        if number:
            self._left = None

    def erase(self) -> Survey:
        """Do every step that something needs; return what is left."""
        if self.has_log:
            self._merge()
        self._delete()
        survey = self._newest()
        if survey.stained:
            self._rewrite(survey)
            survey = self._newest()
        if survey.indexes or self.has_log:
            self._rebuild(survey)
            survey = self._newest()
        if survey.newest_mentions:
            self._until_landed(self._touch)
        self._erase_followers()
        survey = self.survey()
        self.surveyor.segments.record()
        if survey.versions or any(holder.kind == "leftover" for holder in survey.holders):
            self._expire(survey)
        if survey.holders:
            self._collect()
            survey = self.survey()
        if survey.log is not None:
            self.count("log_entries_emptied", survey.log.empty_posts())
        return self.survey()

    def commit(self, table: Table, operation: lance.LanceOperation.Delete, note: CommitNote) -> None:
        """Publish a deletion. Raises ``CommitLostError`` if another commit was first."""
        if table.log.strict_commits:
            commit_strict(table, operation, {}, note)
        else:
            commit_deletion(table, operation, note)

    def _until_landed(self, attempt: Callable[[], int | None]) -> int | None:
        """The result of an attempt to publish on ``table``, repeated after each commit conflict; None: nothing to do.

        Raises:
            CommitConflictError: too many commit conflicts in a row.
            CommitStateUnknownError: the outcome of a commit is unknown; run it again.
        """
        retry = CommitRetry()
        while True:
            try:
                done = attempt()
            except (CommitLostError, ObjectNotFoundError) as error:
                self.table = retry.conflict_or_expired(self.table, error)
            else:
                self.context.figures["conflicts"] += retry.conflicts
                if done is not None:
                    self.table = retry.landed(self.table)
                return done

    def _newest(self) -> Survey:
        self.context.checkpoint()
        self.table = self.table.newest()
        return self.surveyor.newest(self.table)

    def _merge(self) -> None:
        self.context.step("merge")
        report = merge.apply(self.table, MergeOptions(), self.context)
        self.count("generations_merged", sum(len(merged.merge_pass.generations) for merged in report.passes))
        self.table = self.table.newest()
        self.surveyor.merged = True

    def _delete(self) -> None:
        self.context.step("delete")
        for target in self.targets:
            self.count("rows_deleted", self._until_landed(partial(self._delete_living, target)) or 0)

    def _delete_living(self, target: Target) -> int | None:
        """Delete the rows that match and are not deleted; return how many, or None."""
        table = self.table
        batches = [batch.to_numpy() for batch in target.living(table.dataset, table.location.uri)]
        addresses = np.sort(np.concatenate(batches)) if batches else np.empty(0, np.uint64)
        if not addresses.size:
            return None
        self.context.checkpoint()
        updated, removed = delete_superseded(Base(table.location, table.dataset), addresses.astype(np.uint64))
        written = [path for fragment in updated if (path := deletion_path(fragment)) is not None]
        table.guard.register(written)
        with deleted_unless_named(partial(table.discard, written)):
            self.commit(table, lance.LanceOperation.Delete(updated, removed, ""), CommitNote("erase"))
        return int(addresses.size)

    def _touch(self) -> int:
        """Publish a version without any change: the newest one has the expression of a deletion in it."""
        self.commit(self.table, lance.LanceOperation.Delete([], [], ""), CommitNote("erase"))
        return 0

    def _rewrite(self, found: Survey) -> None:
        self.context.step("compact")
        options = CompactOptions(deleted_fraction=0.0)
        report = compact.apply(self.table, options, self.context, only=frozenset(found.stained))
        self.count("fragments_rewritten", report.fragments_removed)
        if report.error is not None:
            self.faults.append(RowHolder("fragment", "not rewritten", str(report.error), blocks=True))

    def _rebuild(self, found: Survey) -> None:
        self.context.step("catchup")
        reports: list[IndexReport] = []
        if found.indexes:
            rebuilt = catch_up(self.table, CatchupOptions(indexes=tuple(found.indexes), rebuild=True), self.context)
            decided = {one.name: one.decision for one in rebuilt.indexes if one.error is None}
            self.count("indexes_rebuilt", sum(decision == "updated" for decision in decided.values()))
            for name, decision in decided.items():
                if name in found.indexes and decision not in {"updated", "dropped"}:
                    why = f"it was not built anew ({decision}): {found.indexes[name]}"
                    self.faults.append(RowHolder("index", name, why, blocks=True))
            reports += rebuilt.indexes
            self.table = self.table.newest()
        if self.table.log.shows_progress:  # merged generations go once every index covers them
            reports += catch_up(self.table, CatchupOptions(), self.context).indexes
        for report in reports:
            if report.error is not None:
                self.faults.append(
                    RowHolder("index", report.name, f"it cannot be built anew: {report.error}", blocks=True)
                )

    def _erase_followers(self) -> None:
        for follower in self.surveyor.followers(self.table):
            if not self.surveyor.is_named(follower):
                continue
            self.context.step("followers")
            options = {"deleted_before": self.surveyor.now.isoformat()}
            try:
                report: Any = run_job(follower.folder, "erase", options, apply=True)
            except MemwalOpsError as error:
                self.faults.append(
                    RowHolder("index folder", follower.folder, f"it cannot be erased: {error}", blocks=True)
                )
                continue
            self.count("index_folders_erased", report.decision == EraseDecision.ERASED)
            held = (holder for holder in report.holders if holder.blocks)
            self.faults += [replace(holder, name=f"{follower.folder}: {holder.name}") for holder in held]

    def _expire(self, found: Survey) -> None:
        self.context.step("expire")
        # Those of killed commits, whose files then belong to no version.
        self.count("objects_deleted", sweep_staged(self.table) + sweep_leftovers(self.table))
        options = ExpireOptions(older_than=self.options.older_than, allow_unsafe=self.options.allow_unsafe)
        report = expire.apply(self.table, options, self.context, only=frozenset(found.versions))
        kept = {kept.version: kept.because for kept in report.kept if kept.old_enough is None}
        if held := {version: why for version, why in kept.items() if version in found.versions}:
            self.surveyor.kept |= held
            self._left = None
        self.count("versions_expired", len(report.versions))
        self.count("objects_deleted", report.objects)

    def _collect(self) -> None:
        self.context.step("gc")
        report = gc.apply(self.table.newest(), self.surveyor.gc_options, self.context)
        self.count("objects_deleted", report.deleted_objects)
        if report.drained:
            self._left = None


def job_of(kind: type[TableErasure]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The plan and the apply of a kind of erasure."""

    @names_damage
    def plan(table: Table, options: EraseOptions, context: RunContext | None = None) -> EraseReport | CheckReport:
        """Report what holds such rows, without changes."""
        return run_erasure(table, options, partial(kind.begin, table, options, context), applied=False)

    @names_damage
    def apply(table: Table, options: EraseOptions, context: RunContext | None = None) -> EraseReport | CheckReport:
        """Erase. Safe to kill, to repeat and to run twice concurrently; each step is that of a job of its own.

        Raises:
            CommitConflictError: too many commit conflicts in a row.
            MemwalOpsError: as the jobs of which it is made; what was done stays, and the next run continues.
        """
        return run_erasure(table, options, partial(kind.begin, table, options, context, changes=True), applied=True)

    return plan, apply


plan, apply = job_of(TableErasure)
