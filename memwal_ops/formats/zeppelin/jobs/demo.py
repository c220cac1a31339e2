"""The demo ``memwal-ops demo --format zeppelin``: append to a log, compact it, and prove that results do not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from memwal_ops.core.demo import DemoRun, indented, prove
from memwal_ops.core.run import run_job
from memwal_ops.formats import zeppelin
from memwal_ops.text import counted

DIMENSIONS = 8
_APPENDS, _ROWS, _DELETES = 12, 60, 8
_KINDS = ("book", "film", "song")

Row = dict[str, Any]


def demo(run: DemoRun) -> Iterator[str]:
    """Write a namespace, and compact it, unless ``run.merge`` is false.

    Yields: the output, step by step.

    Raises:
        InvalidUsageError: the folder has such a namespace already, or cannot be created.
        InvariantViolatedError: a row was lost.
    """
    uri = run.new_table("items")
    expected, written, deleted = _write(uri)
    yield f"""1. A NAMESPACE   {uri}

   A writer appended {counted(_APPENDS, "fragment")} to its log: {written:,} vectors of {DIMENSIONS} numbers with attributes, many of them newer values
   of ids that were there already, and {counted(deleted, "delete")}. {counted(len(expected), "id")} are left. Each append is durable, but every
   query must read all fragments again until they are compacted into one segment of clusters.

2. THE BACKLOG   memwal-ops inspect {uri}
"""
    yield indented(run_job(uri, "inspect").describe())
    attributes = {name: row["attributes"] for name, row in expected.items()}
    before = _rows(uri, len(expected))
    prove(before == attributes, "A query before the compaction does not see the last write of every id.")
    if not run.merge:
        yield f"""
3. YOUR TURN   Nothing is compacted yet. The namespace stays until you remove it:   rm -r {run.to_remove(uri)}

   {run.command} merge {uri} --dry-run   what a compaction would do
   {run.command} merge {uri}             compact it"""
        return
    yield f"\n3. THE COMPACTION   memwal-ops merge {uri}\n"
    report = run_job(uri, "merge")
    yield indented(report.describe())
    prove(report.decision == "merged", f"The compaction decided {report.decision!r}.")
    after = _rows(uri, len(expected))
    prove(after == attributes, "A query after the compaction does not see the last write of every id.")
    nearest = _nearest(uri, expected)
    again = run_job(uri, "merge")
    prove(again.decision == "nothing_to_merge", f"A second compaction decided {again.decision!r}.")
    checked = run_job(uri, "verify")
    prove(checked.exit_code == 0, f"verify found: {checked.describe()}")
    yield f"""
4. THE PROOF

   ok  a query over everything returns {counted(len(expected), "id")} with the last attributes that were written, as before
   ok  each of {counted(nearest, "sampled vector")} is found as its own nearest neighbour
   ok  all of it became visible at once, by one compare-and-swap of the manifest
   ok  a second compaction found nothing to do, and verify found nothing wrong

5. WHAT COULD BE DELETED   memwal-ops gc {uri}
"""
    yield indented(run_job(uri, "gc").describe())
    yield f"""
6. YOUR TURN   The namespace stays until you remove it:   rm -r {run.to_remove(uri)}

   {run.command} inspect {uri}
   {run.command} verify {uri}
   memwal_ops.formats.zeppelin.query("{uri}", vector=[...], k=5)      in Python"""


def _write(uri: str) -> tuple[dict[str, Row], int, int]:
    """Append to a new namespace. Returns the last write of every id, and the numbers of vectors and deletes."""
    random_ = random.Random(7)  # noqa: S311 - data, not secrets
    zeppelin.create(uri, dimensions=DIMENSIONS)
    writer = zeppelin.open_writer(uri)
    expected: dict[str, Row] = {}
    written = deleted = 0
    for append in range(_APPENDS):
        names = random_.sample(range(_APPENDS * 40), _ROWS)
        rows = [_row(random_, f"item-{name}", append) for name in names]
        chosen = {row["id"] for row in rows}
        gone = random_.sample(sorted(expected.keys() - chosen), min(_DELETES, len(expected.keys() - chosen)))
        writer.append(vectors=rows, deletes=gone)
        for name in gone:
            del expected[name]
        expected.update({row["id"]: row for row in rows})
        written, deleted = written + len(rows), deleted + len(gone)
    return expected, written, deleted


def _row(random_: random.Random, name: str, append: int) -> Row:
    values = [random_.randrange(-512, 512) / 64 for _ in range(DIMENSIONS)]
    values[0] = values[0] or 1.0  # a vector of zeros has no direction
    return {"id": name, "values": values, "attributes": {"kind": random_.choice(_KINDS), "written": append}}


def _rows(uri: str, live: int) -> dict[str, Row]:
    """All rows that a query returns, by id; without vectors, which queries do not return."""
    answers = zeppelin.query(uri, vector=[1.0] * DIMENSIONS, k=live + 1, nprobe=1 << 20)
    return {row["id"]: row["attributes"] for row in answers}


def _nearest(uri: str, expected: dict[str, Row]) -> int:
    sample = sorted(expected)[::40]
    for name in sample:
        answers = zeppelin.query(uri, vector=expected[name]["values"], k=1, nprobe=1 << 20)
        prove(answers[0]["distance"] < 1e-6, f"The vector of {name} is not found.")  # noqa: PLR2004 - of float32
    return len(sample)
