"""A table that pylance 13 writes, on which LanceDB 0.40 is built, and that our jobs maintain: no key stands twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import lance
import pytest

from memwal_ops import run_job
from memwal_ops.core.registry import open_table
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from tests.support.tables.stale_indexes import index_versions
from tests.system.releases.environments import python_with, run

RELEASE = "13.0.0"
# Its environment alone takes 30 s of processor time, and release 13 does not change.
pytestmark = pytest.mark.long
USE = Path(__file__).with_name("use_stable_ids.py")
ROWS = 8_050


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(RELEASE, tmp_path_factory.mktemp("release13"), "MEMWAL_OPS_PYLANCE_13_PYTHON")


@pytest.fixture
def uri(python: str, tmp_path: Path) -> str:
    """A table of release 13, whose index lacks 50 rows that are merged."""
    made = str(tmp_path / "t.lance")
    assert RELEASE in run(python, USE, "make", made)
    assert run_job(made, "merge").decision == "merged"
    return made


def check(uri: str) -> None:
    """Every key once, the changed ones with their last value; verify finds no error."""
    found = lance.dataset(uri).scanner(use_scalar_index=False).to_table().to_pydict()
    twice = [key for key, count in Counter(found["id"]).items() if count > 1]
    assert twice == []
    assert len(found["id"]) == ROWS - 1
    assert Counter(found["val"]) == {"old": 8_000 - 1 - 20, "new": 50, "changed": 20}


def test_its_index_stays_one_that_it_maintains(python: str, uri: str) -> None:
    """catchup leaves the index to release 13, which brings it up to date; merges use it."""
    report = run_job(uri, "catchup")
    assert report.to_json()["indexes"][0]["error"]["reason"] == "index_upgrade_refused"
    assert index_versions(uri)["by_id"] == 0
    run(python, USE, "optimize", uri)
    table = open_table(uri)
    assert coverage(base_indexes(table)["by_id"].covered, table.manifest).complete
    assert run_job(uri, "catchup").decision in ("unchanged", "caught_up")
    run(python, USE, "compact", uri)
    merged = run_job(uri, "merge")
    assert [one["use_index"] for one in merged.to_json()["passes"]] == [True]
    check(uri)
    assert run_job(uri, "verify").exit_code == 0


def test_an_index_that_its_compaction_left_without_rows(python: str, uri: str) -> None:
    """Where it was upgraded all the same: the merge does not ask it, and the next catch-up builds it anew."""
    assert run_job(uri, "catchup", allow_upgrade=True).decision == "caught_up"
    run(python, USE, "compact", uri)
    assert lance.dataset(uri).count_rows("id < 900") == 0, "release 13 remaps it; then this is no longer needed"
    assert run_job(uri, "verify").exit_code == 9
    merged = run_job(uri, "merge")
    assert [one["use_index"] for one in merged.to_json()["passes"]] == [False]
    check(uri)
    assert run_job(uri, "catchup").decision == "caught_up"
    assert lance.dataset(uri).count_rows("id < 900") == 899
    assert run_job(uri, "verify").exit_code == 0
