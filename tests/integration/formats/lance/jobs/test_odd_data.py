"""Keys and values at the edge of what a column may hold, by the key index and without it."""

from __future__ import annotations

import datetime
import decimal
import uuid
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.engines.merge.locate import is_indexed
from memwal_ops.formats.lance.engines.read.reader import Reader
from memwal_ops.formats.lance.jobs import merge
from tests.support.tables.stale_indexes import compact_and_leave

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine

PRIMARY = {"lance-schema:unenforced-primary-key": "true"}
POSITION = "lance-schema:unenforced-primary-key:position"
# With this many base rows a few look-ups in the index cost less than a scan.
MANY = 6_000

Row = dict[str, Any]
Step = tuple[list[Row], list[Row]]


def key(kind: pa.DataType, name: str = "id") -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata=PRIMARY)


def merged(
    path: Path,
    schema: pa.Schema,
    base: list[Row],
    steps: Sequence[Step],
    engine: MergeEngine | None,
    **options: Any,
) -> merge.MergeReport:
    """Write, flush a generation for each step, merge, and compare with a dictionary."""
    uri = str(path / "t.lance")
    keys = [
        field.name for field in schema if field.metadata and b"lance-schema:unenforced-primary-key" in field.metadata
    ]
    dataset = lance.write_dataset(pa.Table.from_pylist(base, schema=schema), uri, **options)
    if len(keys) == 1:
        dataset.create_scalar_index(keys[0] if keys[0].isidentifier() else f"`{keys[0]}`", "BTREE")
    lance.dataset(uri).initialize_mem_wal()
    key_schema = pa.schema([schema.field(name) for name in keys])
    expected = {tuple(row[name] for name in keys): row for row in pa.Table.from_pylist(base, schema=schema).to_pylist()}
    region = str(uuid.uuid4())
    for puts, deletes in steps:
        with lance.dataset(uri).mem_wal_writer(region) as writer:
            rows = pa.Table.from_pylist(puts, schema=schema)
            writer.put(rows)
            expected.update({tuple(row[name] for name in keys): row for row in rows.to_pylist()})
            if deletes:
                writer.delete(pa.Table.from_pylist(deletes, schema=key_schema))
                for row in deletes:
                    expected.pop(tuple(row[name] for name in keys), None)
    report = merge.apply(open_table(uri), merge.MergeOptions(), engine=engine)
    assert report.decision == "merged", [one.to_json() for one in report.blocked]
    got = lance.dataset(uri).to_table().to_pylist()
    # By repr: NaN equals nothing, and -0.0 equals 0.0.
    assert sorted(map(repr, got)) == sorted(map(repr, expected.values()))
    return report


def used_index(report: merge.MergeReport) -> list[bool]:
    return [entry.result.use_index for entry in report.passes if entry.result is not None]


ODD = [
    "", "'", "''", "a'b", "\\", "a\\'b", "\n", "\t", "é", "e\u0301", "😀", "NULL", "null", "x" * 5000, "a\x00b", "\x00",
    "`", "--", "; drop", "%", "_", "\u200b",
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("others", [0, MANY])
def test_odd_strings(tmp_path: Path, kind: pa.DataType, others: int, engine: MergeEngine | None) -> None:
    base = [{"id": text, "v": 0} for text in [*ODD, *(f"k{number}" for number in range(others))]]
    steps: list[Step] = [
        ([{"id": text, "v": 1} for text in ODD[:12]], [{"id": text} for text in ODD[12:]]),
        ([{"id": ODD[14], "v": 3}], [{"id": ODD[1]}]),
    ]
    report = merged(tmp_path, pa.schema([key(kind), pa.field("v", pa.int64())]), base, steps, engine)
    assert used_index(report) == [others > 0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "values", "index"),
    [
        (pa.int64(), [-(2**63), 2**63 - 1, 0, -1], False),
        (pa.int64(), [-(2**63) + 1, 2**63 - 1, 0, -1], True),
        (pa.uint64(), [2**64 - 1, 2**63, 0], True),
        (pa.int32(), [-(2**31), 2**31 - 1, -1], True),
    ],
)
def test_the_ends_of_integers(
    tmp_path: Path, kind: pa.DataType, values: list[int], index: bool, engine: MergeEngine | None
) -> None:
    base = [{"id": number, "v": 0} for number in [*values, *range(1_000, 1_000 + MANY)]]
    steps: list[Step] = [([{"id": number, "v": 1} for number in values[:2]], [{"id": values[-1]}])]
    report = merged(tmp_path, pa.schema([key(kind), pa.field("v", pa.int64())]), base, steps, engine)
    assert used_index(report) == [index]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.binary(), [b"", b"\x00", b"\xff\x00", "é".encode()]),
        (pa.bool_(), [True, False]),
        (pa.int8(), [-128, 127, 0]),
        (pa.uint8(), [255, 0, 3]),
    ],
    ids=str,
)
def test_small_kinds_of_keys(tmp_path: Path, kind: pa.DataType, values: list[Any], engine: MergeEngine | None) -> None:
    base = [{"id": value, "v": 0} for value in values]
    steps: list[Step] = [([{"id": values[0], "v": 1}], [{"id": values[-1]}])]
    merged(tmp_path, pa.schema([key(kind), pa.field("v", pa.int64())]), base, steps, engine)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["Id", "my id", "select", "_rowid2", "_distance", "key", "locator"])
