"""The decoders under fuzzing: where their inputs come from, and what must be true of whatever they accept."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import UUID

import click
import pyarrow as pa
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from pyroaring import BitMap

from memwal_ops import errors
from memwal_ops.cli.options import Duration, RegionId, Size
from memwal_ops.core import holds, version_progress
from memwal_ops.core.base_indexes import covered_by
from memwal_ops.core.layout import Layout
from memwal_ops.core.regions import RegionManifestStore
from memwal_ops.core.snapshots import Snapshot, decode_file, encode_file, known_regions
from memwal_ops.core.wal import last_wal_entry, read_writer_epoch, wal_entry_path
from memwal_ops.format import memwal_index, names, region_fields, snapshot_rows
from memwal_ops.format import region_manifest as manifests
from memwal_ops.format import version_manifest as versions
from memwal_ops.format._pb import memwal_pb2, table_pb2
from memwal_ops.format.fragment_bitmap import decode_fragment_bitmap
from memwal_ops.jobs.collectables import Item, Kind
from memwal_ops.jobs.why import _wanted
from memwal_ops.storage import locations, options
from memwal_ops.storage.object_store import checked_path
from tests.fuzz import mutate
from tests.fuzz.corpus import real
from tests.fuzz.places import WRITTEN, FewObjects

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

U64_MAX = 2**64 - 1
REGION = UUID("00000000-0000-4000-8000-00000000000a")

Build = "Callable[[random.Random, Sequence[bytes]], bytes]"


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        run: decodes an input and checks what came of it; raises only ``refuses``.
        share: of all inputs, in relation to the others; few for a slow one.
        refuses: what it may raise.
        native: why nothing can keep it from standing still or ending the process, which is then no failure.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    builds: tuple[Any, ...]
    share: int
    refuses: tuple[type[Exception], ...]
    native: str = ""

    def input(self, rng: random.Random) -> bytes:
        """The next hostile input."""
        return bytes(rng.choice(self.builds)(rng, self.seeds))


DECODERS: dict[str, Decoder] = {}


def decoder(
    *builds: Any, seeds: Sequence[bytes], share: int, refuses: tuple[type[Exception], ...], native: str = ""
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    """Register a function as a decoder under its name."""

    def register(run: Callable[[bytes], object]) -> Callable[[bytes], object]:
        name = run.__name__
        DECODERS[name] = Decoder(name, run, tuple(seeds), builds, share, refuses, native)
        return run

    return register


class Recipe:
    """Values chosen by the bytes of an input, so that structures too are mutated, shrunk and replayed as bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """A number from 0 on; 0 when the bytes are used up."""
        byte = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return byte % limit

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def bytes(self, limit: int = 32) -> bytes:
        size = self.below(limit)
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken


# -- version manifests


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


_MANIFEST = (errors.InvalidFormatError, errors.UnsupportedFeatureError)


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
    versions.check_writable(version.manifest)
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
    with patch.object(version_progress, "_WHOLE", 0), patch.object(version_progress, "_HEAD", 64):
        return version_progress.read_version_progress(store, meta)


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
    region_fields.field_types(index.region_specs)
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
    last_wal_entry(FewObjects({}), REGION, found.replay_after_wal_id, found.wal_id_last_seen, Layout.SHARD)
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


_KINDS = (*region_fields._TYPES, "of a later release", " INT32 ")


def field_value(rng: random.Random, _: Sequence[bytes] = ()) -> bytes:
    value = rng.choice((rng.randbytes(rng.choice((0, 1, 2, 4, 8, 9))), struct.pack("<Q", rng.choice(mutate.HUGE))))
    return bytes([rng.randrange(256)]) + value[: rng.choice((1, 2, 4, 8))]


@decoder(field_value, mutate.noise, seeds=(), share=8, refuses=(errors.InvalidFormatError,))
def region_field(data: bytes) -> object:
    """``decode_field``: a value that Arrow writes with the same bytes."""
    recipe = Recipe(data)
    kind = region_fields.field_type(recipe.one_of(_KINDS))
    value = data[1:]
    found = region_fields.decode_field(value, kind)
    again = pa.array([found], kind)
    assert again.null_count == 0
    if not pa.types.is_boolean(kind) and not pa.types.is_date64(kind):
        assert (again.buffers()[-1] or pa.py_buffer(b"")).to_pybytes()[: len(value)] == value
    assert repr(found)
    return found


# -- region snapshots


_INTS = (0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1)
_STATES = b"memwal-ops:states"


