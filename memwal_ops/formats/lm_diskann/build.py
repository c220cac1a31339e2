"""Build the whole graph and train its codebook: at first, if most rows are new, and if the codebook is stale.

Vectors, links and codes of all live nodes are in memory meanwhile: about 4 d + 6 R + 64 bytes per node. The blocks
are written in chunks into slots that no reader uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.formats.lm_diskann import codebook
from memwal_ops.formats.lm_diskann.entry_points import entry_points
from memwal_ops.formats.lm_diskann.kernels.building import finish, link_all, spread, transpose, write_blocks
from memwal_ops.formats.lm_diskann.kernels.checksum import seal
from memwal_ops.formats.lm_diskann.kernels.distances import encode_many
from memwal_ops.formats.lm_diskann.kernels.memory import pool
from memwal_ops.formats.lm_diskann.kernels.pruning import of_built
from memwal_ops.formats.lm_diskann.kernels.reading import gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.transaction import Transaction
    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters

TRAIN_AT = 1024
"""From that many rows on a graph has a codebook, and a build trains it on them."""
_CHUNK = 2048
_MEDOID_SAMPLE = 10_000
_OWN_BYTES = 64
_ENTRY_SAMPLE = 4


def build(
    staged: Transaction, new: NDArray[np.int64], new_rows: NDArray[np.int64], new_vectors: NDArray[np.float32]
) -> None:
    """Write a graph of all live nodes; the last of them are ``new`` and have no block yet."""
    parameters = staged.parameters
    nodes, rows = staged.live_nodes()
    old = len(nodes) - len(new)
    vectors = np.empty((len(nodes), parameters.dimension), np.float32)
    versions = np.ones(len(nodes), np.int64)
    if gather(staged.view.source, parameters.layout, nodes[:old], staged.epoch, vectors, versions) < old:
        raise staged.view.fail()
    vectors[old:] = new_vectors
    rows[old:] = new_rows
    if len(nodes) >= TRAIN_AT:
        staged.use_codebook(codebook.train(parameters, vectors))
    random = np.random.default_rng(len(nodes))
    order, entries = _order(vectors, random)
    links, degrees = _graph(staged, vectors, order, vectors[order[: len(entries)]])
    starts = np.zeros(len(nodes) + 1, np.int64)
    referrers = np.empty(int(degrees.sum()), np.int32)
    transpose(links, degrees, starts, referrers)
    codes = np.empty((len(nodes), parameters.code_bytes), np.uint8)
    encode_many(staged.view.book, vectors, codes)
    staged.keep_only_tombstones()
    slots = staged.slots.take(len(nodes))
    layout = parameters.layout
    room = pool(min(_CHUNK, len(nodes)), layout.block_size)
    for first in range(0, len(nodes), _CHUNK):
        count = min(_CHUNK, len(nodes) - first)
        write_blocks(
            room, layout, first, count, nodes, rows, versions, vectors, codes, links, degrees, starts, referrers,
            staged.epoch, staged.origin, staged.codebook_id,
        )  # fmt: skip
        seal(room.u64, 0, count)
        staged.write(slots[first : first + count], room.u8[:count])
    staged.move(nodes, slots)
    many = np.flatnonzero(np.diff(starts) > layout.backlinks)
    pairs = [
        np.stack(
            [np.full(starts[one + 1] - starts[one], nodes[one]), nodes[referrers[starts[one] : starts[one + 1]]]], 1
        )
        for one in many
    ]
    staged.reset_overflow(nodes[:old], np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64))
    staged.entries = nodes[entries]
    # No path of this graph leads to a deleted node, and no block has a backlink from one.
    staged.healed = np.union1d(staged.healed, staged.unhealed())


def build_anew(staged: Transaction) -> int:
    """Write the graph of the live nodes again, with a codebook trained on them. Returns their number."""
    none = np.zeros(0, np.int64)
    build(staged, none, none, np.zeros((0, staged.parameters.dimension), np.float32))
    return staged.live


def memory_of(parameters: Parameters, live: int) -> int:
    """About how many bytes a build of that many rows takes."""
    return live * (4 * parameters.dimension + 6 * parameters.links + _OWN_BYTES)


def _order(vectors: NDArray[np.float32], random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A random order that starts with an approximate medoid, and the entry points: its first nodes.

    Half of the entry points are random, and the others are far from all before them: each cluster has one.
    """
    order = random.permutation(len(vectors)).astype(np.int64)
    sample = order[:_MEDOID_SAMPLE]
    medoid = int(sample[np.argmin(((vectors[sample] - vectors[sample].mean(0)) ** 2).sum(1))])
    at = int(np.flatnonzero(order == medoid)[0])
    order[0], order[at] = medoid, order[0]
    count = entry_points(len(order))
    spread(vectors, order[: _ENTRY_SAMPLE * count], count // 2, count)
    return order, order[:count].copy()


def _graph(
    staged: Transaction, vectors: NDArray[np.float32], order: NDArray[np.int64], starts: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    parameters = staged.parameters
    count, most = len(vectors), parameters.links
    links = np.empty((count, most + most // 3 + 1), np.int32)
    degrees, stamps = np.zeros(count, np.int32), np.zeros(count, np.int32)
    alpha = np.float32(parameters.alpha**2)
    for first in range(0, count, 10_000):  # signals are handled between chunks
        last = min(count, first + 10_000)
        link_all(vectors, order, starts, first, last, most, parameters.search_list, alpha, links, degrees, stamps)
    finish(vectors, int(order[0]), of_built(most), alpha, links, degrees)
    return links, degrees
