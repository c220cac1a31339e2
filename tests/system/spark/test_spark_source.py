"""A MemWAL table as a DataFrame, and a DataFrame into a base table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.errors import DuplicateKeysError, InvalidUsageError
from memwal_ops.formats.lance.commit.commit import CommitLostError
from memwal_ops.formats.lance.engines.merge import passes
from memwal_ops.formats.lance.engines.spark.tasks import spark_schema
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.spark import bulk_load, register
from tests.support.tables import damage
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec, rows_by_key
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.unreferenced import unreferenced
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.support.tables.lsm_table import LsmTable
    from tests.support.tables.model import Rows

pytestmark = pytest.mark.timeout(1800)  # the first test starts Spark, on whatever machine this runs
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def with_source(spark: SparkSession, *, push: bool = False) -> SparkSession:
    """A session of its own with the source."""
    session = spark.newSession()
    session.conf.set(PUSHDOWN, str(push).lower())
    register(session)
    return session


@pytest.fixture(params=[False, True], ids=["plain", "pushing"])
def reading(request: pytest.FixtureRequest, spark: SparkSession) -> SparkSession:
    """The source, with and without Spark's offer to push filters down."""
    return with_source(spark, push=request.param)


def collected(frame: DataFrame, keys: list[str]) -> Rows:
    return rows_by_key(frame.toArrow(), keys)


def table(tmp_path: Path, kind: type[LsmTable], **options: Any) -> LsmTable:
    made = kind(3, regions=2, base_rows=200, **options).create(str(tmp_path / "t.lance")).step(6)
    made.flush()
    merge.apply(open_table(made.uri), merge.MergeOptions())
    made.step(8)
    made.close()
    return made


@pytest.mark.parametrize(("kind", "columns"), [(Workload, "vector"), (RegionLayout, "nested")])
def test_it_reads_what_a_reader_by_the_specification_reads(
    tmp_path: Path, reading: SparkSession, kind: type[LsmTable], columns: Any
) -> None:
    made = table(tmp_path, kind, columns=columns)
    frame = reading.read.format("memwal").load(made.uri)
    found = collected(frame, made.model.keys)
    assert_same(found, read_spec(made.uri), seed=made.seed)
    assert_same(found, made.model.expected(), seed=made.seed)


def test_sessions_of_one_application(tmp_path: Path, spark: SparkSession) -> None:
    """A session registers the source also after the active one did, in any order, and again."""
    made = table(tmp_path, Workload)
    register(spark)
    later = spark.newSession()
    for session in (later, spark, spark.newSession(), later):
        register(session)
        assert session.read.format("memwal").load(made.uri).count() == len(made.model.expected())
        active = type(spark).getActiveSession()
        assert active is not None
        assert active._jsparkSession.equals(spark._jsparkSession)


def test_filters_and_columns(tmp_path: Path, reading: SparkSession) -> None:
    made = table(tmp_path, Workload)
    frame = reading.read.format("memwal").option("columns", "txt,id").load(made.uri)
    assert frame.columns == ["txt", "id"]
    expected = {key: {"id": row["id"], "txt": row["txt"]} for key, row in made.model.expected().items()}
    for condition, keep in [
        ("id > 50", lambda row: row["id"] > 50),
        ("id in (1, 2, 4, 95, 2097151)", lambda row: row["id"] in {1, 2, 4, 95, 2097151}),
        ("txt is null", lambda row: row["txt"] is None),
        ("txt >= '1' and id < 1000", lambda row: row["txt"] is not None and row["txt"] >= "1" and row["id"] < 1000),
        ("txt = 'it''s'", lambda row: row["txt"] == "it's"),
    ]:
        wanted = {key: row for key, row in expected.items() if keep(row)}
        assert_same(collected(frame.filter(condition), ["id"]), wanted, seed=made.seed)


def test_what_a_read_refuses(tmp_path: Path, spark: SparkSession) -> None:
    """Each with one sentence for people, and nothing that only a program can read."""
    uri = table(tmp_path, Workload).uri
    session = with_source(spark)
    for option, value, says in [
        ("filters", "id > 50", r"has no option filters\. Options are"),
        ("aws_region", "eu-west-1", r"has no option aws_region\. .* storage options go to register"),
        ("columns", "id,TXT", r"has no column TXT\. Its columns are id, val, txt;"),
        ("columns", "id,id", r"is named twice in id, id\. Name each"),
    ]:
        with pytest.raises(Exception, match=f"invalid_usage: .*{says}") as refused:
            session.read.format("memwal").option(option, value).load(uri)
        assert "fault<" not in str(refused.value)
    with pytest.raises(Exception, match="has no path of a table"):
        session.read.format("memwal").load([uri, uri])
    session.sql(f"CREATE TEMPORARY VIEW few USING memwal OPTIONS (path '{uri}', Filter 'id > 50', Columns 'id')")
    assert session.table("few").columns == ["id"]


