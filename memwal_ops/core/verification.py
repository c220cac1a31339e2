"""The findings of a verification, and the report of ``verify`` for tables of every format."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from memwal_ops import errors, text
from memwal_ops.core.answers import IndexAnswers
from memwal_ops.core.holds import holds
from memwal_ops.core.leases import list_leases
from memwal_ops.core.protocols import Table
from memwal_ops.storage.export_file import ExportedStore


class Severity(enum.StrEnum):
    """The effect of a finding on readers and jobs, the worst first."""

    ERROR = "error"
    """Rows are missing or wrong, or a job cannot continue."""
    WARNING = "warning"
    """It may become an error, or costs space or time."""
    INFO = "info"
    """Nothing to do."""


@dataclass(frozen=True)
class Inconsistency:
    """One inconsistency.

    Attributes:
        check: the name of the check: a word or two, joined by ``_``.
        consequence: the effect on readers and jobs: one sentence.
        remedy: what to do: one sentence or two.
        page: the runbook page; empty: there is none.
        about: the part of the table by which ``repair`` finds it again: a region, an index, a job; not in reports.
    """

    severity: Severity
    check: str
    place: str
    evidence: str
    consequence: str
    remedy: str
    page: str = ""
    about: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry of ``findings``."""
        document = {**vars(self), "severity": self.severity.value, "runbook": self.page or None}
        del document["page"], document["about"]
        return document


def finding_of(
    error: errors.MemwalOpsError,
    check: str,
    place: str,
    consequence: str,
    severity: Severity = Severity.ERROR,
    about: str = "",
) -> Inconsistency:
    """A finding whose evidence, remedy and page are those of an error."""
    page = errors.runbook(error.exit_code) or ""
    return Inconsistency(severity, check, place, str(error), consequence, error.remedy, page, about)


def missing_object(table: Any) -> Iterator[Inconsistency]:
    """An object that the newest revision needs and that is missing or damaged: checked where only answers are."""
    if (path := table.format.missing_of(table, table.revision)) is not None:
        error = errors.TableCorruptError("It is missing or damaged, and the newest revision needs it.")
        yield finding_of(error, "missing_object", path, "Reads of the newest revision fail.")


def with_findings(answers: IndexAnswers, found: Iterable[Inconsistency]) -> IndexAnswers:
    """The answers of an index, with what is wrong with them."""
    findings = [{"check": finding.check, "evidence": finding.evidence, "remedy": finding.remedy} for finding in found]
    return replace(answers, findings=findings)


class VerifyDecision(enum.StrEnum):
    """The decisions of a verification."""

    HEALTHY = "healthy"
    FINDINGS = "findings"
    DRY_RUN = "dry_run"


@dataclass
class Inconsistencies:
    """The findings of a run: all are counted, the first ones of each check are kept."""

    limit: int
    counts: Counter[str] = field(default_factory=Counter)
    worst: Severity = Severity.INFO
    kept: list[Inconsistency] = field(default_factory=list)

    def add(self, finding: Inconsistency) -> None:
        """Count a finding, and keep it if its check has fewer than ``limit``."""
        self.counts[finding.check] += 1
        self.worst = min(self.worst, finding.severity, key=_RANK.__getitem__)
        if self.counts[finding.check] <= self.limit:
            self.kept.append(finding)

    def extend(self, found: Iterable[Inconsistency]) -> None:
        """Add all."""
        for finding in found:
            self.add(finding)


_RANK = {severity: rank for rank, severity in enumerate(Severity)}


