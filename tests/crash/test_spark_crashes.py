"""Spark merges on separate executor processes: tasks fail, linger and are killed; the driver dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import psutil
import pytest

from memwal_ops import open_table
from memwal_ops.jobs import merge as job
from tests.spark import skip_without_spark
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLUSTER = "local-cluster[2,1,1024]"
PATIENCE = 500.0
pytestmark = pytest.mark.timeout(600)  # separate JVMs, on whatever machine this runs


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


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[str]:
    """A standalone cluster whose two workers go by different hosts: Spark speculates on another host only."""
    skip_without_spark()
    import pyspark

    home = str(Path(pyspark.__file__).parent)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"spark://127.0.0.1:{free.getsockname()[1]}"
    port = master.rsplit(":", 1)[1]
    deploy = "org.apache.spark.deploy"
    commands = [[f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", "0"]]
    commands += [
        [f"{deploy}.worker.Worker", "--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0", master]
        for host in ("127.0.0.2", "127.0.0.3")
    ]
    environment = {**os.environ, "SPARK_HOME": home, "SPARK_WORKER_DIR": str(tmp_path / "work")}
    with (tmp_path / "cluster.log").open("w") as log:
        started = [
            psutil.Popen([f"{home}/bin/spark-class", *command], env=environment, stdout=log, stderr=log)
            for command in commands
        ]
        try:
            yield master
        finally:
            for one in started:
                for process in [*one.children(recursive=True), one]:
                    process.kill()
                one.wait()


class Driver:
    """One run of tests.crash.spark_driver."""

    def __init__(self, how: str, master: str, uri: str) -> None:
        self.said = Path(f"{uri}.{how}.stderr")
        self.printed = Path(f"{uri}.{how}.stdout")
        with self.said.open("w") as stderr, self.printed.open("w") as stdout:
            self.process = psutil.Popen(
                [sys.executable, "-m", "tests.crash.spark_driver", how, master, uri],
                stdout=stdout,
                stderr=stderr,
                # Not the first python3 of the PATH: the session must find its own.
                env={**os.environ, "PATH": "/usr/bin:/bin"},
            )

    def result(self) -> dict[str, Any]:
        code = self.wait()
        assert code == 0, self.said.read_text()[-4000:]
        report: dict[str, Any] = json.loads(self.printed.read_text().splitlines()[-1])
        return report

    def wait(self) -> int:
        try:
            return int(self.process.wait(PATIENCE))
        except psutil.TimeoutExpired:
            self.end()
            raise

    def end(self) -> None:
        for one in [*self.process.children(recursive=True), self.process]:
            one.kill()

    def executors(self) -> list[psutil.Process]:
        """Executor JVMs that have a Python worker: a task of ours is under way, or was a moment ago."""
        found = []
        for one in self.process.children(recursive=True):
            try:
                if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()) and one.children():
                    found.append(one)
            except psutil.NoSuchProcess:
                continue
        return found

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = [line for line in self.said.read_text().splitlines() if line.startswith("{")]
        return [one for one in map(json.loads, lines) if one.get("event") == event]


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def unreferenced(uri: str) -> set[str]:
    """Data and deletion files that no version mentions."""
    known = set()
    for version in lance.dataset(uri).versions():
        for fragment in lance.dataset(uri, version=version["version"]).get_fragments():
            known |= {f"data/{file.path}" for file in fragment.metadata.files}
            deletion = fragment.metadata.deletion_file
            if deletion is not None:
                known.add(f"_deletions/{fragment.fragment_id}-{deletion.read_version}-{deletion.id}")
    here = [path for folder in ("data", "_deletions") for path in Path(uri, folder).glob("*")]
    names = {str(path.relative_to(uri)) for path in here}
    return {name for name in names if name not in known and name.rsplit(".", 1)[0] not in known}


def check(table: Workload) -> None:
    """Every row once, with its last write, and nothing left to merge."""
    assert_same(read_base(table.uri), table.model.expected(), seed=table.seed)
    assert dict(wire.progress(Files(table.uri, None))) == {
        region: max(wire.region_manifest(Files(table.uri, None), region).generations) for region in table.regions
    }


def test_separate_executors_leave_nothing_behind(table: Workload) -> None:
    report = Driver("well", CLUSTER, table.uri).result()
    assert report["decision"] == "merged"
    assert report["engine"] == "spark"
    check(table)
    assert unreferenced(table.uri) == set()


@pytest.mark.parametrize("how", ["task-fails", "task-lingers"])
def test_what_a_lost_attempt_wrote_is_in_no_version_and_named(
    table: Workload, how: str, request: pytest.FixtureRequest
) -> None:
    master = CLUSTER if how == "task-fails" else request.getfixturevalue("two_hosts")
    driver = Driver(how, master, table.uri)
    report = driver.result()
    assert report["decision"] == "merged"
    assert report["passes"][0]["metrics"]["lost_attempts"] > 0
    check(table)
    left = unreferenced(table.uri)
    assert left, "the premise: the first attempts had written their files"
    named = " ".join(event["files"] for event in driver.logged("files_left"))
    assert {path for path in left if path not in named} == set()


def test_an_executor_that_is_killed(table: Workload) -> None:
    driver = Driver("well", CLUSTER, table.uri)
    victim = wait_for(driver.executors)[0]
    victim.kill()
    assert driver.process.poll() is None, "the premise: the merge was under way"
    assert driver.result()["decision"] == "merged"
    check(table)


@pytest.mark.parametrize(("how", "landed"), [("dies-before-commit", False), ("dies-after-commit", True)])
def test_a_driver_that_dies(table: Workload, how: str, landed: bool) -> None:
    version = lance.dataset(table.uri).version
    driver = Driver(how, "local[2]", table.uri)
    assert driver.wait() == 9
    assert lance.dataset(table.uri).version == version + landed
    report = job.apply(open_table(table.uri), job.MergeOptions())
    assert report.decision == ("nothing_to_merge" if landed else "merged")
    check(table)


def test_no_python_worker_nor_java_stays(table: Workload) -> None:
    driver = Driver("dies-before-commit", "local[2]", table.uri)
    wait_for(driver.process.children)
    started = driver.process.children(recursive=True)
    driver.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


def test_the_command(table: Workload, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memwal_ops", "merge", table.uri, "--engine", "spark", "--master", "local[2]"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=PATIENCE)
    report = json.loads(done.stdout)
    assert (report["decision"], report["engine"], report["engine_reason"]) == ("merged", "spark", "asked for")
    assert {"keys", "delete", "write", "commit"} <= report["passes"][0]["phases"].keys()
    assert report["passes"][0]["metrics"]["tasks"] > 0
    check(table)
