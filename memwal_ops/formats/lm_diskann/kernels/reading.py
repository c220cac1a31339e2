"""Read blocks of nodes from overlay, cache or file; checks node id and epoch at each access, the checksum at each read."""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from memwal_ops.formats.lm_diskann.kernels.checksum import block_checksum
from memwal_ops.formats.lm_diskann.kernels.memory import (
    CHECKSUM,
    CODEBOOK,
    DAMAGED,
    EPOCH,
    FILE_SHIFT,
    INVISIBLE,
    NODE,
    NONE,
    ORIGIN,
    STALE,
    VECTOR,
    VERSION,
    WAYS,
)

_pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_WILLNEED = 3
_OFFSET = (1 << FILE_SHIFT) - 1
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@numba.njit(cache=True, nogil=True, inline="always")
def hashed(value, size):
    """The position of a value in a hash table of ``size`` entries, a power of two."""
    return np.int64((np.uint64(value) * _MIX) >> _HALF) & (size - 1)


@numba.njit(cache=True, nogil=True)
def version_of(src, node):
    """The index of the newest version of a node that is not in the map; -1 if there is none."""
    at = hashed(node, src.heads.shape[0])
    while src.heads[at] != 0:
        index = src.heads[at] - 1
        if src.node[index] == node:
            return index
        at = (at + 1) & (src.heads.shape[0] - 1)
    return -1


@numba.njit(cache=True, nogil=True)
def add_versions(src, nodes, epochs, places):
    """Add versions, or move existing ones; per node they must be ascending by epoch. The arrays must have space."""
    for one in range(nodes.shape[0]):
        node, epoch = np.int64(nodes[one]), np.int64(epochs[one])
        newest = version_of(src, node)
        index = newest
        while index >= 0 and src.epoch[index] > epoch:
            index = src.before[index]
        if index >= 0 and src.epoch[index] == epoch:
            src.place[index] = places[one]
            continue
        if index != newest:
            continue  # older than the existing one, and superseded
        index = src.counts[0]
        src.counts[0] += 1
        src.node[index], src.epoch[index], src.place[index], src.before[index] = node, epoch, places[one], newest
        at = hashed(node, src.heads.shape[0])
        while src.heads[at] != 0 and src.node[src.heads[at] - 1] != node:
            at = (at + 1) & (src.heads.shape[0] - 1)
        src.heads[at] = index + 1


@numba.njit(cache=True, nogil=True)
def overlay_row(src, node):
    """The pool's row of a node that the transaction changed; -1 if it did not."""
    if src.counts[1] == 0:
        return -1
    at = hashed(node, src.overlay.shape[0])
    while src.overlay[at] != 0:
        row = src.overlay[at] - 1
        if src.pool.i64[row, NODE] == node:
            return row
        at = (at + 1) & (src.overlay.shape[0] - 1)
    return -1


@numba.njit(cache=True, nogil=True)
def new_row(src, node):
    """Allocate a row of the overlay for a node that has none; only its node id is set."""
    row = src.tags.shape[0] + src.counts[1]
    src.counts[1] += 1
    src.pool.i64[row, NODE] = node
    at = hashed(node, src.overlay.shape[0])
    while src.overlay[at] != 0:
        at = (at + 1) & (src.overlay.shape[0] - 1)
    src.overlay[at] = row + 1
    return row


@numba.njit(cache=True, nogil=True)
def place_of(src, block_size, node, epoch):
    """The place of the version that a reader at ``epoch`` reads, and its own epoch (-1: unknown); place -1: none."""
    index = version_of(src, node)
    while index >= 0 and src.epoch[index] > epoch:
        index = src.before[index]
    if index >= 0:
        return src.place[index], src.epoch[index]
    if node >= src.slots.shape[0] or src.slots[node] == NONE:
        return np.int64(-1), np.int64(-1)
    return np.int64(src.slots[node]) * block_size, np.int64(-1)


@numba.njit(cache=True, nogil=True)
def _fits(src, row, node, version_epoch):
    """Whether a block is the one in the view: a reused slot has another node, or a later epoch."""
    found = src.pool.i64[row, EPOCH]
    expected = found == version_epoch if version_epoch >= 0 else found <= src.limits[0]
    return src.pool.i64[row, NODE] == node and expected


