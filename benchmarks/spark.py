"""The Spark engine against the local one: ``python -m benchmarks.spark``; needs Java and memwal-ops[spark].

Session start is taken off: a session is started and asked for its versions before the clock runs.
Every figure comes from a process of its own on a fresh copy of the same table. Ratios are what counts.
Prints a Markdown page, which ``benchmarks/README.md`` is made of.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.memory import peak_mib
from benchmarks.merge import run
from benchmarks.spark_scale import scale
from benchmarks.workload import Shape, make
from memwal_ops.core.spark.session import check_executors, quiet, session
from memwal_ops.formats.lance.engines.spark.engine import DRIVER_KEY_BYTES, SparkMergeEngine
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.table import open_lance_table

_STAGES_ON_EXECUTORS = ("keys", "delete", "write")


def on_spark(
    template: Path, master: str, *, driver_memory: str = "2g", driver_key_bytes: int = DRIVER_KEY_BYTES
) -> dict[str, Any]:
    """One Spark merge of a copy, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=template.parent) as folder:
        copy = Path(folder) / "t.lance"
        shutil.copytree(template, copy)
        os.sync()
        return merged(copy, master, driver_memory=driver_memory, driver_key_bytes=driver_key_bytes)


def merged(
    table: Path, master: str, *, driver_memory: str = "2g", driver_key_bytes: int = DRIVER_KEY_BYTES
) -> dict[str, Any]:
    """One Spark merge, in a process of its own."""
    settings = f"--conf spark.ui.enabled=false --conf spark.driver.memory={driver_memory} "
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.spark", "--once", master, str(table)]
    done = subprocess.run(
        [*command, str(driver_key_bytes)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell"},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def locally(table: Path) -> dict[str, Any]:
    """One local merge, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.ways", "ours", str(table)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "driver_python_mib": result["peak_mib"]}


def once(master: str, uri: str, driver_key_bytes: int) -> None:
    """The timed part; prints one JSON line."""
    started = time.perf_counter()
    with session(master) as spark:
        with quiet():
            check_executors(spark)
        start = time.perf_counter() - started
        started, worked = time.perf_counter(), processor_seconds(os.getpid())
        engine = SparkMergeEngine(spark, driver_key_bytes=driver_key_bytes)
        report = merge.apply(open_lance_table(uri), merge.MergeOptions(engine="spark"), engine=engine)
        seconds = time.perf_counter() - started
        cpu = processor_seconds(os.getpid()) - worked
        (entry,) = report.passes
        assert entry.result is not None
        java = spark.sparkContext._gateway.proc.pid  # noqa: SLF001 - no public way to Java's process
        document = {
            "seconds": seconds,
            "cpu": cpu,
            "session": start,
            "rows": entry.result.rows_read,
            "phases": dict(entry.result.phases),
            "metrics": dict(entry.result.metrics),
            "driver_python_mib": peak_mib(),
            "driver_java_mib": peak_mib(java),
            "worker_mib": _largest_worker(java),
        }
        print(json.dumps(document), flush=True)


def _largest_worker(java: int) -> float:
    """Peak of the Python workers below a process of Java, in MiB; they are kept until the session ends."""
    peaks = [0.0]
    for one in psutil.Process(java).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, StopIteration):
            if "pyspark" in " ".join(one.cmdline()):
                peaks.append(peak_mib(one.pid))
    return max(peaks)


def processor_seconds(pid: int) -> float:
    """Of a process and all below it: Java and its Python workers. What others do on the machine does not count."""
    process = psutil.Process(pid)
    spent = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            # With the children that have ended, which the parent has waited for.
            spent += sum(one.cpu_times()[:4])
    return spent


@contextlib.contextmanager
def table(at: Path, shape: Shape) -> Any:
    """A table of that shape, removed afterwards."""
    path = at / "t.lance"
    make(str(path), shape)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def speed(at: Path, base: int, rows: int, backlogs: list[int], runs: int) -> None:
    """Both engines, side by side, over backlogs that double."""
    print(f"## Against the local engine: {base:,} base rows, 4 regions, {rows:,} rows a generation, local[2]\n")
    print(
        "| generations | local | Spark | Spark / local | processor: local | Spark "
        "| keys | delete | write | session start |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for generations in backlogs:
        with table(at, Shape(base=base, regions=4, generations=generations // 4, rows=rows)) as path:
            run("ours", path)  # warms the page cache
            local, spark = [], []
            for _ in range(runs):
                local.append(run("ours", path))
                spark.append(on_spark(path, "local[2]"))
        mine = statistics.median(one["seconds"] for one in local)
        cpu = [statistics.median(one["cpu"] for one in way) for way in (local, spark)]
        middle = sorted(spark, key=lambda one: float(one["seconds"]))[len(spark) // 2]
        stages = " | ".join(f"{middle['phases'][name]:.2f} s" for name in _STAGES_ON_EXECUTORS)
        print(
            f"| {generations} | {mine:.2f} s | {middle['seconds']:.2f} s | **{middle['seconds'] / mine:.1f}** "
            f"| {cpu[0]:.1f} s | {cpu[1]:.1f} s | {stages} | {middle['session']:.1f} s |",
            flush=True,
        )


def shuffle(at: Path, widths: list[int], base: int, rows: int) -> None:
    """Bytes through the shuffle per generation row, by the width of the vector."""
    print("\n## Shuffled bytes (int64 key)\n")
    print(
        "| vector | rows read | keys, write: bytes a generation row | base keys and deletes: bytes | all: bytes a row |"
    )
    print("|---|---|---|---|---|")
    for width in widths:
        with table(at, Shape(base=base, regions=4, generations=5, rows=rows, vector=width)) as path:
            result = on_spark(path, "local[2]", driver_key_bytes=0)
        metrics = result["metrics"]
        own = metrics["shuffle_bytes_keys"] + metrics["shuffle_bytes_write"]
        print(
            f"| {width:,} floats | {result['rows']:,} | **{own / result['rows']:.1f}** "
            f"| {metrics['shuffle_bytes_delete']:,.0f} | {metrics['shuffle_bytes'] / result['rows']:.1f} |",
            flush=True,
        )


def memory(at: Path, backlogs: list[int], rows: int) -> None:
    """What the driver takes, with executors as processes of their own."""
    print("\n## Driver memory (local-cluster[2,1,1024], spark.driver.memory 512m)\n")
    print("| backlog | driver, Python | driver, Java | seconds |\n|---|---|---|---|")
    for generations in backlogs:
        with table(at, Shape(base=100_000, regions=1, generations=generations, rows=rows, vector=4)) as path:
            result = on_spark(path, "local-cluster[2,1,1024]", driver_memory="512m", driver_key_bytes=0)
        print(
            f"| {result['rows']:,} rows | {result['driver_python_mib']:.0f} MiB "
            f"| {result['driver_java_mib']:.0f} MiB | {result['seconds']:.1f} s |",
            flush=True,
        )


def executors(at: Path, shape: Shape) -> None:
    """One executor against two on this machine."""
    print(
        f"\n## One executor and two: {shape}\n\n| executors | keys | delete | write | together |\n|---|---|---|---|---|"
    )
    sums = []
    with table(at, shape) as path:
        for count in (1, 2):
            phases = on_spark(path, f"local-cluster[{count},1,1024]", driver_key_bytes=0)["phases"]
            sums.append(sum(phases[name] for name in _STAGES_ON_EXECUTORS))
            stages = " | ".join(f"{phases[name]:.2f} s" for name in _STAGES_ON_EXECUTORS)
            print(f"| {count} | {stages} | {sums[-1]:.2f} s |", flush=True)
    print(f"\nSpeed-up of the executors' stages: {sums[0] / sums[1]:.2f}", flush=True)


def main() -> None:
    """Print the page, or run the timed part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", nargs=3, metavar=("MASTER", "URI", "BYTES"), help=argparse.SUPPRESS)
    parser.add_argument("--short", action="store_true", help="a small workload, to see that it runs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["speed", "shuffle", "memory", "executors", "scale"], help="one table")
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000], help="of scale: base rows")
    parser.add_argument("--dir", type=Path, help="where to make the tables (some GB)")
    arguments = parser.parse_args()
    if arguments.once:
        master, uri, key_bytes = arguments.once
        once(master, uri, int(key_bytes))
        return
    short, only = arguments.short, arguments.only
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        at = Path(folder)
        if only in {None, "speed"}:
            backlogs = [4, 8] if short else [20, 40, 80, 160]
            speed(
                at, 20_000 if short else 2_000_000, 500 if short else 20_000, backlogs, 1 if short else arguments.runs
            )
        if only in {None, "shuffle"}:
            shuffle(at, [64, 1536], 2_000 if short else 20_000, 500 if short else 10_000)
        if only in {None, "memory"}:
            memory(at, [1, 4] if short else [10, 80], 500 if short else 100_000)
        if only in {None, "executors"}:
            executors(at, Shape(base=20_000, generations=2, rows=500) if short else Shape())
        if only == "scale":
            ways = {
                "local": locally,
                "Spark": lambda path: merged(path, "local[2]"),
                "Spark, shuffled": lambda path: merged(path, "local[2]", driver_key_bytes=0),
            }
            scale(at, [20_000] if short else arguments.rows, ways)


if __name__ == "__main__":
    main()
