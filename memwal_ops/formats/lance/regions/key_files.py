"""Build the key files of a generation: deletion vectors of superseded rows, a bloom filter, and a key index.

The specification defines the filter (S0-136, S0-140). pylance's readers need all three: without the deletion vectors
its point lookup returns an older row of the generation, and without ``_pk_index/`` its scan refuses the generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.blobs import lance_bytes
from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter, is_encodable, is_hashed_alike, key_tuples

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.storage.api import Store

BLOOM_FILTER = "bloom_filter.bin"
KEY_INDEX = "_pk_index"
KEY_INDEX_PAGES = f"{KEY_INDEX}/page_data.lance"
_PAGE = 8192
_ROW = "__memwal_ops_row"


def read_bloom_filter(store: Store, folder: str, kinds: Iterable[pa.DataType]) -> BloomFilter | None:
    """A generation's bloom filter; None: it has none, because of its writer's release, or one that must not be used.

    Its keys, of columns of these ``kinds``, are not compared with those of the generation: a cut one may decode.

    Raises ``InvalidFormatError``: it does not decode.
    """
    if not is_hashed_alike(kinds):
        return None
    try:
        return BloomFilter.decode(store.get(f"{folder}/{BLOOM_FILTER}"))
    except ObjectNotFoundError:
        return None


@dataclass(frozen=True)
class GenerationKeys:
    """The keys of a generation's fragments, in the order of row addresses.

    ``columns``: one array per key column. ``sizes``: the number of rows of each fragment.
    """

    columns: tuple[pa.Array, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, fragments: Sequence[pa.Table], key: Sequence[str]) -> GenerationKeys:
        """The keys of stored rows, one table per fragment; empty for a generation without rows."""
        if not fragments:
            return cls((), ())
        keys = pa.concat_tables([rows.select(key) for rows in fragments]).combine_chunks()
        columns = (keys.column(name).combine_chunks() for name in key)
        plain = (
            column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column for column in columns
        )
        return cls(tuple(plain), tuple(rows.num_rows for rows in fragments))

    def superseded(self) -> list[BitMap]:
        """Per fragment, the offsets of rows whose key has a later row in the generation (S0-192)."""
        if not self.sizes:
            return []
        older = np.zeros(len(self.columns[0]), bool)
        if self._sorted is not None and not pa.types.is_floating(self._sorted[0].type):
            values, order = self._sorted
            again = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(zero_copy_only=False)
            older[order[:-1][again]] = True
        else:  # a type without an order, or floats: Arrow's equality, unlike its order, treats -0.0 and 0.0 as equal
            names = [str(number) for number in range(len(self.columns))]
            rows = pa.table([*self.columns, pa.array(np.arange(len(older)))], [*names, _ROW])
            last = rows.group_by(names, use_threads=False).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
            older[:] = True
            older[last.to_numpy()] = False
        ends = np.cumsum(self.sizes)
        return [BitMap(np.flatnonzero(part).tolist()) for part in np.split(older, ends[:-1])]

    @property
    def index_values(self) -> pa.Array | None:
        """The keys in Lance's index encoding, in the order of row addresses; None if Lance cannot index the types."""
        if len(self.columns) == 1:
            return self.columns[0]
        return key_tuples(self.columns) if all(is_encodable(column.type) for column in self.columns) else None

    @cached_property
    def _sorted(self) -> tuple[pa.Array, NDArray[np.uint64]] | None:
        """The keys in Lance's index encoding, ascending, and their row numbers; None if Lance cannot index the type."""
        values = self.index_values
        if values is None:
            return None
        try:
            order = pc.sort_indices(values)  # stable
        except pa.ArrowNotImplementedError:
            return None
        return values.take(order), order.to_numpy()

    def files(self, file_version: str) -> Mapping[str, bytes]:
        """Contents of the bloom filter and the key index, by path relative to the generation's directory.

        No filter for types that pylance hashes otherwise: its readers would miss all keys by it.
        """
        if not self.sizes:
            return {}
        files = dict(self._index(file_version))
        if is_hashed_alike(column.type for column in self.columns):
            bloom = BloomFilter.for_keys(len(self.columns[0]))
            bloom.add(self.columns)
            files[BLOOM_FILTER] = bloom.encode()
        return files

    def _index(self, file_version: str) -> Mapping[str, bytes]:
        """The BTREE of the key, superseded rows included; empty if Lance cannot index the key's type."""
        if self._sorted is None:
            return {}
        values, order = self._sorted
        addresses = pa.array(self._addresses()[order])
        fields = [pa.field("values", values.type), pa.field("ids", pa.uint64(), nullable=False)]
        pages = pa.table([values, addresses], schema=pa.schema(fields))
        starts = np.arange(0, len(values), _PAGE, dtype=np.int64)
        ends = np.minimum(starts + _PAGE, len(values)) - 1
        bounds = [pages.column("values").take(pa.array(places)) for places in (starts, ends)]
        numbers = [np.zeros(len(starts), np.uint32), np.arange(len(starts), dtype=np.uint32)]
        fields = [pa.field(name, values.type) for name in ("min", "max")]
        fields += [pa.field(name, pa.uint32(), nullable=False) for name in ("null_count", "page_idx")]
        metadata = {"batch_size": str(_PAGE), "range_partitioned": "false"}
        lookup = pa.table([*bounds, *map(pa.array, numbers)], schema=pa.schema(fields, metadata=metadata))
        files = {KEY_INDEX_PAGES: pages, f"{KEY_INDEX}/page_lookup.lance": lookup}
        return {path: lance_bytes(rows, file_version, "the key index of a generation") for path, rows in files.items()}

    def _addresses(self) -> NDArray[np.uint64]:
        parts = [np.arange(size, dtype=np.uint64) + np.uint64(at << 32) for at, size in enumerate(self.sizes)]
        return np.concatenate(parts)
