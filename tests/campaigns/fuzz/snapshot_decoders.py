"""Decoders of region snapshots, and what must be true of what they accept."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pyarrow as pa

from memwal_ops import errors
from memwal_ops.formats.lance.generations.wal import last_wal_entry
from memwal_ops.formats.lance.indexes.snapshots import Snapshot, decode_file, encode_file, known_regions
from memwal_ops.formats.lance.layouts import SHARD as SHARD_LAYOUT
from memwal_ops.formats.lance.wire import memwal_index, region_manifest as manifests
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from tests.campaigns.fuzz import mutate
from tests.campaigns.fuzz.corpus import real
from tests.campaigns.fuzz.decoder import REGION, U64_MAX, Recipe, decoder
from tests.campaigns.fuzz.places import FewObjects
from tests.campaigns.fuzz.region_decoders import FIELD_KINDS

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
    right = memwal_index._REGION_COLUMNS if recipe.below(2) else memwal_index._SHARD_COLUMNS
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
        last_wal_entry(FewObjects({}), REGION, known.replay_after_wal_id, known.wal_id_last_seen, SHARD_LAYOUT)
    return found


@decoder(mutate.noise, seeds=(), share=4, refuses=_FORMAT)
def snapshot_of_regions(data: bytes) -> object:
    """Region manifests to rows and back, in both layouts."""
    recipe = Recipe(data)
    specs = [memwal_pb2.RegionSpec(spec_id=1)]
    for name in ("a", "b", "a")[: recipe.below(4)]:
        specs[0].fields.add(field_id=name, result_type=recipe.one_of(FIELD_KINDS))
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
    for build in (memwal_index.region_rows, memwal_index.shard_rows):
        rows = build(regions, specs)
        decoded = memwal_index.decode_rows(rows)
        assert [one.region_id for one in decoded] == [one.region_id for one in regions]
        assert [one.region_spec_id for one in decoded] == [one.region_spec_id for one in regions]
        for row, region in zip(decoded, regions, strict=True):
            if row.state is not None:
                assert (row.state.version, row.state.replay_after_wal_id) == (
                    region.version,
                    region.replay_after_wal_id,
                )
                assert row.state.flushed_generations == region.flushed_generations
        assert build(memwal_index.as_rows(rows), specs).schema == rows.schema
    for region in regions:
        memwal_index.check_fields(region, specs)
    return regions


@decoder(
    mutate.damage,
    mutate.damage,
    mutate.damage,
    mutate.noise,
    seeds=real("snapshot_file"),
    share=1,
    refuses=_FORMAT,
    native="pylance trusts the offsets and encodings inside a page",
)
def snapshot_file(data: bytes) -> object:
    """``decode_file``: Lance's own reader on damaged bytes; what decodes is encoded to equal rows."""
    rows = decode_file(data)
    known_regions(Snapshot(0, "inline", rows))
    if rows.num_columns and data[len(data) // 2] % 4 == 0:
        assert decode_file(encode_file(rows)).equals(rows)
    return rows
