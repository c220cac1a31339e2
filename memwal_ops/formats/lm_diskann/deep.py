"""The checks of ``verify --deep``: unreachable nodes, lost slots, and recall against a comparison of all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.core.answers import Interval, share_by_query, wilson
from memwal_ops.formats.lm_diskann.healing import around
from memwal_ops.formats.lm_diskann.kernels.reaching import ROOT, reach
from memwal_ops.formats.lm_diskann.kernels.searching import scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.store import Store
    from memwal_ops.formats.lm_diskann.view import View

SAMPLE, K = 100, 10
_ZERO = np.float32(1e-6)
_ROUNDING = np.float32(1 + 1e-5)  # compiled code may add up a distance in another order


def unreachable(view: View, store: Store) -> NDArray[np.int64]:
    """Live nodes to which no path from an entry point leads; none if there is no graph.

    Raises:
        TableCorruptError: a block cannot be read.
    """
    entries = view.entries(view.epoch)
    if not len(entries) or not view.state.codebook_id:
        return np.zeros(0, np.int64)
    count = view.state.next_node_id
    parents, queue = np.empty(count, np.int64), np.empty(count, np.int64)
    if reach(view.source, view.parameters.layout, entries, view.epoch, parents, queue) < 0:
        raise view.fail()
    [live] = store.columns("SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id")
    found: NDArray[np.int64] = live[parents[live.astype(np.int64)] < ROOT].astype(np.int64)
    return found


def lost_slots(store: Store) -> Iterator[str]:
    """Slots that are neither mapped nor free: they would never be used again."""
    state = store.state
    taken = np.zeros(state.slot_count, bool)
    for table in ("lmd_slots", "lmd_free_nodes"):
        [slots] = store.columns(f"SELECT slot FROM {table} WHERE slot < {state.slot_count}")
        taken[slots.astype(np.int64)] = True
    return (f"slot {slot} is neither mapped nor free" for slot in np.flatnonzero(~taken))


def late_epochs(store: Store) -> Iterator[str]:
    """Versions that are newer than the index."""
    epoch = store.state.epoch
    nodes, epochs = store.columns(
        f"SELECT node_id, from_epoch FROM lmd_slots WHERE from_epoch > {epoch} UNION ALL "
        f"SELECT node_id, commit_epoch FROM lmd_delta_blocks WHERE commit_epoch > {epoch} ORDER BY 1"
    )
    return (
        f"node {node} has a version of epoch {one}; the index is at {epoch}"
        for node, one in zip(nodes.tolist(), epochs.tolist(), strict=True)
    )


@dataclass(frozen=True, slots=True)
class Recall:
    """What searches for a sample of rows find: of the nearest rows, and of each row itself; and how many were asked."""

    share: Interval
    itself: Interval
    queries: int
    rows: int


def recall(index: Index, store: Store, samples: int = SAMPLE, seed: int = 0) -> Recall | None:
    """The share of the nearest rows that searches find, for a sample of rows; None: the index is empty.

    A row that is found counts if it is not farther than the k-th nearest: of equally far ones, each is right.
    """
    view = index.view
    [live] = store.columns("SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id")
    if not len(live):
        return None
    chosen = np.sort(np.random.default_rng(seed).choice(live.astype(np.int64), min(samples, len(live)), replace=False))
    queries = around(view, store, chosen, view.epoch).vectors
    k = min(K, len(live))
    nearest, far = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    everything = np.arange(view.state.next_node_id, dtype=np.int64)
    done = scan(
        view.source, index.parameters.layout, everything, queries, view.epoch, view.dead, view.dead_epochs,
        nearest, far,
    )  # fmt: skip
    if done < 0:
        raise view.fail()
    _, found = index.search(queries, k=k, as_of=view.epoch)
    limits = index.given(far)
    hits = (found <= limits[:, -1:] * _ROUNDING).sum(axis=1)
    share = share_by_query(hits.tolist(), [k] * len(queries), seed)
    itself = wilson(int((found[:, 0] <= limits[:, 0] * _ROUNDING + _ZERO).sum()), len(queries))
    assert share is not None  # noqa: S101 - there are queries
    assert itself is not None  # noqa: S101 - see above
    return Recall(share, itself, len(queries), len(live))
