"""What reads beside unmerged generations cost: ``python -m benchmarks.reader`` (``--short`` to see that it runs).

A table with 20 unmerged generations, written by ``RegionWriter``, against one table that holds the same live rows: the
generations that a look-up opens, scans beside those of pylance's own LSM scanner, recall of vector search, and scores
of text search. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot

from benchmarks.markdown import head, row
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.memwal import RegionWriter, create_mem_wal, read

if TYPE_CHECKING:
    from collections.abc import Callable

_GENERATIONS = 20
_WIDTH, _PARTITIONS = 64, 16
_REGION = UUID("5e0c1b0a-6a52-4b6e-9d3e-0f7d3a1b2c4d")
_WORDS = [f"{one}{two}" for one in ("red", "blue", "stone", "river", "cloud", "paper") for two in range(50)]
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("n", pa.int32()),
        pa.field("s", pa.string()),
        pa.field("v", pa.list_(pa.float32(), _WIDTH)),
    ]
)


class Made:
    """The table, and the one with its live rows."""

    def __init__(self, folder: str, base: int, generation: int, *, indexed: bool = True) -> None:
        self.random = np.random.default_rng(1)
        self.centers = self.random.normal(size=(200, _WIDTH)) * 2
        self.uri, self.base = f"{folder}/table.lance", base
        made = lance.write_dataset(self.rows(np.arange(base)), self.uri)
        if indexed:
            _index(made)
        create_mem_wal(self.uri, maintained_indexes=["v_idx"] if indexed else [])
        with RegionWriter(self.uri, _REGION) as writer:
            for _ in range(_GENERATIONS):
                writer.put(self.rows(self.random.choice(2 * base, generation, replace=False)))
                writer.delete(pa.table({"id": self.random.choice(2 * base, generation // 30, replace=False)}))
                writer.flush()
        self.live = read(self.uri).scan().to_table()
        self.one = lance.write_dataset(self.live, f"{folder}/one.lance")
        if indexed:
            _index(self.one)
        self.one = lance.dataset(f"{folder}/one.lance")

    def rows(self, ids: np.ndarray) -> pa.Table:
        """Rows with these keys; half of a generation's replace others, which come again in later ones."""
        near = self.centers[self.random.integers(0, len(self.centers), len(ids))]
        vectors = (near + self.random.normal(size=near.shape)).astype(np.float32)
        words = self.random.choice(_WORDS, (len(ids), 6))
        return pa.table(
            [
                pa.array(ids),
                pa.array(np.arange(len(ids), dtype=np.int32)),
                pa.array([" ".join(one) for one in words]),
                pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), _WIDTH),
            ],
            schema=_SCHEMA,
        )

    def query(self) -> np.ndarray:
        """A vector near some rows."""
        center: np.ndarray = self.centers[self.random.integers(len(self.centers))]
        return (center + self.random.normal(size=_WIDTH)).astype(np.float32)


def _index(dataset: Any) -> None:
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("s", "INVERTED")
    dataset.create_index("v", "IVF_PQ", num_partitions=_PARTITIONS, num_sub_vectors=16, metric="l2")


def look_ups(made: Made, count: int) -> None:
    """Generations that are opened for a key that is there, and for one that is not."""
    reader = read(made.uri)
    keys = made.random.choice(made.live["id"].to_numpy(), count, replace=False).tolist()
    fresh = {*_changed(made)}
    found = [(reader.find([key]), key in fresh) for key in keys]
    assert all(one.rows.num_rows == 1 for one, _ in found)
    missing = [reader.find([key]).opened for key in range(3 * made.base, 3 * made.base + count)]
    head("keys", "look-ups", "generations opened for one", "at most")
    for what, opened in {
        "that are there": [one.opened for one, _ in found],
        "of these, in a generation": [one.opened for one, is_fresh in found if is_fresh],
        "that are not there": missing,
    }.items():
        row(what, f"{len(opened):,}", f"**{statistics.mean(opened):.3f}**", max(opened))


def _changed(made: Made) -> list[int]:
    table = open_lance_table(made.uri)
    listed = table.region(_REGION).latest().flushed_generations
    folders = [f"{made.uri}/_mem_wal/{_REGION}/{one.path}" for one in listed]
    return [key for folder in folders for key in lance.dataset(folder).to_table(columns=["id"])["id"].to_pylist()]


