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
from array import array
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.wire._pb import table_pb2


DELETION_FILES = 1
STABLE_ROW_IDS = 2
TABLE_CONFIG = 8
BASE_PATHS = 16
NO_TRANSACTION_FILES = 32
MIXED_FILE_VERSIONS = 256
_MANAGED, _MANAGED_SETTING = 1 << 14, "lance.blob.managed"
SHOWN_FEATURES = STABLE_ROW_IDS | BASE_PATHS | MIXED_FILE_VERSIONS
"""Those on which clients depend that are older than a table's writers."""

RECORDS = "memwal-ops.format"
"""In a table's configuration: the format of all records of memwal-ops in its manifest; 1 without it. A release that
changes them, so that an earlier one would misread them, sets a higher one."""
_RECORDS_FORMAT = 1
_EARLY = "11 or earlier"


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of tables that needs programs which know it.

    A manifest has two sets: a reader must know all flags of the first, a writer those of both. The releases from 11 on
    were measured: a feature's is the first one that opens a table with its flag. Lance gave some other numbers before
    that.

    Attributes:
        since: the first release of Lance that opens such a table by default; empty: none up to 14.0.2.
        supported: whether this release reads and writes such tables.
        paired: whether a manifest has its flag in both sets or in none; else Lance does not open it.
    """

    flag: int
    name: str
    since: str = ""
    supported: bool = False
    paired: bool = False

    def __str__(self) -> str:
        release = f"since Lance {self.since}" if self.since else "in no release of Lance up to 14.0.2"
        return f"{self.name} (feature flag {self.flag}, {release})"


FEATURES = (
    Feature(DELETION_FILES, "deletion files", _EARLY, supported=True),
    Feature(STABLE_ROW_IDS, "stable row ids", _EARLY, supported=True),
    Feature(4, "v2 data files", _EARLY, supported=True),
    Feature(TABLE_CONFIG, "table config", _EARLY, supported=True),
    Feature(BASE_PATHS, "base paths", _EARLY, supported=True),
    Feature(NO_TRANSACTION_FILES, "no transaction files", _EARLY, supported=True),
    Feature(64, "data overlay files"),
    Feature(128, "covered index metadata", "11"),
    Feature(MIXED_FILE_VERSIONS, "mixed data file versions", "12", supported=True, paired=True),
    Feature(512, "a fragment reuse index on stable row ids"),
    Feature(1024, "a fragment reuse index with transitions, in _fri/", "13", paired=True),
    Feature(2048, "spilled row lineage, or managed blobs of an unreleased Lance", "14"),
    Feature(4096, "a fragment tree"),
    Feature(8192, "independent covering fields"),
    Feature(_MANAGED, "managed blobs, in _blobs/", "14", paired=True),
    Feature(1 << 15, "field ids that are never reused", "14"),
    Feature(1 << 16, "zone write seeds", paired=True),
)
"""All that are known, by flag."""

_SUPPORTED = sum(feature.flag for feature in FEATURES if feature.supported)


def check_readable(manifest: table_pb2.Manifest) -> None:
    """Refuse reader feature flags that this release does not support (S3-012), and records of a later release.

    Raises:
        TableCorruptError: only one of a pair of flags is set, which no release of Lance writes or opens.
        UnsupportedFeatureError: with the names of the features, or the format of the records.
    """
    reader, writer = manifest.reader_feature_flags, manifest.writer_feature_flags
    half = [feature for feature in FEATURES if feature.paired and (reader ^ writer) & feature.flag]
    if half:
        raise TableCorruptError(
            f"The manifest of version {manifest.version} has {half[0]} as a flag of readers or of writers only; Lance "
            "opens no such table."
        )
    _check(reader, "read")
    records = dict(manifest.config).get(RECORDS, str(_RECORDS_FORMAT))
    if records != str(_RECORDS_FORMAT):
        raise UnsupportedFeatureError(
            f"A newer release of memwal-ops wrote version {manifest.version}: its records have format {records:.40}, "
            f"and this one reads {_RECORDS_FORMAT}.",
            remedy="Upgrade memwal-ops here to the release that runs elsewhere on this table.",
        )


def check_writable(manifest: table_pb2.Manifest) -> None:
    """Refuse reader and writer feature flags that this release does not support (S3-013); raises as above."""
    check_readable(manifest)
    _check(manifest.writer_feature_flags, "written")


def check_next(manifest: table_pb2.Manifest) -> None:
    """Refuse a table whose next version would have a feature that this release does not support.

    Releases before 14 write the setting for managed blobs into the schema, and no flag; pylance 14 sets the flag in
    each of its commits.

    Raises ``UnsupportedFeatureError``: with the name of the feature.
    """
    if manifest.schema_metadata.get(_MANAGED_SETTING, b"").strip().lower() == b"true":
        raise UnsupportedFeatureError(
            f"The schema has {_MANAGED_SETTING}, by which the next version would have a feature that this release of "
            f"memwal-ops does not support: {next(feature for feature in FEATURES if feature.flag == _MANAGED)}.",
            remedy="With the release that writes the table, turn it off: lance.dataset(URI).update_schema_metadata("
            f'{{"{_MANAGED_SETTING}": "false"}}).',
        )


def _check(flags: int, what: str) -> None:
    refused = flags & ~_SUPPORTED
    if not refused:
        return
    named = {feature.flag: str(feature) for feature in FEATURES}
    unsupported = (1 << bit for bit in range(refused.bit_length()) if refused >> bit & 1)
    features = " and ".join(named.get(flag, f"feature flag {flag}, which is unknown to it") for flag in unsupported)
    raise UnsupportedFeatureError(
        f"The table must not be {what} by this release of memwal-ops, which does not support {features}."
    )


# Far above any real table. Eight bytes of a bitmap can encode 65,536 ids, so 60 KB could decode to gigabytes.
_MAX_FRAGMENTS = 1 << 22
_PAIR = struct.Struct("<II")


def decode_fragment_bitmap(data: bytes) -> frozenset[int]:
    """The fragment ids; none if there are no bytes, since the segment's coverage is then unknown.

    Raises ``InvalidFormatError``: the bytes are not a roaring bitmap, or encode an impossible number of fragments.
    """
    if not data:
        return frozenset()
    try:
        bitmap = BitMap.deserialize(data)
    except ValueError as error:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: {error}") from error
    if len(bitmap) > _MAX_FRAGMENTS:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: it has {len(bitmap)} fragments.")
    return frozenset(bitmap)


def encode_fragment_bitmap(fragments: frozenset[int]) -> bytes:
    """The bitmap of these fragment ids."""
    return bytes(BitMap(fragments).serialize())


def fragments_of(addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The fragment of each address."""
    return (addresses >> np.uint64(32)).astype(np.int64)


