"""The base table's columns change between flush and merge."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import expire, merge as merge_job
from memwal_ops.formats.lance.retention.schema_history import SAME_COLUMNS, Flush, SchemaHistory
from tests.support.counting_store import CountingStore
from tests.support.tables import wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine

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


def merge(uri: str, engine: MergeEngine | None) -> merge_job.MergeReport:
    return merge_job.apply(open_table(uri), merge_job.MergeOptions(), engine=engine)


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


def test_a_column_was_added(uri: str, engine: MergeEngine | None) -> None:
    lance.dataset(uri).add_columns(pa.field("new", pa.string()))
    assert merge(uri, engine).decision == "merged"
    assert rows_of(uri) == {number: {**one, "new": None} for number, one in expected().items()}


def test_a_column_was_dropped(uri: str, engine: MergeEngine | None) -> None:
    lance.dataset(uri).drop_columns(["a"])
    assert merge(uri, engine).decision == "merged"
    assert rows_of(uri) == {number: {k: v for k, v in one.items() if k != "a"} for number, one in expected().items()}


def test_a_column_was_renamed(uri: str, engine: MergeEngine | None) -> None:
    lance.dataset(uri).alter_columns({"path": "a", "name": "text"})
    assert merge(uri, engine).decision == "merged"
    got = rows_of(uri)
    assert {number: one["text"] for number, one in got.items()} == {n: one["a"] for n, one in expected().items()}


def test_two_columns_changed_names(uri: str, engine: MergeEngine | None) -> None:
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


def test_a_field_inside_a_struct_was_renamed(uri: str, engine: MergeEngine | None) -> None:
    lance.dataset(uri).alter_columns({"path": "who.last", "name": "family"})
    assert merge(uri, engine).decision == "merged"
    assert {n: one["who"]["family"] for n, one in rows_of(uri).items()} == {n: f"l{n}" for n in expected()}


def test_dropped_and_added_again_under_the_same_name(uri: str, engine: MergeEngine | None) -> None:
    """Another column: it has another id, and the old values do not come back."""
    lance.dataset(uri).drop_columns(["b"])
    lance.dataset(uri).add_columns(pa.field("b", pa.int32()))
    assert merge(uri, engine).decision == "merged"
    assert {one["b"] for one in rows_of(uri).values()} == {None}


def test_an_id_that_was_given_away_is_no_rename(tmp_path: Path, engine: MergeEngine | None) -> None:
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


SHORT = pa.schema([KEY, pa.field("v", pa.int32())])
NOTED = pa.schema([*SHORT, pa.field("note", pa.string())])
REGION = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def noted(tmp_path: Path) -> str:
    """A column that no data file holds, so that its id is given away when it is dropped; one generation with it."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": [1, 2], "v": [1, 2]}, schema=SHORT), uri)
    lance.dataset(uri).add_columns(pa.field("note", pa.string()))
    lance.dataset(uri).initialize_mem_wal()
    write_notes(uri, [2, 3], "old")
    return uri


def write_notes(uri: str, numbers: list[int], note: str, region: str = REGION) -> None:
    rows = {"id": numbers, "v": [10 * number for number in numbers], "note": [note] * len(numbers)}
    with lance.dataset(uri).mem_wal_writer(region) as writer:
        writer.put(pa.table(rows, schema=NOTED))


def add_again(uri: str, name: str = "note", field: pa.Field | None = None) -> None:
    """Drop the column and add another one, which gets its id."""
    before = {field.name(): field.id() for field in lance.dataset(uri).lance_schema.fields()}
    lance.dataset(uri).drop_columns([name])
    lance.dataset(uri).add_columns(field or pa.field(name, pa.string()))
    after = {field.name(): field.id() for field in lance.dataset(uri).lance_schema.fields()}
    assert after == before, "the premise: the id is used again"


def notes(uri: str, name: str = "note") -> dict[int, str | None]:
    return {number: one[name] for number, one in rows_of(uri).items()}


