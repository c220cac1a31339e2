"""Region specs: known answers of the transforms, the six rules of expressions, what is refused, and what is stored."""

from __future__ import annotations

import datetime as dt
import random
import struct
import uuid
from decimal import Decimal
from typing import Any

import mmh3
import numpy as np
import pyarrow as pa
import pytest
from datafusion import SessionContext

from memwal_ops.errors import InvalidUsageError, TableCorruptError
from memwal_ops.formats.lance.regions.specs import (
    RegionField,
    RegionSpec,
    by_region,
    decode_spec,
    encode_specs,
    region_values,
)
from memwal_ops.formats.lance.regions.transforms import murmur3
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.region_manifest import decode_field, encode_field, field_type, type_name
from tests.unit.formats.lance.regions.region_specs import expression, spec_of, value_type, values

_MASK = 2**32 - 1


# -- murmur3


@pytest.mark.req("S0-101")
@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([34], pa.int32()), 2017239379),
        (pa.array([34], pa.int64()), 2017239379),
        (pa.array([dt.date(2017, 11, 16)]), -653330422),
        (pa.array([dt.datetime(2017, 11, 16, 22, 31, 8)], pa.timestamp("us")), -2047944441),
        (pa.array(["iceberg"]), 1210000089),
        (pa.array([b"\0\1\2\3"]), -188683207),
        (pa.array([uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7").bytes], pa.binary(16)), 1488055340),
    ],
)
def test_murmur3_known_answers(column: pa.Array, expected: int) -> None:
    """Those of Iceberg's specification, appendix B, which hashes by the same function and seed."""
    assert murmur3([column]).to_pylist() == [expected]
    assert murmur3([pa.nulls(1, column.type)]).to_pylist() == [None]
    assert murmur3([column]).type == pa.int32()


@pytest.mark.req("S0-101")
def test_murmur3_of_many_words() -> None:
    numbers = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 40_000)
    found = murmur3([pa.array(numbers)]).to_pylist()
    assert found == [mmh3.hash(struct.pack("<q", int(one)), 0) for one in numbers]


@pytest.mark.req("S0-089", "S0-101")
def test_one_hash_for_equal_values_of_all_types() -> None:
    for value in (0, 5, 127):
        kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32(), pa.float64()]
        assert len({murmur3([pa.array([value], kind)])[0].as_py() for kind in kinds}) == 1
    assert len({murmur3([pa.array([one])])[0].as_py() for one in (0.0, -0.0)}) == 1
    assert murmur3([pa.array([0.5])]).to_pylist() == [mmh3.hash(struct.pack("<d", 0.5), 0)]
    moment = dt.datetime(1969, 12, 31, 23, 59, 59)
    stamps = {murmur3([pa.array([moment], pa.timestamp(unit))])[0].as_py() for unit in ("s", "ms", "us", "ns")}
    assert len(stamps) == 1
    texts = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()]
    assert len({murmur3([pa.array(["Zürich"]).cast(kind)])[0].as_py() for kind in texts}) == 1


@pytest.mark.req("S0-102")
def test_murmur3_of_several_columns_leaves_nulls_out() -> None:
    numbers, texts = [5, None, 7, None], ["a", "b", None, None]
    packed = [struct.pack("<q", one) if one is not None else b"" for one in numbers]
    expected = [
        mmh3.hash(one + (text or "").encode(), 0) if one or text else None
        for one, text in zip(packed, texts, strict=True)
    ]
    assert murmur3([pa.array(numbers, pa.int32()), pa.array(texts)]).to_pylist() == expected
    others = [None, 1, 2, None]
    found = murmur3([pa.array(numbers, pa.int32()), pa.array(others, pa.int64())]).to_pylist()
    expected = [
        mmh3.hash(b"".join(struct.pack("<q", one) for one in row if one is not None), 0) if any(row) else None
        for row in zip(numbers, others, strict=True)
    ]
    assert found == expected


