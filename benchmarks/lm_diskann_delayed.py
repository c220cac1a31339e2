"""What reverse links that are applied later would save: ``python -m benchmarks.lm_diskann_delayed --rows 100000``.

A simulation in memory of a second version of the format (benchmarks/lm-diskann.md): an insert writes its own
block, and for each neighbour an entry of a log (a link to the new node, and the backlink from it); a block is written
once it has ``k`` entries. One entry: as now, without the blocks that the rows of one batch share. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from benchmarks.markdown import head, row
from benchmarks.vectors import clustered, recall_of, truth
from memwal_ops.formats.lm_diskann.kernels.distances import nearest, of_built, of_new, prune, squared, with_room
from memwal_ops.formats.lm_diskann.kernels.inserting import _walk, finish, link_all
from memwal_ops.formats.lm_diskann.vectors import entry_points

if TYPE_CHECKING:
    from numpy.typing import NDArray

R, L, ALPHA, MOST = 70, 100, np.float32(1.2**2), 256
ENTRIES, BLOCK, ENTRY = (1, 4, 8, 16, 32, 64), 4096, 8
STARTS, QUERIES, EFFORT = 8, 500, 50
WRITTEN, PENDING, DROPPED = range(3)


@numba.njit(nogil=True)
def apply(vectors: Any, links: Any, degrees: Any, waits: Any, k: int, node: int, counts: Any, stack: Any) -> None:
    """Write the block of a node, pruned if it has more than R links; and those that get their k-th entry by that."""
    stack[0], top = node, 1
    while top:
        top -= 1
        one = stack[top]
        counts[WRITTEN] += 1
        counts[PENDING] -= waits[one]
        waits[one] = 0
        held = degrees[one]
        if held <= R:
            continue
        near, far = np.empty((held, vectors.shape[1]), np.float32), np.empty(held, np.float32)
        for at in range(held):
            near[at] = vectors[links[one, at]]
            far[at] = squared(near[at], vectors[one])
        chosen, old = np.empty(R, np.int64), links[one, :held].copy()
        kept = prune(near, far, held, ALPHA, with_room(R), chosen)
        stays = np.zeros(held, np.uint8)
        for at in range(kept):
            links[one, at] = old[chosen[at]]
            stays[chosen[at]] = 1
        degrees[one] = kept
        for at in range(held):
            if not stays[at]:
                waits[old[at]] += 1
                counts[PENDING] += 1
                counts[DROPPED] += 1
                if waits[old[at]] == k:
                    stack[top] = old[at]
                    top += 1


@numba.njit(nogil=True)
def insert(
    vectors: Any, order: Any, entries: Any, first: int, last: int, k: int, links: Any, degrees: Any, stamps: Any,
    waits: Any, counts: Any,
) -> None:  # fmt: skip
    """Insert ``order[first:last]``; ``counts`` are blocks written, entries that wait, and dropped links."""
    ids, distances = np.empty(L + 1, np.int32), np.empty(L + 1, np.float32)
    done, visited = np.empty(L + 1, np.uint8), np.empty(8 * L + 64, np.int32)
    near, far = np.empty((visited.shape[0], vectors.shape[1]), np.float32), np.empty(visited.shape[0], np.float32)
    chosen, starts, stack = np.empty(R, np.int64), np.empty(STARTS, np.int64), np.empty(vectors.shape[0], np.int64)
    for at in range(first, last):
        node = order[at]
        held = nearest(entries, entries.shape[0], vectors[node], starts)
        begin = order[starts[:held]]
        found = _walk(vectors, links, degrees, vectors[node], begin, L, at, stamps, ids, distances, done, visited)
        for one in range(found):
            near[one] = vectors[visited[one]]
            far[one] = squared(near[one], vectors[node])
        kept = prune(near, far, found, ALPHA, of_new(R), chosen)
        for one in range(kept):
            links[node, one] = visited[chosen[one]]
        degrees[node] = kept
        counts[WRITTEN] += 1
        for one in range(kept):
            other = visited[chosen[one]]
            links[other, degrees[other]] = node
            degrees[other] += 1
            waits[other] += 1
            counts[PENDING] += 1
            if waits[other] >= k or degrees[other] == links.shape[1]:
                apply(vectors, links, degrees, waits, k, other, counts, stack)


def recall(
    vectors: NDArray[np.float32], order: NDArray[np.int64], entries: NDArray[np.float32],
    links: NDArray[np.int32], degrees: NDArray[np.int32], queries: NDArray[np.float32],
) -> float:  # fmt: skip
    """Recall@10 of a search with full vectors, pending links among the others."""
    ids, distances = np.empty(EFFORT + 1, np.int32), np.empty(EFFORT + 1, np.float32)
    done, visited = np.empty(EFFORT + 1, np.uint8), np.empty(8 * EFFORT + 64, np.int32)
    starts, stamps, found = np.empty(STARTS, np.int64), np.zeros(len(vectors), np.int32), []
    for at, query in enumerate(queries):
        begin = order[starts[: nearest(entries, len(entries), query, starts)]]
        count = _walk(
            vectors, links, degrees, query, begin, EFFORT, at + 1, stamps, ids, distances, done, visited
        )  # fmt: skip
        seen = visited[:count].astype(np.int64)
        found.append(seen[np.argsort(((vectors[seen] - query) ** 2).sum(1))[:10]])
    return recall_of(found, truth(vectors, queries))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    random = np.random.default_rng(3)
    vectors, queries = clustered(random, 2 * rows), clustered(random, QUERIES)
    order = np.arange(2 * rows)
    entries = vectors[: entry_points(rows)]
    built = np.full((rows, R + R // 3 + 1), -1, np.int32)
    sizes = np.zeros(rows, np.int32)
    link_all(vectors[:rows], order[:rows], entries, 0, rows, R, L, ALPHA, built, sizes, np.zeros(rows, np.int32))
    finish(vectors[:rows], 0, of_built(R), ALPHA, built, sizes)
    print(f"\n## Delayed reverse links: {rows:,} x {vectors.shape[1]}, as many inserted; the second half is counted")
    head(
        "entries per block", "blocks written per row", "KiB per row", "links dropped per row",
        "entries that wait, per node", "of 1,000,000 nodes, MiB", f"recall@10 at L = {EFFORT}", "CPU ms per row",
    )  # fmt: skip
    for k in ENTRIES:
        links, degrees = np.full((2 * rows, MOST), -1, np.int32), np.zeros(2 * rows, np.int32)
        links[:rows, : built.shape[1]], degrees[:rows] = built, sizes
        stamps, waits = np.zeros(2 * rows, np.int32), np.zeros(2 * rows, np.int32)
        counts = np.zeros(3, np.int64)
        half = rows + rows // 2
        insert(vectors, order, entries, rows, half, k, links, degrees, stamps, waits, counts)
        before, began = counts.copy(), time.process_time()
        insert(vectors, order, entries, half, 2 * rows, k, links, degrees, stamps, waits, counts)
        took = time.process_time() - began
        blocks, _, dropped = (counts - before) / (2 * rows - half)
        waiting = counts[PENDING] / (2 * rows)
        logged = (of_new(R) + dropped) * ENTRY if k > 1 else 0
        row(k, f"{blocks:.1f}", f"{(blocks * BLOCK + 2 * logged) / 1024:.0f}", f"{dropped:.0f}", f"{waiting:.1f}",
            f"{waiting * ENTRY * 1e6 / 2**20:.0f}", f"{recall(vectors, order, entries, links, degrees, queries):.3f}",
            f"{took / (2 * rows - half) * 1000:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
