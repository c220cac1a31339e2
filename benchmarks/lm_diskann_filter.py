"""Filtered searches of an index folder by selectivity: ``python -m benchmarks.lm_diskann_filter --rows 100000``.

Each query may return only some rows: random ones; the rows nearest to it, as a filter by topic selects; or those of
some other clusters than its own. Recall is against a comparison of all allowed rows, beside the distance of the last
row that was found to that of the last true one: those of other clusters differ by little. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.markdown import head, row
from benchmarks.vectors import CLUSTERS, K, centres, clustered, recall_of
from memwal_ops.formats import lm_diskann

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.library import Index

KINDS = ["random", "near", "far"]
QUERIES, SHARES = 100, (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


def allowed(
    kind: str, far: NDArray[np.float32], groups: NDArray[np.int64], own: int, share: float, random: np.random.Generator
) -> NDArray[np.int64]:
    """The rows that a query of the cluster ``own`` may return, from its distances to all rows, and their clusters."""
    count = int(len(far) * share)
    if kind == "random":
        return np.sort(random.choice(len(far), count, replace=False))
    if kind == "near":
        return np.sort(np.argsort(far)[:count])
    others = random.permutation(np.delete(np.arange(CLUSTERS), own))
    return np.flatnonzero(np.isin(groups, others[: int(CLUSTERS * share)]))


def _groups(vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    """The cluster of each vector."""
    middles = centres()
    parts = np.array_split(vectors, len(vectors) // 10_000 + 1)
    return np.concatenate([np.argmin((middles**2).sum(1) - 2 * part @ middles.T, axis=1) for part in parts])


def measure(
    index: Index, vectors: NDArray[np.float32], queries: NDArray[np.float32], effort: int, kinds: list[str]
) -> Iterator[None]:
    """One row per kind of filter and share."""
    norms, groups, own = (vectors**2).sum(1), _groups(vectors), _groups(queries)
    for kind in kinds:
        for share in SHARES:
            random, found, nearest, ratios = np.random.default_rng(3), [], [], []
            took, read = 0.0, 0
            for query, group in zip(queries, own.tolist(), strict=True):
                far = norms - 2 * (vectors @ query)
                rows = allowed(kind, far, groups, group, share, random)
                nearest.append(rows[np.argpartition(far[rows], K)[:K]])
                last = float(((vectors[nearest[-1]] - query) ** 2).sum(1).max())
                before, began = int(index.view.counts[3]), time.process_time()
                ids, distances = index.search(query, k=K, L=effort, allow=rows)
                took, read = took + time.process_time() - began, read + int(index.view.counts[3]) - before
                found.append(ids[0])
                ratios.append(float(np.sqrt(distances[0, -1] / last)))
            row(kind, f"{share:.0%}", f"{recall_of(found, np.array(nearest)):.3f}", f"{np.mean(ratios):.3f}",
                f"{1e6 * took / len(queries):,.0f}", f"{read / len(queries):,.0f}")  # fmt: skip
            yield


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--effort", type=int, default=50, metavar="L")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    told = parser.parse_args()
    random = np.random.default_rng(3)
    vectors, queries = clustered(random, told.rows), clustered(random, QUERIES)
    with tempfile.TemporaryDirectory() as base, lm_diskann.create(f"{base}/made.lmd", dimension=128) as index:
        index.insert(np.arange(told.rows), vectors)
        index.search(queries[:1], k=K, allow=np.arange(told.rows))
        print(f"\n## Filtered: {told.rows:,} x 128, L = {told.effort}")
        head("allowed", "share of the rows", "recall@10", "distance", "CPU us per query", "blocks per query")
        for _ in measure(index, vectors, queries, told.effort, told.kinds):
            pass


if __name__ == "__main__":
    main()