def scans(made: Made, runs: int) -> None:
    """Scans of all columns and of one, with and without a filter; all ways in turn, medians."""
    head("scan", "way", "seconds", "processor seconds", "of one table", "of pylance's LSM scanner")
    for what, columns, condition in (
        ("all columns", None, None),
        ("all columns, 1 row of 50", None, "n % 50 = 7"),
        ("one column", ["n"], None),
    ):
        ways: dict[str, Callable[[], pa.Table]] = {
            "one table": partial(_plain, made, columns, condition),
            "pylance's LSM scanner": partial(_lsm, made, columns, condition),
            "`read(uri).scan()`": partial(_ours, made, columns, condition),
        }
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(runs):
            counts = set()
            for way, run in ways.items():
                clocks = time.perf_counter(), time.process_time()
                counts.add(run().num_rows)
                seconds[way].append((time.perf_counter() - clocks[0], time.process_time() - clocks[1]))
            assert len(counts) == 1, counts
        medians = {
            way: [statistics.median(one[at] for one in taken) for at in (0, 1)] for way, taken in seconds.items()
        }
        for way, (wall, cpu) in medians.items():
            others = [cpu / medians[other][1] for other in ("one table", "pylance's LSM scanner")]
            row(what, way, f"{wall:.3f}", f"{cpu:.3f}", *(f"**{one:.2f}**" for one in others))


def _plain(made: Made, columns: list[str] | None, condition: str | None) -> pa.Table:
    return lance.dataset(made.one.uri).to_table(columns=columns, filter=condition)


def _ours(made: Made, columns: list[str] | None, condition: str | None) -> pa.Table:
    return read(made.uri).scan(columns, condition).to_table()


def _lsm(made: Made, columns: list[str] | None, condition: str | None) -> pa.Table:
    """As pylance reads it: the region's manifest, its generations, the base."""
    table = open_lance_table(made.uri)
    manifest = table.region(_REGION).latest()
    snapshot = ShardSnapshot(str(_REGION)).with_current_generation(manifest.current_generation)
    for one in manifest.flushed_generations:
        snapshot = snapshot.with_sstable(one.generation, one.path)
    scanner = LsmScanner.from_snapshots(table.dataset, [snapshot]).project(columns or _SCHEMA.names)
    return (scanner if condition is None else scanner.filter(condition)).to_table()


def searches(made: Made, count: int) -> None:
    """Recall of vector search; scores of text search."""
    vectors = np.stack(made.live["v"].to_numpy(zero_copy_only=False))
    ids, reader = made.live["id"].to_numpy(), read(made.uri)
    recalls: dict[str, list[float]] = {"`read(uri).nearest()`": [], "one table": [], "one table, `refine_factor=1`": []}
    for _ in range(count):
        query = made.query()
        best = {*ids[np.argsort(((vectors - query) ** 2).sum(axis=1))[:10]].tolist()}
        asked = {"column": "v", "q": query, "k": 10}
        answers = (
            reader.nearest("v", query, 10),
            made.one.to_table(columns=["id", "_distance"], nearest=asked),
            made.one.to_table(columns=["id", "_distance"], nearest={**asked, "refine_factor": 1}),
        )
        for taken, answer in zip(recalls.values(), answers, strict=True):
            taken.append(len(best & {*answer["id"].to_pylist()}) / 10)
    head("vector search", "queries", "recall@10")
    for way, taken in recalls.items():
        row(way, count, f"**{statistics.mean(taken):.3f}**")
    equal = 0
    texts = [" ".join(made.random.choice(_WORDS, made.random.integers(1, 4))) for _ in range(3)]
    for text in texts:
        scores = reader.search("s", text, 10)["_score"].to_numpy()
        asked = {"columns": ["s"], "query": text}
        exact = made.one.to_table(columns=["id", "_score"], full_text_query=asked, limit=10)["_score"].to_numpy()
        equal += bool(np.allclose(np.sort(scores), np.sort(exact), rtol=1e-5))
    head("text search", "queries", "top 10 scores equal to those of one table")
    row("`read(uri).search()`", len(texts), f"**{equal}**")


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few thousand rows")
    short = parser.parse_args().short
    generation = 500 if short else 10_000
    for base, indexed in ((5_000, True), (20_000, False)) if short else ((300_000, True), (2_000_000, False)):
        with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
            made = Made(folder, base, generation, indexed=indexed)
            print(f"\n{base:,} base rows, {_GENERATIONS} generations of {generation:,}, ", end="")
            print(f"{made.live.num_rows:,} live rows; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
            if indexed:
                look_ups(made, 100 if short else 1000)
            scans(made, 3)
            if indexed:
                searches(made, 20 if short else 50)


if __name__ == "__main__":
    main()
