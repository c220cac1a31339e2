"""Compute Murmur3 hashes of columns: x86, 32 bits, seed 0, a whole column at once (S0-101, S0-102).

The specification does not define which bytes of a value are hashed, but requires equal values of two numeric types
to have one hash (S0-089). So values are hashed like in Iceberg: integers, and dates (in days) and timestamps (in
microseconds), as eight little-endian bytes; text as UTF-8. A float with an integer value is hashed as that integer,
any other one as a double; zero has no sign, and all NaNs are equal. A decimal is hashed as the integer or double that
it is equal to, else as its digits, in UTF-8.
"""

from __future__ import annotations

import struct
from decimal import Context, Decimal
from typing import TYPE_CHECKING

import mmh3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WORD = 8
# Rows per batch: the working set fits a processor's cache.
_CHUNK = 1 << 14
_LARGEST = 2.0**63
# More digits than a decimal of 256 bits has.
_WIDE = Context(prec=100)


def hashable(kind: pa.DataType) -> bool:
    """Whether values of a type can be hashed."""
    return _is_word(kind) or _is_bytes(kind) or bool(pa.types.is_decimal(kind))


def murmur3(columns: Sequence[pa.Array]) -> pa.Array:
    """The hash of each row, as int32; NULL where all columns are NULL, which are left out of it otherwise.

    Args:
        columns: of one length; at least one, each of a type that is :func:`hashable`.

    Raises:
        InvalidUsageError: a type that cannot be hashed.
    """
    if len(columns) == 1 and _is_bytes(columns[0].type):
        return pa.array([None if value is None else mmh3.hash(value, 0) for value in _values(columns[0])], pa.int32())
    if all(_is_word(column.type) for column in columns):
        return _of_words(columns)
    parts = [_values(column) for column in columns]
    rows = ([value for value in row if value is not None] for row in zip(*parts, strict=True))
    return pa.array([mmh3.hash(b"".join(row), 0) if row else None for row in rows], pa.int32())


def _of_words(columns: Sequence[pa.Array]) -> pa.Array:
    length = len(columns[0])
    hashes = np.empty(length, np.int32)
    present = np.zeros(length, bool)
    words = [_words(column) for column in columns]
    valid = [None if not column.null_count else ~_nulls(column) for column in columns]
    for start in range(0, length, _CHUNK):
        part = slice(start, start + _CHUNK)
        state = np.zeros(len(hashes[part]), np.uint32)
        size = np.zeros(len(state), np.uint32)
        for word, known in zip(words, valid, strict=True):
            halves = word[part].view(np.uint32).reshape(-1, 2)
            mixed = _mix(_mix(state, halves[:, 0]), halves[:, 1])
            if known is None:
                state, size = mixed, size + np.uint32(_WORD)
            else:
                state = np.where(known[part], mixed, state)
                size = size + known[part].astype(np.uint32) * np.uint32(_WORD)
        present[part] = size > 0
        hashes[part] = _finish(state, size).view(np.int32)
    return pa.array(hashes, mask=None if present.all() else ~present)


def _mix(state: NDArray[np.uint32], block: NDArray[np.uint32]) -> NDArray[np.uint32]:
    found = block * np.uint32(0xCC9E2D51)
    found = (found << np.uint32(15)) | (found >> np.uint32(17))
    found *= np.uint32(0x1B873593)
    found ^= state
    found = (found << np.uint32(13)) | (found >> np.uint32(19))
    found *= np.uint32(5)
    found += np.uint32(0xE6546B64)
    return found


def _finish(state: NDArray[np.uint32], size: NDArray[np.uint32]) -> NDArray[np.uint32]:
    found = state ^ size
    found ^= found >> np.uint32(16)
    found *= np.uint32(0x85EBCA6B)
    found ^= found >> np.uint32(13)
    found *= np.uint32(0xC2B2AE35)
    found ^= found >> np.uint32(16)
    return found


def _is_word(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_date(kind)
        or types.is_timestamp(kind)
        or types.is_null(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _values(column: pa.Array) -> list[bytes | None]:
    """The bytes of each value."""
    if _is_bytes(column.type):
        found: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
        return found
    if pa.types.is_decimal(column.type):
        return [None if value is None else _of_decimal(value) for value in column.to_pylist()]
    data, nulls = _words(column).tobytes(), _nulls(column)
    return [None if null else data[at * _WORD : (at + 1) * _WORD] for at, null in enumerate(nulls)]


def _nulls(column: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return found


def _words(column: pa.Array) -> NDArray[np.int64]:
    """The eight bytes of each value, in the order of little-endian numbers; any for NULL."""
    kind = column.type
    if not _is_word(kind):
        raise InvalidUsageError(f"Values of the type {kind} cannot be hashed into regions.")
    if pa.types.is_null(kind):
        return np.zeros(len(column), np.int64)
    if pa.types.is_floating(kind):
        return _of_floats(pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False))
    if pa.types.is_timestamp(kind):
        # Rounded down: the same moment in any unit. Nanoseconds and microseconds of one moment are then alike.
        column = pc.floor_temporal(column, unit="microsecond") if kind.unit == "ns" else column
        column = column.cast(pa.timestamp("us", kind.tz), safe=True).cast(pa.int64())
    elif pa.types.is_date(kind):
        column = column.cast(pa.date32(), safe=False).cast(pa.int32())
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(False if pa.types.is_boolean(column.type) else 0, column.type))
    plain: NDArray[np.int64] = column.to_numpy(zero_copy_only=False)
    if plain.dtype == np.uint64:
        return plain.view(np.int64)
    return np.ascontiguousarray(plain.astype(np.int64, copy=False))


def _of_floats(values: NDArray[np.float64]) -> NDArray[np.int64]:
    whole = (np.trunc(values) == values) & (np.abs(values) < _LARGEST)
    numbers = np.where(whole, values, 0.0).astype(np.int64)
    canonical = np.where(np.isnan(values), np.nan, values)
    return np.where(whole, numbers, canonical.view(np.int64))


def _of_decimal(value: Decimal) -> bytes:
    if value == value.to_integral_value(context=_WIDE) and -_LARGEST <= value < _LARGEST:
        return struct.pack("<q", int(value))
    double = float(value)
    return struct.pack("<d", double) if Decimal(double) == value else f"{value.normalize(_WIDE):f}".encode()