def encode_row_ids(ids: NDArray[np.uint64]) -> bytes:
    """The ``_rowid`` of rows, in any order, as one value for a scanner's list of rows.

    Both have the portable 32-bit format. ``row_addr_allowlist`` and ``row_addr_blocklist`` of pylance's scanners take
    the number of different upper halves of ids, then of each its value, a length in bytes and a bitmap of the lower
    halves.

    pylance names these lists by addresses and compares them with ``_rowid``: with stable row ids, an address would be
    another row, or none.
    """
    ascending = np.sort(ids)
    upper, starts = np.unique(ascending >> np.uint64(32), return_index=True)
    parts = [struct.pack("<I", len(upper))]
    for half, (start, end) in zip(upper.tolist(), pairwise([*starts, len(ids)]), strict=True):
        # Building it from an array needs a tenth of the time.
        lower = (ascending[start:end] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        bitmap = BitMap(array("I", lower.tobytes())).serialize()
        parts += [_PAIR.pack(half, len(bitmap)), bitmap]
    return b"".join(parts)


FRAGMENT_REUSE = "__lance_frag_reuse"
SYSTEM_INDEX = "__lance_"


def by_name(manifest: VersionManifest) -> dict[str, list[table_pb2.IndexMetadata]]:
    """The segments of each index, without Lance's own."""
    named: dict[str, list[table_pb2.IndexMetadata]] = {}
    for entry in manifest.index_entries:
        if not entry.name.startswith(SYSTEM_INDEX):
            named.setdefault(entry.name, []).append(entry)
    return named


def moved_later(manifest: VersionManifest) -> list[table_pb2.IndexMetadata]:
    """Segments of indexes that are older than a compaction that left it to their readers to find the moved rows.

    (``defer_index_remap``.) If pylance compacts these rows again without deferring it, they may be missing in the
    segment from then on, and nothing else shows that: docs/upstream.md. A segment that was built anew is younger.
    """
    entries = manifest.index_entries
    deferred = max((entry.dataset_version for entry in entries if entry.name == FRAGMENT_REUSE), default=0)
    return [entry for entry in entries if not entry.name.startswith(SYSTEM_INDEX) and entry.dataset_version < deferred]


def had_moves(manifest: VersionManifest) -> bool:
    """Whether a compaction left it to readers to find rows that it moved."""
    return any(entry.name == FRAGMENT_REUSE for entry in manifest.index_entries)


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
        major, minor: format version of the envelope.
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

    Raises ``InvalidFormatError``: truncated, no trailer, a position outside the file, not a protobuf message, or a
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

    Lance writes the index section first, then the transaction, then the manifest. This is verified, not assumed: the
    lengths of one or two sections must lead exactly to the manifest, and the first must contain index entries and
    nothing else.

    ``head`` must include the first section and the next length prefix, ``tail`` at least the last 16 bytes. Returns
    whether they were sufficient, and the section; None if the version has no index.
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
    """Encode a manifest file; the positions inside are those of the new file. The same value gives the same bytes.

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

    ``data`` is the file, or its beginning up to the first section.

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
        ends = range(at, end + 1, width) if width else [position for (position,) in _POSITION.iter_unpack(data[at:end])]
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


def is_transaction(data: bytes) -> bool:
    """Whether the bytes of a transaction file decode, and have an id."""
    try:
        return bool(pb.Transaction.FromString(data).uuid)
    except DecodeError:
        return False


def lance_major(manifest: pb.Manifest) -> int | None:
    """The major number of the Lance release that wrote a version; None if it does not name a Lance release."""
    number = re.match(r"(\d+)\.", manifest.writer_version.version)
    return int(number[1]) if manifest.writer_version.library == "lance" and number else None
