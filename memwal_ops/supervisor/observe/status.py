"""Make the document of ``/api/v1/status``, from which the gauges are made too: all tables, jobs and pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.job import POOLS
from memwal_ops.core.next_run import next_run
from memwal_ops.supervisor.scheduling.breaker import breaker_status
from memwal_ops.supervisor.state.tables import LEASING, QUEUED, WATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from memwal_ops.supervisor.config.effective import TableSettings
    from memwal_ops.supervisor.events.listener import Listener
    from memwal_ops.supervisor.observe.status_document import (
        BudgetStatus,
        EventsStatus,
        JobStatus,
        LeaseStatus,
        PauseStatus,
        PoolStatus,
        TableStatus,
    )
    from memwal_ops.supervisor.scheduling.scheduler import Scheduler
    from memwal_ops.supervisor.state.pauses import Scope
    from memwal_ops.supervisor.state.tables import TableJob, TableState


# The year of the due time of a cron line that never fires.
_NEVER = 9999


def status_of(
    scheduler: Scheduler, fires: Callable[[str, str], datetime | None] = lambda *_: None
) -> tuple[list[TableStatus], dict[str, PoolStatus]]:
    """Return ``tables`` and ``pools`` of the status; ``fires`` returns when the timer of a table and job fires."""
    with scheduler.lock:
        now, mono = scheduler.clock.now(), scheduler.clock.monotonic()
        tables = [_table(scheduler, state, now, mono, fires) for _, state in sorted(scheduler.tables.items())]
        pools = {pool: _pool(scheduler, pool) for pool in (*POOLS, WATCH)}
        return tables, pools


def tables_status(
    scheduler: Scheduler, names: Iterable[str], fires: Callable[[str, str], datetime | None] = lambda *_: None
) -> list[TableStatus]:
    """Return the status of some tables, of those that exist, in the order of ``names``."""
    with scheduler.lock:
        now, mono = scheduler.clock.now(), scheduler.clock.monotonic()
        states = (scheduler.tables.get(name) for name in names)
        return [_table(scheduler, state, now, mono, fires) for state in states if state is not None]


def table_stamps(scheduler: Scheduler) -> dict[str, object]:
    """Return for each table, by name, a value that changes whenever it is polled, or a job of it changes its state."""
    with scheduler.lock:
        return {
            name: (
                state.result_at,
                state.error is None,
                *((one.state, one.waiting, one.failures, one.finished) for one in state.entries.values()),
            )
            for name, state in scheduler.tables.items()
        }


def _pool(scheduler: Scheduler, pool: str) -> PoolStatus:
    workers = [worker for worker in scheduler.pools.all() if worker.pool == pool]
    if pool == WATCH:
        queued = sum(state.poll_due is not None for state in scheduler.tables.values())
    else:
        queued = sum(entry.state == QUEUED and entry.settings.job.pool == pool for entry in scheduler.entries())
    busy = sum(worker.request is not None for worker in workers)
    return {"limit": scheduler.pools.limit(pool).workers, "workers": len(workers), "busy": busy, "queued": queued}


def _table(
    scheduler: Scheduler, state: TableState, now: datetime, mono: float, fires: Callable[[str, str], datetime | None]
) -> TableStatus:
    return {
        "name": state.table.name,
        "uri": state.table.uri,
        "format": state.table.settings.format,
        "version": state.version,
        "backlog": dict(state.figures),
        "looked_at": _iso(state.polled),
        "seconds_since_look": _since(state.polled, now),
        "look_error": state.error,
        "expect_writes_seconds": expected_seconds(state.table.settings),
        "labels": dict(state.table.settings.labels),
        "clock_skew_seconds": scheduler.skews.get(state.table.name),
        "answers": [dict(one) for entry in state.entries.values() for one in entry.answers],
        "paused": paused(scheduler, (state.table.name,)),
        "jobs": {
            name: {
                **job_status(entry, now, mono, fires(*entry.key), state.figures, paused(scheduler, entry.key)),
                "breaker": breaker_status(entry, scheduler.settings.config.backoff.longest, now),
                "applies": state.applies is None or name in state.applies,
            }
            for name, entry in sorted(state.entries.items())
        },
    }


def budget_status(scheduler: Scheduler) -> BudgetStatus | None:
    """Return the budget of the fleet; None: none is configured."""
    with scheduler.lock:
        return scheduler.ranking.to_json(scheduler.begun(), scheduler.clock.now())


def published_budget(scheduler: Scheduler) -> Mapping[str, Any] | None:
    """Return what other members of the fleet are to know of it."""
    with scheduler.lock:
        return scheduler.ranking.published(scheduler.begun(), scheduler.clock.now())


def events_status(scheduler: Scheduler, listener: Listener) -> EventsStatus:
    """Return whether events of the store come."""
    with scheduler.lock:
        covered, missed = scheduler.announced.covered(), scheduler.announced.missed()
    return listener.status(covered, missed)


def paused(scheduler: Scheduler, scope: Scope) -> PauseStatus | None:
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
    pause: PauseStatus | None = None,
) -> JobStatus:
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
        "backoff_seconds": round(left, 3) if entry.failures else 0.0,
        "next_run": None
        if (costs := next_run(entry.settings.job, figures or {}, entry.rates)) is None
        else costs.to_json(),
        "breaker": None,
        "paused": pause,
        "pid": None if run is None else run.worker.pid,
        "lease": _lease(entry, now),
    }


def _lease(entry: TableJob, now: datetime) -> LeaseStatus:
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
