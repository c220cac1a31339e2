"""The supervisor under kills: many tables, four jobs each, one writer per table, kill -9 of the service every 30 s.

    make bench-supervisor MINUTES=10

Writers go on through all of it, in a process of their own. At the end everything that still waits is merged, and
every table is compared, key by key, with the last write. Prints a page for README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import lance
import psutil
import yaml

from benchmarks.workload import Shape, make, rows
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.supervisor.state.history import History

JOBS = ("merge", "catchup", "snapshot", "gc")
BASE_ROWS = 1_000
REGION = str(uuid.UUID(int=1, version=4))
_MIB = 1 << 20
_PATIENCE = 120.0


@dataclass
class Figures:
    """What is measured while it runs."""

    ready: list[float] = field(default_factory=list)
    memory: list[tuple[float, float, int]] = field(default_factory=list)
    kills: int = 0


def write(folder: Path, seconds: float) -> None:
    """The writers: one generation after the other, table by table; what they wrote last goes to ``written.json``."""
    draw = random.Random(7)
    written: dict[str, dict[int, int]] = defaultdict(dict)
    tables = sorted(folder.glob("tables/*.lance"))
    ends = time.monotonic() + seconds
    stamp = 0
    while time.monotonic() < ends:
        for table in tables:
            stamp += 1
            keys = draw.sample(range(BASE_ROWS), 10) + [BASE_ROWS + draw.randrange(10_000) for _ in range(10)]
            with lance.dataset(str(table)).mem_wal_writer(REGION, max_wal_flush_interval_ms=1) as writer:
                writer.put(rows(keys_array(keys), stamp))
            written[table.stem].update(dict.fromkeys(keys, stamp))
            if time.monotonic() > ends:
                break
    (folder / "written.json").write_text(json.dumps(written))


def keys_array(keys: list[int]) -> Any:
    """As the workload takes them."""
    import numpy as np  # noqa: PLC0415 - the writers' alone

    return np.asarray(keys)


def configure(folder: Path, port: int) -> Path:
    """Four jobs on every table; the collector deletes at once what it can prove."""
    careful = {"reader_grace": "0s", "orphan_min_age": "0s", "manifest_retention": 2, "allow_unsafe": True}
    careful["drain_after"] = "0s"
    every = {"catchup": "60s", "snapshot": "60s", "gc": "60s"}
    jobs: dict[str, Any] = {job: {"schedule": {"every": span, "jitter": "10s"}} for job, span in every.items()}
    jobs["gc"] |= {"apply": True, "options": careful}
    jobs["merge"] = {"schedule": "60s", "when": "generations >= 2", "options": {"max_bytes": "64MiB"}}
    jobs["compact"] = {"enabled": False}
    file = folder / "supervisor.yaml"
    document = {
        "state_dir": str(folder / "state"),
        "log_level": "warning",
        "stop_grace": "20s",
        "http": {"port": port},
        "defaults": {"poll": "10s", "jobs": jobs},
        "tables": [{"pattern": f"{folder}/tables/*.lance"}],
    }
    file.write_text(yaml.safe_dump(document))
    return file


def start(file: Path, port: int, log: Any) -> tuple[subprocess.Popen[bytes], float]:
    """The service, and the seconds from its start until it is ready."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "memwal_ops", "run", "--config", str(file)], stderr=log)
    while time.monotonic() - began < _PATIENCE:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                if answer.status == 200:  # noqa: PLR2004 - OK
                    return process, time.monotonic() - began
        except (OSError, urllib.error.URLError):
            time.sleep(0.02)
    raise RuntimeError("the service did not become ready")


def watch(figures: Figures, pid: list[int], ends: threading.Event, began: float) -> None:
    """Resident memory of the service and its workers, every half second."""
    while not ends.wait(0.5):
        try:
            service = psutil.Process(pid[0])
            sizes = [one.memory_info().rss for one in [service, *service.children(recursive=True)]]
        except psutil.Error:
            continue
        figures.memory.append((time.monotonic() - began, sum(sizes) / _MIB, len(sizes)))


def conduct(folder: Path, minutes: float, kill_every: float, port: int) -> Figures:
    """Run it for that long, killing it every so often."""
    figures = Figures()
    file = configure(folder, port)
    writers = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.supervisor", "--write", str(folder), "--minutes", str(minutes)],
        env={**os.environ, "RUST_LOG": "off"},
    )
    with open(folder / "service.log", "ab") as log:
        began = time.monotonic()
        process, seconds = start(file, port, log)
        figures.ready.append(seconds)
        pid, over = [process.pid], threading.Event()
        sampler = threading.Thread(target=watch, args=(figures, pid, over, began))
        sampler.start()
        while (left := minutes * 60 - (time.monotonic() - began)) > 0:
            time.sleep(min(kill_every or left, left))
            if kill_every and minutes * 60 - (time.monotonic() - began) > 1:
                process.kill()
                process.wait()
                figures.kills += 1
                process, seconds = start(file, port, log)
                figures.ready.append(seconds)
                pid[0] = process.pid
        writers.wait()
        over.set()
        sampler.join()
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE)
    return figures


