"""Reclaim deleted nodes: prove that no path leads to them, free their slots, and truncate the graph.

A node is deletable if no epoch from before its neighbours were healed is retained, and no block of a node that searches
can reach links to it. Then no readable epoch has a path to it. Its slot is put on the free list, and is reused once no
reader is at an epoch below that commit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.formats.lm_diskann import publishing
from memwal_ops.formats.lm_diskann.changes import U8, Changes
from memwal_ops.formats.lm_diskann.files import GRAPH, sync
from memwal_ops.formats.lm_diskann.healing import around
from memwal_ops.formats.lm_diskann.kernels.healing import linked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.files import Step
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.store import Store
    from memwal_ops.formats.lm_diskann.view import View


@dataclass(frozen=True)
class Tombstone:
    """A deleted node, with the properties that determine whether it is deletable.

    Attributes:
        node: its id.
        healed: the epoch from which on no path leads to it; None: it is not healed yet.
        unmerged: whether the delta table has a version of it.
        linked: whether a node that searches can reach links to it.
        entry: whether a retained epoch begins its searches there.
    """

    node: int
    healed: int | None
    unmerged: bool
    linked: bool
    entry: bool


def tombstones(store: Store, after: int, most: int) -> NDArray[np.int64]:
    """The next deleted nodes above ``after``, ascending."""
    [found] = store.columns(
        f"SELECT DISTINCT node_id FROM lmd_sweep_list WHERE node_id BETWEEN {after + 1} AND "
        f"{store.state.next_node_id - 1} ORDER BY node_id LIMIT {most}"
    )
    return found.astype(np.int64)


def read_tombstones(view: View, store: Store, nodes: NDArray[np.int64]) -> list[Tombstone]:
    """Deleted nodes (ascending), from the store and the blocks of nodes that linked to them."""
    ids = nodes.astype(U8)
    wanted = "node_id IN (SELECT id FROM wanted)"
    swept, epochs = store.columns(
        f"SELECT node_id, max(since_epoch) FROM lmd_sweep_list WHERE reason = 'healed' AND {wanted} GROUP BY 1",
        wanted=ids,
    )
    healed = dict(zip(swept.tolist(), epochs.tolist(), strict=True))
    [unmerged] = store.columns(f"SELECT DISTINCT node_id FROM lmd_delta_blocks WHERE {wanted}", wanted=ids)
    [entries] = store.columns(
        f"SELECT DISTINCT node_id FROM lmd_entry_points WHERE {wanted} AND (removed_epoch IS NULL OR removed_epoch > "
        "(SELECT retained_from FROM lmd_metadata))", wanted=ids,
    )  # fmt: skip
    referrers = around(view, store, nodes, view.epoch).referrers.astype(U8)
    [unreachable] = store.columns(
        "SELECT node_id FROM lmd_sweep_list WHERE reason = 'healed' AND node_id IN (SELECT id FROM wanted)",
        wanted=referrers,
    )
    marks = np.zeros(len(nodes), np.uint8)
    reachable = np.setdiff1d(referrers, unreachable).astype(np.int64)
    if linked(view.source, view.parameters.layout, reachable, nodes, view.epoch, marks) < 0:
        raise view.fail()
    first, kept = {*unmerged.tolist()}, {*entries.tolist()}
    return [
        Tombstone(node, healed.get(node), node in first, bool(mark), node in kept)
        for node, mark in zip(nodes.tolist(), marks.tolist(), strict=True)
    ]


def reclaim(index: Index, nodes: NDArray[np.int64], step: Step) -> None:
    """Remove deleted nodes that were proven to be needed by nothing: one commit, and its frame."""
    store = index.writable()
    ids = nodes.astype(U8)
    epoch = store.state.epoch + 1
    retired = store.columns(
        f"SELECT slot, node_id, from_epoch, {epoch}::UBIGINT FROM lmd_slots WHERE node_id IN (SELECT id FROM wanted)",
        wanted=ids,
    )
    state = replace(store.state, epoch=epoch, healed=store.state.healed - len(nodes))
    commit(index, Changes(state, retired=np.stack(retired, axis=1).astype(U8), reclaimed=ids), step)


def tail(store: Store, folder: str, size: int, horizon: int) -> tuple[int, int]:
    """The number of slots to which the graph can be truncated, and the bytes beyond them."""
    descending = store.free_slots(horizon)[::-1]
    count = store.state.slot_count
    is_tail = descending == count - 1 - np.arange(len(descending))
    kept = count - (len(descending) if is_tail.all() else int(np.argmin(is_tail)))
    return kept, max(0, os.path.getsize(os.path.join(folder, GRAPH)) - kept * size)


def trim(index: Index, horizon: int, step: Step) -> int:
    """Truncate free slots, and blocks of killed runs, at the end of the graph. Returns the bytes.

    The slots are removed from the store first: if the run is killed in between, the file is longer than the store
    needs, as after a killed merge.
    """
    store, size = index.writable(), index.parameters.layout.block_size
    kept, beyond = tail(store, index.folder, size, horizon)
    if kept < store.state.slot_count:
        state = replace(store.state, epoch=store.state.epoch + 1, slot_count=kept)
        commit(index, Changes(state, taken=np.arange(kept, store.state.slot_count).astype(U8)), step)
    if beyond:
        # Otherwise, after a crash of the machine, an older view could refer to truncated blocks.
        publishing.settle(index.view, step)
        step("trim the graph", partial(_truncate, os.path.join(index.folder, GRAPH), kept * size))
    return beyond


def commit(index: Index, changes: Changes, step: Step) -> None:
    """Commit to the store, and publish the commit."""
    store = index.writable()
    step("commit to the store", lambda: store.commit(changes))
    publishing.append(index.view, changes, step)
    index.view.refresh()


def _truncate(path: str, length: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(file, length)
        sync(file)
    finally:
        os.close(file)
