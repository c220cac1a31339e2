"""Change the graph: insert rows, build it anew, heal it around deleted nodes, and rewire the nodes of the heal list.

The graph is built, and its codebook trained, at first, if most rows are new, and if the codebook is stale. Vectors,
links and codes of all live nodes are in memory meanwhile: about 4 d + 6 R + 64 bytes per node. The blocks are written
in chunks into slots that no reader uses.

A deletion only sets a flag: searches still pass through the node, since its neighbours need it. Healing removes it
from the graph: the nodes that link to it get links to its neighbours instead, and its neighbours drop its backlink.
After that commit no search finds it, and the sweep list has it as ``healed``; gc frees its slot once no reader
and no hold needs an older epoch. If a run is killed before the commit, nothing has changed.

Deleted nodes that are near each other are in one batch, since they share neighbours: a neighbour is rewritten, and
pruned, once for all deletions of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.formats.lm_diskann import merging
from memwal_ops.formats.lm_diskann.kernels import healing, inserting
from memwal_ops.formats.lm_diskann.kernels.distances import encode_many, of_built
from memwal_ops.formats.lm_diskann.kernels.reading import gather, pool, scratch, seal
from memwal_ops.formats.lm_diskann.vectors import entry_points, train
from memwal_ops.formats.lm_diskann.wire import U8, Parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.files import Step
    from memwal_ops.formats.lm_diskann.store import Store
    from memwal_ops.formats.lm_diskann.transaction import Transaction
    from memwal_ops.formats.lm_diskann.view import View


TRAIN_AT = 1024
"""From that many rows on a graph has a codebook, and a build trains it on them."""
_FEW, _ROWS, _COARSE = 64, 1024, 32


def insert(staged: Transaction, row_ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
    """Add rows; an existing one is replaced: its node becomes a tombstone, and the row gets a new one.

    Raises ``IdsExhaustedError``: no node ids are left.
    """
    staged.delete(row_ids)
    live = staged.live
    # In particular for an empty graph: its entry points are deleted, perhaps healed, and so are their links.
    anew = len(row_ids) >= live if staged.codebook_id else live + len(row_ids) >= TRAIN_AT
    if staged.codebook_id and not anew:
        order = _near_each_other(staged.starts().vectors, vectors)
        row_ids, vectors = row_ids[order], vectors[order]
    nodes = staged.allocate(row_ids)
    if anew:
        build(staged, nodes, row_ids, vectors)
    elif not staged.codebook_id:
        staged.reserve(len(row_ids))
        layout = staged.parameters.layout
        inserting.write_nodes(staged.view.source, layout, nodes, row_ids, vectors, staged.epoch, staged.origin, 0)
    else:
        staged.link(nodes, row_ids, vectors)


def _near_each_other(entries: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    """An order in which rows near each other follow each other: they change the same blocks, which stay in memory.

    By the entry point nearest to each, and those by the nearest of a few of them.
    """
    if len(vectors) < _FEW or not len(entries):
        return np.arange(len(vectors))
    coarse = _nearest(entries[: max(1, len(entries) // _COARSE)], entries)
    nearest = _nearest(entries, vectors)
    return np.lexsort((nearest, coarse[nearest]))


def _nearest(points: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    norms = (points**2).sum(1)
    parts = np.array_split(vectors, max(1, -(-len(vectors) // _ROWS)))
    return np.concatenate([np.argmin(norms - 2 * (part @ points.T), axis=1) for part in parts])


# -- building

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
        staged.use_codebook(train(parameters, vectors))
    random = np.random.default_rng(len(nodes))
    order, entries = _order(vectors, random)
    links, degrees = _graph(staged, vectors, order, vectors[order[: len(entries)]])
    starts = np.zeros(len(nodes) + 1, np.int64)
    referrers = np.empty(int(degrees.sum()), np.int32)
    inserting.transpose(links, degrees, starts, referrers)
    codes = np.empty((len(nodes), parameters.code_bytes), np.uint8)
    encode_many(staged.view.book, vectors, codes)
    staged.keep_only_tombstones()
    slots = staged.slots.take(len(nodes))
    layout = parameters.layout
    room = pool(min(_CHUNK, len(nodes)), layout.block_size)
    for first in range(0, len(nodes), _CHUNK):
        count = min(_CHUNK, len(nodes) - first)
        inserting.write_blocks(
            room, layout, first, count, nodes, rows, versions, vectors, codes, links, degrees, starts, referrers,
            staged.epoch, staged.origin, staged.codebook_id,
        )  # fmt: skip
        seal(room.u64, 0, count)
        staged.write(slots[first : first + count], room.u8[:count])
    staged.move(nodes, slots)
    many = np.flatnonzero(np.diff(starts) > layout.backlinks)
    backs = ((target, nodes[referrers[starts[target] : starts[target + 1]]]) for target in many)
    pairs = [np.stack([np.full_like(back, nodes[target]), back], 1) for target, back in backs]
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
    inserting.spread(vectors, order[: _ENTRY_SAMPLE * count], count // 2, count)
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
        inserting.link_all(
            vectors, order, starts, first, last, most, parameters.search_list, alpha, links, degrees, stamps
        )
    inserting.finish(vectors, int(order[0]), of_built(most), alpha, links, degrees)
    return links, degrees


# -- healing

BATCH = 500
"""Deleted nodes per commit. A commit writes about R times as many blocks before it frees the old ones."""
_WINDOW = 16_384
_HEAL = "node_id < (SELECT next_node_id FROM lmd_metadata)"  # verify reports any other
_TOMBSTONED = f"reason = 'tombstoned' AND {_HEAL}"


@dataclass(frozen=True)
class HealedBatch:
    """The result of one commit: deleted nodes healed, nodes rewired, blocks rewritten, and the epoch."""

    healed: int
    rewired: int
    pruned: int
    epoch: int


@dataclass(frozen=True)
class Around:
    """Deleted nodes, ascending, with their vectors, and their neighbours in both directions, in the order of these."""

    nodes: NDArray[np.int64]
    vectors: NDArray[np.float32]
    targets: NDArray[np.int64]
    referrers: NDArray[np.int64]


def pending(store: Store) -> tuple[int, int]:
    """The numbers of deleted nodes to be healed, and of other nodes to be rewired."""
    [swept] = store.columns(f"SELECT count(*) FROM lmd_sweep_list WHERE {_TOMBSTONED}")
    [listed] = store.columns(f"SELECT count(*) FROM lmd_heal_list WHERE {_HEAL}")
    return int(swept[0]), int(listed[0])


def heal(index: merging.Writable, batch: int, step: Step) -> Iterator[HealedBatch]:
    """Heal and rewire all pending nodes; each batch is committed and published when it is yielded."""
    store = index.writable()
    after = -1
    while True:
        window = _listed(store, "lmd_sweep_list", _TOMBSTONED, after, _WINDOW)
        if not len(window):
            break
        after = int(window[-1])
        for group in _near(index, window, batch):
            merging.raise_horizon(index, step)
            with index.staged() as staged:
                pruned, rewired = sweep(staged, group)
            yield HealedBatch(len(group), rewired, pruned, index.epoch)
    after = -1
    while True:
        listed = _listed(store, "lmd_heal_list", _HEAL, after, batch)
        if not len(listed):
            return
        after = int(listed[-1])
        merging.raise_horizon(index, step)
        with index.staged() as staged:
            relink(staged, listed)
            staged.rewired = listed
        yield HealedBatch(0, len(listed), 0, index.epoch)


def build_again(index: merging.Writable, step: Step) -> HealedBatch:
    """Build the graph anew, with a codebook trained on the rows that it has now: one commit, which heals everything."""
    [waiting] = index.writable().columns("SELECT DISTINCT node_id FROM lmd_heal_list")
    merging.raise_horizon(index, step)
    with index.staged() as staged:
        rows = build_anew(staged)
        healed, staged.rewired = len(staged.healed), waiting.astype(np.int64)
    return HealedBatch(healed, rows, 0, index.epoch)


def _listed(store: Store, table: str, where: str, after: int, most: int) -> NDArray[np.int64]:
    [nodes] = store.columns(
        f"SELECT DISTINCT node_id FROM {table} WHERE {where} AND node_id >= {after + 1} ORDER BY node_id LIMIT {most}"
    )
    return nodes.astype(np.int64)


def _near(index: merging.Writable, nodes: NDArray[np.int64], batch: int) -> Iterator[NDArray[np.int64]]:
    """Groups of at most ``batch`` nodes, each group near one of some random nodes."""
    if len(nodes) <= batch:
        yield nodes
        return
    vectors = around(index.view, index.writable(), nodes, index.epoch).vectors
    pivots = vectors[np.random.default_rng(len(nodes)).choice(len(nodes), -(-len(nodes) // batch), replace=False)]
    nearest = np.empty(len(nodes), np.int64)
    for first in range(0, len(nodes), 1024):
        part = vectors[first : first + 1024]
        nearest[first : first + 1024] = np.argmin((pivots**2).sum(1) - 2 * (part @ pivots.T), axis=1)
    # Groups of unequal size are cut, and small ones joined: in the order of their pivots.
    order = np.argsort(nearest, kind="stable")
    for first in range(0, len(nodes), batch):
        yield np.sort(nodes[order[first : first + batch]])


def around(view: View, store: Store, nodes: NDArray[np.int64], epoch: int) -> Around:
    """The vectors of nodes (ascending), and the nodes to which they link or which their blocks have as backlinks."""
    layout = view.parameters.layout
    count = len(nodes)
    targets = np.full((count, layout.links), -1, np.int64)
    referrers = np.full((count, layout.backlinks), -1, np.int64)
    overflowed, vectors = np.zeros(count, np.uint8), np.zeros((count, layout.dimension), np.float32)
    if healing.neighbours(view.source, layout, nodes, epoch, targets, referrers, overflowed, vectors) < 0:
        raise view.fail()
    [more] = store.columns(
        "SELECT DISTINCT referrer_node_id FROM lmd_backlink_overflow "
        "WHERE target_node_id IN (SELECT id FROM many)", many=nodes[overflowed != 0].astype(U8),
    )  # fmt: skip
    return Around(nodes, vectors, _ids(targets), _ids(np.concatenate([referrers.ravel(), more.astype(np.int64)])))


def _ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    nodes, first = np.unique(ids[ids >= 0], return_index=True)
    return nodes[np.argsort(first)]


def sweep(staged: Transaction, gone: NDArray[np.int64]) -> tuple[int, int]:
    """Remove deleted nodes (ascending) from the graph. Returns the numbers of pruned and of rewired nodes."""
    view, layout = staged.view, staged.parameters.layout
    near = around(view, staged.store, gone, staged.epoch)
    _forget(staged, near.targets, gone)
    dead = np.union1d(view.dead, gone)

    def step(at: int, events: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
        result: int = healing.reconnect(
            view.source, layout, view.book, near.referrers, gone, dead, staged.epoch, staged.origin, at, events, counts,
        )  # fmt: skip
        return result

    pruned = _in_parts(staged, len(near.referrers), step)
    staged.healed = np.union1d(staged.healed, gone)
    left = np.setdiff1d(near.targets, dead)
    alone = np.zeros(len(left), np.uint8)
    staged.check(healing.lonely(view.source, layout, left, staged.epoch, alone))
    return pruned, relink(staged, left[alone != 0])


def relink(staged: Transaction, nodes: NDArray[np.int64]) -> int:
    """Search the neighbours of live nodes again, and link them in both directions. Returns how many there were."""
    if not len(nodes) or not staged.codebook_id:
        return 0
    p, view = staged.parameters, staged.view
    room = scratch(p.search_list, p.links, p.code_bytes, p.dimension, staged.next_node, collect=True)

    def step(at: int, events: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
        result: int = healing.rewire(
            view.source, p.layout, room, view.book, nodes, staged.epoch, staged.origin, np.float32(p.alpha**2),
            p.search_list, staged.starts(), at, events, counts,
        )  # fmt: skip
        return result

    return _in_parts(staged, len(nodes), step)


def link_unreached(staged: Transaction) -> int:
    """Link every live node to which no path leads from a reached one. Returns how many remain: no node has a place."""
    p, view = staged.parameters, staged.view
    count, entries = staged.next_node, staged.entries_now()
    parents, queue = np.empty(count, np.int64), np.empty(count, np.int64)
    reached = int(healing.reach(view.source, p.layout, entries, staged.epoch, parents, queue))
    staged.check(reached)
    live, _ = staged.live_nodes()
    lost = live[parents[live] < healing.ROOT]
    room = scratch(p.search_list, p.links, p.code_bytes, p.dimension, count, collect=False)

    def step(at: int, events: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
        nonlocal reached
        counts[2] = reached
        result: int = healing.attach(
            view.source, p.layout, room, view.book, lost, parents, queue, staged.epoch, staged.origin, p.search_list,
            staged.starts(), at, events, counts,
        )  # fmt: skip
        reached = int(counts[2])
        return result

    _in_parts(staged, len(lost), step)
    return int((parents[lost] < healing.ROOT).sum())


def _in_parts(staged: Transaction, count: int, step: Callable[[int, Any, Any], int]) -> int:
    """Run compiled code for all nodes, with space in the overlay; returns the number of those that it changed."""
    p = staged.parameters
    worst = p.links * (p.links + 4) + 2
    events = np.empty((worst + (p.backlinks + 3) * 3 * p.links + 65536, 3), np.int64)
    counts, at = np.zeros(3, np.int64), 0
    while at < count:
        staged.reserve(worst)
        counts[:2] = 0
        staged.check(step(at, events, counts))
        staged.note(events[: counts[0]])
        at = int(counts[1])
    return int(counts[2])


def _forget(staged: Transaction, targets: NDArray[np.int64], gone: NDArray[np.int64]) -> None:
    at = 0
    while at < len(targets):
        staged.reserve(1)
        at = healing.forget(
            staged.view.source, staged.parameters.layout, targets, gone, staged.epoch, staged.origin, at
        )
        staged.check(at)
    live = np.setdiff1d(targets, staged.view.dead)
    pairs = staged.store.columns(
        "SELECT target_node_id, referrer_node_id FROM lmd_backlink_overflow WHERE target_node_id IN "
        "(SELECT id FROM live) AND referrer_node_id IN (SELECT id FROM gone)", live=live.astype(U8),
        gone=gone.astype(U8),
    )  # fmt: skip
    staged.note(np.stack([*pairs, np.full(len(pairs[0]), -1)], axis=1).astype(np.int64))
