"""Insert nodes into the graph block by block, or build a whole graph in memory (Vamana with full vectors).

An insert writes forward links, back edges, and backlinks of all changed nodes. Three rules keep the graph searchable. A
new node links to live nodes if the search found any. The nearest neighbour of a new node always links back to it. And
pruning never removes the last link to a node, or the last one from an older node, unless the new node takes it over:
otherwise it would never be found again.
"""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels import reading
from memwal_ops.formats.lm_diskann.kernels.distances import (
    decode,
    encode,
    fill_table,
    nearest,
    of_new,
    prune,
    squared,
    with_room,
)
from memwal_ops.formats.lm_diskann.kernels.searching import beam, nearest_starts
from memwal_ops.formats.lm_diskann.wire import OVERFLOW, TOMBSTONED

_FEW = 8
_GIVEN_UP = 2
_MUST, _MAY = True, False


@numba.njit(cache=True, nogil=True)
def write_node(src, lay, node, row_id, vector, epoch, origin, codebook):
    """Write a new block without links to the overlay. Returns its row."""
    row = reading.new_row(src, node)
    src.pool.u64[row, :] = 0
    src.pool.i64[row, reading.NODE], src.pool.i64[row, reading.ROW] = node, row_id
    src.pool.i64[row, reading.EPOCH], src.pool.i64[row, reading.VERSION], src.pool.i64[row, reading.ORIGIN] = (
        epoch,
        1,
        origin,
    )
    src.pool.u16[row, reading.CODEBOOK] = codebook
    src.pool.f32[row, reading.VECTOR : reading.VECTOR + lay.dimension] = vector
    src.pool.u32[row, lay.at_ids // 4 : lay.at_ids // 4 + lay.links] = reading.NONE
    src.pool.u32[row, lay.at_backlinks // 4 : lay.at_backlinks // 4 + lay.backlinks] = reading.NONE
    return row


@numba.njit(cache=True, nogil=True)
def write_nodes(src, lay, nodes, row_ids, vectors, epoch, origin, codebook):
    """Write blocks of new nodes without links: for an index that has no graph yet."""
    for index in range(nodes.shape[0]):
        write_node(src, lay, nodes[index], row_ids[index], vectors[index], epoch, origin, codebook)


@numba.njit(cache=True, nogil=True)
def set_tombstones(src, lay, nodes, epoch, origin):
    """Set the tombstone flag in new versions of these nodes' blocks. Returns 0, or an error as ``load``."""
    for index in range(nodes.shape[0]):
        row = reading.touch(src, lay.block_size, nodes[index], epoch, origin)
        if row < 0:
            return row
        src.pool.u8[row, reading.FLAGS] |= TOMBSTONED
    return 0


@numba.njit(cache=True, nogil=True)
def _event(events, counts, target, referrer, sign):
    at = counts[0]
    events[at, 0], events[at, 1], events[at, 2] = target, referrer, sign
    counts[0] += 1


@numba.njit(cache=True, nogil=True)
def add_backlink(src, lay, row, referrer, events, counts):
    """Add ``referrer`` to the backlinks of a block in the overlay, or to the overflow table if the array is full."""
    target = src.pool.i64[row, reading.NODE]
    at = lay.at_backlinks // 4
    if src.pool.u8[row, reading.FLAGS] & OVERFLOW:
        _event(events, counts, target, referrer, 1)
        return
    held = np.int64(src.pool.u16[row, reading.BACKLINKS])
    if held < lay.backlinks:
        src.pool.u32[row, at + held] = referrer
        src.pool.u16[row, reading.BACKLINKS] = held + 1
        return
    for index in range(held):
        _event(events, counts, target, np.int64(src.pool.u32[row, at + index]), 1)
        src.pool.u32[row, at + index] = reading.NONE
    _event(events, counts, target, referrer, 1)
    src.pool.u8[row, reading.FLAGS] |= OVERFLOW
    src.pool.u16[row, reading.BACKLINKS] = 0
    src.pool.i64[row, reading.OVERFLOW_REFERENCE] = target


@numba.njit(cache=True, nogil=True)
def remove_backlink(src, lay, row, referrer, events, counts):
    """Remove ``referrer`` from the backlinks of a block in the overlay."""
    if src.pool.u8[row, reading.FLAGS] & OVERFLOW:
        _event(events, counts, src.pool.i64[row, reading.NODE], referrer, -1)
        return
    at = lay.at_backlinks // 4
    held = np.int64(src.pool.u16[row, reading.BACKLINKS])
    for index in range(held):
        if src.pool.u32[row, at + index] == referrer:
            src.pool.u32[row, at + index] = src.pool.u32[row, at + held - 1]
            src.pool.u32[row, at + held - 1] = reading.NONE
            src.pool.u16[row, reading.BACKLINKS] = held - 1
            return


@numba.njit(cache=True, nogil=True)
def drop_backlink(src, lay, row, referrer, events, counts):
    """Remove ``referrer`` from the backlinks of a node; returns False without a change if it would become unreachable.

    That is: no other link leads to it; or this is the last one from an older node. Every new node has a link from an
    older one, so that following such links back always ends in the graph that was built, never in a cycle of new nodes.
    """
    if not src.pool.u8[row, reading.FLAGS] & OVERFLOW:
        at = lay.at_backlinks // 4
        held = np.int64(src.pool.u16[row, reading.BACKLINKS])
        target = src.pool.i64[row, reading.NODE]
        older = 0
        for index in range(held):
            other = np.int64(src.pool.u32[row, at + index])
            older += other != referrer and other < target
        if held == 1 or (referrer < target and older == 0):
            return False
    remove_backlink(src, lay, row, referrer, events, counts)
    return True


@numba.njit(cache=True, nogil=True)
def set_link(src, lay, row, at, node, code):
    """Write the link ``at`` of a block: node and code."""
    src.pool.u32[row, lay.at_ids // 4 + at] = node
    start = lay.at_codes + at * lay.code_bytes
    src.pool.u8[row, start : start + lay.code_bytes] = code


@numba.njit(cache=True, nogil=True)
def _make_place(src, lay, ids, chosen, kept, stays, new, me, epoch, origin, events, counts):
    """Remove the farthest link of a full list that is not the last one to its node. Returns 1; 0: none; or as ``load``."""
    for at in range(kept - 1, -1, -1):
        index = chosen[at]
        if index == new or stays[index] != 1:
            continue
        other = reading.touch(src, lay.block_size, ids[index], epoch, origin)
        if other < 0:
            return other
        if drop_backlink(src, lay, other, me, events, counts):
            stays[index] = _GIVEN_UP
            return 1
    return 0


@numba.njit(cache=True, nogil=True)
def code_of(book, room, at, code):
    """Store the code of a visited node in ``code``: that of a link to it; without one it is encoded, which is slow."""
    if room.v_code[at] >= 0:
        code[:] = room.arena[room.v_code[at]]
    else:
        encode(book, room.v_vector[at], code)


@numba.njit(cache=True, nogil=True)
def _adopt(src, lay, row, orphan, code, must, epoch, origin, events, counts):
    """Link a block to one that just lost its last link. With ``must``, another link of a full list may be removed.

    Returns 1; 0: there is no place; or as ``load``.
    """
    at, held = lay.at_ids // 4, np.int64(src.pool.u16[row, reading.LINKS])
    me, target = src.pool.i64[row, reading.NODE], src.pool.i64[orphan, reading.NODE]
    if me == target:
        return 0
    if (src.pool.u32[row, at : at + held] == target).any():
        return 1
    place = held
    while must and place == lay.links and held > 0:
        held -= 1
        other = reading.touch(src, lay.block_size, np.int64(src.pool.u32[row, at + held]), epoch, origin)
        if other < 0:
            return other
        if drop_backlink(src, lay, other, me, events, counts):
            place = held
    if place == lay.links:
        return 0
    set_link(src, lay, row, place, target, code)
    src.pool.u16[row, reading.LINKS] = max(np.int64(src.pool.u16[row, reading.LINKS]), place + 1)
    add_backlink(src, lay, orphan, me, events, counts)
    return 1


@numba.njit(cache=True, nogil=True)
def link_back(src, lay, book, row, own, fresh, code, alpha, must, epoch, origin, events, counts):
    """Link the block ``row`` to a new node, and prune it if full. Returns 1, 0 if the link was pruned, or as ``load``.

    ``own`` is the code of its node, ``code`` that of the new one. Where a last link to another node has to be pruned,
    the new node, whose block is ``fresh``, links there instead, or another one to which ``row`` links.
    """
    node = src.pool.i64[fresh, reading.NODE]
    held = np.int64(src.pool.u16[row, reading.LINKS])
    if held < lay.links:
        set_link(src, lay, row, held, node, code)
        src.pool.u16[row, reading.LINKS] = held + 1
        return 1
    me = src.pool.i64[row, reading.NODE]
    ids = np.empty(held + 1, np.int64)
    codes = np.empty((held + 1, lay.code_bytes), np.uint8)
    vectors = np.empty((held + 1, lay.dimension), np.float32)
    distances = np.empty(held + 1, np.float32)
    own_vector = src.pool.f32[row, reading.VECTOR : reading.VECTOR + lay.dimension]
    for index in range(held + 1):
        if index < held:
            ids[index] = src.pool.u32[row, lay.at_ids // 4 + index]
            start = lay.at_codes + index * lay.code_bytes
            codes[index, :] = src.pool.u8[row, start : start + lay.code_bytes]
        else:
            ids[index] = node
            codes[index, :] = code
        decode(book, codes[index], vectors[index])
        distances[index] = squared(vectors[index], own_vector)
        if (codes[index] == own).all():
            distances[index] = 0
    chosen = np.empty(lay.links, np.int64)
    # Pruned to fewer than the maximum, so that the next few links need no pruning.
    kept = prune(vectors, distances, held + 1, alpha, with_room(lay.links), chosen)
    stays = np.zeros(held + 1, np.uint8)
    for index in range(kept):
        stays[chosen[index]] = 1
    if must:
        stays[held] = 1
    total = 0
    for index in range(held + 1):
        total += stays[index]
    for index in range(held):
        if stays[index]:  # or replaced by another one
            continue
        other = reading.touch(src, lay.block_size, ids[index], epoch, origin)
        if other < 0:
            return other
        if drop_backlink(src, lay, other, me, events, counts):
            continue
        if total < lay.links:
            stays[index] = 1
            total += 1
            continue
        result = _make_place(src, lay, ids, chosen, kept, stays, held, me, epoch, origin, events, counts)
        if result < 0:
            return result
        if result:
            stays[index] = 1
        else:
            remove_backlink(src, lay, other, me, events, counts)
            result = _adopt(src, lay, fresh, other, codes[index], _MUST, epoch, origin, events, counts)
            near = 0
            while result == 0 and near < kept:
                if stays[chosen[near]] == 1 and chosen[near] != held:
                    result = reading.touch(src, lay.block_size, ids[chosen[near]], epoch, origin)
                    if result >= 0:
                        result = _adopt(src, lay, result, other, codes[index], _MAY, epoch, origin, events, counts)
                near += 1
            if result < 0:
                return result
    at = 0
    for index in range(held + 1):
        if stays[index] == 1:
            set_link(src, lay, row, at, ids[index], codes[index])
            at += 1
    src.pool.u16[row, reading.LINKS] = at
    for empty in range(at, lay.links):
        src.pool.u32[row, lay.at_ids // 4 + empty] = reading.NONE
    return np.int64(stays[held] == 1)


@numba.njit(cache=True, nogil=True)
def _insert(src, lay, room, book, table, node, row_id, vector, epoch, origin, codebook, alpha, limit, starts, events, counts):  # fmt: skip
    rest = fill_table(book, vector, table)
    visited = beam(src, lay, room, table, rest, vector, limit, 1, epoch, starts, nearest_starts(starts))
    if visited < 0:
        return visited
    own = np.empty(lay.code_bytes, np.uint8)
    encode(book, vector, own)
    live = 0
    for at in range(visited):
        live += 1 - room.v_dead[at]
    use = np.empty(visited, np.int64)
    vectors = np.empty((visited, lay.dimension), np.float32)
    distances = np.empty(visited, np.float32)
    count = 0
    for at in range(visited):
        if room.v_dead[at] == 0 or live < _FEW:
            use[count] = at
            vectors[count, :] = room.v_vector[at]
            distances[count] = room.v_distance[at]
            count += 1
    chosen = np.empty(lay.links, np.int64)
    kept = prune(vectors, distances, count, alpha, of_new(lay.links), chosen)
    row = write_node(src, lay, node, row_id, vector, epoch, origin, codebook)
    codes = np.empty((kept, lay.code_bytes), np.uint8)
    for index in range(kept):
        at = use[chosen[index]]
        code_of(book, room, at, codes[index])
        set_link(src, lay, row, index, room.v_node[at], codes[index])
    src.pool.u16[row, reading.LINKS] = kept
    for index in range(kept):
        other = reading.touch(src, lay.block_size, room.v_node[use[chosen[index]]], epoch, origin)
        if other < 0:
            return other
        add_backlink(src, lay, other, node, events, counts)
    for index in range(kept):
        other = reading.touch(src, lay.block_size, room.v_node[use[chosen[index]]], epoch, origin)
        if other < 0:
            return other
        done = link_back(
            src, lay, book, other, codes[index], row, own, alpha, index == 0, epoch, origin, events, counts
        )
        if done < 0:
            return done
        if done:
            add_backlink(src, lay, row, src.pool.i64[other, reading.NODE], events, counts)
    return 0


@numba.njit(cache=True, nogil=True)
def insert(src, lay, room, book, nodes, row_ids, vectors, epoch, origin, codebook, alpha, limit, starts, first, events, counts):  # fmt: skip
    """Insert nodes from index ``first`` on, as long as overlay and events have space.

    Args:
        counts: [0] events so far; [1] is set to the number of inserted nodes.
        events: int64 [n, 3]: target, referrer, and 1 or -1, of the overflow table.

    Returns:
        0; or STALE or DAMAGED.
    """
    table = np.empty((lay.code_bytes, 256), np.float32)
    worst = lay.links * (lay.links + 4) + 2
    counts[1] = first
    for index in range(first, nodes.shape[0]):
        used = src.tags.shape[0] + src.counts[1]
        if used + worst > src.pool.u64.shape[0]:
            break
        if counts[0] + worst + (lay.backlinks + 1) * 2 * lay.links > events.shape[0]:
            break
        result = _insert(
            src, lay, room, book, table, nodes[index], row_ids[index], vectors[index], epoch, origin, codebook, alpha,
            limit, starts, events, counts,
        )  # fmt: skip
        if result < 0:
            return result
        counts[1] = index + 1
    return 0


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
    for index in range(nodes.shape[0]):
        far[index] = np.inf
    for at in range(last):
        if at >= first:
            best = at
            for index in range(at + 1, nodes.shape[0]):
                if far[index] > far[best]:
                    best = index
            nodes[at], nodes[best] = nodes[best], nodes[at]
            far[best] = far[at]
        for index in range(at + 1, nodes.shape[0]):
            far[index] = min(far[index], squared(vectors[nodes[index]], vectors[nodes[at]]))


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
    chosen, starts = np.empty(most, np.int64), np.empty(reading.SEARCH_STARTS, np.int64)
    for at in range(max(first, 1), last):
        node = order[at]
        held = nearest(entries, min(at, entries.shape[0]), vectors[node], starts)
        count = _walk(
            vectors, links, degrees, vectors[node], order[starts[:held]], limit, at, stamps, ids, distances, done,
            visited,
        )  # fmt: skip
        for index in range(count):
            near[index, :] = vectors[visited[index]]
            far[index] = squared(near[index], vectors[node])
        kept = prune(near, far, count, alpha, most, chosen)
        for index in range(kept):
            other = visited[chosen[index]]
            links[node, index] = other
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
        for index in range(-1, degrees[cursor]):
            node = start if index < 0 else links[cursor, index]
            if not reached[node]:
                continue
            at = _place(tree, degrees, node, most)
            distance = squared(vectors[node], vectors[cursor])
            if at >= 0 and distance < least:
                best, place, least = node, at, distance
        index = tail - 1
        while best < 0:
            at = _place(tree, degrees, queue[index], most)
            if at >= 0:
                best, place = queue[index], at
            index -= 1
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
        pool.i64[row, reading.NODE], pool.i64[row, reading.ROW] = nodes[node], row_ids[node]
        pool.i64[row, reading.EPOCH], pool.i64[row, reading.VERSION], pool.i64[row, reading.ORIGIN] = (
            epoch,
            versions[node],
            origin,
        )
        pool.u16[row, reading.LINKS], pool.u16[row, reading.CODEBOOK] = degrees[node], codebook
        pool.f32[row, reading.VECTOR : reading.VECTOR + lay.dimension] = vectors[node]
        pool.u32[row, at_ids : at_ids + lay.links] = reading.NONE
        pool.u32[row, at_back : at_back + lay.backlinks] = reading.NONE
        for at in range(degrees[node]):
            other = links[node, at]
            pool.u32[row, at_ids + at] = nodes[other]
            start = lay.at_codes + at * lay.code_bytes
            pool.u8[row, start : start + lay.code_bytes] = codes[other]
        held = starts[node + 1] - starts[node]
        if held > lay.backlinks:
            pool.u8[row, reading.FLAGS] = OVERFLOW
            pool.i64[row, reading.OVERFLOW_REFERENCE] = nodes[node]
            continue
        pool.u16[row, reading.BACKLINKS] = held
        for at in range(held):
            pool.u32[row, at_back + at] = nodes[referrers[starts[node] + at]]
