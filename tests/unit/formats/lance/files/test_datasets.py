"""Values as conditions and messages have them: Python has neither nanoseconds nor years after 9999."""

from __future__ import annotations

import pyarrow as pa
import pytest

from memwal_ops.formats.lance.files.datasets import literal, plain, readable

ZONE = pa.timestamp("ns", "UTC")
FAR = 2**31 - 1


def array(kind: pa.DataType, number: int) -> pa.Array:
    return pa.array([number, None], pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64(), pa.time64("ns"), pa.duration("s"), ZONE], ids=str)
def test_times_are_numbers_however_deep(kind: pa.DataType) -> None:
    number = FAR * 86_400_000 if kind == pa.date64() else FAR
    values = array(kind, number)
    struct = pa.StructArray.from_arrays([values], ["a"])
    fixed = pa.FixedSizeListArray.from_arrays(struct, 2)
    listed = pa.LargeListArray.from_arrays(pa.array([0, 2], pa.int64()), struct)
    mapped = pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), pa.array(["x", "y"]), values)
    assert plain(values) == [number, None]
    assert plain(fixed) == plain(listed) == [[{"a": number}, {"a": None}]]
    assert plain(mapped) == [[("x", number), ("y", None)]]


def test_other_values_are_as_they_are() -> None:
    for values in (pa.array(["a", None]), pa.array([[1.5]], pa.list_(pa.float32(), 1)), pa.array([b"x"])):
        assert plain(values) == values.to_pylist()
    assert plain(pa.array(["a", "b", "a"]).dictionary_encode()) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.date32(), "Date32"),
        (pa.timestamp("ms"), "Timestamp(Millisecond, None)"),
        (ZONE, 'Timestamp(Nanosecond, Some("UTC"))'),
        (pa.time32("s"), "Time32(Second)"),
        (pa.duration("us"), "Duration(Microsecond)"),
    ],
    ids=str,
)
def test_literals_of_times(kind: pa.DataType, name: str) -> None:
    assert literal(plain(array(kind, 7))[0], kind) == f"arrow_cast(arrow_cast(7, 'Int{kind.bit_width}'), '{name}')"


def test_keys_in_messages() -> None:
    keys = pa.table({"at": array(ZONE, 1), "day": array(pa.date32(), FAR), "n": [1, 2]}).slice(0, 1)
    (row,) = readable(keys)
    assert row == {"at": "1970-01-01 00:00:00.000000001Z", "day": f"<value out of range: {FAR}>", "n": 1}
