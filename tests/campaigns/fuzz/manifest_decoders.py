"""Decoders of version manifests and of the MemWAL index, and what must be true of what they accept."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from pyroaring import BitMap

from memwal_ops import errors
from memwal_ops.formats.lance.files.version_files import decode_set_aside, encode_set_aside
from memwal_ops.formats.lance.indexes.base_indexes import covered_by
from memwal_ops.formats.lance.retention import live_versions
from memwal_ops.formats.lance.wire import memwal_index, region_manifest, version_manifest as versions
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.version_manifest import check_writable, decode_fragment_bitmap
from tests.campaigns.fuzz import mutate
from tests.campaigns.fuzz.corpus import real
from tests.campaigns.fuzz.decoder import REGION, U64_MAX, decoder
from tests.campaigns.fuzz.places import FewObjects

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


# -- version manifests


_RECORD = encode_set_aside([(7, b"{}" * 9), (8, b"x"), (2**63, b"\n" * 30)])
_NAME = "_mem_wal_ops/expired/1.manifests"


@decoder(
    mutate.damage, mutate.noise,
    seeds=[
        _RECORD, _RECORD.replace(b"18]", b"28]").replace(b" 1]", b" -9]"), _RECORD.replace(b"[7", b"[[7]"),
        _RECORD.replace(b"7,", b"true,"), _RECORD.replace(b"18]", b"18.0]"), _RECORD.replace(b": 1", b": 2"), b"{}\n",
    ],
    share=6, refuses=(errors.InvalidFormatError, errors.UnsupportedFeatureError),
)  # fmt: skip
def expired_manifests(data: bytes) -> object:
    """The record of an expiry has its manifests, one behind the other, and nothing else."""
    manifests = decode_set_aside(data, _NAME)
    assert all(type(version) is int and one for version, one in manifests)
    assert data.partition(b"\n")[2] == b"".join(one for _, one in manifests)
    return manifests


def _plain(version: versions.VersionManifest) -> tuple[bytes | None, ...]:
    """All that it says but where its sections stood."""
    manifest = table_pb2.Manifest()
    manifest.CopyFrom(version.manifest)
    for field in versions.POSITIONS:
        manifest.ClearField(field)
    parts = (manifest, version.indexes, version.transaction)
    return tuple(None if part is None else part.SerializeToString(deterministic=True) for part in parts)


def envelope(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A whole file whose sections are real or operated on, in any order, some of them missing."""
    version = versions.decode_version_manifest(rng.choice(seeds))
    sections: list[tuple[str, bytes]] = []
    for field, message in (("index_section", version.indexes), ("transaction_section", version.transaction)):
        if message is not None and rng.random() < 0.8:
            data = message.SerializeToString(deterministic=True)
            sections.append((field, mutate.surgery(rng, [data]) if rng.random() < 0.5 else data))
    if rng.random() < 0.3:
        sections.reverse()
    manifest = table_pb2.Manifest()
    manifest.CopyFrom(version.manifest)
    for field in versions.POSITIONS:
        manifest.ClearField(field)
    out = b""
    for field, data in sections:
        name = "transaction_section_old" if field == "transaction_section" and rng.random() < 0.2 else field
        setattr(manifest, name, len(out))
        out += struct.pack("<I", len(data)) + data
    message_at, data = len(out), manifest.SerializeToString(deterministic=True)
    if rng.random() < 0.3:
        data = mutate.surgery(rng, [data])
    out += struct.pack("<I", len(data)) + data + struct.pack("<QHH", message_at, rng.choice((0, 2)), 0) + b"LANC"
    return mutate.damage(rng, [out]) if rng.random() < 0.2 else out


_MANIFEST = (errors.InvalidFormatError, errors.TableCorruptError, errors.UnsupportedFeatureError)


@decoder(
    envelope, mutate.damage, mutate.damage, mutate.noise, seeds=real("version_manifest"), share=12, refuses=_MANIFEST
)
def version_manifest(data: bytes) -> object:
    """``decode_version_manifest``; what decodes is encoded to an equal value."""
    version = versions.decode_version_manifest(data)
    versions.check_positions_known(version.manifest)
    encoded = versions.encode_version_manifest(version)
    again = versions.decode_version_manifest(encoded)
    assert _plain(again) == _plain(version)
    assert versions.encode_version_manifest(again) == encoded
    check_writable(version.manifest)
    return version


def _is_tiled(data: bytes, version: versions.VersionManifest) -> bool:
    """Whether the sections that the manifest names make up the file, and each is what it is said to be.

    The ends alone cannot show that the manifest calls an index section a transaction, or the other way round.
    """
    (at,) = struct.unpack_from("<Q", data, len(data) - 16)
    manifest = version.manifest
    named = [getattr(manifest, field) for field in versions.POSITIONS if manifest.HasField(field)]
    end = 0
    for start in (*sorted(set(named)), at):
        if start != end:
            return False
        end = start + 4 + struct.unpack_from("<I", data, start)[0]
    known = version.indexes is None or len(UnknownFieldSet(version.indexes)) == 0
    known &= version.transaction is None or bool(version.transaction.uuid)
    return known and end == len(data) - 16 and (not manifest.HasField("index_section") or len(set(named)) == len(named))


