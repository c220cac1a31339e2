"""The well-known transforms of region fields (S0-093 to S0-103): a column of region values from source columns.

``abs`` of the smallest int32 is no int32: it is computed in 64 bits, so that ``abs(h) % N`` is in [0, N) for every h.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.regions.murmur import hashable, murmur3

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_INT32_MAX = 2**31 - 1
# More digits than a decimal of 256 bits has.
_WIDE = Context(prec=100)
_DATE_PARTS = {"year": pc.year, "month": pc.month, "day": pc.day, "hour": pc.hour}
_NUMBERS = {"bucket": "num_buckets", "multi_bucket": "num_buckets", "truncate": "width"}
TRANSFORMS = frozenset({"identity", *_DATE_PARTS, *_NUMBERS})


def transforms_text() -> str:
    """Their names, as a sentence."""
    return f"The transforms are {', '.join(sorted(TRANSFORMS))}."


def check_transform(transform: str, parameters: Mapping[str, str], kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The result type of a transform for sources of these types.

    Raises:
        InvalidUsageError: an unknown transform, invalid parameters, or types that it does not support.
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
    found = (np.abs(values) % count).astype(np.int32)
    return pa.array(found, mask=hashes.is_null().to_numpy(zero_copy_only=False) if hashes.null_count else None)


def _truncated(column: pa.Array, width: int) -> pa.Array:
    kind = column.type
    if _is_text(kind):
        return pc.utf8_slice_codeunits(column, 0, width)
    if pa.types.is_decimal(kind):
        cut = [
            None if one is None else _WIDE.subtract(one, _WIDE.remainder(one, Decimal(width)))
            for one in column.to_pylist()
        ]
        return pa.array(cut, kind)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    values = pc.fill_null(column, pa.scalar(0, kind)).to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        found = values - np.fmod(values, values.dtype.type(width))
    else:
        wide = values.astype(np.uint64 if pa.types.is_unsigned_integer(kind) else np.int64)
        found = (wide - np.fmod(wide, wide.dtype.type(width))).astype(values.dtype)
    return pa.array(found, kind, mask=nulls)
