"""Copy a protobuf message with the fields that are allowed, and no others.

A list of forbidden fields would miss those that a later release of Lance adds; so unknown fields are left out too.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

from memwal_ops.errors import InvalidFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_SHIFT = 63


class Allow(enum.Enum):
    """Kinds of fields that are copied unchanged."""

    NUMBER = "number"
    """If it is a number, on the wire."""
    ANY = "any"
    """Numbers, strings, bytes, packed lists."""


Rule: TypeAlias = "Allow | Mapping[int, Rule] | Callable[[bytes], bytes | None]"
"""Unchanged; the allowed fields of a message; or a function from the field's bytes to others (None: left out)."""


def allowed_fields(data: bytes, rules: Mapping[int, Rule]) -> bytes:
    """The message with the fields of ``rules`` by number, in the order of the original.

    Raises:
        InvalidFormatError: it is not a protobuf message.
    """
    out = bytearray()
    position = 0
    while position < len(data):
        start = position
        tag, value = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(data, value)
        elif kind == _BYTES:
            length, value = _varint(data, value)
            position = value + length
        elif kind in {_FIXED64, _FIXED32}:
            position = value + (8 if kind == _FIXED64 else 4)
        else:
            raise InvalidFormatError(f"A field has the unknown wire type {kind}.")
        if position > len(data):
            raise InvalidFormatError("A field is truncated.")
        rule = rules.get(tag >> 3)
        if rule is Allow.ANY or (rule is Allow.NUMBER and kind != _BYTES):
            out += data[start:position]
        elif rule is not None and not isinstance(rule, Allow) and kind == _BYTES:
            inner = data[value:position]
            copied = rule(inner) if callable(rule) else allowed_fields(inner, rule)
            if copied is not None:
                out += _encoded(tag) + _encoded(len(copied)) + copied
    return bytes(out)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and the position after it."""
    number = shift = 0
    while position < len(data) and shift <= _MAX_SHIFT:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the bit that means that more follows
            return number, position
        shift += 7
    raise InvalidFormatError("A number is truncated.")


def _encoded(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