def test_odd_names(tmp_path: Path, name: str, engine: MergeEngine | None) -> None:
    schema = pa.schema([pa.field("V w", pa.int64()), pa.field("group", pa.string()), key(pa.int64(), name)])
    base = [{name: number, "V w": 0, "group": "a"} for number in range(MANY)]
    steps: list[Step] = [
        ([{name: number, "V w": 1, "group": "b"} for number in range(10)], [{name: 50}]),
        ([{name: number, "V w": 2, "group": None} for number in range(5, 8)], []),
    ]
    assert used_index(merged(tmp_path, schema, base, steps, engine)) == [True]


@pytest.mark.req("S0-002")
def test_a_composite_key_in_its_own_order(tmp_path: Path, engine: MergeEngine | None) -> None:
    schema = pa.schema(
        [
            pa.field("a", pa.int32(), nullable=False, metadata={**PRIMARY, POSITION: "2"}),
            pa.field("b", pa.string(), nullable=False, metadata={**PRIMARY, POSITION: "1"}),
            pa.field("v", pa.int64()),
        ]
    )
    base = [{"a": number % 5, "b": str(number), "v": 0} for number in range(40)]
    puts = [{"a": number % 5, "b": str(number), "v": 1} for number in range(20, 60)]
    merged(tmp_path, schema, base, [(puts, [{"a": 1, "b": "1"}, {"a": 2, "b": "1"}])], engine)
    assert open_table(tmp_path / "t.lance").primary_key == ("b", "a")


DAYS = [0, 5, 2932896, 2932897, 2**31 - 1, -(2**31), -800_000]


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        (pa.date32(), "BTREE"),
        (pa.date64(), "BTREE"),
        (pa.timestamp("s"), "BITMAP"),
        (pa.timestamp("ns", "Asia/Tokyo"), "BTREE"),
        (pa.list_(pa.date32()), "LABEL_LIST"),
        (pa.list_(pa.timestamp("ns")), "LABEL_LIST"),
    ],
    ids=str,
)
def test_times_that_python_does_not_have(tmp_path: Path, kind: pa.DataType, index: str) -> None:
    """After the year 9999, before the year 1, of nanoseconds: their index is caught up, and asked."""
    uri, element = str(tmp_path / "t.lance"), getattr(kind, "value_type", kind)
    factor = 86_400_000 if element == pa.date64() else 86_400 if element.bit_width == 64 else 1
    numbers = pa.array([day * factor for day in DAYS], pa.int32() if element == pa.date32() else pa.int64())
    times = numbers.cast(element)
    if element != kind:
        times = pa.ListArray.from_arrays(pa.array(range(len(DAYS) + 1), pa.int32()), times)
    lance.write_dataset(pa.table({"t": times.slice(0, 4)}), uri).create_scalar_index("t", index)
    lance.write_dataset(pa.table({"t": times}), uri, mode="append")
    assert run_job(uri, "catchup").decision == "caught_up"
    report = run_job(uri, "verify", answers=True)
    assert (report.exit_code, [one.queries > 1 for one in report.answers]) == (0, [True])