def key_of_hash(wanted: int) -> int:
    """An int64 below 2**32 of that hash: each step of murmur3 has an inverse."""

    def rotated(value: int, by: int) -> int:
        return ((value >> by) | (value << (32 - by))) & _MASK

    def unmixed(state: int) -> int:
        return rotated((state - 0xE6546B64) * pow(5, -1, 2**32) & _MASK, 13)

    value = wanted & _MASK
    value ^= value >> 16
    value = value * pow(0xC2B2AE35, -1, 2**32) & _MASK
    value ^= value >> 13 ^ value >> 26
    value = value * pow(0x85EBCA6B, -1, 2**32) & _MASK
    value ^= value >> 16
    block = unmixed(unmixed(value ^ 8))  # the upper word is 0, and mixes in nothing
    return rotated(block * pow(0x1B873593, -1, 2**32) & _MASK, 15) * pow(0xCC9E2D51, -1, 2**32) & _MASK


@pytest.mark.req("S0-098", "S0-103")
def test_the_hash_that_has_no_absolute_value() -> None:
    """abs() of the smallest int32 is no int32: it is taken with 64 bits, and the bucket is one of the buckets."""
    key = key_of_hash(-(2**31))
    assert murmur3([pa.array([key])]).to_pylist() == [-(2**31)]
    for count in (1, 3, 7, 16, 2**31 - 1):
        assert values(f"bucket(id, {count})", id=pa.array([key])) == [2**31 % count]


# -- transforms


@pytest.mark.req("S0-098", "S0-103")
def test_bucket() -> None:
    numbers = [34, None, *random.Random(3).sample(range(-(2**40), 2**40), 500)]
    found = values("bucket(id, 16)", id=pa.array(numbers, pa.int64()))
    assert found[:2] == [2017239379 % 16, None]
    assert found == [None if one is None else abs(mmh3.hash(struct.pack("<q", one), 0)) % 16 for one in numbers]
    assert {*found} == {None, *range(16)}
    assert value_type("bucket(id, 16)", id=pa.array(["x"])) == pa.int32()


@pytest.mark.req("S0-099", "S0-102")
def test_multi_bucket() -> None:
    found = values("multi_bucket(a, b, 9)", a=pa.array([1, None, None]), b=pa.array(["x", "x", None]))
    assert found == [
        abs(mmh3.hash(struct.pack("<q", 1) + b"x", 0)) % 9,
        abs(mmh3.hash(b"x", 0)) % 9,
        None,
    ]


@pytest.mark.req("S0-094", "S0-095", "S0-096", "S0-097")
@pytest.mark.parametrize("part", ["year", "month", "day", "hour"])
@pytest.mark.parametrize("kind", [pa.date32(), pa.date64(), *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns"))])
def test_parts_of_dates(part: str, kind: pa.DataType) -> None:
    """As DataFusion's date_part has them, also before 1970."""
    moments = [
        dt.datetime(2026, 1, 31, 23, 59, 59),
        dt.datetime(1969, 12, 31, 22),
        dt.datetime(1905, 2, 3, 4, 5, 6),
        None,
    ]
    column = pa.array(moments, pa.timestamp("s")).cast(kind, safe=False)
    frame = SessionContext().from_arrow(pa.table({"col0": column}))
    expected = frame.select(frame.parse_sql_expr(f"date_part('{part}', col0)")).to_arrow_table().column(0)
    assert values(f"{part}(at)", at=column) == expected.to_pylist()
    assert value_type(f"{part}(at)", at=column) == pa.int32()


@pytest.mark.req("S0-093")
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None, -3], pa.int16()),
        pa.array(["a", None]),
        pa.array([dt.date(2026, 1, 2)]),
        pa.array([True, None]),
    ],
)
def test_identity(column: pa.Array) -> None:
    assert values("identity(a)", a=column) == column.to_pylist()
    assert value_type("identity(a)", a=column) == column.type
    assert values("identity(a)", a=column.dictionary_encode()) == column.to_pylist()