def _column(recipe: Recipe, rows: int) -> pa.Array:
    kind, values = recipe.one_of(
        (
            (pa.uint64(), (0, 1, None, U64_MAX)),
            (pa.uint32(), (0, 1, None, 2**32 - 1)),
            (pa.int64(), (-1, 0, None, 2**63 - 1)),
            (pa.string(), (str(REGION), "", None, "x" * 16)),
            (pa.binary(), (REGION.bytes, b"", None, b"\xff")),
            (pa.binary(16), (REGION.bytes, None)),
            (pa.float64(), (1.5, None, float("nan"))),
            (pa.bool_(), (True, None)),
            (pa.date32(), (1, None)),
            (pa.null(), (None,)),
            (pa.timestamp("ns"), (2**62, None)),
            (pa.list_(pa.int64()), ([], None, [1])),
            (pa.list_(pa.string()), (["a"], None)),
            (pa.struct([("generation", pa.uint64())]), ({"generation": 1}, None)),
            (_GENERATIONS, ([], None, [{"generation": 1, "path": "a"}], [None], [{"generation": None, "path": None}])),
        )
    )  # fmt: skip
    return pa.array([recipe.one_of(values) for _ in range(rows)], kind)


_GENERATIONS = pa.list_(pa.struct([("generation", pa.uint64()), ("path", pa.string())]))
_STATE_TEXTS = (
    b"{}", b"", b"[]", b"5", b"null", b'{"%b": [3, null, 9]}', b'{"%b": 3}', b'{"%b": [1]}', b'{"%b": ["a", null, 1]}',
    b'{"%b": [-1, null, 1]}', b'{"%b": [1, 1e400, 1]}', b"[" * 100_000, b'{"%b": [true, null, {}]}', b"\xff",
    b'{"%b": [99999999999999999999999, null, 1]}',
)  # fmt: skip


def _any_rows(recipe: Recipe) -> pa.Table:
    """A snapshot of either layout in which one column, or all, may be something else."""
    rows = recipe.below(4)
    right = snapshot_rows._REGION_COLUMNS if recipe.below(2) else snapshot_rows._SHARD_COLUMNS
    wrong = recipe.below(256)
    columns: dict[str, pa.Array] = {}
    for at, field in enumerate(right):
        if wrong == 255 or at == wrong % (2 * len(right)):
            columns[field.name] = _column(recipe, rows)
            continue
        good: dict[str, Any] = {
            "region_id": REGION.bytes, "shard_id": str(REGION), "flushed_generations": [{"generation": 1, "path": "a"}],
        }  # fmt: skip
        columns[field.name] = pa.array([good.get(field.name, 1)] * rows, field.type)
    if recipe.below(4) == 0:
        columns[recipe.one_of(("region_field_a", "shard_field_a", "region_field_", "other"))] = _column(recipe, rows)
    table = pa.table(columns)
    text = recipe.one_of((None, *_STATE_TEXTS))
    return (
        table if text is None else table.replace_schema_metadata({_STATES: text.replace(b"%b", str(REGION).encode())})
    )


_FORMAT = (errors.InvalidFormatError,)


@decoder(mutate.noise, mutate.noise, seeds=(), share=5, refuses=_FORMAT)
def snapshot_columns(data: bytes) -> object:
    """``decode_rows`` and ``known_regions`` on tables of all kinds of columns; numbers come out as numbers."""
    found = Snapshot(0, "inline", _any_rows(Recipe(data)))
    for region in found.regions:
        assert isinstance(region.region_id, UUID)
        assert isinstance(region.region_spec_id, int)
        state = region.state
        if state is None:
            continue
        optional = [one for one in (state.replay_after_wal_id, state.wal_id_last_seen) if one is not None]
        numbers = [state.version, state.writer_epoch, state.current_generation, *optional]
        numbers += [one.generation for one in state.flushed_generations]
        assert all(isinstance(one, int) and 0 <= one <= U64_MAX for one in numbers)
        assert all(isinstance(one.path, str) for one in state.flushed_generations)
    for known in known_regions(found).values():
        assert isinstance(known.version, int)
        assert 0 <= known.version <= U64_MAX
        last_wal_entry(FewObjects({}), REGION, known.replay_after_wal_id, known.wal_id_last_seen, Layout.SHARD)
    return found


