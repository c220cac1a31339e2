"""repair of an index folder publishes the view again from the store, and guesses nothing else."""

from __future__ import annotations

import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.leases import Holder, acquire
from memwal_ops.errors import TableCorruptError
from memwal_ops.formats.lm_diskann.errors import RESTORE
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.store import NAME
from tests.support.lm_diskann.folders import partly_merged
from tests.support.run_cli import contents, run_here


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    partly_merged(template, vectors)
    with Index(template) as index:
        index.delete(np.array([7]))
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


def found(folder: str, vectors: np.ndarray) -> Any:
    with Index(folder, read_only=True) as index:
        return index.search(vectors[[3, 7, 320]], 5)[0].tolist()


def files(folder: str) -> dict[str, Any]:
    return {path: state for path, state in contents(folder).items() if path != "writer.lock"}


def checks(folder: str) -> set[str]:
    return {one["check"] for one in run_job(folder, "verify").to_json()["findings"]}


def cut_current(folder: str) -> None:
    Path(folder, "view/CURRENT").write_bytes(b"cut")


def no_base(folder: str) -> None:
    for path in Path(folder, "view").glob("*.base"):
        path.unlink()


def zeros(folder: str) -> None:
    for path in Path(folder, "view").glob("*.base"):
        path.write_bytes(bytes(path.stat().st_size))


def no_view(folder: str) -> None:
    shutil.rmtree(Path(folder, "view"))


def behind(folder: str) -> None:
    """The log is lost."""
    for path in Path(folder, "view").glob("*.log"):
        path.write_bytes(b"")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("harm", [cut_current, no_base, zeros, no_view, behind])
def test_the_view_is_made_again(made: str, vectors: np.ndarray, harm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = found(made, vectors)
    harm(made)
    assert checks(made) & {"view_damaged", "view_behind"}
    was = files(made)
    planned = run_here(capfd, "repair", made, "--json")
    assert (planned.code, planned.document["decision"]) == (0, "planned")
    assert files(made) == was
    done = run_here(capfd, "repair", made, "--apply", "--json")
    assert (done.code, done.document["decision"]) == (0, "repaired")
    assert done.document["decisions"] == []
    assert checks(made) == set()
    assert found(made, vectors) == before
    assert run_here(capfd, "repair", made, "--apply", "--json").document["decision"] == "nothing_to_repair"


def test_a_merge_does_it_as_well(made: str, vectors: np.ndarray) -> None:
    before = found(made, vectors)
    cut_current(made)
    assert run_job(made, "merge").to_json()["republished"]
    assert found(made, vectors) == before


@pytest.mark.long
def test_a_damaged_store_is_for_a_person(made: str) -> None:
    with duckdb.connect(str(Path(made, NAME))) as store:
        store.execute("DELETE FROM lmd_slots WHERE node_id = 5")
    report = run_job(made, "repair", apply=True).to_json()
    assert report["decision"] == "decision_needed"
    assert report["fixes"] == []
    assert all(one["choices"] for one in report["decisions"])
    assert {one["check"] for one in report["decisions"]} >= {"view_differs"} or checks(made) - {"view_differs"}
    before = contents(made)
    cut_current(made)
    damaged = {one["check"]: one["why"] for one in run_job(made, "repair", apply=True).to_json()["decisions"]}
    assert "The store has findings itself" in damaged["view_damaged"]
    assert before.keys() == contents(made).keys()


@pytest.mark.parametrize("job", ["verify", "repair", "merge", "inspect", "gc"])
def test_a_missing_graph_is_for_a_person(made: str, job: str) -> None:
    Path(made, "graph.lmd").unlink()
    with pytest.raises(TableCorruptError, match=r"graph\.lmd") as error:
        run_job(made, job)
    assert error.value.remedy == RESTORE


def test_an_expired_lease_is_released(made: str) -> None:
    acquire(open_table(made).store, "merge", Holder("1", "op@host"), timedelta(seconds=1))
    time.sleep(1.2)
    assert checks(made) == {"lease_expired"}
    assert run_job(made, "repair", apply=True).decision == "repaired"
    assert checks(made) == set()
