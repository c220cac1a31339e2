"""Catch-up on Spark against the local one: ``python -m benchmarks.spark_indexes``; needs Java and memwal-ops[spark].

Prints processor seconds of all processes of a run, which others on the machine do not change much; the session is
started before. An index of each type covers one fragment of many; each run catches up a copy of the same table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from benchmarks.spark import processor_seconds
from memwal_ops import run_job
from memwal_ops.core.spark.session import check_executors, quiet, session
from memwal_ops.formats.lance.engines.spark.indexing import SparkBuilder

FRAGMENTS, DIMENSION = 16, 128
INDEXES: dict[Any, tuple[str, dict[str, Any]]] = {
    "BTREE": ("id", {}),
    "IVF_PQ": ("vector", {"num_partitions": 64, "num_sub_vectors": 16}),
}


def make(uri: str, rows: int, kind: Any) -> None:
    """A table whose index covers the first of its fragments."""
    random = np.random.default_rng(1)
    column, options = INDEXES[kind]
    each = rows // FRAGMENTS
    for at in range(FRAGMENTS):
        vectors = pa.FixedSizeListArray.from_arrays(random.random(each * DIMENSION, dtype=np.float32), DIMENSION)
        table = pa.table({"id": random.permutation(each) + at * each, "vector": vectors})
        dataset = lance.write_dataset(table, uri, mode="append" if at else "create")
        if not at and options:
            dataset.create_index(column, kind, name="one", **options)
        elif not at:
            dataset.create_scalar_index(column, kind, name="one")


def once(master: str, uri: str) -> None:
    """The measured part; prints one JSON line."""
    SparkBuilder.least_bytes = 1  # parts also of a table that one process indexes as fast
    with quiet(), nullcontext() if master == "local" else session(master) as spark:
        if spark is not None:
            check_executors(spark)
        before = processor_seconds(os.getpid())
        engine = "local" if master == "local" else "spark"
        report = run_job(uri, "catchup", engine=engine, answers="off").to_json()
        cpu = processor_seconds(os.getpid()) - before
        [entry] = report["indexes"]
        assert (entry["decision"], entry["engine"]) == ("updated", engine), entry
        print(json.dumps({"cpu": cpu, "stages": entry["stages"]}), flush=True)


def measured(template: str, master: str) -> dict[str, Any]:
    """One run on a copy, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as folder:
        copy = shutil.copytree(template, Path(folder) / "t.lance")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.spark_indexes", "--once", master, str(copy)]
        settings = "--conf spark.ui.enabled=false --conf spark.driver.memory=1g pyspark-shell"
        environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": settings}
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", nargs=2, metavar=("MASTER", "URI"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs="+", default=[160_000, 640_000])
    parser.add_argument("--masters", nargs="+", default=["local[1]", "local[2]"])
    given = parser.parse_args()
    if given.once:
        once(*given.once)
        return
    print("| index | rows | on | processor s | times local | parts | executor s: segments, merge |")
    print("|---|---|---|---|---|---|---|")
    for kind in INDEXES:
        for rows in given.rows:
            with tempfile.TemporaryDirectory() as folder:
                template = f"{folder}/template.lance"
                make(template, rows, kind)
                local = measured(template, "local")["cpu"]
                print(f"| {kind} | {rows:,} | local | {local:.1f} | 1 | | |", flush=True)
                for master in given.masters:
                    found = measured(template, master)
                    stages = found["stages"]
                    parts = int(stages["segments"]["tasks"])
                    spent = ", ".join(
                        f"{stages[one]['executor_seconds']:.1f}" for one in ("segments", "merge") if one in stages
                    )
                    ratio = found["cpu"] / local
                    print(
                        f"| {kind} | {rows:,} | {master} | {found['cpu']:.1f} | {ratio:.1f} | {parts} | {spent} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
