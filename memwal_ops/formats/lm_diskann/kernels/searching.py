"""Beam search over node blocks, guided by the codes in them; exact distances for every visited node.

The candidates that a filter allows have a list of their own, so that others do not displace them.
"""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import estimate, fill_table, nearest, squared
from memwal_ops.formats.lm_diskann.kernels.reading import FLAGS, INVISIBLE, LINKS, ROW, VECTOR, hashed, load, prefetch
from memwal_ops.formats.lm_diskann.wire import TOMBSTONED

UNKNOWN = -1
_SEEN = 4096


@numba.njit(cache=True, nogil=True)
def first_sight(seen, size, node):
    """Mark a node as seen in the first ``size`` entries of the table; returns whether it was new."""
    at = hashed(node, size)
    mark = np.uint32(node + 1)
    while seen[at] != 0:
        if seen[at] == mark:
            return False
        at = (at + 1) & (size - 1)
    seen[at] = mark
    return True


@numba.njit(cache=True, nogil=True)
def for_more(seen, size, wanted):
    """The entries of the table that are used once ``wanted`` nodes can be in it: at most half of them, if it has so many.

    So it stays in the processor's fastest cache, and little of it is to be cleared: most links lead to nodes seen before.
    """
    while 2 * wanted > size and size < seen.shape[0]:
        held = seen[:size].copy()
        size *= 2
        seen[:size] = 0
        for mark in held:
            if mark != 0:
                first_sight(seen, size, np.int64(mark) - 1)
    return size


