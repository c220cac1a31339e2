"""The repair job for tables of every format: fix what has a provably safe fix, and list the choices for the rest.

A run verifies the table first. Each finding then has either a fix that its format proves safe, or choices for an
operator. Right before a fix is made, it is replanned from the current state of the store; it keeps what it replaces
(:mod:`memwal_ops.core.quarantine`); and it writes on the condition that nothing changed meanwhile. So a run may be
killed anywhere, repeated, and run concurrently with writers and all other jobs.
"""

from __future__ import annotations

import enum
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from memwal_ops import errors
from memwal_ops.core import quarantine, verification
from memwal_ops.core.context import RunContext
from memwal_ops.core.leases import end_expired
from memwal_ops.core.options import RepairOptions, VerificationOptions
from memwal_ops.core.protocols import Table
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted, paragraph


class RepairDecision(enum.StrEnum):
    """How a run ended."""

    NOTHING_TO_REPAIR = "nothing_to_repair"
    PLANNED = "planned"
    REPAIRED = "repaired"
    INCOMPLETE = "incomplete"
    DECISION_NEEDED = "decision_needed"
    UNDONE = "undone"
    NOTHING_TO_UNDO = "nothing_to_undo"


class Outcome(enum.StrEnum):
    """How a fix ended."""

    PLANNED = "planned"
    REPAIRED = "repaired"
    GONE = "gone"
    """There was nothing to fix any more when it was replanned."""
    OVERTAKEN = "overtaken"
    """Other processes changed it at each attempt."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of an operator, and its consequence: a sentence each."""

    choice: str
    consequence: str


_MAX_KEYS = 20


@dataclass(frozen=True, slots=True)
class Loss:
    """What a fix gives up. ``what``: what cannot be read any more: a noun phrase."""

    what: str
    rows: int | None = None
    keys: tuple[str, ...] | None = None

    def __str__(self) -> str:
        rows = "an unknown number of rows" if self.rows is None else counted(self.rows, "row")
        if self.rows == 0:
            return f"{self.what}: no row is lost"
        if self.keys is None:
            return f"{self.what}: {rows} with unknown keys"
        more = len(self.keys) - _MAX_KEYS
        shown = ", ".join(self.keys[:_MAX_KEYS]) + (f" and {more:,} more" if more > 0 else "")
        return f"{self.what}: {rows} with the keys {shown}"

    def to_json(self) -> dict[str, Any]:
        """The ``loss`` of a fix or a decision."""
        return {"what": self.what, "rows": self.rows, "keys": None if self.keys is None else [*self.keys[:100]]}


@dataclass(frozen=True, slots=True)
class OpenDecision:
    """A finding that needs an operator's decision: why, and the choices. ``loss``: of going on (``--accept-loss``)."""

    finding: verification.Inconsistency
    why: str
    choices: tuple[Choice, ...]
    loss: Loss | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry of ``decisions``."""
        choices = [{"choice": choice.choice, "cost": choice.consequence} for choice in self.choices]
        loss = None if self.loss is None else self.loss.to_json()
        page = self.finding.page or None
        return {**_finding(self.finding), "why": self.why, "choices": choices, "loss": loss, "runbook": page}


@dataclass(slots=True)
class Fixed:
    """A fix.

    ``kept``: the id by which it can be undone; None: it replaced nothing. ``loss``: what it gives up; None: nothing.
    """

    text: str
    findings: list[verification.Inconsistency]
    outcome: Outcome = Outcome.PLANNED
    kept: str | None = None
    error: errors.MemwalOpsError | None = None
    loss: Loss | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry of ``fixes``."""
        error = self.error
        return {
            "fix": self.text,
            "outcome": self.outcome.value,
            "quarantine": self.kept,
            "loss": None if self.loss is None else self.loss.to_json(),
            "error": None if error is None else {"reason": error.reason, "detail": f"{error} {error.remedy}"},
            "findings": [_finding(finding) for finding in self.findings],
        }


@dataclass(frozen=True, slots=True)
class Undone:
    """The repair to undo (``--undo``), and the outcome."""

    kept: quarantine.RepairRecord
    decision: RepairDecision


