"""Protobuf and manifest bytes, decoded by a few lines of our own: an opinion apart from the project's.

A message is a list of `Field`s; its wire types are kept, so that what is not understood survives
a rewrite. No pylance in here, and no project code.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.support.tables.files import Files

MEM_WAL_INDEX = "__lance_mem_wal"
DETAILS_URL = "/lance.table.MemWalIndexDetails"
_MAGIC = b"LANC"
# Manifest fields: 3 version, 6 index section, 9/10 reader/writer feature flags, 13 writer version,
# 21 the transaction's position in older releases, 23 in 14.x.
_INDEX, _TRANSACTION, _OLD_TRANSACTION, _TIMESTAMP = 6, 23, 21, 7


class Field(NamedTuple):
    """One field of a message: wire 0 carries an int, all others carry bytes."""

    number: int
    value: int | bytes
    wire: int = -1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return result, at


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: bytes) -> list[Field]:
    """Fields of one message, in their order."""
    at, out = 0, []
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(data, at)
        else:
            if wire == 2:
                size, at = _varint(data, at)
            else:
                size = {1: 8, 5: 4}[wire]
            if at + size > len(data):
                raise ValueError("message is cut short")
            value, at = data[at : at + size], at + size
        out.append(Field(number, value, wire))
    return out


def encode(fields: Iterable[tuple]) -> bytes:
    """Bytes of a message; a plain (number, value) becomes a varint or a length-delimited field."""
    out = bytearray()
    for entry in fields:
        field = Field(*entry)
        if isinstance(field.value, int):
            out += _to_varint(field.number << 3) + _to_varint(field.value)
        else:
            wire = 2 if field.wire == -1 else field.wire
            out += _to_varint(field.number << 3 | wire)
            out += (_to_varint(len(field.value)) if wire == 2 else b"") + field.value
    return bytes(out)


def get(fields: Iterable[Field], number: int, default: int | bytes = 0) -> int | bytes:
    """The last value of a singular field."""
    for field in fields:
        if field.number == number:
            default = field.value
    return default


def sub(fields: Iterable[Field], number: int) -> Iterator[list[Field]]:
    """The messages of a repeated (or singular) message field."""
    for field in fields:
        if field.number == number and isinstance(field.value, bytes):
            yield decode(field.value)


def uuid_of(fields: Iterable[Field], number: int) -> str:
    """A `UUID { bytes uuid = 1 }` field as text."""
    return str(uuid.UUID(bytes=bytes(get(next(sub(fields, number)), 1))))  # type: ignore[arg-type]


def uuid_field(number: int, value: str) -> Field:
    """The counterpart of `uuid_of`."""
    return Field(number, encode([(1, uuid.UUID(value).bytes)]))


def bit_reversed(number: int) -> str:
    """File stem of a WAL entry or region manifest version."""
    return format(number, "064b")[::-1]


def from_bit_reversed(name: str) -> int:
    """The counterpart of `bit_reversed`; an extension is ignored."""
    return int(name.split(".", maxsplit=1)[0][::-1], 2)


@dataclass(frozen=True)
class ManifestFile:
    """One `_versions/*.manifest`: the message and the sections in front of it."""

    fields: list[Field]
    index: bytes | None
    transaction: bytes | None
    tail: bytes

    @property
    def version(self) -> int:
        return int(get(self.fields, 3))

    def replaced(self, **numbers: int) -> ManifestFile:
        """A copy with integer fields set, named `f3=...`; an absent one is added."""
        fields = list(self.fields)
        for name, value in numbers.items():
            number = int(name[1:])
            fields = [f for f in fields if f.number != number] + [Field(number, value, 0)]
        fields.sort(key=lambda f: f.number)
        return ManifestFile(fields, self.index, self.transaction, self.tail)


def _section(data: bytes, at: int) -> bytes:
    (size,) = struct.unpack_from("<I", data, at)
    if at + 4 + size > len(data):
        raise ValueError("section is cut short")
    return data[at + 4 : at + 4 + size]


def parse_manifest(data: bytes) -> ManifestFile:
    """Bytes of a manifest file to its parts."""
    if data[-4:] != _MAGIC:
        raise ValueError("not a manifest: no magic at the end")
    (position,) = struct.unpack_from("<Q", data, len(data) - 16)
    fields = decode(_section(data, position))
    at = {f.number: f.value for f in fields}
    index = _section(data, int(at[_INDEX])) if _INDEX in at else None
    transaction = _section(data, int(at[_TRANSACTION])) if _TRANSACTION in at else None
    return ManifestFile(fields, index, transaction, data[-8:])


def timestamp(data: bytes) -> int:
    """When a manifest file says that it was written, in ns since 1970."""
    (said,) = (field.value for field in parse_manifest(data).fields if field.number == _TIMESTAMP)
    assert isinstance(said, bytes)
    parts = {field.number: int(field.value) for field in decode(said)}
    return parts.get(1, 0) * 10**9 + parts.get(2, 0)


def build_manifest(manifest: ManifestFile) -> bytes:
    """Parts to bytes, with every position set again."""
    body, at = bytearray(), {}
    for number, data in ((_INDEX, manifest.index), (_TRANSACTION, manifest.transaction)):
        if data is not None:
            at[number] = len(body)
            body += struct.pack("<I", len(data)) + data
    if _TRANSACTION in at and any(f.number == _OLD_TRANSACTION for f in manifest.fields):
        at[_OLD_TRANSACTION] = at[_TRANSACTION]
    message = encode(Field(f.number, at.get(f.number, f.value), f.wire) for f in manifest.fields)
    head = bytes(body)
    return head + struct.pack("<I", len(message)) + message + struct.pack("<Q", len(head)) + manifest.tail


def manifest_names(files: Files) -> dict[int, str]:
    """{version: path below the table} of both naming schemes; detached versions are left out."""
    out = {}
    for path in files.listing("_versions/"):
        stem = path.rsplit("/", 1)[-1].removesuffix(".manifest")
        if path.endswith(".manifest") and stem.isdigit():
            number = int(stem)
            out[2**64 - 1 - number if len(stem) == 20 else number] = path
    return out


def newest_manifest(files: Files) -> tuple[str, ManifestFile]:
    """Path and parts of the newest version's manifest."""
    names = manifest_names(files)
    path = names[max(names)]
    return path, parse_manifest(files.get(path))


