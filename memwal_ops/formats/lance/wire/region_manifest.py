"""Decode and encode what is stored of a region: its manifest, its record in a table version, its field values."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError, RegionManifestCorruptError
from memwal_ops.formats.lance.wire._pb import memwal_pb2 as pb
from memwal_ops.formats.lance.wire.names import U64_MAX, region_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import TABLE_CONFIG

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2


# Characters and names that are not allowed for a directory of the region's folder.
_NO_NAMES = frozenset({"", ".", ".."})
_NO_NAME = re.compile(r"[/\\\x00-\x1f\x7f]")


class RegionStatus(enum.Enum):
    """Whether a region accepts writes. A sealed one never does again."""

    ACTIVE = 0
    SEALED = 1


@dataclass(frozen=True, slots=True)
class FlushedGeneration:
    """One flushed generation as a manifest lists it (S0-049), by the path of its directory below the region's folder.

    The sizes, in bytes and rows, are recorded by the writer; None if its release did not record them.
    """

    generation: int
    path: str
    in_memory_bytes: int | None = None
    physical_rows: int | None = None
    primary_key_bytes: int | None = None

    @property
    def accounted_bytes(self) -> int | None:
        """The generation's size in the writer's memory, including its key index, in bytes; None if not recorded."""
        return None if self.in_memory_bytes is None else self.in_memory_bytes + (self.primary_key_bytes or 0)


@dataclass(frozen=True, slots=True)
class RegionManifest:
    """One version of a region's state (S0-040 to S0-049).

    ``flushed_generations`` ascend. ``region_fields`` are the values by which rows are routed to the region, as stored
    (``wire.region_fields``). ``source`` is the message that it was decoded from, including unknown fields. A field that
    is None is absent: no WAL entry was flushed, or seen, yet.
    """

    region_id: UUID
    version: int
    region_spec_id: int
    writer_epoch: int
    replay_after_wal_id: int | None
    wal_id_last_seen: int | None
    current_generation: int
    flushed_generations: tuple[FlushedGeneration, ...]
    status: RegionStatus
    region_fields: tuple[tuple[str, bytes], ...] = ()
    source: bytes = field(default=b"", repr=False, compare=False)

    @property
    def sealed(self) -> bool:
        """Whether the region accepts no more writers."""
        return self.status is RegionStatus.SEALED

    def unmerged(self, progress: int) -> tuple[FlushedGeneration, ...]:
        """The listed generations above a merge progress, ascending."""
        return tuple(flushed for flushed in self.flushed_generations if flushed.generation > progress)

    def next(self) -> RegionManifest:
        """The same state with the next version number."""
        return replace(self, version=self.version + 1)

    def without_generations(self, generations: Collection[int]) -> RegionManifest:
        """The same state without some flushed generations (S0-060, S0-183)."""
        kept = tuple(flushed for flushed in self.flushed_generations if flushed.generation not in generations)
        return replace(self, flushed_generations=kept)

    def with_wal_id_last_seen(self, entry_id: int) -> RegionManifest:
        """The same state with another hint to the end of the log (S0-172)."""
        return replace(self, wal_id_last_seen=entry_id)


def decode_region_manifest(data: bytes, *, region_id: UUID, version: int) -> RegionManifest:
    """Decode a manifest file and check that its region and version are those of its path.

    Raises ``RegionManifestCorruptError``: empty, truncated, not a protobuf message; another region or version than in
    its path; a generation listed twice, numbered 0 or above the current one; a path that is not a directory name; an
    unknown status.
    """
    message = pb.RegionManifest()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise _corrupt(region_id, version, "is truncated or not a protobuf message") from error
    if message.version != version:
        raise _corrupt(region_id, version, f"contains version {message.version} instead")
    if (other := message.region_id.uuid) != region_id.bytes:
        raise _corrupt(region_id, version, f"belongs to another region ({other.hex()})" if other else "is truncated")
    try:
        status = RegionStatus(message.status)
    except ValueError as error:
        raise _corrupt(region_id, version, f"has the unknown status {message.status}") from error
    return RegionManifest(
        region_id,
        version,
        message.region_spec_id,
        message.writer_epoch,
        message.replay_after_wal_id if message.HasField("replay_after_wal_id") else None,
        message.wal_id_last_seen if message.HasField("wal_id_last_seen") else None,
        message.current_generation,
        _generations(message, region_id, version),
        status,
        tuple((entry.field_id, entry.value) for entry in message.region_field_entries),
        data,
    )


def listed_as_stored(source: bytes) -> list[int]:
    """The numbers of the generations that a manifest lists, in the order of its bytes."""
    return [entry.generation for entry in pb.RegionManifest.FromString(source).flushed_generations]


def encode_region_manifest(manifest: RegionManifest) -> bytes:
    """Encode a manifest; unknown fields are copied from ``source``."""
    message = pb.RegionManifest()
    message.ParseFromString(manifest.source)
    known = {entry.generation: entry for entry in message.flushed_generations}
    entries = []
    for flushed in manifest.flushed_generations:
        number = flushed.generation
        entry = deepcopy(known[number]) if number in known else pb.FlushedGeneration(generation=number)
        entry.path = flushed.path
        _set_optional(entry, "in_memory_bytes", flushed.in_memory_bytes)
        _set_optional(entry, "physical_rows", flushed.physical_rows)
        _set_optional(entry, "primary_key_bytes", flushed.primary_key_bytes)
        entries.append(entry)
    message.version = manifest.version
    message.region_id.uuid = manifest.region_id.bytes
    message.region_spec_id = manifest.region_spec_id
    message.writer_epoch = manifest.writer_epoch
    _set_optional(message, "replay_after_wal_id", manifest.replay_after_wal_id)
    _set_optional(message, "wal_id_last_seen", manifest.wal_id_last_seen)
    message.current_generation = manifest.current_generation
    message.status = manifest.status.value  # type: ignore[assignment]  # the stub wants its own enum; the wire has a number
    if not manifest.source:  # set when the region is created, and never changed (S0-084)
        for name, value in manifest.region_fields:
            message.region_field_entries.add(field_id=name, value=value)
    del message.flushed_generations[:]
    message.flushed_generations.extend(entries)
    return message.SerializeToString(deterministic=True)


def encode_version_hint(version: int) -> bytes:
    """The bytes of ``version_hint.json`` (S0-052)."""
    return json.dumps({"version": version}).encode()


def decode_version_hint(data: bytes) -> int | None:
    """The version in a hint; None if it does not decode, since it is only a hint (S0-052)."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    version = document.get("version") if isinstance(document, dict) else None
    return version if type(version) is int and 0 < version <= U64_MAX else None