def forget_versions(uri: str) -> None:
    """All but the newest, as an expiry does."""
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    assert len(lance.dataset(uri).versions()) == 1


def reason(report: merge_job.MergeReport) -> str:
    assert report.decision == "blocked"
    (fault,) = report.blocked
    return str(fault.error.reason)


def test_values_of_a_dropped_column_stay_away(noted: str, engine: MergeEngine | None) -> None:
    """pylance's own scan of base and generations gives them back: it asks for the id alone."""
    add_again(noted)
    write_notes(noted, [4], "new")
    assert merge(noted, engine).decision == "merged"
    assert notes(noted) == {1: None, 2: None, 3: None, 4: "new"}
    assert {one["v"] for one in rows_of(noted).values()} == {1, 20, 30, 40}


def test_added_again_and_renamed(noted: str, engine: MergeEngine | None) -> None:
    """The name of the past, in a version of the present column's life, makes it no rename."""
    add_again(noted)
    lance.dataset(noted).alter_columns({"path": "note", "name": "remark"})
    assert merge(noted, engine).decision == "merged"
    assert notes(noted, "remark") == {1: None, 2: None, 3: None}


def test_another_column_took_the_name(noted: str, engine: MergeEngine | None) -> None:
    lance.dataset(noted).drop_columns(["note"])
    lance.dataset(noted).add_columns(pa.field("email", pa.string()))
    lance.dataset(noted).alter_columns({"path": "email", "name": "note"})
    assert merge(noted, engine).decision == "merged"
    assert notes(noted) == {1: None, 2: None, 3: None}


def test_added_again_with_another_type(noted: str, engine: MergeEngine | None) -> None:
    add_again(noted, field=pa.field("note", pa.int64()))
    assert merge(noted, engine).decision == "merged"
    assert notes(noted) == {1: None, 2: None, 3: None}


@pytest.mark.parametrize("inside", ["struct", "list"])
def test_a_field_inside_was_dropped_and_added_again(tmp_path: Path, inside: str, engine: MergeEngine | None) -> None:
    kind = PERSON if inside == "struct" else pa.list_(PERSON)
    part = pa.struct([("last", pa.string())])
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": [1], "v": [1]}, schema=SHORT), uri)
    lance.dataset(uri).add_columns(pa.field("who", kind))
    lance.dataset(uri).initialize_mem_wal()
    person = {"first": "f", "last": "old"}
    rows = [{"id": 2, "v": 2, "who": person if inside == "struct" else [person]}, {"id": 3, "v": 3, "who": None}]
    with lance.dataset(uri).mem_wal_writer(REGION) as writer:
        writer.put(pa.Table.from_pylist(rows, schema=pa.schema([*SHORT, pa.field("who", kind)])))
    before = str(lance.dataset(uri).lance_schema)
    lance.dataset(uri).drop_columns(["who.last" if inside == "struct" else "who.item.last"])
    lance.dataset(uri).add_columns(pa.schema([pa.field("who", part if inside == "struct" else pa.list_(part))]))
    assert str(lance.dataset(uri).lance_schema) == before, "the premise: the id is used again"
    assert merge(uri, engine).decision == "merged"
    kept = {"first": "f", "last": None}
    assert {n: one["who"] for n, one in rows_of(uri).items()} == {
        1: None,
        2: kept if inside == "struct" else [kept],
        3: None,
    }


def test_a_drop_that_was_undone(noted: str, engine: MergeEngine | None) -> None:
    """A version that was restored follows on the one that it restores, and so do its columns."""
    version = lance.dataset(noted).version
    lance.dataset(noted).drop_columns(["note"])
    lance.dataset(noted, version=version).restore()
    assert merge(noted, engine).decision == "merged"
    assert notes(noted) == {1: None, 2: "old", 3: "old"}


def test_a_column_that_a_restore_took_the_place_of(noted: str, engine: MergeEngine | None) -> None:
    version = lance.dataset(noted).version
    add_again(noted)
    write_notes(noted, [4], "of the column that was undone")
    lance.dataset(noted, version=version).restore()
    assert merge(noted, engine).decision == "merged"
    assert notes(noted) == {1: None, 2: "old", 3: "old", 4: None}


