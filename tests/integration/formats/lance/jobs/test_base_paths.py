"""A branch and a shallow clone need files of another table: one that is gone there is damage of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import StorageError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.retention.damage import name_damage
from tests.integration.formats.lance.jobs.test_damage import cut, emptied, inverted
from tests.support.run_cli import contents, run_here

if TYPE_CHECKING:
    from collections.abc import Callable

DATA, DELETION, INDEX = "data/*.lance", "_deletions/*.arrow", "_indices/*/page_data.lance"


HARMS = (Path.unlink, cut, emptied, inverted)


def rows(first: int, number: int) -> pa.Table:
    field = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    return pa.table({"id": range(first, first + number)}, pa.schema([field]))


@pytest.fixture(params=["branch", "clone"])
def child(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A table with MemWAL that reads files of another one: its URI, and the folder of the other one."""
    parent = str(tmp_path / "parent.lance")
    lance.write_dataset(rows(0, 20), parent)
    lance.dataset(parent).delete("id = 3")
    lance.dataset(parent).create_scalar_index("id", "BTREE")
    lance.dataset(parent).initialize_mem_wal()
    source = lance.dataset(parent)
    if request.param == "branch":
        source.create_branch("dev")
        return f"{parent}/tree/dev", Path(parent)
    clone = str(tmp_path / "clone.lance")
    source.shallow_clone(clone, source.version)
    return clone, Path(parent)


def found(uri: str, **options: Any) -> list[tuple[str, str]]:
    report = run_job(uri, "verify", **options).to_json()
    return [(one["check"], one["place"]) for one in report["findings"] if one["severity"] == "error"]


def test_a_whole_one_is_healthy(child: tuple[str, Path]) -> None:
    uri, parent = child
    before = contents(str(parent))
    assert found(uri) == []
    assert run_job(uri, "merge").decision == "nothing_to_merge"
    assert contents(str(parent)) == before


@pytest.mark.parametrize(
    ("pattern", "harm"),
    # A deletion file has no footer, and no size is recorded: --deep reads it.
    [
        (DELETION, Path.unlink),
        *((one, harm) for one in (DATA, INDEX) for harm in (Path.unlink, cut, emptied, inverted)),
    ],
)
def test_verify_names_the_file(child: tuple[str, Path], pattern: str, harm: Callable[[Path], None]) -> None:
    uri, parent = child
    (damaged,) = parent.glob(pattern)
    harm(damaged)
    assert found(uri) == [("base_file", str(damaged))]


@pytest.mark.parametrize("pattern", [DATA, DELETION])
def test_a_merge_with_nothing_to_do_does_not_pass_over_it(
    child: tuple[str, Path], pattern: str, capfd: pytest.CaptureFixture[str]
) -> None:
    uri, parent = child
    (damaged,) = parent.glob(pattern)
    damaged.unlink()
    for options in ([], ["--dry-run"]):
        done = run_here(capfd, "merge", uri, *options)
        assert done.code == TableCorruptError.exit_code
        assert str(damaged) in "".join(done.err.split("\n  "))


@pytest.mark.parametrize("harm", [Path.unlink, cut])
def test_an_unspecific_error_of_pylance_gets_the_name(child: tuple[str, Path], harm: Callable[[Path], None]) -> None:
    uri, parent = child
    (damaged,) = parent.glob(DATA)
    harm(damaged)
    named = name_damage(open_table(uri), StorageError("Invalid range 0..1436 for object of size 718 bytes"))
    assert isinstance(named, TableCorruptError)
    assert str(damaged) in str(named)


def test_an_older_version_that_only_needs_a_file_elsewhere(child: tuple[str, Path]) -> None:
    uri, parent = child
    older = open_table(uri).revision
    lance.write_dataset(rows(0, 5), uri, mode="overwrite")
    (damaged,) = parent.glob(DATA)
    damaged.unlink()
    report = run_job(uri, "inspect").to_json()
    assert {"version": older, "missing": str(damaged)} in report["versions"]["unreadable"]
    table = open_table(uri)
    assert table.format.missing_of(table, older) == str(damaged)


def test_a_branch_that_was_created_by_a_relative_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its base path is relative, and its files are those of its table."""
    monkeypatch.chdir(tmp_path)
    lance.write_dataset(rows(0, 20), "t.lance", max_rows_per_file=10)
    lance.dataset("t.lance").create_scalar_index("id", "BTREE")
    lance.dataset("t.lance").create_branch("dev")
    uri = str(tmp_path / "t.lance" / "tree" / "dev")
    lance.write_dataset(rows(20, 5), lance.dataset("t.lance").checkout_version(("dev", None)), mode="append")
    for job in ("inspect", "compact", "catchup", "verify"):
        assert run_job(uri, job).exit_code == 0, job
    assert run_job(uri, "gc", apply=True).exit_code == 0
    assert lance.dataset(uri).count_rows("id >= 0") == 25
    monkeypatch.chdir(tmp_path.parent)
    assert run_job(uri, "inspect").exit_code == 0


def test_a_clone_that_was_created_by_a_relative_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lance.write_dataset(rows(0, 20), "t.lance").shallow_clone("clone.lance", 1)
    with pytest.raises(UnsupportedFeatureError, match="is relative: Lance looks for it below the folder") as refused:
        run_job(str(tmp_path / "clone.lance"), "inspect")
    assert "absolute" in refused.value.remedy
