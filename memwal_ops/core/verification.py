"""The findings of a verification, and the report of ``verify`` for tables of every format."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memwal_ops import errors, text
from memwal_ops.core import options
from memwal_ops.core.answers import IndexAnswers


@dataclass(frozen=True, kw_only=True)
class VerificationOptions(options.Options):
    """Options of every verification."""

    deep: bool = options.flag(
        help="Also read rows (of a Lance table their keys), and compare indexes and filters with them."
    )
    max_findings: int = options.count(
        100, minimum=1, metavar="N", help="List at most N findings of a check; all are counted."
    )


@dataclass(frozen=True, kw_only=True)
class AnswersOptions(VerificationOptions):
    """Options of a verification that can ask indexes."""

    answers: bool = options.flag(help="Also ask each index, and compare with a search without it; --deep does so, too.")
    answers_only: bool = options.flag(
        help="Ask each index, and of the rest check only that objects exist, unless --deep is given."
    )
    index: tuple[str, ...] = options.texts(metavar="NAME", help="Ask only this index; may be repeated.")
    samples: int = options.count(64, minimum=8, maximum=4096, metavar="N", help="Draw at least N rows for an index.")
    seed: int | None = options.count(
        None, minimum=0, metavar="N", shown_default="the revision", help="Draw the same rows again as a run before."
    )
    max_bytes: int = options.size(256 << 20, minimum=1 << 20, help="Read at most about this much to ask all indexes.")
    show_values: bool = options.flag(help="Show values of the rows that are examples, which are data.")
    dry_run: bool = options.flag(
        help="Print how much asking each index reads at most, by how many queries; ask nothing."
    )

    @property
    def asks(self) -> bool:
        """Whether indexes are asked."""
        return self.answers or self.answers_only or self.deep or bool(self.index)

    @property
    def checks_all(self) -> bool:
        """Whether the rest of the table is checked, too."""
        return self.deep or not self.answers_only

    def validate(self) -> None:
        """Refuse to tell the cost of nothing."""
        if self.dry_run and not self.asks:
            raise options.OptionError(
                "{dry_run} tells what asking indexes costs; {answers} asks them.", "dry_run", "answers"
            )

    def seed_at(self, revision: int) -> int:
        """The seed of a run at a revision: other rows for each, if none is given."""
        return revision if self.seed is None else self.seed


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
