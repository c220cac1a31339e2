"""Loads that must change no value: what is refused before anything is written, what comes back as it was."""

from __future__ import annotations

import datetime
import decimal
import random
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
import structlog

from memwal_ops.core.spark.session import quiet
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.spark import load
from memwal_ops.formats.lance.engines.spark.load import misfits
from memwal_ops.spark import bulk_load, register
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.unreferenced import unreferenced

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1800)  # the first test starts Spark, on whatever machine this runs
VECTOR = pa.list_(pa.float32(), 2)
STRUCT = pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.string(), nullable=False)])
TYPES = [
    ("bigint", pa.int32(), True),
    ("int", pa.uint64(), True),
    ("decimal(20,0)", pa.uint64(), True),
    ("decimal(12,4)", pa.decimal128(10, 2), True),
    ("bigint", pa.float32(), True),
    ("double", pa.float16(), True),
    ("void", pa.int32(), True),
    ("string", pa.large_string(), True),
    ("string", pa.dictionary(pa.int8(), pa.string()), True),
    ("binary", pa.binary(3), True),
    ("date", pa.date64(), True),
    ("timestamp", pa.timestamp("ms", "Asia/Tokyo"), True),
    ("timestamp_ntz", pa.timestamp("ns"), True),
    ("interval day to second", pa.duration("ns"), True),
    ("array<double>", VECTOR, True),
    ("struct<y:string,x:int>", STRUCT, True),
    ("struct<y:string>", STRUCT, True),
    ("map<string,int>", pa.map_(pa.string(), pa.int64()), True),
    ("string", pa.int64(), False),
    ("bigint", pa.string(), False),
    ("double", pa.int64(), False),
    ("decimal(10,2)", pa.float64(), False),
    ("int", pa.bool_(), False),
    ("bigint", pa.timestamp("us"), False),
    ("timestamp", pa.int64(), False),
    ("timestamp", pa.timestamp("us"), False),
    ("timestamp_ntz", pa.timestamp("us", "UTC"), False),
    ("date", pa.timestamp("us"), False),
    ("timestamp", pa.date32(), False),
    ("string", pa.binary(), False),
    ("binary", pa.string(), False),
    ("interval year to month", pa.int32(), False),
    ("array<string>", VECTOR, False),
    ("array<timestamp>", pa.list_(pa.timestamp("us")), False),
    ("struct<x:int,y:string,z:int>", STRUCT, False),
    ("struct<x:int>", STRUCT, False),
    ("struct<x:int,Y:string>", STRUCT, False),
    ("struct<x:string,y:string>", STRUCT, False),
    ("map<int,int>", pa.map_(pa.string(), pa.int64()), False),
]


def table(path: Path, *columns: pa.Field, rows: list[dict[str, Any]] | None = None) -> str:
    key = pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY)
    lance.write_dataset(pa.Table.from_pylist(rows or [], pa.schema([key, *columns])), str(path)).initialize_mem_wal()
    return str(path)


def test_which_types_fit(spark: SparkSession) -> None:
    for given, wanted, fits in TYPES:
        schema = spark.createDataFrame([], f"c {given}").schema
        found = misfits(schema, pa.schema([pa.field("c", wanted)]))
        assert (found == []) is fits, (given, wanted)
        assert fits or (len(found) == 1 and found[0].startswith("c"))


