"""A namespace becomes a Lance table with MemWAL: once, again, beside its writers, and after a kill at any commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import holds
from memwal_ops.core.options import OptionError
from memwal_ops.errors import (
    FragmentCorruptError,
    FragmentMissingError,
    InvalidUsageError,
    InvariantViolatedError,
    SegmentCorruptError,
)
from memwal_ops.formats import zeppelin
from memwal_ops.formats.lance.export import LanceSink
from memwal_ops.formats.zeppelin.jobs import migrate
from memwal_ops.formats.zeppelin.specs import ZeppelinMigrateOptions
from tests.support.zeppelin.namespace import NamespaceUnderTest

WRITES = ("create", "add_columns", "upsert", "delete", "set_record")


def table_of(made: NamespaceUnderTest) -> str:
    return str(Path(made.uri).parent / "table.lance")


def go(made: NamespaceUnderTest, *, apply: bool = True) -> dict[str, Any]:
    return run_job(made.uri, "migrate", target=table_of(made), apply=apply).to_json()


def found(uri: str) -> dict[str, tuple[tuple[float, ...], dict[str, Any]]]:
    """The rows of the table, as the model has them: an attribute that is null is not there."""
    rows = lance.dataset(uri).to_table().to_pylist()
    return {
        row.pop("id"): (tuple(row.pop("vector")), {name: one for name, one in row.items() if one is not None})
        for row in rows
    }


def same(made: NamespaceUnderTest) -> None:
    assert found(table_of(made)) == made.expected() == made.read()


def test_a_namespace_becomes_a_table(made: NamespaceUnderTest) -> None:
    planned = go(made, apply=False)
    assert (planned["decision"], planned["rows"], planned["upserts"]) == ("planned", 4, 4)
    assert not Path(table_of(made)).exists()
    done = go(made)
    assert (done["decision"], done["rows"], done["compared_rows"], done["rounds"]) == ("migrated", 4, 4, 1)
    assert done["columns"] == [{"attribute": "color", "column": "color", "type": "string", "json": False}]
    same(made)
    assert lance.dataset(table_of(made)).mem_wal_index_details() is not None
    assert open_table(table_of(made)).primary_key == ("id",)
    again = go(made)
    assert (again["decision"], again["upserts"], again["target_version"]) == (
        "nothing_to_migrate", 0, done["target_version"],
    )  # fmt: skip


def test_what_came_since_is_carried_over(made: NamespaceUnderTest) -> None:
    """From the log alone, and by comparison where segments were replaced."""
    go(made)
    made.put("a", "b", "g", deletes=("d", "never"))
    done = go(made)
    assert (done["upserts"], done["deletes"]) == (3, 1)
    same(made)
    made.put("g", deletes=("b",))
    run_job(made.uri, "merge")
    made.put("h", "b", deletes=("a",))
    planned = go(made, apply=False)
    done = go(made)
    assert {one["decision"] for one in (planned, done)} == {"planned", "migrated"}
    assert [(one["upserts"], one["deletes"]) for one in (planned, done)] == [(3, 1)] * 2
    same(made)
    run_job(made.uri, "merge")
    assert go(made)["decision"] == "nothing_to_migrate"
    same(made)


def test_rows_that_come_while_it_reads(made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another round brings them; a compaction and a collection in between make it read again."""
    real, rounds = migrate._Run.write, []

    def write(self: Any, table: Any, todo: Any) -> None:
        real(self, table, todo)
        if len(rounds) < 2:
            made.put(f"late-{len(rounds)}", "a", deletes=("b",) if rounds else ())
            if rounds:
                run_job(made.uri, "merge")
        rounds.append(1)

    monkeypatch.setattr(migrate._Run, "write", write)
    done = go(made)
    assert (done["decision"], done["rounds"]) == ("migrated", 3)
    same(made)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_killed_at_any_commit_and_repeated(
    made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    class Killed(BaseException):
        pass

    def dies(self: Any, *arguments: Any) -> None:
        if after:
            real(self, *arguments)
        raise Killed

    if name != "create":
        go(made)
    made.put("a", "new", deletes=("b",))
    zeppelin.open_writer(made.uri).append([{"id": "more", "values": [1, 2, 3, 4], "attributes": {"size": 3}}])
    made.model["more"] = ((1.0, 2.0, 3.0, 4.0), {"size": 3})
    real = getattr(LanceSink, name)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LanceSink, name, dies)
        go(made)
    run_job(made.uri, "merge")
    assert go(made)["decision"] in {"migrated", "nothing_to_migrate"}
    same(made)
    assert go(made)["decision"] == "nothing_to_migrate"


