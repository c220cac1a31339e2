"""Pools of worker processes: started on demand, replaced after some runs, ended by their process id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from memwal_ops.log import LastOpened
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.workers import protocol
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.supervisor.config.model import PoolConfig

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SERVICE_ONLY = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
_TICKS = os.sysconf("SC_CLK_TCK")
_GROUP_SECONDS = 3.0
_DRAIN_SECONDS = 2.0


class WorkerProcess:
    """One worker process, in its own process group.

    ``on_message`` gets (worker, message), and (worker, None) once the process and all that its jobs left behind have
    ended. It is called from other threads.
    """

    def __init__(
        self, pool: str, on_message: Callable[[WorkerProcess, dict[str, Any] | None], None], log_level: str
    ) -> None:
        self.pool = pool
        self.runs = 0
        self.request: int | None = None
        self.quitting = False
        # Its request takes long: it does not count as one of the pool's, so that what hangs keeps no other waiting.
        self.aside = False
        self._opened = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memwal_ops.supervisor.workers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Only the service notifies systemd.
            env={name: value for name, value in os.environ.items() if name not in _SERVICE_ONLY}
            | {"MEMWAL_OPS_WORKER_LOG_LEVEL": log_level, protocol.RELEASE_VARIABLE: __version__}
            | {protocol.LAST_OPENED_VARIABLE: str(self._opened.fileno())},
            pass_fds=[self._opened.fileno()],
            # Processes that its jobs start are in its process group, and end with it.
            start_new_session=True,
        )
        self._on_message = on_message
        self._listener = threading.Thread(target=self._listen, name=f"worker-{self.pid}", daemon=True)
        self._listener.start()
        self._reaper = threading.Thread(target=self._reap, name=f"reaper-{self.pid}", daemon=True)
        self._reaper.start()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Return the exit code, or minus the signal that killed it; None while it runs."""
        return self._process.poll()

    def send(self, request: Any) -> None:
        """Send a request; does nothing if the process has ended, which ``on_message`` reports."""
        try:
            assert self._process.stdin is not None  # noqa: S101 - a pipe
            self._process.stdin.write(protocol.encode(request))
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def quit(self) -> None:
        """Ask the process to exit after its current request."""
        self.quitting = True
        self.send({"do": "quit"})

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Wait for the process and what its jobs left behind; return whether all have ended within ``timeout``."""
        self._reaper.join(timeout)
        return not self._reaper.is_alive()

    def resident_bytes(self) -> int | None:
        """Return its resident memory; None if unknown."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * _PAGE
        except (OSError, ValueError, IndexError):
            return None

    def cpu_seconds(self) -> float | None:
        """Return the processor time that it has used; None if unknown."""
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
                continue  # a line cut off when the process died
            self._on_message(self, message)
        for pipe in (self._process.stdout, self._process.stdin):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue

    def _reap(self) -> None:
        """End what the worker left behind, after its exit: a process that a job left may keep the pipe open."""
        status = self._process.wait()
        with self._opened as opened:
            last = LastOpened.read(opened.fileno())
        if status < 0 and last and self.request is not None:
            self._on_message(self, {"type": "opened", "id": self.request, "what": redact(last)})
        ends = time.monotonic() + _GROUP_SECONDS
        while protocol.signal_group(self.pid, signal.SIGTERM) and time.monotonic() < ends:
            time.sleep(_GROUP_SECONDS / 20)
        protocol.signal_group(self.pid, signal.SIGKILL)
        self._listener.join(_DRAIN_SECONDS)
        self._on_message(self, None)


class Pools:
    """All workers by pool. Only the scheduler's thread calls these."""

    def __init__(self, on_message: Callable[[WorkerProcess, dict[str, Any] | None], None]) -> None:
        self._on_message = on_message
        self._workers: dict[str, list[WorkerProcess]] = {}
        self._limits: dict[str, PoolConfig] = {}
        self._foreign: set[WorkerProcess] = set()
        self.recycled = 0
        # Idle ones beside a pool's: while a store hangs, a process would start for each of its polls.
        self.spare = 0
        self.log_level = "INFO"

    def configure(self, limits: Mapping[str, PoolConfig]) -> None:
        """Set sizes and limits; surplus workers end when they are idle."""
        self._limits = dict(limits)
        for name, workers in self._workers.items():
            idle = [worker for worker in workers if worker.request is None and not worker.quitting]
            for worker in idle[: max(0, len(workers) - self._limits[name].workers)]:
                worker.quit()

    def limit(self, pool: str) -> PoolConfig:
        """Return the configuration of a pool."""
        return self._limits[pool]

    def free(self, pool: str) -> int:
        """Return how many more requests the pool can take now."""
        busy = sum(worker.request is not None and not worker.aside for worker in self._workers_of(pool))
        return max(0, self._limits[pool].workers - busy)

    def assign(self, pool: str, request: Any) -> WorkerProcess:
        """Send a request to an idle worker, or to a new one."""
        idle = next(
            (worker for worker in self._workers_of(pool) if worker.request is None and not worker.quitting), None
        )
        worker = idle or WorkerProcess(pool, self._on_message, self.log_level)
        if idle is None:
            self._workers.setdefault(pool, []).append(worker)
        worker.request = request.id
        worker.runs += 1
        if isinstance(request, protocol.RunRequest) and request.foreign:
            self._foreign.add(worker)
        worker.send(request)
        return worker

    def release(self, worker: WorkerProcess) -> None:
        """Make a worker idle after its result, or replace it.

        It is replaced after ``max_runs``, with more than half of its memory limit in use, and after each run of
        another package's job, so that the processes and threads of that job end.
        """
        worker.request, worker.aside = None, False
        limit = self._limits[worker.pool]
        heavy = limit.memory is not None and (worker.resident_bytes() or 0) > limit.memory / 2
        # Of the idle ones. On a busy machine, first polls are set aside while their processes start: were one that has
        # started to end because others work, every request would wait for another start.
        idle = sum(other.request is None and not other.quitting for other in self._workers_of(worker.pool))
        too_many = idle > limit.workers + self.spare
        if worker.runs >= limit.max_runs or heavy or too_many or worker in self._foreign:
            self.recycled += 1
            worker.quit()

    def forget(self, worker: WorkerProcess) -> None:
        """Remove a worker that has ended."""
        workers = self._workers.get(worker.pool, [])
        if worker in workers:
            workers.remove(worker)
        self._foreign.discard(worker)

    def all(self) -> Iterator[WorkerProcess]:
        """Return every worker that has not ended yet."""
        return (worker for workers in [*self._workers.values()] for worker in [*workers])

    def close(self, seconds: float) -> None:
        """End all workers: idle ones at once, the others by SIGTERM, and by SIGKILL after ``seconds``."""
        workers = [*self.all()]
        for worker in workers:
            worker.quit()
            worker.signal(signal.SIGTERM)
        ends = time.monotonic() + seconds
        for worker in workers:
            if not worker.wait(max(0.0, ends - time.monotonic())):
                worker.signal(signal.SIGKILL)
                worker.wait(_GROUP_SECONDS + 1.0)

    def kill(self) -> None:
        """Kill all workers."""
        workers = [*self.all()]
        for worker in workers:
            worker.signal(signal.SIGKILL)
        for worker in workers:
            worker.wait(_GROUP_SECONDS + 1.0)

    def _workers_of(self, pool: str) -> list[WorkerProcess]:
        return self._workers.get(pool, [])