def _generations(message: pb.RegionManifest, region_id: UUID, version: int) -> tuple[FlushedGeneration, ...]:
    """The generations, ascending. A writer that repeats a put after a lost response may list one twice; it counts once.

    A manifest may list a million: if they are ascending, as writers list them, duplicates are found without a set.
    """
    flushed: list[FlushedGeneration] = []
    last = 0
    for entry in message.flushed_generations:
        generation = entry.generation
        if generation <= last:
            return _in_any_order(message, region_id, version)
        last = generation
        flushed.append(_generation(entry, message, region_id, version))
    return tuple(flushed)


def _in_any_order(message: pb.RegionManifest, region_id: UUID, version: int) -> tuple[FlushedGeneration, ...]:
    seen: dict[int, pb.FlushedGeneration] = {}
    for entry in message.flushed_generations:
        if seen.setdefault(entry.generation, entry) != entry:
            raise _corrupt(region_id, version, f"lists generation {entry.generation} twice with different entries")
    return tuple(_generation(seen[generation], message, region_id, version) for generation in sorted(seen))


def _generation(
    entry: pb.FlushedGeneration, message: pb.RegionManifest, region_id: UUID, version: int
) -> FlushedGeneration:
    if not 0 < entry.generation < message.current_generation:
        raise _corrupt(
            region_id,
            version,
            f"lists generation {entry.generation}, but the current one is {message.current_generation}",
        )
    if entry.path in _NO_NAMES or _NO_NAME.search(entry.path):
        raise _corrupt(region_id, version, f"gives generation {entry.generation} the path {entry.path!r}")
    return FlushedGeneration(
        entry.generation,
        entry.path,
        entry.in_memory_bytes if entry.HasField("in_memory_bytes") else None,
        entry.physical_rows if entry.HasField("physical_rows") else None,
        entry.primary_key_bytes if entry.HasField("primary_key_bytes") else None,
    )


def _set_optional(message: pb.RegionManifest | pb.FlushedGeneration, name: str, value: int | None) -> None:
    if value is None:
        message.ClearField(name)
    else:
        setattr(message, name, value)


def _corrupt(region_id: UUID, version: int, what: str) -> RegionManifestCorruptError:
    name = region_manifest_name(version)
    return RegionManifestCorruptError(f"Region {region_id}: manifest version {version} {what} (file {name}).")


KEY = "memwal-ops.regions"
MERGED_ELSEWHERE = "memwal-ops.merged_elsewhere"
"""In the configuration: the other program that merges the table, too, as a job found it: ``lance 9.0.0, update``."""
_WORD = re.compile(
    r"([0-9a-f]{32}):(0|[1-9][0-9]{0,19}):([0-9a-f]{8}|unmerged|undecided)(?::([1-9][0-9]{0,19}))?", re.ASCII
)
_MARK_BYTES = 4

