"""Take out of manifests what may be a value of a row or a secret: keys, region values, predicates, free texts.

Copied are the fields that are allowed: numbers, ids, names of columns, indexes and files, and the settings of Lance and
memwal-ops. A list of forbidden fields would miss those that a later release of Lance adds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.memwal_index import MEMWAL_TYPE_URL, is_legacy
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest

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


_NUMBER, _ANY = Allow.NUMBER, Allow.ANY
_UUID: Mapping[int, Rule] = {1: _ANY}
_PROGRESS: Mapping[int, Rule] = {1: _UUID, 2: _NUMBER}
# Settings of which neither the names nor the values are a user's.
_OUR_SETTINGS = (b"lance.", b"memwal-ops.")
_FIELD_SETTINGS = (b"lance-schema:", b"lance-encoding:", b"ARROW:extension:", b"memwal-ops.")
_EXTENSION, _EXTENSION_SETTINGS = "ARROW:extension:name", "ARROW:extension:metadata"
_VECTOR_URL = "VectorIndexDetails"
_FLAGS = frozenset({b"true", b"false"})


def manifest_without_values(
    data: bytes, snapshot: Callable[[bytes], bytes], text: Callable[[str], str], mark: Callable[[bytes], bytes]
) -> bytes:
    """The manifest file of a version, of the table or of a generation.

    Args:
        snapshot: removes the region values from an inline snapshot.
        text: masks secrets in a URI.
        mark: what stands for a value.

    Raises:
        InvalidFormatError: it cannot be decoded.
    """
    decoded = decode_version_manifest(data)
    rules = _Rules(snapshot, text, mark)
    manifest = table_pb2.Manifest.FromString(allowed_fields(decoded.manifest.SerializeToString(), rules.manifest))
    indexes = transaction = None
    if decoded.indexes is not None:
        section = allowed_fields(decoded.indexes.SerializeToString(), {1: rules.index})
        indexes = table_pb2.IndexSection.FromString(section)
    if decoded.transaction is not None:
        kept = allowed_fields(decoded.transaction.SerializeToString(), _TRANSACTION)
        transaction = table_pb2.Transaction.FromString(kept)
    return encode_version_manifest(
        replace(decoded, manifest=manifest, indexes=indexes, transaction=transaction, dictionaries=b"")
    )


def region_manifest_without_values(data: bytes, mark: Callable[[bytes], bytes]) -> bytes:
    """A region manifest, in which marks stand for the region's values.

    Raises:
        InvalidFormatError: it is not a protobuf message.
    """
    generation: Mapping[int, Rule] = {1: _NUMBER, 2: _ANY, 3: _NUMBER, 4: _NUMBER, 5: _NUMBER}
    numbers: Mapping[int, Rule] = dict.fromkeys((1, 2, 3, 4, 6, 10, 15), _NUMBER)
    return allowed_fields(data, {**numbers, 8: generation, 11: _UUID, 14: {1: _ANY, 2: mark}})


def _setting(prefixes: tuple[bytes, ...]) -> Callable[[bytes], bytes | None]:
    """A rule for an entry of a map: it is kept if its key begins with one of the prefixes."""

    def rule(entry: bytes) -> bytes | None:
        key = allowed_fields(entry, {1: lambda name: name if name.startswith(prefixes) else None})
        return allowed_fields(entry, {1: _ANY, 2: _ANY}) if key else None

    return rule


def _column(data: bytes) -> bytes:
    """A field of the schema, with Lance's and Arrow's own metadata; of other extension types, only the name."""
    kept = allowed_fields(data, {
        **dict.fromkeys((1, 3, 4, 6, 7, 12, 13), _NUMBER), 2: _ANY, 5: _ANY, 9: _ANY, 11: _ANY,
        10: _setting(_FIELD_SETTINGS),
    })  # fmt: skip
    field = table_pb2.Field.FromString(kept)
    if not field.metadata.get(_EXTENSION, b"").startswith((b"arrow.", b"lance.")):
        field.metadata.pop(_EXTENSION_SETTINGS, None)
    return field.SerializeToString()


def _nothing(_: bytes) -> bytes:
    return b""


def _legacy(_: bytes) -> bytes:
    """That it was the index of Lance 0.31 to 1.x: its entries name regions by values."""
    return b"\x0a\x00"


# Of an operation only its kind, and what decides about the history of columns and of progress.
_TRANSACTION: Mapping[int, Rule] = {
    1: _NUMBER,
    2: _ANY,
    4: _setting((b"memwal-ops.",)),
    **dict.fromkeys(range(100, 130), _nothing),
    106: {1: _NUMBER},
    108: {5: _PROGRESS},
}
_DELETION: Mapping[int, Rule] = dict.fromkeys((1, 2, 3, 4, 7), _NUMBER)
_FILE: Mapping[int, Rule] = dict.fromkeys(range(1, 8), _ANY)
# Row ids and the versions of rows; or a file with them.
_FRAGMENT: Mapping[int, Rule] = {1: _NUMBER, 2: _FILE, 3: _DELETION, 4: _NUMBER, **dict.fromkeys(range(5, 11), _ANY)}


class _Rules:
    """The fields of a version manifest that are kept."""

    def __init__(
        self, snapshot: Callable[[bytes], bytes], text: Callable[[str], str], mark: Callable[[bytes], bytes]
    ) -> None:
        self._snapshot, self._text, self._mark = snapshot, text, mark

    @property
    def manifest(self) -> Mapping[int, Rule]:
        numbers: Mapping[int, Rule] = dict.fromkeys((3, 6, 9, 10, 11, 14, 17, 21, 23), _NUMBER)
        return {
            **numbers,
            1: _column,
            2: _FRAGMENT,
            7: {1: _NUMBER, 2: _NUMBER},
            12: _ANY,
            13: dict.fromkeys(range(1, 5), _ANY),
            15: {1: _ANY, 2: _ANY},
            16: _setting(_OUR_SETTINGS),
            18: {1: _NUMBER, 2: _ANY, 3: _NUMBER, 4: lambda path: self._text(path.decode(errors="replace")).encode()},
            20: _ANY,
        }

    def index(self, data: bytes) -> bytes:
        entry = table_pb2.IndexMetadata.FromString(data)
        url = entry.index_details.type_url
        details: Rule = _nothing  # an index may have values in them, such as the words that it leaves out
        if url == MEMWAL_TYPE_URL:
            details = _legacy if is_legacy(entry) else self._memwal
        elif url.endswith(_VECTOR_URL):
            details = {**dict.fromkeys(range(1, 9), _ANY), 9: _setting((b"lance.",))}
        return allowed_fields(data, {
            1: _UUID, 2: _ANY, 3: _ANY, 4: _NUMBER, 5: _ANY, 6: {1: _ANY, 2: details}, 7: _NUMBER, 8: _NUMBER,
            9: _NUMBER, 10: {1: _ANY, 2: _NUMBER},
        })  # fmt: skip

    def _memwal(self, details: bytes) -> bytes:
        option: Mapping[int, Rule] = {1: _ANY, 2: self._plain}
        field: Mapping[int, Rule] = {1: _ANY, 2: _ANY, 3: _ANY, 4: self._mark, 5: _ANY, 6: option}
        return allowed_fields(details, {
            **dict.fromkeys((1, 2, 12), _NUMBER), 3: self._snapshot, 7: {1: _NUMBER, 2: field}, 8: _ANY,
            9: _PROGRESS, 10: {1: _ANY, 2: _PROGRESS}, 11: option,
        })  # fmt: skip

    def _plain(self, value: bytes) -> bytes:
        """A number or a flag as it is; a mark for anything else."""
        return value if value.isdigit() or value.lower() in _FLAGS else self._mark(value)