@decoder(mutate.noise, seeds=(), share=4, refuses=_FORMAT)
def snapshot_of_regions(data: bytes) -> object:
    """Region manifests to rows and back, in both layouts."""
    recipe = Recipe(data)
    specs = [memwal_pb2.RegionSpec(spec_id=1)]
    for name in ("a", "b", "a")[: recipe.below(4)]:
        specs[0].fields.add(field_id=name, result_type=recipe.one_of(_KINDS))
    regions = [
        manifests.RegionManifest(
            UUID(int=number + 1, version=4),
            recipe.one_of((1, 2, U64_MAX)),
            recipe.one_of((0, 1, 2**32 - 1)),
            recipe.one_of((0, 1, U64_MAX)),
            recipe.one_of((None, 0, U64_MAX)),
            recipe.one_of((None, 0, U64_MAX)),
            U64_MAX,
            tuple(manifests.FlushedGeneration(one + 1, f"x_gen_{one}") for one in range(recipe.below(3))),
            manifests.RegionStatus.ACTIVE,
            tuple((name, recipe.bytes(10)) for name in ("a", "b", "c")[: recipe.below(4)]),
        )
        for number in range(recipe.below(4))
    ]
    for build in (snapshot_rows.region_rows, snapshot_rows.shard_rows):
        rows = build(regions, specs)
        decoded = snapshot_rows.decode_rows(rows)
        assert [one.region_id for one in decoded] == [one.region_id for one in regions]
        assert [one.region_spec_id for one in decoded] == [one.region_spec_id for one in regions]
        for row, region in zip(decoded, regions, strict=True):
            if row.state is not None:
                assert (row.state.version, row.state.replay_after_wal_id) == (
                    region.version,
                    region.replay_after_wal_id,
                )
                assert row.state.flushed_generations == region.flushed_generations
        assert build(rows.to_pylist(), specs).schema == rows.schema
    for region in regions:
        snapshot_rows.check_fields(region, specs)
    return regions


@decoder(
    mutate.damage,
    mutate.damage,
    mutate.damage,
    mutate.noise,
    seeds=real("snapshot_file"),
    share=1,
    refuses=_FORMAT,
    native="pylance believes the offsets and encodings inside of a page",
)
def snapshot_file(data: bytes) -> object:
    """``decode_file``: Lance's own reader on damaged bytes; what decodes is encoded to equal rows."""
    rows = decode_file(data)
    known_regions(Snapshot(0, "inline", rows))
    if rows.num_columns and data[len(data) // 2] % 4 == 0:
        assert decode_file(encode_file(rows)).equals(rows)
    return rows


# -- the log


_EPOCH = (errors.InvalidFormatError, errors.ObjectNotFoundError)


@decoder(mutate.damage, mutate.damage, mutate.noise, seeds=real("wal_arrow"), share=6, refuses=_EPOCH)
def wal_entry(data: bytes) -> object:
    """The writer epoch in the head of an Arrow stream."""
    path = wal_entry_path(REGION, 5, Layout.SHARD)
    table: Any = SimpleNamespace(layout=Layout.SHARD, store=FewObjects({path: data}))
    return _epoch(read_writer_epoch(table, REGION, 5))


@decoder(mutate.damage, mutate.damage, mutate.noise, seeds=real("wal_lance"), share=1, refuses=_EPOCH)
def wal_entry_of_the_region_layout(data: bytes) -> object:
    """The writer epoch in a Lance file's schema."""
    path = wal_entry_path(REGION, 5, Layout.REGION)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path)
        file.parent.mkdir(parents=True)
        file.write_bytes(data)
        location = locations.Location(folder, "file")
        table: Any = SimpleNamespace(layout=Layout.REGION, store=FewObjects({path: data}), location=location)
        return _epoch(read_writer_epoch(table, REGION, 5))


def _epoch(epoch: int) -> int:
    assert 0 <= epoch <= U64_MAX
    return epoch


# -- holds


_HOLD = b'{"versions": [5, 6], "ttl_seconds": 7200.0, "by": "maintainer@host", "note": "nightly export"}'


@decoder(
    mutate.json_surgery, mutate.json_surgery, mutate.damage, mutate.noise, mutate.deep_json,
    seeds=[_HOLD, b"{}"], share=8, refuses=(errors.StorageError,),
)  # fmt: skip
def hold(data: bytes) -> object:
    """A hold that can be read says all that it must; one that cannot stops whoever deletes."""
    store = FewObjects({f"{holds.HOLDS_FOLDER}/{7:020d}.json": data})
    (found,) = holds._entries(store, holds.HOLDS_FOLDER)
    assert found.number == 7
    assert list(found.versions) == json.loads(data)["versions"]
    assert all(type(one) is int and 0 < one <= U64_MAX for one in found.versions)

    f"{found.to_json()} {found.by} {found.note} {found.until:%Y-%m-%d %H:%M} UTC".encode()
    found.stands(WRITTEN + timedelta(hours=1))
    return found


@decoder(
    mutate.words("0" * 20, "9" * 20, "00000000000000000007", ".json", ".released", "7", "0", "²" * 20, "٣" * 20, "a/"),
    seeds=(), share=6, refuses=(errors.StorageError,),
)  # fmt: skip
def hold_name(data: bytes) -> object:
    """Whatever file stands among the holds; a new one gets a number of its own."""
    name = data.decode("utf-8", "surrogateescape")
    store = FewObjects({f"{holds.HOLDS_FOLDER}/{name}": _HOLD})
    found = holds._entries(store, holds.HOLDS_FOLDER)
    assert all(0 <= one.number < 10**20 for one in found)
    added = holds._add(store, holds.HOLDS_FOLDER, (5,), timedelta(days=36500), "")
    assert added.number not in {one.number for one in found}
    assert added in holds._entries(store, holds.HOLDS_FOLDER)
    return found


