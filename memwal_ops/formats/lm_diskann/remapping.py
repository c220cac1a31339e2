"""Map rows to nodes again, by the row ids in the nodes' blocks.

The block of a node has its row id and whether it was deleted, under a checksum. So the lookup can be computed from the
blocks, if none is missing. That is proven by the number of rows in ``lmd_metadata``, and by the tombstones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.formats.lm_diskann.changes import I8, U8, Changes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.store import Store

CHECKS = frozenset({
    "row_differs", "row_missing", "row_without_block", "tombstone_differs", "tombstone_missing", "count_differs",
})  # fmt: skip
"""The checks whose findings may be caused by the lookup alone."""


@dataclass(frozen=True)
class Blocks:
    """The contents of the blocks, by node id.

    Attributes:
        seen: which nodes have a block.
        dead: which of them are deleted.
        rows: their row ids.
        damaged: whether there are blocks that cannot be read.
    """

    seen: NDArray[np.bool_]
    dead: NDArray[np.bool_]
    rows: NDArray[np.int64]
    damaged: bool


def refusal(store: Store, blocks: Blocks) -> str | None:
    """Why the lookup cannot be computed from the blocks; None: it can."""
    if blocks.damaged:
        return "Blocks are damaged, and their rows would be lost."
    live = np.flatnonzero(blocks.seen & ~blocks.dead)
    if len(live) != store.state.live:
        return f"There are blocks of {len(live)} rows, and lmd_metadata has {store.state.live}: some may be lost."
    if len(np.unique(blocks.rows[live])) != len(live):
        return "Two nodes have the same row, and either may be the newer one."
    [tombstones] = store.columns("SELECT DISTINCT node_id FROM lmd_tombstoned_nodes ORDER BY node_id")
    if not np.array_equal(tombstones.astype(np.int64), np.flatnonzero(blocks.seen & blocks.dead)):
        return "Blocks and tombstones differ about which rows were deleted."
    return None


def changes(store: Store, blocks: Blocks) -> Changes | None:
    """The commit that makes the lookup agree with the blocks; None: it does already."""
    if not len(blocks.seen):
        return None
    rows, nodes, removed = store.columns("SELECT row_id, node_id, removed_epoch FROM lmd_lookup")
    [tombstones, deleted] = store.columns("SELECT node_id, deletion_epoch FROM lmd_tombstoned_nodes")
    epochs = np.full(len(blocks.seen), np.iinfo(U8).max, U8)
    epochs[tombstones.astype(np.int64)] = deleted
    at = np.minimum(nodes, len(blocks.seen) - 1).astype(np.int64)
    right: NDArray[Any] = (nodes < len(blocks.seen)) & blocks.seen[at] & (blocks.rows[at] == rows)
    right &= removed == epochs[at]
    _, first, count = np.unique(nodes, return_index=True, return_counts=True)
    alone = np.zeros(len(nodes), bool)
    alone[first] = count == 1
    good = np.zeros(len(blocks.seen), bool)
    good[at[right & alone]] = True
    # A node that was added and deleted by one transaction has a tombstone, and never was in the lookup.
    missing = np.flatnonzero(blocks.seen & ~blocks.dead & ~good)
    wrong = np.unique(np.concatenate([nodes[~(right & alone)].astype(np.int64), missing]))
    if not len(wrong):
        return None
    added = wrong[np.isin(wrong, np.flatnonzero(blocks.seen))]
    state = replace(store.state, epoch=store.state.epoch + 1)
    return Changes(state, unmapped=wrong.astype(U8), row_ids=blocks.rows[added].astype(I8), row_nodes=added.astype(U8))
