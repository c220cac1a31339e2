"""The code of the job, imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_audit import AuditOptions
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True)
class AuditReport:
    """``decision`` is audited or too_few."""

    decision: str
    rows: int

    @property
    def exit_code(self) -> int:
        return 0 if self.decision == "audited" else 10

    def to_json(self) -> dict[str, Any]:
        return {"decision": self.decision, "rows": self.rows}

    def describe(self) -> str:
        return f"{self.decision}: {self.rows} rows."


def plan(table: Table, options: AuditOptions, context: RunContext) -> AuditReport:
    rows = table.dataset.count_rows()
    return AuditReport("audited" if rows >= options.min_rows else "too_few", rows)


def apply(table: Table, options: AuditOptions, context: RunContext) -> AuditReport:
    context.checkpoint()
    report = plan(table, options, context)
    context.figures["rows_audited"] += report.rows
    return report


def backlog(table: Table) -> Mapping[str, float]:
    return {"base_rows": table.dataset.count_rows()}
