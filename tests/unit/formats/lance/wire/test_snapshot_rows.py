"""Snapshot rows: the columns and types of each layout, and the values of region fields."""

from __future__ import annotations

import contextlib
import datetime
import struct
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.indexes.snapshots import decode_file, encode_file
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.memwal_index import RegionState, decode_rows, region_rows, shard_rows
from memwal_ops.formats.lance.wire.region_manifest import (
    FlushedGeneration,
    RegionManifest,
    RegionStatus,
    decode_field,
    field_type,
    field_types,
)
from memwal_ops.formats.lance.wire.version_manifest import decode_fragment_bitmap

REGIONS = [UUID(int=number, version=4) for number in range(1, 4)]


def spec(**fields: str) -> memwal_pb2.RegionSpec:
    found = memwal_pb2.RegionSpec(spec_id=1)
    for name, kind in fields.items():
        found.fields.add(field_id=name, result_type=kind)
    return found


def manifest(region_id: UUID, **changes: Any) -> RegionManifest:
    values = {
        "version": 3,
        "region_spec_id": 1,
        "writer_epoch": 2,
        "replay_after_wal_id": None,
        "wal_id_last_seen": 9,
        "current_generation": 3,
        "flushed_generations": (FlushedGeneration(1, "aa_gen_1"), FlushedGeneration(2, "bb_gen_2")),
        "status": RegionStatus.ACTIVE,
    }
    return RegionManifest(region_id, **{**values, **changes})


@pytest.mark.req("S0-106", "S0-107", "S0-108")
def test_the_specifications_columns() -> None:
    manifests = [
        manifest(REGIONS[0], region_fields=(("bucket", struct.pack("<i", -7)), ("name", "ä".encode()))),
        manifest(REGIONS[1], flushed_generations=(), replay_after_wal_id=4),
    ]
    rows = decode_file(encode_file(region_rows(manifests, [spec(bucket="int32", name="utf8")])))
    generation = pa.struct([("generation", pa.uint64()), ("path", pa.string())])
    assert rows.schema == pa.schema(
        [
            ("region_id", pa.binary(16)),
            ("version", pa.uint64()),
            ("region_spec_id", pa.uint32()),
            ("writer_epoch", pa.uint64()),
            ("replay_after_wal_id", pa.uint64()),
            ("wal_id_last_seen", pa.uint64()),
            ("current_generation", pa.uint64()),
            ("flushed_generations", pa.list_(generation)),
            ("region_field_bucket", pa.int32()),
            ("region_field_name", pa.string()),
        ]
    )
    first, second = decode_rows(rows)
    assert first.region_id == REGIONS[0]
    assert first.fields == {"bucket": -7, "name": "ä"}
    assert first.state == RegionState(3, 2, None, 9, 3, manifests[0].flushed_generations)
    assert second.fields == {}
    assert second.state is not None
    assert (second.state.replay_after_wal_id, second.state.flushed_generations) == (4, ())


def test_pylances_columns() -> None:
    manifests = [manifest(REGIONS[0], region_fields=(("bucket", struct.pack("<i", 3)),)), manifest(REGIONS[1])]
    rows = decode_file(encode_file(shard_rows(manifests, [spec(bucket="int32")])))
    assert [(field.name, field.type) for field in rows.schema] == [
        ("shard_id", pa.string()),
        ("shard_spec_id", pa.uint32()),
        ("shard_field_bucket", pa.int32()),
    ]
    assert rows.to_pylist() == [
        {"shard_id": str(REGIONS[0]), "shard_spec_id": 1, "shard_field_bucket": 3},
        {"shard_id": str(REGIONS[1]), "shard_spec_id": 1, "shard_field_bucket": None},
    ]
    assert [(row.region_id, row.fields, row.state) for row in decode_rows(rows)] == [
        (REGIONS[0], {"bucket": 3}, None),
        (REGIONS[1], {}, None),
    ]


@pytest.mark.req("S0-070")
@pytest.mark.parametrize("build", [region_rows, shard_rows])
def test_no_region_is_an_empty_file_with_the_schema(build: Any) -> None:
    empty = build([], [spec(day="date32")])
    rows = decode_file(encode_file(empty))
    assert rows.num_rows == 0
    assert rows.schema == empty.schema
    assert decode_rows(rows) == ()


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("int32", struct.pack("<i", -5), -5),
        ("Int64", struct.pack("<q", 1 << 40), 1 << 40),
        ("uint8", b"\xff", 255),
        ("float64", struct.pack("<d", 0.5), 0.5),
        ("boolean", b"\x01", True),
        ("utf8", b"x\xc3\xa4", "xä"),
        ("large_string", b"", ""),
        ("date32", struct.pack("<i", 1), datetime.date(1970, 1, 2)),
        ("of a later release", b"\x00\x01", b"\x00\x01"),
    ],
)
def test_values_of_region_fields(kind: str, value: bytes, expected: object) -> None:
    assert decode_field(value, field_type(kind)) == expected


@pytest.mark.parametrize(("kind", "value"), [("int32", b"\x01"), ("bool", b""), ("utf8", b"\xff"), ("int64", b"1234")])
def test_values_that_are_none(kind: str, value: bytes) -> None:
    with pytest.raises(InvalidFormatError):
        decode_field(value, field_type(kind))


def test_two_specs_that_disagree_on_a_field() -> None:
    assert field_types([spec(a="int32", b="utf8"), spec(a="int32", b="int64")]) == {"a": pa.int32(), "b": pa.binary()}


def test_rows_of_no_layout() -> None:
    with pytest.raises(InvalidFormatError, match="of no known layout"):
        decode_rows(pa.table({"a": [1]}))
    with pytest.raises(InvalidFormatError, match="does not decode"):
        decode_rows(pa.table({"shard_id": ["not a uuid"], "shard_spec_id": [1]}))
    with pytest.raises(InvalidFormatError, match="not a readable Lance file"):
        decode_file(b"junk")


@given(st.binary(max_size=40))
def test_a_damaged_bitmap_is_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(InvalidFormatError):
        assert all(number >= 0 for number in decode_fragment_bitmap(data))


def test_not_a_time_is_refused() -> None:
    kind = pa.timestamp("us")
    assert decode_field(struct.pack("<q", 0), kind) == datetime.datetime(1970, 1, 1)
    with pytest.raises(InvalidFormatError, match="not a time"):
        decode_field(struct.pack("<q", -(2**63)), kind)