@pytest.mark.req("S0-100")
@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("width", [1, 5, 100, 1000])
def test_truncate_numbers(kind: pa.DataType, width: int) -> None:
    """As the expression of the specification gives it: towards zero."""
    column = pa.array([0, 1, 7, -7, 99, -100, 127, -128, None], kind)
    frame = SessionContext().from_arrow(pa.table({"col0": column}))
    expected = frame.select(frame.parse_sql_expr(f"col0 - (col0 % {width})")).to_arrow_table().column(0)
    assert values(f"truncate(a, {width})", a=column) == expected.to_pylist()
    assert value_type(f"truncate(a, {width})", a=column) == kind


@pytest.mark.req("S0-100")
def test_truncate_texts_and_the_largest_numbers() -> None:
    texts = ["iceberg", "日本語", "", None, "e\u0301x"]
    frame = SessionContext().from_arrow(pa.table({"col0": texts}))
    expected = frame.select(frame.parse_sql_expr("left(col0, 2)")).to_arrow_table().column(0).to_pylist()
    assert values("truncate(a, 2)", a=pa.array(texts)) == expected == ["ic", "日本", "", None, "e\u0301"]
    assert values("truncate(a, 10)", a=pa.array([2**64 - 1], pa.uint64())) == [(2**64 - 1) // 10 * 10]
    assert values("truncate(a, 10)", a=pa.array([-(2**63), 2**63 - 1])) == [-(2**63) + 8, 2**63 - 8]


# -- specs


@pytest.mark.req("S0-074", "S0-082", "S0-083", "S0-085")
def test_what_is_stored() -> None:
    schema = pa.schema({"id": pa.int64(), "name": pa.string()})
    specs = [
        RegionSpec((RegionField.parse("bucket(id, 16)"), RegionField.parse("first=truncate(name, 1)"))),
        RegionSpec((expression("col0 % 3", "int64", "id"),), spec_id=1),
    ]
    first, second = encode_specs(specs, schema, {"id": 4, "name": 9}, ["id", "name"])
    assert (first.spec_id, second.spec_id) == (2, 1), "an id is given once"
    one, two = first.fields
    assert (one.field_id, [*one.source_ids], one.transform, one.result_type) == ("id_bucket", [4], "bucket", "int32")
    assert dict(one.parameters) == {"num_buckets": "16"}
    assert not one.HasField("expression")
    assert (two.field_id, [*two.source_ids], two.result_type) == ("first", [9], "utf8")
    assert second.fields[0].expression == "col0 % 3"
    assert not second.fields[0].HasField("transform")


@pytest.mark.req("S0-082", "S0-009")
@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([RegionSpec((RegionField.parse("identity(id)"),), 0)], "0 cannot be the id"),
        ([RegionSpec((RegionField.parse("identity(id)"),), 3)] * 2, "3 cannot be the id of two"),
        ([RegionSpec(())], "no fields"),
        ([RegionSpec((RegionField.parse("identity(id)"),) * 2)], "two fields of one name"),
        ([RegionSpec((RegionField.parse("identity(n)"),))], "cannot use n: rows of one key"),
        ([RegionSpec((RegionField.parse("identity(gone)"),))], "cannot use gone"),
        ([RegionSpec((RegionField.parse("multi_bucket(id, id, 3)"),))], "a column twice"),
        ([RegionSpec((RegionField("x", ("id",), "void"),))], "'void' is not a transform"),
        ([RegionSpec((RegionField("x", ("id",)),))], "a transform or an expression"),
        ([RegionSpec((RegionField("x", ("id",), "identity", "col0"),))], "either a transform or"),
        ([RegionSpec((RegionField("", ("id",), "identity"),))], "no name"),
        ([RegionSpec((RegionField("x", ("id",), "bucket"),))], "takes num_buckets"),
        ([RegionSpec((RegionField.parse("bucket(id, 0)"),))], "num_buckets is '0'"),
        ([RegionSpec((RegionField.parse("bucket(id, many)"),))], "num_buckets is 'many'"),
        ([RegionSpec((RegionField.parse("truncate(id, -3)"),))], "width is '-3'"),
        ([RegionSpec((RegionField.parse("year(id)"),))], "does not support the type int64"),
        ([RegionSpec((RegionField("x", ("id", "key"), "identity"),))], "takes one column, not 2"),
        (
            [RegionSpec((RegionField("x", ("id",), "bucket", None, "utf8", {"num_buckets": "2"}),))],
            "has the type int32, not utf8",
        ),
        ([RegionSpec((RegionField("x", ("id",), None, "col0", "number"),))], "unknown result type 'number'"),
        ([RegionSpec((RegionField("x", (), None, "1", "int64"),))], "no source column"),
        ([RegionSpec((RegionField("x", ("id",), None, "col0 + random()", "float64"),))], "calls random"),
        (
            [
                RegionSpec((RegionField("x", ("id",), "identity"),)),
                RegionSpec((RegionField("x", ("key",), "identity"),)),
            ],
            "in one spec and another type",
        ),
    ],
)
def test_specs_that_are_refused(specs: list[RegionSpec], message: str) -> None:
    schema = pa.schema({"id": pa.int64(), "key": pa.string(), "n": pa.int32()})
    with pytest.raises(InvalidUsageError, match=message):
        encode_specs(specs, schema, {"id": 0, "key": 1, "n": 2}, ["id", "key"])


