"""The report of ``repair``, the same for every format."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.core.verification import Finding, Severity
from memwal_ops.errors import MemwalOpsError, TableCorruptError, worst_exit_code
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from memwal_ops.core.quarantine import RepairRecord


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
    """What a fix gives up.

    Attributes:
        what: what cannot be read any more: a noun phrase.
        rows: how many rows are lost; None: unknown.
        keys: their keys, as text; None: unknown.
    """

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

    finding: Finding
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

    Attributes:
        text: what it does.
        findings: those that it fixes.
        outcome: how it ended.
        kept: the id by which it can be undone; None: it replaced nothing.
        error: why it failed.
        loss: what it gives up; None: nothing.
    """

    text: str
    findings: list[Finding]
    outcome: Outcome = Outcome.PLANNED
    kept: str | None = None
    error: MemwalOpsError | None = None
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
            "findings": [_finding(one) for one in self.findings],
        }


@dataclass(frozen=True, slots=True)
class Undone:
    """The repair to undo (``--undo``), and the outcome."""

    kept: RepairRecord
    decision: RepairDecision


@dataclass
class RepairReport:
    """Report of a repair.

    Attributes:
        version: the table's revision at the end.
        apply: whether it acted.
        fixes: what has a safe fix.
        decisions: what has none, without findings of severity ``info``.
        undone: of ``--undo``.
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
        outcomes = {one.outcome for one in self.fixes}
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
        errors = any(one.finding.severity is Severity.ERROR for one in self.decisions)
        failed = (one.error.exit_code for one in self.fixes if one.error is not None)
        return worst_exit_code([TableCorruptError.exit_code if errors else 0, *failed])

    def to_json(self) -> dict[str, Any]:
        """The document of ``repair --json``."""
        return {
            "decision": self.decision.value,
            "apply": self.apply,
            "fixes": [one.to_json() for one in self.fixes],
            "decisions": [one.to_json() for one in self.decisions],
            "undo": None if self.undone is None else self.undone.kept.to_json(),
            "more": self.more,
            "version": self.version,
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }

    def describe(self) -> str:
        """The report as human-readable text."""
        lines = [self._headline()]
        for one in self.fixes:
            lines += ["", paragraph(f"{one.outcome.upper()}: {one.text}.", hanging="  ")]
            lines += [
                paragraph(f"{finding.check}: {finding.place}: {finding.evidence}", indent="  ", hanging="    ")
                for finding in one.findings
            ]
            if one.loss is not None:
                lines.append(paragraph(f"Lost: {one.loss}.", indent="  ", hanging="  "))
            if one.error is not None:
                lines.append(paragraph(f"{one.error} {one.error.remedy}", indent="  ", hanging="  "))
            if one.kept is not None:
                lines.append(f"  Undo it: memwal-ops repair URI --undo {one.kept} --apply")
        for two in self.decisions:
            finding = two.finding
            lines += [
                "",
                paragraph(f"DECISION NEEDED: {finding.check}: {finding.place}: {finding.evidence}", hanging="  "),
            ]
            lines.append(paragraph(f"{finding.consequence} {two.why}", indent="  ", hanging="  "))
            lines += [
                paragraph(f"{number}. {one.choice} Consequence: {one.consequence}", indent="  ", hanging="     ")
                for number, one in enumerate(two.choices, 1)
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


def _finding(one: Finding) -> dict[str, str]:
    return {
        "severity": one.severity.value,
        "check": one.check,
        "place": one.place,
        "evidence": one.evidence,
        "consequence": one.consequence,
    }
