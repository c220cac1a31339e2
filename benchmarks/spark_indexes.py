"""Catch-up on Spark against the local one: ``python -m benchmarks.spark_indexes``; needs Java and memwal-ops[spark].

Prints processor seconds of all processes of a run, which others on the machine do not change much; the session is
started before. An index of each type covers one fragment of many; each run catches up a copy of the same table.

``--driver FRAGMENTS`` prints the memory of a driver whose executors are processes of their own, for a table of so many
fragments of ``--fragment-rows`` rows. They share one data file: what the driver holds depends on the manifest alone.
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
import psutil
import pyarrow as pa

from benchmarks.memory import as_command, peak_mib
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
    began = processor_seconds(os.getpid())
    with quiet(), nullcontext() if master == "local" else session(master) as spark:
        if spark is not None:
            check_executors(spark)
        before = processor_seconds(os.getpid())
        engine = "local" if master == "local" else "spark"
        report = run_job(uri, "catchup", engine=engine, answers="off").to_json()
        cpu = processor_seconds(os.getpid()) - before
        [entry] = report["indexes"]
        assert (entry["decision"], entry["engine"]) == ("updated", engine), entry
        print(json.dumps({"cpu": cpu, "start": before - began, "stages": entry["stages"]}), flush=True)


def make_fragments(uri: str, fragments: int, rows: int, kind: Any) -> None:
    """A table of so many fragments with one data file, of which the index covers the first."""
    random = np.random.default_rng(1)
    column, options = INDEXES[kind]
    values = pa.FixedSizeListArray.from_arrays(random.random(rows * DIMENSION, dtype=np.float32), DIMENSION)
    vectors = {} if column == "id" else {"vector": values}
    dataset = lance.write_dataset(pa.table({"id": random.permutation(rows), **vectors}), uri, max_rows_per_file=rows)
    if options:
        dataset.create_index(column, kind, name="one", **options)
    else:
        dataset.create_scalar_index(column, kind, name="one")
    same = [one.metadata for one in dataset.get_fragments()] * (fragments - 1)
    lance.LanceDataset.commit(uri, lance.LanceOperation.Append(same), read_version=lance.dataset(uri).version)


def driver(uri: str) -> None:
    """The measured part, with the session of a command; prints one JSON line."""
    as_command()
    before = peak_mib()
    with quiet(), session("local-cluster[1,2,1024]") as spark:
        check_executors(spark)
        [entry] = run_job(uri, "catchup", engine="spark").to_json()["indexes"]
        assert (entry["decision"], entry["engine"]) == ("updated", "spark"), entry
        java = next(one for one in psutil.Process().children(recursive=True) if "java" in one.name())
        print(json.dumps({"before": before, "python": peak_mib(), "java": peak_mib(java.pid)}), flush=True)


def drivers(sizes: list[int], rows: int, kind: Any) -> None:
    """Print the memory of drivers in Markdown."""
    print("| index | fragments | rows | driver, Python | before the job | driver, Java |\n|---|---|---|---|---|---|")
    for fragments in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_fragments(f"{folder}/t.lance", fragments, rows, kind)
            found = result_of("--driver-once", f"{folder}/t.lance")
        print(
            f"| {kind} | {fragments:,} | {fragments * rows:,} | {found['python']:.0f} MiB | {found['before']:.0f} MiB "
            f"| {found['java']:.0f} MiB |",
            flush=True,
        )


def measured(template: str, master: str) -> dict[str, Any]:
    """One run on a copy, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as folder:
        copy = shutil.copytree(template, Path(folder) / "t.lance")
        return result_of("--once", master, str(copy), memory="1g")


def result_of(*arguments: str, memory: str = "512m") -> dict[str, Any]:
    """The JSON line of this module in a process of its own; ``memory`` of its Java."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.spark_indexes", *arguments]
    settings = f"--conf spark.ui.enabled=false --conf spark.driver.memory={memory} pyspark-shell"
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
    parser.add_argument("--driver", type=int, nargs="+", metavar="FRAGMENTS")
    parser.add_argument("--driver-once", metavar="URI", help=argparse.SUPPRESS)
    parser.add_argument("--fragment-rows", type=int, default=100)
    parser.add_argument("--index", choices=INDEXES, default="BTREE")
    given = parser.parse_args()
    if given.driver_once:
        driver(given.driver_once)
        return
    if given.driver:
        drivers(given.driver, given.fragment_rows, given.index)
        return
    if given.once:
        once(*given.once)
        return
    print(
        "| index | rows | on | processor s | times local | of a GiB | session | parts | executor s: segments, merge |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in INDEXES:
        for rows in given.rows:
            with tempfile.TemporaryDirectory() as folder:
                template = f"{folder}/template.lance"
                make(template, rows, kind)
                local = measured(template, "local")["cpu"]
                size = (
                    sum(file.stat().st_size for file in Path(template, "data").iterdir()) * (FRAGMENTS - 1) / FRAGMENTS
                )
                each = 2**30 / size
                print(f"| {kind} | {rows:,} | local | {local:.1f} | 1 | {local * each:.1f} | | | |", flush=True)
                for master in given.masters:
                    found = measured(template, master)
                    stages = found["stages"]
                    parts = int(stages["segments"]["tasks"])
                    spent = ", ".join(
                        f"{stages[one]['executor_seconds']:.1f}" for one in ("segments", "merge") if one in stages
                    )
                    cpu = found["cpu"]
                    print(
                        f"| {kind} | {rows:,} | {master} | {cpu:.1f} | {cpu / local:.1f} | {cpu * each:.1f} "
                        f"| {found['start']:.1f} | {parts} | {spent} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
