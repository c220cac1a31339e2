"""The base table's columns change between flush and merge."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.jobs import merge as job

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.engines.api import Engine

KEY = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
PERSON = pa.struct([("first", pa.string()), ("last", pa.string())])
SCHEMA = pa.schema([KEY, pa.field("a", pa.string()), pa.field("b", pa.int32()), pa.field("who", PERSON)])


def row(number: int, tag: str) -> dict[str, Any]:
    return {"id": number, "a": f"{tag}{number}", "b": number, "who": {"first": f"f{tag}", "last": f"l{number}"}}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Base rows 0 to 9; one flushed generation that updates 5 to 9, inserts 10 to 14, deletes 0."""
    place = str(tmp_path / "t.lance")
    lance.write_dataset(pa.Table.from_pylist([row(number, "base") for number in range(10)], schema=SCHEMA), place)
    lance.dataset(place).initialize_mem_wal()
    flush(place, range(5, 15), "gen", SCHEMA)
    return place


def flush(uri: str, numbers: range, tag: str, schema: pa.Schema) -> None:
    rows = [{name: value for name, value in row(number, tag).items() if name in schema.names} for number in numbers]
    with lance.dataset(uri).mem_wal_writer("00000000-0000-4000-8000-000000000001") as writer:
        writer.put(pa.Table.from_pylist(rows, schema=schema))
        writer.delete(pa.table({"id": pa.array([0], pa.int64())}))


def merge(uri: str, engine: Engine | None) -> job.MergeReport:
    return job.apply(open_table(uri), job.MergeOptions(), engine=engine)


def rows_of(uri: str) -> dict[int, dict[str, Any]]:
    found = lance.dataset(uri).to_table().to_pylist()
    assert len({one["id"] for one in found}) == len(found)
    return {one.pop("id"): one for one in found}


def plain(number: int) -> dict[str, Any]:
    out = row(number, "gen" if number >= 5 else "base")
    del out["id"]
    return out


def expected() -> dict[int, dict[str, Any]]:
    return {number: plain(number) for number in range(1, 15)}


def test_a_column_was_added(uri: str, engine: Engine | None) -> None:
    lance.dataset(uri).add_columns(pa.field("new", pa.string()))
    assert merge(uri, engine).decision == "merged"
    assert rows_of(uri) == {number: {**one, "new": None} for number, one in expected().items()}


def test_a_column_was_dropped(uri: str, engine: Engine | None) -> None:
    lance.dataset(uri).drop_columns(["a"])
    assert merge(uri, engine).decision == "merged"
    assert rows_of(uri) == {number: {k: v for k, v in one.items() if k != "a"} for number, one in expected().items()}


def test_a_column_was_renamed(uri: str, engine: Engine | None) -> None:
    lance.dataset(uri).alter_columns({"path": "a", "name": "text"})
    assert merge(uri, engine).decision == "merged"
    got = rows_of(uri)
    assert {number: one["text"] for number, one in got.items()} == {n: one["a"] for n, one in expected().items()}


def test_two_columns_changed_names(uri: str, engine: Engine | None) -> None:
    """By name, each would take the other's values."""
    dataset = lance.dataset(uri)
    dataset.add_columns(pa.field("c", pa.int32()))
    flush(uri, range(20, 22), "late", pa.schema([*SCHEMA, pa.field("c", pa.int32())]))
    for old, new in (("b", "tmp"), ("c", "b"), ("tmp", "c")):
        lance.dataset(uri).alter_columns({"path": old, "name": new})
    assert merge(uri, engine).decision == "merged"
    got = rows_of(uri)
    assert {number: one["c"] for number, one in got.items()} == {number: number for number in got}
    assert {one["b"] for one in got.values()} == {None}


def test_a_field_inside_a_struct_was_renamed(uri: str, engine: Engine | None) -> None:
    lance.dataset(uri).alter_columns({"path": "who.last", "name": "family"})
    assert merge(uri, engine).decision == "merged"
    assert {n: one["who"]["family"] for n, one in rows_of(uri).items()} == {n: f"l{n}" for n in expected()}


