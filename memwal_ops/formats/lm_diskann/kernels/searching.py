"""Beam search over node blocks, guided by the codes in them; exact distances for every visited node."""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import estimated, fill_table, nearest, squared
from memwal_ops.formats.lm_diskann.kernels.memory import FLAGS, INVISIBLE, LINKS, ROW, VECTOR
from memwal_ops.formats.lm_diskann.kernels.reading import hashed, load, prefetch
from memwal_ops.formats.lm_diskann.wire.blocks import TOMBSTONED

_UNKNOWN = -1


@numba.njit(cache=True, nogil=True)
def _first_sight(room, node, count):
    """Mark a node as seen; returns whether it was new. A table that is three quarters full accepts no more."""
    size = room.seen.shape[0]
    at = hashed(node, size)
    mark = np.uint32(node + 1)
    while room.seen[at] != 0:
        if room.seen[at] == mark:
            return False
        at = (at + 1) & (size - 1)
    if 4 * count[0] >= 3 * size:
        return False
    room.seen[at] = mark
    count[0] += 1
    return True


@numba.njit(cache=True, nogil=True)
def _push(room, held, limit, node, distance, code):
    """Insert a candidate in order; returns the number of candidates."""
    if held == limit and distance >= room.distance[held - 1]:
        return held
    at = held if held < limit else held - 1
    while at > 0 and room.distance[at - 1] > distance:
        room.node[at], room.distance[at] = room.node[at - 1], room.distance[at - 1]
        room.done[at], room.code[at] = room.done[at - 1], room.code[at - 1]
        at -= 1
    room.node[at], room.distance[at], room.done[at], room.code[at] = node, distance, 0, code
    return min(held + 1, limit)


@numba.njit(cache=True, nogil=True)
def beam(src, lay, room, table, rest, query, limit, width, epoch, starts):
    """Search from the entry points nearest to the query; visited nodes are in ``room.v_*``. Returns their number, or STALE or DAMAGED."""
    room.seen[:] = 0
    seen = np.zeros(1, np.int64)
    held, arena, visited = 0, 0, 0
    collect = room.v_vector.shape[0] > 0
    near = np.empty(min(starts.most, starts.nodes.shape[0]), np.int64)
    for one in range(nearest(starts.vectors, starts.nodes.shape[0], query, near)):
        start = starts.nodes[near[one]]
        row = load(src, lay.block_size, start, epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        if _first_sight(room, start, seen):
            distance = squared(src.pool.f32[row, VECTOR : VECTOR + lay.dimension], query)
            held = _push(room, held, limit, start, distance, _UNKNOWN)
    chosen = np.empty(width, np.int64)
    chosen_code = np.empty(width, np.int64)
    while visited < room.v_node.shape[0]:
        count = 0
        for at in range(held):
            if room.done[at] == 0:
                room.done[at] = 1
                chosen[count], chosen_code[count] = room.node[at], room.code[at]
                count += 1
                if count == width:
                    break
        if count == 0:
            break
        if width > 1:
            for one in range(count):
                prefetch(src, lay.block_size, chosen[one], epoch)
        for one in range(count):
            if visited == room.v_node.shape[0]:
                break
            node = chosen[one]
            row = load(src, lay.block_size, node, epoch)
            if row == INVISIBLE:
                continue
            if row < 0:
                return row
            vector = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
            room.v_node[visited] = node
            room.v_row[visited] = src.pool.i64[row, ROW]
            room.v_distance[visited] = squared(vector, query)
            room.v_dead[visited] = src.pool.u8[row, FLAGS] & TOMBSTONED
            room.v_code[visited] = chosen_code[one]
            if collect:
                room.v_vector[visited, :] = vector
            visited += 1
            for link in range(src.pool.u16[row, LINKS]):
                other = np.int64(src.pool.u32[row, lay.at_ids // 4 + link])
                if not _first_sight(room, other, seen):
                    continue
                first = lay.at_codes + link * lay.code_bytes
                code = src.pool.u8[row, first : first + lay.code_bytes]
                distance = estimated(table, rest, code)
                if held == limit and distance >= room.distance[held - 1]:
                    continue
                reference = _UNKNOWN
                if collect and arena < room.arena.shape[0]:
                    room.arena[arena, :] = code
                    reference = arena
                    arena += 1
                held = _push(room, held, limit, other, distance, reference)
    return visited


@numba.njit(cache=True, nogil=True)
def contains(ascending, value):
    """Whether a value is in a sorted array."""
    at = np.searchsorted(ascending, value)
    return at < ascending.shape[0] and ascending[at] == value


@numba.njit(cache=True, nogil=True)
def is_tombstone(dead, dead_epochs, node, epoch):
    """Whether a node is in the tombstones (sorted by node) at an epoch."""
    at = np.searchsorted(dead, node)
    return at < dead.shape[0] and dead[at] == node and dead_epochs[at] <= epoch


@numba.njit(cache=True, nogil=True)
def _keep(ids, distances, held, row, distance):
    """Insert a result in order; returns the number of results."""
    most = ids.shape[0]
    if held == most and distance >= distances[held - 1]:
        return held
    at = held if held < most else held - 1
    while at > 0 and distances[at - 1] > distance:
        ids[at], distances[at] = ids[at - 1], distances[at - 1]
        at -= 1
    ids[at], distances[at] = row, distance
    return min(held + 1, most)


@numba.njit(cache=True, nogil=True)
def search(src, lay, room, book, queries, limit, width, epoch, starts, dead, dead_epochs, allow, restricted, ids, distances):  # fmt: skip
    """The nearest live rows of each query, into ``ids`` and ``distances`` [m, k]. Returns 0, or STALE or DAMAGED."""
    table = np.empty((lay.code_bytes, 256), np.float32)
    for one in range(queries.shape[0]):
        ids[one, :] = -1
        distances[one, :] = np.inf
        rest = fill_table(book, queries[one], table)
        visited = beam(src, lay, room, table, rest, queries[one], limit, width, epoch, starts)
        if visited < 0:
            return visited
        held = 0
        for at in range(visited):
            if room.v_dead[at] or is_tombstone(dead, dead_epochs, room.v_node[at], epoch):
                continue
            if restricted and not contains(allow, room.v_row[at]):
                continue
            held = _keep(ids[one], distances[one], held, room.v_row[at], room.v_distance[at])
    return 0


@numba.njit(cache=True, nogil=True)
def scan(src, lay, nodes, queries, epoch, dead, dead_epochs, allow, restricted, ids, distances):
    """Like :func:`search`, by comparing all of ``nodes``: exact."""
    ids[:, :] = -1
    distances[:, :] = np.inf
    held = np.zeros(queries.shape[0], np.int64)
    for at in range(nodes.shape[0]):
        node = np.int64(nodes[at])
        row = load(src, lay.block_size, node, epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        if src.pool.u8[row, FLAGS] & TOMBSTONED or is_tombstone(dead, dead_epochs, node, epoch):
            continue
        row_id = src.pool.i64[row, ROW]
        if restricted and not contains(allow, row_id):
            continue
        for one in range(queries.shape[0]):
            distance = squared(src.pool.f32[row, VECTOR : VECTOR + lay.dimension], queries[one])
            held[one] = _keep(ids[one], distances[one], held[one], row_id, distance)
    return 0
