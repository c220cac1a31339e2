"""Heal the graph: reconnect the neighbours of deleted nodes, and rewire single nodes.

A node that linked to a deleted one gets a link to the nearest of its neighbours instead (as in-place deletes of
IP-DiskANN), without pruning: that kept the same candidates, and took two thirds of the time. Its own links to live
nodes are kept: the far ones connect clusters, and near candidates would replace them; and each dropped link would
change another block. As many links are added as were lost: more would change more blocks, and fill the list, so that
the next insert that links to the node would have to prune it.
"""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import decode, encode, fill_table, squared
from memwal_ops.formats.lm_diskann.kernels.inserting import (
    add_backlink,
    code_of,
    link_back,
    set_link,
)
from memwal_ops.formats.lm_diskann.kernels.memory import (
    BACKLINKS,
    FLAGS,
    INVISIBLE,
    LINKS,
    NODE,
    NONE,
    VECTOR,
)
from memwal_ops.formats.lm_diskann.kernels.pruning import extend, with_room
from memwal_ops.formats.lm_diskann.kernels.reading import hashed, load, touch
from memwal_ops.formats.lm_diskann.kernels.searching import beam, contains, nearest_starts
from memwal_ops.formats.lm_diskann.wire.blocks import OVERFLOW, TOMBSTONED

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
    for one in range(nodes.shape[0]):
        row = load(src, lay.block_size, nodes[one], epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        for at in range(src.pool.u16[row, LINKS]):
            targets[one, at] = src.pool.u32[row, lay.at_ids // 4 + at]
        for at in range(src.pool.u16[row, BACKLINKS]):
            referrers[one, at] = src.pool.u32[row, lay.at_backlinks // 4 + at]
        overflowed[one] = src.pool.u8[row, FLAGS] & OVERFLOW
        vectors[one, :] = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
    return 0


@numba.njit(cache=True, nogil=True)
def _members(ascending):
    """A hash table of nodes: entry by entry the index + 1 of one in ``ascending``, or 0."""
    size = 64
    while size < 4 * ascending.shape[0]:
        size *= 2
    table = np.zeros(size, np.int64)
    for one in range(ascending.shape[0]):
        at = hashed(ascending[one], size)
        while table[at] != 0:
            at = (at + 1) & (size - 1)
        table[at] = one + 1
    return table


@numba.njit(cache=True, nogil=True)
def _index(table, ascending, node):
    """The index of a node in ``ascending``, of which ``table`` is; -1: it is not there."""
    at = hashed(node, table.shape[0])
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
    for one in range(first, nodes.shape[0]):
        if src.tags.shape[0] + src.counts[1] >= src.pool.u64.shape[0]:
            return one
        row = load(src, lay.block_size, nodes[one], epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        if src.pool.u8[row, FLAGS] & (TOMBSTONED | OVERFLOW):
            continue
        held, left = np.int64(src.pool.u16[row, BACKLINKS]), 0
        while left < held and _index(table, gone, np.int64(src.pool.u32[row, start + left])) < 0:
            left += 1
        if left == held:
            continue
        row = touch(src, lay.block_size, nodes[one], epoch, origin)
        for at in range(left + 1, held):
            other = src.pool.u32[row, start + at]
            if _index(table, gone, np.int64(other)) < 0:
                src.pool.u32[row, start + left] = other
                left += 1
        for at in range(left, held):
            src.pool.u32[row, start + at] = NONE
        src.pool.u16[row, BACKLINKS] = left
    return nodes.shape[0]


@numba.njit(cache=True, nogil=True)
def _write_links(src, lay, row, ids, codes, count, stays):
    at = 0
    for one in range(count):
        if stays[one]:
            set_link(src, lay, row, at, ids[one], codes[one])
            at += 1
    src.pool.u16[row, LINKS] = at
    for empty in range(at, lay.links):
        src.pool.u32[row, lay.at_ids // 4 + empty] = NONE


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
        one = chosen[at]
        stays[one] = 1
        other = touch(src, lay.block_size, ids[one], epoch, origin)
        if other < 0:
            return other
        add_backlink(src, lay, other, me, events, counts)
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
    row = load(src, lay.block_size, node, epoch)
    if row < 0:
        return 0 if row == INVISIBLE else row
    count = 0
    for at in range(src.pool.u16[row, LINKS]):
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
    held = np.int64(src.pool.u16[row, LINKS])
    left = 0
    for at in range(held):
        other = src.pool.u32[row, start + at]
        found = _index(table, gone, np.int64(other))
        if found >= 0:
            lost[at - left] = found
            continue
        if left < at:
            code = lay.at_codes + at * lay.code_bytes
            set_link(src, lay, row, left, other, src.pool.u8[row, code : code + lay.code_bytes])
        left += 1
    for at in range(left, held):
        src.pool.u32[row, start + at] = NONE
    src.pool.u16[row, LINKS] = left
    return held - left


@numba.njit(cache=True, nogil=True)
def _links_to_any(src, lay, row, table, gone):
    for at in range(src.pool.u16[row, LINKS]):
        if _index(table, gone, np.int64(src.pool.u32[row, lay.at_ids // 4 + at])) >= 0:
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _links_to(src, lay, row, node):
    found = False
    for at in range(src.pool.u16[row, LINKS]):
        found |= src.pool.u32[row, lay.at_ids // 4 + at] == node
    return found


@numba.njit(cache=True, nogil=True)
def _link_nearest(src, lay, row, ids, codes, distances, count, most, epoch, origin, events, counts):
    """Link a block to the nearest candidates, up to ``most`` links. Returns 0, or an error as ``load``."""
    me, held = src.pool.i64[row, NODE], np.int64(src.pool.u16[row, LINKS])
    while held < most:
        best, least = -1, np.float32(np.inf)
        for one in range(count):
            if distances[one] < least:
                best, least = one, distances[one]
        if best < 0:
            break
        distances[best] = np.inf
        if ids[best] == me or _links_to(src, lay, row, ids[best]):
            continue
        other = touch(src, lay.block_size, ids[best], epoch, origin)
        if other < 0:
            return other
        add_backlink(src, lay, other, me, events, counts)
        set_link(src, lay, row, held, ids[best], codes[best])
        held += 1
        src.pool.u16[row, LINKS] = held
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
    for one in range(first, nodes.shape[0]):
        counts[1] = one
        if src.tags.shape[0] + src.counts[1] + 2 * lay.links + 2 > src.pool.u64.shape[0]:
            return 0
        if counts[0] + (lay.backlinks + 3) * lay.links > events.shape[0]:
            return 0
        node = nodes[one]
        if _index(table, gone, node) >= 0:
            continue
        row = load(src, lay.block_size, node, epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        if not _links_to_any(src, lay, row, table, gone):
            continue
        row = touch(src, lay.block_size, node, epoch, origin)
        missing = _drop_links(src, lay, row, table, gone, lost)
        counts[2] += 1
        if src.pool.u8[row, FLAGS] & TOMBSTONED:
            continue
        own[:] = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
        count = 0
        for at in range(min(missing, _MAX_DEAD)):
            place = lost[at] % _DECODED
            if kept[place] != lost[at]:
                found = _live_links(
                    src, lay, book, gone[lost[at]], dead, epoch, ids[place], codes[place], vectors[place]
                )  # fmt: skip
                if found < 0:
                    return found
                kept[place], sizes[place] = lost[at], found
            for link in range(sizes[place]):
                near[count], near_codes[count, :] = ids[place, link], codes[place, link]
                distances[count] = squared(vectors[place, link], own)
                count += 1
        most = max(np.int64(src.pool.u16[row, LINKS]) + missing, with_room(lay.links))
        found = _link_nearest(src, lay, row, near, near_codes, distances, count, most, epoch, origin, events, counts)
        if found < 0:
            return found
    counts[1] = nodes.shape[0]
    return 0


@numba.njit(cache=True, nogil=True)
def linked(src, lay, nodes, wanted, epoch, found):
    """Mark those of ``wanted`` (ascending) to which any of ``nodes`` links in ``found``. Returns 0, or as ``load``."""
    for one in range(nodes.shape[0]):
        row = load(src, lay.block_size, nodes[one], epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        for at in range(src.pool.u16[row, LINKS]):
            other = np.int64(src.pool.u32[row, lay.at_ids // 4 + at])
            place = np.searchsorted(wanted, other)
            if place < wanted.shape[0] and wanted[place] == other:
                found[place] = 1
    return 0


@numba.njit(cache=True, nogil=True)
def lonely(src, lay, nodes, epoch, found):
    """Mark live nodes to which no link leads, or none from an older node, in ``found``. Returns 0, or as ``load``."""
    for one in range(nodes.shape[0]):
        row = load(src, lay.block_size, nodes[one], epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        if src.pool.u8[row, FLAGS] & (TOMBSTONED | OVERFLOW):
            continue
        older = False
        for at in range(src.pool.u16[row, BACKLINKS]):
            older = older or np.int64(src.pool.u32[row, lay.at_backlinks // 4 + at]) < nodes[one]
        found[one] = not older
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
        one = order[at]
        if room.v_node[one] == node or room.v_dead[one] or (left <= 0 and one != must):
            continue
        left -= 1
        other = load(src, lay.block_size, room.v_node[one], epoch)
        if other < 0:
            return other
        if _links_to(src, lay, other, node):
            continue
        other = touch(src, lay.block_size, room.v_node[one], epoch, origin)
        code_of(book, room, one, near)
        done = link_back(src, lay, book, other, near, row, own, alpha, one == must, epoch, origin, events, counts)
        if done < 0:
            return done
        if done:
            add_backlink(src, lay, row, room.v_node[one], events, counts)
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
    for one in range(first, nodes.shape[0]):
        counts[1] = one
        if src.tags.shape[0] + src.counts[1] + worst > src.pool.u64.shape[0]:
            return 0
        if counts[0] + worst + (lay.backlinks + 3) * 3 * lay.links > events.shape[0]:
            return 0
        node = nodes[one]
        row = load(src, lay.block_size, node, epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        if src.pool.u8[row, FLAGS] & TOMBSTONED:
            continue
        own_vector[:] = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
        encode(book, own_vector, own)
        rest = fill_table(book, own_vector, table)
        visited = beam(src, lay, room, table, rest, own_vector, limit, 1, epoch, starts, nearest_starts(starts))
        if visited < 0:
            return visited
        row = touch(src, lay.block_size, node, epoch, origin)
        count = 0
        for at in range(src.pool.u16[row, LINKS]):
            count = _candidate(src, lay, book, row, at, own_vector, ids, codes, vectors, distances, count)
        held = count
        for at in range(visited):
            if room.v_node[at] == node or room.v_dead[at] or _links_to(src, lay, row, room.v_node[at]):
                continue
            ids[count], distances[count] = room.v_node[at], room.v_distance[at]
            vectors[count, :] = room.v_vector[at]
            code_of(book, room, at, codes[count])
            count += 1
        found = _choose(
            src, lay, row, ids, codes, vectors, distances, count, held, lay.links, alpha, epoch, origin, events, counts
        )
        if found < 0:
            return found
        order = np.argsort(room.v_distance[:visited])
        found = _linked_from(src, lay, book, room, order, visited, row, node, own, alpha, epoch, origin, events, counts)
        if found < 0:
            return found
        counts[2] += 1
    counts[1] = nodes.shape[0]
    return 0
