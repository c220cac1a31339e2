"""What jobs of large Zeppelin namespaces cost: ``python -m benchmarks.zeppelin_sizes`` (``--short``: a few rows).

Merges, gc, queries and verify of 1,000,000 vectors of 128 dimensions and 100,000 of 768, each in a process of its own:
processor seconds, bytes and peak memory, as ratios to a floor that reads and writes the same bytes (of queries: numpy's
brute force over vectors in memory). Then the requests at an S3 stand-in, by clusters. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash

from benchmarks import zeppelin as ways
from benchmarks.markdown import head, row
from benchmarks.memory import as_command, peak_mib, reset_peak
from benchmarks.server import BUCKET, counting_server
from benchmarks.zeppelin import Source, write
from memwal_ops import open_table, run_job
from memwal_ops.core.context import RunContext
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.compaction import Compaction, Inputs
from memwal_ops.formats.zeppelin.namespace import retried
from memwal_ops.formats.zeppelin.reader import Query, distances, live_rows, query_namespace
from memwal_ops.formats.zeppelin.segments import Rows
from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions, ZeppelinMergeOptions

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from memwal_ops.core.report import Report
    from memwal_ops.formats.zeppelin.namespace import Namespace

_METRIC = "euclidean"
_QUERIES = 20
# Below that, the figure of a floor is one of chance.
_LEAST = 0.2
_NOW = ZeppelinGcOptions(reader_grace=timedelta(0), keep_revisions=1, allow_unsafe=True)


def _opened(uri: str, options: dict[str, str] | None = None) -> Namespace:
    return cast("Namespace", open_table(uri, options))


# -- what is measured, each in a process of its own


def _merge(uri: str, **options: Any) -> None:
    report = run_job(uri, "merge", engine="local", **options)
    assert report.decision == "merged", report.to_json()


def _gc(uri: str) -> None:
    assert run_job(uri, "gc", _NOW, apply=True).decision == "deleted"


def _unlink(uri: str) -> None:
    """The floor of gc: delete the segments and fragments that the manifest does not list."""
    manifest = _opened(uri).manifest
    for path in [*Path(uri, "segments").rglob("*"), *Path(uri, "wal").rglob("*")]:
        name = str(path.relative_to(uri))
        if path.is_file() and name not in manifest.fragment_keys and not name.startswith(tuple(manifest.prefixes)):
            path.unlink()


def _hash(uri: str) -> None:
    """The floor of verify: read every object once, with a checksum."""
    for path in Path(uri).rglob("*"):
        if path.is_file():
            xxhash.xxh3_64(path.read_bytes()).hexdigest()


def _queries(uri: str) -> None:
    for vector in Source(_opened(uri).meta.dimensions or 0).vectors(_QUERIES):
        query_namespace(_opened(uri), Query(vector=vector.tolist()))


def _brute(uri: str) -> None:
    """The floor of queries: distances to all vectors, in memory, in parts of 8,192."""
    parts = [part for part in live_rows(_opened(uri)) if part.ids]
    vectors = np.concatenate([part.vectors for part in parts])
    wanted = Source(vectors.shape[1]).vectors(_QUERIES)
    reset()
    for vector in wanted:
        far = np.concatenate(
            [distances(vectors[at : at + 8192], vector, _METRIC) for at in range(0, len(vectors), 8192)]
        )
        np.argpartition(far, 10)[:10]


def _floor(uri: str) -> None:
    ways.floor(uri)


WORK: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
    "merge of 1 % more": (_merge, _floor),
    "merge --retrain": (lambda uri: _merge(uri, retrain=True), _floor),
    "gc of what they replaced": (_gc, _unlink),
    f"{_QUERIES} queries": (_queries, _brute),
    "verify": (lambda uri: run_job(uri, "verify"), _hash),
    "verify --deep": (lambda uri: run_job(uri, "verify", deep=True), _hash),
}
_began: dict[str, float] = {}


def reset() -> None:
    """Count from here."""
    reset_peak()
    _began.update(_counts())


def _counts() -> dict[str, float]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"cpu": time.process_time(), "read": int(lines["rchar"]) / 1e6, "written": int(lines["wchar"]) / 1e6}


def measure(name: str, *, floor: bool, uri: str) -> dict[str, float]:
    """Processor seconds of all threads, megabytes read and written, and the peak of memory in MiB."""
    as_command()
    _opened(uri)
    reset()
    WORK[name][floor](uri)
    return {name: now - _began[name] for name, now in _counts().items()} | {"peak": peak_mib()}


def _child(name: str, uri: str, *, floor: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.zeppelin_sizes", "--work", name, uri, *(["--floor"] if floor else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def plant(uri: str, source: Source, rows: int) -> None:
    """Publish a segment of that many rows, without a log: fragments take ten times as long."""
    table = _opened(uri)
    none = Rows([], np.zeros((0, table.meta.dimensions or 0), np.float32), [])
    vectors = source.vectors(rows)
    planted = Rows([f"v{at}" for at in range(rows)], vectors, [{"kind": at % 7} for at in range(rows)])
    inputs = Inputs(table, (), planted, none, frozenset(), frozenset(), rows, None)
    built = Compaction(inputs, ZeppelinMergeOptions(max_bytes=4 << 30), _METRIC, RunContext()).build()
    assert built.segment is not None
    segments = [built.segment]
    retried(table, lambda newest: newest.manifest.changed(segments=segments), compaction=True)


def sizes(folder: str, cases: list[tuple[int, int]], only: str) -> None:
    """The table of costs."""
    head(
        "vectors", "work", "processor seconds", "of the floor", "MB read", "of the floor", "MB written", "of the floor",
        "peak MiB",
    )  # fmt: skip
    for rows, dimensions in cases:
        uri, source = f"{folder}/sizes", Source(dimensions)
        zeppelin.create(uri, dimensions=dimensions, metric=_METRIC, dialect="native")
        plant(uri, source, rows)
        for name in WORK:
            if name == "merge of 1 % more":
                write(uri, source, rows, rows // 100, 4)
            if only not in name:
                if name.startswith(("merge", "gc")):
                    WORK[name][0](uri)
                continue
            taken = {}
            copy = f"{folder}/copy/sizes"
            for floor in (True, False):
                shutil.copytree(uri, copy)
                taken[floor] = _child(name, copy, floor=floor)
                if floor:
                    shutil.rmtree(copy)
            shutil.rmtree(uri)
            shutil.move(copy, uri)
            _show(f"{rows:,} x {dimensions}", name, taken[False], taken[True])
        shutil.rmtree(uri)


def _show(vectors: str, name: str, ours: dict[str, float], floor: dict[str, float]) -> None:
    cells = []
    for figure in ("cpu", "read", "written"):
        cells += [f"{ours[figure]:,.1f}", f"**{ours[figure] / floor[figure]:.2f}**" if floor[figure] >= _LEAST else "-"]
    row(vectors, name, *cells, f"**{ours['peak']:.0f}**")


def requests(cases: list[int], fragments: int) -> None:
    """Requests at the S3 stand-in, by clusters; the floor is a request for each object that is read or written."""
    head("clusters", "work", "GET", "HEAD", "PUT", "POST", "DELETE", "all", "of the floor")
    with counting_server() as (options, counts):
        for clusters in cases:
            for name, least in requested(options, counts, clusters, fragments):
                methods = [counts[one] for one in ("GET", "HEAD", "PUT", "POST", "DELETE")]
                row(clusters, name, *methods, f"**{counts.total()}**", f"{counts.total() / least:.2f}")


def requested(
    options: dict[str, str], counts: Counter[str], clusters: int, fragments: int
) -> Iterator[tuple[str, int]]:
    """Run each job on a namespace; yields its name and the requests of a floor, while ``counts`` has the job's."""
    uri = f"s3://{BUCKET}/sizes{clusters}"
    zeppelin.create(uri, dimensions=8, metric=_METRIC, dialect="native", storage_options=options)
    writer, source = zeppelin.open_writer(uri, options), Source(8)

    def append(first: int, rows: int) -> None:
        for part in np.array_split(np.arange(first, first + rows), fragments):
            vectors = source.vectors(len(part)).tolist()
            writer.append([{"id": f"v{at}", "values": one} for at, one in zip(part, vectors, strict=True)])

    def job(name: str, **more: Any) -> Report:
        counts.clear()
        return run_job(uri, name, storage_options=options, **more)

    both, rows = 2 * clusters, 8 * clusters  # a cluster is two objects
    append(0, rows)
    job("merge", clusters=clusters)
    yield "merge of the log", fragments + both
    append(rows, rows)
    job("merge", retrain_imbalance_threshold=1e9)  # so small clusters are never balanced
    yield "merge of as much more", fragments + 2 * both
    job("merge", clusters=clusters, retrain=True)
    yield "merge --retrain", 2 * both
    counts.clear()
    run_job(uri, "gc", _NOW, storage_options=options, apply=True)
    yield "gc of what they replaced", 2 * both // 1000 + 2
    counts.clear()
    query_namespace(_opened(uri, options), Query(vector=[0.0] * 8))
    yield "query, nprobe 8", 16
    job("verify")
    yield "verify", both


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few thousand rows")
    parser.add_argument("--case", action="append", metavar="ROWSxDIMENSIONS", help="instead of the three sizes")
    parser.add_argument("--only", default="", help="only work with this in its name; merges and gc run anyway")
    parser.add_argument("--requests", action="store_true", help="only the table of requests")
    parser.add_argument("--work", choices=[*WORK])
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("uri", nargs="?")
    given = parser.parse_args()
    if given.work:
        print(json.dumps(measure(given.work, floor=given.floor, uri=given.uri)))
        return
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        if not given.requests:
            named = given.case or (["4000x16"] if given.short else ["100000x128", "1000000x128", "100000x768"])
            cases = [(int(rows), int(dimensions)) for rows, dimensions in (one.split("x") for one in named)]
            sizes(folder, cases, given.only)
    if given.requests or not given.case:
        requests([4] if given.short else [33, 333], 4 if given.short else 20)


if __name__ == "__main__":
    main()
