"""What of a DataFrame goes into a table: every value as it was, or a refusal; no Spark is started."""

from __future__ import annotations

import decimal
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.spark.load import to_table

VECTOR = pa.list_(pa.float32(), 2)
STRUCT = pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.string(), nullable=False)])


def cast(value: Any, given: pa.DataType, wanted: pa.DataType, **options: Any) -> Any:
    field = pa.field("c", wanted, **options)
    batch = pa.record_batch({"c": pa.array([value], given)})
    return to_table(batch, pa.schema([field]), ["c"] if field.metadata else []).to_pylist()[0]["c"]


@pytest.mark.parametrize(
    ("value", "given", "wanted"),
    [
        ([1.5, None], pa.list_(pa.float64()), VECTOR),
        ([float("inf"), float("nan")], pa.list_(pa.float64()), VECTOR),
        (None, pa.list_(pa.float64()), VECTOR),
        (2**63 - 1, pa.int64(), pa.uint64()),
        ("a\x00\U0001f600\u202e\ufffe", pa.string(), pa.large_string()),
        ({"x": None, "y": "a"}, pa.struct([("y", pa.string()), ("x", pa.int64())]), STRUCT),
        (
            {"v": [float("-inf")]},
            pa.struct([("v", pa.list_(pa.float64()))]),
            pa.struct([("v", pa.list_(pa.float32()))]),
        ),
    ],
)
def test_values_that_are_carried_over(value: Any, given: pa.DataType, wanted: pa.DataType) -> None:
    assert repr(cast(value, given, wanted)) == repr(value)


@pytest.mark.parametrize(
    ("value", "given", "wanted", "says"),
    [
        (2**31, pa.int64(), pa.int32(), "2147483648 not in range"),
        (-1, pa.int64(), pa.uint64(), "not a valid uint64"),
        (2**24 + 1, pa.int64(), pa.float32(), "not in range"),
        (1e300, pa.float64(), pa.float32(), "too large"),
        ([1.0, 70000.0], pa.list_(pa.float32()), pa.list_(pa.float16(), 2), "too large"),
        (
            {"v": [-1e300]},
            pa.struct([("v", pa.list_(pa.float64()))]),
            pa.struct([("v", pa.list_(pa.float32()))]),
            "large",
        ),
        ([1.0], pa.list_(pa.float64()), VECTOR, "expected size"),
        (decimal.Decimal("1.25"), pa.decimal128(5, 2), pa.decimal128(5, 1), "data loss"),
        (b"ab", pa.binary(), pa.binary(3), "not a valid fixed_size_binary"),
        (1, pa.timestamp("us"), pa.timestamp("ms"), "lose data"),
    ],
)
def test_values_that_would_change(value: Any, given: pa.DataType, wanted: pa.DataType, says: str) -> None:
    with pytest.raises(InvalidUsageError, match=says) as raised:
        cast(value, given, wanted)
    assert "Column 'c'" in str(raised.value)


@pytest.mark.parametrize("options", [{"nullable": False}, {"metadata": {"key": "yes"}}])
def test_a_value_that_has_to_be_there(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsageError, match="'c' has NULL in 1 of 1 rows"):
        cast(None, pa.int64(), pa.int64(), **options)


def test_text_that_is_none() -> None:
    """Spark casts any bytes to text; Lance would write them, and the column would be unreadable."""
    column = pa.array([b"\xffA"]).view(pa.string())
    with pytest.raises(InvalidUsageError, match="UTF8"):
        to_table(pa.record_batch({"c": column}), pa.schema([pa.field("c", pa.string())]), [])
    inside = pa.record_batch({"c": pa.ListArray.from_arrays([0, 1], column)})
    with pytest.raises(InvalidUsageError, match="UTF8"):
        to_table(inside, pa.schema([pa.field("c", pa.list_(pa.string()))]), [])


@pytest.mark.parametrize("nested", [False, True])
def test_decimals_where_java_puts_them(nested: bool) -> None:
    """Lance panics where a decimal does not begin at a multiple of 16 bytes; Java takes any multiple of 8."""
    values = [decimal.Decimal(at) / 100 for at in range(-5, 5)]
    kind = pa.decimal128(10, 2)
    data = pa.array(values, kind).buffers()[1]
    room = pa.allocate_buffer(data.size + 64)
    at = 8 - room.address % 16 + (16 if room.address % 16 > 8 else 0)
    memoryview(room)[at : at + data.size] = memoryview(data)
    placed = room.slice(at, data.size)
    assert placed.address % 16 == 8
    column = pa.Array.from_buffers(kind, len(values), [None, placed])
    wanted: list[Any] = values
    if nested:
        column = pa.ListArray.from_arrays(range(len(values) + 1), column)
        wanted = [[value] for value in values]
    schema = pa.schema([pa.field("c", column.type)])
    rows = to_table(pa.record_batch({"c": column}), schema, [])
    assert lance.write_dataset(rows, "memory://").to_table().column("c").to_pylist() == wanted


@pytest.mark.parametrize("nested", [False, True])
def test_vectors_of_which_every_one_is_null(nested: bool) -> None:
    """As Arrow's stream brings them from Java: the values, of which there are none, lie nowhere."""
    given: Any = pa.array([None, None], pa.list_(pa.float32()))
    wanted: pa.DataType = VECTOR
    if nested:
        given, wanted = pa.StructArray.from_arrays([given], ["v"]), pa.struct([("v", VECTOR)])
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"c": given})
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    (read,) = pa.ipc.open_stream(sink.getvalue())
    assert read.column("c").buffers()[-1].address == 0, "the premise"
    rows = to_table(read, pa.schema([pa.field("c", wanted)]), [])
    assert rows.column("c").to_pylist() == given.to_pylist()
