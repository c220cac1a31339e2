"""Collect the fleet status for ``memwal-ops status``: every table of a configuration, also if no service runs.

Backlogs and leases are read from the tables, runs from the history; what only a running service has (what is
queued, what it waits for) comes from its status. Nothing is written.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict

from memwal_ops.core.figures import Figures, jobs_of
from memwal_ops.core.leases import list_leases
from memwal_ops.core.next_run import rates_of
from memwal_ops.core.registry import all_job_specs, formats, open_table
from memwal_ops.core.run import unexpected_error
from memwal_ops.errors import HistoryError, MemwalOpsError, StoreUnavailableError, runbook
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.observe.status import expected_seconds, job_status
from memwal_ops.supervisor.observe.status_document import JobStatus, TableStatus
from memwal_ops.supervisor.scheduling.breaker import breaker_status
from memwal_ops.supervisor.state.directory import history_path, state_dir
from memwal_ops.supervisor.state.history import COMPLETED, History
from memwal_ops.supervisor.state.outcomes import last_answers, past_runs
from memwal_ops.supervisor.state.tables import TableJob
from memwal_ops.supervisor.workers.isolated_polling import poll_isolated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from memwal_ops.core.leases import Lease
    from memwal_ops.supervisor.config.effective import Settings
    from memwal_ops.supervisor.scheduling.discovery import FoundTable

_CONCURRENT_READS = 8
_BLOCKED_EXIT_CODE = 10
_WITH_REPORT = 10


@dataclass(frozen=True, slots=True)
class TableReading:
    """What was read from a table itself."""

    version: int | None = None
    figures: Mapping[str, float] | None = None
    blocked: tuple[Mapping[str, Any], ...] = ()
    leases: tuple[Lease, ...] = ()
    error: MemwalOpsError | None = None
    jobs: frozenset[str] | None = None


class ErrorDocument(TypedDict):
    """An error, with the keys that all commands print with ``--json``."""

    reason: str
    message: str
    remedy: str
    exit_code: int
    runbook: str | None


class FleetTable(TableStatus):
    """A table as in the service's status.

    It has the error of reading it, too, and the ``blocked`` entries of reports.
    """

    error: ErrorDocument | None
    blocked: list[Mapping[str, Any]]


class FleetStatus:
    """Reads all tables and the history.

    Args:
        settings: the configuration.
        status: the status document of the running service, or None.
    """

    def __init__(self, settings: Settings, status: Mapping[str, Any] | None) -> None:
        """Open the history, if there is one."""
        tables = [] if status is None else status["tables"]
        self._service_tables = {(table["name"], table["uri"]): table for table in tables}
        self._longest = settings.config.backoff.longest
        self._instance = _instance(state_dir(settings.config))
        self._formats: dict[str, str | None] = {}
        self.applicable: dict[str, frozenset[str] | None] = {}
        """By name of a table that was read, the jobs that apply to it; None: it could not be read."""
        self.history_error: str | None = None
        self._history: History | None = None
        try:
            self._history = History.open_to_read(history_path(settings.config))
        except HistoryError as error:
            self.history_error = redact(str(error))

    def close(self) -> None:
        """Close the history."""
        if self._history is not None:
            self._history.close()

    def tables(self, found: Sequence[FoundTable], timeout: timedelta) -> list[FleetTable]:
        """Return a document for each table, by name; one that does not respond within ``timeout`` has that error."""
        self._formats = {table.uri: table.settings.format for table in found}
        readings = _read_all(found, timeout)
        self.applicable = {name: reading.jobs for name, reading in readings.items()}
        return [self._document(table, readings[table.name]) for table in sorted(found, key=lambda table: table.name)]

    def last_error(self, uri: str, job: str) -> Mapping[str, Any] | None:
        """Return the error of a job's last failure: reason, message, remedy and exit code; None if it had none."""
        runs = self._runs(table=uri, job=job, failed=True, limit=1)
        return {**runs[0]["error"], "exit_code": runs[0]["exit_code"]} if runs and runs[0]["error"] else None

    def _document(self, table: FoundTable, reading: TableReading) -> FleetTable:
        now = datetime.now(UTC)
        in_service = self._service_tables.get((table.name, table.uri))
        figures = dict(reading.figures or {})
        backlog = Figures(figures, table.settings.format)
        blocked = [*reading.blocked] or self._blocked_in_last_run(table, backlog)
        name = backlog.name_of("blocked")
        if blocked and name is not None:
            figures[name] = max(figures[name], len(blocked))
        jobs = {name: job for name, job in table.settings.jobs.items() if job.enabled}
        known = {} if in_service is None else in_service["jobs"]
        leases = {lease.job: lease for lease in reading.leases}
        return {
            "name": table.name,
            "uri": table.uri,
            "format": table.settings.format,
            "version": reading.version,
            "backlog": figures,
            "looked_at": now.isoformat(timespec="milliseconds"),
            "seconds_since_look": 0.0,
            "look_error": None if reading.error is None else redact(str(reading.error)),
            "expect_writes_seconds": expected_seconds(table.settings),
            "labels": dict(table.settings.labels),
            "error": None if reading.error is None else error_document(reading.error),
            "clock_skew_seconds": None if in_service is None else in_service["clock_skew_seconds"],
            "blocked": blocked,
            "answers": self._answers(table) if in_service is None else in_service["answers"],
            "paused": None if in_service is None else in_service.get("paused"),
            "jobs": {
                name: self._job(TableJob(table, jobs[name], now), leases.get(name), known.get(name), now, figures)
                for name in sorted(jobs)
            },
        }

    def _job(
        self, entry: TableJob, lease: Lease | None, known: JobStatus | None, now: datetime, figures: Mapping[str, float]
    ) -> JobStatus:
        """Return a job's status: from the running service, else from the history; the lease is the table's."""
        entry = self._with_history(entry, now)
        if lease is not None:
            last = lease.last
            if last is not None and (entry.finished is None or last.finished > entry.finished):
                # A run of another supervisor, or one that another history file records.
                entry.started = entry.finished = last.finished
                entry.outcome = last.outcome
                entry.succeeded = last.finished if last.outcome == "succeeded" else entry.succeeded
                entry.failures = 0 if last.outcome in COMPLETED else entry.failures
            if lease.in_force(now):
                ours = lease.holder.instance == self._instance
                entry.lease, entry.other = (lease, None) if ours else (None, lease)
        status = job_status(entry, now, 0.0, figures=figures)
        status["breaker"] = breaker_status(entry, self._longest, now)
        if known is None:
            return status
        since = known["lease"]["elsewhere_seconds"]
        read = {"next_run": status["next_run"], "lease": {**status["lease"], "elsewhere_seconds": since}}
        return {**known, **read}  # type: ignore[typeddict-item]  # two of its keys

    def _with_history(self, entry: TableJob, now: datetime) -> TableJob:
        if self._history is not None:
            name, job = entry.key
            try:
                last = self._history.last(name, entry.table.uri, job, now)
                entry = TableJob.from_history(last.clamped(now), entry.table, entry.settings)
            except HistoryError as error:
                self._close_damaged(error)
        if entry.settings.job.debt is not None:
            runs = self._runs(table=entry.table.uri, job=entry.settings.name, limit=_WITH_REPORT)
            entry.rates = rates_of(entry.settings.name, past_runs(runs))
        return entry

    def _runs(self, **filters: Any) -> list[dict[str, Any]]:
        if self._history is not None:
            try:
                return self._history.runs(**filters)
            except HistoryError as error:
                self._close_damaged(error)
        return []

    def _close_damaged(self, error: HistoryError) -> None:
        """Continue without a damaged history: it must not hide the tables."""
        self.close()
        self._history, self.history_error = None, redact(str(error))

    def _answers(self, table: FoundTable) -> list[dict[str, Any]]:
        """Return how well the table's indexes answered, by the history: the service that asked does not run."""
        jobs = [job for job in table.settings.jobs.values() if job.job.reads_only and job.enabled]
        asked = [last_answers(self._runs(table=table.uri, job=job.name, limit=_WITH_REPORT)) for job in jobs]
        return [dict(one) for answers in asked for one in answers]

    def _blocked_in_last_run(self, table: FoundTable, backlog: Figures) -> list[Mapping[str, Any]]:
        """Return what the last run reported as blocked: a run opens the objects that a poll only lists."""
        if not backlog.amount("behind"):
            return []
        blocked: list[Mapping[str, Any]] = []
        for job in jobs_of("blocked", "run"):
            for run in self._runs(table=table.uri, job=job, limit=1):
                if run["exit_code"] == _BLOCKED_EXIT_CODE:
                    entries = (run["report"] or {}).get("blocked")
                    blocked += [part for part in entries if isinstance(part, dict)] if isinstance(entries, list) else []
        return blocked

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name of the part of a table that a ``blocked`` entry is about, and the place in it."""
        table_format = formats().get(self._formats.get(uri) or "")
        return ("", "") if table_format is None else table_format.part_of(blocked)


def error_document(error: MemwalOpsError) -> ErrorDocument:
    """Return the document of an error, with its runbook page."""
    return {
        "reason": error.reason,
        "message": redact(str(error)),
        "remedy": redact(error.remedy),
        "exit_code": error.exit_code,
        "runbook": runbook(error.exit_code, error.reason),
    }


def _read_all(tables: Sequence[FoundTable], timeout: timedelta) -> dict[str, TableReading]:
    """Read every table, a few at once. The threads are not joined: a store that hangs must not delay the result."""
    waiting: queue.SimpleQueue[FoundTable] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[str, TableReading]] = queue.SimpleQueue()
    for table in tables:
        waiting.put(table)

    def work() -> None:
        while True:
            try:
                table = waiting.get_nowait()
            except queue.Empty:
                return
            results.put((table.name, _read(table)))

    all_job_specs()
    for _ in range(min(_CONCURRENT_READS, len(tables))):
        threading.Thread(target=work, name="status", daemon=True).start()
    seconds = timeout.total_seconds()
    late = StoreUnavailableError(f"It did not respond within {seconds:g} s (--timeout).")
    readings = {table.name: TableReading(error=late) for table in tables}
    ends = time.monotonic() + seconds
    for _ in tables:
        try:
            name, reading = results.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        readings[name] = reading
    return readings


def _read(found: FoundTable) -> TableReading:
    reading = TableReading()
    try:
        table = open_table(found.uri, found.settings.storage_options)
        enabled = {name for name, job in found.settings.jobs.items() if job.enabled}
        wanted = [table.jobs[name] for name in table.jobs if name in {*jobs_of("backlog"), *enabled}]
        options = {name: job.options for name, job in found.settings.jobs.items() if job.options}
        figures, faults = poll_isolated(table, found.settings.storage_options, wanted, options)
        reading = TableReading(table.revision, figures, error=faults[0] if faults else None)
        reading = replace(reading, jobs=frozenset(table.jobs))
        reading = replace(reading, leases=list_leases(table.store))
        if Figures(figures, table.format.name).amount("blocked"):
            reading = replace(reading, blocked=tuple(part.document for part in table.format.summarize(table).blocked))
    except MemwalOpsError as error:
        return replace(reading, error=reading.error or error)
    except Exception as error:  # noqa: BLE001 - one table must not hide the others
        return replace(reading, error=reading.error or unexpected_error(error, None))
    return reading


def _instance(folder: str) -> str | None:
    """Return the instance id of a state folder's service; None if none ever ran there."""
    try:
        with open(os.path.join(folder, "instance"), encoding="ascii") as file:
            return str(uuid.UUID(file.read().strip()))
    except (OSError, ValueError):
        return None