_PROGRESS = (errors.InvalidFormatError, errors.TableCorruptError, errors.LegacyLayoutError)


@decoder(envelope, envelope, mutate.damage, seeds=real("version_manifest"), share=10, refuses=_PROGRESS)
def index_section_by_ends(data: bytes) -> object:
    """Reading a large manifest by its ends says what reading all of it says."""
    store = FewObjects({"v": data})
    meta = store.head("v")
    assert meta is not None
    cut = zlib.crc32(data) % (len(data) + 1)
    told, section = versions.index_section_by_ends(data[:cut], data[-16:])
    if told:
        try:
            version = versions.decode_version_manifest(data)
        except errors.InvalidFormatError:
            version = None
        if version is not None and _is_tiled(data, version):
            assert section == version.indexes
    with patch.object(live_versions, "_WHOLE", 0), patch.object(live_versions, "_HEAD", 64):
        return live_versions.read_version_progress(store, meta)


# -- the MemWAL index


def _entry(details: bytes) -> table_pb2.IndexMetadata:
    entry = table_pb2.IndexMetadata(name=memwal_index.MEMWAL_INDEX_NAME)
    entry.uuid.uuid = REGION.bytes
    entry.index_details.value = details
    return entry


_DETAILS = (errors.TableCorruptError, errors.LegacyLayoutError)


@decoder(
    mutate.surgery, mutate.surgery, mutate.damage, mutate.noise,
    seeds=[*real("memwal_details"), b"\x10\x02", b"\x0a\x02\x08\x01"], share=12, refuses=_DETAILS,
)  # fmt: skip
def memwal_details(data: bytes) -> object:
    """``decode_memwal_index``; each rewriting changes what it is to change and nothing else."""
    index = memwal_index.decode_memwal_index(_entry(data))
    decode = lambda details: memwal_index.decode_memwal_index(_entry(details.SerializeToString(deterministic=True)))  # noqa: E731
    assert replace(decode(index.details), details=index.details) == index
    assert all(0 <= generation <= U64_MAX for generation in index.merged_generations.values())
    more = {region: reached + 1 for region, reached in index.merged_generations.items() if reached < U64_MAX}
    further = decode(memwal_index.with_progress(index.details, {**more, REGION: U64_MAX}))
    assert further.merged_generations == {**index.merged_generations, **more, REGION: U64_MAX}
    assert further.index_catchup == index.index_catchup
    claims = {name: dict(index.merged_generations) for name in [*index.index_catchup, "new"]}
    assert decode(memwal_index.with_catchup(index.details, claims)).index_catchup == claims
    taken = decode(memwal_index.with_snapshot(index.details, timestamp_millis=5, num_regions=1, inline=b"x"))
    assert (
        replace(
            taken,
            snapshot_ts_millis=index.snapshot_ts_millis,
            num_regions=index.num_regions,
            inline_snapshots=index.inline_snapshots,
            details=index.details,
        )
        == index
    )
    region_manifest.field_types(index.region_specs)
    return index


@decoder(mutate.surgery, mutate.surgery, mutate.damage, seeds=real("index_entry"), share=6, refuses=_DETAILS)
def index_entry(data: bytes) -> object:
    """An entry of the index section: the fragments that it covers, and the MemWAL index if it is that."""
    entry = table_pb2.IndexMetadata()
    try:
        entry.ParseFromString(data)
    except DecodeError:
        return None
    covered = covered_by([entry, entry])
    assert covered == decode_fragment_bitmap(entry.fragment_bitmap)
    found = memwal_index.find_memwal_entry(table_pb2.IndexSection(indices=[entry]))
    return covered if found is None else memwal_index.decode_memwal_index(found)


def _bitmaps() -> tuple[bytes, ...]:
    every_other, dense, mixed = BitMap(range(0, 20_000, 2)), BitMap(range(70_000)), BitMap([1, 2, 3, 70_000, 5 << 20])
    dense.run_optimize()
    wide = BitMap(range(1 << 24))
    wide.run_optimize()
    return tuple(one.serialize() for one in (every_other, dense, mixed, wide, BitMap()))


@decoder(
    mutate.damage, mutate.damage, mutate.noise,
    seeds=[*real("fragment_bitmap"), *_bitmaps()], share=3, refuses=(errors.InvalidFormatError,),
)  # fmt: skip
def fragment_bitmap(data: bytes) -> object:
    """``decode_fragment_bitmap``."""
    found = decode_fragment_bitmap(data)
    assert all(0 <= one < 2**32 for one in found)
    assert decode_fragment_bitmap(BitMap(found).serialize()) == found
    return found
