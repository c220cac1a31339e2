"""The ledger of runs by hand: what one used is recorded in the service's history, and tells what the next one costs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.achieved import achieved_by
from memwal_ops.core.cost import describe_cost, expected_cost, spent_by
from memwal_ops.core.outlook import rows_done
from memwal_ops.core.report import PlanReport, bounded
from memwal_ops.core.run import plugin_errors
from memwal_ops.core.usage import Measurement
from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage.redaction import redact
from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.cli.past_runs import RunHistory
    from memwal_ops.core.context import RunContext
    from memwal_ops.core.cost import Cost
    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Table
    from memwal_ops.core.report import Report


@contextmanager
def recorded(
    history: RunHistory, table: Table, spec: JobSpec, *, acts: bool
) -> Iterator[Callable[[Report, RunContext], None]]:
    """Measure the run in the block and record it, if it ``acts``; the block calls what it gets with the report."""
    measurement, started, uri = Measurement(), datetime.now(UTC), table.location.address

    def ended(report: Report, context: RunContext) -> None:
        if acts:
            with plugin_errors(spec):
                document = report.to_json()
            work = {"work": rows_done(spec.name, document)}
            history.record(
                uri,
                spec.name,
                started,
                "partial" if report.exit_code else "succeeded",
                exit_code=report.exit_code,
                decision=str(report.decision),
                versions=context.revisions,
                figures=dict(context.figures),
                phases=context.phases,
                report=bounded(document),
                used={**measurement.used(table.location), **work},
                achieved=achieved_by(spec.name, document),
            )

    try:
        yield ended
    except MemwalOpsError as error:
        if acts:
            why = {"reason": error.reason, "error": redact(str(error)), "exit_code": error.exit_code}
            history.record(uri, spec.name, started, "failed", **why, used=measurement.used(table.location))
        raise


@dataclass(frozen=True, slots=True)
class Expected:
    """What a planned run will cost; None: nothing is to be done, or no past run shows it."""

    cost: Cost | None

    def added_to(self, output: Any) -> Any:
        """The output of a plan with it: a document, or a text."""
        if isinstance(output, dict):
            return {**output, "cost": None if self.cost is None else self.cost.to_json()}
        if self.cost is None:
            return output
        return f"{output}\n\n{paragraph(f'A run costs {describe_cost(self.cost.to_json())}.', hanging='  ')}"


def expected(history: RunHistory, table: Table, spec: JobSpec, plan: Report) -> Expected:
    """What the run that a plan describes will cost, by the past runs on this machine."""
    work = None
    if isinstance(plan, PlanReport) and spec.in_maintain:
        needs = [need for need in plan.needs() if need.now]
        if not needs:
            return Expected(None)
        work = float(sum(need.rows or need.frees for need in needs if need.job == spec.name)) or None
    past = spent_by(spec.name, history(table.location.address, spec.name))
    return Expected(expected_cost(past, work, *history.prices))
