"""What compactions of Zeppelin namespaces cost: ``python -m benchmarks.zeppelin`` (``--short`` to see that it runs).

Compaction of a log, and of a small log onto a large segment, against the floor (read and decode all inputs once, verify
their checksums, write all outputs once) and against a plain script that does the document's steps with numpy, each in a
process of its own; memory; requests at an S3 stand-in; recall after many compactions. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from benchmarks.markdown import head, row
from benchmarks.memory import peak_mib
from benchmarks.server import BUCKET, counting_server
from memwal_ops import open_table
from memwal_ops.allocators import bound_allocators
from memwal_ops.core.context import RunContext
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.backlog import read_fragments
from memwal_ops.formats.zeppelin.jobs import merge
from memwal_ops.formats.zeppelin.reader import live_rows
from memwal_ops.formats.zeppelin.segments import SegmentReader
from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions
from memwal_ops.formats.zeppelin.wire.fragment import Fragment
from memwal_ops.formats.zeppelin.wire.segment import encode_attributes, encode_cluster

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from memwal_ops.formats.zeppelin.namespace import Namespace

_CLUSTERED = 200
_METRIC = "euclidean"


def _opened(uri: str, options: dict[str, str] | None = None) -> Namespace:
    return cast("Namespace", open_table(uri, options))


class Source:
    """Clustered vectors, the same ones each time."""

    def __init__(self, dimensions: int) -> None:
        self._random = np.random.default_rng(5)
        self._centres = self._random.normal(size=(_CLUSTERED, dimensions)) * 2

    def vectors(self, count: int) -> np.ndarray:
        """Shape (count, dimensions), float32."""
        near = self._centres[self._random.integers(0, _CLUSTERED, count)]
        return (near + self._random.normal(size=near.shape)).astype(np.float32)


def write(uri: str, source: Source, first: int, rows: int, fragments: int) -> None:
    """Append rows with ids from ``first`` on, in that many fragments."""
    writer = zeppelin.open_writer(uri)
    for part in np.array_split(np.arange(first, first + rows), fragments):
        vectors = source.vectors(len(part))
        writer.append(
            [
                {"id": f"v{number}", "values": vector, "attributes": {"kind": int(number) % 7}}
                for number, vector in zip(part, vectors, strict=True)
            ]
        )


# -- the ways, each in a process of its own


def floor(uri: str) -> dict[str, float]:
    """Read and decode every input once, with its checksum, and write every row once."""
    table = _opened(uri)
    since = _clocks()
    with tempfile.TemporaryDirectory() as folder:
        for segment in table.manifest.segments:
            for number, rows in enumerate(SegmentReader(table.store, segment).clusters()):
                _put(folder, f"s{number}", rows.ids, rows.vectors, rows.attributes)
        refs = table.manifest.fragments
        for number, (_, one) in enumerate(read_fragments(table, refs, None)):
            assert isinstance(one, Fragment)
            _put(folder, f"f{number}", one.ids, one.values, one.attributes)
        return _since(since)


def _put(folder: str, name: str, ids: Any, vectors: np.ndarray, attributes: Any) -> None:
    for kind, data in (
        ("bin", encode_cluster(ids, vectors, vectors.shape[1])),
        ("attrs", encode_attributes(attributes)),
    ):
        with open(f"{folder}/{name}.{kind}", "wb") as file:
            file.write(data)


def ours(uri: str, max_bytes: int = ZeppelinMergeOptions().max_bytes) -> dict[str, float]:
    """``memwal-ops merge``; the seconds of its k-means apart."""
    bound_allocators()  # as every command does
    table, context = _opened(uri), RunContext()
    since = _clocks()
    report = merge.apply(table, ZeppelinMergeOptions(max_bytes=max_bytes), context)
    assert report.decision == "merged", report.to_json()
    return {**_since(since), "training": context.phases.get("k-means", 0.0) + context.phases.get("sample", 0.0)}


def script(uri: str) -> dict[str, float]:
    """The document's steps as one would write them: all rows in a dictionary, k-means and assignment with numpy."""
    table = _opened(uri)
    since = _clocks()
    rows: dict[str, tuple[np.ndarray, Any]] = {}
    centroids = None
    for segment in table.manifest.segments:
        reader = SegmentReader(table.store, segment)
        centroids = reader.centroids()
        for part in reader.clusters():
            rows.update(zip(part.ids, zip(part.vectors, part.attributes, strict=True), strict=True))
    for _, one in read_fragments(table, table.manifest.fragments, None):
        assert isinstance(one, Fragment)
        for name in one.deletes:
            rows.pop(name, None)
        rows.update(zip(one.ids, zip(one.values, one.attributes, strict=True), strict=True))
    names = [*rows]
    vectors = np.stack([rows[name][0] for name in names])
    began = time.perf_counter()
    if centroids is None:
        centroids = _lloyd(vectors, max(1, len(vectors) // 3000))
    training = time.perf_counter() - began
    labels = _labels(vectors, centroids)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(centroids)):
            chosen = np.flatnonzero(labels == number)
            ids = [names[at] for at in chosen]
            _put(folder, str(number), ids, vectors[chosen], [rows[name][1] for name in ids])
        return {**_since(since), "training": training}


def _lloyd(vectors: np.ndarray, clusters: int) -> np.ndarray:
    random = np.random.default_rng(0)
    sample = vectors[random.choice(len(vectors), min(len(vectors), 256 * clusters), replace=False)]
    centroids = sample[:clusters].copy()
    for _ in range(25):
        labels = _labels(sample, centroids)
        for number in range(clusters):
            own = sample[labels == number]
            if len(own):
                centroids[number] = own.mean(axis=0)
    return centroids


def _labels(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    half = (centroids**2).sum(axis=1) / 2
    parts = np.array_split(vectors, max(1, len(vectors) // 4096))
    return np.concatenate([(half - part @ centroids.T).argmin(axis=1) for part in parts])


_SMALL = "with `--max-bytes 32MiB`"
WAYS: dict[str, Callable[[str], dict[str, float]]] = {
    "floor": floor,
    "memwal-ops": ours,
    _SMALL: partial(ours, max_bytes=32 << 20),
    "a script with numpy": script,
}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(clocks: tuple[float, float]) -> dict[str, float]:
    """Seconds, processor seconds of all threads, and the peak of memory in MiB."""
    return {"seconds": time.perf_counter() - clocks[0], "cpu": time.process_time() - clocks[1], "peak": peak_mib()}


def _child(way: str, uri: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.zeppelin", "--way", way, uri]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compactions(folder: str, cases: list[tuple[int, int, int]], dimensions: int, runs: int) -> None:
    """The table of times: all ways in turn, each on a fresh copy; medians."""
    head(
        "segment", "log", "fragments", "way", "seconds", "processor seconds", "of them k-means", "of the floor",
        "without k-means", "peak MiB",
    )  # fmt: skip
    for base, rows, fragments in cases:
        uri, source = f"{folder}/case", Source(dimensions)
        zeppelin.create(uri, dimensions=dimensions, metric=_METRIC, dialect="native")
        if base:
            write(uri, source, 0, base, max(1, base // 5000))
            merge.apply(_opened(uri), ZeppelinMergeOptions(), RunContext())
        write(uri, source, base, rows, fragments)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(runs):
            for way, taken in found.items():
                copy = f"{folder}/copy/case"
                shutil.copytree(uri, copy)
                taken.append(_child(way, copy))
                shutil.rmtree(copy)
        medians = {
            way: {name: statistics.median(one[name] for one in taken) for name in taken[0]}
            for way, taken in found.items()
        }
        for way, one in medians.items():
            training, lowest = one.get("training", 0.0), medians["floor"]["cpu"]
            ratios = [f"**{cpu / lowest:.2f}**" for cpu in (one["cpu"], one["cpu"] - training)]
            figures = [f"{each:.2f}" for each in (one["seconds"], one["cpu"], training)]
            row(f"{base:,}", f"{rows:,}", fragments, way, *figures, *ratios, f"{one['peak']:.0f}")
        shutil.rmtree(uri)


def memory(folder: str, largest: int, dimensions: int) -> None:
    """The peak of a compaction's memory over ten times the vectors: of the log, and of the segment."""
    head("segment", "log", "way", "seconds", "peak MiB")
    for count in (largest // 10, largest):
        uri, source = f"{folder}/memory", Source(dimensions)
        zeppelin.create(uri, dimensions=dimensions, metric=_METRIC, dialect="native")
        for base, rows in ((0, count), (count, max(1, largest // 50))):
            write(uri, source, base, rows, max(1, rows // 1000))
            for way in ("memwal-ops", _SMALL):
                copy = f"{folder}/copy/memory"
                shutil.copytree(uri, copy)
                taken = _child(way, copy)
                row(f"{base:,}", f"{rows:,}", way, f"{taken['seconds']:.1f}", f"**{taken['peak']:.0f}**")
                if way == _SMALL and not base:
                    shutil.rmtree(uri)
                    shutil.move(copy, uri)
                else:
                    shutil.rmtree(copy)
        shutil.rmtree(uri)


def requests(fragments: int) -> None:
    """Requests of a compaction at the S3 stand-in, by fragments and clusters."""
    head("fragments", "clusters", "rows", "GET", "HEAD", "PUT", "POST", "all")
    with counting_server() as (options, counts):
        for cells in compacted(options, counts, fragments):
            row(*cells, *(counts[method] for method in ("GET", "HEAD", "PUT", "POST")), f"**{counts.total()}**")


def compacted(options: dict[str, str], counts: Counter[str], fragments: int) -> Iterator[tuple[int | str, int, int]]:
    """Compact namespaces; yields fragments, clusters and rows of each, while ``counts`` has the requests."""
    for number, (parts, clusters) in enumerate([(1, 1), (fragments, 1), (fragments, 8), (0, 8)]):
        uri = f"s3://{BUCKET}/requests{number}"
        zeppelin.create(uri, dimensions=8, dialect="native", storage_options=options)
        writer = zeppelin.open_writer(uri, options)
        source, rows = Source(8), max(1, parts) * 20
        for part in range(max(1, parts)):
            vectors = source.vectors(20)
            writer.append([{"id": f"{part}-{at}", "values": one} for at, one in enumerate(vectors)])
        _compact(uri, options, counts, clusters)
        if not parts:  # one more onto a segment
            writer.append([{"id": "new", "values": source.vectors(1)[0]}])
            _compact(uri, options, counts, clusters)
        yield parts or "1 onto a segment", clusters, rows


def _compact(uri: str, options: dict[str, str], counts: Counter[str], clusters: int) -> None:
    table = _opened(uri, options)
    counts.clear()
    merge.apply(table, ZeppelinMergeOptions(clusters=clusters), RunContext())


def recall(folder: str, rounds: int, rows: int, dimensions: int) -> None:
    """Recall@10 after rounds of appends, deletes and compactions, and of a segment that is trained on the same rows."""
    uri, source, random = f"{folder}/rounds", Source(dimensions), np.random.default_rng(9)
    zeppelin.create(uri, dimensions=dimensions, metric=_METRIC, dialect="native")
    writer, live = zeppelin.open_writer(uri), np.arange(0)
    for number in range(rounds):
        gone = random.choice(live, len(live) // 20, replace=False)
        fresh = np.arange(number * rows, (number + 1) * rows)
        again = random.choice(np.setdiff1d(live, gone), len(live) // 20, replace=False)
        ids = np.concatenate([fresh, again])
        pairs = zip(ids, source.vectors(len(ids)), strict=True)
        writer.append([{"id": f"v{one}", "values": vector} for one, vector in pairs], [f"v{one}" for one in gone])
        live = np.concatenate([np.setdiff1d(live, gone), fresh])
        merge.apply(_opened(uri), ZeppelinMergeOptions(), RunContext())
    parts = [*live_rows(_opened(uri))]
    names = [one for part in parts for one in part.ids]
    vectors = np.concatenate([part.vectors for part in parts if part.ids])
    other = f"{folder}/fresh"
    zeppelin.create(other, dimensions=dimensions, metric=_METRIC, dialect="native")
    rows_of = [{"id": one, "values": vector} for one, vector in zip(names, vectors, strict=True)]
    zeppelin.open_writer(other).append(rows_of)
    merge.apply(_opened(other), ZeppelinMergeOptions(), RunContext())
    queries = source.vectors(100)
    head("segment", "rows", "nprobe", "recall@10")
    for nprobe in (1, 2, 4):
        for name, place in ((f"after {rounds} rounds", uri), ("trained from scratch", other)):
            hits = 0
            for query in queries:
                best = {names[at] for at in np.argsort(((vectors - query) ** 2).sum(axis=1))[:10]}
                found = zeppelin.query(place, vector=query.tolist(), k=10, nprobe=nprobe)
                hits += len(best & {one["id"] for one in found})
            row(name, f"{len(names):,}", nprobe, f"**{hits / len(queries) / 10:.3f}**")


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few thousand rows")
    parser.add_argument("--base", type=int, default=1_000_000, help="rows of the large segment")
    parser.add_argument("--memory", action="store_true", help="only the table of memory over ten times the vectors")
    parser.add_argument("--way", choices=[*WAYS])
    parser.add_argument("uri", nargs="?")
    given = parser.parse_args()
    if given.way:
        print(json.dumps(WAYS[given.way](given.uri)))
        return
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        if given.memory:
            memory(folder, given.base, 128)
        elif given.short:
            compactions(folder, [(0, 4_000, 8), (4_000, 400, 4)], 16, 1)
            memory(folder, 4_000, 16)
            requests(4)
            recall(folder, 5, 400, 16)
        else:
            compactions(folder, [(0, 20_000, 40), (0, 200_000, 400), (given.base, 20_000, 40)], 128, 3)
            requests(20)
            recall(folder, 50, 1_000, 32)


if __name__ == "__main__":
    main()
