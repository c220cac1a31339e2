"""Merge delta blocks into the graph in batches, one commit per batch.

The order of a batch makes it safe. The blocks are written into slots that no reader uses, and synced; then one
commit of the store updates the slot map, retires the old slots and deletes exactly the merged versions; then the view
is published. If a run is killed before the commit, nothing has changed; after it, the next run publishes the view.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lm_diskann import publishing
from memwal_ops.formats.lm_diskann.errors import NOT_COPIED, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import GRAPH, Step, needed_from, open_file, sync
from memwal_ops.formats.lm_diskann.kernels.reading import intact
from memwal_ops.formats.lm_diskann.store import Slots, Store
from memwal_ops.formats.lm_diskann.transaction import Transaction, write_runs
from memwal_ops.formats.lm_diskann.wire import U8, Changes, Parameters, headers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.view import View


BATCH = 64 << 20
_MAX_SUPERSEDED_BYTES = 16 << 20
_LARGE_SHARE = 4


@dataclass(frozen=True)
class Bad:
    """A node that cannot be merged, and the reason."""

    node: int
    why: str


@dataclass(frozen=True)
class MergedBatch:
    """The result of one commit: number of versions, their bytes, and the epoch."""

    versions: int
    bytes: int
    epoch: int


def missing_blocks(store: Store) -> list[Bad]:
    """Live rows whose nodes have a block neither in the delta table nor in the graph."""
    rows, nodes = store.columns(
        "SELECT row_id, node_id FROM lmd_lookup WHERE removed_epoch IS NULL AND node_id NOT IN (SELECT node_id FROM "
        "lmd_slots) AND node_id NOT IN (SELECT node_id FROM lmd_delta_blocks) ORDER BY node_id"
    )
    return [Bad(node, f"row {row} has no block") for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]


class Writable(Protocol):
    """An index folder that is open for writing."""

    @property
    def folder(self) -> str:
        """Its path."""

    @property
    def parameters(self) -> Parameters:
        """Its parameters."""

    @property
    def view(self) -> View:
        """Its published view."""

    @property
    def epoch(self) -> int:
        """Its newest epoch."""

    def writable(self) -> Store:
        """Its store."""

    def staged(self) -> AbstractContextManager[Transaction]:
        """A transaction that is committed and published at the end of the block."""


def merge(index: Writable, max_bytes: int, step: Step, bad: dict[int, Bad]) -> Iterator[MergedBatch]:
    """Merge the whole backlog, ascending by node; each batch is committed and published when it is yielded.

    Args:
        index: writable, without an open transaction.
        max_bytes: of delta blocks in a batch, which is about the memory that is used.
        step: performs durable steps.
        bad: damaged nodes are added; they stay in the delta table.
    """
    store, view = index.writable(), index.view
    [waiting] = store.columns("SELECT node_id FROM lmd_delta_blocks LIMIT 1")
    if not len(waiting):
        return
    horizon = raise_horizon(index, step)
    after = -1
    size = index.parameters.layout.block_size
    while True:
        batch = _read(store, size, max_bytes, after, horizon, bad)
        if batch is None:
            break
        after, nodes, epochs, versions, followed, blocks = batch
        written = len(nodes)
        if len(versions):
            changes = _changes(store, nodes, epochs, versions, followed, horizon)
            if written:
                publishing.settle(view, step)
                write_blocks(index.folder, size, changes.moved_slots.astype(np.int64), blocks, step)
            final = _only_newest(changes, followed)
            step("commit the merge to the store", partial(store.commit, final))
            publishing.append(view, replace(final, moved_nodes=changes.moved_nodes, moved_epochs=changes.moved_epochs,
                                            moved_slots=changes.moved_slots), step)  # fmt: skip
            view.refresh()
            yield MergedBatch(len(versions), len(versions) * size, final.state.epoch)


def finish(index: Writable, step: Step) -> None:
    """Publish a base without a log, and delete the views before the previous one."""
    number = publishing.publish(index.folder, index.parameters, index.writable(), step)
    publishing.drop_older(index.folder, index.parameters, number - 1, step)
    index.view.refresh()


def finish_large(index: Writable, moved: int, step: Step) -> None:
    """:func:`finish` after a commit that moved a large share of the nodes.

    In a base, a node needs 16 bytes of every reader's memory, in the log 100. The commit is already published: if there
    is no space for a base, a later commit writes it.
    """
    if moved > max(index.view.state.next_node_id // _LARGE_SHARE, index.view.delta_blocks):
        with suppress(MemwalOpsError):
            finish(index, step)


def raise_horizon(index: Writable, step: Step) -> int:
    """Return the epoch up to which freed slots may be reused, and superseded versions dropped.

    It is raised first if there are freed slots or healed nodes, or if superseded versions would need much space in the
    graph.

    Timeline of what this prevents: a merge finds no reader; one announces epoch 5 and reads the view; the merge reuses
    a slot that was freed at 7; the reader at 5 finds another node there. So the merge first publishes that epochs below
    9 are not retained, and checks for readers again: earlier readers are found, later ones read the new epoch.
    """
    store = index.writable()
    needed = needed_from(index.folder, store.state.epoch)
    between = f"BETWEEN {store.state.retained_from + 1} AND {needed}"
    freed, superseded = store.columns(
        f"SELECT (SELECT count(*) FROM lmd_free_nodes WHERE freed_epoch {between}) + "
        f"(SELECT count(*) FROM lmd_sweep_list WHERE reason = 'healed' AND since_epoch {between}), "
        "(SELECT coalesce(sum(n - 1), 0) "
        f"FROM (SELECT count(*) AS n FROM lmd_delta_blocks WHERE commit_epoch {between} GROUP BY node_id))::UBIGINT"
    )
    if int(freed[0]) or int(superseded[0]) * index.parameters.layout.block_size > _MAX_SUPERSEDED_BYTES:
        give_up(index, needed, step)
    return min(store.state.retained_from, needed_from(index.folder, store.state.epoch))


def give_up(index: Writable, epoch: int, step: Step) -> None:
    """Stop retaining the epochs below ``epoch``."""
    commit(index, Changes(index.writable().raise_retained(epoch)), step)


def commit(index: Writable, changes: Changes, step: Step) -> None:
    """Commit to the store, and publish the commit."""
    store = index.writable()
    step("commit to the store", lambda: store.commit(changes))
    publishing.append(index.view, changes, step)
    index.view.refresh()


def _read(
    store: Store, size: int, max_bytes: int, after: int, horizon: int, bad: dict[int, Bad]
) -> tuple[Any, ...] | None:
    """The next batch: its last node; node and epoch of versions to write; [n, 2] of all merged; the next epoch of each.

    None at the end. A version that was superseded at the horizon or before is merged by dropping it, unread.
    """
    most = max(1, max_bytes // size)
    [wanted] = store.columns(
        f"SELECT DISTINCT node_id FROM lmd_delta_blocks WHERE node_id >= {after + 1} ORDER BY node_id LIMIT {most}"
    )
    if not len(wanted):
        return None
    nodes, versions, epochs, sums, places = store.columns(
        "SELECT node_id, version, commit_epoch, checksum, rowid FROM lmd_delta_blocks "
        "WHERE node_id IN (SELECT id FROM wanted) ORDER BY node_id, commit_epoch", wanted=wanted,
    )  # fmt: skip
    slotted, from_epoch = store.columns(
        "SELECT node_id, from_epoch FROM lmd_slots WHERE node_id IN (SELECT id FROM wanted)", wanted=wanted
    )
    follows = _followers(nodes, epochs, slotted, from_epoch)
    needed = np.flatnonzero(follows > horizon)
    # Sorted here: DuckDB would sort the blocks themselves.
    [places_read], blocks, fits = store.blocks(
        "SELECT rowid, data FROM lmd_delta_blocks WHERE rowid IN (SELECT id FROM chosen)", size, chosen=places[needed]
    )
    order = np.argsort(places_read)
    rows = order[np.searchsorted(places_read[order], places[needed])]
    at = np.empty_like(needed)
    at[rows] = needed
    for row, why in _damage(blocks, fits, nodes[at], versions[at], epochs[at], sums[at]):
        bad[int(nodes[at[row]])] = Bad(int(nodes[at[row]]), why)
    good = ~np.isin(nodes, np.array([*bad], U8))
    written = needed[good[needed]]
    merged = np.stack([nodes[good], versions[good]], axis=1)
    return int(wanted[-1]), nodes[written], epochs[written], merged, follows[written], blocks[rows[good[needed]]]


_NOT_YET = np.iinfo(np.uint64).max


def _followers(
    nodes: NDArray[np.uint64], epochs: NDArray[np.uint64], slotted: NDArray[np.uint64], from_epoch: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The epoch of the next version of each delta version, in the delta table or the graph; the highest value: none."""
    all_nodes, all_epochs = np.concatenate([nodes, slotted]), np.concatenate([epochs, from_epoch])
    order = np.lexsort((all_epochs, all_nodes))
    after = np.full(len(order), _NOT_YET, U8)
    same = all_nodes[order][1:] == all_nodes[order][:-1]
    after[:-1][same] = all_epochs[order][1:][same]
    follows = np.empty(len(order), U8)
    follows[order] = after
    return follows[: len(nodes)]


