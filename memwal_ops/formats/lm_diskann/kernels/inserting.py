"""Insert nodes into the graph, block by block: forward links, back edges, and backlinks of all changed nodes.

Three rules keep it searchable. A new node links to live nodes if the search found any. The nearest neighbour of a
new node always links back to it. And pruning never removes the last link to a node, or the last one from
an older node, unless the new node takes it over: otherwise it would never be found again.
"""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import decode, encode, fill_table, squared
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
    VECTOR,
    VERSION,
)
from memwal_ops.formats.lm_diskann.kernels.pruning import of_new, prune, with_room
from memwal_ops.formats.lm_diskann.kernels.reading import new_row, touch
from memwal_ops.formats.lm_diskann.kernels.searching import beam, nearest_starts
from memwal_ops.formats.lm_diskann.wire.blocks import OVERFLOW, TOMBSTONED

_FEW = 8
_GIVEN_UP = 2
_MUST, _MAY = True, False


@numba.njit(cache=True, nogil=True)
def write_node(src, lay, node, row_id, vector, epoch, origin, codebook):
    """Write a new block without links to the overlay. Returns its row."""
    row = new_row(src, node)
    src.pool.u64[row, :] = 0
    src.pool.i64[row, NODE], src.pool.i64[row, ROW] = node, row_id
    src.pool.i64[row, EPOCH], src.pool.i64[row, VERSION], src.pool.i64[row, ORIGIN] = epoch, 1, origin
    src.pool.u16[row, CODEBOOK] = codebook
    src.pool.f32[row, VECTOR : VECTOR + lay.dimension] = vector
    src.pool.u32[row, lay.at_ids // 4 : lay.at_ids // 4 + lay.links] = NONE
    src.pool.u32[row, lay.at_backlinks // 4 : lay.at_backlinks // 4 + lay.backlinks] = NONE
    return row


@numba.njit(cache=True, nogil=True)
def write_nodes(src, lay, nodes, row_ids, vectors, epoch, origin, codebook):
    """Write blocks of new nodes without links: for an index that has no graph yet."""
    for one in range(nodes.shape[0]):
        write_node(src, lay, nodes[one], row_ids[one], vectors[one], epoch, origin, codebook)


@numba.njit(cache=True, nogil=True)
def set_tombstones(src, lay, nodes, epoch, origin):
    """Set the tombstone flag in new versions of these nodes' blocks. Returns 0, or an error as ``load``."""
    for one in range(nodes.shape[0]):
        row = touch(src, lay.block_size, nodes[one], epoch, origin)
        if row < 0:
            return row
        src.pool.u8[row, FLAGS] |= TOMBSTONED
    return 0


@numba.njit(cache=True, nogil=True)
def _event(events, counts, target, referrer, sign):
    at = counts[0]
    events[at, 0], events[at, 1], events[at, 2] = target, referrer, sign
    counts[0] += 1


@numba.njit(cache=True, nogil=True)
def add_backlink(src, lay, row, referrer, events, counts):
    """Add ``referrer`` to the backlinks of a block in the overlay, or to the overflow table if the array is full."""
    target = src.pool.i64[row, NODE]
    at = lay.at_backlinks // 4
    if src.pool.u8[row, FLAGS] & OVERFLOW:
        _event(events, counts, target, referrer, 1)
        return
    held = np.int64(src.pool.u16[row, BACKLINKS])
    if held < lay.backlinks:
        src.pool.u32[row, at + held] = referrer
        src.pool.u16[row, BACKLINKS] = held + 1
        return
    for one in range(held):
        _event(events, counts, target, np.int64(src.pool.u32[row, at + one]), 1)
        src.pool.u32[row, at + one] = NONE
    _event(events, counts, target, referrer, 1)
    src.pool.u8[row, FLAGS] |= OVERFLOW
    src.pool.u16[row, BACKLINKS] = 0
    src.pool.i64[row, OVERFLOW_REFERENCE] = target


@numba.njit(cache=True, nogil=True)
def remove_backlink(src, lay, row, referrer, events, counts):
    """Remove ``referrer`` from the backlinks of a block in the overlay."""
    if src.pool.u8[row, FLAGS] & OVERFLOW:
        _event(events, counts, src.pool.i64[row, NODE], referrer, -1)
        return
    at = lay.at_backlinks // 4
    held = np.int64(src.pool.u16[row, BACKLINKS])
    for one in range(held):
        if src.pool.u32[row, at + one] == referrer:
            src.pool.u32[row, at + one] = src.pool.u32[row, at + held - 1]
            src.pool.u32[row, at + held - 1] = NONE
            src.pool.u16[row, BACKLINKS] = held - 1
            return


@numba.njit(cache=True, nogil=True)
def drop_backlink(src, lay, row, referrer, events, counts):
    """Remove ``referrer`` from the backlinks of a node; returns False without a change if it would become unreachable.

    That is: no other link leads to it; or this is the last one from an older node. Every new node has a link from an
    older one, so that following such links back always ends in the graph that was built, never in a cycle of new nodes.
    """
    if not src.pool.u8[row, FLAGS] & OVERFLOW:
        at = lay.at_backlinks // 4
        held = np.int64(src.pool.u16[row, BACKLINKS])
        target = src.pool.i64[row, NODE]
        older = 0
        for one in range(held):
            other = np.int64(src.pool.u32[row, at + one])
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
        one = chosen[at]
        if one == new or stays[one] != 1:
            continue
        other = touch(src, lay.block_size, ids[one], epoch, origin)
        if other < 0:
            return other
        if drop_backlink(src, lay, other, me, events, counts):
            stays[one] = _GIVEN_UP
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
    at, held = lay.at_ids // 4, np.int64(src.pool.u16[row, LINKS])
    me, target = src.pool.i64[row, NODE], src.pool.i64[orphan, NODE]
    if me == target:
        return 0
    if (src.pool.u32[row, at : at + held] == target).any():
        return 1
    place = held
    while must and place == lay.links and held > 0:
        held -= 1
        other = touch(src, lay.block_size, np.int64(src.pool.u32[row, at + held]), epoch, origin)
        if other < 0:
            return other
        if drop_backlink(src, lay, other, me, events, counts):
            place = held
    if place == lay.links:
        return 0
    set_link(src, lay, row, place, target, code)
    src.pool.u16[row, LINKS] = max(np.int64(src.pool.u16[row, LINKS]), place + 1)
    add_backlink(src, lay, orphan, me, events, counts)
    return 1


@numba.njit(cache=True, nogil=True)
def link_back(src, lay, book, row, own, fresh, code, alpha, must, epoch, origin, events, counts):
    """Link the block ``row`` to a new node, and prune it if full. Returns 1, 0 if the link was pruned, or as ``load``.

    ``own`` is the code of its node, ``code`` that of the new one. Where a last link to another node has to be pruned,
    the new node, whose block is ``fresh``, links there instead, or another one to which ``row`` links.
    """
    node = src.pool.i64[fresh, NODE]
    held = np.int64(src.pool.u16[row, LINKS])
    if held < lay.links:
        set_link(src, lay, row, held, node, code)
        src.pool.u16[row, LINKS] = held + 1
        return 1
    me = src.pool.i64[row, NODE]
    ids = np.empty(held + 1, np.int64)
    codes = np.empty((held + 1, lay.code_bytes), np.uint8)
    vectors = np.empty((held + 1, lay.dimension), np.float32)
    distances = np.empty(held + 1, np.float32)
    own_vector = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
    for one in range(held + 1):
        if one < held:
            ids[one] = src.pool.u32[row, lay.at_ids // 4 + one]
            start = lay.at_codes + one * lay.code_bytes
            codes[one, :] = src.pool.u8[row, start : start + lay.code_bytes]
        else:
            ids[one] = node
            codes[one, :] = code
        decode(book, codes[one], vectors[one])
        distances[one] = squared(vectors[one], own_vector)
        if (codes[one] == own).all():
            distances[one] = 0
    chosen = np.empty(lay.links, np.int64)
    # Pruned to fewer than the maximum, so that the next few links need no pruning.
    kept = prune(vectors, distances, held + 1, alpha, with_room(lay.links), chosen)
    stays = np.zeros(held + 1, np.uint8)
    for one in range(kept):
        stays[chosen[one]] = 1
    if must:
        stays[held] = 1
    total = 0
    for one in range(held + 1):
        total += stays[one]
    for one in range(held):
        if stays[one]:  # or replaced by another one
            continue
        other = touch(src, lay.block_size, ids[one], epoch, origin)
        if other < 0:
            return other
        if drop_backlink(src, lay, other, me, events, counts):
            continue
        if total < lay.links:
            stays[one] = 1
            total += 1
            continue
        found = _make_place(src, lay, ids, chosen, kept, stays, held, me, epoch, origin, events, counts)
        if found < 0:
            return found
        if found:
            stays[one] = 1
        else:
            remove_backlink(src, lay, other, me, events, counts)
            found = _adopt(src, lay, fresh, other, codes[one], _MUST, epoch, origin, events, counts)
            near = 0
            while found == 0 and near < kept:
                if stays[chosen[near]] == 1 and chosen[near] != held:
                    found = touch(src, lay.block_size, ids[chosen[near]], epoch, origin)
                    if found >= 0:
                        found = _adopt(src, lay, found, other, codes[one], _MAY, epoch, origin, events, counts)
                near += 1
            if found < 0:
                return found
    at = 0
    for one in range(held + 1):
        if stays[one] == 1:
            set_link(src, lay, row, at, ids[one], codes[one])
            at += 1
    src.pool.u16[row, LINKS] = at
    for empty in range(at, lay.links):
        src.pool.u32[row, lay.at_ids // 4 + empty] = NONE
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
    for one in range(kept):
        at = use[chosen[one]]
        code_of(book, room, at, codes[one])
        set_link(src, lay, row, one, room.v_node[at], codes[one])
    src.pool.u16[row, LINKS] = kept
    for one in range(kept):
        other = touch(src, lay.block_size, room.v_node[use[chosen[one]]], epoch, origin)
        if other < 0:
            return other
        add_backlink(src, lay, other, node, events, counts)
    for one in range(kept):
        other = touch(src, lay.block_size, room.v_node[use[chosen[one]]], epoch, origin)
        if other < 0:
            return other
        done = link_back(src, lay, book, other, codes[one], row, own, alpha, one == 0, epoch, origin, events, counts)
        if done < 0:
            return done
        if done:
            add_backlink(src, lay, row, src.pool.i64[other, NODE], events, counts)
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
    for one in range(first, nodes.shape[0]):
        used = src.tags.shape[0] + src.counts[1]
        if used + worst > src.pool.u64.shape[0]:
            break
        if counts[0] + worst + (lay.backlinks + 1) * 2 * lay.links > events.shape[0]:
            break
        found = _insert(
            src, lay, room, book, table, nodes[one], row_ids[one], vectors[one], epoch, origin, codebook, alpha,
            limit, starts, events, counts,
        )  # fmt: skip
        if found < 0:
            return found
        counts[1] = one + 1
    return 0
