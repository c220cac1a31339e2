"""Verification of many regions: ``python -m benchmarks.verify`` (``--short`` to see that it runs).

Requests, seconds and peak memory of ``verify`` against the number of regions and of unmerged generations. Prints
Markdown. One generation is written by pylance; all others are links to (on the S3 stand-in: copies of) its files, and
the regions' manifests are put as they are.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.markdown import row
from benchmarks.memory import peak_mib
from benchmarks.server import BUCKET, counting_server
from memwal_ops.core.context import RunContext
from memwal_ops.core.options import VerificationOptions
from memwal_ops.formats.lance.jobs import verify
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration, RegionManifest, RegionStatus
from tests.support.counting_store import CountingStore
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections import Counter

    from memwal_ops.formats.lance.table import Table

_MIB = 1 << 20
_CONCURRENT_PUTS = 16


def make(uri: str, regions: int, generations: int, options: dict[str, str] | None = None) -> Table:
    """A table with that many more regions, each with so many unmerged generations of the same rows."""
    made = Workload(1, regions=1, base_rows=100).create(uri, options)
    made.put([*range(20)])
    made.flush()
    made.close()
    table = open_lance_table(uri, options)
    (template,) = table.regions.region_ids
    (flushed,) = table.region(template).latest().flushed_generations
    source = f"_mem_wal/{template}/{flushed.path}"
    files = {meta.path.removeprefix(f"{source}/"): meta.path for meta in table.store.list(source)}

    def one(number: int) -> None:
        region_id = uuid.UUID(int=number + 1, version=4)
        listed: tuple[FlushedGeneration, ...] = ()
        for generation in range(1, generations + 1):
            name = f"{number:08x}_gen_{generation}"
            folder = f"_mem_wal/{region_id}/{name}"
            for path, original in files.items():
                _copy(table, original, f"{folder}/{path}")
            listed += (replace(flushed, generation=generation, path=name),)
        manifest = RegionManifest(
            region_id, 1, 0, 1, generations, generations, generations + 1, listed, RegionStatus.ACTIVE
        )
        assert RegionManifestStore(table.store, region_id).commit(manifest)

    with ThreadPoolExecutor(_CONCURRENT_PUTS) as pool:
        list(pool.map(one, range(regions)))
    return open_lance_table(uri, options)


def _copy(table: Table, source: str, target: str) -> None:
    if table.location.scheme != "file":
        table.store.put(target, table.store.get(source))
        return
    path = f"{table.location.uri}/{target}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.link(f"{table.location.uri}/{source}", path)


def child(uri: str) -> None:
    """Verify, and say what it took, as JSON."""
    table = open_lance_table(uri)
    store = CountingStore(table.store)
    started = time.monotonic()
    report = verify.verified(replace(table, store=store), VerificationOptions(), RunContext())
    seconds = time.monotonic() - started
    assert report.decision == "healthy", report.describe()
    peak = int(peak_mib() * 2**20)
    print(json.dumps({"seconds": seconds, "peak": peak, "calls": store.calls.total(), **report.checked}))


def on_local_files(folder: str, regions: int, generations: int) -> list[str]:
    """One row: of a process that does nothing else; requests are those of memwal-ops, without pylance's."""
    uri = f"{folder}/{regions}x{generations}.lance"
    make(uri, regions, generations)
    command = [sys.executable, "-m", "benchmarks.verify", "--child", uri]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    found = json.loads(done.stdout)
    assert found["generations"] == regions * generations + 1
    calls = found["calls"] / (regions * generations)
    seconds, peak = f"{found['seconds']:.1f} s", f"{found['peak'] // _MIB} MiB"
    return ["local files", f"{regions:,}", f"{generations}", f"{found['calls']:,}", f"**{calls:.2f}**", seconds, peak]


def on_s3(options: dict[str, str], counts: Counter[str], regions: int, generations: int) -> list[str]:
    """One row: all requests, counted at the server."""
    total, seconds = requests_of(options, counts, regions, generations)
    per = f"**{total / (regions * generations):.2f}**"
    return ["S3 stand-in", f"{regions:,}", f"{generations}", f"{total:,}", per, f"{seconds:.1f} s", ""]


def requests_of(options: dict[str, str], counts: Counter[str], regions: int, generations: int) -> tuple[int, float]:
    """The requests of a verification of a new table, and its seconds."""
    table = make(f"s3://{BUCKET}/{regions}x{generations}.lance", regions, generations, options)
    counts.clear()
    started = time.monotonic()
    assert verify.verified(table, VerificationOptions(), RunContext()).decision == "healthy"
    return counts.total(), time.monotonic() - started


def main() -> None:
    """The table of benchmarks/README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="few regions, to see that it runs")
    parser.add_argument("--child", metavar="URI", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    local, remote = ([(5, 4)], (3, 4)) if arguments.short else ([(100, 20), (1_000, 20)], (20, 20))
    with tempfile.TemporaryDirectory() as folder, counting_server() as (options, counts):
        print("## Verification: requests and memory\n")
        row(*["where", "regions", "generations of each", "requests", "per generation", "seconds", "peak memory"])
        row(*["---"] * 7)
        for regions, generations in local:
            row(*on_local_files(folder, regions, generations))
        row(*on_s3(options, counts, *remote))


if __name__ == "__main__":
    main()
