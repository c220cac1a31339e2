"""The demo ``memwal-ops demo`` for Lance: create a table, merge it, and prove that no row was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.demo import DemoRun, indented, prove
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.jobs import merge as merge_job, snapshot as snapshot_job
from memwal_ops.formats.lance.jobs.catchup import job as catchup_job
from memwal_ops.formats.lance.jobs.demo import table as job
from memwal_ops.formats.lance.jobs.gc import job as gc_job
from memwal_ops.formats.lance.jobs.inspect.job import inspect
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.engines.merge.collapse import PassResult


def demo(run: DemoRun) -> Iterator[str]:
    """Create a table with pylance's own MemWAL writer, and merge it, unless ``run.merge`` is false.

    Yields: the output, step by step.

    Raises:
        InvalidUsageError: the folder has such a table already, or cannot be created.
        InvariantViolatedError: a row was lost.
    """
    made = job.make_table(run.new_table("orders.lance"))
    yield f"""1. A TABLE   {made.uri}

   {job.BASE_ORDERS:,} orders are in the base table. Since then {job.REGIONS} writers, one per region, wrote {made.writes:,} rows:
   {made.updates:,} updates, {made.inserts:,} new orders and {made.deletes:,} deletions. All of that is durable, but nothing of it is in
   the base table yet: every writer left "flushed generations" beside it, small tables of what
   changed. Until they are merged, each reader has to put base and generations together again.

2. THE BACKLOG   memwal-ops inspect {made.uri}
"""
    before = open_lance_table(made.uri)
    yield indented(inspect(before).describe())
    view_before = job.last_write_wins(before)
    prove(view_before == made.expected, "Before the merge, the table does not read as the writes that were made.")
    if not run.merge:
        yield f"""
3. YOUR TURN   Nothing is merged yet. The table stays until you remove it:   rm -r {run.to_remove(made.uri)}

   {run.command} merge {made.uri} --dry-run   what a merge would do
   {run.command} merge {made.uri}             merge it
   {run.command} inspect {made.uri}           the backlog, by region
   {run.command} maintain {made.uri}          merge, index and snapshot, and a plan of what could be deleted"""
        return

    yield f"\n3. THE MERGE   memwal-ops merge {made.uri}\n"
    report = merge_job.apply(before, merge_job.MergeOptions())
    yield indented(report.describe())

    after = open_lance_table(made.uri)
    again = merge_job.apply(after, merge_job.MergeOptions())
    prove(report.decision == "merged", f"The merge decided {report.decision!r}.")
    prove(job.base_rows(after) == made.expected, "The base table is not the last write of every key.")
    prove(job.last_write_wins(after) == view_before, "The merge changed what pylance reads.")
    prove(again.decision == "nothing_to_merge", f"A second merge decided {again.decision!r}.")
    results = [entry.result for entry in report.passes if entry.result is not None]
    prove(len(results) == 1, f"The merge took {len(results)} passes.")
    yield _ledger(made, results[0])
    yield f"""
4. THE PROOF

   ok  the base table alone holds {counted(len(made.expected), "order")} ({job.BASE_ORDERS:,} + {made.inserts:,} new - {made.deletes:,} deleted), each with the
       last values that were written for it; all were compared
   ok  pylance's own reader, which puts base and generations together, sees the same rows as before
   ok  all of it became visible at once, as version {results[0].version}: rows, deletions and the merge progress.
       A crash at any moment leaves version {results[0].version - 1} or version {results[0].version}, nothing in between
   ok  a second merge found nothing to do"""
    yield from _bring_up_to_date(made)
    yield from _collect(made)
    yield f"""
7. YOUR TURN   The table stays until you remove it:   rm -r {run.to_remove(made.uri)}

   {run.command} inspect {made.uri}
   {run.command} merge URI --dry-run      what a merge of your own table would do
   {run.command} catchup URI --dry-run    which of its indexes are behind
   {run.command} maintain URI --dry-run   all that is due, in one report
   lance.dataset("{made.uri}", version={results[0].version - 1})      in Python: the table as it was"""


def _bring_up_to_date(made: job.DemoTable) -> Iterator[str]:
    """Run catchup and snapshot, and prove that neither changed a row."""
    yield f"\n5. THE INDEX AND THE REGIONS   memwal-ops catchup {made.uri}\n"
    caught_up = catchup_job.apply(open_lance_table(made.uri), catchup_job.CatchupOptions())
    yield indented(caught_up.describe())
    yield f"\n   memwal-ops snapshot {made.uri}\n"
    taken = snapshot_job.apply(open_lance_table(made.uri), snapshot_job.SnapshotOptions())
    yield indented(taken.describe())
    after = open_lance_table(made.uri)
    prove(caught_up.decision == "caught_up", f"The catch-up decided {caught_up.decision!r}.")
    prove(taken.decision == "built", f"The snapshot decided {taken.decision!r}.")
    snapshot = read_snapshot(after)
    prove(snapshot is not None and len(snapshot.regions) == job.REGIONS, "The snapshot does not have every region.")
    prove(job.base_rows(after) == made.expected, "The base table changed.")


def _collect(made: job.DemoTable) -> Iterator[str]:
    """Plan a garbage collection; nothing is deleted."""
    yield f"\n6. WHAT COULD BE DELETED   memwal-ops gc {made.uri}\n"
    plan = gc_job.plan(open_lance_table(made.uri), gc_job.GcOptions())
    yield indented(plan.describe())
    prove(plan.decision == "nothing_to_delete", f"gc decided {plan.decision!r}, although all is recent.")


def _ledger(made: job.DemoTable, result: PassResult) -> str:
    hidden = made.writes - result.rows_read
    older = result.rows_read - result.rows_upserted - result.rows_deleted
    rows = (
        (made.writes, "rows were written"),
        (-hidden, "were replaced within their own generation; Lance hides those itself"),
        (-older, "were replaced by a later generation, or delete an order that never reached the base"),
        (-result.rows_deleted, "deleted an order from the base table"),
        (result.rows_upserted, "rows are in the base table now, the newest of their key"),
    )
    lines = "\n".join(f"   {number:>8,}  {words}" for number, words in rows)
    return f"\n   Where the {made.writes:,} rows went:\n\n{lines}"