# -- names and options


@decoder(
    mutate.words(
        "01" * 32, "0" * 64, "1" * 64, "0", "1", ".binpb", ".arrow", ".lance", "_gen_", "0a1b2c3d", "7", "d",
        "18446744073709551615", "18446744073709551616", "00000000000000000007", ".manifest", "latest",
    ),
    mutate.noise, seeds=(), share=10, refuses=(errors.TableCorruptError,),
)  # fmt: skip
def file_name(data: bytes) -> object:
    """File names: what is recognised is written with the same letters."""
    name = data.decode("utf-8", "surrogateescape")
    found: list[object] = []
    if (number := names.parse_bit_reversed(name)) is not None:
        assert names.bit_reversed(number) == name
        found.append(number)
    if (version := names.parse_region_manifest_name(name)) is not None:
        assert names.region_manifest_name(version) == name
        found.append(version)
    if (entry := names.parse_wal_entry_name(name)) is not None:
        assert names.wal_entry_name(entry.entry_id, entry.suffix) == name
        found.append(entry)
    if (generation := names.parse_generation_dir(name)) is not None:
        assert f"{generation.prefix}_gen_{generation.generation}" == name
        assert generation.generation <= U64_MAX
        found.append(generation)
    if (parsed := names.parse_version_manifest_name(name)) is not None:
        assert 0 <= parsed.version <= U64_MAX
        if parsed.scheme is not None:
            assert names.version_manifest_name(parsed.version, parsed.scheme) == name
        found.append(parsed)
    assert len(found) <= 1
    names.naming_scheme([name, "7.manifest"])
    return found


_USAGE = (errors.InvalidUsageError, errors.UnsupportedFeatureError)


@decoder(
    mutate.words(
        "file://", "gs://", "az://", "memory://", "s3+ddb://", "s3://", "FILE://", "ftp://", "://", "/", "a", "b c",
        "[", "]", "%2F", "%", "%2e%2e", "@", ":", "?", "#", "~", "~nobody", "localhost", "//", "[::1]", "\u2100",
    ),
    mutate.noise, seeds=(), share=8, refuses=_USAGE,
)  # fmt: skip
def location(data: bytes) -> object:
    """``resolve``: a place that resolves to itself, or a refusal."""
    text = data.decode("utf-8", "surrogateescape")
    if text.lower().startswith(("s3://", "s3a://")):
        text = f"gs{text[text.index(':') :]}"  # the same rules, without botocore's milliseconds
    found = locations.resolve(text)
    assert found.uri == locations.resolve(found.uri).uri
    assert found.scheme in locations._SCHEMES.values()
    if found.scheme == "file":
        assert found.uri.startswith("/")
        assert "\0" not in found.uri
    elif found.scheme != "memory":
        bucket, prefix = locations.bucket_and_prefix(found)
        assert bucket
        assert not any(part in {".", ".."} for part in prefix.split("/"))
    return found


@decoder(
    mutate.words("aws_region", "region", "=", "=", " ", "allow_http", "true", "\n", "\n", "AWS_REGION", "lance."),
    mutate.noise, seeds=(), share=8, refuses=_USAGE,
)  # fmt: skip
def storage_options(data: bytes) -> object:
    """Storage options, one to a line: canonical ones stay as they are, and each goes to one library at least."""
    given = options.parse_options(data.decode("utf-8", "surrogateescape").split("\n"))
    for scheme in ("s3", "gs", "file"):
        found = options.canonical(given, scheme)
        assert options.canonical(found, scheme) == found
        config, client = options.split_for_obstore(found)
        assert {*config, *client} == {key for key in found if not options.is_lance_only(key)}
        assert repr(options.redact_options(found))
    return given


@decoder(
    mutate.words("1", "9" * 400, "0", ".", "5", "GiB", "MB", " ", "h", "w", "-", str(REGION), "/", "3", "_mem_wal/"),
    mutate.noise, seeds=(), share=8, refuses=(click.BadParameter, errors.InvalidUsageError),
)  # fmt: skip
def command_line(data: bytes) -> object:
    """Sizes, spans of time, region ids and targets as users write them."""
    text = data.decode("utf-8", "surrogateescape")
    convert = (Size(), Duration(), RegionId())[zlib.crc32(data) % 3]
    _, is_meant = _wanted(text)
    is_meant(Item(Kind.GENERATION, f"{text}/x", REGION, 3, 0, 1, ()))
    return convert.convert(text, None, None)