NESTED = pa.struct([("x", pa.struct([("y", pa.list_(pa.string()))]))])
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "half": (pa.float16(), [np.float16(1.5), None]),
    "nan": (pa.float64(), [float("nan"), -0.0, float("inf"), None]),
    "decimal": (pa.decimal128(20, 3), [decimal.Decimal("1.234"), None]),
    "timestamp": (pa.timestamp("us", "UTC"), [datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), None]),
    "time": (pa.time64("us"), [datetime.time(1, 2), None]),
    "duration": (pa.duration("ms"), [datetime.timedelta(seconds=1), None]),
    "vector": (pa.list_(pa.float32(), 4), [[1, 2, 3, 4], None]),
    "vector with holes": (pa.list_(pa.float32(), 2), [[1, None], None]),
    "list": (pa.list_(pa.string()), [["a", None], [], None]),
    "large list": (pa.large_list(pa.int32()), [[1], [], None]),
    "struct": (pa.struct([("a", pa.int32()), ("b", pa.string())]), [{"a": 1, "b": None}, {"a": None, "b": "x"}, None]),
    "list of struct": (pa.list_(pa.struct([("a", pa.list_(pa.int8()))])), [[{"a": [1]}], [None], [], None]),
    "nested": (NESTED, [{"x": {"y": ["q", None]}}, {"x": None}, None]),
    "binary": (pa.large_binary(), [b"x", b"", None]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None]),
    "map": (pa.map_(pa.string(), pa.int32()), [[("a", 1)], [], None]),
    "null": (pa.null(), [None]),
    "fixed binary": (pa.binary(4), [b"abcd", None]),
}


@pytest.mark.sampled(7)
@pytest.mark.req("S3-056")
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_value(tmp_path: Path, name: str, stable: bool) -> None:
    kind, values = VALUES[name]
    schema = pa.schema([key(pa.int64()), pa.field("x", kind)])
    rows = [{"id": number, "x": values[number % len(values)]} for number in range(60)]
    moved = [{"id": number, "x": values[(number + 1) % len(values)]} for number in range(60)]
    steps: list[Step] = [(moved[0:40:2], [{"id": 5}]), (rows[0:60:3], [{"id": 6}, {"id": 999}])]
    merged(tmp_path, schema, rows[:30], steps, None, enable_stable_row_ids=stable)


@pytest.mark.req("S3-056")
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_every_kind_of_value_in_one_table(tmp_path: Path, stable: bool, engine: MergeEngine | None) -> None:
    schema = pa.schema([key(pa.int64()), *(pa.field(name, kind) for name, (kind, _) in VALUES.items())])

    def row(number: int, shift: int) -> Row:
        return {"id": number} | {name: values[(number + shift) % len(values)] for name, (_, values) in VALUES.items()}

    steps: list[Step] = [
        ([row(number, 1) for number in range(0, 40, 2)], [{"id": 5}]),
        ([row(number, 2) for number in range(0, 60, 3)], [{"id": 6}, {"id": 999}]),
    ]
    base = [row(number, 0) for number in range(30)]
    merged(tmp_path, schema, base, steps, engine, enable_stable_row_ids=stable)


@pytest.mark.parametrize("release", ["legacy", "2.0", "2.1", "2.2"])
def test_every_storage_version(tmp_path: Path, release: str, engine: MergeEngine | None) -> None:
    schema = pa.schema([key(pa.int64()), pa.field("v", pa.int64()), pa.field("s", pa.string())])
    base = [{"id": number, "v": 0, "s": "a"} for number in range(100)]
    steps: list[Step] = [([{"id": number, "v": 1, "s": None} for number in range(0, 120, 3)], [{"id": 5}])]
    merged(tmp_path, schema, base, steps, engine, data_storage_version=release)
    assert lance.dataset(tmp_path / "t.lance").data_storage_version == {"legacy": "0.1"}.get(release, release)


@pytest.mark.parametrize("storage", ["stable", "legacy"])
def test_an_index_that_does_not_cover_the_table_finds_every_row(
    tmp_path: Path, storage: str, engine: MergeEngine | None
) -> None:
    """pylance panics where it selects addresses of the oldest data files by an index: there keys are scanned."""
    schema = pa.schema([key(pa.int64()), pa.field("v", pa.int64())])
    uri = str(tmp_path / "t.lance")
    base = pa.table({"id": range(MANY), "v": [0] * MANY}, schema=schema)
    lance.write_dataset(base, uri, data_storage_version=storage)  # type: ignore[arg-type]  # one of its words
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    lance.write_dataset(pa.table({"id": range(MANY, MANY + 100), "v": [0] * 100}, schema=schema), uri, mode="append")
    lance.dataset(uri).delete("id % 7 = 0")
    lance.dataset(uri).initialize_mem_wal()
    touched = [3, 7, MANY + 5, MANY + 6, MANY + 200]
    with lance.dataset(uri).mem_wal_writer(str(uuid.uuid4())) as writer:
        writer.put(pa.table({"id": touched, "v": [1] * len(touched)}, schema=schema))
    report = merge.apply(open_table(uri), merge.MergeOptions(), engine=engine)
    assert used_index(report) == [storage == "stable"]
    rows = lance.dataset(uri).to_table().to_pylist()
    expected = {number: 0 for number in range(MANY + 100) if number % 7} | dict.fromkeys(touched, 1)
    assert len(rows) == len(expected)
    assert {row["id"]: row["v"] for row in rows} == expected


