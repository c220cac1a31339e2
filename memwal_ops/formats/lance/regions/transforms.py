"""The well-known transforms of region fields (S0-093 to S0-103): a column of region values from source columns.

``abs`` of the smallest int32 is no int32: it is computed in 64 bits, so that ``abs(h) % N`` is in [0, N) for every h.

Hashes are Murmur3: x86, 32 bits, seed 0, a whole column at once (S0-101, S0-102). The specification does not define
which bytes of a value are hashed, but requires equal values of two numeric types to have one hash (S0-089). So values
are hashed like in Iceberg: integers, and dates (in days) and timestamps (in microseconds), as eight little-endian
bytes; text as UTF-8. A float with an integer value is hashed as that integer, any other one as a double; zero has no
sign, and all NaNs are equal. A decimal is hashed as the integer or double that it is equal to, else as its digits, in
UTF-8.
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
    from collections.abc import Mapping, Sequence

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

    Raises ``InvalidUsageError``: a type that is not :func:`hashable`.
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
    mixed = block * np.uint32(0xCC9E2D51)
    mixed = (mixed << np.uint32(15)) | (mixed >> np.uint32(17))
    mixed *= np.uint32(0x1B873593)
    mixed ^= state
    mixed = (mixed << np.uint32(13)) | (mixed >> np.uint32(19))
    mixed *= np.uint32(5)
    mixed += np.uint32(0xE6546B64)
    return mixed


def _finish(state: NDArray[np.uint32], size: NDArray[np.uint32]) -> NDArray[np.uint32]:
    mixed = state ^ size
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def _is_word(kind: pa.DataType) -> bool:
    of_numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(belongs(kind) for belongs in (*of_numbers, pa.types.is_date, pa.types.is_timestamp, pa.types.is_null))


def _is_bytes(kind: pa.DataType) -> bool:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    of_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(belongs(kind) for belongs in (*texts, *of_bytes))


def _values(column: pa.Array) -> list[bytes | None]:
    if _is_bytes(column.type):
        values: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
        return values
    if pa.types.is_decimal(column.type):
        return [None if value is None else _of_decimal(value) for value in column.to_pylist()]
    data, nulls = _words(column).tobytes(), _nulls(column)
    return [None if null else data[at * _WORD : (at + 1) * _WORD] for at, null in enumerate(nulls)]


def _nulls(column: pa.Array) -> NDArray[np.bool_]:
    nulls: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


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


_INT32_MAX = 2**31 - 1
# More digits than a decimal of 256 bits has.

_DATE_PARTS = {"year": pc.year, "month": pc.month, "day": pc.day, "hour": pc.hour}
_NUMBERS = {"bucket": "num_buckets", "multi_bucket": "num_buckets", "truncate": "width"}
TRANSFORMS = frozenset({"identity", *_DATE_PARTS, *_NUMBERS})


def transforms_text() -> str:
    """Their names, as a sentence."""
    return f"The transforms are {', '.join(sorted(TRANSFORMS))}."


def check_transform(transform: str, parameters: Mapping[str, str], kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The result type of a transform for sources of these types.

    Raises ``InvalidUsageError``: an unknown transform, invalid parameters, or types that it does not support.
    """
    if transform not in TRANSFORMS:
        raise InvalidUsageError(
            f"{transform!r} is not a transform.",
            remedy=f"These are: {', '.join(sorted(TRANSFORMS))}; or give an expression.",
        )
    wanted = {_NUMBERS[transform]} if transform in _NUMBERS else set()
    if set(parameters) != wanted:
        raise InvalidUsageError(
            f"The transform {transform} takes {' and '.join(wanted) or 'no parameters'}, not "
            f"{', '.join(sorted(parameters)) or 'none'}."
        )
    for name in wanted:
        _number(name, parameters[name])
    if not kinds or (len(kinds) > 1 and transform != "multi_bucket"):
        raise InvalidUsageError(
            f"The transform {transform} takes {'columns' if transform == 'multi_bucket' else 'one column'}, "
            f"not {len(kinds)}."
        )
    refused = [str(kind) for kind in kinds if not _supports(transform, kind)]
    if refused:
        raise InvalidUsageError(f"The transform {transform} does not support the type {', '.join(refused)}.")
    return pa.int32() if transform in {*_DATE_PARTS, "bucket", "multi_bucket"} else kinds[0]


def transformed(transform: str, parameters: Mapping[str, str], columns: Sequence[pa.Array]) -> pa.Array:
    """The region values of each row; the arguments passed :func:`check_transform`, or are all NULL."""
    if transform in {"bucket", "multi_bucket"}:
        return _buckets(murmur3(columns), _number("num_buckets", parameters["num_buckets"]))
    (column,) = columns
    if pa.types.is_null(column.type) or transform == "identity":
        return column
    if transform in _DATE_PARTS:
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"))
        return _DATE_PARTS[transform](column).cast(pa.int32())
    return _truncated(column, _number("width", parameters["width"]))


def _supports(transform: str, kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_null(kind):
        return True
    if transform in _DATE_PARTS:
        return bool(types.is_date(kind) or types.is_timestamp(kind))
    if transform == "truncate":
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or _is_text(kind))
    return transform == "identity" or hashable(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _INT32_MAX):
        raise InvalidUsageError(f"{name} is {text!r}: it must be a whole number from 1 to {_INT32_MAX}.")
    return int(text)


def _buckets(hashes: pa.Array, count: int) -> pa.Array:
    values = pc.fill_null(hashes, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    buckets = (np.abs(values) % count).astype(np.int32)
    return pa.array(buckets, mask=hashes.is_null().to_numpy(zero_copy_only=False) if hashes.null_count else None)


def _truncated(column: pa.Array, width: int) -> pa.Array:
    kind = column.type
    if _is_text(kind):
        return pc.utf8_slice_codeunits(column, 0, width)
    if pa.types.is_decimal(kind):
        cut = [
            None if number is None else _WIDE.subtract(number, _WIDE.remainder(number, Decimal(width)))
            for number in column.to_pylist()
        ]
        return pa.array(cut, kind)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    values = pc.fill_null(column, pa.scalar(0, kind)).to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        truncated = values - np.fmod(values, values.dtype.type(width))
    else:
        wide = values.astype(np.uint64 if pa.types.is_unsigned_integer(kind) else np.int64)
        truncated = (wide - np.fmod(wide, wide.dtype.type(width))).astype(values.dtype)
    return pa.array(truncated, kind, mask=nulls)
