"""A catch-up on a standalone cluster: a master and two workers as processes of their own, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyspark
import pytest

from memwal_ops import run_job
from tests.support.spark import CHEAP_JAVA, skip_without_spark, submit_args
from tests.support.tables.plain import PlainTable
from tests.support.waiting import PATIENCE, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(1800)
DEPLOY = "org.apache.spark.deploy"
# The command line, with small parts, and with tasks that wait for a file.
DRIVER = textwrap.dedent("""
    import sys
    from memwal_ops.cli.main import main
    from memwal_ops.formats.lance.engines.spark.indexing import SparkBuilder
    from memwal_ops.formats.lance.engines.spark.runner import TaskRunner

    SparkBuilder.least_bytes = 1
    folder, run = sys.argv[1], TaskRunner.run

    def gated(work):
        def wait(task, count):
            import os, pathlib, time
            pathlib.Path(folder, f"started-{os.getppid()}").touch()
            while not pathlib.Path(folder, "gate").exists():
                time.sleep(0.05)
            return work(task, count)
        return wait

    TaskRunner.run = lambda self, table, stage, tasks, work: run(self, table, stage, tasks, gated(work))
    main(sys.argv[2:])
""")


class Cluster:
    """A master and workers of one core each."""

    def __init__(self, folder: Path) -> None:
        """Start them."""
        self.folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0")
        self.workers = [self.start_worker() for _ in range(2)]

    @property
    def master(self) -> str:
        """Its URL."""
        return f"spark://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """For all processes: the package is found by the same path everywhere."""
        memory = {"SPARK_DAEMON_MEMORY": "128m", "SPARK_DAEMON_JAVA_OPTS": CHEAP_JAVA}
        return {**os.environ, **memory, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(Path.cwd()), "RUST_LOG": "off"}

    def start_worker(self) -> subprocess.Popen[bytes]:
        work = ("--work-dir", str(self.folder / "work"), "--webui-port", "0")
        return self._start("worker.Worker", self.master, "-c", "1", "-m", "700m", "--host", "127.0.0.1", *work)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        script = Path(pyspark.__file__).parent / "bin" / "spark-class"
        command = [str(script), f"{DEPLOY}.{name}", *arguments]
        with (self.folder / f"{name}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, start_new_session=True)
        self.processes.append(process)
        return process

    def drive(self, state: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a command whose tasks wait for ``gate`` in the folder ``state``."""
        settings = {"spark.executor.memory": "512m", "spark.driver.memory": "512m", "spark.ui.enabled": "false",
                    "spark.driver.host": "127.0.0.1", "spark.driver.extraJavaOptions": CHEAP_JAVA,
                    "spark.executor.extraJavaOptions": CHEAP_JAVA,
                    "spark.scheduler.minRegisteredResourcesRatio": "1.0"}  # fmt: skip
        command = [sys.executable, "-c", DRIVER, str(state), *arguments]
        with (state / "driver.log").open("w") as log:
            return subprocess.Popen(
                [*command, "--engine", "spark", "--master", self.master, "--json"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**self.environment, "PYSPARK_SUBMIT_ARGS": submit_args(settings)},
                start_new_session=True,
            )


def kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill a process with its children, such as the executors of a worker."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    skip_without_spark()
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        for process in made.processes:
            kill(process)


def test_a_killed_driver_and_a_killed_worker(cluster: Cluster, tmp_path: Path) -> None:
    """The first leaves the table as it was, in spite of the second the job ends."""
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=4, rows=100).create_indexes("IVF_FLAT")
    for _ in range(4):
        made.append(100)
    before = lance.dataset(made.uri).version
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    arguments = ["catchup", made.uri]

    driver = cluster.drive(first, *arguments)
    try:
        until(lambda: len([*first.glob("started-*")]) > 0)
    finally:
        kill(driver)
    (first / "gate").touch()
    assert lance.dataset(made.uri).version == before
    assert run_job(made.uri, "verify").decision == "healthy"

    driver = cluster.drive(second, *arguments)
    try:
        until(lambda: len([*second.glob("started-*")]) > 1)
        kill(cluster.workers.pop())
        (second / "gate").touch()
        out, _ = driver.communicate(timeout=PATIENCE)
    finally:
        kill(driver)
        cluster.workers.append(cluster.start_worker())
    assert driver.returncode == 0, (out, (second / "driver.log").read_text()[-3000:])
    report = json.loads(out)
    assert report["decision"] == "caught_up"
    assert {one["engine"] for one in report["indexes"]} == {"spark"}
    assert run_job(made.uri, "catchup").decision == "unchanged", "nothing is left"
    assert run_job(made.uri, "verify", answers=True).decision == "healthy"
    assert made.read() == made.model
