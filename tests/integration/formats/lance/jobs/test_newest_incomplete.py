"""Nothing is deleted below a newest version that is not complete: what is older may be all that is left."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.verification import check_own_files
from memwal_ops.errors import GenerationCorruptError, TableCorruptError
from memwal_ops.formats.lance.options import ExpireOptions, MaintainOptions
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import run_here
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import free, grow, make, merged, table_of
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.tables.lsm_table import LsmTable

NOW = ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True)


@pytest.fixture
def made(tmp_path: Path) -> PlainTable:
    table = PlainTable(str(tmp_path / "t.lance")).create(fragments=4, rows=20, index=True)
    table.delete(3)
    table.append(20)
    return table


def newest_data_file(uri: str) -> str:
    return f"data/{lance.dataset(uri).get_fragments()[-1].data_files()[0].path}"


def remove_data(made: PlainTable) -> str:
    path = newest_data_file(made.uri)
    Path(made.uri, path).unlink()
    return path


def cut_data(made: PlainTable) -> str:
    path = newest_data_file(made.uri)
    with Path(made.uri, path).open("r+b") as file:
        file.truncate(100)
    return path


def garble_data(made: PlainTable) -> str:
    """Of the size that the manifest records."""
    path = Path(made.uri, newest_data_file(made.uri))
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    return newest_data_file(made.uri)


def remove_deletions(made: PlainTable) -> str:
    (path,) = Path(made.uri, "_deletions").iterdir()
    path.unlink()
    return f"_deletions/{path.name}"


def remove_index(made: PlainTable) -> str:
    (folder,) = Path(made.uri, "_indices").iterdir()
    for path in folder.iterdir():
        path.unlink()
    return f"_indices/{folder.name}"


@pytest.mark.parametrize("damaged", [remove_data, cut_data, garble_data, remove_deletions, remove_index])
def test_expire_deletes_nothing(made: PlainTable, damaged: Callable[[PlainTable], str]) -> None:
    path = damaged(made)
    before = made.files()
    for apply in (False, True):
        with pytest.raises(TableCorruptError) as refused:
            run_job(made.uri, "expire", NOW, apply=apply)
        assert str(refused.value).startswith(path)
        assert "nothing is deleted" in str(refused.value)
        assert refused.value.exit_code == 9
    assert {one for one in made.files() if not one.startswith("_mem_wal_ops/")} == before
    assert not [*check_own_files(open_table(made.uri))]


@pytest.mark.parametrize("damaged", [remove_data, cut_data, remove_deletions, remove_index])
def test_it_is_not_shown_as_healthy(
    made: PlainTable, damaged: Callable[[PlainTable], str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Without an index, all rows are read."""
    assert run_job(made.uri, "inspect").to_json()["versions"]["damaged"] is None
    assert run_here(capfd, "check", "--nagios", made.uri).code == 0
    path = damaged(made)
    shown = run_job(made.uri, "inspect")
    assert shown.exit_code == 0
    assert shown.to_json()["versions"]["damaged"] == path
    assert f"PROBLEM: {path} " in " ".join(shown.describe().split())
    checked = run_here(capfd, "check", "--nagios", made.uri)
    assert (checked.code, path in checked.out) == ((0, False) if damaged is remove_index else (2, True))


def test_the_newest_version_that_reads_is_named_and_a_restored_file_ends_it(made: PlainTable) -> None:
    kept = Path(made.uri, newest_data_file(made.uri))
    data = kept.read_bytes()
    remove_data(made)
    with pytest.raises(TableCorruptError, match=f"Version {made.dataset.version - 1} is the newest that does not need"):
        run_job(made.uri, "expire", NOW, apply=True)
    kept.write_bytes(data)
    assert run_job(made.uri, "expire", NOW, apply=True).decision == "expired"
    assert made.read() == made.model


def test_a_run_with_nothing_to_delete_reports_it_too(made: PlainTable) -> None:
    path = remove_data(made)
    with pytest.raises(TableCorruptError, match=path):
        run_job(made.uri, "expire", apply=True)
    assert run_job(made.uri, "gc", apply=True).decision == "nothing_to_delete"


def test_maintain_where_compact_has_nothing_to_do(tmp_path: Path) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=4, rows=20)
    run_job(made.uri, "compact")
    remove_data(made)
    before = made.files()
    options = MaintainOptions(apply=True, expire=NOW)
    report = run_job(made.uri, "maintain", options, apply=True)
    steps = {step["step"]: step["decision"] for step in report.to_json()["steps"]}
    assert (steps["compact"], steps["expire"], steps["gc"]) == ("unchanged", "failed", "skipped")
    assert report.exit_code == 9
    assert {one for one in made.files() if one.startswith(("data/", "_versions/"))} >= {
        one for one in before if one.startswith(("data/", "_versions/"))
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gc_keeps_generations_that_the_missing_file_was_merged_from(tmp_path: Path, layout: type[LsmTable]) -> None:
    made = make(tmp_path, layout)
    free(made)
    before = Files(made.uri).listing("_mem_wal")
    path = newest_data_file(made.uri)
    data = Path(made.uri, path).read_bytes()
    Path(made.uri, path).unlink()
    for apply in (False, True):
        with pytest.raises(TableCorruptError, match=path):
            run_job(made.uri, "gc", IMMEDIATE, apply=apply)
    assert Files(made.uri).listing("_mem_wal") == before
    Path(made.uri, path).write_bytes(data)
    assert run_job(made.uri, "gc", IMMEDIATE, apply=True).decision == "deleted"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expire_keeps_versions_while_unmerged_rows_cannot_be_read(tmp_path: Path, layout: type[LsmTable]) -> None:
    made = make(tmp_path, layout, generations=1)
    merged(made)
    files = "_mem_wal/**/data/*" if layout is Workload else "_mem_wal/*/wal/*.lance"
    known = {*Path(made.uri).glob(files)}
    grow(made)
    path = min({*Path(made.uri).glob(files)} - known)
    data, before = path.read_bytes(), [one["version"] for one in lance.dataset(made.uri).versions()]
    path.write_bytes(data[:40])
    for apply in (False, True):
        with pytest.raises(GenerationCorruptError):
            run_job(made.uri, "expire", NOW, apply=apply)
    assert [one["version"] for one in lance.dataset(made.uri).versions()] == before
    path.write_bytes(data)
    assert run_job(made.uri, "expire", NOW, apply=True).decision == "expired"


def test_a_merge_and_an_expiry_beside_it(tmp_path: Path) -> None:
    """The version that the run opened is not the newest any more, and its files are gone: it is no damage."""
    made = make(tmp_path)
    free(made)
    opened = table_of(made)
    grow(made)
    merged(made)
    for _ in range(2):
        lance.dataset(made.uri).optimize.compact_files()
    free(made)
    assert run_job(opened, "expire", NOW).decision == "nothing_to_expire"
    assert run_job(opened, "expire", NOW, apply=True).decision == "nothing_to_expire"


@pytest.mark.parametrize("kind", ["branch", "clone"])
def test_a_file_of_the_parent_is_missing(made: PlainTable, tmp_path: Path, kind: str) -> None:
    run_job(made.uri, "compact")
    if kind == "branch":
        made.dataset.create_branch("dev")
        uri = f"{made.uri}/tree/dev"
    else:
        uri = str(tmp_path / "clone.lance")
        made.dataset.shallow_clone(uri, made.dataset.version)
    for number in range(2):
        lance.dataset(uri).update_metadata({"number": str(number)})
    path = remove_data(made)
    for apply in (False, True):
        with pytest.raises(TableCorruptError, match=path):
            run_job(uri, "expire", NOW, apply=apply)
