"""Follow the links of a graph from its entry points (numba)."""

from __future__ import annotations

import numba
import numpy as np

from memwal_ops.formats.lm_diskann.kernels.memory import INVISIBLE, LINKS
from memwal_ops.formats.lm_diskann.kernels.reading import load


@numba.njit(cache=True, nogil=True)
def reach(src, lay, entries, epoch, reached, queue):
    """Mark all nodes to which a path leads in ``reached`` [nodes]. Returns their number, or an error as ``load``.

    ``queue`` is int64 [nodes].
    """
    head, tail = 0, 0
    for one in range(entries.shape[0]):
        if not reached[entries[one]]:
            reached[entries[one]] = 1
            queue[tail] = entries[one]
            tail += 1
    while head < tail:
        row = load(src, lay.block_size, queue[head], epoch)
        head += 1
        if row == INVISIBLE:
            continue
        if row < 0:
            return row
        for at in range(src.pool.u16[row, LINKS]):
            other = np.int64(src.pool.u32[row, lay.at_ids // 4 + at])
            if other < reached.shape[0] and not reached[other]:
                reached[other] = 1
                queue[tail] = other
                tail += 1
    return tail