@pytest.mark.parametrize(
    "text", ["", "id", "bucket id", "void(id)", "bucket(id, 3", "{", '{"sources": 1}', '{"a": 1}', "[]"]
)
def test_texts_that_are_no_field(text: str) -> None:
    with pytest.raises(InvalidUsageError, match="is not a region field"):
        RegionField.parse(text)


def test_a_field_as_json() -> None:
    text = '{"field_id": "e", "sources": ["id"], "expression": "col0 % 3", "result_type": "int64"}'
    assert RegionField.parse(text) == expression("col0 % 3", "int64", "id")
    text = '{"field_id": "b", "sources": ["id"], "transform": "bucket", "parameters": {"num_buckets": 4}}'
    assert RegionField.parse(text) == RegionField.parse("b = bucket(id, 4)")


@pytest.mark.parametrize(
    "stored",
    [
        memwal_pb2.RegionSpec(spec_id=0, fields=[memwal_pb2.RegionField(field_id="a", transform="identity")]),
        memwal_pb2.RegionSpec(spec_id=1),
        memwal_pb2.RegionSpec(spec_id=1, fields=[memwal_pb2.RegionField(field_id="a")]),
        memwal_pb2.RegionSpec(spec_id=1, fields=[memwal_pb2.RegionField(transform="identity")]),
    ],
)
def test_stored_specs_that_are_none(stored: memwal_pb2.RegionSpec) -> None:
    with pytest.raises(TableCorruptError):
        decode_spec(stored, {})


@pytest.mark.req("S0-089")
@pytest.mark.parametrize("transform", ["identity(a)", "truncate(a, 4)", "bucket(a, 97)", "multi_bucket(a, b, 97)"])
def test_zero_has_one_sign_and_no_number_is_one_value(transform: str) -> None:
    """Floats that are equal, and all that are no number, come into one region, whatever their bits."""
    odd = np.frombuffer(struct.pack("<QQ", 0x7FF8000000000001, 0xFFF8000000000002), np.float64)
    column = np.concatenate([[0.0, -0.0, np.nan, 7.5, 7.5], odd])
    rows = pa.table({"a": column, "b": pa.array([1] * 7, pa.int8())})
    narrow = rows.set_column(0, "a", rows["a"].cast(pa.float32()))
    found = []
    for given in (rows, narrow):
        spec = spec_of(given.schema, transform)
        found.append({values: part.to_pylist() for values, part in by_region(region_values(spec, given))})
        assert sorted(found[-1].values()) == [[0, 1], [2, 5, 6], [3, 4]]
        for at in range(7):
            ((one, _),) = by_region(region_values(spec, given.slice(at, 1)))
            assert at in found[-1][one], "a value is found again"
            kind = field_type(spec.fields[0].result_type)
            stored = encode_field(one[0], kind)
            assert stored is not None
            assert (decode_field(stored, kind),) == one, "also from a manifest"
    if "bucket" in transform:
        assert found[0] == found[1]


