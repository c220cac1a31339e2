"""Bring the indexes of a table up to date, or migrate a vector index to a new codebook."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.core.context import RunContext
from memwal_ops.core.outlook import NextRun, rates_of, seconds_at
from memwal_ops.formats.lance.jobs.catchup.codebook_migration import migrate
from memwal_ops.formats.lance.jobs.catchup.tiers import catchup_figures, debts_of
from memwal_ops.formats.lance.jobs.catchup.update import catch_up, plan_catch_up
from memwal_ops.formats.lance.options import CatchupOptions
from memwal_ops.formats.lance.retention.damage import names_damage

if TYPE_CHECKING:
    from memwal_ops.formats.lance.jobs.catchup.codebook_migration import MigrationReport
    from memwal_ops.formats.lance.jobs.catchup.report import CatchupReport
    from memwal_ops.formats.lance.table import Table

__all__ = ["CatchupOptions", "apply", "backlog", "plan"]


@names_damage
def plan(table: Table, options: CatchupOptions, context: RunContext | None = None) -> CatchupReport | MigrationReport:
    """Report what :func:`apply` would do, without changes: decision ``dry_run``."""
    if options.migrate_codebook:
        table.require_memwal("--migrate-codebook")
        return migrate(table, *options.migrate_codebook, dry_run=True)
    context = context or RunContext()
    report = plan_catch_up(table, options, context)
    wanted = [index for index in report.indexes if index.decision == "would_update"]
    written = sum(index.bytes_written for index in wanted)
    debt = max(written, sum(one.bytes for one in debts_of(table, options).values()))
    rates = rates_of("catchup", context.past_runs(table.location.address, "catchup"))
    seconds = seconds_at(sum(index.uncovered_rows for index in wanted), rates)
    why = None if wanted else "No index would be updated."
    return replace(report, cost=NextRun(debt, written, written, seconds, why))


@names_damage
def apply(table: Table, options: CatchupOptions, context: RunContext | None = None) -> CatchupReport | MigrationReport:
    """Bring the indexes up to date, and make ``index_catchup`` agree with them (S0-179 to S0-181).

    Args:
        table: any version of the table; the newest is read during the run.
        context: can stop the run between two indexes.

    Returns:
        The report. It has the error of an index that failed; the others are processed.

    Raises:
        InvalidUsageError: an index that the table does not have.
        UnsupportedFeatureError: a table whose manifest must not be rewritten here.
        CommitStateUnknownError: the outcome of a commit is unknown; run it again.
    """
    context = context or RunContext()
    if options.migrate_codebook:
        table.require_memwal("--migrate-codebook")
        return migrate(table, *options.migrate_codebook, dry_run=False)
    return catch_up(table, options, context)


backlog = catchup_figures
