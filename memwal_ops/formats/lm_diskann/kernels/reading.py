"""Read blocks of nodes from overlay, cache or file; checks node id and epoch at each access, the checksum at each read.

Compiled code uses blocks in memory as arrays of every type, and the place of each node's block. Field positions are
those of docs/formats/lm-diskann.md in units of the view: word 2 of eight bytes is the epoch. The checksum is XXH3-64,
equal to that of the xxhash package for inputs above 240 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

NODE, ROW, EPOCH, VERSION, ORIGIN, CHECKSUM, OVERFLOW_REFERENCE = range(7)
LINKS, BACKLINKS, CODEBOOK = 28, 29, 30
FLAGS = 62
VECTOR = 16
WAYS = 8
SEARCH_STARTS = 8
"""The number of nearest entry points at which a search, or the insertion of a node, begins."""
NONE = 0xFFFFFFFF
GRAPH, LOG, BASE = 0, 1, 2
FILE_SHIFT = 56
INVISIBLE, STALE, DAMAGED = -1, -2, -3


class Pool(NamedTuple):
    """Blocks in memory, as arrays of every type over the same bytes: [blocks, items]."""

    u8: Any
    u16: Any
    u32: Any
    i64: Any
    u64: Any
    f32: Any


class Source(NamedTuple):
    """The places of blocks. Rows of the pool: the first ``len(tags)`` for the cache, the rest for the overlay.

    Attributes:
        fds: file descriptors of graph, log and base of the view.
        slots: by node id, of the base of the view.
        limits: [0] the epoch of that base.
        heads, node, epoch, place, before: versions that are not in the map: a hash table of the newest
            version per node (index + 1), and for each version its node, epoch, place, and the previous version.
        pool, tags, stamps: the cache: the place of each row's block, and when it was last used.
        overlay: a hash table of the pool's rows that a transaction changed, by node (row + 1).
        counts: [0] versions; [1] overlay rows; [2] clock; [3] blocks requested; [4] blocks read; [5] the node of the
            last failure; [6] its place.
    """

    fds: Any
    slots: Any
    limits: Any
    heads: Any
    node: Any
    epoch: Any
    place: Any
    before: Any
    pool: Pool
    tags: Any
    stamps: Any
    overlay: Any
    counts: Any


class Codebook(NamedTuple):
    """A quantizer: a vector is about ``base`` plus, for each byte b of its code, ``parts[b, code[b]]`` from ``starts[b]``.

    Attributes:
        base: float32 [d].
        starts, widths: int32 [bytes].
        parts: float32 [bytes, 256, widest].
        threshold: float32 [d]; of ternary codebooks: the distance from ``base`` above which a value is not zero; else empty.
    """

    base: Any
    starts: Any
    widths: Any
    parts: Any
    threshold: Any


class Starts(NamedTuple):
    """Entry points.

    Attributes:
        nodes: int64 [n].
        vectors: float32 [n, d].
        most: the number of nearest ones at which a search begins.
    """

    nodes: Any
    vectors: Any
    most: int


class Scratch(NamedTuple):
    """Memory for one beam search: candidates sorted by estimated distance, nodes seen, and nodes visited."""

    node: Any
    distance: Any
    done: Any
    code: Any
    seen: Any
    arena: Any
    v_node: Any
    v_row: Any
    v_distance: Any
    v_dead: Any
    v_code: Any
    v_vector: Any


def pool(rows: int, block_size: int) -> Pool:
    """Allocate memory for blocks; pages that were never written use none."""
    words = np.empty((rows, block_size // 8), np.uint64)
    return Pool(
        words.view(np.uint8), words.view(np.uint16), words.view(np.uint32), words.view(np.int64), words,
        words.view(np.float32),
    )  # fmt: skip


def power(at_least: int) -> int:
    """The smallest power of two that is at least ``at_least``."""
    return 1 << max(0, int(at_least) - 1).bit_length()


def scratch(search_list: int, links: int, code_bytes: int, dimension: int, nodes: int, *, collect: bool) -> Scratch:
    """Allocate memory for a search with a candidate list of that length over that many nodes.

    Args:
        search_list: L.
        links: R_f.
        code_bytes: of one compressed vector.
        dimension: of a vector.
        nodes: the maximum number of nodes that can be seen.
        collect: keep vectors and codes of visited nodes, as an insertion needs them.
    """
    visited = min(8 * search_list + 64, nodes + 1)
    seen = power(2 * min(nodes + 16, 4 * search_list * links + 1024))
    kept = visited if collect else 0
    return Scratch(
        np.empty(search_list + 1, np.int64), np.empty(search_list + 1, np.float32), np.empty(search_list + 1, np.uint8),
        np.empty(search_list + 1, np.int64), np.zeros(seen, np.uint32),
        np.empty((8192 if collect else 0, code_bytes), np.uint8), np.empty(visited, np.int64),
        np.empty(visited, np.int64), np.empty(visited, np.float32), np.empty(visited, np.uint8),
        np.empty(visited, np.int64), np.empty((kept, dimension), np.float32),
    )  # fmt: skip


_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(offset: int) -> np.ndarray:
    return np.frombuffer(_SECRET[offset : offset + 64], "<u8").astype(np.uint64)


_KEYS = np.frombuffer(_SECRET, "<u8").astype(np.uint64)
_SCRAMBLE, _LAST, _MERGE = _words(128), _words(121), _words(11)
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], np.uint64)
_PRIME = np.uint64(_P32_1)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)
_LENGTH_PRIME = np.uint64(_P64_1)
_CHECKSUM_WORD = 5


@numba.njit(cache=True, nogil=True, inline="always")
def _fold(a, b):
    half = np.uint64(32)
    low_a, high_a, low_b, high_b = a & _LOW, a >> half, b & _LOW, b >> half
    low, cross_a, cross_b, high = low_a * low_b, high_a * low_b, low_a * high_b, high_a * high_b
    cross = (low >> half) + (cross_a & _LOW) + cross_b
    upper = (cross_a >> half) + (cross >> half) + high
    lower = (cross << half) | (low & _LOW)
    return upper ^ lower


@intrinsic
def _accumulate(_: Any, words: Any, keys: Any, stripes: Any, acc: Any) -> Any:  # noqa: ARG001 - the values are in the code
    """Add ``stripes`` stripes of 64 bytes to the eight lanes at ``acc``; all but ``stripes`` are addresses.

    As vector instructions, which LLVM does not find in a loop over lanes: a third of the time for a block of 4 KiB.
    """
    return types.void(types.uintp, types.uintp, types.intp, types.uintp), _vector_loop


def _vector_loop(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    words, keys, stripes, acc = arguments
    lanes, number = ir.VectorType(ir.IntType(64), 8), stripes.type

    def at(address: Any) -> Any:
        return builder.inttoptr(address, lanes.as_pointer())

    def read(base: Any, stripe: Any, size: int) -> Any:
        return builder.load(at(builder.add(base, builder.mul(stripe, number(size)))), align=8)

    before, loop, after = builder.block, builder.append_basic_block("stripe"), builder.append_basic_block("after")
    first = builder.load(at(acc), align=8)
    builder.branch(loop)
    builder.position_at_end(loop)
    stripe, products, sums = builder.phi(number), builder.phi(lanes), builder.phi(lanes)
    word = read(words, stripe, 64)
    key = builder.xor(word, read(keys, stripe, 8))
    product = builder.mul(builder.and_(key, lanes([0xFFFFFFFF] * 8)), builder.lshr(key, lanes([32] * 8)))
    steps = ((stripe, number(0), number(1)), (products, first, product), (sums, lanes([0] * 8), word))
    following = [builder.add(phi, more) for phi, _, more in steps]
    for (phi, start, _), value in zip(steps, following, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following[0], stripes), loop, after)
    builder.position_at_end(after)
    neighbours = ir.VectorType(ir.IntType(32), 8)([1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(following[2], following[2], neighbours)
    builder.store(builder.add(following[1], swapped), at(acc), align=8)
    return context.get_dummy_value()


@numba.njit(cache=True, nogil=True)
def block_checksum(words):
    """The checksum of a block given as uint64 [block_size / 8]; its checksum field counts as zero."""
    acc = _START.copy()
    count = words.shape[0]
    full = (count * 8 - 1) // 1024
    key = _KEYS[_CHECKSUM_WORD]
    acc[_CHECKSUM_WORD ^ 1] -= words[_CHECKSUM_WORD]
    keyed = words[_CHECKSUM_WORD] ^ key
    acc[_CHECKSUM_WORD] += (key & _LOW) * (key >> np.uint64(32)) - (keyed & _LOW) * (keyed >> np.uint64(32))
    for block in range(full + 1):
        stripes = 16 if block < full else (count * 8 - 1 - 1024 * full) // 64
        start = np.uintp(words.ctypes.data) + np.uintp(1024 * block)
        _accumulate(start, np.uintp(_KEYS.ctypes.data), stripes, np.uintp(acc.ctypes.data))
        if block < full:
            for lane in range(8):
                mixed = acc[lane] ^ (acc[lane] >> np.uint64(47)) ^ _SCRAMBLE[lane]
                acc[lane] = mixed * _PRIME
    at = count - 8
    for lane in range(8):
        word = words[at + lane]
        key = word ^ _LAST[lane]
        acc[lane ^ 1] += word
        acc[lane] += (key & _LOW) * (key >> np.uint64(32))
    result = np.uint64(count * 8) * _LENGTH_PRIME
    for pair in range(4):
        result += _fold(acc[2 * pair] ^ _MERGE[2 * pair], acc[2 * pair + 1] ^ _MERGE[2 * pair + 1])
    result ^= result >> np.uint64(37)
    result *= _AVALANCHE
    return result ^ (result >> np.uint64(32))


@numba.njit(cache=True, nogil=True)
def seal(words, first, last):
    """Write the checksums of the blocks ``first`` to ``last - 1`` of an array uint64 [n, block_size / 8]."""
    for row in range(first, last):
        words[row, _CHECKSUM_WORD] = block_checksum(words[row])


@numba.njit(cache=True, nogil=True)
def intact(words):
    """Whether the checksum of each block of an array uint64 [n, block_size / 8] is right: bool [n]."""
    right = np.empty(words.shape[0], np.bool_)
    for row in range(words.shape[0]):
        right[row] = words[row, _CHECKSUM_WORD] == block_checksum(words[row])
    return right


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
    for item in range(nodes.shape[0]):
        node, epoch = np.int64(nodes[item]), np.int64(epochs[item])
        newest = version_of(src, node)
        index = newest
        while index >= 0 and src.epoch[index] > epoch:
            index = src.before[index]
        if index >= 0 and src.epoch[index] == epoch:
            src.place[index] = places[item]
            continue
        if index != newest:
            continue  # older than the existing one, and superseded
        index = src.counts[0]
        src.counts[0] += 1
        src.node[index], src.epoch[index], src.place[index], src.before[index] = node, epoch, places[item], newest
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
    block_epoch = src.pool.i64[row, EPOCH]
    expected = block_epoch == version_epoch if version_epoch >= 0 else block_epoch <= src.limits[0]
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
    for index in range(nodes.shape[0]):
        row = load(src, lay.block_size, nodes[index], epoch)
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        vectors[count, :] = src.pool.f32[row, VECTOR : VECTOR + lay.dimension]
        versions[count] = src.pool.i64[row, VERSION] + (src.pool.i64[row, EPOCH] != epoch)
        nodes[count] = nodes[index]
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
    old = load(src, block_size, node, epoch)
    if old < 0:
        return old
    row = new_row(src, node)
    src.pool.u64[row, :] = src.pool.u64[old, :]
    if src.pool.i64[row, EPOCH] != epoch:
        src.pool.i64[row, VERSION] += 1
        src.pool.i64[row, EPOCH] = epoch
        src.pool.i64[row, ORIGIN] = origin
    return row
