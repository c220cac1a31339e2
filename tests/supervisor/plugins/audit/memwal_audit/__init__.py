"""Counts the rows of the base table, and complains where there are too few: an example of a job of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from memwal_ops import open_table
from memwal_ops.errors import InvalidUsageError
from memwal_ops.jobs.api import Job, Run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.table import Table


@dataclass(frozen=True)
class AuditOptions:
    """``min_rows``: fewer are too few. ``max_bytes``: takes sizes, as every option of such a name."""

    min_rows: int = 1
    max_bytes: int = 1 << 30
    patience: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        if self.min_rows < 0:
            raise InvalidUsageError("--min-rows must not be below 0.")


@dataclass(frozen=True)
class AuditReport:
    """``decision`` is audited or too_few."""

    decision: str
    rows: int

    def to_json(self) -> dict[str, Any]:
        return {"decision": self.decision, "rows": self.rows}


def plan(table: Table, options: AuditOptions) -> AuditReport:
    rows = table.dataset.count_rows()
    return AuditReport("audited" if rows >= options.min_rows else "too_few", rows)


def apply(table: Table, options: AuditOptions, run: Run) -> AuditReport:
    run.checkpoint()
    report = plan(table, options)
    run.figures["rows_audited"] += report.rows
    return report


def look(table: Table) -> Mapping[str, float]:
    return {"base_rows": table.dataset.count_rows()}


@click.command(short_help="Count the rows of a table.")
@click.argument("uri")
@click.option("--min-rows", type=int, default=1)
def command(uri: str, min_rows: int) -> int:
    """Count the rows of the table at URI."""
    report = plan(open_table(uri), AuditOptions(min_rows))
    click.echo(json.dumps(report.to_json()))
    return 0 if report.decision == "audited" else 10


AUDIT = Job(
    name="audit",
    options=AuditOptions,
    plan=plan,
    apply=apply,
    exit_code=lambda report: 0 if report.decision == "audited" else 10,
    every=timedelta(hours=1),
    figures={"base_rows": "count"},
    look=look,
    command=command,
)
