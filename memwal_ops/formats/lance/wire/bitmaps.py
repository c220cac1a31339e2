"""Encode and decode roaring bitmaps: of the fragments that an index segment covers, and of row ids.

Both have the portable 32-bit format. ``row_addr_allowlist`` and ``row_addr_blocklist`` of pylance's scanners take
the number of different upper halves of ids, then of each its value, a length in bytes and a bitmap of the lower halves.
"""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Far above any real table. Eight bytes of a bitmap can encode 65,536 ids, so 60 KB could decode to gigabytes.
_MAX_FRAGMENTS = 1 << 22
_PAIR = struct.Struct("<II")


def decode_fragment_bitmap(data: bytes) -> frozenset[int]:
    """The fragment ids; none if there are no bytes, since the segment's coverage is then unknown.

    Raises:
        InvalidFormatError: the bytes are not a roaring bitmap, or encode an impossible number of fragments.
    """
    if not data:
        return frozenset()
    try:
        bitmap = BitMap.deserialize(data)
    except ValueError as error:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: {error}") from error
    if len(bitmap) > _MAX_FRAGMENTS:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: it has {len(bitmap)} fragments.")
    return frozenset(bitmap)


def encode_fragment_bitmap(fragments: frozenset[int]) -> bytes:
    """The bitmap of these fragment ids."""
    return bytes(BitMap(fragments).serialize())


def fragments_of(addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The fragment of each address."""
    return (addresses >> np.uint64(32)).astype(np.int64)


def encode_row_ids(ids: NDArray[np.uint64]) -> bytes:
    """The ``_rowid`` of rows, in any order, as one value for a scanner's list of rows.

    pylance names these lists by addresses and compares them with ``_rowid``: with stable row ids, an address would be
    another row, or none.
    """
    ascending = np.sort(ids)
    upper, starts = np.unique(ascending >> np.uint64(32), return_index=True)
    parts = [struct.pack("<I", len(upper))]
    for half, (start, end) in zip(upper.tolist(), pairwise([*starts, len(ids)]), strict=True):
        # Building it from an array needs a tenth of the time.
        lower = (ascending[start:end] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        bitmap = BitMap(array("I", lower.tobytes())).serialize()
        parts += [_PAIR.pack(half, len(bitmap)), bitmap]
    return b"".join(parts)
