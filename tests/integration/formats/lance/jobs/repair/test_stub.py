"""``repair`` of what an interrupted drop leaves: deleted if it cannot have rows, else kept and shown."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.leases import LEASES_FOLDER
from memwal_ops.core.registry import find_stub
from memwal_ops.errors import NotALanceTableError, TableNotFoundError, TableReplacedError
from tests.support.run_cli import contents, run_here
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from collections.abc import Callable

WEEK = 7 * 86400


def age(folder: Path, seconds: float) -> None:
    """Every file and folder counts as that old."""
    then = time.time() - seconds
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (then, then))


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A table of which a drop deleted all but the transactions."""
    uri = tmp_path / "orders.lance"
    PlainTable(str(uri)).create()
    for folder in ("_versions", "data"):
        shutil.rmtree(uri / folder)
    leases = uri / LEASES_FOLDER / "merge"  # a service took them before it saw that the table is gone
    leases.mkdir(parents=True)
    (leases / f"{1:020}.json").write_text("{}")
    age(uri, WEEK + 60)
    return uri


def test_a_stub_is_planned_and_then_deleted(stub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(str(stub))
    plan = run_here(capfd, "repair", str(stub), "--json")
    assert (plan.code, plan.document["decision"]) == (0, "planned")
    assert contents(str(stub)) == before
    done = run_here(capfd, "repair", str(stub), "--apply", "--json")
    assert (done.code, done.document["decision"]) == (0, "repaired")
    assert not stub.exists()
    with pytest.raises(TableNotFoundError):
        run_job(str(stub), "repair", apply=True)


def test_a_folder_without_any_file_goes_too(tmp_path: Path) -> None:
    empty = tmp_path / "orders.lance"
    (empty / "data").mkdir(parents=True)
    age(empty, WEEK + 60)
    assert run_job(str(empty), "repair", apply=True).decision == "repaired"
    assert not empty.exists()


def with_rows(stub: Path) -> None:
    PlainTable(str(stub) + "2").create()
    shutil.copytree(str(stub) + "2/data", stub / "data")
    age(stub, WEEK + 60)


def declared(stub: Path) -> None:
    (stub / ".lance-reserved").touch()
    age(stub, WEEK + 60)


def young(stub: Path) -> None:
    age(stub, WEEK - 60)


def touched(stub: Path) -> None:
    (stub / "data").mkdir()


@pytest.mark.parametrize(
    ("change", "why", "code"),
    [
        (with_rows, "cannot be proven", 9),
        (declared, "catalog's entry", 0),
        (young, "creation may be in progress", 0),
        (touched, "creation may be in progress", 0),
    ],
)
def test_what_may_be_needed_is_kept(stub: Path, change: Callable[[Path], None], why: str, code: int) -> None:
    change(stub)
    before = contents(str(stub))
    for apply in (False, True):
        report = run_job(str(stub), "repair", apply=apply)
        assert (report.decision, report.exit_code) == ("decision_needed", code)
        assert why in " ".join(report.describe().split())
        assert contents(str(stub)) == before


def test_no_other_job_takes_it_for_a_table(stub: Path) -> None:
    with pytest.raises(NotALanceTableError):
        open_table(str(stub))
    for job in ("expire", "gc", "verify"):
        with pytest.raises(NotALanceTableError):
            run_job(str(stub), job)
    found = open_table(str(stub), job="repair")
    with pytest.raises(NotALanceTableError, match="is a stub") as refused:
        run_job(found, "gc", apply=True)
    assert refused.value.remedy.endswith("The jobs that apply: repair.")


def test_a_table_that_is_created_meanwhile_is_not_touched(stub: Path) -> None:
    found = open_table(str(stub), job="repair")
    made = PlainTable(str(stub)).create()
    with pytest.raises(TableReplacedError):
        run_job(found, "repair", apply=True)
    assert lance.dataset(made.uri).count_rows() > 0


def test_a_folder_of_another_name_is_no_stub(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").touch()
    assert find_stub(tmp_path / "notes") is None
    with pytest.raises(NotALanceTableError):
        run_job(str(tmp_path / "notes"), "repair")


def test_a_table_that_lost_its_versions_is_no_folder_to_leave_out(tmp_path: Path) -> None:
    """Its rows are there: the remedy is not to exclude it, but what can be done."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": [1]}), uri)
    shutil.rmtree(tmp_path / "t.lance/_versions")
    with pytest.raises(NotALanceTableError, match="no version, but 1 file that may have rows") as refused:
        open_table(uri)
    assert "memwal-ops repair" in refused.value.remedy
    assert "exclude" not in refused.value.remedy
