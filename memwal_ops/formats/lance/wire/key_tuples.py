"""Encode keys of several columns as one binary column in the same order, as Lance indexes them in a generation.

Of each column a byte 1 (not NULL; 0 means NULL), and the value: whole numbers as eight bytes, most significant
first, with the sign bit turned where they have a sign; a boolean as one byte; text and bytes with each byte 0 followed
by 255, and two bytes 0 behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

_BINARY = pa.large_binary()
_SIGN = np.uint64(1 << 63)


def is_encodable(kind: pa.DataType) -> bool:
    """Whether values of a type can be encoded in such a tuple."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_date(kind)
        or types.is_boolean(kind)
        or _is_text(kind)
        or types.is_fixed_size_binary(kind)
    )


def key_tuples(columns: Sequence[pa.Array]) -> pa.Array:
    """One binary value for each row of columns of types that :func:`is_encodable`, without NULL values."""
    parts = [part for column in columns for part in _parts(column)]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", _BINARY)).cast(pa.binary())


def _parts(column: pa.Array) -> list[pa.Array]:
    kind = column.type
    one = pa.repeat(pa.scalar(b"\1", _BINARY), len(column))
    if pa.types.is_boolean(kind):
        return [one, _bytes(column.cast(pa.uint8()).to_numpy())]
    if pa.types.is_integer(kind) or pa.types.is_date(kind):
        if pa.types.is_unsigned_integer(kind):
            return [one, _bytes(column.cast(pa.uint64()).to_numpy().byteswap())]
        whole = column.cast(pa.int32() if kind == pa.date32() else pa.int64()).cast(pa.int64()).to_numpy()
        return [one, _bytes((whole.view(np.uint64) ^ _SIGN).byteswap())]
    escaped = pc.replace_substring(column.cast(_BINARY), b"\0", b"\0\xff")
    return [one, escaped, pa.repeat(pa.scalar(b"\0\0", _BINARY), len(column))]


def _bytes(values: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]) -> pa.Array:
    width = pa.binary(values.dtype.itemsize)
    return pa.Array.from_buffers(width, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]).cast(_BINARY)


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
