"""A driver of a Spark merge in a process of its own: ``python -m tests.crash.spark_driver HOW MASTER URI``.

HOW is a fault that is put where it can happen:

* ``well``: none.
* ``dies-before-commit``, ``dies-after-commit``: the driver is gone at once, as by kill -9.
* ``task-fails``: the first attempt of every writing task writes all its files, then fails.
* ``task-lingers``: the first attempt of one writing task writes all its files, then hangs; speculation
  starts another one.

Prints the report as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from memwal_ops import log, open_table
from memwal_ops.engines.spark import SparkEngine, engine, tasks
from memwal_ops.engines.spark.session import session
from memwal_ops.jobs import merge as job

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "1s",
    "spark.speculation.task.duration.threshold": "2s",
}


def faulty(writer: Any, how: str) -> Any:
    """The writing task with a first attempt that goes wrong after its files were written."""

    def make(work: Any) -> Any:
        inner = writer(work)

        def write_winning_rows(batches: Any) -> Any:
            import time

            from pyspark import TaskContext

            context = TaskContext.get()
            results = list(inner(batches))
            if context.attemptNumber() == 0:
                if how == "task-fails":
                    raise RuntimeError("the first attempt fails")
                if context.partitionId() == 0:  # the others leave an executor free
                    time.sleep(600)
            yield from results

        return write_winning_rows

    return make


def main() -> None:
    how, master, uri = sys.argv[1:]
    log.configure(level="INFO")
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.executor.memory": "700m"}
    if how == "task-lingers":
        settings |= SPECULATION
    words = " ".join(f"--conf {key}={value}" for key, value in settings.items())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{words} pyspark-shell"
    commit = engine.commit_pass
    if how.startswith("task-"):
        tasks.writer = faulty(tasks.writer, how)
    if how == "dies-before-commit":
        engine.commit_pass = lambda *_: os._exit(9)
    if how == "dies-after-commit":
        engine.commit_pass = lambda *arguments: (commit(*arguments), os._exit(9))
    with session(master) as spark:
        merging = SparkEngine(spark, rows_per_task=500)
        report = job.apply(open_table(uri), job.MergeOptions(), engine=merging)
        sys.stdout.write(f"{json.dumps(report.to_json())}\n")


if __name__ == "__main__":
    main()
