"""Spark merges on separate executor processes: tasks fail, linger and are killed; the driver dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import psutil
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from tests.campaigns.crash.spark_driver import LOADED
from tests.campaigns.crash.spark_events import files_left
from tests.support.spark import skip_without_spark
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.unreferenced import unreferenced
from tests.support.tables.workload import Workload
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

CLUSTER = "local-cluster[2,1,2048]"
PATIENCE = 1500.0
PLANS = ["", "shuffle-"]
"""Whether the driver resolves the keys, or executors do: what precedes a fault's name."""
# Separate JVMs, on whatever machine this runs; one driver for all tests of the cluster.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    """A backlog that gives every stage several tasks."""
    skip_without_spark()
    made = Workload(21, regions=3, base_rows=3000, columns="vector").create(str(tmp_path / "t.lance"))
    for _ in range(4):
        for at in range(3):
            made.put(list(range(at, 1140, 3)))
            made.delete([at + 3 * 400])
        made.flush()
    made.step(6)
    made.close()
    return made


class Driver:
    """A process of tests.campaigns.crash.spark_driver."""

    def __init__(self, master: str, folder: Path) -> None:
        self.said = folder / "stderr"
        # Not the first python3 of the PATH: the session must find its own.
        environment = {**os.environ, "PATH": "/usr/bin:/bin", "SPARK_WORKER_DIR": str(folder / "work")}
        with self.said.open("w") as stderr:
            self.process = psutil.Popen(
                [sys.executable, "-m", "tests.campaigns.crash.spark_driver", master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )

    def start(self, how: str, uri: str) -> None:
        self.process.stdin.write(f"{how} {uri}\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, self.said.read_text()[-4000:]
        report: dict[str, Any] = json.loads(line)
        return report

    def run(self, how: str, uri: str) -> dict[str, Any]:
        self.start(how, uri)
        return self.result()

    def end(self) -> None:
        if self.process.poll() is None:
            for one in [*self.process.children(recursive=True), self.process]:
                one.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def named(self, uri: str) -> str:
        """The files that its log says were left below ``uri``."""
        return " ".join(str(one["files"]) for one in files_left(self.said.read_text()) if one["table"] == uri)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    skip_without_spark()
    driver = Driver(CLUSTER, tmp_path_factory.mktemp("cluster"))
    yield driver
    driver.end()


def check(table: Workload) -> None:
    """Every row once, with its last write, and nothing left to merge."""
    assert_same(read_base(table.uri), table.model.expected(), seed=table.seed)
    assert dict(wire.progress(Files(table.uri, None))) == {
        region: max(wire.region_manifest(Files(table.uri, None), region).generations) for region in table.regions
    }


def check_named(table: Workload, driver: Driver) -> None:
    """What lost attempts had written is in no version, and the log names it."""
    check(table)
    left = unreferenced(table.uri)
    assert left, "the premise: the lost attempts had written their files"
    named = driver.named(table.uri)
    assert {path for path in left if path not in named} == set()


@pytest.mark.parametrize("plan", PLANS)
def test_separate_executors_leave_nothing_behind(table: Workload, cluster: Driver, plan: str) -> None:
    report = cluster.run(f"{plan}well", table.uri)
    assert (report["decision"], report["engine"]) == ("merged", "spark")
    assert report["passes"][0]["metrics"]["lost_attempts"] == 0
    check(table)
    assert unreferenced(table.uri) == set()


@pytest.mark.parametrize("how", ["task-fails", "worker-dies", "shuffle-task-fails", "shuffle-worker-dies"])
def test_attempts_that_fail_after_they_wrote(table: Workload, cluster: Driver, how: str) -> None:
    report = cluster.run(how, table.uri)
    assert report["decision"] == "merged"
    assert report["passes"][0]["metrics"]["lost_attempts"] > 1
    check_named(table, cluster)


@pytest.mark.parametrize("plan", PLANS)
def test_a_stage_that_spark_gives_up(table: Workload, cluster: Driver, plan: str) -> None:
    version = lance.dataset(table.uri).version
    said = cluster.run(f"{plan}stage-fails", table.uri)["error"]
    assert said.startswith("SparkJobFailedError: Spark failed in the stage 'write'")
    assert lance.dataset(table.uri).version == version
    left = unreferenced(table.uri)
    named = cluster.named(table.uri)
    assert left
    assert {path for path in left if path not in named} == set()
    assert cluster.run("well", table.uri)["decision"] == "merged"
    check(table)


def kill_executor(cluster: Driver, uri: str) -> int:
    """Kill the executor whose task waits; the id of its Python worker."""
    waits = Path(f"{uri}.waits")
    worker, daemon = map(int, until(lambda: waits.exists() and waits.read_text(), PATIENCE).split())
    executor = psutil.Process(daemon).parent()
    assert executor is not None
    assert "CoarseGrainedExecutorBackend" in " ".join(executor.cmdline())
    assert executor in cluster.process.children(recursive=True)
    executor.kill()
    return worker


@pytest.mark.parametrize("plan", PLANS)
def test_an_executor_that_is_killed_while_it_writes(table: Workload, cluster: Driver, plan: str) -> None:
    """With it go, where keys were shuffled, its share of that and of the kept winners: earlier stages run again."""
    cluster.start(f"{plan}task-waits", table.uri)
    worker = kill_executor(cluster, table.uri)
    report = cluster.result()
    assert report["decision"] == "merged"
    assert report["passes"][0]["metrics"]["lost_attempts"] > 0
    check_named(table, cluster)
    until(lambda: not psutil.pid_exists(worker), PATIENCE)


class Loaded:
    """A table with rows in its base, in a generation, and none of the keys that are loaded."""

    def __init__(self, path: Path) -> None:
        skip_without_spark()
        table = Workload(3, regions=1, base_rows=30).create(str(path / "t.lance"))
        table.put([1, 31])
        table.close()
        self.uri, self.before = table.uri, read_base(table.uri)
        self.version = lance.dataset(self.uri).version

    def check_rows(self, *, loaded: bool) -> None:
        """All once, or none."""
        dataset = lance.dataset(self.uri)
        assert dataset.version == self.version + loaded
        keys = dataset.to_table(columns=["id"]).column("id").to_pylist()
        assert sorted(keys) == sorted([*(key for (key,) in self.before), *(range(*LOADED) if loaded else ())])

    def check(self, driver: Driver, *, loaded: bool, left: bool) -> None:
        """All rows once, or none; files of no version are named."""
        self.check_rows(loaded=loaded)
        files = unreferenced(self.uri)
        assert bool(files) is left
        named = driver.named(self.uri)
        assert {path for path in files if path not in named} == set()


@pytest.mark.parametrize("how", ["load-well", "load-task-fails", "load-worker-dies", "load-stage-fails"])
def test_a_load_whose_tasks_fail_after_they_wrote(tmp_path: Path, cluster: Driver, how: str) -> None:
    table = Loaded(tmp_path)
    report = cluster.run(how, table.uri)
    if how == "load-stage-fails":
        assert report["error"].endswith("every attempt fails")
        table.check(cluster, loaded=False, left=True)
        assert cluster.run("load-well", table.uri) == {"version": table.version + 1}
    else:
        assert report == {"version": table.version + 1}
    table.check(cluster, loaded=True, left=how != "load-well")


def test_a_load_whose_executor_is_killed_while_it_writes(tmp_path: Path, cluster: Driver) -> None:
    """With it go its share of the rows that were kept since their keys were compared: they are read again."""
    table = Loaded(tmp_path)
    cluster.start("load-task-waits", table.uri)
    kill_executor(cluster, table.uri)
    assert cluster.result() == {"version": table.version + 1}
    table.check(cluster, loaded=True, left=True)


@pytest.mark.parametrize(("how", "landed"), [("load-dies-before-commit", False), ("load-dies-after-commit", True)])
def test_a_load_whose_driver_dies(tmp_path: Path, how: str, landed: bool) -> None:
    """Run again, it loads all; or it says that the keys are there."""
    table = Loaded(tmp_path)
    driver = Driver("local[2]", tmp_path)
    try:
        driver.start(how, table.uri)
        assert driver.process.wait(PATIENCE) == 9
    finally:
        driver.end()
    table.check_rows(loaded=landed)
    again = Driver("local[2]", tmp_path)
    try:
        report = again.run("load-well", table.uri)
    finally:
        again.end()
    if landed:
        assert report["error"].startswith("DuplicateKeysError: Of the keys, 2,000 are in the table")
    else:
        assert report == {"version": table.version + 1}
        assert unreferenced(table.uri), "what the dead one wrote stays, in no version"
    table.check_rows(loaded=True)


@pytest.mark.parametrize("plan", PLANS)
def test_speculation_when_a_task_lingers(table: Workload, cluster: Driver, plan: str) -> None:
    """After those who kill executors: from here on, another host takes over what takes longer than two seconds."""
    report = cluster.run(f"{plan}task-lingers", table.uri)
    if not Path(f"{table.uri}.waits").exists():
        pytest.skip("a busy machine: no first attempt came to the place where it hangs before it was taken over")
    assert report["decision"] == "merged"
    assert report["passes"][0]["metrics"]["lost_attempts"] > 0
    check_named(table, cluster)


@pytest.mark.parametrize(("how", "landed"), [("dies-before-commit", False), ("dies-after-commit", True)])
def test_a_driver_that_dies(
    table: Workload, how: str, landed: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Last of this module: one of them takes the cluster with it, and no process of it stays."""
    driver = Driver("local[2]", tmp_path) if landed else request.getfixturevalue("cluster")
    version = lance.dataset(table.uri).version
    try:
        driver.start(how, table.uri)
        started = until(lambda: driver.process.children(recursive=True), PATIENCE)
        while driver.process.poll() is None:
            started = driver.process.children(recursive=True) or started
            time.sleep(0.05)
        assert driver.process.wait() == 9
        _, alive = psutil.wait_procs(started, timeout=PATIENCE)
        assert alive == []
    finally:
        driver.end()
    assert lance.dataset(table.uri).version == version + landed
    report = merge.apply(open_table(table.uri), merge.MergeOptions())
    assert report.decision == ("nothing_to_merge" if landed else "merged")
    check(table)