def gaps(folder: Path, began: float, ended: float) -> dict[str, dict[str, float]]:
    """By job: the largest time, over all tables, between two runs that ended well (the ends of the run included)."""
    history = History.open_to_read(str(folder / "state/history.sqlite"))
    runs = history.runs(limit=1_000_000)
    history.close()
    names = [path.stem for path in folder.glob("tables/*.lance")]
    found: dict[str, dict[str, float]] = {}
    for job in JOBS:
        moments: dict[str, list[float]] = {name: [began, ended] for name in names}
        mine = [run for run in runs if run["job"] == job]
        for run in mine:
            if run["outcome"] == "succeeded":
                moments[run["table"]].append(datetime.fromisoformat(run["finished"]).timestamp())
        largest = [max(b - a for a, b in pairwise(times)) for times in map(sorted, moments.values())]
        outcomes: dict[str, int] = defaultdict(int)
        for run in mine:
            outcomes[run["outcome"]] += 1
        found[job] = {"largest": max(largest), "median": statistics.median(largest), "runs": len(mine), **outcomes}
    return found


def compare(folder: Path) -> tuple[int, int, int]:
    """Merge what still waits; (tables, keys compared, keys that are not the last write)."""
    written = json.loads((folder / "written.json").read_text())
    compared = wrong = 0
    for path in sorted(folder.glob("tables/*.lance")):
        merge.apply(open_lance_table(path), merge.MergeOptions())
        table = open_lance_table(path)
        if read_backlog(table).pending or read_backlog(table).blocked:
            raise RuntimeError(f"{path} still has a backlog")
        texts = table.dataset.to_table(columns=["id", "text"]).to_pylist()
        found = {row["id"]: row["text"] for row in texts}
        expected = dict.fromkeys(range(BASE_ROWS), 0) | {int(key): stamp for key, stamp in written[path.stem].items()}
        compared += len(expected)
        wrong += len(texts) - len(found) + len(found.keys() ^ expected.keys())
        wrong += sum(found.get(key) != f"row {key} of {stamp}" for key, stamp in expected.items())
    return len(written), compared, wrong


def flatness(figures: Figures, minutes: float) -> tuple[float, float]:
    """Mean resident MiB of the first and of the last minute, while all of its processes run.

    After each kill they start one by one; how long that takes is the machine's.
    """
    span = min(60.0, minutes * 30)
    whole = max(processes for _, _, processes in figures.memory)
    sizes = [(at, size) for at, size, processes in figures.memory if processes == whole]
    first = [size for at, size in sizes if at < span] or [sizes[0][1]]
    last = [size for at, size in sizes if at > minutes * 60 - span] or [sizes[-1][1]]
    return statistics.mean(first), statistics.mean(last)


def main() -> None:
    """Run it, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--tables", type=int, default=50)
    parser.add_argument("--kill-every", type=float, default=30, help="seconds; 0: never")
    parser.add_argument("--port", type=int, default=19664)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write(given.write, given.minutes * 60)
        return
    with tempfile.TemporaryDirectory(prefix="memwal-supervisor-") as name:
        folder = Path(name)
        for number in range(given.tables):
            make(str(folder / f"tables/t{number:02}.lance"), Shape(base=BASE_ROWS, regions=1, generations=0, rows=100))
        began = time.time()
        figures = conduct(folder, given.minutes, given.kill_every, given.port)
        found = gaps(folder, began, time.time())
        tables, compared, wrong = compare(folder)
        first, last = flatness(figures, given.minutes)
        tracebacks = (folder / "service.log").read_text().count("Traceback")
    print(f"{tables} tables x {len(JOBS)} jobs, {given.minutes:g} minutes, {figures.kills} kills of the service\n")
    print("| job | runs | largest gap of any table | median of the tables' largest | ended by a kill | failed |")
    print("|---|---|---|---|---|---|")
    for job, one in found.items():
        failed = sum(one.get(outcome, 0) for outcome in ("failed", "died", "hung", "partial", "lost"))
        print(
            f"| {job} | {one['runs']:.0f} | **{one['largest']:.1f} s** | {one['median']:.1f} s "
            f"| {one.get('killed', 0):.0f} | {failed:.0f} |"
        )
    print()
    print(
        "| keys compared | lost or wrong | memory, first and last minute | start to ready, median, worst | tracebacks |"
    )
    print("|---|---|---|---|---|")
    print(
        f"| {compared:,} | **{wrong}** | {first:.0f} and {last:.0f} MiB ({last / first - 1:+.1%}) "
        f"| {statistics.median(figures.ready):.2f} and {max(figures.ready):.2f} s | {tracebacks} |"
    )
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
