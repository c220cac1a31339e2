"""Decode and encode the manifest file of a table version: index section, transaction, manifest and trailer.

``[dictionaries] [u32 n][index section] [u32 n][transaction] [u32 n][manifest] [u64 position][u16][u16]LANC``

All numbers are little-endian; the position is that of the manifest's length prefix, from the start of the file. The
manifest has the positions of the other two sections. A rewrite moves them, so every field that contains a position must
be known: a manifest with an unknown field can be read, but not rewritten (S3-013).

Tables with files of Lance's first format (0.1) have the values of their dictionary columns at the start of the file, in
front of the sections; positions from the start of the file are also among these bytes, so a rewrite leaves them there.
"""

from __future__ import annotations

import operator
import re
import struct
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.errors import InvalidFormatError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAGIC = b"LANC"
_TRAILER = struct.Struct("<QHH4s")
_LENGTH = struct.Struct("<I")
_UUID_BYTES = 16
# The field ``writer_version`` of a release of Lance: its number, its length (one byte), the name.
_WRITER_TAG, _WRITER = 13 << 3 | 2, b"\n\x05lance\x12"

# The fields with the positions of the other sections.
POSITIONS = ("index_section", "transaction_section", "transaction_section_old")
# Per type of the values of a dictionary inside a manifest their width; 0: any, with the positions of their ends.
_WIDTHS = {f"{sign}int{8 * width}": width for width in (1, 2, 4, 8) for sign in ("", "u")} | {
    "string": 0, "binary": 0, "large_string": 0, "large_binary": 0, "halffloat": 2, "float": 4, "double": 8,
}  # fmt: skip
_POSITION = struct.Struct("<q")

LOST_VALUES = (
    "Keep all versions: memwal-ops verify URI --deep names those that have lost the values. Write what "
    "lance.dataset(URI, version=N) reads of the newest one that has them into a new table; pylance does not restore it."
)

_Section = TypeVar("_Section", bound=Message)


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """A decoded manifest file; the messages preserve unknown fields.

    Attributes:
        manifest: the manifest message. Its position fields are those of the file that was decoded.
        indexes: the index section; None if the version has no index.
        transaction: the transaction that made the version; None if it is in a file of its own.
        major: format version of the envelope.
        minor: format version of the envelope.
        dictionaries: what precedes the sections: the values of dictionary columns, to which positions in ``manifest``
            lead; empty for most tables.
    """

    manifest: pb.Manifest
    indexes: pb.IndexSection | None
    transaction: pb.Transaction | None
    major: int
    minor: int
    dictionaries: bytes = b""

    @property
    def index_entries(self) -> Sequence[pb.IndexMetadata]:
        """The entries of the index section: one for each segment of an index; none without the section."""
        return () if self.indexes is None else self.indexes.indices


def decode_version_manifest(data: bytes) -> VersionManifest:
    """Decode a whole manifest file.

    Raises:
        InvalidFormatError: truncated, no trailer, a position outside the file, not a protobuf message, or a
            timestamp that is out of range.
    """
    if len(data) < _TRAILER.size + _LENGTH.size:
        raise InvalidFormatError(f"{len(data)} bytes are too few for a version manifest.")
    position, major, minor, magic = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    if magic != MAGIC:
        raise InvalidFormatError(f"The file ends in {magic!r}, not in {MAGIC!r}: it is truncated or not a manifest.")
    manifest = _section(data, position, pb.Manifest, "manifest")
    try:
        manifest.timestamp.ToNanoseconds()
    except ValueError as error:
        raise InvalidFormatError(f"The manifest's timestamp is out of range: {error}") from error
    indexes = transaction = None
    if manifest.HasField("index_section"):
        indexes = _section(data, manifest.index_section, pb.IndexSection, "index section")
    if manifest.HasField("transaction_section"):
        transaction = _section(data, manifest.transaction_section, pb.Transaction, "transaction")
    elif manifest.HasField("transaction_section_old"):
        transaction = _section(data, manifest.transaction_section_old, pb.Transaction, "transaction")
    first = min([position, *(getattr(manifest, field) for field in POSITIONS if manifest.HasField(field))])
    return VersionManifest(manifest, indexes, transaction, major, minor, data[:first])


