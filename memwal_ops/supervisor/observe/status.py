"""The status of all tables, jobs and pools: of a service (``/api/v1/status``), and of a fleet without one.

The gauges and the pages are made of the first. For ``memwal-ops status``, backlogs and leases are read from the tables
and runs from the history; what only a running service has (what is queued, what it waits for) comes from its status.
Nothing is written.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, TypedDict

from memwal_ops.core import registry
from memwal_ops.core.figures import Figures, jobs_of, poll_table
from memwal_ops.core.job import POOLS
from memwal_ops.core.leases import Lease, list_leases
from memwal_ops.core.outlook import next_run, rates_of
from memwal_ops.core.run import unexpected_error
from memwal_ops.errors import HistoryError, MemwalOpsError, StoreUnavailableError, runbook
from memwal_ops.log import get_logger
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.effective import Settings, TableSettings
from memwal_ops.supervisor.events import EventListener
from memwal_ops.supervisor.observe import status_document
from memwal_ops.supervisor.observe.findings import NOT_READ, state_of
from memwal_ops.supervisor.observe.spending import Spending
from memwal_ops.supervisor.scheduling.backlogs import idle_seconds
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.scheduling.due import breaker_status
from memwal_ops.supervisor.scheduling.scheduler import Scheduler
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.state.directory import history_path, state_dir
from memwal_ops.supervisor.state.history import COMPLETED, History
from memwal_ops.supervisor.state.outcomes import last_answers, past_runs
from memwal_ops.supervisor.state.pauses import Scope
from memwal_ops.supervisor.state.tables import LEASING, QUEUED, WATCH, TableJob, TableState

# The year of the due time of a cron line that never fires.
_NEVER = 9999
_PART = 500


def status_of(
    scheduler: Scheduler, timers: Timers | None = None
) -> tuple[Iterator[status_document.TableStatus], dict[str, status_document.PoolStatus]]:
    """Return ``tables`` and ``pools`` of the status; ``timers``: when schedules and polls are due next.

    Tables are made as they are read: the documents of ten thousand have 300 MB.
    """
    with scheduler.lock:
        pools = {pool: _pool(scheduler, pool) for pool in (*POOLS, WATCH)}
        names = sorted(scheduler.tables)
    parts = (tables_status(scheduler, names[at : at + _PART], timers) for at in range(0, len(names), _PART))
    return chain.from_iterable(parts), pools


def tables_status(
    scheduler: Scheduler, names: Iterable[str], timers: Timers | None = None
) -> list[status_document.TableStatus]:
    """Return the status of some tables, of those that exist, in the order of ``names``."""
    with scheduler.lock:
        now, mono = scheduler.clock.now(), scheduler.clock.monotonic()
        states = (scheduler.tables.get(name) for name in names)
        limits = scheduler.mark_deferred()
        return [_table(scheduler, state, now, mono, timers, limits) for state in states if state is not None]


def table_stamps(scheduler: Scheduler, names: Iterable[str] | None = None) -> dict[str, object]:
    """Return for each table, or for these, a value that changes whenever it is polled, or a job changes its state."""
    with scheduler.lock:
        scheduler.mark_deferred()
        tables = scheduler.tables
        if names is not None:
            tables = {name: tables[name] for name in names if name in tables}
        return {
            name: (
                state.result_at,
                state.error is None,
                *((entry.state, entry.waiting, entry.failures, entry.finished) for entry in state.entries.values()),
            )
            for name, state in tables.items()
        }


def _pool(scheduler: Scheduler, pool: Any) -> status_document.PoolStatus:
    workers = [worker for worker in scheduler.pools.all() if worker.pool == pool]
    if pool == WATCH:
        queued = sum(state.poll_due is not None for state in scheduler.tables.values())
    else:
        queued = sum(entry.state == QUEUED and entry.settings.job.pool == pool for entry in scheduler.entries())
    busy = sum(worker.request is not None for worker in workers)
    limit, credit = scheduler.pools.limit(pool).workers, 0.0 if pool == WATCH else scheduler.ranking.credit(pool)
    return {"limit": limit, "workers": len(workers), "busy": busy, "queued": queued, "credit": credit}


def _table(
    scheduler: Scheduler,
    state: TableState,
    now: datetime,
    mono: float,
    timers: Timers | None,
    limits: Mapping[tuple[str, str], str],
) -> status_document.TableStatus:
    fingerprint = None if state.reading is None else state.reading.fingerprint

    def fires(entry: TableJob) -> datetime | None:
        return None if timers is None else timers.next_run(*entry.key)

    return {
        "name": state.table.name,
        "uri": state.table.uri,
        "format": state.table.settings.format,
        "version": state.version,
        "state": state_of(state.polled, state.error),
        "backlog": dict(state.figures),
        "looked_at": _iso(state.polled),
        "seconds_since_look": _since(state.polled, now),
        "look_error": state.error,
        "idle_poll_seconds": idle_seconds(state, len(scheduler.tables)),
        "expect_writes_seconds": expected_seconds(state.table.settings),
        "labels": dict(state.table.settings.labels),
        "clock_skew_seconds": scheduler.skews.get(state.table.name),
        "answers": [dict(answer) for entry in state.entries.values() for answer in entry.answers],
        "paused": paused(scheduler, (state.table.name,)),
        "scheduling": state.remembered(mono, None if timers is None else timers.next_poll(state.table.name)),
        "jobs": {
            name: {
                **job_status(entry, now, mono, fires(entry), state.figures, paused(scheduler, entry.key)),
                "limit": limits.get(entry.key),
                "scheduling": entry.remembered(mono, fingerprint),
                "breaker": breaker_status(entry, scheduler.settings.config.backoff.longest, now),
                **_applying(applies=state.applies_to(entry)),
            }
            for name, entry in sorted(state.entries.items())
        },
    }


def _applying(*, applies: bool) -> Any:
    """The keys of a job that depend on whether it applies to its table: what does not apply has no success."""
    return {"applies": True} if applies else {"applies": False, "last_success": None, "seconds_since_success": None}


def budget_status(scheduler: Scheduler) -> status_document.BudgetStatus | None:
    """Return the budget of the fleet; None: none is configured."""
    with scheduler.lock:
        return scheduler.ranking.to_json(scheduler.begun(), scheduler.clock.now())


def published_budget(scheduler: Scheduler) -> Mapping[str, Any] | None:
    """Return what other members of the fleet are to know of it."""
    with scheduler.lock:
        return scheduler.ranking.published(scheduler.begun(), scheduler.clock.now())


def events_status(scheduler: Scheduler, listener: EventListener) -> status_document.EventsStatus:
    """Return whether events of the store come."""
    with scheduler.lock:
        covered, missed = scheduler.announced.covered(), scheduler.announced.missed()
    return listener.status(covered, missed)


def paused(scheduler: Scheduler, scope: Scope) -> status_document.PauseStatus | None:
    """Return the pause of exactly a scope."""
    pause = scheduler.pauses.of(scope, scheduler.clock.now())
    return None if pause is None else pause.to_json()


def expected_seconds(settings: TableSettings) -> float | None:
    """Return ``expect_writes_within`` in seconds; None: it is not configured."""
    expected = settings.expect_writes_within
    return None if expected is None else expected.total_seconds()


def job_status(
    entry: TableJob,
    now: datetime,
    mono: float,
    fires: datetime | None = None,
    figures: Mapping[str, float] | None = None,
    pause: status_document.PauseStatus | None = None,
) -> status_document.JobStatus:
    """Return the status of a job on a table.

    ``fires``: when its timer fires, which a run by backlog does not change; without a timer it follows from the last
    run. ``figures``: the backlog of the table. ``pause``: the job's own.
    """
    schedule, run = entry.settings.schedule, entry.run
    if fires is None and schedule is not None:
        fires = schedule.due_after(entry.started, entry.first_seen)
    # A job in a closed window or in backoff does not wait: it is meant to be idle.
    waits = entry.state == LEASING or (entry.state == QUEUED and entry.waiting in {"worker", "lease"})
    left = 0.0 if entry.not_before is None else max(0.0, (entry.not_before - now).total_seconds())
    return {
        "state": entry.state,
        "waiting_for": entry.waiting if entry.state == QUEUED else None,
        "why": entry.why or None,
        "apply": entry.settings.apply,
        "applies": True,
        "answers_only": bool(entry.settings.options.get("answers_only")),
        "schedule": None if schedule is None else str(schedule),
        "schedule_seconds": 0.0 if schedule is None else schedule.period(now).total_seconds(),
        "next_due": _iso(fires),
        "when": None if entry.settings.when is None else entry.settings.when.text,
        "last_started": _iso(entry.started),
        "last_finished": _iso(entry.finished),
        "last_success": _iso(entry.succeeded),
        "last_outcome": entry.outcome,
        "seconds_since_success": _since(entry.succeeded or entry.first_seen, now),
        "consecutive_failures": entry.failures,
        "waiting_seconds": (_since(entry.due, now) or 0.0) if waits else 0.0,
        "running_seconds": 0.0 if run is None else round(mono - run.began, 3),
        "asked": None if entry.asked_by is None else {"by": entry.asked_by, "since": _iso(entry.asked_at)},
        "progress": None if run is None else run.doing_status(mono),
        "backoff_seconds": round(left, 3) if entry.failures else 0.0,
        "next_run": None
        if (costs := next_run(entry.settings.job, figures or {}, entry.rates)) is None
        else costs.to_json(),
        "breaker": None,
        "limit": None,
        "scheduling": {},
        "paused": pause,
        "pid": None if run is None else run.worker.pid,
        "lease": _lease(entry, now),
    }


def _lease(entry: TableJob, now: datetime) -> status_document.LeaseStatus:
    lease = entry.lease or entry.other
    state = "held" if entry.lease is not None else "free" if entry.other is None else "elsewhere"
    return {
        "state": state,
        "holder": None if lease is None else {"instance": lease.holder.instance, "name": lease.holder.name},
        "token": None if lease is None else lease.token,
        "expires": None if lease is None else _iso(lease.expires),
        "elsewhere_seconds": 0.0 if entry.other is None else _since(entry.other_since, now) or 0.0,
    }


def _iso(when: datetime | None) -> str | None:
    return None if when is None or when.year == _NEVER else when.isoformat(timespec="milliseconds")


def _since(when: datetime | None, now: datetime) -> float | None:
    return None if when is None else round(max(0.0, (now - when).total_seconds()), 3)


_CONCURRENT_READS = 8
_HANGS_PART = 0.5
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


_NOT_READ = TableReading()
"""Of a table that was not begun to be read: the time was over."""


class ErrorDocument(TypedDict):
    """An error, with the keys that all commands print with ``--json``."""

    reason: str
    message: str
    remedy: str
    exit_code: int
    runbook: str | None


class FleetTable(status_document.TableStatus):
    """A table as in the service's status.

    It has the error of reading it, too, and the ``blocked`` entries of reports.
    """

    error: ErrorDocument | None
    blocked: list[Mapping[str, Any]]


@dataclass
class RunReports:
    """What the last runs on tables reported: a run opens the objects that a poll only lists.

    ``runs``: returns the newest runs, by table, job, failed and limit. ``format_of``: returns the name of the format of
    a table, by its URI; None if it is not known yet.
    """

    runs: Callable[..., list[dict[str, Any]]]
    format_of: Callable[[str], str | None]

    def last_error(self, uri: str, job: str) -> Mapping[str, Any] | None:
        """Return the error of a job's last failure: reason, message, remedy and exit code; None if it had none."""
        runs = self.runs(table=uri, job=job, failed=True, limit=1)
        return {**runs[0]["error"], "exit_code": runs[0]["exit_code"]} if runs and runs[0]["error"] else None

    def blocked_in_last_run(self, uri: str) -> list[Mapping[str, Any]]:
        """Return the ``blocked`` entries of the last runs."""
        last = [run for job in jobs_of("blocked", "run") for run in self.runs(table=uri, job=job, limit=1)]
        reports = [run["report"] or {} for run in last if run["exit_code"] == _BLOCKED_EXIT_CODE]
        entries = [entries for report in reports if isinstance(entries := report.get("blocked"), list)]
        return [entry for some in entries for entry in some if isinstance(entry, dict)]

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name of the part of a table that a ``blocked`` entry is about, and the place in it."""
        table_format = registry.formats().get(self.format_of(uri) or "")
        return ("", "") if table_format is None else table_format.part_of(blocked)


class FleetStatus(RunReports):
    """Reads all tables and the history."""

    def __init__(self, settings: Settings, status: Mapping[str, Any] | None) -> None:
        self._formats: dict[str, str | None] = {}
        super().__init__(self._runs, self._formats.get)
        tables = [] if status is None else status["tables"]
        self._service_tables = {(table["name"], table["uri"]): table for table in tables}
        self._longest = settings.config.backoff.longest
        self._instance = _instance(state_dir(settings.config))
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
        self._formats.update((table.uri, table.settings.format) for table in found)
        readings = _read_all(found, timeout)
        self.applicable = {name: reading.jobs for name, reading in readings.items()}
        return [self._document(table, readings[table.name]) for table in sorted(found, key=lambda table: table.name)]

    def _document(self, table: FoundTable, reading: TableReading) -> FleetTable:
        now = datetime.now(UTC)
        in_service = self._service_tables.get((table.name, table.uri))
        figures = dict(reading.figures or {})
        backlog = Figures(figures, table.settings.format)
        blocked = [*reading.blocked] or (self.blocked_in_last_run(table.uri) if backlog.amount("behind") else [])
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
            "state": NOT_READ if reading is _NOT_READ else state_of(now, reading.error),
            "backlog": figures,
            "looked_at": None if reading.figures is None else now.isoformat(timespec="milliseconds"),
            "seconds_since_look": None if reading.figures is None else 0.0,
            "look_error": None if reading.error is None else redact(str(reading.error)),
            "idle_poll_seconds": None if in_service is None else in_service.get("idle_poll_seconds"),
            "expect_writes_seconds": expected_seconds(table.settings),
            "labels": dict(table.settings.labels),
            "error": None if reading.error is None else error_document(reading.error),
            "clock_skew_seconds": None if in_service is None else in_service["clock_skew_seconds"],
            "blocked": blocked,
            "answers": self._answers(table) if in_service is None else in_service["answers"],
            "paused": None if in_service is None else in_service.get("paused"),
            "scheduling": None if in_service is None else in_service.get("scheduling"),
            "jobs": {
                name: {
                    **self._job(TableJob(table, jobs[name], now), leases.get(name), known.get(name), now, figures),
                    **_applying(applies=reading.jobs is None or jobs[name].named or name in reading.jobs),
                }
                for name in sorted(jobs)
            },
        }

    def _job(
        self,
        entry: TableJob,
        lease: Lease | None,
        known: status_document.JobStatus | None,
        now: datetime,
        figures: Mapping[str, float],
    ) -> status_document.JobStatus:
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
        self.close()
        self._history, self.history_error = None, redact(str(error))

    def _answers(self, table: FoundTable) -> list[dict[str, Any]]:
        jobs = [job for job in table.settings.jobs.values() if job.job.reads_only and job.enabled]
        asked = [last_answers(self._runs(table=table.uri, job=job.name, limit=_WITH_REPORT)) for job in jobs]
        return [dict(answer) for answers in asked for answer in answers]


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
    """Read every table, a few of each store at once: one that hangs must not delay the others, nor the result."""
    results: queue.SimpleQueue[tuple[str, TableReading]] = queue.SimpleQueue()
    began: dict[str, datetime] = {}
    over = threading.Event()

    def work(waiting: queue.SimpleQueue[FoundTable]) -> None:
        while True:
            try:
                table = waiting.get_nowait()
            except queue.Empty:
                return
            if over.is_set():
                return
            began[table.name] = datetime.now(UTC)
            results.put((table.name, _read(table)))

    registry.all_job_specs()
    by_store: dict[str, list[FoundTable]] = {}
    for table in tables:
        by_store.setdefault(table.store, []).append(table)
    for of_store in by_store.values():
        waiting: queue.SimpleQueue[FoundTable] = queue.SimpleQueue()
        for table in of_store:
            waiting.put(table)
        for _ in range(min(max(1, _CONCURRENT_READS // len(by_store)), len(of_store))):
            threading.Thread(target=work, args=(waiting,), name="status", daemon=True).start()
    seconds = timeout.total_seconds()
    readings: dict[str, TableReading] = {}
    ends = time.monotonic() + seconds
    for _ in tables:
        try:
            name, reading = results.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        readings[name] = reading
    over.set()
    late = TableReading(error=StoreUnavailableError(f"It did not respond within {seconds:g} s (--timeout)."))
    # One that was begun shortly before the end is not late: it was not read.
    hangs = {name for name, when in [*began.items()] if datetime.now(UTC) - when >= timeout * _HANGS_PART}
    return {table.name: readings.get(table.name, late if table.name in hangs else _NOT_READ) for table in tables}


def _read(found: FoundTable) -> TableReading:
    reading = TableReading()
    try:
        table = registry.open_table(found.uri, found.settings.storage_options)
        enabled = {name for name, job in found.settings.jobs.items() if job.enabled}
        wanted = [table.jobs[name] for name in table.jobs if name in {*jobs_of("backlog"), *enabled}]
        options = {name: job.options for name, job in found.settings.jobs.items() if job.options}
        with registry.format_errors(table.format):
            figures, faults = poll_table(table, wanted, options)
            reading = TableReading(table.revision, figures, error=faults[0] if faults else None)
            reading = replace(reading, jobs=frozenset(table.jobs))
            reading = replace(reading, leases=list_leases(table.store))
            if Figures(figures, table.format.name).amount("blocked"):
                reading = replace(
                    reading, blocked=tuple(part.document for part in table.format.summarize(table).blocked)
                )
    except MemwalOpsError as error:
        return replace(reading, error=reading.error or error)
    except Exception as error:  # noqa: BLE001 - one table must not hide the others
        return replace(reading, error=reading.error or unexpected_error(error, None))
    return reading


def _instance(folder: str) -> str | None:
    try:
        with open(os.path.join(folder, "instance"), encoding="ascii") as file:
            return str(uuid.UUID(file.read().strip()))
    except (OSError, ValueError):
        return None


class ScheduledTables:
    """The scheduler's tables, for the pages."""

    def __init__(self, scheduler: Scheduler, timers: Timers, history: History, spending: Spending) -> None:
        self._scheduler, self._timers, self._history, self._spending = scheduler, timers, history, spending
        self._lock = threading.Lock()
        self._later: dict[str, Mapping[str, Any]] = {}
        self._last_run = 0

    def stamps(self, names: Iterable[str] | None = None) -> Mapping[str, object]:
        """See overview.Tables."""
        return table_stamps(self._scheduler, names)

    def status(self, names: Iterable[str]) -> list[status_document.TableStatus]:
        """See overview.Tables."""
        return tables_status(self._scheduler, names, self._timers)

    def deletable_later(self) -> Mapping[str, Mapping[str, Any]]:
        """What runs of expire reported, with those since the last call, if the history can be read."""
        with self._lock, self._logged():
            for number, table, later in self._history.deletable_later(self._last_run):
                self._later[table], self._last_run = later, number
        return dict(self._later)

    def costs(self) -> Mapping[str, float]:
        """See overview.Tables."""
        return self._spending.week()

    def read_costs(self) -> None:
        """See overview.Tables."""
        with self._logged():
            self._spending.read()

    @contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except HistoryError as error:
            get_logger(__name__).error("history_not_read", error=str(error))
