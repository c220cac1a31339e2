"""The main loop of a worker process: process requests one at a time, and return a result for each. Run as a module.

A worker isolates the service from its jobs: it may run out of memory, leak, hang or be killed, and the service
continues. If the service dies first, the pipe closes, and the worker exits at once: a job can be killed at any
moment, and the next service starts it again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any

import structlog

from memwal_ops import errors, log as logging_setup
from memwal_ops.allocators import bound_allocators
from memwal_ops.core import leases, registry, table_history, tracing
from memwal_ops.core.anchors import LeaseGuard
from memwal_ops.core.context import Progress, RunContext, StopRequested
from memwal_ops.core.figures import Figures, fingerprint_of, is_unchanged, poll_table
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.core.protocols import RecordsRevisions, Table
from memwal_ops.core.report import bounded
from memwal_ops.core.run import Run, failure, unexpected_error
from memwal_ops.core.usage import Measurement
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.options import redact
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.supervisor.workers import protocol
from memwal_ops.text import printable
from memwal_ops.version import __version__

_PROGRESS_SECONDS = 0.3
_CHECK_SECONDS = 2.0
# Of the log of a run, those sent to the service: a job that logs without end must not keep it busy.
_MAX_LINES = 2000
_MAX_LINE, _MAX_TEXT = 1000, 20_000
# Of the history on a page; a report has more.
_REVISIONS = 20


class Worker:
    """The loop of one worker; it writes its results to ``out``."""

    def __init__(self, requests: IO[bytes], out: IO[bytes]) -> None:
        self._requests = requests
        self._out = out
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stopping: set[int] = set()
        self._terminated = threading.Event()
        self._progress_sent = 0.0
        self._doing: Progress | None = None
        self._current: int | None = None
        self._lines = 0
        self._pid = os.getpid()

    def work(self) -> None:
        """Process requests until the pipe closes, or a ``quit`` or SIGTERM arrives."""
        # pylance's threads do not see the signals; the handlers only set a flag.
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the service decides
        threading.Thread(target=self._listen, name="requests", daemon=True).start()
        self._send({"type": "ready", "pid": os.getpid()})
        while not self._terminated.is_set():
            request = self._queue.get()
            if request["do"] == "quit":
                return
            self._current, self._doing = request["id"], None
            self._lines = _MAX_LINES if request["do"] == "run" else 0
            logging_setup.LastOpened.note("")
            if request["do"] == "run":
                self._send({"type": "began", "id": request["id"]})
            structlog.contextvars.bind_contextvars(job=request.get("job", request["do"]), table=request["uri"])
            try:
                _check_release()
                others = {"poll": _polled, "hold": _hold}
                result = others.get(request["do"], self._run)(request)
            except errors.MemwalOpsError as error:
                result = _failed(request["id"], error)
            except BaseException as error:  # noqa: BLE001 - the service must get a result, whatever a job does
                structlog.get_logger(__name__).exception("unexpected_error")
                result = _failed(request["id"], unexpected_error(error, None))
            if os.getpid() != self._pid:
                # A job forked, and its child returned here as well: it would send a second result, and wait forever.
                os._exit(0)
            if request["do"] == "poll" and protocol.children():
                protocol.terminate_children(
                    0.0
                )  # no built-in poll starts a process; those of runs end with their worker
            structlog.contextvars.clear_contextvars()
            self._current = None
            self._send(result)

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
        finally:  # the service has died, perhaps in the middle of a line
            protocol.signal_children(signal.SIGTERM)
            protocol.signal_group(os.getpid(), signal.SIGTERM)
            os._exit(0)

    def _run(self, request: Mapping[str, Any]) -> protocol.Result:
        lease = None if request["lease"] is None else protocol.lease_from_document(request["lease"])
        checked = 0.0

        def check_lease() -> None:
            if lease is not None:
                leases.check(run.table.store, lease)

        def checkpoint() -> None:
            nonlocal checked
            if self._terminated.is_set() or request["id"] in self._stopping:
                raise StopRequested
            if time.monotonic() - checked > _CHECK_SECONDS:
                check_lease()
                checked = time.monotonic()

        results: list[protocol.Result] = []
        # Not by run_job: ``apply: true`` of maintain in a configuration is its default, and deletes nothing.
        run = Run(
            request["uri"],
            request["job"],
            lambda spec: (spec.options.read(request["options"]), request["apply"]),
            storage_options=request["storage_options"],
            context=RunContext(_Listener(self._progress, checkpoint), LeaseGuard(check_lease, self._progress)),
            recorder=lambda run: results.append(
                protocol.Result(request["id"], **run.record(), remaining=_remaining(run), text=_plan_text(run))
            ),
        )
        try:
            # A service may itself be a part of some trace; its runs are not.
            with tracing.parent({}), tracing.run_span(request["job"], request["uri"]):
                run.perform()
        except (errors.MemwalOpsError, StopRequested):
            if run.is_refused and not request["named"]:
                word = protocol.NOT_APPLICABLE
                return protocol.Result(
                    request["id"], "succeeded", decision=word, report={"decision": word}, used=run.used
                )
            if not results:
                raise
        return results[0]

    def record(self, _: Any, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Send an event of the log to the service, which keeps the last ones of a run; a processor of structlog."""
        if self._current is not None and self._lines > 0 and os.getpid() == self._pid:
            self._lines -= 1
            self._send({"type": "log", "id": self._current, "line": _line(level, event)})
        return event

    def _progress(self, doing: Progress | None = None) -> None:
        now, self._doing = time.monotonic(), doing or self._doing
        if now - self._progress_sent > _PROGRESS_SECONDS:
            self._progress_sent = now
            doing = self._doing
            self._send(
                {"type": "progress", "id": self._current, "doing": None if doing is None else dataclasses.asdict(doing)}
            )

    def _send(self, message: protocol.Result | dict[str, Any]) -> None:
        with self._lock:
            try:
                self._out.write(protocol.encode(message))
                self._out.flush()
            except BrokenPipeError:
                os._exit(0)