class RowsRead(enum.StrEnum):
    """What a verification read of the rows."""

    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class VerifyReport:
    """The findings, and how much was read. A table with findings of severity ``info`` only is healthy.

    Attributes:
        findings: those that are listed; ``counts`` has all.
        checked: what was read, by name in the plural.
        skipped: of a table that is read from an export: what could not be checked there.
        rows_read: what was read of the rows themselves, and not only of what describes them.
        answers: how well each index answers; empty: none was asked.
        seed: with which the queries were drawn; None: no index was to be asked.
    """

    revision: int
    findings: Inconsistencies
    checked: Mapping[str, Any]
    skipped: Sequence[str] = ()
    rows_read: RowsRead = RowsRead.ALL
    answers: Sequence[IndexAnswers] = ()
    seed: int | None = None

    @property
    def decision(self) -> VerifyDecision:
        """Healthy if there are no errors and no warnings."""
        return VerifyDecision.HEALTHY if self.findings.worst is Severity.INFO else VerifyDecision.FINDINGS

    @property
    def exit_code(self) -> int:
        """9 if there is an error among the findings."""
        return errors.TableCorruptError.exit_code if self.findings.worst is Severity.ERROR else 0

    @property
    def listed(self) -> list[Inconsistency]:
        """The listed findings, the worst first."""
        return sorted(self.findings.kept, key=lambda finding: _RANK[finding.severity])

    def to_json(self) -> dict[str, Any]:
        """The document of ``verify --json``."""
        return {
            "decision": self.decision.value,
            "version": self.revision,
            "findings": [finding.to_json() for finding in self.listed],
            "counts": dict(self.findings.counts),
            "checked": dict(self.checked),
            "rows_read": self.rows_read.value,
            "skipped": [*self.skipped],
            # Those with findings first: of a long report, the run history keeps the beginning.
            "answers": [answer.to_json() for answer in sorted(self.answers, key=lambda answer: not answer.findings)],
            "seed": self.seed,
        }

    def _what_was_read(self) -> str:
        numbers = {name: number for name, number in self.checked.items() if isinstance(number, int)}
        if not numbers:
            asked = "only indexes were asked" if self.answers else "there is no index to ask"
            return f"{asked}; of the rest only the existence of objects was checked"
        shown = {name: number for name, number in numbers.items() if number} or numbers
        read = ", ".join(text.counted_as(number, name) for name, number in shown.items())
        what = "read" if self.rows_read is RowsRead.ALL else "checked; rows were not read, samples at most"
        return f"{read} {'was' if [*shown.values()] == [1] else 'were'} {what}"

    def describe(self) -> str:
        """The report as human-readable text."""
        total = sum(self.findings.counts.values())
        figures = [f"; {name} {number:.3f}" for name, number in self.checked.items() if isinstance(number, float)]
        lines = [f"{self.decision}: {text.counted(total, 'finding')}; {self._what_was_read()}{''.join(figures)}."]
        for finding in self.listed:
            lines += [
                "",
                text.paragraph(
                    f"{finding.severity.upper()} {finding.check}: {finding.place}: {finding.evidence}", hanging="  "
                ),
            ]
            lines.append(text.paragraph(f"{finding.consequence} {finding.remedy}", indent="  ", hanging="  "))
            if finding.page:
                lines.append(f"  See {finding.page}")
        if self.answers:
            cost = sum(answer.bytes_at_most for answer in self.answers)
            lines += ["", f"Answers of {text.counted(len(self.answers), 'index', 'indexes')} (seed {self.seed}, at "
                      f"most {text.size_text(cost)} read), beside a search without them:"]  # fmt: skip
            lines += [text.paragraph(answer.describe(), indent="  ", hanging="    ") for answer in self.answers]
            lines += [
                text.paragraph(value, indent="  ", hanging="    ") for each in self.answers for value in each.values
            ]
        if self.skipped:
            left = f"Not checked, as an export does not have it: {', '.join(self.skipped)}."
            lines += ["", text.paragraph(left, hanging="  ")]
        if total > len(self.findings.kept):
            lines += ["", f"{text.counted(total - len(self.findings.kept), 'more finding')} of the same checks."]
        return "\n".join(lines)


@dataclass(frozen=True)
class AnswersPlan:
    """What asking the indexes costs: the report of ``verify --answers --dry-run``.

    ``answers``: by index: ``queries`` (about as many) and ``bytes_at_most`` of a run, or why it is ``skipped``.
    """

    revision: int
    answers: Sequence[IndexAnswers]
    max_bytes: int
    decision: VerifyDecision = VerifyDecision.DRY_RUN
    exit_code: int = 0

    @property
    def bytes_at_most(self) -> int:
        """An upper bound of what a run reads to ask all indexes."""
        return sum(answer.bytes_at_most for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``."""
        shown = ("index", "type", "queries", "bytes_at_most", "skipped")
        return {
            "decision": self.decision.value,
            "version": self.revision,
            "answers": [{key: answer.to_json()[key] for key in shown} for answer in self.answers],
            "bytes_at_most": self.bytes_at_most,
            "max_bytes": self.max_bytes,
        }

    def describe(self) -> str:
        """The report as human-readable text."""
        asked = text.counted(len(self.answers), "index", "indexes")
        read = f"at most {text.size_text(self.bytes_at_most)} (--max-bytes is {text.size_text(self.max_bytes)})"
        lines = [text.paragraph(f"{self.decision}: asking {asked} would read {read}. Nothing was asked.")]
        for answer in self.answers:
            asked = text.counted(answer.queries, "query", "queries")
            cost = f"about {asked}, at most {text.size_text(answer.bytes_at_most)}"
            why = f"would not be asked: {answer.skipped}"
            lines.append(
                text.paragraph(
                    f"{answer.index} ({answer.type}): {why if answer.skipped else cost}", indent="  ", hanging="  "
                )
            )
        return "\n".join(lines)


def check_own_files(table: Table) -> Iterator[Inconsistency]:
    """Find leases that expired without being released, and holds of revisions that do not exist any more."""
    now = table.store.taken if isinstance(table.store, ExportedStore) else datetime.now(UTC)
    try:
        for lease in list_leases(table.store):
            if lease.ended is None and not lease.in_force(now):
                yield Inconsistency(
                    Severity.INFO, "lease_expired", f"the lease of {lease.job}",
                    f"{lease.holder.name} acquired it at {lease.acquired:%Y-%m-%d %H:%M:%S} and did not release it.",
                    "None: the next supervisor acquires it.", "None; check whether that process still runs.",
                    about=lease.job,
                )  # fmt: skip
    except errors.MemwalOpsError as error:
        yield finding_of(error, "lease", "_mem_wal_ops/leases", "No supervised job can begin.", Severity.WARNING)
    try:
        for hold in holds(table):
            gone = [version for version in hold.versions if hold.in_force(now) and not table.has_revision(version)]
            if gone:
                yield Inconsistency(
                    Severity.WARNING, "hold", f"hold {hold.number} of {hold.by}",
                    f"It keeps revision {gone[0]}, which does not exist.", "Its holder cannot read that revision.",
                    f"memwal-ops hold URI --release {hold.number}; ask {hold.by}.", errors.runbook(26) or "",
                )  # fmt: skip
    except errors.MemwalOpsError as error:
        yield finding_of(error, "hold", "_mem_wal_ops/holds", "gc and expire delete nothing.", Severity.WARNING)