@numba.njit(cache=True, nogil=True)
def push(room, held, limit, node, distance, code):
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
def beam(src, lay, room, table, rest, query, limit, width, epoch, starts, near):
    """Search from the entry points nearest to the query, which ``near`` has space for; visited nodes are in ``room.v_*``.

    Returns their number, or STALE or DAMAGED.
    """
    seen = room.seen
    size, known = min(_SEEN, seen.shape[0]), 0
    seen[:size] = 0
    held, arena, visited = 0, 0, 0
    collect = room.v_vector.shape[0] > 0
    fresh, distances = np.empty(lay.links, np.int64), np.empty(lay.links, np.float32)
    for index in range(nearest(starts.vectors, starts.nodes.shape[0], query, near)):
        size = for_more(seen, size, known + 1)
        if 4 * known < 3 * size and first_sight(seen, size, starts.nodes[near[index]]):
            known += 1
            distance = squared(starts.vectors[near[index]], query)
            held = push(room, held, limit, starts.nodes[near[index]], distance, UNKNOWN)
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
            for index in range(count):
                prefetch(src, lay.block_size, chosen[index], epoch)
        for index in range(count):
            if visited == room.v_node.shape[0]:
                break
            node = chosen[index]
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
            room.v_code[visited] = chosen_code[index]
            if collect:
                room.v_vector[visited, :] = vector
            visited += 1
            links = min(np.int64(src.pool.u16[row, LINKS]), lay.links)
            size = for_more(seen, size, known + links)
            if 4 * (known + links) > 3 * size:  # a table that is three quarters full accepts no more
                continue
            ids = src.pool.u32[row, lay.at_ids // 4 : lay.at_ids // 4 + links]
            codes = src.pool.u8[row, lay.at_codes : lay.at_codes + links * lay.code_bytes]
            words = src.pool.u64[row, lay.at_codes // 8 : (lay.at_codes + links * lay.code_bytes) // 8]
            count_fresh = 0
            for link in range(links):
                if first_sight(seen, size, np.int64(ids[link])):
                    fresh[count_fresh] = link
                    count_fresh += 1
            known += count_fresh
            estimate(table, rest, codes, words, fresh, count_fresh, distances)
            for at in range(count_fresh):
                link, distance = fresh[at], distances[at]
                if held == limit and distance >= room.distance[held - 1]:
                    continue
                reference = UNKNOWN
                if collect and arena < room.arena.shape[0]:
                    room.arena[arena, :] = codes[link * lay.code_bytes : (link + 1) * lay.code_bytes]
                    reference = arena
                    arena += 1
                held = push(room, held, limit, np.int64(ids[link]), distance, reference)
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
def keep(ids, distances, held, row, distance):
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
def nearest_starts(starts):
    """Space for the indexes of the entry points at which a search begins."""
    return np.empty(min(starts.most, starts.nodes.shape[0]), np.int64)


@numba.njit(cache=True, nogil=True)
def add_starts(src, lay, room, visited, query, epoch, starts, near, dead, dead_epochs, ids, distances, held):
    """Add entry points that are results, though estimated distances displaced them from the candidates.

    Those are lower than exact ones, by the error of the codes. Returns the number of results, or STALE or DAMAGED.
    """
    for index in near:
        distance = squared(starts.vectors[index], query)
        if held == ids.shape[0] and distance >= distances[held - 1]:
            break
        node = starts.nodes[index]
        if (room.v_node[:visited] == node).any():
            continue
        row = load(src, lay.block_size, node, epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        if not (src.pool.u8[row, FLAGS] & TOMBSTONED or is_tombstone(dead, dead_epochs, node, epoch)):
            held = keep(ids, distances, held, src.pool.i64[row, ROW], distance)
    return held


@numba.njit(cache=True, nogil=True)
def search(src, lay, room, book, queries, limit, width, epoch, starts, dead, dead_epochs, ids, distances):
    """The nearest live rows of each query, into ``ids`` and ``distances`` [m, k]. Returns 0, or STALE or DAMAGED."""
    table, near = np.empty((lay.code_bytes, 256), np.float32), nearest_starts(starts)
    for index in range(queries.shape[0]):
        ids[index, :] = -1
        distances[index, :] = np.inf
        rest = fill_table(book, queries[index], table)
        visited = beam(src, lay, room, table, rest, queries[index], limit, width, epoch, starts, near)
        if visited < 0:
            return visited
        held = 0
        for at in range(visited):
            if room.v_dead[at] or is_tombstone(dead, dead_epochs, room.v_node[at], epoch):
                continue
            held = keep(ids[index], distances[index], held, room.v_row[at], room.v_distance[at])
        held = add_starts(
            src, lay, room, visited, queries[index], epoch, starts, near, dead, dead_epochs, ids[index],
            distances[index], held,
        )  # fmt: skip
        if held < 0:
            return held
    return 0


@numba.njit(cache=True, nogil=True)
def scan(src, lay, nodes, queries, epoch, dead, dead_epochs, ids, distances):
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
        for index in range(queries.shape[0]):
            distance = squared(src.pool.f32[row, VECTOR : VECTOR + lay.dimension], queries[index])
            held[index] = keep(ids[index], distances[index], held[index], row_id, distance)
    return 0


@numba.njit(cache=True, nogil=True)
def mark(rows, nodes, wanted, allowed):
    """Set ``allowed`` of the nodes of the rows that are in ``wanted``; both ascending. ``rows`` may have one several times."""
    at, size = 0, rows.shape[0]
    for index in range(wanted.shape[0]):
        step = 1
        while at + step < size and rows[at + step] < wanted[index]:
            step *= 2
        last = min(at + step, size)
        while at < last:
            middle = (at + last) // 2
            if rows[middle] < wanted[index]:
                at = middle + 1
            else:
                last = middle
        while at < size and rows[at] == wanted[index]:
            allowed[nodes[at]] = True
            at += 1


@numba.njit(cache=True, nogil=True)
def _begin(room, aside, limit, around, query, starts, allowed, seen, near):
    """Push the entry points nearest to the query, and the nearest of those that are allowed; their indexes are in ``near[1]``.

    Returns the lengths of both lists, the number of nodes seen, and that of entry points in ``near[1]``.
    """
    far = np.empty(near.shape, np.float32)
    held = np.zeros(2, np.int64)
    for index in range(starts.nodes.shape[0]):
        which = np.int64(allowed[starts.nodes[index]])
        held[which] = keep(near[which], far[which], held[which], index, squared(starts.vectors[index], query))
    inside, outside, known = 0, 0, 0
    for which in (1, 0):
        for index in range(held[which]):
            if 2 * known >= seen.shape[0]:
                break
            node = starts.nodes[near[which, index]]
            known += first_sight(seen, seen.shape[0], node)
            if which:
                inside = push(room, inside, limit, node, far[which, index], UNKNOWN)
            else:
                outside = push(aside, outside, around, node, far[which, index], UNKNOWN)
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
        for index in range(count):
            other = np.int64(ids[fresh[index]])
            if other < allowed.shape[0] and allowed[other]:
                inside = push(room, inside, limit, other, distances[index], UNKNOWN)
            else:
                outside = push(aside, outside, around, other, distances[index], UNKNOWN)
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
    table = np.empty((lay.code_bytes, 256), np.float32)
    no_nodes = np.empty(0, np.int64)  # none that is allowed is deleted
    near = np.empty((2, min(starts.most, starts.nodes.shape[0])), np.int64)
    for index in range(queries.shape[0]):
        ids[index, :] = -1
        distances[index, :] = np.inf
        rest = fill_table(book, queries[index], table)
        visited, begun = _beam(
            src, lay, room, aside, table, rest, queries[index], limit, around, epoch, starts, allowed, near
        )
        if visited < 0:
            return visited
        held = 0
        for at in range(visited):
            if not room.v_dead[at]:
                held = keep(ids[index], distances[index], held, room.v_row[at], room.v_distance[at])
        held = add_starts(
            src, lay, room, visited, queries[index], epoch, starts, near[1, :begun], no_nodes, no_nodes, ids[index],
            distances[index], held,
        )  # fmt: skip
        if held < 0:
            return held
    return 0