class _Listener:
    """Reports the progress of a run to the service. And stops the run at a checkpoint, if the service asked for it."""

    def __init__(self, send: Callable[..., None], checkpoint: Callable[[], None]) -> None:
        self.heartbeat = self.progress = send
        self._checkpoint = checkpoint

    def step(self, name: str) -> None:
        """Report the step as what the run does now."""
        self.progress(Progress(name, "", 0))

    def checkpoint(self) -> None:
        """Report progress, and stop here if the service asked for it."""
        self.heartbeat()
        self._checkpoint()


def _line(level: str, event: Mapping[str, Any]) -> str:
    first = f"{event.get('timestamp', '')} {event.get('level', level)} {event.get('event', '')}"
    rest = (f"{key}={value}" for key, value in event.items() if key not in {*_FIRST, *_BOUND})
    return printable(" ".join([first, *rest])[:_MAX_LINE])


_FIRST = ("timestamp", "level", "event")
# Each line of a run has the same.
_BOUND = ("job", "table")


def _plan_text(run: Run) -> str:
    return "" if run.acts or run.report is None else printable(redact(run.report.describe())[:_MAX_TEXT], lines=True)


def _remaining(run: Run) -> Mapping[str, float] | None:
    """The backlog after a run that published and was blocked; None after any other run, or if it cannot be read."""
    context = run.context
    if run.report is None or not context.revisions:
        return None
    if not Figures(context.figures, run.table.format.name, "run").amount("blocked"):
        return None
    try:
        figures, _ = poll_table(run.table.newest(), [run.spec])
    except errors.MemwalOpsError:
        return None  # the next poll reports the error
    return figures


def _check_release() -> None:
    """Refuse to work for a service of another release: messages and jobs may differ.

    Timeline: a package is upgraded below a running service, whose workers are replaced from time to time.
    """
    service = os.environ.get(protocol.RELEASE_VARIABLE, __version__)
    if service != __version__:
        raise errors.UnsupportedFeatureError(
            f"memwal-ops {__version__} is installed, but the service runs {service}: it was upgraded while it ran.",
            remedy="Restart the service.",
        )


