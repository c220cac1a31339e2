"""The arrays that compiled code uses: blocks in memory as arrays of every type, and the place of each node's block.

Field positions are those of docs/formats/lm-diskann.md in units of the view: word 2 of eight bytes is the epoch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