def test_dropped_and_added_again_under_the_same_name(uri: str, engine: Engine | None) -> None:
    """Another column: it has another id, and the old values do not come back."""
    lance.dataset(uri).drop_columns(["b"])
    lance.dataset(uri).add_columns(pa.field("b", pa.int32()))
    assert merge(uri, engine).decision == "merged"
    assert {one["b"] for one in rows_of(uri).values()} == {None}


def test_an_id_that_was_given_away_is_no_rename(tmp_path: Path, engine: Engine | None) -> None:
    """Lance gives a dropped column's id to the next one where no data file holds it."""
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([KEY, pa.field("v", pa.int32())])
    lance.write_dataset(pa.table({"id": [1, 2], "v": [1, 2]}, schema=schema), uri)
    lance.dataset(uri).add_columns(pa.field("note", pa.string()))
    lance.dataset(uri).initialize_mem_wal()
    noted = pa.schema([*schema, pa.field("note", pa.string())])
    with lance.dataset(uri).mem_wal_writer(str(uuid.uuid4())) as writer:
        writer.put(pa.table({"id": [2, 3], "v": [20, 30], "note": ["private", "private"]}, schema=noted))
    before = {field.name(): field.id() for field in lance.dataset(uri).lance_schema.fields()}
    lance.dataset(uri).drop_columns(["note"])
    lance.dataset(uri).add_columns(pa.field("email", pa.string()))
    after = {field.name(): field.id() for field in lance.dataset(uri).lance_schema.fields()}
    assert after["email"] == before["note"], "the premise: the id is used again"
    assert merge(uri, engine).decision == "merged"
    assert rows_of(uri) == {
        1: {"v": 1, "email": None},
        2: {"v": 20, "email": None},
        3: {"v": 30, "email": None},
    }


def test_a_rename_that_no_version_explains_any_more_is_refused(uri: str, engine: Engine | None) -> None:
    lance.dataset(uri).alter_columns({"path": "a", "name": "text"})
    store = open_table(uri).store
    names = sorted(meta.path for meta in store.list("_versions") if meta.path.endswith(".manifest"))
    store.delete_many(names[1:])  # the names count down: the first is the newest version
    report = merge(uri, engine)
    assert report.decision == "blocked"
    assert report.blocked[0].error.reason == "schema_projection"
    lance.dataset(uri).alter_columns({"path": "text", "name": "a"})
    assert merge(uri, engine).decision == "merged"
    assert rows_of(uri) == expected()


def test_a_damaged_version_stops_the_regions_that_need_it(uri: str) -> None:
    lance.dataset(uri).alter_columns({"path": "a", "name": "text"})
    rows = pa.Table.from_pylist([{"id": 20, "text": "t", "b": 1, "who": None}], schema=lance.dataset(uri).schema)
    with lance.dataset(uri).mem_wal_writer(str(uuid.uuid4())) as writer:
        writer.put(rows)
    store = open_table(uri).store
    damaged = sorted(meta.path for meta in store.list("_versions") if meta.path.endswith(".manifest"))[1]
    data = store.get(damaged)
    store.put(damaged, data[:100])
    report = merge(uri, None)
    assert [str(fault.error.reason) for fault in report.blocked] == ["schema_projection"]
    assert damaged in str(report.blocked[0].error)
    assert lance.dataset(uri).count_rows("id = 20") == 1, "the region that was written since goes on"
    store.put(damaged, data)
    assert merge(uri, None).decision == "merged"


def test_old_and_new_generations_in_one_pass(uri: str, engine: Engine | None) -> None:
    lance.dataset(uri).alter_columns({"path": "a", "name": "text"})
    lance.dataset(uri).add_columns(pa.field("extra", pa.int64()))
    now = lance.dataset(uri).schema
    with lance.dataset(uri).mem_wal_writer("00000000-0000-4000-8000-000000000001") as writer:
        late = {"id": 7, "text": "late", "b": None, "who": None, "extra": 70}
        writer.put(pa.Table.from_pylist([late], schema=now))
    report = merge(uri, engine)
    assert (report.decision, len(report.passes)) == ("merged", 1)
    got = rows_of(uri)
    assert got[7] == {"text": "late", "b": None, "who": None, "extra": 70}
    assert got[8] == {"text": "gen8", "b": 8, "who": {"first": "fgen", "last": "l8"}, "extra": None}
