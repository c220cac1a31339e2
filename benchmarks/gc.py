"""What collecting garbage costs: ``python -m benchmarks.gc`` (``--short`` to see that it runs).

Planning a million objects (memory, and time against listing them once), retention over 50,000
versions, requests of a run in each state, and deleting 10,000 files against deleting them one by one
and against nothing but full batches. Prints Markdown.

The million objects exist only as listings: gc_simulated.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from benchmarks.gc_simulated import (
    DATA,
    REGION,
    SHAPES,
    History,
    SimulatedHistory,
    SimulatedStore,
    Stand,
    directory_name,
    log_entry,
    with_merged,
)
from benchmarks.markdown import row
from benchmarks.memory import as_command, peak_mib
from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops.formats.lance.generations.wal import wal_entry_path
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.layouts import SHARD as SHARD_LAYOUT
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.formats.lance.wire.names import region_folder
from tests.support.counting_store import CountingStore
from tests.support.tables.many_regions import make_regions

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from memwal_ops.formats.lance.table import Table

_MIB = 1 << 20
_GENERATIONS = 200
NONE_PINNED = gc.GcOptions(drain_after=timedelta(0), allow_unsafe=True)
IMMEDIATE = gc.GcOptions(timedelta(0), timedelta(0), manifest_retention=2, drain_after=timedelta(0), allow_unsafe=True)


# -- planning


def plan_simulated(folder: str, stand: Stand) -> dict[str, Any]:
    """In this process: list everything once, plan everything, and say what both took.

    Processor time: nothing here waits for anything, and the machine may be busy.
    """
    as_command()
    uri = f"{folder}/t.lance"
    with_merged(make_regions(uri, 1, SHARD_LAYOUT), dict.fromkeys(stand.region_ids, stand.merged))
    table = open_lance_table(uri)
    store = SimulatedStore(table.store, stand)
    table = replace(table, store=store)
    before = int(peak_mib() * 2**20)
    started = time.process_time()
    listed = sum(1 for region_id in table.regions.region_ids for _ in store.list(region_folder(region_id)))
    floor = time.process_time() - started
    store.reset()
    started = time.process_time()
    report = gc.plan(table, gc.GcOptions())
    seconds = time.process_time() - started
    verdicts = sum(counter.total() for counter in report.counts.values())
    return {
        "listed": listed,
        "verdicts": verdicts,
        "counts": report.to_json()["counts"],
        "floor": floor,
        "seconds": seconds,
        "before": before,
        "peak": int(peak_mib() * 2**20),
        "calls": store.calls.total(),
    }


def retention_simulated(folder: str, history: History) -> dict[str, Any]:
    """In this process: read the progress of many versions, look again, and ask who needs generations."""
    as_command()
    table = make_regions(f"{folder}/t.lance", 1, SHARD_LAYOUT)
    store = SimulatedHistory(table, history)
    table = replace(table, store=store)
    retention = LiveVersions()
    before = int(peak_mib() * 2**20)
    seconds = {}
    calls = {}
    for step in ("first", "again"):
        store.reset()
        started = time.perf_counter()
        retention.refresh(table, datetime.now(UTC))
        seconds[step] = time.perf_counter() - started
        calls[step] = store.calls.total()
        if step == "first":
            read = store.bytes_read
    progress = history.versions // history.progress_every
    started = time.perf_counter()
    held = sum(retention.needs(REGION, generation) is not None for generation in range(1, _GENERATIONS + 1))
    return {
        "versions": len(retention.versions),
        "read": read,
        "all_bytes": store.all_bytes,
        "calls": calls,
        "seconds": seconds,
        "needs": (time.perf_counter() - started) / _GENERATIONS,
        "held": held,
        "needed_by_the_oldest": retention.needs(REGION, 1),
        "needed_by_nearly_all": retention.needs(REGION, progress),
        "before": before,
        "peak": int(peak_mib() * 2**20),
    }


def in_child(*arguments: str) -> dict[str, Any]:
    """What a process that does nothing else says of itself."""
    child = [sys.executable, "-W", "ignore", "-m", "benchmarks.gc", *arguments]
    done = subprocess.run(child, check=True, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- requests


@dataclass(frozen=True, slots=True)
class Step:
    """What one command cost: calls of the store, and requests by method where a server counted them."""

    name: str
    decision: str
    calls: int
    requests: dict[str, int]


def steps(uri: str, options: dict[str, str] | None, counts: Counter[str], regions: int) -> Iterator[Step]:
    """The life of one generation in each region, from merged to gone, and the runs that find nothing."""
    make(uri, Shape(base=2_000, regions=regions, generations=1, rows=100), storage_options=options)
    merge.apply(open_lance_table(uri, options), merge.MergeOptions())
    catchup.apply(open_lance_table(uri, options), catchup.CatchupOptions())
    expire.apply(open_lance_table(uri, options), expire.ExpireOptions(timedelta(0), allow_unsafe=True))
    for name, run, care in (
        ("plan, a generation to drain", gc.plan, NONE_PINNED),
        ("apply, drains it", gc.apply, NONE_PINNED),
        ("plan, a generation to delete", gc.plan, IMMEDIATE),
        ("apply, deletes it", gc.apply, IMMEDIATE),
        ("plan, nothing to do", gc.plan, IMMEDIATE),
        ("apply, nothing to do", gc.apply, IMMEDIATE),
    ):
        counts.clear()
        table = open_lance_table(uri, options)
        store = CountingStore(table.store)
        report = run(replace(table, store=store), care)
        yield Step(name, report.decision, store.calls.total(), dict(counts))


def per_region(few: list[Step], many: list[Step], more: int) -> Iterator[list[str]]:
    """Rows: what a run costs with few regions, and each further region."""
    for one, other in zip(few, many, strict=True):
        assert one.decision == other.decision
        total, totals = sum(one.requests.values()) or one.calls, sum(other.requests.values()) or other.calls
        methods = ", ".join(f"{count} {method}" for method, count in sorted(one.requests.items()))
        yield [
            one.name,
            one.decision,
            f"{total}",
            methods or "calls of the store",
            f"**{(totals - total) / more:.1f}**",
        ]


# -- deletes

_DIRECTORIES = 1_000
_IN_EACH = 8
_LOG = 2_000


def deletable(uri: str, options: dict[str, str] | None, scale: int) -> Table:
    """A region of orphans and of flushed log entries: 10,000 files, divided by ``scale``."""
    table = make_regions(uri, 1, SHARD_LAYOUT, options)
    with_merged(table, {REGION: _DIRECTORIES})
    folder, manifests = region_folder(REGION), table.region(REGION)
    newest = replace(manifests.latest().next(), flushed_generations=(), current_generation=_DIRECTORIES + 1)
    assert manifests.commit(replace(newest, replay_after_wal_id=_LOG // scale, wal_id_last_seen=_LOG // scale))
    data = dict.fromkeys(
        (
            f"{folder}/{directory_name(generation)}/{DATA}/{file}.lance"
            for generation in range(1, _DIRECTORIES // scale + 1)
            for file in range(_IN_EACH)
        ),
        b"rows",
    )
    data |= {wal_entry_path(REGION, entry, SHARD_LAYOUT): log_entry(1) for entry in range(1, _LOG // scale + 1)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(table.store.put, data, data.values()))
    return open_lance_table(uri, options)


def ours(table: Table) -> int:
    """``gc --apply``."""
    return gc.apply(table, IMMEDIATE).deleted_objects


def one_by_one(table: Table) -> int:
    """As ``aws s3 rm --recursive`` does: list, and a request for each file."""
    listed = [meta.path for meta in table.store.list(region_folder(REGION))]
    return sum(table.store.delete_many([path]).deleted for path in listed)


def batches(table: Table) -> int:
    """The floor: list, and nothing but full batches; no proof of anything."""
    return table.store.delete_many([meta.path for meta in table.store.list(region_folder(REGION))]).deleted


def deleting(base: str, options: dict[str, str] | None, counts: Counter[str], where: str, scale: int) -> None:
    """Rows: deleting the same files in three ways."""
    for name, way in (("gc --apply", ours), ("one by one", one_by_one), ("full batches", batches)):
        table = deletable(f"{base}/{way.__name__}.lance", options, scale)
        store = CountingStore(table.store)
        counts.clear()
        started = time.perf_counter()
        deleted = way(replace(table, store=store))
        seconds = time.perf_counter() - started
        calls = store.calls
        verbs = ", ".join(f"{calls[verb]:,} {verb}" for verb in ("list", "delete_many"))
        cells = [where, name, f"{deleted:,}", f"{seconds:.2f} s", verbs]
        row(*[*cells, f"**{counts.total():,}**" if options else ""])


# -- all


def _head(title: str, cells: list[str]) -> None:
    print(f"\n## {title}\n")
    row(*cells)
    row(*["---"] * len(cells))


def main() -> None:
    """All tables of benchmarks/README.md that are about gc."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="few objects, to see that it runs")
    parser.add_argument("--plan", metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--retention", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plan or arguments.retention:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.plan:
                print(json.dumps(plan_simulated(folder, Stand(**json.loads(arguments.plan)))))
            else:
                print(json.dumps(retention_simulated(folder, History(**json.loads(arguments.retention)))))
        return
    scale = 50 if arguments.short else 1
    planning(scale)
    retaining(scale)
    with tempfile.TemporaryDirectory() as folder, counting_server() as (options, counts):
        remote = f"s3://{BUCKET}"
        _head("Garbage: requests", ["where", "run", "decision", "one region", "of these", "each further region"])
        for where, base, access in (("local files", folder, None), ("S3 stand-in", remote, options)):
            few, many = (list(steps(f"{base}/{regions}.lance", access, counts, regions)) for regions in (1, 5))
            for cells in per_region(few, many, 4):
                row(*[where, *cells])
        columns = ["where", "way", "deleted", "seconds", "calls of the store", "requests at the server"]
        _head("Garbage: deleting 10,000 files in 1,000 folders and a log", columns)
        deleting(folder, None, counts, "local files", scale)
        deleting(remote, options, counts, "S3 stand-in", scale)


def planning(scale: int) -> None:
    """A million objects; to divide each number by ``scale`` keeps the shape."""
    columns = ["what stands", "objects", "list once", "plan", "plan / list", "requests", "before", "peak"]
    _head("Garbage: planning", columns)
    for name, stand in SHAPES.items():
        smaller = replace(
            stand,
            regions=-(-stand.regions // scale),
            entries=stand.entries // (1 if stand.regions > 1 else scale),
            directories=stand.directories // (1 if stand.regions > 1 else scale),
        )
        found = in_child("--plan", json.dumps(asdict(smaller)))
        cells = [name, f"{found['listed']:,}", f"{found['floor']:.1f} s", f"{found['seconds']:.1f} s"]
        ratio = f"**{found['seconds'] / found['floor']:.1f}**"
        memory = [f"{found[key] // _MIB} MiB" for key in ("before", "peak")]
        row(*[*cells, ratio, f"{found['calls']:,}", *memory])


def retaining(scale: int) -> None:
    """Fifty thousand versions."""
    columns = ["versions", "their bytes", "read", "requests", "seconds", "again", "a generation", "before", "peak"]
    _head("Garbage: retained versions", columns)
    for versions in (5_000, 50_000):
        found = in_child("--retention", json.dumps(asdict(History(versions // scale, progress_every=500 // scale))))
        cells = [f"{found['versions']:,}", f"{found['all_bytes'] / _MIB:,.0f} MiB", f"{found['read'] / _MIB:,.0f} MiB"]
        requests = f"{found['calls']['first']:,}, then {found['calls']['again']}"
        seconds = [f"{found['seconds'][step]:.2f} s" for step in ("first", "again")]
        memory = [f"{found[key] // _MIB} MiB" for key in ("before", "peak")]
        row(*[*cells, requests, *seconds, f"{found['needs'] * 1e3:.2f} ms", *memory])


if __name__ == "__main__":
    main()
