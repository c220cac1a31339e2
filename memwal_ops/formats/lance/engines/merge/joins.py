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
# A reader makes a bitmap of integer keys that are at least this dense: 8 MiB for a million keys.
_NUMBERS_PER_KEY = 64
# Bits for each hashed key: of the other keys, every 16th to 32nd finds a bit that is set.
_BITS_PER_KEY = 32
_FOLD, _MULTIPLIER = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD)  # the first step of MurmurHash3's finalizer
_BYTE, _BIT = np.uint64(3), np.uint64(7)


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

    Integer keys that lie close together are looked up in a bitmap, batch by batch, while the batch is
    in the processor's caches. For others a hash table is made for each ``chunk_bytes`` of rows.
    """
    bitmap = _Bitmap.of(keys.column(key[0]), _NUMBERS_PER_KEY * keys.num_rows // 8) if len(key) == 1 else None
    if bitmap is None or not bitmap.exact:
        for rows in in_chunks(batches, chunk_bytes):
            yield from without_keys(rows, keys, key).to_batches()
        return
    for batch in batches:
        yield batch.filter(pa.array(~bitmap.found(batch.column(key[0]))))


def chunks_with_keys(
    batches: Iterable[pa.RecordBatch], keys: pa.Table, key: list[str], *, chunk_bytes: int
) -> Iterator[pa.Table]:
    """The rows whose key is one of these.

    Integer keys are looked up in a bitmap first. If that is not exact, the rows that it leaves are gathered to
    ``chunk_bytes``, for which a hash table of all keys is made: for each chunk of all rows it would take longer than
    all else.
    """
    bitmap = _Bitmap.of(keys.column(key[0]), chunk_bytes) if len(key) == 1 else None
    if bitmap is not None:
        batches = (batch.filter(pa.array(bitmap.found(batch.column(key[0])))) for batch in batches)
    for rows in in_chunks(batches, chunk_bytes):
        yield rows if bitmap is not None and bitmap.exact else with_keys(rows, keys, key)


class _Bitmap:
    """A set of integers.

    Attributes:
        exact: there is a bit for each number from the lowest to the highest, and one that is never set. Otherwise a
            number's bit is chosen by a hash, and some numbers that are not in the set are found as well.
    """

    def __init__(self, numbers: NDArray[np.int64], bits: int, *, exact: bool) -> None:
        self.exact = exact
        self._lowest, self._last = numbers.min(), np.uint64(bits - 1)
        self._shift = np.uint64(65 - bits.bit_length())
        self._bytes = np.zeros(-(-bits // 8), np.uint8)
        places = self._places(numbers)
        np.bitwise_or.at(self._bytes, places >> _BYTE, np.left_shift(np.uint8(1), (places & _BIT).astype(np.uint8)))

    @classmethod
    def of(cls, keys: pa.ChunkedArray, max_bytes: int) -> _Bitmap | None:
        """A bitmap of at most ``max_bytes``; None: other types than integers, or too many for it."""
        if not pa.types.is_signed_integer(keys.type) or not len(keys) or keys.null_count:
            return None
        numbers = keys.to_numpy().astype(np.int64, copy=False)
        width = int(numbers.max()) - int(numbers.min()) + 2
        if width <= 8 * max_bytes:
            return cls(numbers, width, exact=True)
        bits = 1 << min(_BITS_PER_KEY * len(numbers), 8 * max_bytes).bit_length() - 1
        return cls(numbers, bits, exact=False) if bits >= 2 * len(numbers) else None

    def found(self, keys: pa.Array) -> NDArray[np.bool_]:
        """Which of these are in the set, or may be if it is not exact; a null is not."""
        numbers = (keys.fill_null(0) if keys.null_count else keys).to_numpy().astype(np.int64, copy=False)
        places = self._places(numbers)
        bits = (self._bytes[places >> _BYTE] >> (places & _BIT).astype(np.uint8)) & np.uint8(1)
        found: NDArray[np.bool_] = bits.view(np.bool_)
        return found & keys.is_valid().to_numpy(zero_copy_only=False) if keys.null_count else found

    def _places(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        if not self.exact:
            bits = numbers.view(np.uint64)
            hashed: NDArray[np.uint64] = ((bits ^ (bits >> _FOLD)) * _MULTIPLIER) >> self._shift
            return hashed
        # Numbers below the lowest, and differences that overflow, become large unsigned numbers.
        places: NDArray[np.uint64] = np.minimum((numbers - self._lowest).view(np.uint64), self._last)
        return places


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
        column, others = (table.column(key[0]) for table in (rows, keys))
        if pa.types.is_float16(column.type):  # which Arrow cannot look up
            column, others = column.cast(pa.float32()), others.cast(pa.float32())
        found = pc.is_in(column, value_set=others)
        return rows.filter(found if among else pc.invert(found))
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    left = numbered.join(keys.select(key), keys=key, join_type="left semi" if among else "left anti").column(_ROW)
    return rows.take(left.combine_chunks().sort())
