"""Allocate slots of the graph for new versions of blocks: free ones first, ascending, then at the end of the file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.core.holds import holds_in_force
from memwal_ops.formats.lm_diskann.changes import U8
from memwal_ops.formats.lm_diskann.locks import lowest_reader
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.store import Store


class Slots:
    """The slots that a transaction or a merge allocates.

    Args:
        store: open.
        horizon: slots that were freed at this epoch or before it may be used.
    """

    def __init__(self, store: Store, horizon: int) -> None:
        self._store, self._horizon = store, horizon
        self._free: NDArray[np.int64] | None = None
        self._used = 0
        self.count = store.state.slot_count

    def take(self, count: int) -> NDArray[np.int64]:
        """Allocate that many slots, ascending."""
        if self._free is None:
            self._free = self._store.free_slots(self._horizon)
        reused = self._free[self._used : self._used + count]
        self._used += len(reused)
        fresh = np.arange(self.count, self.count + count - len(reused), dtype=np.int64)
        self.count += len(fresh)
        return np.concatenate([reused, fresh])

    @property
    def taken(self) -> NDArray[np.uint64]:
        """The allocated slots that were on the free list."""
        return np.zeros(0, U8) if self._free is None else self._free[: self._used].astype(U8)

    def superseded(self, nodes: NDArray[np.uint64], epoch: int) -> NDArray[np.uint64]:
        """The current slots of these nodes: [n, 4] of slot, node, epoch of its version, epoch of the next version."""
        if not len(nodes):
            return np.zeros((0, 4), U8)
        # If a version in between is in the delta table, the old slot's version ends at that one's epoch.
        found = self._store.columns(
            "SELECT slot, node_id, from_epoch, coalesce((SELECT min(commit_epoch) FROM lmd_delta_blocks d "
            f"WHERE d.node_id = s.node_id AND d.commit_epoch > s.from_epoch), {epoch}) "
            "FROM lmd_slots s WHERE node_id IN (SELECT id FROM moved)", moved=nodes.astype(U8),
        )  # fmt: skip
        return np.stack(found, axis=1).astype(U8)


def needed_from(folder: str, epoch: int) -> int:
    """The lowest epoch that a live reader or a hold needs; ``epoch`` if none needs an older one."""
    needed = [epoch]
    reader = lowest_reader(folder)
    if reader is not None:
        needed.append(reader)
    if os.path.isdir(os.path.join(folder, "_mem_wal_ops", "holds")):
        store = open_store(resolve(folder))
        needed += [version for hold in holds_in_force(store, store_time(store)) for version in hold.versions]
    return min(needed)
