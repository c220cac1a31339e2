"""Build a whole graph in memory (Vamana with full vectors), and write its blocks in chunks."""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import nearest, squared
from memwal_ops.formats.lm_diskann.kernels.memory import (
    BACKLINKS,
    CODEBOOK,
    EPOCH,
    FLAGS,
    LINKS,
    NODE,
    NONE,
    ORIGIN,
    OVERFLOW_REFERENCE,
    ROW,
    SEARCH_STARTS,
    VECTOR,
    VERSION,
)
from memwal_ops.formats.lm_diskann.kernels.pruning import prune
from memwal_ops.formats.lm_diskann.wire.blocks import OVERFLOW


@numba.njit(cache=True, nogil=True)
def _walk(vectors, links, degrees, query, starts, limit, stamp, stamps, ids, distances, done, visited):
    """Greedy search with full vectors from ``starts``, the nearest first; returns the number of nodes in ``visited``."""
    held, count = min(starts.shape[0], limit), 0
    for at in range(held):
        ids[at], distances[at], done[at] = starts[at], squared(vectors[starts[at]], query), 0
        stamps[starts[at]] = stamp
    while count < visited.shape[0]:
        at = 0
        while at < held and done[at]:
            at += 1
        if at == held:
            break
        done[at] = 1
        node = ids[at]
        visited[count] = node
        count += 1
        for link in range(degrees[node]):
            other = links[node, link]
            if stamps[other] == stamp:
                continue
            stamps[other] = stamp
            distance = squared(vectors[other], query)
            if held == limit and distance >= distances[held - 1]:
                continue
            to = held if held < limit else held - 1
            while to > 0 and distances[to - 1] > distance:
                ids[to], distances[to], done[to] = ids[to - 1], distances[to - 1], done[to - 1]
                to -= 1
            ids[to], distances[to], done[to] = other, distance, 0
            held = min(held + 1, limit)
    return count


@numba.njit(cache=True, nogil=True)
def _shorten(vectors, links, degrees, node, alpha, most):
    count = degrees[node]
    near = np.empty((count, vectors.shape[1]), np.float32)
    distances = np.empty(count, np.float32)
    for at in range(count):
        near[at, :] = vectors[links[node, at]]
        distances[at] = squared(near[at], vectors[node])
    chosen = np.empty(most, np.int64)
    kept = prune(near, distances, count, alpha, most, chosen)
    old = links[node, :count].copy()
    for at in range(kept):
        links[node, at] = old[chosen[at]]
    degrees[node] = kept


@numba.njit(cache=True, nogil=True)
def spread(vectors, nodes, first, last):
    """Reorder ``nodes``: each from position ``first`` to ``last`` is the farthest from those before it, of all."""
    far = np.empty(nodes.shape[0], np.float32)
    for one in range(nodes.shape[0]):
        far[one] = np.inf
    for at in range(last):
        if at >= first:
            best = at
            for one in range(at + 1, nodes.shape[0]):
                if far[one] > far[best]:
                    best = one
            nodes[at], nodes[best] = nodes[best], nodes[at]
            far[best] = far[at]
        for one in range(at + 1, nodes.shape[0]):
            far[one] = min(far[one], squared(vectors[nodes[one]], vectors[nodes[at]]))


@numba.njit(cache=True, nogil=True)
def link_all(vectors, order, entries, first, last, most, limit, alpha, links, degrees, stamps):
    """Insert the nodes ``order[first:last]`` into the graph ``links`` [n, capacity], which has those before them.

    Args:
        vectors: float32 [n, d].
        order: int64 [n]; the entry points first.
        entries: float32 [e, d], their vectors; a search starts at the nearest of those that are linked.
        first, last: the range in ``order``.
        most: R_f; a list is pruned to it when it reaches the capacity.
        limit: L.
        alpha: pruning parameter, squared.
        links: int32 [n, capacity].
        degrees: int32 [n].
        stamps: int32 [n], zero at the first call.
    """
    ids, distances = np.empty(limit + 1, np.int32), np.empty(limit + 1, np.float32)
    done, visited = np.empty(limit + 1, np.uint8), np.empty(8 * limit + 64, np.int32)
    near = np.empty((visited.shape[0], vectors.shape[1]), np.float32)
    far = np.empty(visited.shape[0], np.float32)
    chosen, starts = np.empty(most, np.int64), np.empty(SEARCH_STARTS, np.int64)
    for at in range(max(first, 1), last):
        node = order[at]
        held = nearest(entries, min(at, entries.shape[0]), vectors[node], starts)
        count = _walk(
            vectors, links, degrees, vectors[node], order[starts[:held]], limit, at, stamps, ids, distances, done,
            visited,
        )  # fmt: skip
        for one in range(count):
            near[one, :] = vectors[visited[one]]
            far[one] = squared(near[one], vectors[node])
        kept = prune(near, far, count, alpha, most, chosen)
        for one in range(kept):
            other = visited[chosen[one]]
            links[node, one] = other
            if degrees[other] == links.shape[1]:
                _shorten(vectors, links, degrees, other, alpha, most - 1)
            links[other, degrees[other]] = node
            degrees[other] += 1
        degrees[node] = kept


