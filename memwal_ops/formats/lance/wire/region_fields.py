"""Encode and decode region field values: raw Arrow scalars in a region manifest, typed by ``result_type``.

A number is stored as little-endian bytes, a string as UTF-8, a boolean as one byte. The type is the name of
an Arrow type (S0-102); values of an unknown type are not decoded.

All NaNs are one value, whatever their bits: :data:`NAN`, which is equal to itself in tuples, as other values are.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal_ops.errors import InvalidFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.formats.lance.wire._pb import memwal_pb2

NAN = float("nan")
_BITS_IN_BYTE = 8
_NAT = -(2**63)
_DECIMAL = re.compile(r"decimal(128|256)\(([0-9]{1,2}), ?(-?[0-9]{1,2})\)")
_DECIMALS = {"128": pa.decimal128, "256": pa.decimal256}
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
    **{f"timestamp[{unit}]": pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")},
    "binary": pa.binary(),
}
_NAMES = {kind: name for name, kind in reversed(_TYPES.items())}


def field_type(result_type: str) -> pa.DataType:
    """The Arrow type that ``result_type`` names; ``binary`` if it is unknown."""
    found = _DECIMAL.fullmatch(result_type.strip().lower())
    if found is not None:
        try:
            return _DECIMALS[found[1]](int(found[2]), int(found[3]))
        except ValueError:
            return pa.binary()
    return _TYPES.get(result_type.strip().lower(), pa.binary())


def field_types(specs: Iterable[memwal_pb2.RegionSpec]) -> dict[str, pa.DataType]:
    """Type per region field, in the order of the specs; ``binary`` if two specs disagree about a field."""
    types: dict[str, pa.DataType] = {}
    for spec in specs:
        for field in spec.fields:
            found = field_type(field.result_type)
            types[field.field_id] = found if types.get(field.field_id, found) == found else pa.binary()
    return types


def type_name(kind: pa.DataType) -> str | None:
    """The ``result_type`` of a type, the inverse of :func:`field_type`; None if the type has no name."""
    return str(kind) if _DECIMAL.fullmatch(str(kind)) else _NAMES.get(kind)


def canonical(value: Any) -> Any:
    """The value in the form in which values are compared: :data:`NAN` for any NaN."""
    return NAN if isinstance(value, float) and math.isnan(value) else value


def encode_field(value: Any, kind: pa.DataType) -> bytes | None:
    """The bytes of a value, the inverse of :func:`decode_field`; None for NULL, which manifests omit."""
    if value is None:
        return None
    scalar = pa.scalar(value, kind)
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return bytes(scalar.as_buffer())
    if pa.types.is_boolean(kind):
        return b"\1" if value else b"\0"
    return bytes(pa.array([value], kind).buffers()[1])[: kind.bit_width // _BITS_IN_BYTE]


def decode_field(value: bytes, kind: pa.DataType) -> Any:
    """The Python value of a stored scalar.

    Raises:
        InvalidFormatError: the bytes are not a value of the type.
    """
    if pa.types.is_binary(kind):
        return value
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidFormatError(f"{value!r} is not valid UTF-8.") from error
    if pa.types.is_boolean(kind):
        if len(value) != 1:
            raise InvalidFormatError(f"{len(value)} bytes are not a {kind}.")
        return value != b"\0"
    if len(value) * _BITS_IN_BYTE != kind.bit_width:
        raise InvalidFormatError(f"{len(value)} bytes are not a {kind}, which has {kind.bit_width // _BITS_IN_BYTE}.")
    if pa.types.is_timestamp(kind) and int.from_bytes(value, "little", signed=True) == _NAT:
        raise InvalidFormatError(f"{value!r} is not a valid {kind}: it is NumPy's and pandas' \"not a time\".")
    try:
        return canonical(pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(value)])[0].as_py())
    except (OverflowError, ValueError) as error:
        raise InvalidFormatError(f"{value!r} is not a valid {kind}: {error}") from error
