"""The bloom filter of the keys in a MemTable (S0-025, S0-136): it shows whether a row may be stale.

Other indexes are not kept in memory: the rows of a MemTable are in memory anyway, and a scan of them is exact.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from memwal_ops.formats.lance.log.memtable import MemTable

_FIRST_SIZE = 1 << 16


class KeyFilter:
    """The filter of one MemTable. Keys are added at each query, and removed once generations have them."""

    def __init__(self, memtable: MemTable) -> None:
        self._memtable = memtable
        self._lock = threading.Lock()
        self._state = self._fragments = self._keys = 0
        self._room = _FIRST_SIZE
        self._bloom = BloomFilter.for_keys(self._room)

    def refresh(self) -> None:
        """Add the keys of all rows that the MemTable has now."""
        with self._lock:
            state, fragments = self._memtable.keys_since(self._fragments, self._state)
            if state != self._state:
                self._begin(state)
            elif self._keys + _count(fragments) > self._room:
                self._room = 2 * (self._keys + _count(fragments))
                self._begin(state)
                self._state, fragments = self._memtable.keys_since(0, state)
            for columns in fragments:
                self._bloom.add(columns)
            self._fragments += len(fragments)
            self._keys += _count(fragments)

    def may_have(self, columns: Sequence[pa.Array]) -> NDArray[np.bool_]:
        """Per key whether the MemTable may have it."""
        self.refresh()
        return self._bloom.may_have(columns)

    def _begin(self, state: int) -> None:
        self._bloom = BloomFilter.for_keys(self._room)
        self._state, self._fragments, self._keys = state, 0, 0


def _count(fragments: Sequence[Sequence[pa.Array]]) -> int:
    return sum(len(columns[0]) for columns in fragments)