def test_if_no_version_shows_it_any_more_an_operator_decides(noted: str, engine: MergeEngine | None) -> None:
    lance.dataset(noted).update_config({"any": "thing"})
    forget_versions(noted)
    assert reason(merge(noted, engine)) == "schema_projection"
    version = lance.dataset(noted).version
    lance.dataset(noted).update_config({SAME_COLUMNS: str(version)})
    assert merge(noted, engine).decision == "merged"
    assert notes(noted) == {1: None, 2: "old", 3: "old"}


def test_a_confirmation_of_another_version_does_not_count(noted: str) -> None:
    lance.dataset(noted).update_config({SAME_COLUMNS: str(lance.dataset(noted).version)})
    add_again(noted)
    forget_versions(noted)
    assert reason(merge(noted, None)) == "schema_projection"


def test_if_no_version_shows_it_any_more_and_it_was_dropped(noted: str, engine: MergeEngine | None) -> None:
    add_again(noted)
    write_notes(noted, [1], "new", str(uuid.uuid4()))
    forget_versions(noted)
    report = merge(noted, engine)
    assert reason(report) == "schema_projection"
    assert notes(noted) == {1: "new", 2: None}, "the region that was written since goes on"
    dataset = lance.dataset(noted)
    dataset.add_columns(pa.field("copy", pa.string()))
    dataset.update({"copy": "note"})
    dataset.drop_columns(["note"])
    dataset.alter_columns({"path": "copy", "name": "note"})
    report = merge(noted, engine)
    assert reason(report) == "schema_projection"
    message = str(report.blocked[0].error)
    assert "Cannot match the columns 'v' with" in message, "the rows were written again: no old file shows it either"
    lance.dataset(noted).update_config({SAME_COLUMNS: str(lance.dataset(noted).version)})
    assert merge(noted, engine).decision == "merged"
    assert notes(noted) == {1: "new", 2: None, 3: None}


def test_our_own_expiry_leaves_the_versions_that_tell(noted: str) -> None:
    add_again(noted)
    lance.dataset(noted).update_config({"any": "thing"})
    options = expire.ExpireOptions(timedelta(0), allow_unsafe=True)
    because = {one.because for one in expire.plan(open_table(noted), options).kept}
    assert because == {"the newest version", "has the schema of an unmerged generation"}
    expire.apply(open_table(noted), options)
    assert merge(noted, None).decision == "merged"
    assert notes(noted) == {1: None, 2: None, 3: None}
    expire.apply(open_table(noted), options)
    assert len(lance.dataset(noted).versions()) == 1


def test_a_data_file_decides_if_no_version_does(tmp_path: Path) -> None:
    """While a data file holds an id, Lance gives neither it nor a lower one to another column."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": [1], "v": [1], "note": ["base"]}, schema=NOTED), uri)
    lance.dataset(uri).initialize_mem_wal()
    write_notes(uri, [2], "flushed")
    lance.dataset(uri).update_config({"any": "thing"})
    forget_versions(uri)
    assert merge(uri, None).decision == "merged"
    assert notes(uri) == {1: "base", 2: "flushed"}


def flushed_manifest(uri: str) -> Path:
    (manifest,) = Path(uri).glob("_mem_wal/*/*_gen_1/_versions/*.manifest")
    return manifest


def test_clocks_that_contradict_each_other(noted: str) -> None:
    """By its writer's clock the generation was flushed before the column was dropped, by the store's after it."""
    add_again(noted)
    later = time.time() + 60
    os.utime(flushed_manifest(noted), (later, later))
    assert reason(merge(noted, None)) == "schema_projection"
    lance.dataset(noted).update_config({SAME_COLUMNS: str(lance.dataset(noted).version)})
    assert merge(noted, None).decision == "merged"


def test_a_writer_whose_clock_is_ahead(tmp_path: Path) -> None:
    """By its own clock it flushed after the column was added again: by the store's, before it was dropped."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": [1], "v": [1]}, schema=SHORT), uri)
    lance.dataset(uri).add_columns(pa.field("note", pa.string()))
    lance.dataset(uri).initialize_mem_wal()
    before = sorted(Path(uri, "_versions").glob("*.manifest"))
    add_again(uri)
    write_notes(uri, [2], "old")
    now = time.time()
    for path in before:
        os.utime(path, (now - 7200, now - 7200))
    os.utime(flushed_manifest(uri), (now - 3600, now - 3600))
    assert merge(uri, None).decision == "merged"
    assert notes(uri) == {1: None, 2: None}


