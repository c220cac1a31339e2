"""Many tables under one supervisor, most idle: ``python -m benchmarks.fleet`` (``--short`` to see that it runs).

    python -m benchmarks.fleet --tables 1000 --busy 20 --settle 16 --minutes 10   # tables of 4 regions
    python -m benchmarks.fleet --tables 50 --busy 20 --settle 1 --minutes 10      # the gaps of a small fleet
    python -m benchmarks.fleet --namespace 500 --settle 10 --minutes 10           # plain tables of a namespace
    python -m benchmarks.fleet --simulated --tables 10000 --days 6                # orders of runs, under a budget
    python -m benchmarks.fleet --members 3 --tables 1000 --minutes 10             # a fleet, one killed every minute

First the supervisor settles: it reads every table, and polls it less and less often. Then it is measured while nothing
happens, and then while a process writes a generation to each of ``--busy`` tables in turn. ``/metrics`` is read once
a minute. Processor seconds are those of the kernel, so that other load of the machine does not count. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import psutil
import yaml

from benchmarks.fleet_members import run as run_members
from benchmarks.fleet_simulated import simulate
from benchmarks.markdown import head, row
from benchmarks.supervisor import REGION, start
from benchmarks.workload import Shape, make, rows
from memwal_ops.core.run import run_job
from memwal_ops.supervisor.state.history import History

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = Shape(base=1_000, regions=4, generations=4, rows=100)
_WEEKLY = ("snapshot", "gc", "compact", "expire")
_MIB = 1 << 20
IMAGES = Path(__file__).parents[1] / "docs/images"
_MEMORY = ("own_memory", "memory", "resident")
_STOP_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the service has used so far: processor seconds, bytes of memory, polls.

    ``resident`` has pages that processes share once for each, ``memory`` has them once.
    """

    at: float
    service: float
    workers: float
    scrape: float
    own_memory: int
    memory: int
    resident: int
    polls: float


def build(folder: Path, tables: int, *, plain: bool) -> None:
    """Write one table, let every job run on it, and copy it."""
    first = folder / "t0000.lance"
    if not first.exists():
        if plain:
            lance.write_dataset(rows(np.arange(SHAPE.base), 0), str(first)).create_scalar_index("id", "BTREE")
        else:
            make(str(first), SHAPE)
            for job in ("merge", "catchup", "snapshot"):
                run_job(str(first), job)
    for number in range(1, tables):
        if not (copy := folder / f"t{number:04}.lance").exists():
            shutil.copytree(first, copy)


def configure(folder: Path, state: Path, port: int, *, plain: bool) -> Path:
    """Merges and catch-ups by backlog, and at their default schedules; the others weekly, as they are no polls."""
    jobs: dict[str, Any] = {"merge": {"when": "generations >= 1"}, "catchup": {"when": "uncovered_rows >= 1"}}
    every = {job: {"schedule": "7d"} for job in _WEEKLY}
    source: dict[str, Any] = {"pattern": f"{folder}/*.lance"}
    if plain:
        source = {"namespace": {"impl": "dir", "properties": {"root": str(folder)}}}
        del jobs["merge"], every["snapshot"]
    document = {
        "state_dir": str(state),
        "log_level": "warning",
        "http": {"port": port},
        "defaults": {"poll": "30s", "jobs": jobs | every},
        "tables": [source | {"max_tables": 10_000}],
    }
    file = state / "fleet.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def sample(pid: int, port: int) -> Sample:
    """Read the kernel's figures and ``/metrics``."""
    service = psutil.Process(pid)
    before = _seconds(service)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        page = answer.read().decode()
    own, scrape = _seconds(service), _seconds(service) - before
    # Those that ended are the children that the service has waited for.
    ended, sizes = service.cpu_times(), [service.memory_full_info()]
    workers = ended.children_user + ended.children_system
    for worker in service.children(recursive=True):
        with suppress(psutil.Error):
            workers += _seconds(worker)
            sizes.append(worker.memory_full_info())
    memory, resident = sum(size.pss for size in sizes), sum(size.rss for size in sizes)
    polls = sum(map(float, re.findall(r"^memwal_ops_polls_total\{.*\} (\S+)$", page, re.MULTILINE)))
    return Sample(time.time(), own, workers, scrape, sizes[0].pss, memory, resident, polls)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def watch(pid: int, port: int, minutes: float) -> list[Sample]:
    """Samples, one each minute, at least two."""
    found = [sample(pid, port)]
    ends = found[0].at + minutes * 60
    while (left := ends - time.time()) > 0.5:  # noqa: PLR2004 - what the samples themselves took
        time.sleep(min(left, 60.0))
        found.append(sample(pid, port))
    return found


def report(what: str, samples: list[Sample]) -> None:
    """A row: processor time in percent of one core, by minute; memory at its most; polls an hour; a scrape."""
    pairs = [*pairwise(samples)]
    shares = {
        name: [(getattr(b, name) - getattr(a, name)) / (b.at - a.at) for a, b in pairs]
        for name in ("service", "workers")
    }
    both = [sum(one) for one in zip(*shares.values(), strict=True)]
    seconds = samples[-1].at - samples[0].at
    row(
        what,
        f"{seconds / 60:.1f}",
        f"**{statistics.median(both):.1%}**, {max(both):.1%}",
        *(f"{statistics.median(share):.1%}, {max(share):.1%}" for share in shares.values()),
        f"{statistics.median(one.scrape for one in samples):.2f} s",
        f"{', '.join(f'{max(getattr(one, name) for one in samples) / _MIB:.0f}' for name in _MEMORY)} MiB",
        f"{(samples[-1].polls - samples[0].polls) / seconds * 3600:,.0f}",
    )


