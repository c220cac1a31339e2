"""Cache opened generations and their bloom filters between a reader's calls.

The cache needs no invalidation: generations never change, and their directories have random names.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from memwal_ops.formats.lance.generations.generation import named, open_generation
from memwal_ops.formats.lance.regions.key_files import read_bloom_filter
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.generations.generation_ref import GenerationRef
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter

_CONCURRENT_READS = 8
_MAX_OPEN = 64
_FILTER_BYTES = 64 << 20
_Kept = TypeVar("_Kept")


class _Recent(Generic[_Kept]):
    """A least-recently-used cache. The sum of its values' sizes is bounded."""

    def __init__(self, max_size: int) -> None:
        self._max_size, self._size = max_size, 0
        self._kept: OrderedDict[Hashable, tuple[_Kept, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[_Kept, int]]) -> _Kept:
        """The value, made with its size where it is not kept; two threads may both make it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made, size = make()
        with self._lock:
            if key not in self._kept and size <= self._max_size:
                self._kept[key] = made, size
                self._size += size
                while self._size > self._max_size:
                    _, (_, freed) = self._kept.popitem(last=False)
                    self._size -= freed
        return made


class Opened:
    """What a reader keeps open. At most 64 generations and 64 MiB of bloom filters; safe in threads."""

    def __init__(self) -> None:
        self._generations: _Recent[Generation] = _Recent(_MAX_OPEN)
        self._filters: _Recent[BloomFilter | None] = _Recent(_FILTER_BYTES)

    def generations(self, table: Table, refs: Sequence[GenerationRef]) -> list[Generation]:
        """The opened generations, for the columns of a version; raises as :func:`open_generation`."""
        history = SchemaHistory.of(table)

        def opened(ref: GenerationRef) -> Generation:
            made = (table.version, ref.folder)
            with named(ref):
                return self._generations.get(made, lambda: (open_generation(table, ref, history), 1))

        return _each(opened, refs)

    def filters(self, table: Table, refs: Sequence[GenerationRef]) -> list[BloomFilter | None]:
        """Their bloom filters; see :func:`read_bloom_filter`."""
        kinds = [table.schema.field(name).type for name in table.primary_key]

        def opened(ref: GenerationRef) -> tuple[BloomFilter | None, int]:
            bloom = read_bloom_filter(table.store, ref.folder, kinds)
            return bloom, 0 if bloom is None else bloom.nbytes

        return _each(lambda ref: self._filters.get(ref.folder, lambda: opened(ref)), refs)


def _each(read: Callable[[GenerationRef], _Kept], refs: Sequence[GenerationRef]) -> list[_Kept]:
    if len(refs) < 2:  # noqa: PLR2004 - a pool of threads takes longer
        return [read(one) for one in refs]
    with ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="read-generations") as pool:
        return [*pool.map(read, refs)]
