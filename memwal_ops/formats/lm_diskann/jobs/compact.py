"""Compact the graph: move blocks from its end into free slots, so that gc can truncate the file.

A moved block is the same version of its node in another slot. The order is that of a merge: blocks are written into
slots that no reader uses, and synced; one commit of the store updates the map and retires the old slots; then the view
is published. Views from before that commit refer to the old slot, so it is reused or truncated only once no reader is
at an earlier epoch. If the run is killed before the commit, nothing has changed; after it, the next run publishes the
view.

Blocks of healed nodes (deleted, and no link leads to them any more) are moved behind all others, if there is a free
slot: gc reclaims them next.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.core.documents import document
from memwal_ops.core.report import Need
from memwal_ops.formats.lm_diskann import merging, publishing
from memwal_ops.formats.lm_diskann.files import GRAPH, Step, needed_from
from memwal_ops.formats.lm_diskann.publishing import locked_store
from memwal_ops.formats.lm_diskann.wire import U8, Changes
from memwal_ops.text import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.specs import IndexCompactOptions
    from memwal_ops.formats.lm_diskann.store import Store
    from memwal_ops.formats.lm_diskann.table import Table


MIN_FREE_SHARE = 0.05
"""The share of slots that must be free. With fewer, nothing is moved: the next merges use them."""
_REMEDY = "Run memwal-ops verify, and repair the folder or restore it; this block was not moved."


@dataclass(frozen=True)
class MovableBlocks:
    """The blocks that can be moved, by ascending slot, and the free slots.

    Attributes:
        nodes, slots, epochs: the newest versions of nodes, where those are in the graph.
        healed: which of them gc will reclaim.
        free: slots that no reader needs, ascending.
    """

    nodes: NDArray[np.uint64]
    slots: NDArray[np.int64]
    epochs: NDArray[np.uint64]
    healed: NDArray[np.bool_]
    free: NDArray[np.int64]

    @property
    def misplaced(self) -> int:
        """The number of blocks that would be moved if no slot were blocked by readers."""
        kept = int((~self.healed).sum())
        return int(((self.slots < kept) == self.healed).sum())

    def moves(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Blocks (positions) that can be moved now, the last ones first, and their new slots.

        Blocks of live nodes move to the lowest free slots, the last block first; those of healed nodes in the first
        slots move behind them. The next commit can use their old slots: repeat until no moves are returned.
        """
        stay = np.flatnonzero(~self.healed)[::-1]
        most = min(len(stay), len(self.free))
        down = int((self.free[:most] < self.slots[stay[:most]]).sum())
        later_slots = self.free[down:][self.free[down:] >= len(stay)]
        front = np.flatnonzero(self.healed & (self.slots < len(stay)))
        most = min(len(front), len(later_slots))
        return np.concatenate([stay[:down], front[:most]]), np.concatenate([self.free[:down], later_slots[:most]])


def movable(store: Store, horizon: int) -> MovableBlocks:
    """The blocks that can be moved, if slots that were freed at ``horizon`` or before may be used."""
    nodes, slots, epochs = store.in_graph(store.state.epoch)
    store.check_below(store.state.slot_count, "lmd_slots", slots)
    [healed] = store.columns("SELECT node_id FROM lmd_sweep_list WHERE reason = 'healed'")
    return MovableBlocks(nodes, slots.astype(np.int64), epochs, np.isin(nodes, healed), store.free_slots(horizon))


def spare(store: Store) -> int:
    """The number of slots that a new graph of the same nodes, without the healed ones, would not need."""
    [kept] = store.columns(f"SELECT count(*) FROM ({_KEPT})")
    return store.state.slot_count - int(kept[0])


def reclaimable(store: Store, folder: str, size: int) -> int:
    """The bytes at the end of the graph that gc can truncate now, after it reclaimed the healed nodes."""
    needed = needed_from(folder, store.state.epoch)
    [last] = store.columns(
        f"SELECT coalesce(max(slot) + 1, 0)::UBIGINT FROM ({_KEPT} UNION ALL SELECT slot FROM lmd_free_nodes "
        f"WHERE freed_epoch > {needed})"
    )
    return max(0, os.path.getsize(os.path.join(folder, GRAPH)) - int(last[0]) * size)


_KEPT = "SELECT slot FROM lmd_slots WHERE node_id NOT IN (SELECT node_id FROM lmd_sweep_list WHERE reason = 'healed')"