@dataclass
class RepairReport:
    """Report of a repair.

    Attributes:
        fixes: what has a safe fix.
        decisions: what has none, without findings of severity ``info``.
        more: findings of the same checks that were counted, but not processed.
    """

    version: int
    apply: bool
    fixes: list[Fixed] = field(default_factory=list)
    decisions: list[OpenDecision] = field(default_factory=list)
    undone: Undone | None = None
    more: int = 0
    seconds: float = 0.0
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def decision(self) -> RepairDecision:
        """The outcome in one word."""
        if self.undone is not None:
            return self.undone.decision
        outcomes = {fix.outcome for fix in self.fixes}
        if outcomes & {Outcome.FAILED, Outcome.OVERTAKEN}:
            return RepairDecision.INCOMPLETE
        if Outcome.PLANNED in outcomes:
            return RepairDecision.PLANNED
        if Outcome.REPAIRED in outcomes:
            return RepairDecision.REPAIRED
        return RepairDecision.DECISION_NEEDED if self.decisions else RepairDecision.NOTHING_TO_REPAIR

    @property
    def exit_code(self) -> int:
        """9 if an error needs an operator's decision; else the worst of the fixes that failed."""
        is_damaged = any(decision.finding.severity is verification.Severity.ERROR for decision in self.decisions)
        failed = (fix.error.exit_code for fix in self.fixes if fix.error is not None)
        return errors.worst_exit_code([errors.TableCorruptError.exit_code if is_damaged else 0, *failed])

    def to_json(self) -> dict[str, Any]:
        """The document of ``repair --json``."""
        return {
            "decision": self.decision.value,
            "apply": self.apply,
            "fixes": [fix.to_json() for fix in self.fixes],
            "decisions": [decision.to_json() for decision in self.decisions],
            "undo": None if self.undone is None else self.undone.kept.to_json(),
            "more": self.more,
            "version": self.version,
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }

    def describe(self) -> str:
        """The report as human-readable text."""
        lines = [self._headline()]
        for fix in self.fixes:
            lines += ["", paragraph(f"{fix.outcome.upper()}: {fix.text}.", hanging="  ")]
            lines += [
                paragraph(f"{finding.check}: {finding.place}: {finding.evidence}", indent="  ", hanging="    ")
                for finding in fix.findings
            ]
            if fix.loss is not None:
                lines.append(paragraph(f"Lost: {fix.loss}.", indent="  ", hanging="  "))
            if fix.error is not None:
                lines.append(paragraph(f"{fix.error} {fix.error.remedy}", indent="  ", hanging="  "))
            if fix.kept is not None:
                lines.append(f"  Undo it: memwal-ops repair URI --undo {fix.kept} --apply")
        for two in self.decisions:
            finding = two.finding
            lines += [
                "",
                paragraph(f"DECISION NEEDED: {finding.check}: {finding.place}: {finding.evidence}", hanging="  "),
            ]
            lines.append(paragraph(f"{finding.consequence} {two.why}", indent="  ", hanging="  "))
            lines += [
                paragraph(f"{number}. {option.choice} Consequence: {option.consequence}", indent="  ", hanging="     ")
                for number, option in enumerate(two.choices, 1)
            ]
            if finding.page:
                lines.append(f"  See {finding.page}")
        if self.decision is RepairDecision.PLANNED:
            lines += ["", "Nothing was changed. Add --apply to do it."]
        if self.more:
            lines += ["", f"{counted(self.more, 'more finding')} of the same checks: run it again after these."]
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.undone is not None:
            kept = self.undone.kept
            match self.undone.decision:
                case RepairDecision.UNDONE:
                    result = f"what repair {kept.id} replaced was restored"
                case RepairDecision.PLANNED:
                    result = f"would restore what repair {kept.id} replaced"
                case _:
                    result = f"what repair {kept.id} replaced is there already"
            return f"{self.undone.decision}: {result}: {kept.place}."
        if self.decision is RepairDecision.NOTHING_TO_REPAIR:
            return "nothing_to_repair: no finding has anything to fix."
        decide = counted(len(self.decisions), "finding")
        needs = "needs an operator's decision" if len(self.decisions) == 1 else "need an operator's decision"
        return f"{self.decision}: {counted(len(self.fixes), 'safe fix', 'safe fixes')}; {decide} {needs}."


def _finding(one: verification.Inconsistency) -> dict[str, str]:
    return {
        "severity": one.severity.value,
        "check": one.check,
        "place": one.place,
        "evidence": one.evidence,
        "consequence": one.consequence,
    }


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


def _no_fix(table: Table, finding: verification.Inconsistency) -> None:
    del table, finding


def _no_place(table: Table, name: str) -> NoReturn:
    raise errors.InvalidFormatError(
        f"Cannot undo: the record of the repair names {name!r}, which no repair of {table.location.uri} replaces."
    )


