"""Heal the graph: reconnect the neighbours of deleted nodes, rewire single nodes, and link those that no path leads to.

A node that linked to a deleted one gets a link to the nearest of its neighbours instead (as in-place deletes of
IP-DiskANN), without pruning: that kept the same candidates, and took two thirds of the time. Its own links to live
nodes are kept: the far ones connect clusters, and near candidates would replace them; and each dropped link would
change another block. As many links are added as were lost: more would change more blocks, and fill the list, so that
the next insert that links to the node would have to prune it.
"""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels import inserting, reading
from memwal_ops.formats.lm_diskann.kernels.distances import decode, encode, extend, fill_table, squared, with_room
from memwal_ops.formats.lm_diskann.kernels.searching import beam, contains, nearest_starts
from memwal_ops.formats.lm_diskann.wire import OVERFLOW, TOMBSTONED

_UNREACHED, ROOT = -2, -1


@numba.njit(cache=True, nogil=True)
def _follow(src, lay, epoch, parents, queue, head, tail):
    """Follow the links of the nodes ``queue[head:tail]``. Returns the new tail, or an error as ``load``."""
    while head < tail:
        node = queue[head]
        row = reading.load(src, lay.block_size, node, epoch)
        head += 1
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        for at in range(src.pool.u16[row, reading.LINKS]):
            other = np.int64(src.pool.u32[row, lay.at_ids // 4 + at])
            if other < parents.shape[0] and parents[other] == _UNREACHED:
                parents[other] = node
                queue[tail] = other
                tail += 1
    return tail


@numba.njit(cache=True, nogil=True)
def reach(src, lay, entries, epoch, parents, queue):
    """Set the parent of each node to which a path leads, in a tree of such paths; below ``ROOT``: no path leads to it.

    ``parents`` and ``queue`` are int64 [nodes]. Returns the number of reached nodes, the first of ``queue``, or an error as ``load``.
    """
    parents[:] = _UNREACHED
    tail = 0
    for index in range(entries.shape[0]):
        if parents[entries[index]] == _UNREACHED:
            parents[entries[index]] = ROOT
            queue[tail] = entries[index]
            tail += 1
    return _follow(src, lay, epoch, parents, queue, 0, tail)


@numba.njit(cache=True, nogil=True)
def _has_place(src, lay, row, node, parents):
    """Whether a live block has an unused link, or one that is not of the tree."""
    if src.pool.u8[row, reading.FLAGS] & TOMBSTONED:
        return False
    held = np.int64(src.pool.u16[row, reading.LINKS])
    for at in range(held):
        if parents[src.pool.u32[row, lay.at_ids // 4 + at]] != node:
            return True
    return held < lay.links


@numba.njit(cache=True, nogil=True)
def _place(src, lay, row, parents, epoch, origin, events, counts):
    """The place of a link in a block that has one: unused, or that of a link that is removed. Or an error as ``load``."""
    me, held = src.pool.i64[row, reading.NODE], np.int64(src.pool.u16[row, reading.LINKS])
    if held < lay.links:
        src.pool.u16[row, reading.LINKS] = held + 1
        return held
    last = held
    for at in range(held - 1, -1, -1):
        target = np.int64(src.pool.u32[row, lay.at_ids // 4 + at])
        if parents[target] == me:
            continue
        last = at
        other = reading.touch(src, lay.block_size, target, epoch, origin)
        if other < 0:
            return other
        if inserting.drop_backlink(src, lay, other, me, events, counts):
            return at
    other = reading.touch(src, lay.block_size, np.int64(src.pool.u32[row, lay.at_ids // 4 + last]), epoch, origin)
    inserting.remove_backlink(src, lay, other, me, events, counts)  # it has another link, that of the tree
    return last


@numba.njit(cache=True, nogil=True)
def _link_from(src, lay, referrer, node, own, parents, epoch, origin, events, counts):
    """Link a reached node to another one. Returns 1; 0: it is not live, or has no place; or an error as ``load``."""
    row = reading.load(src, lay.block_size, referrer, epoch)
    if row == reading.INVISIBLE:
        return 0
    if row < 0:
        return row
    if not _has_place(src, lay, row, referrer, parents):
        return 0
    row = reading.touch(src, lay.block_size, referrer, epoch, origin)
    place = _place(src, lay, row, parents, epoch, origin, events, counts)
    if place < 0:
        return place
    inserting.set_link(src, lay, row, place, node, own)
    other = reading.touch(src, lay.block_size, node, epoch, origin)
    if other < 0:
        return other
    inserting.add_backlink(src, lay, other, referrer, events, counts)
    parents[node] = referrer
    return 1


@numba.njit(cache=True, nogil=True)
def attach(src, lay, room, book, nodes, parents, queue, epoch, origin, limit, starts, first, events, counts):
    """Link unreached live nodes from the nearest reached ones, from index ``first`` on.

    No link of the tree is removed, so no node is lost. Each node of the tree but its roots takes one link, so that some node always has
    a place, if not one near.

    Args, result: ``parents`` and ``queue`` as of :func:`reach`; ``counts[2]`` is the number of reached nodes; the others as for
    ``rewire``.
    """
    table, own = np.empty((lay.code_bytes, 256), np.float32), np.empty(lay.code_bytes, np.uint8)
    vector = np.empty(lay.dimension, np.float32)
    for index in range(first, nodes.shape[0]):
        counts[1] = index
        node = nodes[index]
        if parents[node] != _UNREACHED:
            continue
        if src.tags.shape[0] + src.counts[1] + lay.links + 3 > src.pool.u64.shape[0]:
            return 0
        if counts[0] + lay.backlinks + 4 > events.shape[0]:
            return 0
        row = reading.load(src, lay.block_size, node, epoch)
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        vector[:] = src.pool.f32[row, reading.VECTOR : reading.VECTOR + lay.dimension]
        encode(book, vector, own)
        rest = fill_table(book, vector, table)
        visited = beam(src, lay, room, table, rest, vector, limit, 1, epoch, starts, nearest_starts(starts))
        if visited < 0:
            return visited
        near = np.argsort(room.v_distance[:visited])
        result, at = 0, 0
        while result == 0 and at < visited + counts[2]:
            other = room.v_node[near[at]] if at < visited else queue[counts[2] - 1 - (at - visited)]
            at += 1
            if parents[other] == _UNREACHED:
                continue
            result = _link_from(src, lay, other, node, own, parents, epoch, origin, events, counts)
            if result < 0:
                return result
        if result:
            queue[counts[2]] = node
            tail = _follow(src, lay, epoch, parents, queue, counts[2], counts[2] + 1)
            if tail < 0:
                return tail
            counts[2] = tail
    counts[1] = nodes.shape[0]
    return 0


_MAX_DEAD = 16
_DECODED = 32
"""Deleted nodes of which the decoded links are kept; those that follow each other share neighbours."""
_LINK_BACK = 4


@numba.njit(cache=True, nogil=True)
def neighbours(src, lay, nodes, epoch, targets, referrers, overflowed, vectors):
    """The links of nodes, in both directions. Returns 0, or an error as ``load``.

    Args:
        targets: int64 [n, R_f], filled with -1.
        referrers: int64 [n, R_b], filled with -1; without those in the overflow table.
        overflowed: uint8 [n]: whether the overflow table has the referrers.
        vectors: float32 [n, d].
    """
    for index in range(nodes.shape[0]):
        row = reading.load(src, lay.block_size, nodes[index], epoch)
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        for at in range(src.pool.u16[row, reading.LINKS]):
            targets[index, at] = src.pool.u32[row, lay.at_ids // 4 + at]
        for at in range(src.pool.u16[row, reading.BACKLINKS]):
            referrers[index, at] = src.pool.u32[row, lay.at_backlinks // 4 + at]
        overflowed[index] = src.pool.u8[row, reading.FLAGS] & OVERFLOW
        vectors[index, :] = src.pool.f32[row, reading.VECTOR : reading.VECTOR + lay.dimension]
    return 0


@numba.njit(cache=True, nogil=True)
def _members(ascending):
    """A hash table of nodes: entry by entry the index + 1 of one in ``ascending``, or 0."""
    size = 64
    while size < 4 * ascending.shape[0]:
        size *= 2
    table = np.zeros(size, np.int64)
    for index in range(ascending.shape[0]):
        at = reading.hashed(ascending[index], size)
        while table[at] != 0:
            at = (at + 1) & (size - 1)
        table[at] = index + 1
    return table


@numba.njit(cache=True, nogil=True)
def _index(table, ascending, node):
    """The index of a node in ``ascending``, of which ``table`` is; -1: it is not there."""
    at = reading.hashed(node, table.shape[0])
    while table[at] != 0:
        if ascending[table[at] - 1] == node:
            return table[at] - 1
        at = (at + 1) & (table.shape[0] - 1)
    return -1


@numba.njit(cache=True, nogil=True)
def forget(src, lay, nodes, gone, epoch, origin, first):
    """Remove ``gone`` (ascending) from the inline backlinks of live nodes, from index ``first`` on.

    Returns the index of the first node for which the overlay has no space; or an error as ``load``.
    """
    start, table = lay.at_backlinks // 4, _members(gone)
    for index in range(first, nodes.shape[0]):
        if src.tags.shape[0] + src.counts[1] >= src.pool.u64.shape[0]:
            return index
        row = reading.load(src, lay.block_size, nodes[index], epoch)
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        if src.pool.u8[row, reading.FLAGS] & (TOMBSTONED | OVERFLOW):
            continue
        held, left = np.int64(src.pool.u16[row, reading.BACKLINKS]), 0
        while left < held and _index(table, gone, np.int64(src.pool.u32[row, start + left])) < 0:
            left += 1
        if left == held:
            continue
        row = reading.touch(src, lay.block_size, nodes[index], epoch, origin)
        for at in range(left + 1, held):
            other = src.pool.u32[row, start + at]
            if _index(table, gone, np.int64(other)) < 0:
                src.pool.u32[row, start + left] = other
                left += 1
        for at in range(left, held):
            src.pool.u32[row, start + at] = reading.NONE
        src.pool.u16[row, reading.BACKLINKS] = left
    return nodes.shape[0]


@numba.njit(cache=True, nogil=True)
def _write_links(src, lay, row, ids, codes, count, stays):
    at = 0
    for index in range(count):
        if stays[index]:
            inserting.set_link(src, lay, row, at, ids[index], codes[index])
            at += 1
    src.pool.u16[row, reading.LINKS] = at
    for empty in range(at, lay.links):
        src.pool.u32[row, lay.at_ids // 4 + empty] = reading.NONE


@numba.njit(cache=True, nogil=True)
def _choose(src, lay, row, ids, codes, vectors, distances, count, held, most, alpha, epoch, origin, events, counts):
    """Set the links of a block: its ``held`` first candidates, and others that pruning selects, up to ``most``.

    Returns 0, or an error as ``load``.
    """
    me = src.pool.i64[row, 0]
    chosen = np.empty(lay.links, np.int64)
    stays = np.zeros(count, np.uint8)
    stays[:held] = 1
    for at in range(extend(vectors, distances, count, held, alpha, most, chosen)):
        index = chosen[at]
        stays[index] = 1
        other = reading.touch(src, lay.block_size, ids[index], epoch, origin)
        if other < 0:
            return other
        inserting.add_backlink(src, lay, other, me, events, counts)
    _write_links(src, lay, row, ids, codes, count, stays)
    return 0


@numba.njit(cache=True, nogil=True)
def _candidate(src, lay, book, row, at, own_vector, ids, codes, vectors, distances, count):
    """Add the link ``at`` of a block to the candidates; returns their number."""
    start = lay.at_codes + at * lay.code_bytes
    ids[count] = src.pool.u32[row, lay.at_ids // 4 + at]
    codes[count, :] = src.pool.u8[row, start : start + lay.code_bytes]
    decode(book, codes[count], vectors[count])
    distances[count] = squared(vectors[count], own_vector)
    return count + 1


@numba.njit(cache=True, nogil=True)
def _live_links(src, lay, book, node, dead, epoch, ids, codes, vectors):
    """Decode the links of a deleted node to live ones. Returns their number, or an error as ``load``."""
    row = reading.load(src, lay.block_size, node, epoch)
    if row < 0:
        return 0 if row == reading.INVISIBLE else row
    count = 0
    for at in range(src.pool.u16[row, reading.LINKS]):
        other = np.int64(src.pool.u32[row, lay.at_ids // 4 + at])
        if not contains(dead, other):
            start = lay.at_codes + at * lay.code_bytes
            ids[count] = other
            codes[count, :] = src.pool.u8[row, start : start + lay.code_bytes]
            decode(book, codes[count], vectors[count])
            count += 1
    return count


@numba.njit(cache=True, nogil=True)
def _drop_links(src, lay, row, table, gone, lost):
    """Drop the links of a block to ``gone``, and store their indexes in ``lost``. Returns their number."""
    start = lay.at_ids // 4
    held = np.int64(src.pool.u16[row, reading.LINKS])
    left = 0
    for at in range(held):
        other = src.pool.u32[row, start + at]
        place = _index(table, gone, np.int64(other))
        if place >= 0:
            lost[at - left] = place
            continue
        if left < at:
            code = lay.at_codes + at * lay.code_bytes
            inserting.set_link(src, lay, row, left, other, src.pool.u8[row, code : code + lay.code_bytes])
        left += 1
    for at in range(left, held):
        src.pool.u32[row, start + at] = reading.NONE
    src.pool.u16[row, reading.LINKS] = left
    return held - left


@numba.njit(cache=True, nogil=True)
def _links_to_any(src, lay, row, table, gone):
    for at in range(src.pool.u16[row, reading.LINKS]):
        if _index(table, gone, np.int64(src.pool.u32[row, lay.at_ids // 4 + at])) >= 0:
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _links_to(src, lay, row, node):
    links = False
    for at in range(src.pool.u16[row, reading.LINKS]):
        links |= src.pool.u32[row, lay.at_ids // 4 + at] == node
    return links


@numba.njit(cache=True, nogil=True)
def _link_nearest(src, lay, row, ids, codes, distances, count, most, epoch, origin, events, counts):
    """Link a block to the nearest candidates, up to ``most`` links. Returns 0, or an error as ``load``."""
    me, held = src.pool.i64[row, reading.NODE], np.int64(src.pool.u16[row, reading.LINKS])
    while held < most:
        best, least = -1, np.float32(np.inf)
        for index in range(count):
            if distances[index] < least:
                best, least = index, distances[index]
        if best < 0:
            break
        distances[best] = np.inf
        if ids[best] == me or _links_to(src, lay, row, ids[best]):
            continue
        other = reading.touch(src, lay.block_size, ids[best], epoch, origin)
        if other < 0:
            return other
        inserting.add_backlink(src, lay, other, me, events, counts)
        inserting.set_link(src, lay, row, held, ids[best], codes[best])
        held += 1
        src.pool.u16[row, reading.LINKS] = held
    return 0


@numba.njit(cache=True, nogil=True)
def reconnect(src, lay, book, nodes, gone, dead, epoch, origin, first, events, counts):
    """Replace the links of nodes to ``gone`` by links to the nearest neighbours of those, from index ``first`` on.

    Args:
        nodes: int64 [n]: those that link to ``gone``, and perhaps others, which are not changed. Neighbours of the
            same deleted node follow each other: its links are decoded once for all of them.
        gone: int64, ascending: deleted nodes.
        dead: int64, ascending: all deleted nodes, which are no candidates.
        events: see ``insert``.
        counts: [0] events so far; [1] is set to the index of the first node that is not done; [2] counts the changed.

    Returns:
        0, or an error as ``load``.
    """
    table, lost = _members(gone), np.empty(lay.links, np.int64)
    kept, sizes = np.full(_DECODED, -1, np.int64), np.zeros(_DECODED, np.int64)
    ids, codes = np.empty((_DECODED, lay.links), np.int64), np.empty((_DECODED, lay.links, lay.code_bytes), np.uint8)
    vectors = np.empty((_DECODED, lay.links, lay.dimension), np.float32)
    room = _MAX_DEAD * lay.links
    near, near_codes = np.empty(room, np.int64), np.empty((room, lay.code_bytes), np.uint8)
    distances, own = np.empty(room, np.float32), np.empty(lay.dimension, np.float32)
    for index in range(first, nodes.shape[0]):
        counts[1] = index
        if src.tags.shape[0] + src.counts[1] + 2 * lay.links + 2 > src.pool.u64.shape[0]:
            return 0
        if counts[0] + (lay.backlinks + 3) * lay.links > events.shape[0]:
            return 0
        node = nodes[index]
        if _index(table, gone, node) >= 0:
            continue
        row = reading.load(src, lay.block_size, node, epoch)
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        if not _links_to_any(src, lay, row, table, gone):
            continue
        row = reading.touch(src, lay.block_size, node, epoch, origin)
        missing = _drop_links(src, lay, row, table, gone, lost)
        counts[2] += 1
        if src.pool.u8[row, reading.FLAGS] & TOMBSTONED:
            continue
        own[:] = src.pool.f32[row, reading.VECTOR : reading.VECTOR + lay.dimension]
        count = 0
        for at in range(min(missing, _MAX_DEAD)):
            place = lost[at] % _DECODED
            if kept[place] != lost[at]:
                result = _live_links(
                    src, lay, book, gone[lost[at]], dead, epoch, ids[place], codes[place], vectors[place]
                )  # fmt: skip
                if result < 0:
                    return result
                kept[place], sizes[place] = lost[at], result
            for link in range(sizes[place]):
                near[count], near_codes[count, :] = ids[place, link], codes[place, link]
                distances[count] = squared(vectors[place, link], own)
                count += 1
        most = max(np.int64(src.pool.u16[row, reading.LINKS]) + missing, with_room(lay.links))
        result = _link_nearest(src, lay, row, near, near_codes, distances, count, most, epoch, origin, events, counts)
        if result < 0:
            return result
    counts[1] = nodes.shape[0]
    return 0


@numba.njit(cache=True, nogil=True)
def linked(src, lay, nodes, wanted, epoch, marks):
    """Mark those of ``wanted`` (ascending) to which any of ``nodes`` links in ``marks``. Returns 0, or as ``load``."""
    for index in range(nodes.shape[0]):
        row = reading.load(src, lay.block_size, nodes[index], epoch)
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        for at in range(src.pool.u16[row, reading.LINKS]):
            other = np.int64(src.pool.u32[row, lay.at_ids // 4 + at])
            place = np.searchsorted(wanted, other)
            if place < wanted.shape[0] and wanted[place] == other:
                marks[place] = 1
    return 0


@numba.njit(cache=True, nogil=True)
def lonely(src, lay, nodes, epoch, marks):
    """Mark live nodes to which no link leads, or none from an older node, in ``marks``. Returns 0, or as ``load``."""
    for index in range(nodes.shape[0]):
        row = reading.load(src, lay.block_size, nodes[index], epoch)
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        if src.pool.u8[row, reading.FLAGS] & (TOMBSTONED | OVERFLOW):
            continue
        older = False
        for at in range(src.pool.u16[row, reading.BACKLINKS]):
            older = older or np.int64(src.pool.u32[row, lay.at_backlinks // 4 + at]) < nodes[index]
        marks[index] = not older
    return 0


@numba.njit(cache=True, nogil=True)
def _linked_from(src, lay, book, room, order, visited, row, node, own, alpha, epoch, origin, events, counts):
    """Make the nearest visited nodes link to a node; the nearest older one always. Returns 0, or as ``load``."""
    must, left, near = -1, _LINK_BACK, np.empty(lay.code_bytes, np.uint8)
    for at in range(visited):
        if room.v_node[order[at]] != node and room.v_dead[order[at]] == 0:
            if must < 0:
                must = order[at]
            if room.v_node[order[at]] < node:
                must = order[at]
                break
    for at in range(visited):
        index = order[at]
        if room.v_node[index] == node or room.v_dead[index] or (left <= 0 and index != must):
            continue
        left -= 1
        other = reading.load(src, lay.block_size, room.v_node[index], epoch)
        if other < 0:
            return other
        if _links_to(src, lay, other, node):
            continue
        other = reading.touch(src, lay.block_size, room.v_node[index], epoch, origin)
        inserting.code_of(book, room, index, near)
        done = inserting.link_back(
            src, lay, book, other, near, row, own, alpha, index == must, epoch, origin, events, counts
        )
        if done < 0:
            return done
        if done:
            inserting.add_backlink(src, lay, row, room.v_node[index], events, counts)
    return 0


@numba.njit(cache=True, nogil=True)
def rewire(src, lay, room, book, nodes, epoch, origin, alpha, limit, starts, first, events, counts):
    """Search the neighbours of nodes again, and link them in both directions, from index ``first`` on.

    Args, result: as for :func:`reconnect`; ``room``, ``limit`` and ``starts`` as for ``insert``.
    """
    table, own = np.empty((lay.code_bytes, 256), np.float32), np.empty(lay.code_bytes, np.uint8)
    most = lay.links + room.v_node.shape[0]
    ids, codes = np.empty(most, np.int64), np.empty((most, lay.code_bytes), np.uint8)
    vectors, distances = np.empty((most, lay.dimension), np.float32), np.empty(most, np.float32)
    own_vector = np.empty(lay.dimension, np.float32)
    worst = lay.links * (lay.links + 4) + 2
    for index in range(first, nodes.shape[0]):
        counts[1] = index
        if src.tags.shape[0] + src.counts[1] + worst > src.pool.u64.shape[0]:
            return 0
        if counts[0] + worst + (lay.backlinks + 3) * 3 * lay.links > events.shape[0]:
            return 0
        node = nodes[index]
        row = reading.load(src, lay.block_size, node, epoch)
        if row == reading.INVISIBLE:
            continue
        if row < 0:
            return row
        if src.pool.u8[row, reading.FLAGS] & TOMBSTONED:
            continue
        own_vector[:] = src.pool.f32[row, reading.VECTOR : reading.VECTOR + lay.dimension]
        encode(book, own_vector, own)
        rest = fill_table(book, own_vector, table)
        visited = beam(src, lay, room, table, rest, own_vector, limit, 1, epoch, starts, nearest_starts(starts))
        if visited < 0:
            return visited
        row = reading.touch(src, lay.block_size, node, epoch, origin)
        count = 0
        for at in range(src.pool.u16[row, reading.LINKS]):
            count = _candidate(src, lay, book, row, at, own_vector, ids, codes, vectors, distances, count)
        held = count
        for at in range(visited):
            if room.v_node[at] == node or room.v_dead[at] or _links_to(src, lay, row, room.v_node[at]):
                continue
            ids[count], distances[count] = room.v_node[at], room.v_distance[at]
            vectors[count, :] = room.v_vector[at]
            inserting.code_of(book, room, at, codes[count])
            count += 1
        result = _choose(
            src, lay, row, ids, codes, vectors, distances, count, held, lay.links, alpha, epoch, origin, events, counts
        )
        if result < 0:
            return result
        order = np.argsort(room.v_distance[:visited])
        result = _linked_from(
            src, lay, book, room, order, visited, row, node, own, alpha, epoch, origin, events, counts
        )
        if result < 0:
            return result
        counts[2] += 1
    counts[1] = nodes.shape[0]
    return 0
