"""A worker process: takes one request after the other, and answers each. Run as a module.

Whatever happens in it stays in it: it may run out of memory, leak, hang or be killed, and the service
goes on. If the service dies first, the pipe ends, and the worker ends itself at once: a job can be
killed at any moment, and the next service starts it again.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

import structlog

from memwal_ops import log as logging_setup
from memwal_ops.allocators import bound_allocators
from memwal_ops.core.leases import check
from memwal_ops.core.table import open_table
from memwal_ops.errors import LeaseLostError, MemwalOpsError
from memwal_ops.jobs.api import Run, StopRequested
from memwal_ops.jobs.registry import load_jobs
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.guarded_store import GuardedStore
from memwal_ops.supervisor.job_answers import amounts, checked_report, unexpected, whole_numbers
from memwal_ops.supervisor.job_options import make_options
from memwal_ops.supervisor.looking import look_at
from memwal_ops.supervisor.requests import Answer, bounded, encode, lease_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAY_SECONDS = 0.3
_CHECK_SECONDS = 2.0
_UNEXPECTED = 1


class Worker:
    """The loop of one worker; ``out`` takes its answers."""

    def __init__(self, requests: IO[bytes], out: IO[bytes]) -> None:
        self._requests = requests
        self._out = out
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stopping: set[int] = set()
        self._terminated = threading.Event()
        self._said = 0.0
        self._current: int | None = None

    def work(self) -> None:
        """Answer until the pipe ends or somebody says quit."""
        # Threads of pylance never see them: the handlers only set a flag.
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the service decides
        threading.Thread(target=self._listen, name="requests", daemon=True).start()
        self._say({"say": "ready", "pid": os.getpid()})
        while not self._terminated.is_set():
            request = self._queue.get()
            if request["do"] == "quit":
                return
            self._current = request["id"]
            self._say({"say": "began", "id": request["id"]})
            structlog.contextvars.bind_contextvars(job=request.get("job", "look"), table=request["uri"])
            try:
                answer = _look(request) if request["do"] == "look" else self._run(request)
            except MemwalOpsError as error:
                answer = _refused(request["id"], error)
            except Exception as error:  # noqa: BLE001 - the service must get an answer, whatever a job does
                structlog.get_logger(__name__).exception("unexpected_error")
                answer = _refused(request["id"], unexpected(error, request.get("job")))
            structlog.contextvars.clear_contextvars()
            self._current = None
            self._say(answer)

    def _terminate(self) -> None:
        self._terminated.set()
        self._queue.put({"do": "quit"})

    def _listen(self) -> None:
        try:
            for line in self._requests:
                message = json.loads(line)
                if message["do"] == "stop":
                    self._stopping.add(message["id"])
                else:
                    self._queue.put(message)
        finally:
            os._exit(0)  # the service is gone, perhaps in the middle of a line

    def _run(self, request: Mapping[str, Any]) -> Answer:
        job = load_jobs()[request["job"]]
        options = make_options(job.options, request["options"])
        started = time.monotonic()
        table = open_table(request["uri"], request["storage_options"])
        lease = None if request["lease"] is None else lease_of(request["lease"])
        checked = 0.0

        def check_lease() -> None:
            if lease is not None:
                check(table.store, lease)

        def checkpoint() -> None:
            nonlocal checked
            if self._terminated.is_set() or request["id"] in self._stopping:
                raise StopRequested
            if time.monotonic() - checked > _CHECK_SECONDS:
                check_lease()
                checked = time.monotonic()

        run = Run(on_progress=self._progress, on_checkpoint=checkpoint, on_commit=check_lease)
        run.took("open", time.monotonic() - started)
        watched = replace(table, store=GuardedStore(table.store, check_lease, self._progress))
        try:
            report = job.apply(watched, options, run) if request["apply"] else job.plan(watched, options)
        except StopRequested:
            return _answer(request["id"], run, outcome="stopped", decision="stopped")
        except LeaseLostError as error:
            return replace(_refused(request["id"], error), outcome="lost", **_sums(run))
        except MemwalOpsError as error:
            return replace(_refused(request["id"], error), **_sums(run))
        code, decision, told = checked_report(job, report)
        outcome = "partial" if code else "succeeded"
        return _answer(request["id"], run, outcome=outcome, exit_code=code, decision=decision, report=bounded(told))

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._said > _SAY_SECONDS:
            self._said = now
            self._say({"say": "progress", "id": self._current})

    def _say(self, message: Answer | dict[str, Any]) -> None:
        with self._lock:
            try:
                self._out.write(encode(message))
                self._out.flush()
            except BrokenPipeError:
                os._exit(0)


def _look(request: Mapping[str, Any]) -> Answer:
    table = open_table(request["uri"], request["storage_options"])
    jobs = load_jobs()
    figures, faults = look_at(table, [jobs[name] for name in request["jobs"]])
    if faults:
        return replace(_refused(request["id"], faults[0]), figures=figures, version=table.version)
    return Answer(request["id"], "succeeded", figures=figures, version=table.version)


def _sums(run: Run) -> dict[str, Any]:
    return {"figures": amounts(run.figures), "phases": amounts(run.phases), "versions": whole_numbers(run.versions)}


def _answer(number: int, run: Run, **details: Any) -> Answer:
    return Answer(number, **details, **_sums(run))


def _refused(number: int, error: MemwalOpsError) -> Answer:
    return Answer(
        number,
        "failed",
        exit_code=error.exit_code or _UNEXPECTED,
        reason=error.reason,
        message=redact(str(error)),
        remedy=redact(error.remedy),
    )


def main() -> None:
    """Work on stdin and stdout. Whatever a library prints goes to stderr."""
    bound_allocators()
    logging_setup.configure(level=os.environ.get("MEMWAL_OPS_WORKER_LOG_LEVEL", "WARNING"), redact=redact)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    load_jobs()
    Worker(sys.stdin.buffer, out).work()
    sys.stderr.flush()
    os._exit(0)  # the thread that reads stdin cannot be ended, and Python's own way out waits for it


if __name__ == "__main__":
    main()
