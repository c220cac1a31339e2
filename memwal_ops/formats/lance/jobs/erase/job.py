"""The erase job: delete rows, and remove all that still holds rows which were deleted, with a proof.

Each step is one of an existing job: merge, delete, compact of just the fragments that hold such rows, catch-up of the
indexes that may hold them, expire of the versions that do, gc. What is left is found by reading the table anew, so a
killed run leaves no state that the next one needs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

from memwal_ops.core.certificate import CheckReport, check_certificate, check_key, write_certificate
from memwal_ops.core.context import RunContext
from memwal_ops.core.erasure import EraseDecision, EraseOptions, EraseReport, Holder
from memwal_ops.errors import InvariantViolatedError
from memwal_ops.formats.lance.commit.commit import CommitNote, check_rewritable
from memwal_ops.formats.lance.jobs.catchup.update import catch_up
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.erase.deleting import delete_living, touch
from memwal_ops.formats.lance.jobs.erase.survey import Surveyor
from memwal_ops.formats.lance.jobs.erase.target import Target
from memwal_ops.formats.lance.jobs.expire import job as expire
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.merge import job as merge
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions, ExpireOptions, MergeOptions
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memwal_ops.formats.lance.jobs.catchup.report import IndexReport
    from memwal_ops.formats.lance.jobs.erase.found import Survey
    from memwal_ops.formats.lance.table import Table

_NOT_SEEN = (
    "earlier versions of objects, if the bucket keeps them: memwal-ops doctor URI reports it",
    "replicas and backups of the store",
    "files outside of the table to which external blobs refer",
    "shallow clones of this table elsewhere",
    "caches of readers, and programs that have a version open",
    "averages in vector indexes: centroids and codebooks, which are kept where there is a log",
)

__all__ = ["EraseOptions", "EraseReport", "apply", "plan"]


@names_damage
def plan(table: Table, options: EraseOptions, context: RunContext | None = None) -> EraseReport | CheckReport:
    """Report what holds such rows, without changes."""
    del context
    if options.check is not None:
        return check_certificate(table.newest(), options.check)
    started = time.monotonic()
    target = _target(table, options)
    check_rewritable(table)
    found = Surveyor(target, table.store, options, datetime.now(UTC)).survey(table)
    return _report(found, options, started, applied=False)


@names_damage
def apply(table: Table, options: EraseOptions, context: RunContext | None = None) -> EraseReport | CheckReport:
    """Erase. Safe to kill, to repeat and to run twice concurrently; each step is that of a job of its own.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
        MemwalOpsError: as the jobs of which it is made; what was done stays, and the next run continues.
    """
    if options.check is not None:
        return check_certificate(table.newest(), options.check)
    started = time.monotonic()
    context = context or RunContext()
    target = _target(table, options)
    check_rewritable(table)
    probe_conditional_writes(table.store)
    run = _Run(
        table.newest(),
        options,
        target,
        context,
        Surveyor(target, table.store, options, store_time(table.store)),
    )
    found = run.erase()
    done = {name: number for name, number in run.done.items() if number}
    return _report(found, options, started, applied=True, done=done, faults=run.faults)


def _target(table: Table, options: EraseOptions) -> Target:
    options.require_target()
    if options.sign_with is not None:
        check_key(options.sign_with)
    target = Target(options.where, options.cut())
    target.check(table.dataset, table.location.uri)
    return target


def _report(
    found: Survey,
    options: EraseOptions,
    started: float,
    *,
    applied: bool,
    done: Mapping[str, int] = MappingProxyType({}),
    faults: Sequence[Holder] = (),
) -> EraseReport:
    table = found.table
    proven = [(meta, why) for meta, why in found.objects if why is not None]
    report = EraseReport(
        applied=applied,
        holders=(*found.holders, *faults),
        version=table.version,
        living=found.living,
        done=dict(done),
        not_seen=_NOT_SEEN,
        warnings=options.dangers(),
    )
    if report.decision is EraseDecision.ERASED:
        if len(proven) < len(found.objects):
            unproven = next(meta.path for meta, why in found.objects if why is None)
            raise InvariantViolatedError(f"Nothing holds such a row, and yet nothing shows that of {unproven}.")
        if options.certificate is not None:
            report.certificate = write_certificate(table, options, proven, _NOT_SEEN)
    report.seconds = time.monotonic() - started
    return report


@dataclass
class _Run:
    """State of one run.

    Attributes:
        table: the newest version that it has read.
        done: what it did.
        faults: what it could not do, and that the table does not show.
    """

    table: Table
    options: EraseOptions
    target: Target
    context: RunContext
    surveyor: Surveyor
    done: dict[str, int] = field(default_factory=dict)
    faults: list[Holder] = field(default_factory=list)

    def erase(self) -> Survey:
        """Do every step that something needs; return what is left."""
        if self.table.memwal is not None:
            self._merge()
        self._delete()
        found = self._survey()
        if found.stained:
            self._rewrite(found)
            found = self._survey()
        if found.indexes or self.table.memwal is not None:
            self._rebuild(found)
            found = self._survey()
        if found.newest_mentions:
            self.table = touch(self.table, CommitNote.new("erase"))
            found = self._survey()
        self.surveyor.segments.record()
        if found.versions or any(one.kind == "leftover" for one in found.holders):
            self._expire(found)
        if found.holders:
            self._collect()
            found = self._survey()
        if found.log is not None and (emptied := found.log.empty_posts()):
            self._count("log_entries_emptied", emptied)
            found = self._survey()
        return found

    def _survey(self) -> Survey:
        self.context.checkpoint()
        self.table = self.table.newest()
        return self.surveyor.survey(self.table)

    def _count(self, name: str, number: int) -> None:
        self.done[name] = self.done.get(name, 0) + number
        self.context.figures[name] += number

    def _merge(self) -> None:
        self.context.step("merge")
        report = merge.apply(self.table, MergeOptions(), self.context)
        self._count("generations_merged", sum(len(one.merge_pass.generations) for one in report.passes))
        self.table = self.table.newest()
        self.surveyor.merged = True

    def _delete(self) -> None:
        self.context.step("delete")
        self.table, rows = delete_living(self.table, self.target, CommitNote.new("erase"), self.context)
        self._count("rows_deleted", rows)

    def _rewrite(self, found: Survey) -> None:
        self.context.step("compact")
        options = CompactOptions(deleted_fraction=0.0)
        report = compact.apply(self.table, options, self.context, only=frozenset(found.stained))
        self._count("fragments_rewritten", report.fragments_removed)
        if report.error is not None:
            self.faults.append(Holder("fragment", "not rewritten", str(report.error), blocks=True))

    def _rebuild(self, found: Survey) -> None:
        self.context.step("catchup")
        reports: list[IndexReport] = []
        if found.indexes:
            rebuilt = catch_up(self.table, CatchupOptions(indexes=tuple(found.indexes), rebuild=True), self.context)
            self._count("indexes_rebuilt", sum(one.decision == "updated" for one in rebuilt.indexes))
            reports += rebuilt.indexes
            self.table = self.table.newest()
        if self.table.memwal is not None:  # merged generations go once every index covers them
            reports += catch_up(self.table, CatchupOptions(), self.context).indexes
        for one in reports:
            if one.error is not None:
                self.faults.append(Holder("index", one.name, f"it cannot be built anew: {one.error}", blocks=True))

    def _expire(self, found: Survey) -> None:
        self.context.step("expire")
        options = ExpireOptions(older_than=self.options.older_than, allow_unsafe=self.options.allow_unsafe)
        report = expire.apply(self.table, options, self.context, only=frozenset(found.versions))
        kept = {one.version: one.because for one in report.kept if one.old_enough is None}
        self.surveyor.kept |= {version: why for version, why in kept.items() if version in found.versions}
        self._count("versions_expired", len(report.versions))
        self._count("objects_deleted", report.objects)

    def _collect(self) -> None:
        self.context.step("gc")
        report = gc.apply(self.table.newest(), self.surveyor.gc_options, self.context)
        self._count("objects_deleted", report.deleted_objects)
