"""A standalone cluster of Spark: a master and workers as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyspark

from tests.support.spark import CHEAP_JAVA, skip_without_spark, submit_args
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPLOY = "org.apache.spark.deploy"
SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": CHEAP_JAVA,
    "spark.executor.extraJavaOptions": CHEAP_JAVA,
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}
# The command line, with small parts, and with tasks that wait for a file.
DRIVER = textwrap.dedent("""
    import sys
    from memwal_ops.cli.main import main
    from memwal_ops.formats.lance.engines.spark import engine
    from memwal_ops.formats.lance.engines.spark.indexing import SparkBuilder
    from memwal_ops.core.spark.runner import TaskRunner

    SparkBuilder.least_bytes = 1
    folder, run, writer = sys.argv[1], TaskRunner.run, engine.group_writer

    def gated(work):
        def wait(*arguments):
            import os, pathlib, time
            pathlib.Path(folder, f"started-{os.getppid()}").touch()
            while not pathlib.Path(folder, "gate").exists():
                time.sleep(0.05)
            return work(*arguments)
        return wait

    TaskRunner.run = lambda self, table, stage, tasks, work: run(self, table, stage, tasks, gated(work))
    engine.group_writer = lambda work: gated(writer(work))
    main(sys.argv[2:])
""")


class Cluster:
    """A master and workers of one core each.

    Attributes:
        workers: their processes; each is the parent of its executors.
    """

    def __init__(self, folder: Path, workers: int = 2, python_path: str = str(Path.cwd())) -> None:
        """Start them.

        Args:
            folder: for their logs and work.
            workers: how many.
            python_path: where executors find packages, beside those of their Python.
        """
        self.folder, self._python_path = folder, python_path
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0")
        self.workers = [self.start_worker() for _ in range(workers)]

    @property
    def master(self) -> str:
        """Its URL."""
        return f"spark://127.0.0.1:{self.port}"

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start one more."""
        work = ("--work-dir", str(self.folder / "work"), "--webui-port", "0")
        return self._start("worker.Worker", self.master, "-c", "1", "-m", "700m", "--host", "127.0.0.1", *work)

    def kill_worker_of(self, started: str) -> None:
        """Kill the worker whose executor has a Python process with that id, and start another one."""
        above = {one.pid for one in psutil.Process(int(started)).parents()}
        [worker] = [one for one in self.workers if one.pid in above]
        kill(worker)
        self.workers.remove(worker)
        self.workers.append(self.start_worker())

    def stop(self) -> None:
        """Kill all."""
        for process in self.processes:
            kill(process)

    def _environment(self, python_path: str) -> dict[str, str]:
        memory = {"SPARK_DAEMON_MEMORY": "128m", "SPARK_DAEMON_JAVA_OPTS": CHEAP_JAVA}
        return {**os.environ, **memory, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": python_path, "RUST_LOG": "off"}

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        script = Path(pyspark.__file__).parent / "bin" / "spark-class"
        command = [str(script), f"{DEPLOY}.{name}", *arguments]
        with (self.folder / f"{name}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment(self._python_path), start_new_session=True
            )
        self.processes.append(process)
        return process

    def start(self, log: Path, *command: str, **settings: str) -> subprocess.Popen[str]:
        """Start a process that is a driver of this cluster, with these settings of Spark (``_`` for ``.``)."""
        conf = SETTINGS | {name.replace("_", "."): value for name, value in settings.items()}
        environment = self._environment(str(Path.cwd())) | {"PYSPARK_SUBMIT_ARGS": submit_args(conf)}
        with log.open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, *command, "--engine", "spark", "--master", self.master, "--json"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def drive(self, state: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a command whose tasks wait for ``gate`` in the folder ``state``."""
        return self.start(state / "driver.log", "-c", DRIVER, str(state), *arguments)


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Cluster]:
    """A cluster with its files in a folder, for the time of a block; skips where Spark cannot run.

    Args:
        folder: as ``options``, see :class:`Cluster`.
    """
    skip_without_spark()
    made = Cluster(folder, **options)
    try:
        yield made
    finally:
        made.stop()


def started(state: Path) -> list[str]:
    """Ids of Python processes of executors whose tasks wait, or waited, in that folder; once there is one."""
    return until(lambda: [one.name.removeprefix("started-") for one in state.glob("started-*")])


def kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill a process with its children, such as the executors of a worker."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
