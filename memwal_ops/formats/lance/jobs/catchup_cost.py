"""The plan of a catch-up, with what a run costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from memwal_ops.core.next_run import NextRun, describe_next_run
from memwal_ops.core.outlook import seconds_at
from memwal_ops.formats.lance.jobs.catchup.report import CatchupReport
from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.core.next_run import Rate


_NOTHING = NextRun(0, 0, 0, None)


@dataclass(frozen=True, slots=True)
class CatchupPlan(CatchupReport):
    """The report of a dry run. ``cost``: what a run reads and writes."""

    cost: NextRun = _NOTHING

    @classmethod
    def of(cls, report: CatchupReport, debt: int, rates: Iterable[Rate]) -> Self:
        """The plan with its cost; ``debt``: bytes that are due to be written of all indexes."""
        wanted = [index for index in report.indexes if index.decision == "would_update"]
        written = sum(index.bytes_written for index in wanted)
        seconds = seconds_at(sum(index.uncovered_rows for index in wanted), rates)
        cost = NextRun(max(debt, written), written, written, seconds, None if wanted else "No index would be updated.")
        values = {field.name: getattr(report, field.name) for field in fields(CatchupReport)}
        return cls(**values, cost=cost)

    def to_json(self) -> dict[str, object]:
        """The document of ``catchup --dry-run --json``."""
        cost = self.cost.to_json()
        return (
            CatchupReport.to_json(self)
            | {name: cost[name] for name in ("debt", "bytes_read", "bytes_written")}
            | {"expected_seconds": cost["seconds"]}
        )

    def describe(self) -> str:
        """The report as text for people."""
        text = CatchupReport.describe(self)
        if self.cost.why is not None:
            return text
        return f"{text}\n\n{paragraph(f'A run {describe_next_run(self.cost.to_json())}.', hanging='  ')}"