def write(folder: Path, tables: int, minutes: float, every: float) -> None:
    """Write a generation to each of the first tables in turn, one round every so many seconds."""
    began, stamp = time.monotonic(), 100
    while time.monotonic() - began < minutes * 60:
        ends = time.monotonic() + every
        for number in range(tables):
            stamp += 1
            with lance.dataset(str(folder / f"t{number:04}.lance")).mem_wal_writer(REGION) as writer:
                writer.put(rows(np.arange(20) * SHAPE.regions, stamp))
        time.sleep(max(0.0, ends - time.monotonic()))


@contextmanager
def writing(folder: Path, tables: int, minutes: float, every: float) -> Iterator[None]:
    """Let a process write; it has ended afterwards."""
    given = {"--write": folder, "--busy": tables, "--minutes": minutes, "--every": every}
    command = [sys.executable, "-m", "benchmarks.fleet", *(str(part) for pair in given.items() for part in pair)]
    writer = subprocess.Popen(command, env={**os.environ, "RUST_LOG": "off"})
    try:
        yield
    finally:
        writer.terminate()
        writer.wait()


def report_gaps(state: Path, tables: int, busy: int, began: float, ended: float) -> None:
    """How long the busy tables waited for their first merge, and between two merges."""
    history = History.open_to_read(str(state / "history.sqlite"))
    runs = history.runs(job="merge", limit=1_000_000)
    history.close()
    merges: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run["outcome"] == "succeeded" and run["versions"]:
            merges[run["table"]].append(datetime.fromisoformat(run["finished"]).timestamp())
    times = [sorted(at for at in merges[f"t{number:04}"] if began < at < ended) for number in range(busy)]
    gaps = [max((b - a for a, b in pairwise([*one, ended])), default=0.0) for one in times if one]
    first = [(one or [ended])[0] - began for one in times]
    head("tables", "busy", "merges", "first merge: median, largest", "largest gap of any", "median of the largest")
    row(
        tables,
        busy,
        sum(map(len, times)),
        f"{statistics.median(first):.1f}, {max(first):.1f} s",
        f"**{max(gaps, default=0):.1f} s**",
        f"{statistics.median(gaps or [0]):.1f} s",
    )


def _given() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=1_000)
    parser.add_argument("--namespace", type=int, help="so many plain tables of a directory namespace instead")
    parser.add_argument("--busy", type=int, default=0, help="so many tables are written to at last")
    parser.add_argument("--every", type=float, default=20, help="seconds between two generations of a busy table")
    parser.add_argument("--settle", type=float, default=16, help="minutes until polls have become few")
    parser.add_argument("--minutes", type=float, default=10, help="of each measurement")
    parser.add_argument("--folder", type=Path, help="keep the tables here, and take those that are there")
    parser.add_argument("--port", type=int, default=19665)
    parser.add_argument("--short", action="store_true", help="eight tables and seconds, to see that it runs")
    parser.add_argument("--simulated", action="store_true", help="tables of figures: orders of runs under a budget")
    parser.add_argument("--days", type=float, default=6, help="so many simulated days")
    parser.add_argument("--seed", type=int, default=43, help="of the simulated fleet")
    parser.add_argument("--members", type=int, help="so many supervisors on plain tables: benchmarks/fleet_members.py")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds between two kills of a member")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Build the tables, run the service, print the tables."""
    given = _given()
    if given.simulated:
        short = (200, 1.0, None) if given.short else (given.tables, given.days, IMAGES)
        simulate(short[0], short[1], given.seed, short[2])
        return
    if given.short:
        given.tables, given.busy, given.settle, given.minutes, given.every = 8, 2, 0.1, 0.1, 2
        if given.members is not None:
            given.tables, given.minutes, given.kill_every = 30, 0.8, 20
    if given.write is not None:
        write(given.write, given.busy, given.minutes, given.every)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the service ends, too
    plain, tables = given.namespace is not None or given.members is not None, given.namespace or given.tables
    busy = 0 if plain else given.busy
    with tempfile.TemporaryDirectory(prefix="memwal-fleet-") as name:
        state = Path(name)
        folder = given.folder or state / "tables"
        folder.mkdir(exist_ok=True, parents=True)
        build(folder, tables, plain=plain)
        if given.members is not None:
            run_members(
                state, folder, given.members, settle=given.settle, minutes=given.minutes, kill_every=given.kill_every,
                port=given.port,
            )  # fmt: skip
            return
        file = configure(folder, state, given.port, plain=plain)
        with open(state / "service.log", "ab") as log:
            service, _ = start(file, given.port, log)
        try:
            head(
                f"{tables} {'plain tables of a namespace' if plain else f'tables of {SHAPE.regions} regions'}",
                "minutes",
                "of one core: median, worst minute",
                "service",
                "workers",
                "a scrape",
                "memory at most: service, all, with shared pages",
                "polls an hour",
            )
            for what, minutes in (("settles", given.settle), ("idle", given.minutes)):
                report(what, watch(service.pid, given.port, minutes))
            if busy:
                with writing(folder, busy, given.minutes, given.every):
                    began = time.time()
                    report(f"{busy} written to", watch(service.pid, given.port, given.minutes))
                report_gaps(state, tables, busy, began, time.time())
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait(_STOP_SECONDS)
        if tracebacks := (state / "service.log").read_text().count("Traceback"):
            sys.exit(f"The service logged {tracebacks} tracebacks.")


if __name__ == "__main__":
    main()