@pytest.mark.req("S0-089", "S0-101")
def test_decimals_are_hashed_as_the_numbers_they_are_equal_to() -> None:
    def hashes(*column: Any, kind: pa.DataType) -> list[int]:
        return list(murmur3([pa.array(column, kind)]).to_pylist())

    whole = hashes(5, -7, 0, kind=pa.int64())
    for kind in (pa.decimal128(5, 0), pa.decimal128(9, 3), pa.decimal256(60, 20), pa.float64(), pa.int16()):
        assert hashes(*(Decimal(one) if pa.types.is_decimal(kind) else one for one in (5, -7, 0)), kind=kind) == whole
    assert hashes(Decimal("2.5"), kind=pa.decimal128(9, 3)) == hashes(2.5, kind=pa.float32())
    tenth = hashes(Decimal("0.1"), kind=pa.decimal128(9, 1))
    assert tenth == hashes(Decimal("0.1"), kind=pa.decimal256(70, 9)) == [mmh3.hash(b"0.1", 0)]
    assert tenth != hashes(0.1, kind=pa.float64()), "which is another number"
    large = Decimal(2**63)
    assert hashes(large, kind=pa.decimal128(38, 2)) == hashes(2.0**63, kind=pa.float64())
    assert hashes(None, kind=pa.decimal128(9, 3)) == [None]
    both = murmur3([pa.array([Decimal(3), None], pa.decimal128(4, 1)), pa.array([1, 1])]).to_pylist()
    assert both == murmur3([pa.array([3, None]), pa.array([1, 1])]).to_pylist()


@pytest.mark.req("S0-100")
def test_decimals_in_other_transforms() -> None:
    kind = pa.decimal128(38, 2)
    column = pa.array([Decimal("-7.25"), Decimal("7.25"), Decimal("0.99"), None, Decimal("9" * 36 + ".99")], kind)
    assert values("truncate(a, 5)", a=column) == [Decimal(-5), Decimal(5), Decimal(0), None, Decimal("9" * 35 + "5")]
    assert values("identity(a)", a=column) == column.to_pylist()
    assert value_type("truncate(a, 5)", a=column) == value_type("identity(a)", a=column) == kind
    assert field_type(str(type_name(kind))) == kind
    for value in column.to_pylist():
        if value is not None:
            stored = encode_field(value, kind)
            assert stored is not None
            assert decode_field(stored, kind) == value
    assert field_type("decimal128(77, 2)") == pa.binary()
    rows = pa.table({"a": column})
    assert len(by_region(region_values(spec_of(rows.schema, "truncate(a, 5)"), rows))) == 5


@pytest.mark.req("S0-081")
def test_rows_by_region() -> None:
    rows = pa.table({"a": [1, 2, 1, None, 2, None], "b": ["x", "x", "x", "y", "z", None]})
    spec = spec_of(rows.schema, "identity(a)", "identity(b)")
    found = {key: numbers.to_pylist() for key, numbers in by_region(region_values(spec, rows))}
    assert found == {(1, "x"): [0, 2], (2, "x"): [1], (None, "y"): [3], (2, "z"): [4], (None, None): [5]}
    assert by_region(region_values(spec, rows.slice(0, 0))) == []
    many = pa.table({"a": np.arange(200_000) % 70_000, "b": ["x"] * 200_000})
    parts = by_region(region_values(spec, many))
    assert len(parts) == 70_000
    assert all(numbers.to_pylist() == [*range(key[0], 200_000, 70_000)] for key, numbers in parts[:200])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (5, pa.int8()), (-3, pa.int32()), (2**64 - 1, pa.uint64()), (0.25, pa.float32()), ("Zürich", pa.string()),
        (b"\0x", pa.binary()), (True, pa.bool_()), (False, pa.bool_()), (dt.date(1969, 1, 2), pa.date32()),
        (dt.datetime(2026, 1, 2, 3), pa.timestamp("us")), (None, pa.int32()),
    ],
)  # fmt: skip
def test_values_in_manifests(value: Any, kind: pa.DataType) -> None:
    stored = encode_field(value, kind)
    assert (None if stored is None else decode_field(stored, kind)) == value
    named = type_name(kind)
    assert named is not None
    assert field_type(named) == kind
