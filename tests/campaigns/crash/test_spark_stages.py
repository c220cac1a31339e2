"""Catch-up and verification on a standalone cluster: drivers, workers and executors are killed at every stage."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import psutil
import pytest

from memwal_ops import run_job
from tests.campaigns.crash.spark_events import files_left
from tests.support.spark_cluster import Cluster, kill, running, started
from tests.support.tables.plain import PlainTable
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(1800)
REBUILD = ("catchup", "--index", "vector_index", "--rebuild")
# How many folders of segments each stage has left once its tasks are done.
LEAVES = {"train": 0, "segments": 2, "merge": 3}
WEEK = timedelta(days=8).total_seconds()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def table(tmp_path: Path) -> PlainTable:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=4, rows=100)
    made.dataset.create_index("vector", "IVF_FLAT", num_partitions=2, name="vector_index")
    return made


def start(cluster: Cluster, state: Path, where: str, command: tuple[str, ...], uri: str) -> subprocess.Popen[str]:
    state.mkdir()
    name, *options = command
    return cluster.start(
        state / "driver.log", "-m", "tests.campaigns.crash.spark_stages", str(state), where, name, uri, *options
    )


def finish(driver: subprocess.Popen[str], state: Path) -> dict[str, Any]:
    """The report of a command that ends well."""
    try:
        out, _ = driver.communicate(timeout=PATIENCE)
    finally:
        end(driver)
    assert driver.returncode == 0, (out, (state / "driver.log").read_text()[-3000:])
    report: dict[str, Any] = json.loads(out)
    return report


def end(driver: subprocess.Popen[str]) -> None:
    """Kill what is left of a driver, whose Java may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    kill(driver)


def all_started(state: Path, tasks: int) -> list[str]:
    """Python processes of the tasks that wait: of each executor one."""
    deadline = time.monotonic() + PATIENCE
    while len(found := started(state)) < tasks:
        assert time.monotonic() < deadline, f"{found} of {tasks} tasks"
        time.sleep(0.05)
    return found


def segments_left(uri: str) -> set[str]:
    """Folders of segments that no version names."""
    named = {
        str(part.uuid)
        for one in lance.dataset(uri).versions()
        for index in lance.dataset(uri, version=one["version"]).describe_indices()
        for part in index.segments
    }
    return {path.name for path in Path(uri, "_indices").iterdir() if any(path.iterdir())} - named


def check_left_files_go(table: PlainTable) -> None:
    """What no version names is deleted once it is a week old, and nothing else."""
    left = segments_left(table.uri)
    assert left
    run_job(table.uri, "expire", apply=True)
    assert segments_left(table.uri) == left, "as it may belong to a commit in flight"
    then = time.time() - WEEK
    for name in left:
        for path in Path(table.uri, "_indices", name).iterdir():
            os.utime(path, (then, then))
    run_job(table.uri, "expire", apply=True)
    assert segments_left(table.uri) == set()
    assert run_job(table.uri, "verify", answers=True).decision == "healthy"
    assert table.read() == table.model


@pytest.mark.parametrize("where", ["train", "segments", "merge", "before-commit", "after-commit"])
def test_a_catch_up_whose_driver_is_killed(cluster: Cluster, table: PlainTable, tmp_path: Path, where: str) -> None:
    """The table is as it was, or as the run was to leave it; the next run ends well."""
    before = {one.name: one.segments for one in table.dataset.describe_indices()}
    state = tmp_path / "state"
    driver = start(cluster, state, where, REBUILD, table.uri)
    try:
        if where in LEAVES:
            all_started(state, 2 if where == "segments" else 1)
            driver.kill()
        assert driver.wait(PATIENCE) == -signal.SIGKILL, (state / "driver.log").read_text()[-3000:]
    finally:
        (state / "gate").touch()
        end(driver)
    after = {one.name: one.segments for one in table.dataset.describe_indices()}
    published = where == "after-commit"
    assert ([str(one.uuid) for one in after["vector_index"]] != [str(one.uuid) for one in before["vector_index"]]) == (
        published
    )
    assert len(segments_left(table.uri)) == (1 if where == "before-commit" else LEAVES.get(where, 0))
    assert run_job(table.uri, "verify", answers=True).decision == "healthy"
    assert table.read() == table.model

    [index] = run_job(table.uri, "catchup", indexes=("vector_index",), rebuild=True).indexes
    assert (index.decision, index.segments) == ("updated", 1)
    if where not in {"train", "after-commit"}:
        check_left_files_go(table)
    assert table.read() == table.model


@pytest.mark.parametrize("where", ["train", "segments", "merge"])
def test_a_catch_up_whose_executor_is_lost(cluster: Cluster, table: PlainTable, tmp_path: Path, where: str) -> None:
    """Its task runs again; what the lost attempt wrote is logged."""
    state = tmp_path / "state"
    driver = start(cluster, state, where, REBUILD, table.uri)
    try:
        [worker, *_] = all_started(state, 2 if where == "segments" else 1)
        java = next(one for one in psutil.Process(int(worker)).parents() if "java" in one.name())
        java.kill()
        (state / "gate").touch()
        report = finish(driver, state)
    finally:
        end(driver)
    [index] = report["indexes"]
    assert (index["decision"], index["engine"], index["segments"]) == ("updated", "spark", 1)
    assert index["stages"][where]["lost_attempts"] >= 1
    left = segments_left(table.uri)
    logged = " ".join(str(one["files"]) for one in files_left((state / "driver.log").read_text()))
    assert {one for one in left if one not in logged} == set()
    assert bool(left) == (where != "train")
    if left:
        check_left_files_go(table)


@pytest.mark.parametrize("whole", [False, True], ids=["executor", "worker"])
def test_a_verification_that_loses_a_process(
    cluster: Cluster, table: PlainTable, tmp_path: Path, *, whole: bool
) -> None:
    """It finds the same."""
    state = tmp_path / "state"
    expected = run_job(table.uri, "verify", answers=True, seed=7).to_json()
    driver = start(cluster, state, "ask", ("verify", "--answers", "--seed", "7"), table.uri)
    try:
        worker = all_started(state, 2)[0]
        if whole:
            cluster.kill_worker_of(worker)
        else:
            next(one for one in psutil.Process(int(worker)).parents() if "java" in one.name()).kill()
        (state / "gate").touch()
        report = finish(driver, state)
    finally:
        end(driver)
    assert (report["decision"], report["engine"]) == ("healthy", "spark")
    assert report["stages"]["ask"]["lost_attempts"] >= 1
    for name in ("queries", "rows_compared", "recall"):
        assert [one[name] for one in report["answers"]] == [one[name] for one in expected["answers"]]
