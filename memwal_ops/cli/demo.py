"""``memwal-ops demo``: a real table, a real merge, and the proof, on one page."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.catchup import describe as describe_catchup
from memwal_ops.cli.gc import Reasons
from memwal_ops.cli.gc import describe as describe_gc
from memwal_ops.cli.inspect import describe as describe_inspection
from memwal_ops.cli.merge import describe as describe_merge
from memwal_ops.cli.snapshot import describe as describe_snapshot
from memwal_ops.cli.text import counted
from memwal_ops.core.snapshots import read_snapshot
from memwal_ops.core.table import open_table
from memwal_ops.errors import InvariantViolatedError
from memwal_ops.jobs import catchup as catchup_job
from memwal_ops.jobs import demo as job
from memwal_ops.jobs import gc as gc_job
from memwal_ops.jobs import merge as merge_job
from memwal_ops.jobs import snapshot as snapshot_job
from memwal_ops.jobs.inspect import inspect

if TYPE_CHECKING:
    from memwal_ops.engines.api import PassResult


@click.command(short_help="Make a table, merge it, and prove that nothing was lost.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to make the table orders.lance.  [default: a new temporary folder]",
)
def demo(folder: Path | None) -> int:
    """Make a table with pylance's own MemWAL writer, merge it, and prove that nothing was lost.

    The table stays there afterwards, to play with; one that is there already is never touched.
    """
    place = folder or Path(tempfile.mkdtemp(prefix="memwal-ops-demo-"))
    made = job.make_table(place)
    click.echo(_story(made))
    before = open_table(made.uri)
    click.echo(_indent(describe_inspection(inspect(before))))
    view_before = job.last_write_wins(before)
    _prove(view_before == made.expected, "The writer's view before the merge is not what was written.")

    click.echo(f"\n3. THE MERGE   memwal-ops merge {made.uri}\n")
    report = merge_job.apply(before, merge_job.MergeOptions())
    click.echo(_indent(describe_merge(report)))

    after = open_table(made.uri)
    again = merge_job.apply(after, merge_job.MergeOptions())
    _prove(report.decision == "merged", f"The merge decided {report.decision!r}.")
    _prove(job.base_rows(after) == made.expected, "The base table is not the last write of every key.")
    _prove(job.last_write_wins(after) == view_before, "The writer's view changed.")
    _prove(again.decision == "nothing_to_merge", f"A second merge decided {again.decision!r}.")
    results = [entry.result for entry in report.passes if entry.result is not None]
    _prove(len(results) == 1, f"The merge took {len(results)} passes.")
    click.echo(_ledger(made, results[0]))
    click.echo(_proof(made, results[0].version))
    _bring_up_to_date(made)
    _collect(made)
    click.echo(_next_steps(made, results[0].version, place if folder is None else Path(made.uri)))
    return 0


def _bring_up_to_date(made: job.DemoTable) -> None:
    """The index and the snapshot, and that neither changed a row."""
    click.echo(f"\n5. THE INDEX AND THE REGIONS   memwal-ops catchup {made.uri}\n")
    caught_up = catchup_job.apply(open_table(made.uri), catchup_job.CatchupOptions())
    click.echo(_indent(describe_catchup(caught_up)))
    click.echo(f"\n   memwal-ops snapshot {made.uri}\n")
    taken = snapshot_job.apply(open_table(made.uri), snapshot_job.SnapshotOptions())
    click.echo(_indent(describe_snapshot(taken)))
    after = open_table(made.uri)
    _prove(caught_up.decision == "caught_up", f"The catch-up decided {caught_up.decision!r}.")
    _prove(taken.decision == "built", f"The snapshot decided {taken.decision!r}.")
    found = read_snapshot(after)
    _prove(found is not None and len(found.regions) == job.REGIONS, "The snapshot does not hold every region.")
    _prove(job.base_rows(after) == made.expected, "The base table changed.")


def _collect(made: job.DemoTable) -> None:
    """What could be deleted, and what holds the rest; nothing is."""
    click.echo(f"\n6. WHAT COULD GO   memwal-ops gc {made.uri}\n")
    reasons = Reasons()
    plan = gc_job.plan(open_table(made.uri), gc_job.GcOptions(), on_item=reasons.take)
    click.echo(_indent(describe_gc(plan, reasons=reasons)))
    _prove(plan.decision == "nothing_to_delete", f"The collector decided {plan.decision!r}, though all is young.")


def _prove(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolatedError(message)


def _indent(text: str) -> str:
    return "\n".join(f"   {line}" if line else line for line in text.splitlines())


def _story(made: job.DemoTable) -> str:
    return f"""1. A TABLE   {made.uri}

   {job.BASE_ORDERS:,} orders stand in the base table. Since then {job.REGIONS} writers, one per region, wrote {made.writes:,} rows:
   {made.updates:,} updates, {made.inserts:,} new orders and {made.deletes:,} deletions. All of that is durable, but nothing of it is in
   the base table yet: every writer left "flushed generations" beside it, small tables of what
   changed. Until they are merged, each reader has to put base and generations together again.

2. WHAT WAITS   memwal-ops inspect {made.uri}
"""


def _ledger(made: job.DemoTable, result: PassResult) -> str:
    hidden = made.writes - result.rows_read
    older = result.rows_read - result.rows_upserted - result.rows_deleted
    rows = (
        (made.writes, "rows were written"),
        (-hidden, "were replaced within their own generation; Lance hides those itself"),
        (-older, "were replaced by a later generation, or delete an order that never reached the base"),
        (-result.rows_deleted, "deleted an order from the base table"),
        (result.rows_upserted, "rows stand in the base table now, the newest of their key"),
    )
    lines = "\n".join(f"   {number:>8,}  {words}" for number, words in rows)
    return f"\n   Where the {made.writes:,} rows went:\n\n{lines}"


def _proof(made: job.DemoTable, version: int) -> str:
    return f"""
4. THE PROOF

   ok  the base table alone holds {counted(len(made.expected), "order")} ({job.BASE_ORDERS:,} + {made.inserts:,} new - {made.deletes:,} deleted), each with the
       last values that were written for it; all were compared
   ok  pylance's own reader, which puts base and generations together, sees the same rows as before
   ok  all of it became visible at once, as version {version}: rows, deletions and the note of what is merged.
       A crash at any moment leaves version {version - 1} or version {version}, nothing in between
   ok  a second merge found nothing to do"""


def _command() -> str:
    """What to type for this command: by its path, where the shell would not find it by its name."""
    called = Path(sys.argv[0])
    found = shutil.which("memwal-ops")
    if called.name != "memwal-ops" or (found is not None and Path(found).samefile(called)):
        return "memwal-ops"
    with contextlib.suppress(ValueError):
        return str(called.absolute().relative_to(Path.cwd()))
    return str(called)


def _next_steps(made: job.DemoTable, version: int, leftover: Path) -> str:
    command = _command()
    return f"""
7. YOUR TURN   The table stays until you remove it:   rm -r {leftover}

   {command} inspect {made.uri}
   {command} merge URI --dry-run      what a merge of your own table would do
   {command} catchup URI --dry-run    which of its indexes are behind
   {command} maintain URI --dry-run   all that is due, in one account
   lance.dataset("{made.uri}", version={version - 1})      in Python: the table as it was"""