@dataclass(frozen=True)
class RepairJob(Generic[TableT]):
    """The job of one format.

    Attributes:
        fix_of: the fix of a finding; None: such findings have no fix. Reads only. Raises ``UnsafeError`` if a fix
            exists, but is not safe now.
        place_of: the place with a name. Raises ``InvalidFormatError`` if no repair replaces such a place.
        choices: the choices of an operator, by check.
    """

    verify: Callable[[TableT, VerificationOptions, RunContext], verification.VerifyReport]
    fix_of: Callable[[TableT, verification.Inconsistency], Fix[TableT] | None] = _no_fix
    place_of: Callable[[TableT, str], quarantine.Place] = _no_place
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
            undone = self._undo(table, quarantine.read_record(table.store, options.undo), apply=apply)
            report = RepairReport(table.revision, apply=apply, undone=undone)
        else:
            verified = self.verify(table, options, context)
            run = _Run(self, table, context, RepairReport(verified.revision, apply=apply), options.accept_loss)
            run.plan(verified)
            if apply and run.fixes:
                probe_conditional_writes(table.store)
                run.make_fixes()
            report = run.report
        if apply:
            report.version = table.newest().revision
        report.seconds = time.monotonic() - started
        return report

    def _undo(self, table: TableT, kept: quarantine.RepairRecord, *, apply: bool) -> Undone:
        place = self.place_of(table, kept.place)
        before = quarantine.content_of(table.store, kept)
        present = place.read()
        if quarantine.digest(present) == kept.before:
            return Undone(kept, RepairDecision.NOTHING_TO_UNDO)
        if quarantine.digest(present) != kept.after:
            raise _changed(kept)
        if not apply:
            return Undone(kept, RepairDecision.PLANNED)
        if not place.swap(present, before):
            raise _changed(kept)
        return Undone(kept, RepairDecision.UNDONE)


def _changed(kept: quarantine.RepairRecord) -> errors.InvalidUsageError:
    where = f"The replaced content is in {kept.content}." if kept.before is not None else "It did not exist before."
    return errors.InvalidUsageError(
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
    fixes: list[tuple[Fix[TableT], verification.Inconsistency, Fixed]] = field(default_factory=list)

    def plan(self, found: verification.VerifyReport) -> None:
        """Find the fix of each finding, or its choices."""
        seen: dict[str, Fixed] = {}
        for finding in found.listed:
            try:
                fix = _common_fix(self.table, finding) or self.job.fix_of(self.table, finding)
            except UnsafeError as error:
                self._add_decision(finding, str(error))
                continue
            except errors.MemwalOpsError as error:
                self._add_decision(finding, f"It is not known whether a fix is safe: {error}")
                continue
            if fix is None:
                if finding.severity is not verification.Severity.INFO:
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
            except (errors.LeaseLostError, errors.CommitStateUnknownError):
                raise
            except UnsafeError as error:
                self.report.fixes.remove(fixed)
                for remaining in fixed.findings:
                    self._add_decision(remaining, str(error))
            except errors.MemwalOpsError as error:
                fixed.outcome, fixed.error = Outcome.FAILED, error
            self.context.advance("repairing", "findings", total=len(self.fixes))
            self.context.figures["repaired"] += fixed.outcome is Outcome.REPAIRED

    def _make_fix(self, fix: Fix[TableT], check: str, fixed: Fixed) -> None:
        def store(place: str, before: bytes | None, after: bytes | None) -> None:
            fixed.kept = quarantine.keep(self.table.store, check, place, before, after).id

        for _ in range(_ATTEMPTS):
            self.table = self.table.newest()
            made = fix.make(self.table, store)
            if made is not FixAttempt.CONFLICT:
                break
        fixed.outcome = _OUTCOMES[made]
        if made is not FixAttempt.DONE:
            fixed.kept = None

    def _add_decision(self, finding: verification.Inconsistency, why: str, fix: Fix[TableT] | None = None) -> None:
        choices = _COMMON_CHOICES.get(finding.check) or self.job.choices.get(finding.check)
        choices, loss = choices or tuple(_default_choices(finding)), None
        if fix is not None:
            loss = fix.loss
            go_on = f"memwal-ops repair URI --accept-loss --apply: {fix.text}."
            older = "" if loss is not None and loss.rows == 0 else " Older rows of these keys are visible again."
            choices = (*choices, Choice(go_on, f"Lost: {loss}.{older}"))
        self.report.decisions.append(OpenDecision(finding, why, choices, loss))


_OUTCOMES = {FixAttempt.DONE: Outcome.REPAIRED, FixAttempt.GONE: Outcome.GONE, FixAttempt.CONFLICT: Outcome.OVERTAKEN}


def _default_choices(finding: verification.Inconsistency) -> Iterator[Choice]:
    yield Choice(finding.remedy, "See the runbook." if finding.page else "None is known.")
    yield Choice("Leave it as it is.", finding.consequence)


def _common_fix(table: TableT, finding: verification.Inconsistency) -> Fix[TableT] | None:
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