def test_what_is_refused_leaves_nothing_or_is_named(tmp_path: Path, spark: SparkSession) -> None:
    uri = table(tmp_path / "t.lance", pa.field("txt", pa.string()), pa.field("vec", VECTOR))
    version = lance.dataset(uri).version
    nulls = spark.createDataFrame([(1, "a"), (None, "b")], "id bigint, txt string")
    for frame, says in [
        (nulls, "'id' has NULL"),
        (nulls.selectExpr("cast(id as string) id"), "id is string and would have to be bigint"),
        (nulls.selectExpr("id", "timestamp_seconds(id) txt"), "txt is timestamp and would have to be string"),
    ]:
        with pytest.raises(InvalidUsageError, match=says):
            bulk_load(frame, uri)
        assert unreferenced(uri) == set()
    # One task after the other, the last of which has bytes that are no text, or a vector that is too long.
    rows = spark.range(0, 4, 1, 4)
    for bad, says in [
        ("cast(if(id = 3, unhex('ff41'), 'a') as string) txt", "UTF8"),
        ("array_repeat(0.5, if(id = 3, 3, 2)) vec", "expected size"),
    ]:
        expression = bad.replace("0.5", "cast(0.5 as double)")
        before = unreferenced(uri)
        with structlog.testing.capture_logs() as logs, pytest.raises(InvalidUsageError, match=says):
            bulk_load(rows.selectExpr("id", expression), uri)
        left = unreferenced(uri)
        assert left > before, "the premise: other tasks had written"
        assert {name for one in logs if one["event"] == "files_left" for name in one["files"]} >= left - before
    assert lance.dataset(uri).version == version
    bulk_load(rows.selectExpr("id", "array_repeat(cast(id as double), 2) vec"), uri)
    assert lance.dataset(uri).to_table().sort_by("id").column("vec").to_pylist() == [[at, at] for at in range(4)]


def test_nan_and_infinity_are_accepted_except_in_indexed_vectors(tmp_path: Path, spark: SparkSession) -> None:
    inner = pa.struct([pa.field("vec", VECTOR), pa.field("x", pa.float64())])
    fields = [pa.field("vec", VECTOR), pa.field("other", VECTOR), pa.field("s", inner), pa.field("x", pa.float64())]
    rows = [{"id": -at, "vec": [at, 1], "other": None, "s": {"vec": [at, 2]}, "x": 0.5} for at in range(1, 300)]
    uri = table(tmp_path / "t.lance", *fields, rows=rows)
    for column in ("vec", "s.vec"):
        lance.dataset(uri).create_index(column, "IVF_FLAT", num_partitions=2)
    lance.dataset(uri).create_scalar_index("x", "BTREE")
    version = lance.dataset(uri).version
    for number in ("NaN", "Infinity", "-Infinity"):
        odd = f"array(double('{number}'), double(1))"
        for column, expression in (("vec", odd), ("s.vec", f"named_struct('vec', {odd}, 'x', double(1))")):
            frame = spark.range(0, 2).selectExpr("id", f"if(id = 1, {expression}, null) {column.split('.')[0]}")
            with pytest.raises(InvalidUsageError, match=f"'{column}' has NaN or infinity in a vector"):
                bulk_load(frame, uri)
        assert lance.dataset(uri).version == version
    every = "named_struct('vec', null, 'x', double('NaN')) s"
    bulk_load(
        spark.range(1).selectExpr(
            "id", f"{odd} other", every, "double('Infinity') x", "array(double(1), double(2)) vec"
        ),
        uri,
    )
    (found,) = lance.dataset(uri).to_table(filter="id = 0").to_pylist()
    assert found.pop("s")["x"] != 0
    assert found == {"id": 0, "vec": [1, 2], "other": [float("-inf"), 1], "x": float("inf")}


