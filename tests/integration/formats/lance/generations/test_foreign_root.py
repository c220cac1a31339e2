"""Tables in the region layout that were copied, moved or mounted elsewhere: their generations name another path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import errors, open_table, run_job
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.generations.generation import open_generation, read_written_by
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, RegionWriter, create_mem_wal, read
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("v", pa.string()),
    ]
)
BACKUP = {0: "base", 1: "old", 2: "old", 9: "in the log"}


def rows(ids: Sequence[int], value: str) -> pa.Table:
    return pa.table({"id": ids, "v": [value] * len(ids)}, schema=SCHEMA)


def make(uri: str, value: str = "old", options: Mapping[str, str] | None = None) -> None:
    """A table with two generations in two entries each that are not merged, and a row in the log alone."""
    given = dict(options or {})
    lance.write_dataset(rows([0], "base"), uri, storage_options=given)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 1)"),))], storage_options=given)
    with RegionRouter(uri, storage_options=given) as router:
        router.put(rows([1, 2], "older"))
        router.put(rows([1, 2], value))
    router = RegionRouter(uri, storage_options=given)
    router.put(rows([9], "in the log"))  # and the process ends


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of a table, at whose place another one is since."""
    original = tmp_path / "t.lance"
    make(str(original))
    shutil.copytree(original, tmp_path / "copy.lance")
    shutil.rmtree(original)
    make(str(original), "of another table")
    return tmp_path / "copy.lance"


def is_read(uri: str) -> dict[int, str]:
    return {one["id"]: one["v"] for one in read(uri).scan().to_table().to_pylist()}


def base(uri: str, options: Mapping[str, str] | None = None) -> dict[int, str]:
    dataset = lance.dataset(uri, storage_options=dict(options or {}))
    return {one["id"]: one["v"] for one in dataset.to_table().to_pylist()}


def generation(table: Path) -> Path:
    (found,) = table.glob("_mem_wal/*/*_gen_1")
    return found


def root_of(folder: Path) -> str:
    (base_path,) = lance.dataset(str(folder)).base_paths().values()
    return str(base_path.path).partition("/_mem_wal/")[0]


@pytest.mark.parametrize("at_the_old_path", ["the table", "nothing", "another table"])
def test_a_copy_is_read_and_merged_from_its_own_files(tmp_path: Path, at_the_old_path: str) -> None:
    original, copy = tmp_path / "t.lance", str(tmp_path / "copy.lance")
    make(str(original))
    shutil.copytree(original, copy)
    if at_the_old_path != "the table":
        shutil.rmtree(original)
    if at_the_old_path == "another table":
        make(str(original), "of another table")
    assert is_read(copy) == BACKUP
    (inspected,) = run_job(copy, "inspect").to_json()["regions"]
    assert (inspected["foreign_root"], inspected["error"]) == (str(original), None)
    verified = run_job(copy, "verify", deep=True).to_json()
    assert [(one["check"], one["severity"]) for one in verified["findings"]] == [("foreign_root", "info")]
    assert run_job(copy, "merge").exit_code == 0
    (region,) = open_table(copy).regions.region_ids
    RegionWriter(copy, region).close()
    assert run_job(copy, "merge").exit_code == 0
    assert base(copy) == is_read(copy) == BACKUP


def test_a_table_that_writer_and_jobs_mount_at_different_paths(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "writer").symlink_to(tmp_path / "disk")
    make(str(tmp_path / "writer" / "t.lance"))
    (tmp_path / "writer").unlink()
    uri = str(tmp_path / "disk" / "t.lance")
    assert run_job(uri, "merge").exit_code == 0
    assert base(uri) == {key: value for key, value in BACKUP.items() if key != 9}


def test_executors_of_spark_read_the_same_files(copied: Path) -> None:
    table = open_table(str(copied))
    (ref,) = read_backlog(table).pending
    opened = open_generation(table, ref, SchemaHistory(table)).sealed().open(table.location)
    assert {one["v"] for one in opened.dataset.to_table().to_pylist()} == {"old"}


def missing(entry: Path) -> None:
    entry.unlink()


def cut(entry: Path) -> None:
    os.truncate(entry, entry.stat().st_size - 1)


