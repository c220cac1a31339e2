"""A damaged deletion file is named by every command, ends no process, hides no row, and nothing is deleted below it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import memwal, open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.core.maintain import scan_table
from memwal_ops.errors import GenerationCorruptError, MemwalOpsError, TableCorruptError, VersionGoneError
from memwal_ops.formats.lance.options import ExpireOptions, MaintainOptions
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest
from tests.integration.formats.lance.log.test_region_writer import SCHEMA, writer
from tests.support.run_cli import contents, run_here
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path: Path) -> None:
    """As a store that returns wrong bytes, of the right number."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def aborting(path: Path) -> None:
    """One bit: pylance allocates as much as the footer of an Arrow file claims, and the process ends by SIGABRT."""
    data = bytearray(path.read_bytes())
    data[-22] ^= 1 << 6
    path.write_bytes(data)


HARMS = [emptied, cut, zeroed, aborting]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A plain table with an index that is behind, and a deletion file."""
    dataset = lance.write_dataset(pa.table({"id": range(1000)}), str(tmp_path / "t.lance"))
    dataset.create_scalar_index("id", "BTREE")
    dataset.delete("id % 11 = 3")
    lance.write_dataset(pa.table({"id": range(1000, 1010)}), dataset.uri, mode="append")
    return str(dataset.uri)


def deletion_file(uri: str) -> Path:
    [path] = Path(uri, "_deletions").iterdir()
    return path


@pytest.mark.parametrize("harm", HARMS)
def test_every_command_names_the_file(
    uri: str, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(capfd, "check", "--nagios", uri).code == 0
    path = deletion_file(uri)
    harm(path)
    name, before = f"_deletions/{path.name}", contents(uri)

    for options in ({}, {"deep": True}, {"answers": True}):
        report = run_job(uri, "verify", **options)
        errors = [found for found in report.to_json()["findings"] if found["severity"] == "error"]
        assert ({found["place"] for found in errors}, report.exit_code) == ({name}, 9)
    assert run_job(uri, "inspect").to_json()["versions"]["damaged"] == name
    checked = run_here(capfd, "check", "--nagios", uri)
    assert (checked.code, name in checked.out) == (2, True)
    assert {job for job, error in scan_table(open_table(uri)).errors if name in str(error)} >= {"compact", "expire"}
    with pytest.raises(VersionGoneError, match=name):
        take_hold(table := open_table(uri), table.revision, timedelta(hours=1))

    for job, options in (("compact", {"deleted_fraction": 0.0}), ("expire", {}), ("erase", {"where": "id = 5"})):
        with pytest.raises(TableCorruptError, match=name):
            run_job(uri, job, **options)
    caught_up = run_job(uri, "catchup", min_uncovered_rows=1)
    assert (caught_up.exit_code, name in caught_up.describe().replace("\n", "").replace(" ", "")) == (9, True)
    report = run_job(uri, "maintain", MaintainOptions(apply=True, expire=NOW), apply=True)
    assert report.exit_code == 9, "damage comes before an index that is behind"
    kept = {file: data for file, data in contents(uri).items() if not file.startswith("_mem_wal_ops/")}
    assert kept == before


def test_an_older_version_is_the_way_out(uri: str) -> None:
    emptied(deletion_file(uri))
    lance.dataset(uri, version=2).restore()  # as repair says
    assert run_job(uri, "verify").exit_code == 0
    assert lance.dataset(uri).count_rows() == 1000
    with pytest.raises(VersionGoneError, match="_deletions/"):
        take_hold(open_table(uri), 3, timedelta(hours=1))


@pytest.mark.parametrize("keeper", ["tag", "branch", "hold", None])
def test_a_version_that_is_kept_and_cannot_be_read_is_an_error(uri: str, keeper: str | None) -> None:
    if keeper == "tag":
        lance.dataset(uri).tags.create("release", 3)
    elif keeper == "branch":
        lance.dataset(uri).create_branch("side", 3)
    elif keeper == "hold":
        take_hold(open_table(uri), 3, timedelta(hours=1))
    lance.dataset(uri, version=2).restore()
    assert run_job(uri, "verify").exit_code == 0
    cut(deletion_file(uri))
    report = run_job(uri, "verify")
    found = {one["place"]: one for one in report.to_json()["findings"] if one["check"] == "version_unreadable"}
    assert found["version 3"]["severity"] == ("warning" if keeper is None else "error")
    assert report.exit_code == (0 if keeper is None else 9)
    assert keeper is None or keeper in found["version 3"]["consequence"]


def test_files_of_which_no_size_is_recorded_are_opened(tmp_path: Path) -> None:
    """Files of data and of an index, as older releases listed them."""
    uri = str(tmp_path / "t.lance")
    rows = pa.table({"id": range(100)})
    lance.write_dataset(rows, uri, data_storage_version="legacy").create_scalar_index("id", "BTREE")
    table = open_table(uri)
    for entry in table.manifest.index_entries:
        entry.ClearField("files")
    Path(uri, table.file.path).write_bytes(encode_version_manifest(table.manifest))
    for path in (*Path(uri, "data").iterdir(), *Path(uri, "_indices").glob("*/page_data.lance")):
        data = path.read_bytes()
        path.write_bytes(data[:-20])
        with pytest.raises(TableCorruptError, match=path.name):
            run_job(uri, "expire", NOW, apply=True)
        path.write_bytes(data)
    assert run_job(uri, "expire", NOW, apply=True).decision == "expired"


@pytest.fixture
def logged(tmp_path: Path) -> Workload:
    """A region with a generation in which a row of a key supersedes an earlier one."""
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    made.put([1, 2, 50])
    made.put([1, 2])
    made.flush()
    made.close()
    return made


@pytest.fixture(params=["shard", "region"])
def waiting(request: pytest.FixtureRequest, logged: Workload, tmp_path: Path) -> str:
    """The same table; or one in the region layout, whose rows are in the log."""
    if request.param == "shard":
        return logged.uri
    uri = str(tmp_path / "region.lance")
    lance.write_dataset(SCHEMA.empty_table(), uri)
    memwal.create_mem_wal(uri)
    with writer(uri) as region:
        region.put(pa.Table.from_pylist([{"id": key, "n": key} for key in (1, 2, 1)], schema=SCHEMA))
    return uri


@pytest.mark.parametrize("harm", [cut, zeroed])
def test_a_generation_with_a_damaged_deletion_file_is_not_merged_and_not_read(
    waiting: str, harm: Callable[[Path], None]
) -> None:
    assert run_job(waiting, "verify").exit_code == 0
    path = min(Path(waiting, "_mem_wal").glob("*/*_gen_1/_deletions/*"))
    harm(path)
    version = lance.dataset(waiting).version
    report = run_job(waiting, "merge")
    (blocked,) = report.to_json()["blocked"]
    assert (report.exit_code, blocked["reason"], path.name in blocked["detail"]) == (10, "generation_corrupt", True)
    assert lance.dataset(waiting).version == version
    errors = [found for found in run_job(waiting, "verify").to_json()["findings"] if found["severity"] == "error"]
    assert [path.name in found["evidence"] for found in errors] == [True]
    with pytest.raises(GenerationCorruptError, match=path.name):
        memwal.read(waiting).scan().to_table()


def test_a_base_with_a_damaged_deletion_file_is_not_merged_into_and_not_read(logged: Workload) -> None:
    run_job(logged.uri, "merge")
    logged.put([3])
    logged.flush()
    logged.close()
    path = min(Path(logged.uri, "_deletions").iterdir())
    zeroed(path)
    version = lance.dataset(logged.uri).version
    for act in (lambda: run_job(logged.uri, "merge"), lambda: memwal.read(logged.uri).scan().to_table()):
        with pytest.raises(MemwalOpsError, match=path.name) as refused:
            act()
        assert refused.value.exit_code == 9
    assert lance.dataset(logged.uri).version == version