def compact(index: Index, max_bytes: int | None, step: Step) -> Iterator[int]:
    """Move blocks until there is nothing to move; each batch is committed and published when its size is yielded.

    No commit begins after ``max_bytes`` were moved.

    Raises ``TableCorruptError``: a block that would be moved is damaged; earlier commits are kept.
    """
    store, size = index.writable(), index.parameters.layout.block_size
    if spare(store) < MIN_FREE_SHARE * store.state.slot_count:
        return
    left = float("inf") if max_bytes is None else max_bytes
    while left > 0:
        blocks = movable(store, merging.raise_horizon(index, step))
        which, to = (column[: max(1, int(min(left, merging.BATCH)) // size)] for column in blocks.moves())
        if not len(which):
            return
        nodes, epochs = blocks.nodes[which], blocks.epochs[which]
        data = _read(index.folder, size, blocks.slots[which], nodes, epochs)
        publishing.settle(index.view, step)
        merging.write_blocks(index.folder, size, to, data, step)
        epoch = store.state.epoch + 1
        # The old slot belongs to no epoch any more: readers of earlier epochs use the new slot as well.
        over = np.full(len(which), epoch, U8)
        changes = Changes(
            replace(store.state, epoch=epoch), moved_nodes=nodes, moved_epochs=epochs, moved_slots=to.astype(U8),
            retired=np.stack([blocks.slots[which].astype(U8), nodes, over, over], axis=1), taken=to.astype(U8),
        )  # fmt: skip
        merging.commit(index, changes, step)
        left -= len(which) * size
        yield len(which)


def _read(
    folder: str, size: int, slots: NDArray[np.int64], nodes: NDArray[np.uint64], epochs: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    data = np.zeros((len(slots), size), np.uint8)
    with open(os.path.join(folder, GRAPH), "rb") as graph:
        for at in np.argsort(slots).tolist():
            os.preadv(graph.fileno(), [data[at]], int(slots[at]) * size)
    merging.check_blocks(data, nodes, epochs, f"{GRAPH} in {folder}", _REMEDY)
    return data


class IndexCompactDecision(enum.StrEnum):
    """The decisions of a compaction."""

    COMPACTED = "compacted"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class IndexCompactReport:
    """The result of a compaction, or its plan.

    Attributes:
        blocks: moved blocks (approximate in a plan); ``bytes``: their size.
        bytes_reclaimable: by how much gc can truncate the graph afterwards; None in a plan.
        epoch: of the index afterwards.
        why: why nothing was moved, or no more; else None.
    """

    decision: IndexCompactDecision
    blocks: int
    bytes: int
    bytes_reclaimable: int | None
    epoch: int
    why: str | None = None

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return document(self)

    def needs(self) -> Iterator[Need]:
        """What a run would move."""
        if self.blocks:
            yield Need("compact", f"move {counted(self.blocks, 'block')}")

    def describe(self) -> str:
        """The text for people."""
        what = f"{counted(self.blocks, 'block')} ({size_text(self.bytes)})"
        if self.decision is IndexCompactDecision.DRY_RUN:
            done = f"would move about {what}" if self.blocks else "would move nothing"
        else:
            done = f"{what} moved; the index is at epoch {self.epoch}"
        lines = [f"{self.decision}: {done}."]
        if self.why is not None:
            lines.append(self.why)
        if self.bytes_reclaimable:
            lines.append(f"memwal-ops gc --apply can truncate the graph by {size_text(self.bytes_reclaimable)}.")
        return "\n".join(lines)


def backlog(table: Table) -> Mapping[str, float]:
    """The backlog metric, from the published view."""
    state = table.state
    spared = state.slot_count - state.live - table.tombstones + state.healed
    return {"free_percent": 100 * max(0, spared) / max(1, state.slot_count)}


def plan(table: Table, options: IndexCompactOptions, context: RunContext) -> IndexCompactReport:
    """Report what a run would move. Reads only. Raises ``IndexBusyError``: another writer or job has the index."""
    del context
    table.check_files()
    folder, parameters = table.location.uri, table.parameters
    with locked_store(folder, parameters, options.wait.total_seconds()) as store:
        # A run first stops retaining the epochs that no reader and no hold needs.
        blocks = movable(store, needed_from(folder, store.state.epoch))
        why = _why(store, blocks)
        count = 0 if why is not None else blocks.misplaced
        size = parameters.layout.block_size
        if options.max_bytes is not None:
            count = min(count, max(1, options.max_bytes // size))
        return IndexCompactReport(IndexCompactDecision.DRY_RUN, count, count * size, None, store.state.epoch, why)


def apply(table: Table, options: IndexCompactOptions, context: RunContext) -> IndexCompactReport:
    """Move blocks, a bounded number per commit.

    Raises:
        IndexBusyError: another writer or job has the index.
        LeaseLostError: the guard denies; earlier commits are kept.
        StorageError: the disk is full, or failed; earlier commits are kept.
        TableCorruptError: a block that would be moved is damaged; earlier commits are kept.
    """
    blocks, size = 0, table.parameters.layout.block_size
    with table.open(options.wait.total_seconds()) as index:
        store = index.writable()
        for count in compact(index, options.max_bytes, table.durable):
            blocks += count
            context.revisions.append(store.state.epoch)
            context.figures["bytes_compacted"] += count * size
            context.advance("moving", "blocks", count)
            context.checkpoint()
        why = None if blocks else _why(store, movable(store, store.state.retained_from))
        if blocks:
            merging.finish(index, table.durable)
            if options.max_bytes is not None and blocks * size >= options.max_bytes:
                why = "The run has used its --max-bytes; the next run continues."
        freed = reclaimable(store, index.folder, size)
        decision = IndexCompactDecision.COMPACTED if blocks else IndexCompactDecision.UNCHANGED
        return IndexCompactReport(decision, blocks, blocks * size, freed, store.state.epoch, why)


def _why(store: Store, blocks: MovableBlocks) -> str | None:
    spared, count = spare(store), store.state.slot_count
    if spared < MIN_FREE_SHARE * count:
        return (
            f"{max(0, spared):,} of {count:,} slots can be spared, less than {MIN_FREE_SHARE:.0%}: "
            "the next merges use them."
        )
    if len(blocks.moves()[0]):
        return None
    if not blocks.misplaced:
        return "All blocks are in the first slots already."
    return "No slot at the front is free: readers or holds need those blocks, or they await merge or catchup."
