"""Insert rows into a graph: link them, or build the graph anew where most of its rows are new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.formats.lm_diskann.build import TRAIN_AT, build
from memwal_ops.formats.lm_diskann.kernels.inserting import write_nodes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.transaction import Transaction


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
    nodes = staged.allocate(row_ids)
    # In particular for an empty graph: its entry points are deleted, perhaps healed, and so are their links.
    if len(row_ids) >= live if staged.codebook_id else live + len(row_ids) >= TRAIN_AT:
        build(staged, nodes, row_ids, vectors)
    elif not staged.codebook_id:
        staged.reserve(len(row_ids))
        layout = staged.parameters.layout
        write_nodes(staged.view.source, layout, nodes, row_ids, vectors, staged.epoch, staged.origin, 0)
    else:
        staged.link(nodes, row_ids, vectors)
