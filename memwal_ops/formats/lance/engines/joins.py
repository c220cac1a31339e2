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
# A reader makes a table of flags for keys that are at least this dense, at one byte each: 64 MiB for a million keys.
_SPREAD = 64
# Flags for each hashed key: of the other keys, an eighth finds a flag that is set.
_FLAGS_PER_KEY = 8
_FOLD, _MULTIPLIER = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD)  # the first step of MurmurHash3's finalizer


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
    flags = _Flags.of(keys.column(key[0]), _SPREAD * keys.num_rows) if len(key) == 1 else None
    if flags is None or not flags.exact:
        for rows in in_chunks(batches, chunk_bytes):
            yield from without_keys(rows, keys, key).to_batches()
        return
    for batch in batches:
        yield batch.filter(pa.array(~flags.found(batch.column(key[0]))))


def chunks_with_keys(
    batches: Iterable[pa.RecordBatch], keys: pa.Table, key: list[str], *, chunk_bytes: int
) -> Iterator[pa.Table]:
    """The rows whose key is one of these.

    Integer keys are looked up in a table of flags first. What may be among them is gathered to ``chunk_bytes``, for
    which a hash table of all keys is made: for each chunk of the rows it would take longer than all else.
    """
    flags = _Flags.of(keys.column(key[0]), chunk_bytes) if len(key) == 1 else None
    if flags is not None:
        batches = (batch.filter(pa.array(flags.found(batch.column(key[0])))) for batch in batches)
    for rows in in_chunks(batches, chunk_bytes):
        yield rows if flags is not None and flags.exact else with_keys(rows, keys, key)


class _Flags:
    """A set of integers, one byte for each flag.

    Attributes:
        exact: there is a flag for each number from the lowest to the highest, and one that is never set. Otherwise a
            number's flag is chosen by a hash, and is also found set for some numbers that are not in the set.
    """

    def __init__(self, numbers: NDArray[np.int64], count: int, *, exact: bool) -> None:
        self.exact = exact
        self._lowest = numbers.min()
        self._shift = np.uint64(65 - count.bit_length())
        self._flags = np.zeros(count, np.bool_)
        self._flags[self._places(numbers)] = True

    @classmethod
    def of(cls, keys: pa.ChunkedArray, max_bytes: int) -> _Flags | None:
        """A set of at most ``max_bytes``; None: other types than integers, or too many for it."""
        if not pa.types.is_signed_integer(keys.type) or not len(keys) or keys.null_count:
            return None
        numbers = keys.to_numpy().astype(np.int64, copy=False)
        width = int(numbers.max()) - int(numbers.min()) + 2
        if width <= max_bytes:
            return cls(numbers, width, exact=True)
        count = 1 << min(_FLAGS_PER_KEY * len(numbers), max_bytes).bit_length() - 1
        return cls(numbers, count, exact=False) if count >= 2 * len(numbers) else None

    def found(self, keys: pa.Array) -> NDArray[np.bool_]:
        """Which of these are in the set, or may be if it is not exact; a null is not."""
        numbers = (keys.fill_null(0) if keys.null_count else keys).to_numpy().astype(np.int64, copy=False)
        found: NDArray[np.bool_] = self._flags[self._places(numbers)]
        return found & keys.is_valid().to_numpy(zero_copy_only=False) if keys.null_count else found

    def _places(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        if not self.exact:
            bits = numbers.view(np.uint64)
            hashed: NDArray[np.uint64] = ((bits ^ (bits >> _FOLD)) * _MULTIPLIER) >> self._shift
            return hashed
        # Below the lowest, and where the difference overflows, it is a large number without a sign.
        above = (numbers - self._lowest).view(np.uint64)
        places: NDArray[np.uint64] = np.minimum(above, np.uint64(len(self._flags) - 1))
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
        found = pc.is_in(rows.column(key[0]), value_set=keys.column(key[0]))
        return rows.filter(found if among else pc.invert(found))
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    left = numbered.join(keys.select(key), keys=key, join_type="left semi" if among else "left anti").column(_ROW)
    return rows.take(left.combine_chunks().sort())