def test_a_source_that_gives_other_keys_when_it_is_read_again(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many, but not those that were compared with the table: the rows that were kept went with an executor."""
    uri = table(tmp_path / "t.lance")
    version = lance.dataset(uri).version

    def any_keys(batches: Any) -> Any:
        for batch in batches:
            yield pa.RecordBatch.from_pydict(
                {"id": [random.SystemRandom().getrandbits(60) for _ in range(batch.num_rows)]}
            )

    with quiet():
        keys = spark.range(8).mapInArrow(any_keys, "id bigint")
    write = load._write

    def late(rows: Any, *others: Any) -> Any:
        rows.unpersist(blocking=True)
        return write(rows, *others)

    monkeypatch.setattr(load, "_write", late)
    with pytest.raises(InvalidUsageError, match="other keys when its rows were written"):
        bulk_load(keys, uri)
    assert lance.dataset(uri).version == version
    assert unreferenced(uri) == set()
    bulk_load(spark.range(8), uri)
    assert lance.dataset(uri).count_rows() == 8


MOMENT = datetime.datetime(1969, 12, 31, 23, 59, 59, 999999)
ODD = {
    "amount": (pa.decimal128(38, 4), decimal.Decimal("-" + "8" * 34 + ".1234")),
    "local": (pa.timestamp("us"), MOMENT),
    "at": (pa.timestamp("us", "Asia/Tokyo"), MOMENT.replace(tzinfo=datetime.UTC)),
    "day": (pa.date32(), datetime.date(1582, 10, 4)),
    "took": (pa.duration("us"), datetime.timedelta(days=-3, microseconds=7)),
    "large": (pa.uint64(), 2**64 - 1),
    "half": (pa.float16(), 0.5),
    "Half": (pa.float64(), float("-inf")),
    "tag": (pa.binary(3), b"\x00a\xff"),
    "txt": (pa.large_string(), "a\x00\U0001f600\u202e\ufffe"),
    "c0": (VECTOR, [1.5, None]),
    "of all, sorts": (pa.list_(pa.struct([("k", pa.string())])), [{"k": "a"}, {"k": None}]),
    "s": (
        pa.struct([("d", pa.list_(pa.decimal128(10, 2))), ("t", pa.timestamp("us"))]),
        {"d": [decimal.Decimal("1.25")], "t": MOMENT},
    ),
}


def test_odd_values_there_and_back_in_an_odd_session(tmp_path: Path, spark: SparkSession) -> None:
    odd = spark.newSession()
    for key, value in {
        "spark.sql.ansi.enabled": "false",
        "spark.sql.session.timeZone": "America/St_Johns",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
        "spark.sql.execution.arrow.useLargeVarTypes": "true",
    }.items():
        odd.conf.set(key, value)
    register(odd)
    columns = [pa.field(name, kind) for name, (kind, _) in ODD.items()]
    values = {name: value for name, (_, value) in ODD.items()}
    rows = [{"id": 1, **values}, {"id": 2, **dict.fromkeys(values)}, {"id": -(2**63), **values}]
    uri = table(tmp_path / "t.lance", *columns, rows=rows)
    copy = table(tmp_path / "copy.lance", *columns)
    bulk_load(odd.read.format("memwal").load(uri), copy)
    given, found = (lance.dataset(one).to_table().sort_by("id") for one in (uri, copy))
    assert found.schema == given.schema
    assert found.to_pylist() == given.to_pylist()


def test_filters_of_two_reads_stay_apart(tmp_path: Path, spark: SparkSession) -> None:
    """Also where Spark keeps the rows of one, or sees both in one plan."""
    session = spark.newSession()
    register(session)
    rows = [{"id": at, "v": at % 3 or None} for at in range(30)]
    uri = table(tmp_path / "t.lance", pa.field("v", pa.int32()), rows=rows)
    reader = session.read.format("memwal")
    everything = reader.load(uri)
    ones, nulls = (session.read.format("memwal").option("filter", where).load(uri) for where in ("v = 1", "v IS NULL"))
    ones.cache()
    try:
        assert (ones.count(), nulls.count(), everything.count()) == (10, 10, 30)
        united = ones.union(nulls).union(everything).groupBy("v").count()
        assert {row["v"]: row["count"] for row in united.collect()} == {1: 20, 2: 10, None: 20}
        assert ones.join(nulls, "id").count() == 0
        assert everything.join(nulls, "id").count() == 10
        assert nulls.filter("v = 1 or id > 20").count() == 3
    finally:
        ones.unpersist()
    with pytest.raises(Exception, match=r"invalid_usage: .*No field named nope\. Valid fields are id, v\. Give "):
        session.read.format("memwal").option("filter", "nope = 1").load(uri)