def test_unsupported_features_are_refused(tmp_path: Path, spark: SparkSession) -> None:
    """Spark asks for the columns of a table that it is to create only where it is not told them."""
    made = table(tmp_path, Workload)
    session = with_source(spark)
    says = r"unsupported_feature: CREATE TABLE \.\.\. USING memwal is not supported\. CREATE TEMPORARY VIEW"
    for place in (f"OPTIONS (path '{made.uri}')", f"LOCATION '{made.uri}'", "LOCATION 's3://nowhere/t.lance'"):
        with pytest.raises(Exception, match=says):
            session.sql(f"CREATE TABLE named USING memwal {place}")
    session.sql(f"CREATE TABLE named (id bigint) USING memwal OPTIONS (path '{made.uri}')")
    try:
        with pytest.raises(Exception, match=r"CREATE TABLE \.\.\. USING memwal\) are not supported"):
            session.sql("SELECT * FROM named").collect()
        with pytest.raises(Exception, match=r"unsupported_feature: Writing .* bulk_load\(df, uri\)"):
            session.sql("INSERT INTO named VALUES (1)")
    finally:
        session.sql("DROP TABLE named")


def test_one_frame_in_several_queries(tmp_path: Path, reading: SparkSession) -> None:
    made = table(tmp_path, Workload)
    expected = made.model.expected()
    frame = reading.read.format("memwal").load(made.uri)
    nulls = sum(row["txt"] is None for row in expected.values())
    assert 0 < nulls < len(expected)
    assert frame.filter("txt is null").count() == nulls
    assert_same(collected(frame, ["id"]), expected, seed=made.seed)
    assert frame.filter("id > 50 or txt is null").count() == sum(
        row["id"] > 50 or row["txt"] is None for row in expected.values()
    )
    both = frame.alias("all").join(frame.filter("txt is null").alias("few"), "id", "left").select("few.txt", "id")
    assert both.count() == len(expected)
    frame.createOrReplaceTempView("rows_of_it")
    query = "select (select count(*) from rows_of_it where txt is null), (select count(*) from rows_of_it)"
    assert [*reading.sql(query).collect()[0]] == [nulls, len(expected)]


def test_a_damaged_generation_is_no_answer(tmp_path: Path, spark: SparkSession) -> None:
    made = table(tmp_path, Workload)
    backlog = merge.plan(open_table(made.uri), merge.MergeOptions()).backlog_after
    ref = backlog.pending[0]
    damage.remove_generation(made.uri, str(ref.region_id), ref.generation)
    with pytest.raises(Exception, match=f"generation {ref.generation} of region {ref.region_id}"):
        with_source(spark).read.format("memwal").load(made.uri).collect()


def test_types_without_a_word_in_spark() -> None:
    kinds = {
        "v": (pa.list_(pa.float32(), 4), pa.list_(pa.field("element", pa.float32()))),
        "u": (pa.uint64(), pa.decimal128(20, 0)),
        "h": (pa.float16(), pa.float32()),
        "d": (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        "b": (pa.binary(4), pa.binary()),
        "s": (pa.struct([("x", pa.uint8())]), pa.struct([("x", pa.int16())])),
    }
    given = pa.schema([pa.field(name, pair[0]) for name, pair in kinds.items()])
    assert spark_schema(given) == pa.schema([pa.field(name, pair[1]) for name, pair in kinds.items()])


@pytest.mark.parametrize("columns", ["vector", "nested"])
def test_there_and_back_again(tmp_path: Path, spark: SparkSession, columns: Any) -> None:
    reading = with_source(spark)
    made = table(tmp_path, Workload, columns=columns)
    target = Workload(4, regions=1, base_rows=1, columns=columns).create(str(tmp_path / "target.lance"))
    lance.dataset(target.uri).delete("true")
    frame = reading.read.format("memwal").load(made.uri)
    version = bulk_load(frame.repartition(3), target.uri)
    assert lance.dataset(target.uri).version == version
    assert lance.dataset(target.uri).schema == lance.dataset(made.uri).schema
    assert_same(read_base(target.uri), made.model.expected(), seed=made.seed)
    with pytest.raises(DuplicateKeysError, match="already"):
        bulk_load(frame, target.uri)
    assert lance.dataset(target.uri).version == version
    assert bulk_load(frame.limit(0), target.uri) == version
    target.put([7])  # the region's writer goes on
    target.close()
    assert merge.apply(open_table(target.uri), merge.MergeOptions()).decision == "merged"


def test_what_bulk_load_refuses(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Workload(4, regions=1, base_rows=3).create(str(tmp_path / "t.lance"))
    made.put([500])
    made.close()
    version = lance.dataset(made.uri).version
    new = spark.createDataFrame([(11, "a"), (12, None)], "id bigint, txt string")
    with pytest.raises(InvalidUsageError, match=r"the table has no 'nobody'\.$"):
        bulk_load(new.withColumnRenamed("txt", "nobody"), made.uri)
    with pytest.raises(InvalidUsageError, match=r"the table needs 'id'\.$"):
        bulk_load(new.drop("id"), made.uri)
    with pytest.raises(DuplicateKeysError, match="2 occur several times"):
        bulk_load(new.union(new), made.uri)
    flushed = spark.createDataFrame([(2**40 + 500,)], "id bigint")
    with pytest.raises(DuplicateKeysError, match="1 is in the table or its generations already"):
        bulk_load(flushed, made.uri)

    def late(*_: Any, **__: Any) -> None:
        raise CommitLostError("another writer was first")

    with monkeypatch.context() as patch:
        patch.setattr(passes, "commit_strict", late)
        with pytest.raises(CommitLostError):
            bulk_load(new, made.uri)
    assert lance.dataset(made.uri).version == version
    assert unreferenced(made.uri) == set()
    bulk_load(new, made.uri)
    assert {key: row["txt"] for key, row in read_base(made.uri).items() if key[0] in {11, 12}} == {
        (11,): "a",
        (12,): None,
    }
