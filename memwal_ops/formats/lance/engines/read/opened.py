"""Cache opened generations and their bloom filters between a reader's calls, and describe the plans of a reader.

The cache needs no invalidation: generations never change, and their directories have random names. The nodes of plans
have the specification's names (S0-202 to S0-206).
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from memwal_ops import errors
from memwal_ops.formats.lance.generations.generation import Generation, GenerationRef, named, open_generation
from memwal_ops.formats.lance.regions.key_files import read_bloom_filter
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.storage.api import results_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from memwal_ops.formats.lance.engines.read.unmerged import RegionRead, Unmerged
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter


BASE = "base_table[gen=-1]"


def scan_plan(unmerged: Unmerged, condition: str | None) -> str:
    """The plan of a scan."""
    return "\n".join(deduplicated(unmerged, condition))


def deduplicated(unmerged: Unmerged, condition: str | None) -> Iterator[str]:
    """The lines of a scan's plan."""
    pushed = "" if condition is None else f", filter=[{condition}]"
    key = ", ".join(unmerged.table.primary_key)
    yield f"DeduplicateExec: partition_by=[{key}], order_by=[_gen DESC, _rowaddr DESC]"
    yield f"  UnionExec{pruned(unmerged)}"
    yield f"    ScanExec: {BASE}, version={unmerged.table.version}{pushed}"
    for region in unmerged.regions:
        if region.memory is not None:
            yield f"    ScanExec: {in_memory(region)}{pushed}"
        yield from (f"    ScanExec: {region.region_id}[gen={ref.generation}]{pushed}" for ref in region.flushed[::-1])


def look_up_plan(unmerged: Unmerged, keys: str, index: bool) -> str:  # noqa: FBT001 - of one caller
    """The plan of a look-up; ``keys`` describes the keys, ``index`` is whether the base's key is indexed."""
    by = ", index=btree" if index else ""
    lines = [f"CoalesceFirstExec: return_first_non_null{pruned(unmerged).replace(':', ',', 1)}"]
    for region in unmerged.regions:
        if region.memory is not None:
            lines.append(f"  TakeLastExec: {in_memory(region)}, filter=[{keys}]")
        for ref in region.flushed[::-1]:
            place = f"[{region.region_id}][gen={ref.generation}]"
            lines += [
                f"  BloomFilterGuardExec: bf{place}",
                f"    TakeLastExec: {region.region_id}[gen={ref.generation}], filter=[{keys}]",
            ]
    return "\n".join([*lines, f"  TakeLastExec: {BASE}, filter=[{keys}]{by}"])


def in_memory(region: RegionRead) -> str:
    """The name of a region's rows in memory, by the generation that they will become."""
    source = "log" if region.writer is None else "memtable"
    rows = 0 if region.memory is None else region.memory.num_rows
    return f"{region.region_id}[gen={region.current}], {source}, rows={rows}"


def pruned(unmerged: Unmerged) -> str:
    """The number of regions that were pruned; empty if none was."""
    return f": regions={len(unmerged.regions)}, pruned={len(unmerged.pruned)}" if unmerged.pruned else ""


def indented(lines: Iterable[str], by: int) -> list[str]:
    """Lines below a node."""
    return [" " * by + line for line in lines]


_CONCURRENT_READS = 8
_MAX_OPEN, _MAX_BELIEVED = 64, 1 << 16
_DAMAGED = (
    errors.GenerationCorruptError,
    errors.GenerationMissingError,
    errors.ForeignRootError,
    errors.SchemaProjectionError,
)
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


_BELIEVED: _Recent[bool] = _Recent(_MAX_BELIEVED)
"""By table, generation and content of each filter whether it has the keys of its generation."""


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
        """Their bloom filters; see :func:`read_bloom_filter`. None also for one that lacks keys of its generation.

        To know that, each generation is opened once in a process.
        """
        kinds = [table.schema.field(name).type for name in table.primary_key]

        def has_keys(ref: GenerationRef, bloom: BloomFilter) -> bool:
            (generation,) = self.generations(table, [ref])
            return not generation.unknown_to(bloom, kinds)

        def opened(ref: GenerationRef) -> tuple[BloomFilter | None, int]:
            try:
                bloom = read_bloom_filter(table.store, ref.folder, kinds)
                if bloom is None:
                    return None, 0
                content = table.location.uri, ref.folder, zlib.crc32(bloom.encode())
                believed = _BELIEVED.get(content, lambda: (has_keys(ref, bloom), 1))
            except (errors.InvalidFormatError, *_DAMAGED):
                return None, 0  # a look-up that needs the generation itself fails by name
            return (bloom, bloom.nbytes) if believed else (None, 0)

        return _each(lambda ref: self._filters.get(ref.folder, lambda: opened(ref)), refs)


def _each(read: Callable[[GenerationRef], _Kept], refs: Sequence[GenerationRef]) -> list[_Kept]:
    if len(refs) < 2:  # noqa: PLR2004 - a pool of threads takes longer
        return [read(ref) for ref in refs]
    return results_of(read, refs, threads=_CONCURRENT_READS)
