"""Decoders of region manifests, region fields and the log, and what must be true of what they accept."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal_ops import errors
from memwal_ops.formats.lance.generations.wal import last_wal_entry, read_writer_epoch, wal_entry_path
from memwal_ops.formats.lance.layouts import REGION as REGION_LAYOUT, SHARD as SHARD_LAYOUT
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
from memwal_ops.formats.lance.wire import names, region_manifest as manifests
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.storage import locations
from memwal_ops.storage.object_store import checked_path
from tests.campaigns.fuzz import mutate
from tests.campaigns.fuzz.corpus import real
from tests.campaigns.fuzz.decoder import REGION, U64_MAX, Recipe, decoder
from tests.campaigns.fuzz.places import FewObjects

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


# -- regions


def _region_manifests() -> tuple[bytes, ...]:
    full = memwal_pb2.RegionManifest(
        version=3, writer_epoch=2, replay_after_wal_id=7, wal_id_last_seen=9, current_generation=9, region_spec_id=1
    )
    full.region_id.uuid = REGION.bytes
    full.flushed_generations.add(generation=7, path="0a1b2c3d_gen_7")
    full.flushed_generations.add(generation=8, path="0a1b2c3e_gen_8", in_memory_bytes=10, primary_key_bytes=5)
    full.region_field_entries.add(field_id="bucket", value=b"\1\0\0\0")
    made = [full.SerializeToString(deterministic=True)]
    for data in real("region_manifest"):
        message = memwal_pb2.RegionManifest.FromString(data)
        message.version = 3
        message.region_id.uuid = REGION.bytes
        made.append(message.SerializeToString(deterministic=True))
    return tuple(made)


_CORRUPT = (errors.RegionManifestCorruptError,)


@decoder(mutate.surgery, mutate.surgery, mutate.damage, seeds=_region_manifests(), share=12, refuses=_CORRUPT)
def region_manifest(data: bytes) -> object:
    """``decode_region_manifest``; what it says is encoded to an equal value, and can be worked with."""
    found = manifests.decode_region_manifest(data, region_id=REGION, version=3)
    changed = found.next().with_wal_id_last_seen(4)
    for manifest in (found, changed, found.without_generations({7})):
        encoded = manifests.encode_region_manifest(manifest)
        again = manifests.decode_region_manifest(encoded, region_id=REGION, version=manifest.version)
        assert again == manifest
        assert manifests.encode_region_manifest(again) == encoded
    for flushed in found.flushed_generations:
        checked_path(flushed.path)
        parsed = names.parse_generation_dir(flushed.path)
        assert parsed is None or flushed.path == f"{parsed.prefix}_gen_{parsed.generation}"
    last_wal_entry(FewObjects({}), REGION, found.replay_after_wal_id, found.wal_id_last_seen, SHARD_LAYOUT)
    return found


_GAP = (errors.RegionManifestGapError, errors.RegionManifestCorruptError)


@decoder(
    mutate.json_surgery, mutate.json_surgery, mutate.damage, mutate.deep_json,
    seeds=[*real("version_hint"), b'{"version": 3}', b'{"version": 18446744073709551615}'], share=8, refuses=_GAP,
)  # fmt: skip
def version_hint(data: bytes) -> object:
    """``version_hint.json``: only a hint, whatever stands in it."""
    version = manifests.decode_version_hint(data)
    assert version is None or manifests.decode_version_hint(manifests.encode_version_hint(version)) == version
    folder = RegionManifestStore(FewObjects({}), REGION).folder
    standing = {
        f"{folder}/{names.region_manifest_name(3)}": _region_manifests()[0],
        f"{folder}/version_hint.json": data,
    }
    region = RegionManifestStore(FewObjects(standing), REGION)
    assert region.latest().version == 3
    return region.latest(checked=True)


FIELD_KINDS = (*manifests._TYPES, "of a later release", " INT32 ")


def field_value(rng: random.Random, _: Sequence[bytes] = ()) -> bytes:
    value = rng.choice((rng.randbytes(rng.choice((0, 1, 2, 4, 8, 9))), struct.pack("<Q", rng.choice(mutate.HUGE))))
    return bytes([rng.randrange(256)]) + value[: rng.choice((1, 2, 4, 8))]


@decoder(field_value, mutate.noise, seeds=(), share=8, refuses=(errors.InvalidFormatError,))
def region_field(data: bytes) -> object:
    """``decode_field``: a value that Arrow writes with the same bytes."""
    recipe = Recipe(data)
    kind = manifests.field_type(recipe.one_of(FIELD_KINDS))
    value = data[1:]
    found = manifests.decode_field(value, kind)
    # Values that are equal have one form: all NaN, and both zeros. A time that is none (NaT) has no Python value.
    if found != found or (pa.types.is_floating(kind) and not found):  # noqa: PLR0124 - NaN and NaT
        return repr(found)
    again = pa.array([found], kind)
    assert again.null_count == 0
    if not pa.types.is_boolean(kind) and not pa.types.is_date64(kind):
        assert (again.buffers()[-1] or pa.py_buffer(b"")).to_pybytes()[: len(value)] == value
    assert repr(found)
    return found


# -- the log


_EPOCH = (errors.InvalidFormatError, errors.ObjectNotFoundError)


@decoder(mutate.damage, mutate.damage, mutate.noise, seeds=real("wal_arrow"), share=6, refuses=_EPOCH)
def wal_entry(data: bytes) -> object:
    """The writer epoch in the head of an Arrow stream."""
    path = wal_entry_path(REGION, 5, SHARD_LAYOUT)
    table: Any = SimpleNamespace(layout=SHARD_LAYOUT, layout_of=lambda _: SHARD_LAYOUT, store=FewObjects({path: data}))
    return _epoch(read_writer_epoch(table, REGION, 5))


@decoder(mutate.damage, mutate.damage, mutate.noise, seeds=real("wal_lance"), share=1, refuses=_EPOCH)
def wal_entry_of_the_region_layout(data: bytes) -> object:
    """The writer epoch in a Lance file's schema."""
    path = wal_entry_path(REGION, 5, REGION_LAYOUT)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path)
        file.parent.mkdir(parents=True)
        file.write_bytes(data)
        location = locations.Location(folder, "file")
        table: Any = SimpleNamespace(
            layout=REGION_LAYOUT, layout_of=lambda _: REGION_LAYOUT, store=FewObjects({path: data}), location=location
        )
        return _epoch(read_writer_epoch(table, REGION, 5))


def _epoch(epoch: int) -> int:
    assert 0 <= epoch <= U64_MAX
    return epoch
