"""What writes into regions cost: ``python -m benchmarks.writer`` (``--short`` to see that it runs).

Requests of puts, flushes and recoveries, counted at an S3 stand-in; ingest without durability of 64-float rows against
``lance.write_dataset`` of the same rows and against pylance's own MemWAL writer; recovery of a long log, beside
pylance's.
Prints Markdown.
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
import uuid
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa

from benchmarks.markdown import row
from benchmarks.server import BUCKET, counting_server
from memwal_ops.memwal import RegionWriter, WriterLimits, create_mem_wal

if TYPE_CHECKING:
    from collections import Counter

REGION = "5e0c1b0a-6a52-4b6e-9d3e-0f7d3a1b2c4d"
_KEY = {"lance-schema:unenforced-primary-key": "true"}
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=_KEY),
        pa.field("n", pa.int32()),
        pa.field("s", pa.string()),
        pa.field("v", pa.list_(pa.float32(), 64)),
    ]
)
_RUNS = 5
_NEVER = WriterLimits(memtable_rows=10**9, memtable_bytes=1 << 40)
_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
Options = dict[str, str]


def rows(first: int, count: int) -> pa.Table:
    """Rows with keys from ``first`` on."""
    vectors = np.random.default_rng(first).random(count * 64, np.float32)
    return pa.table(
        [
            pa.array(range(first, first + count)),
            pa.array(np.arange(count, dtype=np.int32)),
            [f"row {number}" for number in range(count)],
            pa.FixedSizeListArray.from_arrays(pa.array(vectors), 64),
        ],
        schema=_SCHEMA,
    )


def table(uri: str, *, ours: bool, options: Options | None = None) -> None:
    """A base of 100 rows, with a MemWAL index for one of the writers."""
    made = lance.write_dataset(rows(10**9, 100), uri, storage_options=options)
    if ours:
        create_mem_wal(uri, storage_options=options)
    else:
        made.initialize_mem_wal(unsharded=True)


# -- ingest, each way in a process of its own


def plain(folder: str, parts: list[pa.Table]) -> dict[str, float]:
    """``lance.write_dataset`` of all rows at once."""
    since = _clocks()
    lance.write_dataset(pa.concat_tables(parts), f"{folder}/plain.lance")
    return _since(since, "flushed")


def theirs(folder: str, parts: list[pa.Table]) -> dict[str, float]:
    """The MemWAL writer of pylance, non-durable, closed."""
    table(f"{folder}/theirs.lance", ours=False)
    limits: dict[str, Any] = {"max_memtable_rows": 10**6, "max_memtable_size": 1 << 28, "max_memtable_batches": 10**5}
    writer = lance.dataset(f"{folder}/theirs.lance").mem_wal_writer(REGION, durable_write=False, **limits)
    since = _clocks()
    for part in parts:
        writer.put(part)
    writer.close()
    return _since(since, "flushed")


def ours(folder: str, parts: list[pa.Table]) -> dict[str, float]:
    """``RegionWriter``, non-durable; until all is in the log, and until it is flushed and closed."""
    table(f"{folder}/ours.lance", ours=True)
    writer = RegionWriter(f"{folder}/ours.lance", REGION, durable=False)
    since = _clocks()
    for part in parts:
        writer.put(part)
    writer.flush_log()
    logged = _since(since, "logged")
    writer.close()
    return {**logged, **_since(since, "flushed")}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(clocks: tuple[float, float], what: str) -> dict[str, float]:
    """Seconds, and processor seconds of all threads: those say more on a machine that is not idle."""
    return {what: time.perf_counter() - clocks[0], f"{what}_cpu": time.process_time() - clocks[1]}


WAYS = {"plain": plain, "theirs": theirs, "ours": ours}
_NAMES = {
    ("plain", "flushed"): "`lance.write_dataset`",
    ("theirs", "flushed"): "pylance's MemWAL writer, closed",
    ("ours", "logged"): "`RegionWriter`, all in the log",
    ("ours", "flushed"): "`RegionWriter`, flushed and closed",
}


def ingest(count: int, batch: int, runs: int) -> None:
    """The table of ingest: all ways in turn, medians."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(runs):
        for way, done in found.items():
            with tempfile.TemporaryDirectory() as folder:
                done.append(_child("--way", way, "--rows", str(count), "--batch", str(batch), folder))
    _head("rows", "rows a put", "way", "seconds", "processor seconds", "of `write_dataset`", "of pylance's writer")

    def medians(way: str, until: str) -> tuple[float, float]:
        seconds, cpu = ([one[key] for one in found[way]] for key in (until, f"{until}_cpu"))
        return statistics.median(seconds), statistics.median(cpu)

    others = [medians(way, "flushed")[1] for way in ("plain", "theirs")]
    for (way, until), words in _NAMES.items():
        seconds, cpu = medians(way, until)
        ratios = [f"**{other / cpu:.2f}**" for other in others]
        row(f"{count:,}", f"{batch:,}", words, f"{seconds:.2f}", f"{cpu:.2f}", *ratios)


