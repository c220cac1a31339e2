"""Search the rows that a filter allows: their candidates have a list of their own, so that others do not displace them."""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import estimate, fill_table, squared
from memwal_ops.formats.lm_diskann.kernels.memory import FLAGS, INVISIBLE, LINKS, ROW, VECTOR
from memwal_ops.formats.lm_diskann.kernels.reading import load
from memwal_ops.formats.lm_diskann.kernels.searching import UNKNOWN, add_starts, first_sight, keep, push
from memwal_ops.formats.lm_diskann.wire.blocks import TOMBSTONED


@numba.njit(cache=True, nogil=True)
def mark(rows, nodes, wanted, allowed):
    """Set ``allowed`` of the nodes of the rows that are in ``wanted``; both ascending. ``rows`` may have one several times."""
    at, size = 0, rows.shape[0]
    for one in range(wanted.shape[0]):
        step = 1
        while at + step < size and rows[at + step] < wanted[one]:
            step *= 2
        last = min(at + step, size)
        while at < last:
            middle = (at + last) // 2
            if rows[middle] < wanted[one]:
                at = middle + 1
            else:
                last = middle
        while at < size and rows[at] == wanted[one]:
            allowed[nodes[at]] = True
            at += 1


@numba.njit(cache=True, nogil=True)
def _begin(room, aside, limit, around, query, starts, allowed, seen, near):
    """Push the entry points nearest to the query, and the nearest of those that are allowed; their indexes are in ``near[1]``.

    Returns the lengths of both lists, the number of nodes seen, and that of entry points in ``near[1]``.
    """
    far = np.empty(near.shape, np.float32)
    held = np.zeros(2, np.int64)
    for one in range(starts.nodes.shape[0]):
        which = np.int64(allowed[starts.nodes[one]])
        held[which] = keep(near[which], far[which], held[which], one, squared(starts.vectors[one], query))
    inside, outside, known = 0, 0, 0
    for which in (1, 0):
        for one in range(held[which]):
            if 2 * known >= seen.shape[0]:
                break
            node = starts.nodes[near[which, one]]
            known += first_sight(seen, seen.shape[0], node)
            if which:
                inside = push(room, inside, limit, node, far[which, one], UNKNOWN)
            else:
                outside = push(aside, outside, around, node, far[which, one], UNKNOWN)
    return inside, outside, known, held[1]


@numba.njit(cache=True, nogil=True)
def _undone(room, first, held):
    """The position of the first candidate that was not visited, from ``first`` on; ``held`` if there is none."""
    while first < held and room.done[first]:
        first += 1
    return first


@numba.njit(cache=True, nogil=True)
def _beam(src, lay, room, aside, table, rest, query, limit, around, epoch, starts, allowed, near):
    """Like ``beam``, with up to ``limit`` allowed candidates, which are visited, and ``around`` others, which lead to them.

    Returns the number of visited nodes, or STALE or DAMAGED; and that of entry points in ``near[1]``.
    """
    seen = room.seen
    size, visited = seen.shape[0], 0
    seen[:] = 0
    fresh, distances = np.empty(lay.links, np.int64), np.empty(lay.links, np.float32)
    inside, outside, known, begun = _begin(room, aside, limit, around, query, starts, allowed, seen, near)
    while visited < room.v_node.shape[0]:
        at, beside = _undone(room, 0, inside), _undone(aside, 0, outside)
        if at == inside and beside == outside:
            break
        chosen = beside == outside or (at < inside and room.distance[at] <= aside.distance[beside])
        if chosen:
            node = room.node[at]
            room.done[at] = 1
        else:
            node = aside.node[beside]
            aside.done[beside] = 1
        row = load(src, lay.block_size, node, epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row, begun
        if chosen:
            room.v_node[visited] = node
            room.v_row[visited] = src.pool.i64[row, ROW]
            room.v_distance[visited] = squared(src.pool.f32[row, VECTOR : VECTOR + lay.dimension], query)
            room.v_dead[visited] = src.pool.u8[row, FLAGS] & TOMBSTONED
            visited += 1
        links = min(np.int64(src.pool.u16[row, LINKS]), lay.links)
        if 4 * (known + links) > 3 * size:
            continue
        ids = src.pool.u32[row, lay.at_ids // 4 : lay.at_ids // 4 + links]
        count = 0
        for link in range(links):
            if first_sight(seen, size, np.int64(ids[link])):
                fresh[count] = link
                count += 1
        known += count
        codes = src.pool.u8[row, lay.at_codes : lay.at_codes + links * lay.code_bytes]
        words = src.pool.u64[row, lay.at_codes // 8 : (lay.at_codes + links * lay.code_bytes) // 8]
        estimate(table, rest, codes, words, fresh, count, distances)
        for one in range(count):
            other = np.int64(ids[fresh[one]])
            if other < allowed.shape[0] and allowed[other]:
                inside = push(room, inside, limit, other, distances[one], UNKNOWN)
            else:
                outside = push(aside, outside, around, other, distances[one], UNKNOWN)
    return visited, begun


@numba.njit(cache=True, nogil=True)
def search_allowed(src, lay, room, aside, book, queries, limit, around, epoch, starts, allowed, ids, distances):
    """The nearest allowed rows of each query, into ``ids`` and ``distances`` [m, k]. Returns 0, or STALE or DAMAGED.

    Args:
        src, lay, room, book, queries, epoch, starts, ids, distances: as of ``search``.
        aside: memory for the candidates that are not allowed.
        limit: number of allowed candidates.
        around: number of others.
        allowed: bool, by node.
    """
    table, no_nodes = (
        np.empty((lay.code_bytes, 256), np.float32),
        np.empty(0, np.int64),
    )  # none that is allowed is deleted
    near = np.empty((2, min(starts.most, starts.nodes.shape[0])), np.int64)
    for one in range(queries.shape[0]):
        ids[one, :] = -1
        distances[one, :] = np.inf
        rest = fill_table(book, queries[one], table)
        visited, begun = _beam(
            src, lay, room, aside, table, rest, queries[one], limit, around, epoch, starts, allowed, near
        )
        if visited < 0:
            return visited
        held = 0
        for at in range(visited):
            if not room.v_dead[at]:
                held = keep(ids[one], distances[one], held, room.v_row[at], room.v_distance[at])
        held = add_starts(
            src, lay, room, visited, queries[one], epoch, starts, near[1, :begun], no_nodes, no_nodes, ids[one],
            distances[one], held,
        )  # fmt: skip
        if held < 0:
            return held
    return 0
