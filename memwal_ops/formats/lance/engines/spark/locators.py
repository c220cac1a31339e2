"""Pack the position and the age of a row of a pass into one int64, which is shuffled with the key.

The order of the numbers is the order of the writes within a region: ordinal of the generation in the
pass, then row within the generation, then one bit for a tombstone. So
``max`` over a key finds its newest row, and no second column has to be shuffled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

ORDINAL_SHIFT = 41
MAX_GENERATIONS = 1 << 22
MAX_ROWS = 1 << 40
_RANK_MASK = MAX_ROWS - 1


def pack(ordinal: int, tombstones: npt.NDArray[np.bool_], *, newest_row_first: bool) -> npt.NDArray[np.int64]:
    """Locators of all live rows of one generation, in row order."""
    ranks = np.arange(len(tombstones), dtype=np.int64)
    if newest_row_first:
        ranks = ranks[::-1]
    return np.int64(ordinal << ORDINAL_SHIFT) | (ranks << 1) | tombstones.astype(np.int64)


def ordinals(locators: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The generation of each row, as its position in the pass."""
    return locators >> ORDINAL_SHIFT


def positions(locators: npt.NDArray[np.int64], live_rows: int, *, newest_row_first: bool) -> npt.NDArray[np.int64]:
    """The position of each row among the live rows of its generation."""
    ranks = (locators >> 1) & _RANK_MASK
    return live_rows - 1 - ranks if newest_row_first else ranks


def tombstones(locators: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each row deletes its key."""
    return (locators & 1).astype(np.bool_)
