"""Values of region fields: raw Arrow scalars in a region manifest, typed by their field's ``result_type``.

A number is its little-endian bytes, a string its UTF-8, a boolean one byte. The type is the name of
an Arrow type (S0-102); where this release does not know the name, the bytes stay bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal_ops.errors import InvalidFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.format._pb import memwal_pb2

_BITS_IN_BYTE = 8
_TYPES = {
    **{str(one): one for one in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{str(one): one for one in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    "float32": pa.float32(),
    "float": pa.float32(),
    "float64": pa.float64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "boolean": pa.bool_(),
    "utf8": pa.string(),
    "string": pa.string(),
    "large_utf8": pa.large_string(),
    "large_string": pa.large_string(),
    "date32": pa.date32(),
    "date32:day": pa.date32(),
    "date64": pa.date64(),
    "date64:ms": pa.date64(),
}


def field_type(result_type: str) -> pa.DataType:
    """The Arrow type that ``result_type`` names; ``binary`` where it is not known."""
    return _TYPES.get(result_type.strip().lower(), pa.binary())


def field_types(specs: Iterable[memwal_pb2.RegionSpec]) -> dict[str, pa.DataType]:
    """Type per region field, in the order of the specs; ``binary`` where two specs disagree on a name."""
    types: dict[str, pa.DataType] = {}
    for spec in specs:
        for field in spec.fields:
            found = field_type(field.result_type)
            types[field.field_id] = found if types.get(field.field_id, found) == found else pa.binary()
    return types


def decode_field(value: bytes, kind: pa.DataType) -> Any:
    """The Python value of a stored scalar.

    Raises:
        InvalidFormatError: the bytes are no such value.
    """
    if pa.types.is_binary(kind):
        return value
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidFormatError(f"{value!r} is no UTF-8 text.") from error
    if pa.types.is_boolean(kind):
        if len(value) != 1:
            raise InvalidFormatError(f"{len(value)} bytes are no {kind}.")
        return value != b"\0"
    if len(value) * _BITS_IN_BYTE != kind.bit_width:
        raise InvalidFormatError(f"{len(value)} bytes are no {kind}, which has {kind.bit_width // _BITS_IN_BYTE}.")
    try:
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(value)])[0].as_py()
    except (OverflowError, ValueError) as error:
        raise InvalidFormatError(f"{value!r} is no {kind} that a calendar has: {error}") from error
