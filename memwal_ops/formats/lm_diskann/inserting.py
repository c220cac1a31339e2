"""Insert rows into a graph: link them, or build the graph anew where most of its rows are new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.formats.lm_diskann.build import TRAIN_AT, build
from memwal_ops.formats.lm_diskann.kernels.inserting import write_nodes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.transaction import Transaction

_FEW, _ROWS, _COARSE = 64, 1024, 32


def insert(staged: Transaction, row_ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
    """Add rows; an existing one is replaced: its node becomes a tombstone, and the row gets a new one.

    Args:
        staged: the transaction.
        row_ids: of the rows, shape ``(n,)``.
        vectors: shape ``(n, dimension)``.

    Raises:
        IdsExhaustedError: no node ids are left.
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
        write_nodes(staged.view.source, layout, nodes, row_ids, vectors, staged.epoch, staged.origin, 0)
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
    """The index of the point nearest to each vector."""
    norms = (points**2).sum(1)
    parts = np.array_split(vectors, max(1, -(-len(vectors) // _ROWS)))
    return np.concatenate([np.argmin(norms - 2 * (part @ points.T), axis=1) for part in parts])
