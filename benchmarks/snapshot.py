"""Snapshots of many regions: ``python -m benchmarks.snapshot`` (``--short`` to see that it runs).

Requests per region and memory against the number of regions, and what a snapshot saves its readers:
the regions of a table from its snapshot, against reading every region's manifest. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.markdown import row
from benchmarks.memory import peak_mib
from benchmarks.server import BUCKET, counting_server
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.jobs import snapshot
from memwal_ops.formats.lance.layouts import REGION, SHARD
from memwal_ops.formats.lance.table import open_lance_table
from tests.support.counting_store import CountingStore
from tests.support.tables.many_regions import make_regions

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from memwal_ops.formats.lance.layouts import Layout


_MIB = 1 << 20
_CONCURRENT_READS = 16


def requests_on_local_files(folder: str, regions: int, layout: Layout) -> list[str]:
    """One row: requests per region in the steady state, and memory of a process that does nothing else."""
    uri = f"{folder}/{layout.name}-{regions}.lance"
    table = make_regions(uri, regions, layout)
    snapshot.apply(table, snapshot.SnapshotOptions())
    store = CountingStore(table.store)
    report = snapshot.apply(replace(open_lance_table(uri), store=store), snapshot.SnapshotOptions())
    assert report.decision == "unchanged"
    child = [sys.executable, "-m", "benchmarks.snapshot", "--child", uri]
    done = subprocess.run(child, check=True, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    result = json.loads(done.stdout)
    calls = store.calls.total()
    return [
        "local files",
        layout.name,
        f"{regions:,}",
        f"**{calls / regions:.2f}**",
        f"{result['seconds']:.2f} s",
        f"{result['peak'] // _MIB} MiB",
    ]


def requests_on_s3(options: dict[str, str], counts: Counter[str], regions: int, layout: Layout) -> list[str]:
    """The same on the S3 stand-in, counted at the server."""
    total, seconds = requests_of(options, counts, regions, layout)
    return ["S3 stand-in", layout.name, f"{regions:,}", f"**{total / regions:.2f}**", f"{seconds:.2f} s", ""]


def requests_of(options: dict[str, str], counts: Counter[str], regions: int, layout: Layout) -> tuple[int, float]:
    """The requests of a snapshot in the steady state, and its seconds."""
    uri = f"s3://{BUCKET}/{layout.name}-{regions}.lance"
    snapshot.apply(make_regions(uri, regions, layout, options), snapshot.SnapshotOptions())
    counts.clear()
    started = time.monotonic()
    assert snapshot.apply(open_lance_table(uri, options), snapshot.SnapshotOptions()).decision == "unchanged"
    return counts.total(), time.monotonic() - started


def child(uri: str) -> None:
    """Take one snapshot of new regions and say what it took, as JSON."""
    options = snapshot.SnapshotOptions(inline_threshold=0)
    started = time.monotonic()
    snapshot.apply(open_lance_table(uri), options)
    peak = int(peak_mib() * 2**20)
    print(json.dumps({"seconds": time.monotonic() - started, "peak": peak}))


def reading(uri: str, regions: int, options: dict[str, str] | None, threshold: int, where: str) -> list[str]:
    """One row: the regions from the snapshot against the regions from their manifests."""
    snapshot.apply(open_lance_table(uri, options), snapshot.SnapshotOptions(threshold))
    table = open_lance_table(uri, options)

    def from_snapshot() -> None:
        found = read_snapshot(table)
        assert found is not None
        assert len(found.regions) == regions

    def from_manifests() -> None:
        fresh = replace(table)
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            ids = fresh.regions.region_ids
            assert len(list(pool.map(lambda one: fresh.region(one).latest(), ids))) == regions

    fast, slow = _median(from_snapshot), _median(from_manifests)
    stored = "inline" if regions <= threshold else "external"
    cells = [where, table.layout.name, stored, f"{regions:,}", f"{fast * 1000:.1f} ms", f"{slow * 1000:.0f} ms"]
    return [*cells, f"**{slow / fast:.0f}**"]


def _median(action: Callable[[], None], runs: int = 3) -> float:
    seconds = []
    for _ in range(runs):
        started = time.monotonic()
        action()
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def main() -> None:
    """All tables of benchmarks/README.md that are about snapshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="few regions, to see that it runs")
    parser.add_argument("--child", metavar="URI", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    sizes, on_s3, read = ([20, 60], 20, 50) if arguments.short else ([1_000, 10_000], 2_000, 500)
    with tempfile.TemporaryDirectory() as folder, counting_server() as (options, counts):
        print("## Snapshots: requests and memory\n")
        row(*["where", "layout", "regions", "requests per region", "a whole snapshot", "peak memory"])
        row(*["---"] * 6)
        for layout in (SHARD, REGION):
            for regions in sizes:
                row(*requests_on_local_files(folder, regions, layout))
        for layout in (SHARD, REGION):
            row(*requests_on_s3(options, counts, on_s3, layout))
        print("\n## Snapshots: what readers save\n")
        row(*["where", "layout", "stored", "regions", "from the snapshot", "from the manifests", "ratio"])
        row(*["---"] * 7)
        for layout in (SHARD, REGION):
            local, remote = f"{folder}/read-{layout.name}.lance", f"s3://{BUCKET}/read-{layout.name}.lance"
            make_regions(local, read, layout)
            make_regions(remote, read, layout, options)
            for threshold in (0, read):
                row(*reading(local, read, None, threshold, "local files"))
                row(*reading(remote, read, options, threshold, "S3 stand-in"))


if __name__ == "__main__":
    main()
