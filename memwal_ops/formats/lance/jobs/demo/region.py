"""The demo ``memwal-ops demo --layout region``: a writer is killed and replaced, and the reader loses no row.

The first writer is a separate process (``python -m memwal_ops.formats.lance.jobs.demo.region URI``), which prints the
number of each write that was acknowledged, until it is killed with SIGKILL in the middle of its work.
"""

from __future__ import annotations

import random
import subprocess
import sys
import uuid
from collections.abc import Iterator

import lance

from memwal_ops.core.demo import DemoRun, indented, prove
from memwal_ops.errors import WriterFencedError
from memwal_ops.formats.lance.engines.read.reader import Reader
from memwal_ops.formats.lance.jobs import merge as merge_job
from memwal_ops.formats.lance.jobs.demo import table as job
from memwal_ops.formats.lance.jobs.inspect.job import inspect
from memwal_ops.formats.lance.log.create import create_mem_wal
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store

REGION = uuid.UUID("6f1c2d3e-4b5a-4c6d-8e7f-9a0b1c2d3e4f")
_KILLED_AFTER, _SUCCESSOR_WRITES, _MAX_WRITES = 40, 30, 100_000
_ROWS = 5


def demo(run: DemoRun) -> Iterator[str]:
    """Create a table, kill a writer and replace it, and merge what both wrote, unless ``run.merge`` is false.

    Yields: the output, step by step.

    Raises:
        InvalidUsageError: the folder has such a table already, or cannot be created.
        InvariantViolatedError: a row was lost.
    """
    uri = run.new_table("orders.lance")
    expected = {key: job.order(random.Random(key), key, "placed") for key in range(job.BASE_ORDERS)}  # noqa: S311
    lance.write_dataset(job.rows(expected.values()), uri).create_scalar_index("id", "BTREE")
    location = resolve(uri)
    create_mem_wal(location, open_store(location))
    yield f"""1. A TABLE   {uri}

   {job.BASE_ORDERS:,} orders are in the base table. It has one region, in the layout of the MemWAL specification.
   A process writes into it: each durable write is one object of the log, acknowledged when the store has it.
"""

    acknowledged = _killed(uri)
    before = dict(expected)
    for number in range(acknowledged):
        expected |= write(number)
    seen = _read(uri)
    # A put whose response the process did not receive before it was killed may be in the log, or not.
    late = seen != expected
    if late:
        expected |= write(acknowledged)
    prove(seen == expected, "The reader does not see what was acknowledged to the killed writer as durable.")
    changed = sum(before.get(key) != row for key, row in expected.items())
    more = "; one more is in the log, whose acknowledgement it did not receive" if late else ""
    yield f"""2. THE WRITER IS KILLED   kill -9

   {acknowledged} writes were acknowledged{more}. No generation was made of them. The reader:

   >>> from memwal_ops.memwal import read
   >>> read("{uri}").scan().to_table()

   ok  {changed} orders are new or changed, each as its last acknowledged write left it; all were compared
"""

    second = RegionWriter(uri, REGION)
    replayed = len(second.unflushed())
    prove(_read(uri) == expected, "The claim changed what the reader sees.")
    for number in range(_MAX_WRITES, _MAX_WRITES + _SUCCESSOR_WRITES):
        second.put(job.rows(write(number).values()))
        expected |= write(number)
    second.flush()
    prove(_read(uri) == expected, "The reader does not see what the second writer wrote.")
    third = RegionWriter(uri, REGION)
    third.put(job.rows(write(2 * _MAX_WRITES).values()))
    expected |= write(2 * _MAX_WRITES)
    refused = _refused(second)
    third.close()
    prove(_read(uri) == expected, "What was refused is visible, or what was acknowledged is not.")
    yield f"""3. IT IS REPLACED

   ok  a second writer claims the region with epoch {second.epoch} and replays {replayed} entries; the reader sees
       the same rows
   ok  it writes {_SUCCESSOR_WRITES} times and flushes a generation, which points to the log: no row is copied
   ok  a third one claims the region with epoch {third.epoch}; the second one is fenced at its next write:
       {refused}
   ok  the reader sees every write that was acknowledged, and nothing of the one that was refused
"""

    table = open_lance_table(uri)
    yield indented(inspect(table).describe())
    prove(job.last_write_wins(table) == expected, "pylance's reader does not see what was written.")
    if not run.merge:
        yield _your_turn(4, uri, run)
        return
    yield f"\n4. THE MERGE   memwal-ops merge {uri}\n"
    report = merge_job.apply(table, merge_job.MergeOptions())
    yield indented(report.describe())
    prove(report.decision == "merged", f"The merge decided {report.decision!r}.")
    prove(job.base_rows(open_lance_table(uri)) == expected, "The base table is not the last write of every key.")
    yield f"""
5. THE PROOF

   ok  the base table alone holds {len(expected):,} orders, each with its last acknowledged values; all were compared
   ok  the {acknowledged} writes of the writer that was killed are among them
   ok  pylance's own reader saw the same rows in our generations before the merge"""
    yield _your_turn(6, uri, run)


def write(number: int) -> dict[int, job.Order]:
    """The rows of a write, derived from its number, so that every process can compute them."""
    random_ = random.Random(number)  # noqa: S311 - data, not secrets
    return {
        key: job.order(random_, key, f"write {number}") for key in random_.sample(range(2 * job.BASE_ORDERS), _ROWS)
    }


def _killed(uri: str) -> int:
    """Run the first writer, kill it, and return how many writes were acknowledged to it as durable."""
    command = [sys.executable, "-m", "memwal_ops.formats.lance.jobs.demo.region", uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - ourselves
        prove(process.stdout is not None, "The writer has no output.")
        printed = 0
        for printed, _ in enumerate(process.stdout or (), 1):
            if printed == _KILLED_AFTER:
                process.kill()
        return printed


def _read(uri: str) -> dict[int, job.Order]:
    return job.by_key(Reader(open_lance_table(uri), "strong").scan().to_table())


def _refused(writer: RegionWriter) -> str:
    try:
        writer.put(job.rows(write(3 * _MAX_WRITES).values()))
    except WriterFencedError as error:
        return str(error)
    return "nothing"


def _your_turn(number: int, uri: str, run: DemoRun) -> str:
    return f"""
{number}. YOUR TURN   The table stays until you remove it:   rm -r {run.to_remove(uri)}

   {run.command} inspect {uri}
   {run.command} maintain {uri}
   RegionWriter("{uri}", "{REGION}")      in Python (memwal_ops.memwal): the next writer"""


def _main() -> None:
    writer = RegionWriter(sys.argv[1], REGION)
    for number in range(_MAX_WRITES):
        writer.put(job.rows(write(number).values()))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
