"""Tables with data files of several storage versions, and settings that would give a table an unsupported feature."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lance.wire.version_manifest import (
    MIXED_FILE_VERSIONS,
    decode_version_manifest,
    encode_version_manifest,
    moved_later,
)
from tests.support.run_cli import contents
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.stale_indexes import written_by
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

VERSION_SETTING = "lance.compaction.data_storage_version"
ALL_AT_ONCE = {"older_than": timedelta(0), "keep": 1, "allow_unsafe": True}


def file_versions(uri: str) -> set[tuple[int, int]]:
    fragments = open_table(uri).manifest.manifest.fragments
    return {(file.file_major_version, file.file_minor_version) for one in fragments for file in one.files}


def is_mixed(uri: str) -> bool:
    manifest = open_table(uri).manifest.manifest
    return bool(manifest.reader_feature_flags & manifest.writer_feature_flags & MIXED_FILE_VERSIONS)


def maintain(made: LsmTable) -> None:
    """Every job; the rows stay those of the model."""
    made.step(6)
    made.close()
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    for job in ("merge", "catchup", "snapshot", "verify", "inspect", "gc"):
        report = run_job(made.uri, job, **({"deep": True} if job == "verify" else {}))
        assert report.exit_code == 0, f"{job}: {report.describe()}"
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


# A writer of the region layout needs data files of 2.1: test_region_writer_refusals.py.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "old"), [(Workload, "2.0"), (Workload, "2.1"), (RegionLayout, "2.1")])
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_files_of_two_versions_go_through_all_jobs(
    tmp_path: Path, kind: type[LsmTable], old: str, stable: bool
) -> None:
    made = kind(3, regions=2, base_rows=60, stable_row_ids=stable, data_storage_version=old)
    made.create(str(tmp_path / "t.lance"))
    maintain(made)
    assert not is_mixed(made.uri)
    lance.dataset(made.uri).update_config({VERSION_SETTING: "2.2"})
    assert run_job(made.uri, "compact").to_json()["decision"] == "compacted"
    assert file_versions(made.uri) == {(2, 2)}
    assert is_mixed(made.uri)
    assert open_table(made.uri).index.index_catchup
    for _ in range(2):
        maintain(made)
    minor = int(old[-1])
    assert file_versions(made.uri) == {(2, 2), (2, minor)}
    assert run_job(made.uri, "compact").to_json()["decision"] == "compacted"
    maintain(made)
    run_job(made.uri, "expire", apply=True, **ALL_AT_ONCE)
    assert run_job(made.uri, "maintain", apply=True).exit_code == 0
    maintain(made)
    assert is_mixed(made.uri), "the flag stays when all files are of one version"


def plain(path: Path, **options: Any) -> str:
    uri = str(path / "t.lance")
    lance.write_dataset(pa.table({"k": range(40)}), uri, max_rows_per_file=10, data_storage_version="2.1", **options)
    lance.dataset(uri).create_scalar_index("k", "BTREE")
    return uri


def test_a_plain_table_that_an_append_mixed(tmp_path: Path) -> None:
    uri = plain(tmp_path)
    lance.write_dataset(pa.table({"k": range(40, 50)}), uri, mode="append", data_storage_version="2.2")
    assert is_mixed(uri)
    for job in ("catchup", "compact", "verify", "inspect"):
        assert run_job(uri, job).exit_code == 0
    run_job(uri, "expire", apply=True, **ALL_AT_ONCE)
    assert run_job(uri, "gc", apply=True).exit_code == 0
    assert sorted(lance.dataset(uri).to_table()["k"].to_pylist()) == [*range(50)]
    assert lance.dataset(uri).to_table(filter="k = 45").num_rows == 1


@pytest.mark.parametrize("value", ["2.9", "legacy", "two"])
def test_a_setting_that_pylance_refuses_is_named_before_anything_is_written(tmp_path: Path, value: str) -> None:
    uri = plain(tmp_path)
    lance.dataset(uri).update_config({VERSION_SETTING: value})
    before = lance.dataset(uri).version
    for apply in (False, True):
        with pytest.raises(InvalidUsageError, match=f"{VERSION_SETTING} = {value}"):
            run_job(uri, "compact", apply=apply)
    assert lance.dataset(uri).version == before


def test_a_deferred_remap_by_a_setting_is_not_done(tmp_path: Path) -> None:
    uri = plain(tmp_path)
    lance.dataset(uri).update_config({"lance.compaction.defer_index_remap": "true"})
    assert run_job(uri, "compact").to_json()["decision"] == "compacted"
    assert not moved_later(open_table(uri).manifest)


def test_row_lineage_is_not_spilled(tmp_path: Path) -> None:
    uri = plain(tmp_path, enable_stable_row_ids=True)
    lance.dataset(uri).update_config({"lance.row_lineage.spill": "true", "lance.row_lineage.inline_max_bytes": "0"})
    lance.dataset(uri).delete("k % 3 = 0")
    before = lance.dataset(uri).version
    for apply in (False, True):
        with pytest.raises(UnsupportedFeatureError, match="spilled row lineage"):
            run_job(uri, "compact", apply=apply)
    assert lance.dataset(uri).version == before
    lance.dataset(uri).optimize.compact_files()  # what it would have led to
    with pytest.raises(UnsupportedFeatureError, match=r"spilled row lineage.*2048"):
        open_table(uri)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_merge_spills_no_row_lineage(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = kind(3, regions=2, base_rows=60, stable_row_ids=True).create(str(tmp_path / "t.lance"))
    lance.dataset(made.uri).update_config(
        {"lance.row_lineage.spill": "true", "lance.row_lineage.inline_max_bytes": "0"}
    )
    maintain(made)


def test_managed_blobs_are_refused_by_name(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([lance.blob_field("b")], metadata={"lance.blob.managed": "true"})
    rows = pa.table({"b": lance.blob_array([b"x" * 5_000_000])}, schema=schema)
    lance.write_dataset(rows, uri, data_storage_version="2.2")
    with pytest.raises(UnsupportedFeatureError, match=r"managed blobs, in _blobs/ \(feature flag 16384"):
        open_table(uri)


@pytest.mark.parametrize("mem_wal", [False, True])
def test_files_in_folders_that_are_not_known_are_kept(tmp_path: Path, mem_wal: bool) -> None:
    uri = Workload(3, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).uri if mem_wal else plain(tmp_path)
    others = ("_fri/1/map.lance", "_blobs/0101.blob", "_bt/1/tree", "_new/deep/file", "_other.bin")
    for name in others:
        path = Path(uri, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"bytes that a release to come needs")
        os.utime(path, (0, 0))
    run_job(uri, "expire", apply=True, **ALL_AT_ONCE)
    run_job(uri, "gc", apply=True)
    run_job(uri, "maintain", apply=True)
    assert [name for name in others if not Path(uri, name).exists()] == []


@pytest.mark.parametrize("setting", [None, "2.1"])
def test_the_option_precedes_the_setting(tmp_path: Path, setting: str | None) -> None:
    uri = plain(tmp_path)
    if setting is not None:
        lance.dataset(uri).update_config({VERSION_SETTING: setting})
    assert run_job(uri, "compact", storage_version="2.2").to_json()["decision"] == "compacted"
    assert (file_versions(uri), is_mixed(uri)) == ({(2, 2)}, True)
    assert sorted(lance.dataset(uri).to_table()["k"].to_pylist()) == [*range(40)]


def test_a_legacy_table_keeps_its_version(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"k": range(40)}), uri, max_rows_per_file=10, data_storage_version="legacy")
    before = lance.dataset(uri).version
    with pytest.raises(InvalidUsageError, match="V1 and V2 storage versions cannot be mixed"):
        run_job(uri, "compact", storage_version="2.2")
    assert lance.dataset(uri).version == before


def test_sizes_of_legacy_files_are_not_relied_on(tmp_path: Path) -> None:
    """pylance 7 recorded less than it wrote; such tables were damaged by ours."""
    uri = str(tmp_path / "t.lance")
    for mode in ("create", "append"):
        lance.write_dataset(pa.table({"k": range(40)}), uri, mode=mode, data_storage_version="legacy")
    (newest, _) = sorted(Path(uri, "_versions").glob("*.manifest"))
    version = decode_version_manifest(newest.read_bytes())
    for fragment in version.manifest.fragments:
        fragment.files[0].file_size_bytes -= 100
    newest.write_bytes(encode_version_manifest(version))
    assert run_job(uri, "verify").exit_code == 0
    assert run_job(uri, "expire", apply=True, **ALL_AT_ONCE).exit_code == 0
    assert [one["version"] for one in lance.dataset(uri).versions()] == [2]


@pytest.mark.parametrize("job", ["compact", "catchup"])
def test_a_schema_with_the_setting_of_managed_blobs_is_refused(tmp_path: Path, job: str) -> None:
    """Releases before 14 write it, and no flag; each commit by pylance 14 would set it."""
    uri = plain(tmp_path)
    newest = min(Path(uri, "_versions").glob("*.manifest"))
    version = decode_version_manifest(newest.read_bytes())
    version.manifest.schema_metadata["lance.blob.managed"] = b"true"
    newest.write_bytes(encode_version_manifest(version))
    before = contents(uri)
    for apply in (False, True):
        with pytest.raises(UnsupportedFeatureError, match=r"managed blobs, in _blobs/ \(feature flag 16384"):
            run_job(uri, job, apply=apply)
    assert contents(uri) == before
    assert run_job(uri, "expire", apply=True, **ALL_AT_ONCE).exit_code == 0


@pytest.mark.parametrize("asked", ["setting", "option"])
def test_mixed_versions_wait_for_older_releases(tmp_path: Path, asked: str) -> None:
    """pylance 7 to 11 refuse a table with the flag."""
    uri = plain(tmp_path)
    if asked == "setting":
        lance.dataset(uri).update_config({VERSION_SETTING: "2.2"})
    options = {} if asked == "setting" else {"storage_version": "2.2"}
    written_by(uri, "11.0.0")
    for apply in (False, True):
        with pytest.raises(
            UnsupportedFeatureError, match=r"flag 256, since Lance 12.*11\.0\.0 wrote version"
        ) as refused:
            run_job(uri, "compact", apply=apply, **options)
    assert "--allow-upgrade" in refused.value.remedy
    assert not is_mixed(uri)
    assert run_job(uri, "compact", allow_upgrade=True, **options).to_json()["decision"] == "compacted"
    assert is_mixed(uri)
