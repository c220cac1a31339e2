"""Filtered searches of an index folder by selectivity: ``python -m benchmarks.lm_diskann_filter --rows 100000``.

Each query may return only some rows: random ones; those of clusters near the query, as a filter by topic selects; or
those of clusters far from it. Recall is against a comparison of all allowed rows. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.markdown import head, row
from benchmarks.vectors import K, clustered, recall_of
from memwal_ops.formats import lm_diskann

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.library import Index

QUERIES, SHARES = 100, (0.5, 0.2, 0.1, 0.05, 0.02)


def allowed(kind: str, far: NDArray[np.float32], share: float, random: np.random.Generator) -> NDArray[np.int64]:
    """The rows that a query may return, from its distances to all rows."""
    count = int(len(far) * share)
    if kind == "random":
        return np.sort(random.choice(len(far), count, replace=False))
    order = np.argsort(far)
    return np.sort(order[:count] if kind == "near" else order[-count:])


def measure(index: Index, vectors: NDArray[np.float32], queries: NDArray[np.float32], effort: int) -> Iterator[None]:
    """One row per kind of filter and share."""
    norms = (vectors**2).sum(1)
    for kind in ("random", "near", "far"):
        for share in SHARES:
            random, found, nearest, took, read = np.random.default_rng(3), [], [], 0.0, 0
            for query in queries:
                far = norms - 2 * (vectors @ query)
                rows = allowed(kind, far, share, random)
                nearest.append(rows[np.argpartition(far[rows], K)[:K]])
                before, began = int(index.view.counts[3]), time.process_time()
                found.append(index.search(query, k=K, L=effort, allow=rows)[0][0])
                took, read = took + time.process_time() - began, read + int(index.view.counts[3]) - before
            row(kind, f"{share:.0%}", f"{recall_of(found, np.array(nearest)):.3f}", f"{len(queries) / took:,.0f}",
                f"{read / len(queries):,.0f}")  # fmt: skip
            yield


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--effort", type=int, default=50, metavar="L")
    told = parser.parse_args()
    random = np.random.default_rng(3)
    vectors, queries = clustered(random, told.rows), clustered(random, QUERIES)
    with tempfile.TemporaryDirectory() as base, lm_diskann.create(f"{base}/made.lmd", dimension=128) as index:
        index.insert(np.arange(told.rows), vectors)
        index.search(queries[:1], k=K, allow=np.arange(told.rows))
        print(f"\n## Filtered: {told.rows:,} x 128, L = {told.effort}")
        head("allowed", "share of the rows", "recall@10", "queries per CPU second", "blocks per query")
        for _ in measure(index, vectors, queries, told.effort):
            pass


if __name__ == "__main__":
    main()