def test_a_confirmation_before_the_column_was_dropped_does_not_count(noted: str) -> None:
    lance.dataset(noted).update_config({SAME_COLUMNS: str(lance.dataset(noted).version)})
    add_again(noted)
    later = time.time() + 60
    os.utime(flushed_manifest(noted), (later, later))
    assert reason(merge(noted, None)) == "schema_projection"


def test_a_version_without_its_transaction_may_be_a_restored_one(noted: str) -> None:
    add_again(noted)
    newest = Path(noted, wire.manifest_names(Files(noted))[lance.dataset(noted).version])
    parts = wire.parse_manifest(newest.read_bytes())
    positions = {21, 23}
    bare = replace(parts, transaction=None, fields=[one for one in parts.fields if one.number not in positions])
    newest.write_bytes(wire.build_manifest(bare))
    assert reason(merge(noted, None)) == "schema_projection"


def test_a_table_that_was_overwritten_has_other_columns(noted: str) -> None:
    flush = Flush(time.time_ns(), time.time_ns())
    time.sleep(0.05)  # files have a coarser clock
    rows = pa.table({"id": [1], "v": [1], "note": ["another"]}, schema=NOTED)
    lance.write_dataset(rows, noted, mode="overwrite").initialize_mem_wal()
    history = SchemaHistory(open_table(noted))
    assert [history.is_same_field(field_id, flush, renamed=False) for field_id in range(3)] == [False] * 3


def test_what_is_cached_of_one_table_is_not_used_for_the_next(noted: str) -> None:
    store = open_table(noted).store
    add_again(noted)
    assert merge_job.apply(replace(open_table(noted), store=store), merge_job.MergeOptions()).decision == "merged"
    assert notes(noted) == {1: None, 2: None, 3: None}
    shutil.rmtree(noted)
    lance.write_dataset(pa.table({"id": [1], "v": [1]}, schema=SHORT), noted)
    lance.dataset(noted).add_columns(pa.field("note", pa.string()))
    lance.dataset(noted).initialize_mem_wal()
    write_notes(noted, [2], "of the new table")
    for number in range(10):
        lance.dataset(noted).update_config({"any": str(number)})
    assert merge_job.apply(replace(open_table(noted), store=store), merge_job.MergeOptions()).decision == "merged"
    assert notes(noted) == {1: None, 2: "of the new table"}


@pytest.mark.long
def test_each_version_is_read_once_for_all_passes(noted: str) -> None:
    for number in range(10, 30):
        write_notes(noted, [number], "one of many")
    table = open_table(noted)
    read: Counter[str] = Counter()

    class Reading(CountingStore):
        def get(self, path: str) -> bytes:
            read[path] += 1
            return super().get(path)

    report = merge_job.apply(replace(table, store=Reading(table.store)), merge_job.MergeOptions(max_generations=1))
    assert len(report.passes) == 21
    # Of the hint each pass asks whether the newest version is lost.
    versions = [count for path, count in read.items() if path.startswith("_versions/") and path.endswith(".manifest")]
    assert len(versions) > 20
    assert max(versions) < 8, read


def test_a_rename_that_no_version_explains_any_more_is_refused(uri: str, engine: MergeEngine | None) -> None:
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


def test_old_and_new_generations_in_one_pass(uri: str, engine: MergeEngine | None) -> None:
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
