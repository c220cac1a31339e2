"""How fast an index folder follows its table: ``python -m benchmarks.lm_diskann_follow --rows 100000``.

One catch-up after each change of a Lance table with stable row ids, each in a process of its own. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa

from benchmarks.markdown import head, row
from benchmarks.memory import peak_mib
from benchmarks.vectors import DIMENSION, clustered
from memwal_ops import run_job
from memwal_ops.formats.lm_diskann import table
from memwal_ops.formats.lm_diskann.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARE = 10


def rows(ids: np.ndarray, random: np.random.Generator) -> pa.Table:
    """Rows with fresh vectors."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(clustered(random, len(ids)).reshape(-1)), DIMENSION)
    return pa.table({"id": pa.array(ids), "vec": vectors})


def changes(uri: str, count: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """What happens to the table: a name, the number of changed rows, and the change."""
    random, part = np.random.default_rng(5), count // SHARE
    first, later = rows(np.arange(count), random), rows(np.arange(count, count + part), random)
    other = rows(random.choice(count, part, replace=False), random)
    yield "first", count, lambda: lance.write_dataset(first, uri, enable_stable_row_ids=True, max_rows_per_file=part)
    yield "append", part, lambda: lance.write_dataset(later, uri, mode="append")
    yield "update", part, lambda: lance.dataset(uri).merge_insert("id").when_matched_update_all().execute(other)
    yield "delete", part, lambda: lance.dataset(uri).delete(f"id >= {count}")
    yield "compaction, nothing changed", 0, lance.dataset(uri).optimize.compact_files


def catch_up(folder: str) -> None:
    """In a process of its own: one catch-up, and what it took."""
    began, busy = time.perf_counter(), time.process_time()
    report = run_job(folder, "catchup").to_json()
    took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - busy}
    print(json.dumps(took | {"peak": round(peak_mib()), "inserted": report["inserted"], "deleted": report["deleted"]}))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--catch-up", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.catch_up:
        catch_up(told.catch_up)
        return
    head("table", "change", "inserted, deleted", "CPU s", "changed rows per CPU s", "peak, MiB")
    for count in told.rows:
        with tempfile.TemporaryDirectory() as base:
            uri, folder = f"{base}/rows.lance", f"{base}/index.lmd"
            for name, changed, change in changes(uri, count):
                change()
                if name == "first":
                    table.create(folder, dimension=DIMENSION, follows=Source(uri, "vec", None))
                command = [sys.executable, "-m", "benchmarks.lm_diskann_follow", "--catch-up", folder]
                said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
                rate = f"**{changed / said['cpu']:,.0f}**" if changed else ""
                row(f"{count:,} x {DIMENSION}", name, f"{said['inserted']:,}, {said['deleted']:,}",
                    f"{said['cpu']:.1f}", rate, said["peak"])  # fmt: skip


if __name__ == "__main__":
    main()