# -- requests


def requests(options: Options, counts: Counter[str], puts: int) -> None:
    """The table of requests at the server."""
    uri = f"s3://{BUCKET}/requests.lance"
    table(uri, ours=True, options=options)
    _head("what", *_METHODS, "all")
    counts.clear()
    writer = RegionWriter(uri, REGION, limits=_NEVER, storage_options=options)
    _counted("open, and claim a new region", counts)
    writer.put(rows(0, 10))
    _counted("a durable put", counts)
    for number in range(1, puts):
        writer.put(rows(10 * number, 10))
    _counted(f"{puts - 1} durable puts", counts)
    writer.flush()
    _counted(f"a flush of {puts} entries", counts)
    writer.put(rows(5, 10))
    writer.put(rows(0, 10))
    counts.clear()
    writer.flush()
    _counted("a flush of 2 entries, one with keys that come again", counts)
    lance.dataset(uri, storage_options=options).create_scalar_index("id", "BTREE")
    writer = RegionWriter(uri, REGION, limits=_NEVER, storage_options=options)
    writer.put(rows(0, 10))
    counts.clear()
    writer.flush()
    _counted("a flush of an entry, where the base has a BTREE of the key", counts)


def recovery_requests(options: Options, counts: Counter[str], entries: int) -> None:
    """Requests of opening a region whose log has entries that no generation has."""
    _head("writer", "entries", *_METHODS, "all", "seconds")
    for mine in (True, False):
        uri = f"s3://{BUCKET}/recovery-{mine}.lance"
        _log(uri, entries, mine=mine, options=options)
        counts.clear()
        started = time.perf_counter()
        _open(uri, mine=mine, options=options)
        seconds = time.perf_counter() - started
        cells = [str(counts[method]) for method in _METHODS]
        row("ours" if mine else "pylance's", f"{entries:,}", *cells, f"**{counts.total():,}**", f"{seconds:.1f}")


def recovery(entries: int, runs: int) -> None:
    """Seconds of the same on local files, each in a process of its own."""
    _head("writer", "entries", "seconds", "of pylance's")
    with tempfile.TemporaryDirectory() as folder:
        for mine in (True, False):
            _log(f"{folder}/{mine}.lance", entries, mine=mine)
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(runs):
            for mine, runs_of in found.items():
                runs_of.append(_child("--recover", "ours" if mine else "theirs", f"{folder}/{mine}.lance")["seconds"])
        medians = {mine: statistics.median(runs_of) for mine, runs_of in found.items()}
    for mine, seconds in medians.items():
        name = "ours" if mine else "pylance's"
        row(name, f"{entries:,}", f"{seconds:.2f}", f"**{seconds / medians[False]:.2f}**")


def _log(uri: str, entries: int, *, mine: bool, options: Options | None = None) -> None:
    """Entries of ten rows each; the writer is left without a flush."""
    table(uri, ours=mine, options=options)
    writer = _open(uri, mine=mine, options=options)
    for number in range(entries):
        writer.put(rows(10 * number, 10))


def _open(uri: str, *, mine: bool, options: Options | None = None) -> Any:
    if mine:
        return RegionWriter(uri, REGION, limits=_NEVER, storage_options=options)
    return lance.dataset(uri, storage_options=options).mem_wal_writer(REGION, max_wal_flush_interval_ms=1)


def _recover(which: str, uri: str) -> dict[str, float]:
    started = time.perf_counter()
    _open(uri, mine=which == "ours")
    return {"seconds": time.perf_counter() - started}


# -- the rest


def _child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.writer", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _counted(what: str, counts: Counter[str]) -> None:
    time.sleep(0.2)  # the server logs a request after it answered
    row(what, *(str(counts[method]) for method in _METHODS), f"**{counts.total()}**")
    counts.clear()


def _head(*cells: str) -> None:
    row(*cells)
    row(*["---"] * len(cells))


def main() -> None:
    """All tables of benchmarks/README.md that are about writers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="few rows, to see that it runs")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--recover", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="?", default=uuid.uuid4().hex, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        parts = [rows(first, arguments.batch) for first in range(0, arguments.rows, arguments.batch)]
        print(json.dumps(WAYS[arguments.way](arguments.place, parts)))
        sys.stdout.flush()
        os._exit(0)  # pylance's writer would finish in the background what is not measured
    if arguments.recover:
        print(json.dumps(_recover(arguments.recover, arguments.place)))
        sys.stdout.flush()
        os._exit(0)
    entries, runs = (30, 1) if arguments.short else (1000, _RUNS)
    print("## Writers of regions: ingest without durability\n")
    for count, batch in ((4_000, 100),) if arguments.short else ((500_000, 1_000), (100_000, 100)):
        ingest(count, batch, runs)
        print()
    print("## Writers of regions: recovery on local files\n")
    recovery(entries, runs)
    with counting_server() as (options, counts):
        print("\n## Writers of regions: requests\n")
        requests(options, counts, 10)
        print()
        recovery_requests(options, counts, entries)


if __name__ == "__main__":
    main()