def _hold(request: Mapping[str, Any]) -> protocol.Result:
    table = registry.open_table(request["uri"], request["storage_options"])
    if request["release"]:
        hold = release_hold(table, request["release"])
    else:
        probe_conditional_writes(table.store)
        version, ttl = request["version"] or table.revision, timedelta(seconds=request["seconds"])
        hold = take_hold(table, version, ttl, note=request["note"])
    return protocol.Result(request["id"], "succeeded", report={"hold": hold.to_json()})


def _polled(request: Mapping[str, Any]) -> protocol.Result:
    measurement = Measurement()
    result = _poll(request)
    result = dataclasses.replace(
        result, used=measurement.used(registry.location_of(request["uri"], request["storage_options"]))
    )
    return dataclasses.replace(result, recorded=_recorded(request)) if request["failing"] else result


def _recorded(request: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    recorded: dict[str, dict[str, str]] = {}
    with suppress(errors.MemwalOpsError):
        store = open_store(registry.location_of(request["uri"], request["storage_options"]))
        files = leases.lease_files(store)
        for job in files.keys() & set(request["failing"]):
            with suppress(errors.MemwalOpsError):
                lease = leases.read_lease(store, job, files[job])
                if lease is not None and lease.last is not None:
                    recorded[job] = lease.last.to_json()
    return recorded


def _poll(request: Mapping[str, Any]) -> protocol.Result:
    uri, options, known = request["uri"], request["storage_options"], request["fingerprint"]
    if known and is_unchanged(uri, options, known):
        return protocol.Result(request["id"], "succeeded", fingerprint=known, unchanged=True)
    table = registry.open_table(uri, options)
    mine = table.jobs
    jobs = [mine[name] for name in request["jobs"] if name in mine]
    fingerprint = None if known is None else fingerprint_of(table, jobs)  # before the figures are read
    figures, faults = poll_table(table, jobs, request["options"])
    if request["record"] and isinstance(table.format, RecordsRevisions):
        table.format.record_revisions(table)
    report = _history(table) if request["history"] else None
    applies = tuple(job.name for job in jobs)
    read = protocol.Result(
        request["id"], "succeeded", figures=figures, version=table.revision, report=report, applies=applies
    )
    if not faults:
        return dataclasses.replace(read, fingerprint=fingerprint)
    failed = _failed(request["id"], faults[0])
    return dataclasses.replace(failed, figures=figures, version=table.revision, report=report, applies=applies)


def _history(table: Table) -> Mapping[str, Any] | None:
    """The recent history; the poll succeeds without it, so an error is only logged."""
    try:
        document = table_history.history_document(table, _REVISIONS)
    except errors.MemwalOpsError as error:
        structlog.get_logger(__name__).warning("history_not_read", error=redact(str(error)))
        return None
    return None if document is None else bounded(document)


def _failed(number: int, error: errors.MemwalOpsError) -> protocol.Result:
    return protocol.Result(number, "failed", **failure(error))


def main() -> None:
    """Serve requests on stdin and stdout. What libraries print on stdout is redirected to stderr."""
    bound_allocators()
    if (opened := os.environ.pop(protocol.LAST_OPENED_VARIABLE, None)) is not None:  # not for processes that jobs start
        logging_setup.LastOpened.write_to(int(opened))
    logging_setup.configure(level=os.environ.get("MEMWAL_OPS_WORKER_LOG_LEVEL", "WARNING"), redact=redact)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    protocol.become_subreaper()
    with suppress(errors.JobPluginError):  # each request fails with it
        registry.all_job_specs()
    worker = Worker(sys.stdin.buffer, out)
    processors = structlog.get_config()["processors"]
    structlog.configure(processors=[*processors[:-1], worker.record, processors[-1]])
    worker.work()
    protocol.terminate_children()
    tracing.flush()
    sys.stderr.flush()
    os._exit(0)  # the thread that reads stdin cannot be ended, and Python's own exit waits for it


if __name__ == "__main__":
    main()