def index_section_by_ends(head: bytes, tail: bytes) -> tuple[bool, pb.IndexSection | None]:
    """Decode the index section from the two ends of a manifest file; for files too large to be read whole.

    Lance writes the index section first, then the transaction, then the manifest. This is verified, not
    assumed: the lengths of one or two sections must lead exactly to the manifest, and the first must
    contain index entries and nothing else.

    Args:
        head: the file's first bytes; they must include the first section and the next length prefix.
        tail: at least its last 16 bytes.

    Returns:
        Whether the ends were sufficient, and the section; None if the version has no index.
    """
    if len(tail) < _TRAILER.size:
        return False, None
    position, _, _, magic = _TRAILER.unpack_from(tail, len(tail) - _TRAILER.size)
    if magic != MAGIC:
        return False, None
    if position == 0:
        return True, None
    end = _next_section(head, 0)
    if end is None or end > len(head) or (end != position and _next_section(head, end) != position):
        return False, None
    section = pb.IndexSection()
    try:
        section.ParseFromString(head[_LENGTH.size : end])
    except DecodeError:
        return False, None
    entries = section.indices
    plain = len(UnknownFieldSet(section)) == 0 and all(len(entry.uuid.uuid) == _UUID_BYTES for entry in entries)
    return (True, section) if plain and entries else (False, None)


def last_fields(tail: bytes) -> pb.Manifest | None:
    """Decode the manifest's fields from ``writer_version`` on, base paths among them, from the end of its file.

    Fields are in the order of their numbers. None: the end does not begin before that field, as with much metadata.
    """
    start = tail.find(_WRITER) - 2
    if start < 0 or tail[start] != _WRITER_TAG:
        return None
    try:
        return pb.Manifest.FromString(tail[start : -_TRAILER.size])
    except DecodeError:
        return None


def index_section_length(head: bytes) -> int:
    """Number of bytes of a manifest file that :func:`index_section_by_ends` needs, from its first four."""
    return (_next_section(head, 0) or 0) + _LENGTH.size


def _next_section(data: bytes, position: int) -> int | None:
    if position + _LENGTH.size > len(data):
        return None
    (length,) = _LENGTH.unpack_from(data, position)
    return position + _LENGTH.size + int(length)


def encode_version_manifest(version: VersionManifest) -> bytes:
    """Encode a manifest file; the positions inside are those of the new file.

    The argument is not changed. The same value always gives the same bytes.

    Raises:
        TableCorruptError: a dictionary column has no values in the file that was decoded.
        UnsupportedFeatureError: an unknown manifest field, which may contain a position.
    """
    check_positions_known(version.manifest)
    try:
        dictionary_values(version.manifest, version.dictionaries)
    except InvalidFormatError as error:
        raise TableCorruptError(
            f"Version {version.manifest.version} cannot be rewritten: {error}", remedy=LOST_VALUES
        ) from error
    manifest = deepcopy(version.manifest)
    old_position = manifest.HasField("transaction_section_old") and not manifest.HasField("transaction_section")
    for field in POSITIONS:
        manifest.ClearField(field)
    out = bytearray(version.dictionaries)
    if version.indexes is not None:
        manifest.index_section = _append(out, version.indexes)
    if version.transaction is not None:
        transaction_at = _append(out, version.transaction)
        if old_position:
            manifest.transaction_section_old = transaction_at
        else:
            manifest.transaction_section = transaction_at
    manifest_at = _append(out, manifest)
    out += _TRAILER.pack(manifest_at, version.major, version.minor, MAGIC)
    return bytes(out)


