"""Follow the links of a graph from its entry points, and link nodes to which no path leads (numba)."""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.distances import encode, fill_table
from memwal_ops.formats.lm_diskann.kernels.inserting import add_backlink, drop_backlink, remove_backlink, set_link
from memwal_ops.formats.lm_diskann.kernels.memory import FLAGS, INVISIBLE, LINKS, NODE, VECTOR
from memwal_ops.formats.lm_diskann.kernels.reading import load, touch
from memwal_ops.formats.lm_diskann.kernels.searching import beam, nearest_starts
from memwal_ops.formats.lm_diskann.wire.blocks import TOMBSTONED

_UNREACHED, ROOT = -2, -1


@numba.njit(cache=True, nogil=True)
def _follow(src, lay, epoch, parents, queue, head, tail):
    """Follow the links of the nodes ``queue[head:tail]``. Returns the new tail, or an error as ``load``."""
    while head < tail:
        node = queue[head]
        row = load(src, lay.block_size, node, epoch)
        head += 1
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        for at in range(src.pool.u16[row, LINKS]):
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
    for one in range(entries.shape[0]):
        if parents[entries[one]] == _UNREACHED:
            parents[entries[one]] = ROOT
            queue[tail] = entries[one]
            tail += 1
    return _follow(src, lay, epoch, parents, queue, 0, tail)


@numba.njit(cache=True, nogil=True)
def _has_place(src, lay, row, node, parents):
    """Whether a live block has an unused link, or one that is not of the tree."""
    if src.pool.u8[row, FLAGS] & TOMBSTONED:
        return False
    held = np.int64(src.pool.u16[row, LINKS])
    for at in range(held):
        if parents[src.pool.u32[row, lay.at_ids // 4 + at]] != node:
            return True
    return held < lay.links


@numba.njit(cache=True, nogil=True)
def _place(src, lay, row, parents, epoch, origin, events, counts):
    """The place of a link in a block that has one: unused, or that of a link that is removed. Or an error as ``load``."""
    me, held = src.pool.i64[row, NODE], np.int64(src.pool.u16[row, LINKS])
    if held < lay.links:
        src.pool.u16[row, LINKS] = held + 1
        return held
    last = held
    for at in range(held - 1, -1, -1):
        target = np.int64(src.pool.u32[row, lay.at_ids // 4 + at])
        if parents[target] == me:
            continue
        last = at
        other = touch(src, lay.block_size, target, epoch, origin)
        if other < 0:
            return other
        if drop_backlink(src, lay, other, me, events, counts):
            return at
    other = touch(src, lay.block_size, np.int64(src.pool.u32[row, lay.at_ids // 4 + last]), epoch, origin)
    remove_backlink(src, lay, other, me, events, counts)  # it has another link, that of the tree
    return last


@numba.njit(cache=True, nogil=True)
def _link_from(src, lay, referrer, node, own, parents, epoch, origin, events, counts):
    """Link a reached node to another one. Returns 1; 0: it is not live, or has no place; or an error as ``load``."""
    row = load(src, lay.block_size, referrer, epoch)
    if row == INVISIBLE:
        return 0
    if row < 0:
        return row
    if not _has_place(src, lay, row, referrer, parents):
        return 0
    row = touch(src, lay.block_size, referrer, epoch, origin)
    place = _place(src, lay, row, parents, epoch, origin, events, counts)
    if place < 0:
        return place
    set_link(src, lay, row, place, node, own)
    other = touch(src, lay.block_size, node, epoch, origin)
    if other < 0:
        return other
    add_backlink(src, lay, other, referrer, events, counts)
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
    for one in range(first, nodes.shape[0]):
        counts[1] = one
        node = nodes[one]
        if parents[node] != _UNREACHED:
            continue
        if src.tags.shape[0] + src.counts[1] + lay.links + 3 > src.pool.u64.shape[0]:
            return 0
        if counts[0] + lay.backlinks + 4 > events.shape[0]:
            return 0
        row = load(src, lay.block_size, node, epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        vector[:] = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
        encode(book, vector, own)
        rest = fill_table(book, vector, table)
        visited = beam(src, lay, room, table, rest, vector, limit, 1, epoch, starts, nearest_starts(starts))
        if visited < 0:
            return visited
        near = np.argsort(room.v_distance[:visited])
        found, at = 0, 0
        while found == 0 and at < visited + counts[2]:
            other = room.v_node[near[at]] if at < visited else queue[counts[2] - 1 - (at - visited)]
            at += 1
            if parents[other] == _UNREACHED:
                continue
            found = _link_from(src, lay, other, node, own, parents, epoch, origin, events, counts)
            if found < 0:
                return found
        if found:
            queue[counts[2]] = node
            tail = _follow(src, lay, epoch, parents, queue, counts[2], counts[2] + 1)
            if tail < 0:
                return tail
            counts[2] = tail
    counts[1] = nodes.shape[0]
    return 0
