"""Region fields that are SQL expressions: which are refused, and how the others are computed."""

from __future__ import annotations

import mmh3
import pyarrow as pa
import pytest

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.regions.specs import (
    RegionField,
    RegionSpec,
    check_expression,
    decode_spec,
    encode_specs,
    region_values,
)
from memwal_ops.formats.lance.wire.region_manifest import field_type
from tests.unit.formats.lance.regions.region_specs import expression, spec_of, values


@pytest.mark.req("S0-085", "S0-086")
def test_sources_are_numbered_in_their_order() -> None:
    columns = {"a": pa.array([10, 20, None]), "b": pa.array([3, None, 3])}
    assert values(expression("col0 - col1", "int64", "a", "b"), **columns) == [7, None, None]
    assert values(expression("col0 - col1", "int64", "b", "a"), **columns) == [-7, None, None]
    assert values(expression("coalesce(col0 % 4, -1)", "int64", "a"), **columns) == [2, 0, -1]
    assert values(expression("substr(col0, 1, 2)", "utf8", "s"), s=pa.array(["abc", "x"])) == ["ab", "x"]


@pytest.mark.req("S0-087", "S0-088", "S0-089", "S0-090", "S0-091", "S0-092")
@pytest.mark.parametrize(
    ("sql", "result", "rule"),
    [
        ("random()", "float64", "deterministic"),
        ("CASE WHEN col0 > 3 THEN now() ELSE to_timestamp(col0) END", "timestamp[ns]", "calls now"),
        ("date_part('year', current_date) + col0", "int64", "stateless"),
        ("concat(col0, uuid())", "utf8", "calls uuid"),
        ("concat(col0, version())", "utf8", "calls version"),
        ("row_number() OVER ()", "uint64", "depends on other rows"),
        ("sum(col0) OVER ()", "int64", "depends on other rows"),
        ("sum(col0)", "int64", "fails"),
        ("arrow_typeof(col0)", "utf8", "type-promotion resistant"),
        (
            "octet_length(arrow_cast(col0, 'Utf8')) + CASE arrow_typeof(col0) WHEN 'Int32' THEN 1 ELSE 0 END",
            "int64",
            "prom",
        ),
        ("arrow_typeof(col0) = 'Null'", "bool", "resistant"),
        ("10 / col0", "int64", "fails"),
        ("col0 % 7", "utf8", "consistent with its result type"),
        ("col0 % 7000", "int8", "consistent with its result type"),
        ("col0 * 0.5", "int64", "consistent with its result type"),
        ("col1", "int64", "is invalid"),
        ("col0, col0", "int64", "is invalid"),
        ("col0) UNION (SELECT 1", "int64", "is invalid"),
        ("", "int64", "is invalid"),
        ("@@session", "int64", "is invalid"),
        ("no_such_function(col0)", "int64", "is invalid"),
    ],
)
def test_expressions_that_break_a_rule(sql: str, result: str, rule: str) -> None:
    with pytest.raises(InvalidUsageError, match=rule):
        check_expression(sql, [pa.int64()], field_type(result))


@pytest.mark.req("S0-090", "S0-091")
def test_an_expression_that_fails_without_a_column_or_for_null() -> None:
    with pytest.raises(InvalidUsageError, match=r"not (column-removal resistant|NULL-safe)|fails"):
        check_expression("CAST(concat('x', col0) AS INT)", [pa.string()], pa.int32())
    failing = "CASE WHEN col0 IS NULL AND arrow_typeof(col0) = 'Null' THEN CAST('x' AS BIGINT) ELSE 1 END"
    with pytest.raises(InvalidUsageError):
        check_expression(failing, [pa.int64()], pa.int64())


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("col0 % 7", pa.int16()), ("col0 % 7", pa.int64()), ("col0 % 7", pa.uint32()), ("col0 / 10", pa.int32()),
        ("abs(col0) % 4", pa.int64()), ("col0 & 255", pa.int64()), ("coalesce(col0, 3)", pa.uint32()),
        ("CASE WHEN col0 > 100 THEN 1 ELSE 0 END", pa.int16()),
    ],
)  # fmt: skip
def test_expressions_that_keep_the_rules(sql: str, kind: pa.DataType) -> None:
    check_expression(sql, [kind], pa.int64())


@pytest.mark.req("S0-089")
def test_a_division_that_is_another_one_once_the_column_is_wider() -> None:
    with pytest.raises(InvalidUsageError, match=r"type-promotion resistant: where col0 is uint64"):
        check_expression("col0 / 10", [pa.uint32()], pa.int64())


@pytest.mark.req("S0-090")
def test_a_column_that_is_gone_is_null() -> None:
    rows = pa.table({"a": [1, 2], "b": ["x", "y"]})
    spec = spec_of(rows.schema, "bucket(a, 4)", "multi_bucket(a, b, 4)", expression("coalesce(col0, 5)", "int64", "a"))
    found = region_values(spec, rows.drop_columns(["a"]))
    assert found.column("a_bucket").to_pylist() == [None, None]
    assert found.column("a_b_multi_bucket").to_pylist() == [abs(mmh3.hash(one, 0)) % 4 for one in ("x", "y")]
    assert found.column("e").to_pylist() == [5, 5]
    (stored,) = encode_specs([RegionSpec((RegionField.parse("identity(a)"),))], rows.schema, {"a": 0, "b": 1}, ["a"])
    assert region_values(decode_spec(stored, {}), rows).column(0).to_pylist() == [None, None]


def test_an_expression_that_fails_on_a_row() -> None:
    spec = spec_of(
        pa.schema({"s": pa.string()}), expression("CASE WHEN col0 = 'bad' THEN 1/0 ELSE 1 END", "int64", "s")
    )
    assert region_values(spec, pa.table({"s": ["good"]})).column(0).to_pylist() == [1]
    with pytest.raises(InvalidUsageError, match="fails"):
        region_values(spec, pa.table({"s": ["good", "bad"]}))
