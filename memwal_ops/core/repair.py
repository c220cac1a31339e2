"""The repair job for tables of every format: fix what has a provably safe fix, and list the choices for the rest.

A run verifies the table first. Each finding then has either a fix that its format proves safe, or choices for an
operator. Right before a fix is made, it is replanned from the current state of the store; it keeps what it replaces
(:mod:`memwal_ops.core.quarantine`); and it writes on the condition that nothing changed meanwhile. So a run may be
killed anywhere, repeated, and run concurrently with writers and all other jobs.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NoReturn, TypeAlias, TypeVar

from memwal_ops.core.context import RunContext
from memwal_ops.core.leases import end_expired
from memwal_ops.core.protocols import Table
from memwal_ops.core.quarantine import content_of, digest, keep, read_record
from memwal_ops.core.repair_report import (
    Choice,
    Fixed,
    Loss,
    OpenDecision,
    Outcome,
    RepairDecision,
    RepairReport,
    Undone,
)
from memwal_ops.core.verification import Finding, Severity
from memwal_ops.errors import (
    CommitStateUnknownError,
    InvalidFormatError,
    InvalidUsageError,
    LeaseLostError,
    MemwalOpsError,
)
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.core.quarantine import Place, RepairRecord
    from memwal_ops.core.repair_spec import RepairOptions
    from memwal_ops.core.verification import VerifyOptions, VerifyReport

TableT = TypeVar("TableT", bound=Table)
Keep: TypeAlias = "Callable[[str, bytes | None, bytes | None], None]"
"""Keeps replaced content: called with the name of its place, the content, and what replaces it."""
_ATTEMPTS = 8


class FixAttempt(enum.Enum):
    """How an attempt at a fix ended."""

    DONE = enum.auto()
    GONE = enum.auto()
    """There is nothing to fix any more."""
    CONFLICT = enum.auto()
    """Another process changed it meanwhile: replan."""


@dataclass(frozen=True)
class Fix(Generic[TableT]):
    """A fix that is provably safe now, or loses what its ``loss`` names.

    Attributes:
        part: what it changes; findings with the same part are fixed together.
        text: what it does: a sentence without a subject.
        make: replans on the newest revision of the table, keeps what it replaces, and replaces it. Raises
            ``UnsafeError`` if it is not safe any more, or would lose more than ``loss``.
        loss: what it gives up, so that it is made only with ``--accept-loss``; None: nothing.
    """

    part: str
    text: str
    make: Callable[[TableT, Keep], FixAttempt]
    loss: Loss | None = None


class UnsafeError(Exception):
    """A finding has no fix that is provably safe. The message is the reason."""


def _no_fix(table: Table, finding: Finding) -> None:
    del table, finding


def _no_place(table: Table, name: str) -> NoReturn:
    raise InvalidFormatError(
        f"Cannot undo: the record of the repair names {name!r}, which no repair of {table.location.uri} replaces."
    )


@dataclass(frozen=True)
class RepairJob(Generic[TableT]):
    """The job of one format.

    Attributes:
        verify: reads the findings.
        fix_of: the fix of a finding; None: such findings have no fix. Reads only. Raises ``UnsafeError`` if a fix
            exists, but is not safe now.
        place_of: the place with a name. Raises ``InvalidFormatError`` if no repair replaces such a place.
        choices: the choices of an operator, by check.
    """

    verify: Callable[[TableT, VerifyOptions, RunContext], VerifyReport]
    fix_of: Callable[[TableT, Finding], Fix[TableT] | None] = _no_fix
    place_of: Callable[[TableT, str], Place] = _no_place
    choices: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)

    def plan(self, table: TableT, options: RepairOptions, context: RunContext | None = None) -> RepairReport:
        """What :meth:`apply` would do. Reads only.

        Raises:
            InvalidUsageError: there is no repair to undo, or what it wrote was changed since.
            StorageError: the store failed.
        """
        return self._run(table, options, context or RunContext(), apply=False)

    def apply(self, table: TableT, options: RepairOptions, context: RunContext | None = None) -> RepairReport:
        """Make the fixes, or undo one. Safe to kill, to repeat, and to run concurrently with writers and jobs.

        Raises:
            InvalidUsageError: see :meth:`plan`.
            StorageError: the store failed.
            CommitStateUnknownError: the outcome of a commit is unknown; run it again.
        """
        return self._run(table, options, context or RunContext(), apply=True)

    def _run(self, table: TableT, options: RepairOptions, context: RunContext, *, apply: bool) -> RepairReport:
        started = time.monotonic()
        if options.undo:
            if apply:
                probe_conditional_writes(table.store)
            undone = self._undo(table, read_record(table.store, options.undo), apply=apply)
            report = RepairReport(table.revision, apply=apply, undone=undone)
        else:
            found = self.verify(table, options, context)
            run = _Run(self, table, context, RepairReport(found.revision, apply=apply), options.accept_loss)
            run.plan(found)
            if apply and run.fixes:
                probe_conditional_writes(table.store)
                run.make_fixes()
            report = run.report
        if apply:
            report.version = table.newest().revision
        report.seconds = time.monotonic() - started
        return report

    def _undo(self, table: TableT, kept: RepairRecord, *, apply: bool) -> Undone:
        place = self.place_of(table, kept.place)
        before = content_of(table.store, kept)
        present = place.read()
        if digest(present) == kept.before:
            return Undone(kept, RepairDecision.NOTHING_TO_UNDO)
        if digest(present) != kept.after:
            raise _changed(kept)
        if not apply:
            return Undone(kept, RepairDecision.PLANNED)
        if not place.swap(present, before):
            raise _changed(kept)
        return Undone(kept, RepairDecision.UNDONE)


def _changed(kept: RepairRecord) -> InvalidUsageError:
    where = f"The replaced content is in {kept.content}." if kept.before is not None else "It did not exist before."
    return InvalidUsageError(
        f"{kept.place} was changed since repair {kept.id} wrote it: undoing that would lose the later change.",
        remedy=f"{where} Compare it with what is there now: memwal-ops verify URI shows whether anything is wrong.",
    )


@dataclass
class _Run(Generic[TableT]):
    job: RepairJob[TableT]
    table: TableT
    context: RunContext
    report: RepairReport
    accepts_loss: bool
    fixes: list[tuple[Fix[TableT], Finding, Fixed]] = field(default_factory=list)

    def plan(self, found: VerifyReport) -> None:
        """Find the fix of each finding, or its choices."""
        seen: dict[str, Fixed] = {}
        for finding in found.listed:
            try:
                fix = _common_fix(self.table, finding) or self.job.fix_of(self.table, finding)
            except UnsafeError as error:
                self._add_decision(finding, str(error))
                continue
            except MemwalOpsError as error:
                self._add_decision(finding, f"It is not known whether a fix is safe: {error}")
                continue
            if fix is None:
                if finding.severity is not Severity.INFO:
                    self._add_decision(finding, "It has no fix that is provably safe.")
            elif fix.part in seen:
                seen[fix.part].findings.append(finding)
            elif fix.loss is not None and not self.accepts_loss:
                self._add_decision(finding, "It has no fix that loses nothing.", fix)
            else:
                seen[fix.part] = Fixed(fix.text, [finding], loss=fix.loss)
                self.fixes.append((fix, finding, seen[fix.part]))
        self.report.fixes = [*seen.values()]
        self.report.more = sum(found.findings.counts.values()) - len(found.findings.kept)

    def make_fixes(self) -> None:
        """Make the fixes, one after another; one that fails does not stop the others."""
        for fix, finding, fixed in self.fixes:
            self.context.checkpoint()
            try:
                self._make_fix(fix, finding.check, fixed)
            except (LeaseLostError, CommitStateUnknownError):
                raise
            except UnsafeError as error:
                self.report.fixes.remove(fixed)
                for one in fixed.findings:
                    self._add_decision(one, str(error))
            except MemwalOpsError as error:
                fixed.outcome, fixed.error = Outcome.FAILED, error
            self.context.advance("repairing", "findings", total=len(self.fixes))
            self.context.figures["repaired"] += fixed.outcome is Outcome.REPAIRED

    def _make_fix(self, fix: Fix[TableT], check: str, fixed: Fixed) -> None:
        def store(place: str, before: bytes | None, after: bytes | None) -> None:
            fixed.kept = keep(self.table.store, check, place, before, after).id

        for _ in range(_ATTEMPTS):
            self.table = self.table.newest()
            made = fix.make(self.table, store)
            if made is not FixAttempt.CONFLICT:
                break
        fixed.outcome = _OUTCOMES[made]
        if made is not FixAttempt.DONE:
            fixed.kept = None

    def _add_decision(self, finding: Finding, why: str, fix: Fix[TableT] | None = None) -> None:
        choices = _COMMON_CHOICES.get(finding.check) or self.job.choices.get(finding.check)
        choices, loss = choices or tuple(_default_choices(finding)), None
        if fix is not None:
            loss = fix.loss
            go_on = f"memwal-ops repair URI --accept-loss --apply: {fix.text}."
            choices = (*choices, Choice(go_on, f"Lost: {loss}. Older rows of these keys are visible again."))
        self.report.decisions.append(OpenDecision(finding, why, choices, loss))


_OUTCOMES = {FixAttempt.DONE: Outcome.REPAIRED, FixAttempt.GONE: Outcome.GONE, FixAttempt.CONFLICT: Outcome.OVERTAKEN}


def _default_choices(finding: Finding) -> Iterator[Choice]:
    yield Choice(finding.remedy, "See the runbook." if finding.page else "None is known.")
    yield Choice("Leave it as it is.", finding.consequence)


def _common_fix(table: TableT, finding: Finding) -> Fix[TableT] | None:
    """The fixes of findings that every format has."""
    del table
    if finding.check != "lease_expired":
        return None
    job = finding.about

    def release(newest: TableT, keep_: Keep) -> FixAttempt:
        del keep_  # a new number is added, and the old ones stay
        return FixAttempt.GONE if end_expired(newest.store, job) is None else FixAttempt.DONE

    return Fix(f"lease:{job}", f"release the expired lease of {job}", release)


_COMMON_CHOICES = {
    "lease": (
        Choice(
            "Stop all supervisors of the table, inspect the file, and delete it if it is not a lease.",
            "No supervised job of that name runs meanwhile; no row depends on a lease.",
        ),
        Choice("Leave it as it is.", "No supervised job of that name can begin; commands by hand can."),
    ),
    "hold": (
        Choice(
            "memwal-ops hold URI --release NUMBER, after you asked its holder.",
            "Its holder cannot read that revision either way: it does not exist any more.",
        ),
        Choice("Wait until it ends by itself.", "gc and expire keep what it names until then."),
    ),
}