def mem_wal_entry(manifest: ManifestFile) -> list[Field] | None:
    """The IndexMetadata of `__lance_mem_wal`."""
    for entry in sub(decode(manifest.index or b""), 1):
        if get(entry, 3) == MEM_WAL_INDEX.encode():
            return entry
    return None


def mem_wal_details(manifest: ManifestFile) -> bytes:
    """Bytes of the MemWAL details: the value of the entry's Any."""
    entry = mem_wal_entry(manifest)
    if entry is None:
        raise LookupError("no MemWAL index")
    return bytes(get(next(sub(entry, 6)), 2, b""))  # type: ignore[arg-type]


def with_details(manifest: ManifestFile, details: bytes) -> ManifestFile:
    """A copy whose MemWAL details are these bytes."""
    entries = []
    for field in decode(manifest.index or b""):
        entry = decode(field.value) if field.number == 1 and isinstance(field.value, bytes) else []
        if get(entry, 3) == MEM_WAL_INDEX.encode():
            any_ = [f for f in next(sub(entry, 6)) if f.number != 2] + [Field(2, details)]
            entry = [Field(6, encode(any_)) if f.number == 6 else f for f in entry]
            field = Field(field.number, encode(entry))
        entries.append(field)
    return ManifestFile(manifest.fields, encode(entries), manifest.transaction, manifest.tail)


def progress(files: Files, version: int | None = None) -> dict[str, int]:
    """{region: merged generation} of a version, by default the newest; nothing if that has no MemWAL index."""
    manifest = newest_manifest(files)[1]
    if version is not None:
        manifest = parse_manifest(files.get(manifest_names(files)[version]))
        if mem_wal_entry(manifest) is None:
            return {}
    details = decode(mem_wal_details(manifest))
    return {uuid_of(entry, 1): int(get(entry, 2)) for entry in sub(details, 9)}


@dataclass(frozen=True)
class RegionManifest:
    """What tests need of a region manifest."""

    version: int
    epoch: int
    replay_after: int
    current_generation: int
    generations: dict[int, str]
    fields: list[Field]


def regions(files: Files) -> list[str]:
    """Ids of all regions that have a folder, sorted."""
    return sorted({path.split("/")[1] for path in files.listing("_mem_wal/")})


def region_manifest(files: Files, region: str) -> RegionManifest:
    """The newest version that has no gap in front of it; the oldest may be collected."""
    stem = f"_mem_wal/{region}/manifest/"
    found = {from_bit_reversed(p.rsplit("/", 1)[-1]): p for p in files.listing(stem) if p.endswith(".binpb")}
    version = min(found)
    while version + 1 in found:
        version += 1
    return decode_region_manifest(files.get(found[version]))


def decode_region_manifest(data: bytes) -> RegionManifest:
    """One version of a region manifest."""
    fields = decode(data)
    generations = {int(get(g, 1)): bytes(get(g, 2)).decode() for g in sub(fields, 8)}  # type: ignore[arg-type]
    version, epoch, replay_after, current = (int(get(fields, n)) for n in (1, 2, 3, 6))
    return RegionManifest(version, epoch, replay_after, current, generations, fields)