def test_values_of_several_types(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    attributes = [
        {"whole": 1, "number": 1, "long": 2**60, "huge": 2**70, "mixed": "a", "texts": [], "nested.name": "x", "ID": 1,
         "list": [1, 2.5], "yes": True},
        {"whole": -5, "number": 2.5, "long": 1, "huge": 1, "mixed": 3, "texts": ["é"], "vector": "taken", "yes": False},
    ]  # fmt: skip
    rows = [{"id": str(n), "values": [n, 0, 0, 1], "attributes": one} for n, one in enumerate(attributes)]
    zeppelin.open_writer(made.uri).append(rows)
    done = go(made)
    types = {one["attribute"]: (one["column"], one["type"], one["json"]) for one in done["columns"]}
    assert types == {
        "whole": ("whole", "int64", False), "number": ("number", "double", False), "long": ("long", "int64", False),
        "huge": ("huge", "string", True), "mixed": ("mixed", "string", True), "yes": ("yes", "bool", False),
        "texts": ("texts", "list<item: string>", False), "list": ("list", "list<item: double>", False),
        "nested.name": ("nested_name", "string", False), "vector": ("vector_1", "string", False),
        "ID": ("ID_1", "int64", False),
    }  # fmt: skip
    columns = {one["column"]: one for one in done["columns"]}
    for row in lance.dataset(table_of(made)).to_table().to_pylist():
        kept = {
            columns[name]["attribute"]: json.loads(one) if columns[name]["json"] else one
            for name, one in row.items()
            if name in columns and one is not None
        }
        assert kept == attributes[int(row["id"])]


def test_a_value_that_its_column_cannot_hold(made: NamespaceUnderTest) -> None:
    zeppelin.open_writer(made.uri).append([{"id": "n", "values": [1, 2, 3, 4], "attributes": {"size": 3}}])
    go(made)
    before = lance.dataset(table_of(made)).version
    zeppelin.open_writer(made.uri).append([{"id": "m", "values": [1, 2, 3, 4], "attributes": {"size": "large"}}])
    with pytest.raises(InvalidUsageError, match="'size' has new values that its column size of type int64 cannot"):
        go(made)
    assert lance.dataset(table_of(made)).version == before


def test_rows_of_others_are_not_undone(made: NamespaceUnderTest) -> None:
    go(made)
    lance.dataset(table_of(made)).create_scalar_index("id", "BTREE")
    for name in ("x", "z"):  # the second compaction has two fragments, and rewrites the index
        lance.dataset(table_of(made)).optimize.optimize_indices()
        lance.dataset(table_of(made)).optimize.compact_files()
        made.put(name)
        assert go(made)["upserts"] == 1
    theirs = lance.dataset(table_of(made)).to_table(columns=["id", "vector"]).slice(0, 1)
    rows = theirs.set_column(0, theirs.schema.field("id"), pa.array(["theirs"]))
    lance.write_dataset(rows, table_of(made), mode="append")
    made.put("y")
    with pytest.raises(InvalidUsageError, match=r"was changed in version \d+ \(Append\) since the migration finished"):
        go(made)
    assert "theirs" in found(table_of(made))


def test_writers_of_memwal_end_the_migration(made: NamespaceUnderTest) -> None:
    go(made)
    dataset = lance.dataset(table_of(made))
    writer = dataset.mem_wal_writer("5e0c1b0a-6a52-4b6e-9d3e-0f7d3a1b2c4d")
    row = {"id": ["w"], "vector": [[1, 2, 3, 4]], "color": ["red"]}
    writer.put(pa.table(row, schema=pa.schema([one.remove_metadata() for one in dataset.schema])))
    writer.close()
    with pytest.raises(InvalidUsageError, match="has regions of MemWAL writers"):
        go(made)
    run_job(table_of(made), "merge")
    assert "w" in found(table_of(made))


@pytest.mark.parametrize("what", ["another migration", "a table", "files", "inside"])
def test_a_target_that_is_not_ours(made: NamespaceUnderTest, tmp_path: Path, what: str) -> None:
    target = tmp_path / "other"
    if what == "another migration":
        other = NamespaceUnderTest(str(tmp_path / "ns2"), made.dialect)
        other.put("z")
        run_job(other.uri, "migrate", target=str(target), apply=True)
    elif what == "a table":
        lance.write_dataset(pa.table({"id": ["a"]}), str(target))
    elif what == "files":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target = Path(made.uri) / "table.lance"
    before = sorted(str(one) for one in tmp_path.rglob("*"))
    with pytest.raises(InvalidUsageError):
        run_job(made.uri, "migrate", target=str(target), apply=True)
    assert sorted(str(one) for one in tmp_path.rglob("*")) == before


def test_no_target(made: NamespaceUnderTest) -> None:
    with pytest.raises(InvalidUsageError, match="no target was"):
        run_job(made.uri, "migrate")


def test_a_spark_master_for_the_local_engine() -> None:
    with pytest.raises(OptionError, match="applies to Spark only"):
        ZeppelinMigrateOptions("table.lance", master="local[2]")


def test_a_damaged_fragment_stops_it(made: NamespaceUnderTest) -> None:
    key = open_table(made.uri).manifest.fragments[1].key
    path = Path(made.uri, key)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(FragmentCorruptError):
        go(made)
    assert not Path(table_of(made)).exists()


@pytest.mark.parametrize("apply", [True, False])
def test_a_missing_object_is_named(made: NamespaceUnderTest, apply: bool) -> None:
    key = open_table(made.uri).manifest.fragments[0].key
    data = Path(made.uri, key).read_bytes()
    Path(made.uri, key).unlink()
    with pytest.raises(FragmentMissingError, match=key):
        run_job(made.uri, "migrate", target=table_of(made), apply=apply)
    Path(made.uri, key).write_bytes(data)
    run_job(made.uri, "merge")
    (segment,) = open_table(made.uri).manifest.segments
    Path(made.uri, segment.prefix, "centroids.bin").unlink()
    with pytest.raises(SegmentCorruptError, match=f"{segment.prefix}centroids.bin"):
        run_job(made.uri, "migrate", target=table_of(made), apply=apply)
    assert not Path(table_of(made)).exists()


def test_an_empty_namespace(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    assert go(made)["rows"] == 0
    assert lance.dataset(table_of(made)).count_rows() == 0
    made.put("a")
    assert go(made)["upserts"] == 1
    same(made)


def test_rows_that_differ_are_reported(made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is lost on the way does not go unnoticed, and the migration is not finished."""
    real = LanceSink.create
    monkeypatch.setattr(
        LanceSink,
        "create",
        lambda self, rows, key, record: real(
            self, pa.RecordBatchReader.from_batches(rows.schema, (one.slice(1) for one in rows)), key, record
        ),
    )
    with pytest.raises(InvariantViolatedError, match="and they differ"):
        go(made)
    monkeypatch.undo()
    assert go(made)["upserts"] >= 1
    same(made)


def test_no_hold_is_left(made: NamespaceUnderTest) -> None:
    go(made)

    assert all(one.released for one in holds(open_table(made.uri)))


@pytest.mark.s3
@pytest.mark.usefixtures("no_aws_environment")
def test_onto_the_same_store_with_its_options(bucket: tuple[str, dict[str, str]]) -> None:
    """Credentials come from the options alone."""
    folder, options = bucket
    zeppelin.create(f"{folder}/ns", dimensions=4, metric="cosine", storage_options=options)
    rows = [{"id": "a", "values": [1.0, 0.0, 0.0, 0.5], "attributes": {}}]
    zeppelin.open_writer(f"{folder}/ns", storage_options=options).append(vectors=rows, deletes=[])
    table = f"{folder}/table.lance"
    run_job(f"{folder}/ns", "migrate", storage_options=options, target=table, apply=True)
    assert lance.dataset(table, storage_options=options).to_table(columns=["id"])["id"].to_pylist() == ["a"]
