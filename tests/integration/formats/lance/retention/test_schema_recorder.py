"""What versions showed of columns is known after other programs deleted them, and no record is trusted elsewhere."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.retention.schema_recorder import (
    SCHEMA_FOLDER,
    SchemaRecord,
    decode_schema_record,
    encode_schema_record,
    extended_record,
    read_schema_record,
    record_schema,
    try_to_record_schema,
)
from tests.integration.contracts import small
from tests.support.overtaken import Overtaken
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Columns id 0, val 1, txt 2; recorded; generation 1 updates key 5."""
    found = small.make(tmp_path)
    record_schema(lance_table(found))
    small.flush(found, small.rows(5, 6, 7.0))
    return found


def lance_table(uri: str) -> Table:
    table: Any = open_table(uri)
    return table


def records(uri: str) -> list[str]:
    return sorted(path.name for path in Path(uri, SCHEMA_FOLDER).glob("*"))


def clean(uri: str) -> None:
    """As LanceDB advises for small disks."""
    lance.dataset(uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
    assert len(lance.dataset(uri).versions()) == 1


def compact_and_clean(uri: str) -> None:
    lance.dataset(uri).delete("id = 0")
    lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    clean(uri)


def merged(uri: str) -> dict[str, Any]:
    report = run_job(uri, "merge").to_json()
    assert report["decision"] == "merged", report
    (row,) = lance.dataset(uri).to_table(filter="id = 5").to_pylist()
    return dict(row)


def blocked(uri: str) -> list[str]:
    report = run_job(uri, "merge").to_json()
    assert report["decision"] == "blocked"
    return [str(one["reason"]) for one in report["blocked"]]


def drop_and_add(uri: str) -> None:
    """Another column ``txt`` that has the id of the first one, and values."""
    before = small.field_ids(uri)
    lance.dataset(uri).drop_columns(["txt"])
    lance.dataset(uri).delete("id = 0")
    lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    lance.dataset(uri).add_columns(pa.field("txt", pa.string()))
    assert small.field_ids(uri) == before, "the premise: the id is used again"
    lance.dataset(uri).update({"txt": "'new'"})


def test_compacted_and_cleaned_by_the_user(uri: str) -> None:
    compact_and_clean(uri)
    assert merged(uri) == {"id": 5, "val": 7.0, "txt": "row 5"}


def test_columns_were_added_and_dropped_before(uri: str) -> None:
    lance.dataset(uri).add_columns(pa.field("more", pa.string()))
    lance.dataset(uri).drop_columns(["val"])
    lance.dataset(uri).optimize.compact_files()
    clean(uri)
    assert merged(uri) == {"id": 5, "txt": "row 5", "more": None}


def test_a_renamed_column(uri: str) -> None:
    lance.dataset(uri).alter_columns({"path": "txt", "name": "text"})
    clean(uri)
    assert merged(uri) == {"id": 5, "val": 7.0, "text": "row 5"}


def test_dropped_and_added_again_unseen(uri: str) -> None:
    """Nothing shows it, and the values must not come back: a person decides."""
    drop_and_add(uri)
    clean(uri)
    assert blocked(uri) == ["schema_projection"]
    assert run_job(uri, "adopt", same_columns=True).to_json()["decision"] == "planned"


@pytest.mark.parametrize("by", ["poll", "expire"])
def test_dropped_and_added_again_and_recorded(uri: str, by: str) -> None:
    drop_and_add(uri)
    if by == "poll":
        try_to_record_schema(lance_table(uri))
    else:
        run_job(uri, "expire", older_than=timedelta(0), allow_unsafe=True, apply=True)
    for number in range(20):
        lance.dataset(uri).update_config({"any": str(number)})
        try_to_record_schema(lance_table(uri))
    compact_and_clean(uri)
    assert merged(uri)["txt"] is None
    assert len(records(uri)) == 1


def test_too_many_versions_are_missing(uri: str) -> None:
    """As many as dropping, rewriting, adding again and dropping take."""
    lance.dataset(uri).update_config({"any": "thing"})
    compact_and_clean(uri)
    assert blocked(uri) == ["schema_projection"]


def test_cleaned_again_and_again_between_polls(uri: str) -> None:
    for _ in range(5):
        compact_and_clean(uri)
        try_to_record_schema(lance_table(uri))
        small.flush(uri, small.rows(5, 6, 8.0))
    compact_and_clean(uri)
    assert merged(uri) == {"id": 5, "val": 8.0, "txt": "row 5"}


def test_a_restore_of_a_version_without_the_column(uri: str) -> None:
    """The version before the column has no file with its id either: two versions give the id to another one."""
    lance.dataset(uri).add_columns(pa.field("note", pa.string()))
    record_schema(lance_table(uri))
    before = lance.dataset(uri).version - 1
    rows = small.rows(5, 6, 9.0).append_column("note", pa.array(["old"]))
    small.flush(uri, rows)
    lance.dataset(uri, version=before).restore()
    lance.dataset(uri).add_columns(pa.field("note", pa.string()))
    clean(uri)
    assert blocked(uri) == ["schema_projection"]


def test_a_record_of_a_table_that_was_made_again(uri: str, tmp_path: Path) -> None:
    drop_and_add(uri)
    record_schema(lance_table(uri))
    other = small.make(tmp_path)
    small.flush(other, small.rows(5, 6, 7.0))
    shutil.copytree(Path(uri, SCHEMA_FOLDER), Path(other, SCHEMA_FOLDER))
    for _ in range(9):
        lance.dataset(other).update_config({"any": "thing"})
    assert read_schema_record(lance_table(other)) == SchemaRecord()
    compact_and_clean(other)
    assert read_schema_record(lance_table(other)) == SchemaRecord()
    assert blocked(other) == ["schema_projection"]


def test_a_backup_with_fewer_versions_was_restored(uri: str, tmp_path: Path) -> None:
    """The record has versions that the table does not have, or has with other content."""
    saved = shutil.copytree(uri, tmp_path / "saved")
    lance.dataset(uri).update_config({"any": "thing"})
    record_schema(lance_table(uri))
    kept = shutil.copytree(Path(uri, SCHEMA_FOLDER), tmp_path / "record")
    shutil.rmtree(uri)
    shutil.copytree(saved, uri)
    shutil.rmtree(Path(uri, SCHEMA_FOLDER))
    shutil.copytree(kept, Path(uri, SCHEMA_FOLDER))
    assert read_schema_record(lance_table(uri)) == SchemaRecord(), "of a later version than there is"
    lance.dataset(uri).update_config({"any": "thing"})
    assert read_schema_record(lance_table(uri)) == SchemaRecord(), "another version with that number"
    lance.dataset(uri).update_config({"any": "thing"})
    record_schema(lance_table(uri))
    assert merged(uri) == {"id": 5, "val": 7.0, "txt": "row 5"}


def test_a_clone_and_a_branch_have_records_of_their_own(uri: str, tmp_path: Path) -> None:
    clone = str(tmp_path / "clone.lance")
    lance.dataset(uri).shallow_clone(clone, lance.dataset(uri).version)
    assert read_schema_record(lance_table(clone)) == SchemaRecord()
    lance.dataset(uri).create_branch("dev")
    branch = f"{uri}/tree/dev"
    assert read_schema_record(lance_table(branch)) == SchemaRecord()
    record_schema(lance_table(branch))
    assert read_schema_record(lance_table(branch)).last == lance_table(branch).version
    assert len(records(branch)) == len(records(uri)) == 1


def test_a_record_by_a_later_release_or_damaged(uri: str) -> None:
    (name,) = records(uri)
    path = Path(uri, SCHEMA_FOLDER, name)
    data = path.read_bytes()
    assert encode_schema_record(decode_schema_record(data, name)) == data
    for other in (data.replace(b'"format": 1', b'"format": 2'), data[:40], b"[]", b'{"parts": []}', b'{"parts": [{}]}'):
        path.write_bytes(other)
        assert read_schema_record(lance_table(uri)) == SchemaRecord()
    compact_and_clean(uri)
    assert blocked(uri) == ["schema_projection"]


def test_a_record_is_bounded(uri: str) -> None:
    for number in range(80):
        lance.dataset(uri).add_columns(pa.field(f"c{number}", pa.int8()))
    record_schema(lance_table(uri))
    record = read_schema_record(lance_table(uri))
    assert len([*record.spans()]) == 64
    assert (record.last, record.parts[0].complete) == (lance.dataset(uri).version, False)


def test_two_recorders_at_once(uri: str) -> None:
    lance.dataset(uri).update_config({"any": "thing"})
    table = lance_table(uri)
    store = Overtaken(table.store, 2, lambda: record_schema(lance_table(uri)), writes=True)
    record_schema(replace(table, store=store))
    assert len(records(uri)) == 1
    assert read_schema_record(table) == extended_record(table, SchemaRecord())


def test_init_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = f"{tmp_path}/t.lance"
    lance.write_dataset(small.rows(0, 10), uri)
    assert run_here(capfd, "init", uri, "--dry-run").code == 0
    assert records(uri) == []
    assert run_here(capfd, "init", uri).code == 0
    assert len(records(uri)) == 1
