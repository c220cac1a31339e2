"""Scans of ``read.format("memwal")`` as the planning process and the tasks make them; no Spark is started."""

from __future__ import annotations

import pickle
import random
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.core.spark.stages import TaskFaultError, raised_again
from memwal_ops.errors import InvalidUsageError, InvariantViolatedError
from memwal_ops.formats.lance.engines.spark.source import condition
from memwal_ops.formats.lance.generations.generation import Generation
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.support.gc_options import IMMEDIATE
from tests.support.tables.damage import copy_table
from tests.support.tables.model import assert_same
from tests.support.tables.reading import rows_by_key
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable
    from tests.support.tables.model import Rows

source = pytest.importorskip("memwal_ops.formats.lance.engines.spark.source", reason="PySpark is not installed")


def read(uri: str, where: str | None = None, columns: list[str] | None = None) -> list[pa.RecordBatch]:
    """What a scan gives; reader and parts go through pickle, as Spark sends them to other processes."""
    names = columns or open_table(uri).dataset.schema.names
    reader = source.MemwalReader(uri, {}, names, where)
    with raised_again("plan"):
        parts = pickle.loads(pickle.dumps(reader.partitions()))
        return [batch for part in parts for batch in pickle.loads(pickle.dumps(reader)).read(part)]


def rows(uri: str, where: str | None = None) -> Rows:
    found = read(uri, where)
    table = open_table(uri)
    schema = source.spark_schema(table.dataset.schema)
    return rows_by_key(pa.Table.from_batches(found, schema), list(table.primary_key))


def backlog(path: Path, kind: type[LsmTable] = Workload, seed: int = 3, **options: Any) -> LsmTable:
    made = kind(seed, regions=2, base_rows=150, **options).create(str(path / "t.lance")).step(6)
    made.flush()
    merge.apply(open_table(made.uri), merge.MergeOptions())
    made.step(10)
    made.close()
    assert merge.plan(open_table(made.uri), merge.MergeOptions()).backlog_after.pending
    return made


# -- while others merge and collect


def merge_and_collect(uri: str) -> None:
    merge.apply(open_table(uri), merge.MergeOptions())
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    for _ in range(2):  # off the list first, then off the disk
        gc.apply(open_table(uri), IMMEDIATE)
    assert not list(Path(uri).glob("_mem_wal/*/*_gen_*/_versions/*"))


