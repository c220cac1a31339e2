"""Take row addresses apart, and encode them for pylance's scanners.

``row_addr_allowlist`` and ``row_addr_blocklist`` take a number of fragments, then of each fragment its id, a length in
bytes and a roaring bitmap of row offsets.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAIR = struct.Struct("<II")


def fragments_of(addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The fragment of each address."""
    return (addresses >> np.uint64(32)).astype(np.int64)


def encode_row_addresses(addresses: NDArray[np.uint64]) -> bytes:
    """The addresses, in any order, as one value."""
    ascending = np.sort(addresses)
    fragments, starts = np.unique(fragments_of(ascending), return_index=True)
    parts = [struct.pack("<I", len(fragments))]
    for fragment, rows in zip(fragments.tolist(), np.split(ascending, starts[1:]), strict=True):
        # Building it from an array needs a tenth of the time.
        bitmap = BitMap(array("I", (rows & np.uint64(0xFFFFFFFF)).astype(np.uint32).tobytes())).serialize()
        parts += [_PAIR.pack(fragment, len(bitmap)), bitmap]
    return b"".join(parts)
