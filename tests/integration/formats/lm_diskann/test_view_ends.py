"""Readers, verify and jobs notice a view that lacks commits, and a store that does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import TableCorruptError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import view as views, wire
from memwal_ops.formats.lm_diskann.files import read_parameters
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.view import read_current
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import Killed, check_sound, killer, partly_merged

if TYPE_CHECKING:
    from collections.abc import Callable

STORE_LOG = "diskann_store.duckdb.wal"


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    partly_merged(template, vectors)
    with Index(template) as index:
        for row in range(3):
            index.delete([row])
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


def log_of(folder: str) -> Path:
    return max(Path(folder, "view").glob("*.log"))


def ends(log: Path) -> list[int]:
    """Where its frames begin."""
    data, at, found = np.frombuffer(log.read_bytes(), np.uint8), 0, []
    while (frame := wire.decode_frame(data[at:])) is not None:
        found.append(at)
        at += frame.length
    return found


def killed_before(folder: str, step: str, change: Callable[[Index], Any]) -> None:
    with pytest.raises(Killed), Index(folder, step=killer(step)) as index:
        change(index)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("left", [-1, -2, 0, "half"])
def test_readers_refuse_a_log_without_its_end(made: str, vectors: np.ndarray, left: Any) -> None:
    """Otherwise deleted rows would be returned."""
    log = log_of(made)
    reader = lm_diskann.open(made, read_only=True)
    os.truncate(log, log.stat().st_size - 64 if left == "half" else ends(log)[left])
    for search in (lambda: reader.search(vectors[:3], k=1), lambda: lm_diskann.open(made, read_only=True)):
        with pytest.raises(TableCorruptError, match=r"ends at epoch \d+; epoch \d+ was published"):
            search()
    report = run_job(made, "verify")
    assert (report.exit_code, set(report.to_json()["counts"])) == (9, {"view_damaged"})
    assert "ends at epoch" in run_job(made, "inspect").to_json()["view_error"]
    assert "ends at epoch" in run_job(made, "inspect").describe()
    assert [one.reason for one in open_table(made).summary().blocked] == ["table_corrupt"]
    assert run_job(made, "merge").exit_code == 0
    assert (reader.search(vectors[:3], k=1)[0] >= 3).all()
    reader.close()
    check_sound(made)


def test_a_writer_killed_before_its_frame_is_a_finding(made: str, vectors: np.ndarray) -> None:
    killed_before(made, "append the commit to the view", lambda index: index.delete([3]))
    with lm_diskann.open(made, read_only=True) as reader:
        assert reader.search(vectors[3:4], k=1)[0] == [[3]], "the epoch before, until the view is published"
    report = run_job(made, "verify")
    assert (report.exit_code, set(report.to_json()["counts"])) == (9, {"view_behind"})
    with lm_diskann.open(made) as index:
        assert index.republished
    assert 3 not in View(made).live_rows()
    check_sound(made)


def test_a_writer_killed_after_its_frame(made: str) -> None:
    killed_before(made, "record the epoch of the view", lambda index: index.delete([3]))
    parameters = read_parameters(made)
    assert read_current(made, parameters).epoch == View(made).epoch - 1
    check_sound(made)
    with lm_diskann.open(made) as index:
        assert not index.republished
    assert read_current(made, parameters).epoch == View(made).epoch


def test_a_folder_whose_writers_did_not_record_epochs(made: str, vectors: np.ndarray) -> None:
    current = read_current(made, read_parameters(made))
    data = wire.encode_frame(wire.CURRENT, current.number, 1, current.uuid, {})
    Path(made, "view/CURRENT").write_bytes(data)
    with lm_diskann.open(made, read_only=True) as reader:
        assert (reader.search(vectors[:3], k=1)[0] >= 3).all()
    check_sound(made)


def test_an_epoch_that_is_being_recorded(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(made, "view/CURRENT")
    whole = path.read_bytes()
    path.write_bytes(whole[:16] + bytes(8) + whole[24:])
    monkeypatch.setattr(views.time, "sleep", lambda _: path.write_bytes(whole))
    assert read_current(made, read_parameters(made)).epoch == View(made).epoch


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", ["log", "tail"])
def test_a_store_that_lacks_commits_is_not_published(made: str, vectors: np.ndarray, lost: str) -> None:
    """DuckDB takes the end that is missing for a commit that never was; the view is the only record of it."""
    torn = f"{made}.torn"
    with lm_diskann.open(made) as index:
        index.delete([3])
        index.delete([4])
        shutil.copytree(made, torn)  # with DuckDB's log
    log = Path(torn, STORE_LOG)
    assert log.stat().st_size
    os.truncate(log, 0 if lost == "log" else log.stat().st_size - 8)
    before = View(torn).live_rows()
    for act in (
        lambda: lm_diskann.open(torn), lambda: run_job(torn, "merge"), lambda: run_job(torn, "gc", apply=True),
        lambda: lm_diskann.snapshot(torn, f"{made}.copy"),
    ):  # fmt: skip
        with pytest.raises(TableCorruptError, match="lacks commits"):
            act()
    report = run_job(torn, "verify")
    assert (report.exit_code, set(report.to_json()["counts"]) & {"commits_missing"}) == (9, {"commits_missing"})
    assert run_job(torn, "repair", apply=True).to_json()["decision"] != "repaired"
    assert View(torn).live_rows() == before
    with lm_diskann.open(torn, read_only=True) as reader:
        assert (reader.search(vectors[:5], k=1)[0] >= 5).all()
