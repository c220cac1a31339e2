"""Worker processes: started when they are needed, watched, replaced after some runs, ended by their id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from memwal_ops.supervisor.requests import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.supervisor.config_model import PoolConfig

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OURS = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
_TICKS = os.sysconf("SC_CLK_TCK")


class WorkerProcess:
    """One process. ``on_message`` gets (itself, message), and (itself, None) once it has ended; from another thread."""

    def __init__(
        self, pool: str, on_message: Callable[[WorkerProcess, dict[str, Any] | None], None], log_level: str
    ) -> None:
        """Start it."""
        self.pool = pool
        self.runs = 0
        self.request: int | None = None
        self.quitting = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memwal_ops.supervisor.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What systemd is told is the service's business.
            env={name: value for name, value in os.environ.items() if name not in _OURS}
            | {"MEMWAL_OPS_WORKER_LOG_LEVEL": log_level},
        )
        self._on_message = on_message
        threading.Thread(target=self._listen, name=f"worker-{self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """How it ended: its exit code, minus the signal that killed it; None while it lives."""
        return self._process.poll()

    def send(self, request: Any) -> None:
        """Give it a request, or nothing where it has ended: then a message says so."""
        try:
            assert self._process.stdin is not None  # noqa: S101 - a pipe
            self._process.stdin.write(encode(request))
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def quit(self) -> None:
        """Let it end when it has nothing in hand."""
        self.quitting = True
        self.send({"do": "quit"})

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def resident_bytes(self) -> int | None:
        """Its resident memory; None where nobody can tell."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * _PAGE
        except (OSError, ValueError, IndexError):
            return None

    def cpu_seconds(self) -> float | None:
        """Processor time that it has used; None where nobody can tell."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICKS
        except (OSError, ValueError, IndexError):
            return None

    def _listen(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # cut off by its death
            self._on_message(self, message)
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stdin):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        self._on_message(self, None)


class Pools:
    """All workers by pool. Only the service's own thread calls these."""

    def __init__(self, on_message: Callable[[WorkerProcess, dict[str, Any] | None], None]) -> None:
        """No worker is started yet."""
        self._on_message = on_message
        self._workers: dict[str, list[WorkerProcess]] = {}
        self._limits: dict[str, PoolConfig] = {}
        self.recycled = 0
        self.log_level = "INFO"

    def configure(self, limits: Mapping[str, PoolConfig]) -> None:
        """Sizes and limits from now on; what is too many ends when it has nothing in hand."""
        self._limits = dict(limits)
        for name, workers in self._workers.items():
            idle = [one for one in workers if one.request is None and not one.quitting]
            for worker in idle[: max(0, len(workers) - self._limits[name].workers)]:
                worker.quit()

    def limit(self, pool: str) -> PoolConfig:
        """The configuration of a pool."""
        return self._limits[pool]

    def free(self, pool: str) -> int:
        """How many more requests it can take now."""
        busy = sum(one.request is not None for one in self._of(pool))
        return max(0, self._limits[pool].workers - busy)

    def give(self, pool: str, request: Any) -> WorkerProcess:
        """Give a request to an idle worker, or to a new one."""
        idle = next((one for one in self._of(pool) if one.request is None and not one.quitting), None)
        worker = idle or WorkerProcess(pool, self._on_message, self.log_level)
        if idle is None:
            self._workers.setdefault(pool, []).append(worker)
        worker.request = request.id
        worker.runs += 1
        worker.send(request)
        return worker

    def take_back(self, worker: WorkerProcess) -> None:
        """Its request is answered; after ``max_runs``, or with more than half of its memory, it is replaced."""
        worker.request = None
        limit = self._limits[worker.pool]
        resident = worker.resident_bytes()
        heavy = limit.memory is not None and resident is not None and resident > limit.memory / 2
        too_many = sum(not one.quitting for one in self._of(worker.pool)) > limit.workers
        if worker.runs >= limit.max_runs or heavy or too_many:
            self.recycled += 1
            worker.quit()

    def forget(self, worker: WorkerProcess) -> None:
        """It has ended."""
        workers = self._workers.get(worker.pool, [])
        if worker in workers:
            workers.remove(worker)

    def all(self) -> Iterator[WorkerProcess]:
        """Every worker that has not ended yet."""
        return (worker for workers in [*self._workers.values()] for worker in [*workers])

    def close(self, seconds: float) -> None:
        """End all: those without work at once, the others by SIGTERM, and by SIGKILL after ``seconds``."""
        workers = [*self.all()]
        for worker in workers:
            worker.quit()
            worker.signal(signal.SIGTERM)
        ends = time.monotonic() + seconds
        for worker in workers:
            if not worker.wait(max(0.0, ends - time.monotonic())):
                worker.signal(signal.SIGKILL)
                worker.wait(1.0)

    def kill(self) -> None:
        """End all at once."""
        workers = [*self.all()]
        for worker in workers:
            worker.signal(signal.SIGKILL)
        for worker in workers:
            worker.wait(1.0)

    def _of(self, pool: str) -> list[WorkerProcess]:
        return self._workers.get(pool, [])