@pytest.mark.parametrize("before", ["read_backlog", "open_generations", "collapse"])
def test_generations_that_are_merged_and_collected_while_a_read_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The version that was opened lacks them, and they are in no list any more: another version is taken."""
    made = backlog(tmp_path, with_btree=False)  # no generation waits for an index to cover it
    real = getattr(source, before)
    calls: list[int] = []

    def late(*arguments: Any) -> Any:
        if not calls:
            merge_and_collect(made.uri)
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(source, before, late)
    assert_same(rows(made.uri), made.expected(), seed=made.seed)
    assert calls


def test_a_read_that_is_always_overtaken_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backlog(tmp_path)
    real = source.read_backlog

    def late(table: Any) -> Any:
        made.put([2 * made.rng.randrange(50)])
        made.flush()
        merge.apply(open_table(made.uri), merge.MergeOptions())
        return real(table)

    monkeypatch.setattr(source, "read_backlog", late)
    monkeypatch.setattr(source, "_PLANS", 2)
    with pytest.raises(Exception, match="merged repeatedly"):
        read(made.uri)


# -- filters


def atoms(rng: random.Random, columns: str) -> str:
    of_key = [
        f"id > {rng.randrange(200)}",
        f"id IN ({rng.randrange(90)}, {2**40 + 2 * rng.randrange(90)}, 7)",
        "id < 0",
    ]
    if columns == "nested":
        return rng.choice([*of_key, "s.x IS NULL", f"s.x > {rng.randrange(900)}", "s IS NULL", "l IS NOT NULL"])
    payload = [
        "txt IS NULL",
        f"txt >= '{rng.randrange(9)}'",
        "txt LIKE '%é'",
        "length(txt) > 7",
        f"val < {rng.randrange(4096)}",
        "val IS NOT NULL",
        "val = val",
        "true",
        "CAST(NULL AS BOOLEAN)",
    ]
    return rng.choice([*of_key, *payload])


def random_condition(rng: random.Random, columns: str, depth: int = 2) -> str:
    if not depth or rng.random() < 0.2:
        return atoms(rng, columns)
    if rng.random() < 0.3:
        return f"NOT ({random_condition(rng, columns, depth - 1)})"
    word = rng.choice(["AND", "OR"])
    return f"({random_condition(rng, columns, depth - 1)}) {word} {random_condition(rng, columns, depth - 1)}"


@pytest.mark.parametrize(
    ("kind", "columns"), [(Workload, "plain"), (Workload, "nested"), (RegionLayout, "plain"), (RegionLayout, "nested")]
)
def test_a_filter_keeps_what_it_would_keep_of_the_merged_table(
    tmp_path: Path, kind: type[LsmTable], columns: Any
) -> None:
    rng = random.Random(11)
    made = backlog(tmp_path, kind, columns=columns)
    merged = copy_table(made.uri, str(tmp_path / "merged.lance"))
    merge.apply(open_table(merged), merge.MergeOptions())
    sizes = set()
    for _ in range(25):
        where = random_condition(rng, columns)
        wanted = lance.dataset(merged).to_table(filter=where)
        found = rows(made.uri, where)
        sizes.add(len(found))
        assert_same(found, rows_by_key(wanted, ["id"]), seed=made.seed)
    assert len(sizes) > 5, "the premise: the conditions differ"


def test_a_version_that_was_superseded_does_not_come_back(tmp_path: Path) -> None:
    """The newest row of a key decides, also where only an older one is what was asked for."""
    made = Workload(5, regions=1, base_rows=40).create(str(tmp_path / "t.lance"))
    made.put([2, 4, 6])
    made.flush()
    made.put([2])
    made.delete([4])
    made.flush()
    expected = made.expected()
    old = [
        row["txt"] for rows_ in ([*made.model.base.values()], [op.row for op in made.model.log]) for row in rows_ if row
    ]
    for text in {text for text in old if text is not None}:
        quoted = text.replace("'", "''")
        wanted = {key: row for key, row in expected.items() if row["txt"] == text}
        assert_same(rows(made.uri, f"txt = '{quoted}'"), wanted, seed=made.seed)
    stale = {text for text in old if text is not None} - {row["txt"] for row in expected.values()}
    assert stale, "the premise: some values stand in superseded rows only"


def test_a_filter_over_the_key_spares_generations(tmp_path: Path) -> None:
    made = backlog(tmp_path)

    def generations(where: str | None) -> int:
        parts = [part.value[1] for part in source.MemwalReader(made.uri, {}, ["txt"], where).partitions()]
        return sum(hasattr(part, "wins") for part in parts)

    assert generations(None) > 1
    assert generations("id = -77") == 0
    assert generations("id = -77 OR txt IS NULL") == generations(None)
    key = next(iter(made.expected()))[0]
    assert_same(rows(made.uri, f"id = {key}"), {(key,): made.expected()[(key,)]}, seed=made.seed)


def test_a_filter_may_ask_for_columns_that_are_not_read(tmp_path: Path) -> None:
    made = backlog(tmp_path)
    found = [text for batch in read(made.uri, "val > 100", ["txt"]) for text in batch.column("txt").to_pylist()]
    wanted = [row["txt"] for row in made.expected().values() if row["val"] is not None and row["val"] > 100]
    assert sorted(found, key=repr) == sorted(wanted, key=repr)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("nope > 1", "No field named nope"),
        ("id +", "Expected: an expression"),
        ("id + 1", "does not return a boolean"),
        ("'txt'", "does not return a boolean"),
        ("id > 2; DROP TABLE t", "arse"),
        ("id > 2 LIMIT 1", "arse"),
        ("id > 2 -- and so on", None),
        ("_rowid > 1", "_rowid"),
        ("`_ROWADDR` > 1 AND id > 1", "_rowaddr"),
        ("id IN (SELECT 1)", "not supported"),
        ("count(*) > 1", "AggregateFunction"),
        ("txt = '_rowid; '' nope'", None),
    ],
)
def test_what_is_no_filter(tmp_path: Path, where: str, says: str | None) -> None:
    made = Workload(5, regions=1, base_rows=4).create(str(tmp_path / "t.lance"))
    if says is None:
        read(made.uri, where)
        return
    with pytest.raises(InvalidUsageError, match=says) as raised:
        read(made.uri, where)
    assert ".rs:" not in str(raised.value)


@pytest.mark.parametrize("flushed", [False, True], ids=["in the base", "in a generation"])
def test_a_filter_that_fails_on_a_value(tmp_path: Path, flushed: bool) -> None:
    made = Workload(5, regions=1, base_rows=0 if flushed else 20).create(str(tmp_path / "t.lance"))
    if flushed:
        made.put(list(range(20)))
        made.flush()
    with pytest.raises(InvalidUsageError, match="Cast error"):
        read(made.uri, "CAST(txt AS INT) > 1")


def test_which_columns_a_filter_asks_for() -> None:
    fields = [
        pa.field("id", pa.int64()),
        pa.field("Val", pa.int64()),
        pa.field("i", pa.int64()),
        pa.field("a b", pa.int64()),
    ]
    base = lance.write_dataset(pa.schema(fields).empty_table(), "memory://")
    for where, columns in [
        ("id > 1", ("id",)),
        ("Val > 1 OR id IS NULL", ("id", "Val")),
        ("`a b` = i", ("i", "a b")),
        ("true", ()),
        ("'id' = 'Val'", ()),
    ]:
        assert condition(where, base).columns == columns
    twins = [pa.field("v", pa.int64()), pa.field("V", pa.int64())]
    base = lance.write_dataset(pa.schema(twins).empty_table(), "memory://")
    assert condition("V > 1", base).columns == ("v", "V")


def test_columns_that_differ_only_in_case(tmp_path: Path) -> None:
    key = pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY)
    schema = pa.schema([key, pa.field("v", pa.int64()), pa.field("V", pa.int64())])
    made = pa.Table.from_pylist([{"id": at, "v": at, "V": -at} for at in range(9)], schema)
    lance.write_dataset(made, str(tmp_path / "t.lance")).initialize_mem_wal()
    assert [row["id"] for row in rows(str(tmp_path / "t.lance"), "V < -5").values()] == [6, 7, 8]


def test_a_generation_that_gives_fewer_rows_than_were_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backlog(tmp_path)
    rows_of = Generation.read_rows
    monkeypatch.setattr(Generation, "read_rows", lambda self, **options: list(rows_of(self, **options))[:-1])
    with pytest.raises(InvariantViolatedError, match="rows when it was planned and"):
        read(made.uri)


# -- what is asked for


@pytest.mark.parametrize("of", ["type", "name", "nullability"])
def test_a_schema_of_the_users_own_is_the_tables_or_refused(tmp_path: Path, of: str) -> None:
    """Spark would take our bytes for whatever the schema says."""
    types = pytest.importorskip("pyspark.sql.types")
    made = Workload(5, regions=1, base_rows=4).create(str(tmp_path / "t.lance"))
    right = types.StructType(
        [types.StructField("txt", types.StringType()), types.StructField("id", types.LongType(), nullable=False)]
    )
    scans = source.data_source({})({"path": made.uri})
    assert isinstance(scans.reader(right), source.MemwalReader)
    wrong = {
        "type": types.StructField("id", types.IntegerType(), nullable=False),
        "name": types.StructField("ID", types.LongType(), nullable=False),
        "nullability": types.StructField("txt", types.StringType(), nullable=False),
    }[of]
    with pytest.raises(InvalidUsageError, match="schema of"), raised_again("plan"):
        scans.reader(types.StructType([wrong]))


@pytest.mark.parametrize("columns", ["id,id", "nope", "ID"])
def test_columns_that_cannot_be_asked_for(tmp_path: Path, columns: str) -> None:
    made = Workload(5, regions=1, base_rows=4).create(str(tmp_path / "t.lance"))
    with pytest.raises(TaskFaultError, match=r"^invalid_usage: .*(twice|no column)"):
        source.data_source({})({"path": made.uri, "columns": columns}).schema()