def _damage(
    blocks: NDArray[np.uint8], fits: NDArray[np.bool_], nodes: NDArray[np.uint64], versions: NDArray[np.uint64],
    epochs: NDArray[np.uint64], sums: NDArray[np.uint64],
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """The damaged delta blocks, each by its row and the reason; the other arguments are columns of the same rows."""
    heads = headers(blocks)
    right = intact(blocks.view(np.uint64)) & (heads["checksum"] == sums)
    own = (heads["node_id"] == nodes) & (heads["version"] == versions) & (heads["creation_epoch"] == epochs)
    for row in np.flatnonzero(~(fits & right & own)).tolist():
        why = "is damaged: bad checksum" if not right[row] else "is that of another node or version"
        why = why if fits[row] else f"does not have the {blocks.shape[1]} bytes of a block"
        yield row, f"its delta block {why}"


def _changes(
    store: Store, nodes: NDArray[np.uint64], epochs: NDArray[np.uint64], merged: NDArray[np.uint64],
    follows: NDArray[np.uint64], horizon: int,
) -> Changes:  # fmt: skip
    """The commit of a batch; ``moved_*`` has all written versions, including superseded ones."""
    slots = Slots(store, horizon)
    to = slots.take(len(nodes)).astype(U8)
    newest = follows == _NOT_YET
    epoch = store.state.epoch + 1
    old = np.stack([to[~newest], nodes[~newest], epochs[~newest], follows[~newest]], axis=1)
    state = replace(
        store.state, epoch=epoch, merge_sequence_number=store.state.merge_sequence_number + 1, slot_count=slots.count
    )
    return Changes(
        state, moved_nodes=nodes, moved_epochs=epochs, moved_slots=to,
        retired=np.concatenate([slots.superseded(nodes[newest], epoch), old]), taken=slots.taken,
        merged_nodes=merged[:, 0], merged_versions=merged[:, 1],
    )  # fmt: skip


def _only_newest(changes: Changes, follows: NDArray[np.uint64]) -> Changes:
    """For the store: the map has the newest versions; the others are on the list of retired slots."""
    newest = follows == _NOT_YET
    return replace(
        changes, moved_nodes=changes.moved_nodes[newest], moved_epochs=changes.moved_epochs[newest],
        moved_slots=changes.moved_slots[newest],
    )  # fmt: skip


def check_blocks(
    blocks: NDArray[np.uint8], nodes: NDArray[np.uint64], epochs: NDArray[np.uint64], where: str,
    remedy: str = NOT_COPIED,
) -> None:  # fmt: skip
    """Check that each block is intact, and has the expected node and version."""
    if not len(blocks):
        return
    head = headers(blocks)
    right = intact(np.ascontiguousarray(blocks).view(np.uint64))
    damaged = np.flatnonzero(~right | (head["node_id"] != nodes) | (head["creation_epoch"] != epochs))
    if len(damaged):
        at = int(damaged[0])
        what = f"The block of node {nodes[at]} (epoch {epochs[at]}) in {where}"
        raise IndexCorruptError(f"{what} is damaged.", remedy=remedy)


def write_blocks(folder: str, size: int, slots: NDArray[np.int64], blocks: NDArray[np.uint8], step: Step) -> None:
    """Write blocks into slots that no reader uses, and sync the graph."""
    with open_file(os.path.join(folder, GRAPH)) as file:
        step("write blocks into free slots", lambda: write_runs(file, size, slots, blocks))
        step("sync the graph", lambda: sync(file))