@numba.njit(cache=True, nogil=True)
def load(src, block_size, node, epoch):
    """The pool's row of the block of a node as of an epoch; valid until the next call.

    Returns INVISIBLE if the node does not exist at that epoch, STALE if the slot was reused,
    DAMAGED if the checksum is wrong or the file is too short.
    """
    src.counts[3] += 1
    row = overlay_row(src, node)
    if row >= 0:
        return row
    place, version_epoch = place_of(src, block_size, node, epoch)
    if place < 0:
        return INVISIBLE
    first = hashed(place, src.tags.shape[0] // WAYS) * WAYS
    victim = first
    src.counts[2] += 1
    for way in range(first, first + WAYS):
        if src.tags[way] == place:
            if _fits(src, way, node, version_epoch):
                src.stamps[way] = src.counts[2]
                return way if src.pool.i64[way, EPOCH] <= epoch else INVISIBLE
            src.tags[way] = -1
            src.stamps[way] = 0
        if src.stamps[way] < src.stamps[victim]:
            victim = way
    src.counts[4] += 1
    src.tags[victim] = -1
    file, offset = place >> FILE_SHIFT, place & _OFFSET
    got = _pread(src.fds[file], src.pool.u8[victim].ctypes.data, np.uint64(block_size), offset)
    words = src.pool.u64[victim]
    if got != block_size or words[CHECKSUM] != block_checksum(words):
        src.counts[5], src.counts[6] = node, place
        return DAMAGED
    if not _fits(src, victim, node, version_epoch):
        src.counts[5], src.counts[6] = node, place
        return STALE
    src.tags[victim], src.stamps[victim] = place, src.counts[2]
    return victim if src.pool.i64[victim, EPOCH] <= epoch else INVISIBLE


@numba.njit(cache=True, nogil=True)
def gather(src, lay, nodes, epoch, vectors, versions):
    """Read the vectors of nodes into ``vectors`` [n, d]; nodes that are not visible leave ``nodes``.

    ``versions`` [n] are set to those that the blocks get if they are written at the epoch.

    Returns the number of nodes that are left, the first of all three arrays; or STALE or DAMAGED.
    """
    count = 0
    for one in range(nodes.shape[0]):
        row = load(src, lay.block_size, nodes[one], epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        vectors[count, :] = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
        versions[count] = src.pool.i64[row, VERSION] + (src.pool.i64[row, EPOCH] != epoch)
        nodes[count] = nodes[one]
        count += 1
    return count


@numba.njit(cache=True, nogil=True)
def codebook_of(src, lay, node, epoch):
    """The id of the codebook of the codes in a node's block; or an error as :func:`load`."""
    row = load(src, lay.block_size, node, epoch)
    return row if row < 0 else np.int64(src.pool.u16[row, CODEBOOK])


@numba.njit(cache=True, nogil=True)
def prefetch(src, block_size, node, epoch):
    """Make the kernel read ahead a block that is not in the cache."""
    if overlay_row(src, node) >= 0:
        return
    place, _ = place_of(src, block_size, node, epoch)
    if place < 0:
        return
    first = hashed(place, src.tags.shape[0] // WAYS) * WAYS
    for way in range(first, first + WAYS):
        if src.tags[way] == place:
            return
    _fadvise(src.fds[place >> FILE_SHIFT], place & _OFFSET, np.int64(block_size), np.int32(_WILLNEED))


@numba.njit(cache=True, nogil=True)
def touch(src, block_size, node, epoch, origin):
    """The overlay's row of a node's block, copied there as a new version if necessary; or an error as :func:`load`."""
    row = overlay_row(src, node)
    if row >= 0:
        return row
    found = load(src, block_size, node, epoch)
    if found < 0:
        return found
    row = new_row(src, node)
    src.pool.u64[row, :] = src.pool.u64[found, :]
    if src.pool.i64[row, EPOCH] != epoch:
        src.pool.i64[row, VERSION] += 1
        src.pool.i64[row, EPOCH] = epoch
        src.pool.i64[row, ORIGIN] = origin
    return row