@numba.njit(cache=True, nogil=True)
def finish(vectors, start, most, alpha, links, degrees):
    """Prune every list to ``most``, then link all nodes unreachable from ``start``. Returns their number."""
    count = vectors.shape[0]
    for node in range(count):
        if degrees[node] > most:
            _shorten(vectors, links, degrees, node, alpha, most)
    incoming = np.zeros(count, np.int32)
    for node in range(count):
        for at in range(degrees[node]):
            incoming[links[node, at]] += 1
    reached = np.zeros(count, np.uint8)
    queue = np.empty(count, np.int32)
    tree = np.zeros((count, most), np.uint8)  # links of the spanning tree from start: never replaced
    queue[0], head, tail, repaired, cursor = start, 0, 1, 0, 0
    reached[start] = 1
    while True:
        while head < tail:
            node = queue[head]
            head += 1
            for at in range(degrees[node]):
                other = links[node, at]
                if not reached[other]:
                    reached[other] = 1
                    tree[node, at] = 1
                    queue[tail] = other
                    tail += 1
        while cursor < count and reached[cursor]:
            cursor += 1
        if cursor == count:
            return repaired
        # The nearest reached node with space for it, or with a link outside the spanning tree.
        best, place, least = -1, 0, np.float32(np.inf)
        for one in range(-1, degrees[cursor]):
            node = start if one < 0 else links[cursor, one]
            if not reached[node]:
                continue
            at = _place(tree, degrees, node, most)
            distance = squared(vectors[node], vectors[cursor])
            if at >= 0 and distance < least:
                best, place, least = node, at, distance
        one = tail - 1
        while best < 0:
            at = _place(tree, degrees, queue[one], most)
            if at >= 0:
                best, place = queue[one], at
            one -= 1
        links[best, place], tree[best, place] = cursor, 1
        degrees[best] = max(degrees[best], place + 1)
        reached[cursor] = 1
        queue[tail] = cursor
        tail += 1
        repaired += 1


@numba.njit(cache=True, nogil=True)
def _place(tree, degrees, node, most):
    if degrees[node] < most:
        return degrees[node]
    for at in range(most - 1, -1, -1):
        if not tree[node, at]:
            return at
    return -1


@numba.njit(cache=True, nogil=True)
def transpose(links, degrees, starts, referrers):
    """Per node the nodes that link to it: ``referrers[starts[n]:starts[n + 1]]``. ``starts`` is int64 [n + 1]."""
    count = links.shape[0]
    starts[:] = 0
    for node in range(count):
        for at in range(degrees[node]):
            starts[links[node, at] + 1] += 1
    for node in range(count):
        starts[node + 1] += starts[node]
    filled = starts[:-1].copy()
    for node in range(count):
        for at in range(degrees[node]):
            other = links[node, at]
            referrers[filled[other]] = node
            filled[other] += 1


@numba.njit(cache=True, nogil=True)
def write_blocks(pool, lay, first, count, nodes, row_ids, versions, vectors, codes, links, degrees, starts, referrers, epoch, origin, codebook):  # fmt: skip
    """Write the blocks of the nodes ``first`` to ``first + count - 1`` to the rows 0 to ``count - 1`` of a pool.

    ``links`` and ``referrers`` are positions in ``nodes``, which has their ids.
    """
    at_ids, at_back = lay.at_ids // 4, lay.at_backlinks // 4
    for row in range(count):
        node = first + row
        pool.u64[row, :] = 0
        pool.i64[row, NODE], pool.i64[row, ROW] = nodes[node], row_ids[node]
        pool.i64[row, EPOCH], pool.i64[row, VERSION], pool.i64[row, ORIGIN] = epoch, versions[node], origin
        pool.u16[row, LINKS], pool.u16[row, CODEBOOK] = degrees[node], codebook
        pool.f32[row, VECTOR : VECTOR + lay.dimension] = vectors[node]
        pool.u32[row, at_ids : at_ids + lay.links] = NONE
        pool.u32[row, at_back : at_back + lay.backlinks] = NONE
        for at in range(degrees[node]):
            other = links[node, at]
            pool.u32[row, at_ids + at] = nodes[other]
            start = lay.at_codes + at * lay.code_bytes
            pool.u8[row, start : start + lay.code_bytes] = codes[other]
        held = starts[node + 1] - starts[node]
        if held > lay.backlinks:
            pool.u8[row, FLAGS] = OVERFLOW
            pool.i64[row, OVERFLOW_REFERENCE] = nodes[node]
            continue
        pool.u16[row, BACKLINKS] = held
        for at in range(held):
            pool.u32[row, at_back + at] = nodes[referrers[starts[node] + at]]
