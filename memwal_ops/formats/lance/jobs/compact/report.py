"""The report of a compaction, as JSON and as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.documents import document
from memwal_ops.core.outlook import seconds_text
from memwal_ops.core.report import Need
from memwal_ops.formats.lance.jobs.answers_guard import AnswerComparison, cost_of
from memwal_ops.text import counted, paragraph, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.formats.lance.jobs.compact.planning import Setting


class CompactDecision(enum.StrEnum):
    """How a compaction ended."""

    COMPACTED = "compacted"
    UNCHANGED = "unchanged"
    ANSWERS_WORSE = "answers_worse"
    """An index would have answered worse by the rest, which was not published; what was published before stays."""
    DRY_RUN = "dry_run"


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Report of a compaction.

    In a dry run ``fragments_added``, ``fragments_after`` and the bytes are estimates.

    Attributes:
        why: why nothing was, or would be, rewritten, or why no more was; else None.
        bytes_written: also of the indexes that were built again.
        debt: bytes that a run would write next, after this one.
        dropped_column_bytes: about how many bytes of dropped columns the next run would leave out.
        snapshot_lost: the table had a region snapshot in a file, which is no longer found.
        answers: names of indexes, and their answers before and after a commit of the run, compared.
        error: why the rest was not published, by an index that would answer worse; or why one was not built again.
        indexed_again: the indexes that pylance does not move with rows, which the run catches up afterwards.
        indexes_behind: such indexes that ``--max-bytes`` leaves without what was rewritten.
        expected_seconds: of a dry run, how long a run takes, by the rate of a past one; None: there is none to compare.
    """

    decision: CompactDecision
    run_id: str
    engine: str
    why: str | None
    fragments_before: int
    fragments_after: int
    fragments_removed: int
    fragments_added: int
    rows_rewritten: int
    bytes_read: int
    bytes_written: int
    debt: int
    settings: Mapping[str, Setting]
    version: int
    seconds: float
    snapshot_lost: bool = False
    commit_conflicts: int = 0
    answers: tuple[tuple[str, AnswerComparison], ...] = ()
    error: MemwalOpsError | None = None
    expected_seconds: float | None = None
    engine_reason: str = ""
    dropped_column_bytes: int = 0
    indexed_again: tuple[str, ...] = ()
    indexes_behind: tuple[str, ...] = ()
    exit_code: int = 0

    def to_json(self) -> dict[str, object]:
        """The document of ``compact --json``."""
        expected = None if self.expected_seconds is None else round(self.expected_seconds, 1)
        answers = [{"index": name, **compared.to_json()} for name, compared in self.answers]
        return document(self, "exit_code", expected_seconds=expected, answers=answers)

    def needs(self) -> Iterator[Need]:
        """What a run would rewrite."""
        if self.fragments_removed:
            what = f"rewrite {counted(self.fragments_removed, 'fragment')} into {self.fragments_added:,}"
            if self.dropped_column_bytes:
                what += f" without {size_text(self.dropped_column_bytes)} of dropped columns"
            yield Need("compact", what, rows=self.rows_rewritten)

    def describe(self) -> str:
        """The report as text for people."""
        parts = [paragraph(_headline(self), hanging="  ")]
        if self.error is not None:
            parts.append(paragraph(f"{self.error} {self.error.remedy}", hanging="  "))
        parts += [paragraph(text, hanging="  ") for text in _indexes(self)]
        cost = cost_of([one for _, one in self.answers], len({name for name, _ in self.answers}), self.seconds)
        if cost is not None:
            parts.append(paragraph(cost, hanging="  "))
        if self.snapshot_lost:
            text = (
                "The region snapshot was in a file that is no longer found; run memwal-ops snapshot to store it again."
            )
            parts.append(paragraph(f"{text} Until then readers list the regions.", hanging="  "))
        return "\n".join(parts)


def _indexes(report: CompactReport) -> Iterator[str]:
    is_plan = report.decision == "dry_run"
    if report.indexed_again:
        yield (
            f"INDEXED AGAIN: {', '.join(report.indexed_again)}: pylance does not move such indexes with rows; the run "
            f"{'catches' if is_plan else 'caught'} them up afterwards."
        )
    if report.indexes_behind:
        yield (
            f"INDEXES BEHIND: {', '.join(report.indexes_behind)}: pylance {'takes' if is_plan else 'took'} what is "
            "rewritten out of their coverage, and to build them again takes more than --max-bytes leaves. Queries scan "
            "these rows until memwal-ops catchup URI has run."
        )


def _headline(report: CompactReport) -> str:
    change = f"{counted(report.fragments_removed, 'fragment')} into {report.fragments_added:,}"
    rows = counted(report.rows_rewritten, "row")
    match report.decision:
        case "answers_worse":
            before = (
                f"the rest was not published; {change} before" if report.fragments_removed else "nothing was published"
            )
            return (
                f"answers_worse: {before}, {counted(report.fragments_after, 'fragment')} now, "
                f"version {report.version}, {report.seconds:.2f} s."
            )
        case "compacted":
            return (
                f"compacted: {change}, {rows}, {size_text(report.bytes_written)} written, "
                f"{counted(report.fragments_after, 'fragment')} now, version {report.version}, {report.seconds:.2f} s."
                f"{f' {report.why}' if report.why else ''}"
            )
        case "unchanged":
            return f"unchanged: nothing was rewritten. {report.why}"
        case _:
            if not report.fragments_removed:
                return f"dry_run: would rewrite nothing. {report.why}"
            cost = f"read {size_text(report.bytes_read)} and write {size_text(report.bytes_written)}"
            cost += f" ({seconds_text(report.expected_seconds)})"
            more = report.debt - report.bytes_written
            rest = f", and {size_text(more)} in later runs" if more > 0 else ""
            return (
                f"dry_run: would rewrite {change} (about), {rows}, {cost}{rest}; nothing was changed."
                f"{f' {report.why}' if report.why else ''}"
            )
