"""A driver of Spark merges and loads in a process of its own: ``python -m tests.campaigns.crash.spark_driver MASTER``.

Reads ``HOW URI`` lines from stdin, merges each table on one session, and prints one JSON line for each: the
report, or ``{"error"}``. HOW is a fault that is put where it can happen:

* ``well``: none.
* ``task-fails``: the first attempt of every writing task writes all its files, then fails.
* ``task-waits``: the first attempt of one writing task writes all its files, names its processes in
  ``URI.waits``, and hangs.
* ``task-lingers``: the same, once an executor on another host has joined: speculation starts a second copy.
* ``worker-dies``: the Python process of every writing task's first attempt is gone at once, files written.
* ``stage-fails``: every attempt of every writing task fails after its files were written.
* ``dies-before-commit``, ``dies-after-commit``: the driver is gone at once, as by kill -9.
* ``shuffle-`` before any of these: keys are resolved by the executors, not by the driver.
* ``load-well``, or ``load-`` before any other of these but ``task-lingers``: the same of a ``bulk_load`` of
  the keys ``LOADED``; the report is ``{"version"}``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from memwal_ops import log, open_table
from memwal_ops.core.spark.session import session
from memwal_ops.formats.lance.engines.spark import engine, load, tasks
from memwal_ops.formats.lance.engines.spark.engine import DRIVER_KEY_BYTES, SparkMergeEngine
from memwal_ops.formats.lance.jobs import merge
from tests.support.spark import CHEAP_JAVA, submit_args

OTHER_HOST = "127.0.0.3"
LOADED = 10_000, 12_000
"""The keys that are loaded: first, and end."""
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.executor.memory": "700m",
    "spark.driver.extraJavaOptions": CHEAP_JAVA,
    "spark.executor.extraJavaOptions": CHEAP_JAVA,
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "1s",
    "spark.speculation.task.duration.threshold": "2s",
}


def faulty(writer: Any, how: str, uri: str) -> Any:
    """The maker of a writing task, with a first attempt that goes wrong after its files were written."""
    return lambda work: going_wrong(writer(work), how, uri)


def going_wrong(write: Any, how: str, uri: str) -> Any:
    """``write`` with a first attempt that goes wrong after its files were written."""

    def write_and_fail(*arguments: Any, **options: Any) -> Any:
        import os
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        results = list(write(*arguments, **options))
        if how == "stage-fails":
            raise RuntimeError("every attempt fails")
        if context.attemptNumber() == 0 and results:
            if how == "task-fails":
                raise RuntimeError("the first attempt fails")
            if how == "worker-dies":
                os._exit(137)
            # The others leave an executor free; and a restarted stage counts its attempts again.
            if context.partitionId() == 0 and not os.path.exists(f"{uri}.waits"):
                with open(f"{uri}.part", "w") as file:
                    file.write(f"{os.getpid()} {os.getppid()}")
                os.rename(f"{uri}.part", f"{uri}.waits")
                time.sleep(600)
        return results

    return write_and_fail


def join(spark: Any, host: str) -> None:
    """Let one more worker, of another host name, join the local cluster: Spark speculates on another host only."""
    jvm = spark.sparkContext._jvm
    scala = jvm.scala.Option
    deploy = jvm.org.apache.spark.deploy
    cluster = getattr(getattr(deploy, "LocalSparkCluster$"), "MODULE$").get().get()
    field = cluster.getClass().getDeclaredField("masterRpcEnvs")
    field.setAccessible(True)
    masters = spark.sparkContext._gateway.new_array(jvm.java.lang.String, 1)
    masters[0] = field.get(cluster).head().address().toSparkURL()
    conf = spark.sparkContext._jsc.sc().conf()
    deploy.worker.Worker.startRpcEnvAndEndpoint(host, 0, 0, 1, 2048, masters, None, scala.apply(9), conf, scala.empty())


def run(spark: Any, how: str, uri: str) -> dict[str, Any]:
    loading = how.startswith("load-")
    key_bytes = 0 if how.startswith("shuffle-") else DRIVER_KEY_BYTES
    how = how.removeprefix("load-").removeprefix("shuffle-")
    place, name = (load, "commit_files") if loading else (engine, "commit_pass")
    commit, writer, write_fragments = getattr(place, name), tasks.writer, load.write_fragments
    group_writer = engine.group_writer
    if how in {"task-fails", "task-waits", "task-lingers", "worker-dies", "stage-fails"}:
        tasks.writer = faulty(writer, how, uri)
        engine.group_writer = faulty(group_writer, how, uri)
        load.write_fragments = going_wrong(write_fragments, how, uri)
    if how == "task-lingers":
        join(spark, OTHER_HOST)
    if how == "dies-before-commit":
        setattr(place, name, lambda *_: os._exit(9))
    if how == "dies-after-commit":
        setattr(place, name, lambda *arguments: (commit(*arguments), os._exit(9)))
    try:
        if loading:
            return {"version": load.bulk_load(spark.range(*LOADED, 1, 4), uri)}
        merging = SparkMergeEngine(spark, rows_per_task=500, driver_key_bytes=key_bytes)
        return merge.apply(open_table(uri), merge.MergeOptions(), engine=merging).to_json()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        tasks.writer, load.write_fragments = writer, write_fragments
        engine.group_writer = group_writer


def main() -> None:
    (master,) = sys.argv[1:]
    log.configure(level="INFO")
    os.environ["PYSPARK_SUBMIT_ARGS"] = submit_args(SETTINGS)
    with session(master) as spark:
        for line in sys.stdin:
            how, uri = line.split()
            sys.stdout.write(f"{json.dumps(run(spark, how, uri))}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