UNMERGED = "unmerged"
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """The record of one region in a version.

    ``merged_generations`` identifies a region by its id alone, and an id may be reused: on a branch, in a
    clone, after a region's folder was removed. So a merge also records which generation it merged last, by
    the directory's name, which is random. The record is stored in the table configuration (manifest field 16), which
    every commit of pylance preserves; fields of the MemWAL details that are unknown to pylance
    are lost at its next merge with progress, index update or compaction (tests/integration/contracts).

    One key with one entry per region: ``{region id, 32 hex digits}:{generation}:{mark}``, and ``:{adopted}`` if an
    operator decided that the region's rows belong to the table.

    Attributes:
        generation: the last of its generations that was merged when this was recorded.
        mark: identifies its directory, see :func:`mark_of`. ``unmerged``: an operator decided that none is
            merged, in the version that ``generation`` contains; ``undecided``: the region is older than the
            table's MemWAL index, and an operator has to decide.
        adopted: the version in which an operator decided that the region's rows belong to the table: the rows are
            for its columns, even if another table existed here when they were flushed. 0: no decision. Merges keep it.
    """

    generation: int
    mark: str
    adopted: int = 0

    def entry(self, region_id: UUID) -> str:
        """The record's entry in the configuration."""
        adopted = f":{self.adopted}" if self.adopted else ""
        return f"{region_id.hex}:{self.generation}:{self.mark}{adopted}"


def mark_of(path: str) -> str:
    """Eight hex digits that identify a generation's directory by its name."""
    return hashlib.blake2b(path.encode(), digest_size=_MARK_BYTES).hexdigest()


def region_records(manifest: table_pb2.Manifest) -> dict[UUID, RegionRecord]:
    """The records of a version; entries that do not parse are ignored, as if the region had no record."""
    words = manifest.config[KEY].split() if KEY in manifest.config else ()
    matches = (match for word in words if (match := _WORD.fullmatch(word)) is not None)
    return {UUID(hex=match[1]): RegionRecord(int(match[2]), match[3], int(match[4] or 0)) for match in matches}


def with_region_records(manifest: table_pb2.Manifest, records: Mapping[UUID, RegionRecord]) -> table_pb2.Manifest:
    """A copy of the manifest with these records, and those of all other regions unchanged."""
    changed = deepcopy(manifest)
    if not records:
        return changed
    every = region_records(manifest)
    for region_id, record in records.items():
        before = every.get(region_id)
        carried = record.adopted or (0 if before is None else before.adopted)
        every[region_id] = replace(record, adopted=carried)
    changed.config[KEY] = " ".join(record.entry(region_id) for region_id, record in sorted(every.items()))
    changed.writer_feature_flags |= TABLE_CONFIG  # releases that would drop it must not write
    return changed


NAN = float("nan")
_BITS_IN_BYTE = 8
_NAT = -(2**63)
_DECIMAL = re.compile(r"decimal(128|256)\(([0-9]{1,2}), ?(-?[0-9]{1,2})\)")
_DECIMALS = {"128": pa.decimal128, "256": pa.decimal256}
_TYPES = {
    **{str(kind): kind for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{str(kind): kind for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
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
    match = _DECIMAL.fullmatch(result_type.strip().lower())
    if match is not None:
        try:
            return _DECIMALS[match[1]](int(match[2]), int(match[3]))
        except ValueError:
            return pa.binary()
    return _TYPES.get(result_type.strip().lower(), pa.binary())


def field_types(specs: Iterable[memwal_pb2.RegionSpec]) -> dict[str, pa.DataType]:
    """Type per region field, in the order of the specs; ``binary`` if two specs disagree about a field."""
    types: dict[str, pa.DataType] = {}
    for spec in specs:
        for region_field in spec.fields:
            kind, name = field_type(region_field.result_type), region_field.field_id
            types[name] = kind if types.get(name, kind) == kind else pa.binary()
    return types


def type_name(kind: pa.DataType) -> str | None:
    """The ``result_type`` of a type, the inverse of :func:`field_type`; None if the type has no name."""
    return str(kind) if _DECIMAL.fullmatch(str(kind)) else _NAMES.get(kind)


def python_value(scalar: pa.Scalar) -> Any:
    """The value in the form in which values are compared: :data:`NAN` for any NaN.

    A date or time that Python does not have (of nanoseconds, unless pandas is installed, or after the year 9999) is
    NumPy's.
    """
    try:
        value = scalar.as_py()
    except (OverflowError, ValueError):
        kind = scalar.type
        unit: Any = "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
        return np.datetime64(scalar.value, unit)
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
    """The Python value of a stored scalar. Raises ``InvalidFormatError``: the bytes are not a value of the type.

    A number is stored as little-endian bytes, a string as UTF-8, a boolean as one byte. The type is the name of an
    Arrow type (S0-102); values of an unknown type are not decoded. All NaNs are one value, whatever their bits:
    :data:`NAN`, which is equal to itself in tuples, as other values are.
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
    return python_value(pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(value)])[0])