@pytest.mark.parametrize("release", ["13.0.0", lance.__version__])
def test_an_index_that_claims_rows_which_it_does_not_have_is_not_asked(
    tmp_path: Path, release: str, engine: MergeEngine | None
) -> None:
    """As a client of release 13 leaves a B-tree of ours: 20 updates made 20 keys stand twice.

    Whether its version is still there that shows it, or a sample of rows does.
    """
    schema = pa.schema([key(pa.int64()), pa.field("v", pa.int64())])
    uri = str(tmp_path / "t.lance")
    base = pa.table({"id": range(MANY), "v": [0] * MANY}, schema=schema)
    lance.write_dataset(base, uri, max_rows_per_file=MANY // 4, enable_stable_row_ids=True)
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    lance.dataset(uri).initialize_mem_wal()
    lance.dataset(uri).delete("id = 3")
    compact_and_leave(uri, "id_idx", release=release)
    with lance.dataset(uri).mem_wal_writer(str(uuid.uuid4())) as writer:
        writer.put(pa.table({"id": range(100, 120), "v": [1] * 20}, schema=schema))
        writer.delete(pa.table({"id": [5, 6]}, schema=pa.schema([schema.field("id")])))
    assert lance.dataset(uri).count_rows("id < 900") == 0, "what the index says"
    report = merge.apply(open_table(uri), merge.MergeOptions(), engine=engine)
    assert used_index(report) == [False]
    rows = lance.dataset(uri).to_table().to_pylist()
    expected = {number: 0 for number in range(MANY) if number not in (3, 5, 6)} | dict.fromkeys(range(100, 120), 1)
    assert len(rows) == len(expected)
    assert {row["id"]: row["v"] for row in rows} == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("between", ["delete", "update"])
def test_an_index_that_a_compaction_left_behind_is_not_asked(
    tmp_path: Path, between: str, engine: MergeEngine | None
) -> None:
    """pylance loses rows of it (docs/upstream.md): upserted keys stood twice, and deleted ones stayed."""
    schema = pa.schema([key(pa.int64()), pa.field("v", pa.int64())])
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(MANY), "v": [0] * MANY}, schema=schema), uri, max_rows_per_file=MANY // 2)
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    lance.dataset(uri).create_scalar_index("id", "BITMAP", name="another")
    lance.dataset(uri).optimize.compact_files(defer_index_remap=True)
    lance.dataset(uri).create_scalar_index("id", "BTREE", name="younger")
    if between == "delete":
        lance.dataset(uri).delete("id % 7 = 0")
    else:
        lance.dataset(uri).update({"v": "v"}, where="id % 3 = 1")
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).initialize_mem_wal()
    expected = dict.fromkeys(lance.dataset(uri).to_table()["id"].to_pylist(), 0)
    with lance.dataset(uri).mem_wal_writer(str(uuid.uuid4())) as writer:
        writer.put(pa.table({"id": [1, 2, 3], "v": [1] * 3}, schema=schema))
        writer.delete(pa.table({"id": [5, 6]}, schema=pa.schema([schema.field("id")])))
    expected |= dict.fromkeys([1, 2, 3], 1)
    del expected[5], expected[6]
    read = Reader(open_table(uri), "strong")
    assert {row["id"]: row["v"] for row in read.get([*range(100)]).to_pylist()} == {
        number: value for number, value in expected.items() if number < 100
    }
    assert read.scan(filter="id < 100").to_table().num_rows == sum(number < 100 for number in expected)
    report = merge.apply(open_table(uri), merge.MergeOptions(), engine=engine)
    assert used_index(report) == [False]
    rows = lance.dataset(uri).to_table().to_pylist()
    assert len(rows) == len(expected)
    assert {row["id"]: row["v"] for row in rows} == expected
    for name in ("id_idx", "another"):
        lance.dataset(uri).drop_index(name)
    assert is_indexed(open_table(uri), "id"), "one that was built since is used"