@pytest.mark.parametrize("damage", [missing, cut])
def test_files_that_are_not_here_are_not_read_elsewhere(copied: Path, damage: Any) -> None:
    uri = str(copied)
    names = {file.path for one in lance.dataset(str(generation(copied))).get_fragments() for file in one.data_files()}
    entry = generation(copied).parent / "wal" / min(names)
    kept = entry.read_bytes()
    damage(entry)
    with pytest.raises(errors.ForeignRootError, match=r"t\.lance as its table.*another table"):
        is_read(uri)
    for apply in (False, True):
        report = run_job(uri, "merge", apply=apply)
        assert [one["reason"] for one in report.to_json()["blocked"]] == ["foreign_root"]
    assert report.exit_code == 10
    (inspected,) = run_job(uri, "inspect").to_json()["regions"]
    assert inspected["error"]["reason"] == "foreign_root"
    verified = run_job(uri, "verify")
    pages = {one["check"]: str(one["runbook"]) for one in verified.to_json()["findings"]}
    assert (verified.exit_code, pages["generation"][-18:]) == (9, "65-foreign_root.md")
    for apply in (False, True):
        with pytest.raises(errors.ForeignRootError, match="wal/"):
            run_job(uri, "adopt", moved=True, apply=apply)
    assert root_of(generation(copied)) == str(copied.parent / "t.lance"), "nothing was written"
    assert base(uri) == {0: "base"}
    entry.write_bytes(kept)
    assert run_job(uri, "merge").exit_code == 0
    assert is_read(uri) == BACKUP


@pytest.mark.parametrize("path", ["/elsewhere/files", "{table}/_mem_wal/00000000-0000-4000-8000-00000000000a/wal"])
def test_rows_in_another_log_are_not_read(copied: Path, path: str) -> None:
    (manifest,) = generation(copied).glob("_versions/*.manifest")
    version = decode_version_manifest(manifest.read_bytes())
    version.manifest.base_paths[0].path = path.format(table=copied)
    manifest.write_bytes(encode_version_manifest(version))
    report = run_job(str(copied), "merge")
    assert [one["reason"] for one in report.to_json()["blocked"]] == ["foreign_root"]
    with pytest.raises(errors.ForeignRootError, match="not the log of its region"):
        is_read(str(copied))


def test_adopted_generations_name_their_table_and_keep_their_times(copied: Path) -> None:
    uri = str(copied)
    table = open_table(uri)
    (ref,) = read_backlog(table).pending
    before = read_written_by(table.store, ref.folder, 1)
    planned = run_job(uri, "adopt", moved=True, apply=False).to_json()
    (region,) = planned["regions"]
    assert (planned["decision"], planned["as"], region["generations"]) == ("planned", "moved", [1])
    assert (region["foreign_root"], region["files"]) == (str(copied.parent / "t.lance"), 3), (
        "two entries, and which of their rows are old"
    )
    assert root_of(generation(copied)) == region["foreign_root"]
    assert run_job(uri, "adopt", moved=True, apply=True).to_json()["decision"] == "adopted"
    assert root_of(generation(copied)) == uri
    assert {one["v"] for one in lance.dataset(str(generation(copied))).to_table().to_pylist()} == {"old"}
    after = read_written_by(table.store, ref.folder, 1)
    assert (after.flush, after.logged) == (before.flush, before.logged)
    assert run_job(uri, "adopt", moved=True, apply=True).to_json()["decision"] == "nothing_to_adopt"
    assert run_job(uri, "verify").to_json()["findings"] == []
    assert run_job(uri, "merge").exit_code == 0
    assert is_read(uri) == BACKUP


def test_a_copy_in_a_bucket(bucket: tuple[str, dict[str, str]]) -> None:
    root, options = bucket
    original, uri = f"{root}/t.lance", f"{root}/copy.lance"
    make(original, options=options)
    source, target = Files(original, options), Files(uri, options)
    for path in sorted(source.listing(""), key=lambda path: "_mem_wal" in path):  # as the page says
        target.put(path, source.get(path))
        source.delete(path)
    assert run_job(uri, "adopt", moved=True, apply=True, storage_options=options).to_json()["decision"] == "adopted"
    assert run_job(uri, "merge", storage_options=options).exit_code == 0
    assert base(uri, options) == {key: value for key, value in BACKUP.items() if key != 9}


def test_one_decision_at_a_time(copied: Path) -> None:
    for other in ({"answer": "merged"}, {"same_columns": True}):
        with pytest.raises(errors.InvalidUsageError, match="moved"):
            run_job(str(copied), "adopt", moved=True, **other)
