"""``memwal-ops demo``: a real table, a real merge, and the proof, on one page."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from memwal_ops.cli.inspect import describe as describe_inspection
from memwal_ops.cli.merge import describe as describe_merge
from memwal_ops.cli.text import counted
from memwal_ops.core.table import open_table
from memwal_ops.errors import InvariantViolatedError
from memwal_ops.jobs import demo as job
from memwal_ops.jobs import merge as merge_job
from memwal_ops.jobs.inspect import inspect


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to make the table.  [default: a new temporary folder]",
)
def demo(folder: Path | None) -> int:
    """Make a table with pylance's own MemWAL writer, merge it, and prove that nothing was lost."""
    made = job.make_table(folder or Path(tempfile.mkdtemp(prefix="memwal-ops-demo-")))
    click.echo(_story(made))
    before = open_table(made.uri)
    click.echo(_indent(describe_inspection(inspect(before))))
    view_before = job.last_write_wins(before)
    _prove(view_before == made.expected, "The writer's view before the merge is not what was written.")

    click.echo("\n3. THE MERGE   memwal-ops merge " + made.uri + "\n")
    report = merge_job.apply(before, merge_job.MergeOptions())
    click.echo(_indent(describe_merge(report)))

    after = open_table(made.uri)
    again = merge_job.apply(after, merge_job.MergeOptions())
    _prove(report.decision == "merged", f"The merge decided {report.decision!r}.")
    _prove(job.base_rows(after) == made.expected, "The base table is not the last write of every key.")
    _prove(job.last_write_wins(after) == view_before, "The writer's view changed.")
    _prove(again.decision == "nothing_to_merge", f"A second merge decided {again.decision!r}.")
    click.echo(_proof(made, report))
    return 0


def _prove(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolatedError(message)


def _indent(text: str) -> str:
    return "\n".join(f"   {line}" if line else line for line in text.splitlines())


def _story(made: job.DemoTable) -> str:
    return f"""1. A TABLE   {made.uri}

   {job.BASE_ORDERS:,} orders stand in the base table. Since then {job.REGIONS} writers, one per region, took
   {made.updates:,} updates, {made.inserts:,} new orders and {made.deletes:,} deletions: {made.writes:,} rows. All of that is durable,
   but none of it is in the base table yet: each writer left it in "flushed generations" beside
   it, and every reader has to put base and generations together again.

2. WHAT WAITS   memwal-ops inspect {made.uri}
"""


def _proof(made: job.DemoTable, report: merge_job.MergeReport) -> str:
    rows = sum(entry.result.rows_read for entry in report.passes if entry.result is not None)
    return f"""
4. THE PROOF

   ok  the base table alone now holds {counted(len(made.expected), "order")}: the last write of every key,
       compared value by value with what was written
   ok  pylance's own reader (base + generations, last write wins) sees the same before and after
   ok  the {made.writes:,} rows (less {counted(made.writes - rows, "repeat")} inside one generation) became one new version ({report.version}):
       rows, deletions and the progress of all regions together, so a crash leaves all of it or nothing
   ok  a second merge found nothing to do

   Version {report.version - 1} still reads as it did:   lance.dataset(uri, version={report.version - 1})
   The table is yours to play with; remove it by:   rm -r {made.uri}
   Your own table:   memwal-ops inspect URI    memwal-ops merge URI --dry-run    memwal-ops merge URI"""
