"""Build, search, change and merge one index folder of clustered Gaussians: ``python -m benchmarks.lm_diskann [ROWS]``.

The short form: one index, one core, no other library beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import numpy as np

from memwal_ops.formats import lm_diskann

DIMENSION, CLUSTERS, QUERIES, K = 128, 1000, 500, 10


def data(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors, queries, and the true nearest rows of each query."""
    random = np.random.default_rng(1)
    centres = random.normal(size=(CLUSTERS, DIMENSION))

    def some(count: int) -> np.ndarray:
        near = centres[random.integers(0, CLUSTERS, count)]
        return (near + random.normal(size=(count, DIMENSION)) * 0.7).astype(np.float32)

    vectors, queries = some(rows), some(QUERIES)
    distances = (vectors**2).sum(1)[None] - 2 * queries @ vectors.T
    return vectors, queries, np.argpartition(distances, K, 1)[:, :K]


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    vectors, queries, truth = data(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "vectors.lmd")
        lm_diskann.create(path, dimension=DIMENSION)
        began = time.perf_counter()
        with lm_diskann.open(path) as index:
            index.insert(np.arange(rows), vectors)
        took, size = time.perf_counter() - began, os.path.getsize(f"{path}/graph.lmd")
        print(f"build: {took:.1f} s, graph.lmd {size / 2**20:.0f} MiB (the first run compiles, too)")
        print(
            "| L | recall@10 | queries per CPU second | blocks per query | read from the file |\n|---|---|---|---|---|"
        )
        with lm_diskann.open(path, read_only=True) as index:
            index.search(queries[:2])
            for limit in (50, 75, 100, 150, 200, 300):
                before, began = index.view.counts.copy(), time.process_time()
                found, _ = index.search(queries, k=K, L=limit)
                took = time.process_time() - began
                asked, read = ((index.view.counts - before)[3:5] / QUERIES).tolist()
                pairs = zip(found.tolist(), truth.tolist(), strict=True)
                recall = np.mean([len({*one} & {*other}) / K for one, other in pairs])
                print(f"| {limit} | {recall:.3f} | {QUERIES / took:,.0f} | {asked:.0f} | {read:.0f} |")
        with lm_diskann.open(path) as index:
            for count in (1000, 10):
                began = time.perf_counter()
                index.insert(np.arange(rows, rows + count), np.resize(queries, (count, DIMENSION)) + np.float32(0.01))
                print(f"insert of {count}: {time.perf_counter() - began:.2f} s, {index.view.delta_blocks} delta blocks")
            began = time.perf_counter()
            merged = index.merge()
            print(f"merge of {merged} blocks: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
