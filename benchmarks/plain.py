"""Maintenance of a plain Lance table: ``python -m benchmarks.plain`` (``--short`` to see that it runs).

``memwal-ops maintain --apply`` against the script that users write: compact_files, optimize_indices and
cleanup_old_versions. Both do the same to copies of one table, each in a process of its own: alone, and, at a tenth of
the size, beside two processes that append and update in loops. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.markdown import head, row
from benchmarks.memory import as_command, peak_mib, reset_peak
from benchmarks.vectors import K, recall_of
from memwal_ops import run_job
from memwal_ops.core.context import NullListener, RunContext
from memwal_ops.formats.lance.options import ExpireOptions, MaintainOptions

ROWS = 1_000
DIMENSION = 32
QUERIES = 50
# Both expire what is older: younger versions are in use by the writers.
OLDER_THAN = timedelta(seconds=20)
_MIB = 1 << 20
_WORDS = np.array([f"word{number}" for number in range(2_000)])
_CENTRES = np.random.default_rng(1).normal(size=(256, DIMENSION)).astype(np.float32)


def rows(first: int, count: int) -> pa.Table:
    """Rows with ids from ``first``: clustered vectors, and texts of six words."""
    rng = np.random.default_rng(first)
    vectors = _CENTRES[rng.integers(0, 256, count)] + rng.normal(scale=0.3, size=(count, DIMENSION)).astype(np.float32)
    words = _WORDS[(rng.random((count, 6)) ** 2 * len(_WORDS)).astype(int)]
    flat = pa.array(vectors.astype(np.float32).reshape(-1))
    return pa.table(
        {
            "id": np.arange(first, first + count),
            "text": [" ".join(line) for line in words],
            "vector": pa.FixedSizeListArray.from_arrays(flat, DIMENSION),
        }
    )


def make(uri: str, fragments: int, versions: int) -> None:
    """Fragments of which the last ``versions`` were appended one by one, after the indexes were built."""
    first = max(1, fragments - versions)
    batches = (batch for at in range(first) for batch in rows(at * ROWS, ROWS).to_batches())
    reader = pa.RecordBatchReader.from_batches(rows(0, 1).schema, batches)
    dataset = lance.write_dataset(reader, uri, max_rows_per_file=ROWS)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("text", "INVERTED")
    dataset.create_index("vector", "IVF_PQ", num_partitions=max(4, fragments // 80), num_sub_vectors=16)
    for at in range(first, fragments):
        dataset = lance.write_dataset(rows(at * ROWS, ROWS), dataset, mode="append")


class Steps(NullListener):
    """Seconds and peak memory of each step."""

    def __init__(self) -> None:
        self._name, self._began = "", time.monotonic()
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    def step(self, name: str) -> None:
        """A step begins, and the one before has ended."""
        if self._name:
            self._seconds[self._name] = round(time.monotonic() - self._began, 1)
            self._peaks[self._name] = int(peak_mib() * 2**20)
        reset_peak()
        self._name, self._began = name, time.monotonic()

    def figures(self) -> dict[str, Any]:
        """For the parent process."""
        self.step("")
        return {"steps": self._seconds, "peaks": self._peaks, "peak": max(self._peaks.values())}


def script(uri: str) -> dict[str, Any]:
    """What users write."""
    dataset = lance.dataset(uri)
    failed = []
    steps = Steps()
    for name, act in (
        ("compact_files", dataset.optimize.compact_files),
        ("optimize_indices", dataset.optimize.optimize_indices),
        ("cleanup_old_versions", lambda: dataset.cleanup_old_versions(older_than=OLDER_THAN)),
    ):
        steps.step(name)
        try:
            act()
        except (OSError, RuntimeError, ValueError) as error:
            failed.append(f"{name}: {type(error).__name__}")
    return {"failed": failed, **steps.figures()}


def ours(uri: str) -> dict[str, Any]:
    """``memwal-ops maintain --apply --older-than 20s``."""
    as_command()
    options = MaintainOptions(apply=True, expire=ExpireOptions(older_than=OLDER_THAN, allow_unsafe=True))
    steps = Steps()
    report = run_job(uri, "maintain", options, apply=True, context=RunContext(listener=steps))
    return {"failed": [] if report.exit_code == 0 else [f"exit code {report.exit_code}"], **steps.figures()}


def append(uri: str) -> None:
    """Append in a loop."""
    at = 10**9 + os.getpid()
    while True:
        at += 10
        _attempt(lambda at=at: lance.write_dataset(rows(at, 10), uri, mode="append"))


def update(uri: str) -> None:
    """Update in a loop, one row at random."""
    rng = np.random.default_rng(3)
    while True:
        number = int(rng.integers(0, ROWS))
        _attempt(lambda number=number: lance.dataset(uri).update({"text": "'changed'"}, where=f"id = {number}"))


def _attempt(write: Any) -> None:
    """One line: whether a write succeeded; without a pause the machine would do nothing else."""
    try:
        write()
        print("ok", flush=True)
    except Exception as error:  # noqa: BLE001 - each failure is a result
        print(f"failed {error}".replace("\n", " ")[:300], flush=True)
    time.sleep(0.05)


def measured(way: str, uri: str) -> dict[str, Any]:
    """In this process: run a way; its seconds, processor seconds, peak memory and bytes written."""
    before, started, worked = _figure("io", "wchar"), time.monotonic(), time.process_time()
    found: dict[str, Any] = {"script": script, "ours": ours}[way](uri)
    seconds, cpu = time.monotonic() - started, time.process_time() - worked
    return {**found, "seconds": seconds, "cpu": cpu, "written": _figure("io", "wchar") - before}


def _figure(file: str, name: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def in_child(*arguments: str) -> dict[str, Any]:
    """What a process that does nothing else prints last."""
    with child(*arguments) as running:
        out, _ = running.communicate()
    assert running.returncode == 0, out
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def child(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.plain", "--child", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "LANCE_LOG": "error"})


def recall(uri: str, truth: npt.NDArray[np.int64], queries: npt.NDArray[np.float32]) -> float:
    """The share of the ten nearest rows that the index finds."""
    return recall_of((nearest(uri, query, use_index=True) for query in queries), truth)


def nearest(uri: str, query: npt.NDArray[np.float32], *, use_index: bool) -> npt.NDArray[np.int64]:
    """Ids of the ten nearest rows."""
    asked = {"column": "vector", "q": query, "k": K, "nprobes": 8, "refine_factor": 4, "use_index": use_index}
    found = lance.dataset(uri).to_table(columns=["id"], nearest=asked)["id"]
    return np.asarray(found.to_numpy(), np.int64)


def state(uri: str) -> tuple[int, int, float]:
    """Fragments, versions and GiB."""
    dataset = lance.dataset(uri)
    size = sum(path.stat().st_size for path in Path(uri).rglob("*") if path.is_file())
    return len(dataset.get_fragments()), len(dataset.versions()), size / (1 << 30)


def alone(table: str, folder: str) -> None:
    """Both ways on a quiet table."""
    queries = rows(7, QUERIES)["vector"].combine_chunks().flatten().to_numpy().reshape(QUERIES, DIMENSION)
    truth = np.stack([nearest(table, query, use_index=False) for query in queries])
    count, versions, size = state(table)
    head("", "seconds", "peak", "written", "fragments", "versions", "size", "recall@10")
    row("before", "", "", "", count, versions, f"{size:.2f} GiB", f"{recall(table, truth, queries):.3f}")
    figures = {}
    for way in ("script", "ours"):
        uri = shutil.copytree(table, f"{folder}/{way}.lance")
        figures[way] = found = in_child(way, uri)
        count, versions, size = state(uri)
        row(
            way, f"{found['seconds']:.1f} s", f"{found['peak'] / _MIB:.0f} MiB", f"{found['written'] / _MIB:.0f} MiB",
            count, versions, f"{size:.2f} GiB", f"{recall(uri, truth, queries):.3f}",
        )  # fmt: skip
        assert not found["failed"], found
        shutil.rmtree(uri)
    ratios = [figures["ours"][key] / figures["script"][key] for key in ("seconds", "peak", "written")]
    row("ours / script", *(f"**{ratio:.2f}**" for ratio in ratios), "", "", "", "")
    print()
    for way, found in figures.items():
        each = (f"{name} {found['steps'][name]} s, {peak // _MIB} MiB" for name, peak in found["peaks"].items())
        print(f"* {way}: {'; '.join(each)}", flush=True)


def beside(table: str, folder: str) -> None:
    """Both ways while two processes write."""
    head("beside writers", "seconds", "its own failures", "appends", "failed", "updates", "failed")
    for way in ("script", "ours"):
        uri = shutil.copytree(table, f"{folder}/{way}.lance")
        writers = [child(writer, uri) for writer in ("append", "update")]
        time.sleep(3)
        found = in_child(way, uri)
        counts = []
        for writer in writers:
            writer.kill()
            lines = (writer.communicate()[0]).splitlines()
            failed = [line for line in lines if line.startswith("failed")]
            counts += [len(lines) - len(failed), len(failed)]
            for line in sorted(set(failed))[:3]:
                print(f"<!-- {way}: {line} -->", flush=True)
        row(way, f"{found['seconds']:.1f} s", ", ".join(found["failed"]) or "none", *counts)
        shutil.rmtree(uri)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "URI"))
    given = parser.parse_args()
    if given.child:
        way, uri = given.child
        if way in {"append", "update"}:
            {"append": append, "update": update}[way](uri)
        print(json.dumps(measured(way, uri)))
        return
    fragments, versions = (100, 40) if given.short else (5_000, 2_000)
    with tempfile.TemporaryDirectory() as folder:
        for count, some, run in ((fragments, versions, alone), (fragments // 10, versions // 10, beside)):
            table = f"{folder}/t{count}.lance"
            make(table, count, some)
            time.sleep(OLDER_THAN.total_seconds() + 1)
            run(table, folder)
            shutil.rmtree(table)


if __name__ == "__main__":
    main()
