"""Several supervisors of one fleet, one killed every minute: ``python -m benchmarks.fleet --members 3``.

Each member is asked for its tables as often as it writes its record. From that follows how long a table had two
members, or none. A member that is killed (by its process id) comes back after three heartbeats, with its state folder.
Processor seconds are those of the kernel, of all members with their workers, without those that the questions took.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
import yaml

from benchmarks.markdown import head, row

if TYPE_CHECKING:
    from pathlib import Path

_STOP_SECONDS = 120.0
_AWAY_HEARTBEATS = 3
_BEATS = 3


@dataclass
class Member:
    """A member: its process is None while it is away."""

    name: str
    file: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    back_at: float = 0.0

    def start(self) -> None:
        """Start it; it responds later."""
        command = [sys.executable, "-m", "memwal_ops", "run", "--config", str(self.file)]
        with open(self.file.parent / "service.log", "ab") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def tables(self) -> frozenset[str] | None:
        """Ask for its tables; None: it does not respond."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/status", timeout=60) as answer:
                return frozenset(table["name"] for table in json.load(answer)["tables"])
        except OSError:
            return None

    def seconds(self) -> float:
        """Processor seconds of the process that runs now, with its workers."""
        if self.process is None:
            return 0.0
        total = 0.0
        with suppress(psutil.Error):
            service = psutil.Process(self.process.pid)
            times = service.cpu_times()
            total = float(times.user) + times.system + times.children_user + times.children_system
            for worker in service.children(recursive=True):
                of = worker.cpu_times()
                total += of.user + of.system
        return total


@dataclass
class Shares:
    """Since when tables have had two members, or none; and the longest times of that."""

    since: dict[tuple[str, bool], float] = field(default_factory=dict)
    longest: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def take(self, tables: frozenset[str], of: list[frozenset[str]], at: float) -> None:
        """Take what the members have now."""
        count: dict[str, int] = defaultdict(int)
        for one in of:
            for table in one:
                count[table] += 1
        for table in tables:
            for twice, holds in ((True, count[table] > 1), (False, count[table] == 0)):
                if holds:
                    began = self.since.setdefault((table, twice), at)
                    self.longest[twice] = max(self.longest[twice], at - began)
                else:
                    self.since.pop((table, twice), None)


def configure(folder: Path, tables: Path, name: str, port: int, heartbeat: float) -> Path:
    """Plain tables as they are maintained in production: jobs that delete apply, and the slow ones are weekly."""
    state = folder / f"state-{name}"
    state.mkdir()
    jobs = {job: {"schedule": "7d", "apply": True} for job in ("gc", "compact", "expire", "verify")}
    document = {
        "state_dir": str(state),
        "log_level": "warning",
        "http": {"port": port},
        "leases": {"ttl": "30s"},
        "fleet": {"uri": str(folder / "ops"), "name": name, "heartbeat": f"{heartbeat:g}s"},
        "defaults": {"poll": "30s", "jobs": jobs},
        "tables": [{"pattern": f"{tables}/*.lance", "max_tables": 10_000}],
    }
    file = state / "fleet.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def measure(members: list[Member], tables: frozenset[str], minutes: float, kill_every: float, heartbeat: float) -> None:
    """Ask, kill and start again; print a row."""
    draw = random.Random(7)
    shares, shown, kills = Shares(), [], 0
    began = time.monotonic()
    next_kill, asked, last = began + kill_every, 0.0, {one.name: one.seconds() for one in members}
    minute, used = began, 0.0
    while (now := time.monotonic()) < began + minutes * 60:
        for one in members:
            if one.process is None and now >= one.back_at:
                one.start()
                last[one.name] = 0.0
        if now >= next_kill:
            victim = draw.choice([one for one in members if one.process is not None])
            assert victim.process is not None
            victim.process.kill()
            victim.process.wait()
            victim.process, victim.back_at = None, now + _AWAY_HEARTBEATS * heartbeat
            next_kill, kills = now + kill_every, kills + 1
        living = [one for one in members if one.process is not None]
        before = sum(one.seconds() for one in living)
        for one in living:
            used += max(0.0, one.seconds() - last[one.name])
        found = [names for one in living if (names := one.tables()) is not None]
        shares.take(tables, found, time.monotonic())
        for one in living:
            last[one.name] = one.seconds()
        asked += sum(last[one.name] for one in living) - before
        if (passed := time.monotonic() - minute) > min(60.0, minutes * 60 / 2):
            shown.append(used / passed)
            minute, used = time.monotonic(), 0.0
        time.sleep(heartbeat / _BEATS)
    head(
        "members", "tables", "minutes", "killed", "of one core, in all: median, worst minute",
        "a table had two members", "a table had none",
    )  # fmt: skip
    longest = [shares.longest[twice] for twice in (True, False)]
    times = [f"{seconds:.1f} s, {seconds / heartbeat:.1f} heartbeats" for seconds in longest]
    row(
        len(members), len(tables), f"{minutes:g}", kills, f"**{statistics.median(shown):.1%}**, {max(shown):.1%}",
        *times,
    )  # fmt: skip


def run(folder: Path, tables: Path, count: int, *, settle: float, minutes: float, kill_every: float, port: int) -> None:
    """Run so many members on the tables of a folder, in a folder of their own.

    Args:
        settle: minutes until polls have become few.
        kill_every: seconds; 15 of them are four heartbeats at most.
        port: of the first member.
    """
    heartbeat = min(15.0, kill_every / 4)
    names = [f"m{number}" for number in range(count)]
    members = [
        Member(name, configure(folder, tables, name, port + at, heartbeat), port + at) for at, name in enumerate(names)
    ]
    every = frozenset(path.stem for path in tables.glob("*.lance"))
    with ExitStack() as stack:
        stack.callback(_stop, members)
        for one in members:
            one.start()
        time.sleep(settle * 60)
        measure(members, every, minutes, kill_every, heartbeat)
    logs = [one.file.parent / "service.log" for one in members]
    if tracebacks := sum(log.read_text().count("Traceback") for log in logs):
        sys.exit(f"The members logged {tracebacks} tracebacks.")


def _stop(members: list[Member]) -> None:
    running = [one.process for one in members if one.process is not None]
    for process in running:
        process.terminate()
    for process in running:
        process.wait(_STOP_SECONDS)
