"""A memwal-ops command on Spark that stops where it can be killed.

``python -m tests.campaigns.crash.spark_stages FOLDER WHERE ARGUMENTS...``

WHERE is a stage of tasks (``train``, ``segments``, ``merge``, ``ask``): each task does its work, leaves ``started-PID``
in the folder, and waits for ``gate`` there. Or ``before-commit`` and ``after-commit``: the driver is killed there.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from memwal_ops.cli.main import main
from memwal_ops.formats.lance.engines.spark.indexing import SparkBuilder
from memwal_ops.formats.lance.engines.spark.running import LoggingTaskRunner
from memwal_ops.formats.lance.jobs.catchup import publishing


def waiting(work: Any, folder: str) -> Any:
    """The task, which waits once its work is done."""

    def work_and_wait(*arguments: Any) -> Any:
        import pathlib
        import time

        result = work(*arguments)
        pathlib.Path(folder, f"started-{os.getppid()}").touch()
        while not pathlib.Path(folder, "gate").exists():
            time.sleep(0.05)
        return result

    return work_and_wait


def put(folder: str, where: str) -> None:
    """Arrange for the stop."""
    SparkBuilder.least_bytes = 1
    run, commit = LoggingTaskRunner.run, publishing.commit_segments

    def run_and_wait(self: Any, table: Any, stage: Any, tasks: Any, work: Any) -> Any:
        return run(self, table, stage, tasks, waiting(work, folder) if stage.name == where else work)

    def commit_and_die(*arguments: Any) -> None:
        if where == "after-commit":
            commit(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    LoggingTaskRunner.run = run_and_wait  # type: ignore[method-assign]  # for one process
    if where.endswith("commit"):
        publishing.commit_segments = commit_and_die


if __name__ == "__main__":
    put(sys.argv[1], sys.argv[2])
    main(sys.argv[3:])
