"""Join rows with keys: by row numbers, as rows may have columns that pyarrow does not join (lists, structs)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

_ROW = "__memwal_ops_row"
# A table of flags is made for keys that are at least this dense, at one byte each: 64 MiB for a million keys.
_SPREAD = 64


def in_chunks(batches: Iterable[pa.RecordBatch], max_bytes: int) -> Iterator[pa.Table]:
    """Batches gathered into tables of about ``max_bytes``: a join or a filter costs something for each table."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= max_bytes:
            yield pa.Table.from_batches(gathered)
            gathered, size = [], 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def batches_without_keys(
    batches: Iterable[pa.RecordBatch], keys: pa.Table, key: list[str], *, chunk_bytes: int
) -> Iterator[pa.RecordBatch]:
    """The rows whose key is none of these, in their order.

    Integer keys that lie close together are looked up in a table of flags, batch by batch, while the batch is
    in the processor's caches. For others a hash table is made for each ``chunk_bytes`` of rows.
    """
    flags = _Flags.of(keys.column(key[0])) if len(key) == 1 else None
    if flags is None:
        for rows in in_chunks(batches, chunk_bytes):
            yield from without_keys(rows, keys, key).to_batches()
        return
    for batch in batches:
        yield batch.filter(pa.array(~flags.found(batch.column(key[0]))))


class _Flags:
    """A set of integers: one flag for each number from the lowest to the highest, and one that is never set."""

    def __init__(self, lowest: np.int64, flags: NDArray[np.bool_]) -> None:
        self._lowest, self._flags = lowest, flags

    @classmethod
    def of(cls, keys: pa.ChunkedArray) -> _Flags | None:
        """None: other types than integers, or numbers too far apart."""
        if not pa.types.is_signed_integer(keys.type) or not len(keys) or keys.null_count:
            return None
        numbers = keys.to_numpy().astype(np.int64)
        lowest, highest = numbers.min(), numbers.max()
        width = int(highest) - int(lowest) + 1
        if width > _SPREAD * len(numbers):
            return None
        flags = np.zeros(width + 1, np.bool_)
        flags[numbers - lowest] = True
        return cls(lowest, flags)

    def found(self, keys: pa.Array) -> NDArray[np.bool_]:
        """Which of these are in the set; a null is not."""
        numbers = (keys.fill_null(0) if keys.null_count else keys).to_numpy().astype(np.int64, copy=False)
        # Below the lowest, and where the difference overflows, it is a large number without a sign.
        above = (numbers - self._lowest).view(np.uint64)
        found: NDArray[np.bool_] = self._flags[np.minimum(above, np.uint64(len(self._flags) - 1))]
        return found & keys.is_valid().to_numpy(zero_copy_only=False) if keys.null_count else found


def newest_rows(rows: pa.Table, key: list[str]) -> pa.Table:
    """The last row of each key."""
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(key, use_threads=False).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
    return rows.take(last)


def without_keys(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Table:
    """The rows whose key is none of these, in their order."""
    return _chosen(rows, keys, key, among=False)


def with_keys(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Table:
    """The rows whose key is one of these, in their order."""
    return _chosen(rows, keys, key, among=True)


def _chosen(rows: pa.Table, keys: pa.Table, key: list[str], *, among: bool) -> pa.Table:
    if not keys.num_rows or not rows.num_rows:
        return rows.slice(0, 0) if among else rows
    if len(key) == 1:
        found = pc.is_in(rows.column(key[0]), value_set=keys.column(key[0]))
        return rows.filter(found if among else pc.invert(found))
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    left = numbered.join(keys.select(key), keys=key, join_type="left semi" if among else "left anti").column(_ROW)
    return rows.take(left.combine_chunks().sort())