def lost_dictionary(version: VersionManifest) -> str | None:
    """Why the values of a dictionary column are lost, as the end of a sentence on the manifest; None: none are.

    Early releases of memwal-ops left them out of the manifests that they wrote.
    """
    try:
        dictionary_values(version.manifest, version.dictionaries)
    except InvalidFormatError as error:
        return f"is damaged: {str(error).rstrip('.')}"
    except UnsupportedFeatureError:
        pass
    return None


def dictionary_values(manifest: pb.Manifest, data: bytes) -> Mapping[int, tuple[bytes, ...]]:
    """The encoded values of the dictionary columns inside a manifest's file, by the ids of their fields.

    Args:
        manifest: decoded from the file.
        data: the file, or its beginning up to the first section.

    Raises:
        InvalidFormatError: they are not where the manifest says.
        UnsupportedFeatureError: values of a type that Lance does not store there.
    """
    return {field.id: _values_of(field, data) for field in manifest.fields if field.dictionary.length}


def _values_of(field: pb.Field, data: bytes) -> tuple[bytes, ...]:
    kind = field.logical_type.partition(":")[2].partition(":")[0]
    if kind not in _WIDTHS:
        raise UnsupportedFeatureError(
            f"Column {field.name} has a dictionary of {kind or 'an unknown type'} inside the manifest, which this "
            "release of memwal-ops does not support."
        )
    at, length, width = field.dictionary.offset, field.dictionary.length, _WIDTHS[kind]
    end = at + (length * width or (length + 1) * _POSITION.size)
    ends: Sequence[int] = ()
    if 0 <= at < end <= len(data):
        ends = range(at, end + 1, width) if width else [one for (one,) in _POSITION.iter_unpack(data[at:end])]
    if not ends or ends[0] < 0 or ends[-1] > end or any(map(operator.gt, ends, ends[1:])):
        raise InvalidFormatError(
            f"The {length:,} values of the dictionary column {field.name} are not in the manifest, at position {at:,}."
        )
    return tuple(data[start:stop] for start, stop in pairwise(ends))


def check_positions_known(manifest: pb.Manifest) -> None:
    """Refuse a manifest with an unknown field: it may contain a file position, which would not be moved."""
    unknown = sorted({field.field_number for field in UnknownFieldSet(manifest)})  # type: ignore[attr-defined]  # iterable, missing in the stub
    if manifest.version_aux_data:
        unknown.append(pb.Manifest.VERSION_AUX_DATA_FIELD_NUMBER)
    if unknown:
        raise UnsupportedFeatureError(
            f"The table's manifest has fields that this release of memwal-ops does not support and must not rewrite: "
            f"{unknown}."
        )


def _section(data: bytes, position: int, kind: type[_Section], name: str) -> _Section:
    end = len(data) - _TRAILER.size
    start = position + _LENGTH.size
    if start > end:
        raise InvalidFormatError(f"The position of the {name} is {position}, but the file has {len(data)} bytes.")
    (length,) = _LENGTH.unpack_from(data, position)
    if start + length > end:
        raise InvalidFormatError(
            f"The {name} has {length} bytes from position {start} on, but the file has {len(data)} bytes."
        )
    message = kind()
    try:
        message.ParseFromString(data[start : start + length])
    except DecodeError as error:
        raise InvalidFormatError(f"The {name} is not a protobuf message: {error}") from error
    return message


def _append(out: bytearray, message: Message) -> int:
    position = len(out)
    data = message.SerializeToString(deterministic=True)
    out += _LENGTH.pack(len(data))
    out += data
    return position


def lance_major(manifest: pb.Manifest) -> int | None:
    """The major number of the Lance release that wrote a version; None if it does not name a Lance release."""
    number = re.match(r"(\d+)\.", manifest.writer_version.version)
    return int(number[1]) if manifest.writer_version.library == "lance" and number else None
