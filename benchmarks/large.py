"""Large tables: what each job costs at a size and at ten times the size: ``python -m benchmarks.large``.

One thing is large at a time: fragments of the base, versions, regions, columns, or the dimension of vectors. Each job
runs in a process of its own, on the table as the job before left it. Prints Markdown: processor seconds and peak memory
of the process once the table is open, requests of the job to the store (without pylance's own), and the ratio of the
seconds. What grows faster than ten times is to be explained. ``--only NAME`` runs one; ``--short`` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa

from benchmarks.markdown import head, row
from benchmarks.memory import as_command, peak_mib, reset_peak
from benchmarks.workload import Shape, make, rows
from memwal_ops import run_job
from memwal_ops.core.maintain import scan_table
from memwal_ops.formats.lance.table import open_lance_table
from tests.support.counting_store import CountingStore

if TYPE_CHECKING:
    from collections.abc import Callable

# The options of a job, by the options that other commands have; gc plans, and "plan" is what maintain plans.
JOBS: dict[str, dict[str, Any]] = {
    "inspect": {},
    "scan": {},
    "plan": {"apply": False},
    "verify": {},
    "merge": {},
    "catchup": {},
    "snapshot": {},
    "compact": {},
    "expire": {"apply": True, "older_than": "0s", "allow_unsafe": True},
    "gc": {"apply": False},
}
_WIDTH = 8


def fragments(uri: str, size: int) -> None:
    """A base of so many fragments of 20 rows, with a BTREE; a backlog of updates that hits a third of them."""
    make(uri, Shape(base=20, regions=1, generations=1, rows=20, vector=_WIDTH))
    dataset = lance.dataset(uri)
    written = lance.fragment.write_fragments(
        rows(np.arange(20, size * 20), 0, _WIDTH), uri, max_rows_per_file=20, max_rows_per_group=20
    )
    lance.LanceDataset.commit(uri, lance.LanceOperation.Append(written), read_version=dataset.version)
    dataset = lance.dataset(uri)
    dataset.optimize.optimize_indices()
    with dataset.mem_wal_writer(str(uuid.UUID(int=1, version=4)), max_memtable_rows=size) as writer:
        writer.put(rows(np.arange(0, size * 20, 60), 2, _WIDTH))


def versions(uri: str, size: int) -> None:
    """So many versions of a small base with a small backlog."""
    make(uri, Shape(base=1_000, regions=2, generations=2, rows=500, vector=_WIDTH))
    dataset = lance.dataset(uri)
    for number in range(size):
        dataset.update_config({"benchmark": str(number)})


def regions(uri: str, size: int) -> None:
    """So many regions, each with one generation of 20 rows."""
    make(uri, Shape(base=1_000, regions=size, generations=1, rows=20, vector=_WIDTH))


def columns(uri: str, size: int) -> None:
    """A base of 20,000 rows with so many columns of floats, and two regions of three generations of 2,000 rows."""
    _columns(uri, {f"c{number}": pa.array(np.zeros(20_000)) for number in range(size)})


def dimensions(uri: str, size: int) -> None:
    """The same with one vector of so many floats."""
    make(uri, Shape(base=20_000, regions=2, generations=3, rows=2_000, vector=size))


def _columns(uri: str, added: dict[str, pa.Array]) -> None:
    key = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    schema = pa.schema([key, *(pa.field(name, one.type) for name, one in added.items())])
    base = pa.table({"id": np.arange(20_000), **added}, schema=schema)
    dataset = lance.write_dataset(base, uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal()
    for region in range(2):
        with dataset.mem_wal_writer(str(uuid.UUID(int=region + 1, version=4)), max_memtable_rows=2_000) as writer:
            for generation in range(3):
                at = region * 10_000 + generation * 1_000
                writer.put(base.slice(at, 2_000))


SIZES: dict[str, tuple[Callable[[str, int], None], int]] = {
    "fragments": (fragments, 1_000),
    "versions": (versions, 1_000),
    "regions": (regions, 100),
    "columns": (columns, 20),
    "dimensions": (dimensions, 154),
}


def child(job: str, uri: str) -> None:
    """Run one job and print what it cost, as JSON."""
    as_command()
    table = open_lance_table(uri)
    store = CountingStore(table.store)
    reset_peak()
    began = time.process_time()
    counted = replace(table, store=store)
    name = "maintain" if job == "plan" else job
    report: object = scan_table(counted) if job == "scan" else run_job(counted, name, **JOBS[job])
    cpu = time.process_time() - began
    decision = str(getattr(report, "decision", ""))
    print(json.dumps({"cpu": cpu, "peak": peak_mib(), "requests": store.calls.total(), "decision": decision}))


def _measured(job: str, uri: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large", "--child", job, uri]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    if done.returncode:
        raise SystemExit(f"{job} of {uri}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """The tables of benchmarks/README.md about large tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a hundredth of the sizes, to see that it runs")
    parser.add_argument("--only", choices=list(SIZES), help="what is large")
    parser.add_argument("--size", type=int, help="the smaller size, instead of the usual one of each")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    for name in [arguments.only] if arguments.only else SIZES:
        make_table, size = SIZES[name]
        size = 2 if arguments.short else arguments.size or size
        sizes = (size, 10 * size)
        with tempfile.TemporaryDirectory() as folder:
            for one in sizes:
                make_table(f"{folder}/{one}.lance", one)
            small, large = (f"{one:,} {name}" for one in sizes)
            head("job", small, "peak", "requests", large, "peak", "requests", "seconds grow by")
            for job in JOBS:
                before, after = (_measured(job, f"{folder}/{one}.lance") for one in sizes)
                cells = [f"{one['cpu']:.2f} s | {one['peak']:.0f} MiB | {one['requests']:,}" for one in (before, after)]
                row(job, *cells, f"**{after['cpu'] / before['cpu']:.1f}**")
                print(job, before["decision"], after["decision"], file=sys.stderr)


if __name__ == "__main__":
    main()
