"""The plan of a catch-up, with what a run costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from memwal_ops.core.next_run import NextRun, describe_next_run, next_run
from memwal_ops.formats.lance.jobs.catchup.report import CatchupReport
from memwal_ops.formats.lance.jobs.debts import catchup_figures
from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.core.next_run import Rate
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True, slots=True)
class CatchupPlan(CatchupReport):
    """The report of a dry run. ``cost``: what a run reads and writes; None: nothing would be updated."""

    cost: NextRun | None = None

    @classmethod
    def of(cls, report: CatchupReport, table: Table, rates: Iterable[Rate]) -> Self:
        """The plan with its cost, of the indexes that it would update."""
        wanted = {index.name for index in report.indexes if index.decision == "would_update"}
        cost = next_run(table.jobs["catchup"], catchup_figures(table, wanted), rates)
        values = {field.name: getattr(report, field.name) for field in fields(CatchupReport)}
        return cls(**values, cost=cost)

    def to_json(self) -> dict[str, object]:
        """The document of ``catchup --dry-run --json``."""
        cost = {} if self.cost is None else self.cost.to_json()
        return (
            CatchupReport.to_json(self)
            | {name: cost.get(name) for name in ("debt", "bytes_read", "bytes_written")}
            | {"expected_seconds": cost.get("seconds")}
        )

    def describe(self) -> str:
        """The report as text for people."""
        text = CatchupReport.describe(self)
        if self.cost is None or self.cost.why is not None:
            return text
        return f"{text}\n\n{paragraph(f'A run {describe_next_run(self.cost.to_json())}.', hanging='  ')}"
