"""What ``/api/v1/status`` shows, and what every gauge is made of: all tables, jobs and pools at one moment."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memwal_ops.jobs.api import POOLS
from memwal_ops.supervisor.state import LEASING, QUEUED, WATCH

if TYPE_CHECKING:
    from datetime import datetime

    from memwal_ops.supervisor.conductor import Conductor
    from memwal_ops.supervisor.state import Entry, TableState


# A cron line that never comes.
_NEVER = 9999


def status_of(conductor: Conductor) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The ``tables`` and ``pools`` of the status document."""
    with conductor.lock:
        now, mono = conductor.clock.now(), conductor.clock.monotonic()
        tables = [_table(conductor, state, now, mono) for _, state in sorted(conductor.tables.items())]
        pools = {pool: _pool(conductor, pool) for pool in (*POOLS, WATCH)}
        return tables, pools


def _pool(conductor: Conductor, pool: str) -> dict[str, int]:
    workers = [worker for worker in conductor.pools.all() if worker.pool == pool]
    if pool == WATCH:
        queued = sum(state.look_due is not None for state in conductor.tables.values())
    else:
        queued = sum(entry.state == QUEUED and entry.settings.job.pool == pool for entry in conductor.entries())
    busy = sum(worker.request is not None for worker in workers)
    return {"limit": conductor.pools.limit(pool).workers, "workers": len(workers), "busy": busy, "queued": queued}


def _table(conductor: Conductor, state: TableState, now: datetime, mono: float) -> dict[str, Any]:
    return {
        "name": state.table.name,
        "uri": state.table.uri,
        "version": state.version,
        "backlog": dict(state.figures),
        "looked_at": _iso(state.looked),
        "seconds_since_look": _since(state.looked, now),
        "look_error": state.error,
        "clock_skew_seconds": conductor.skews.get(state.table.name),
        "jobs": {name: job_status(entry, now, mono) for name, entry in sorted(state.entries.items())},
    }


def job_status(entry: Entry, now: datetime, mono: float) -> dict[str, Any]:
    """A job on a table, as the status shows it."""
    schedule, run = entry.settings.schedule, entry.run
    # Not in a closed window or in back-off: that is as it should be.
    waits = entry.state == LEASING or (entry.state == QUEUED and entry.waiting in {"worker", "lease"})
    left = 0.0 if entry.not_before is None else max(0.0, (entry.not_before - now).total_seconds())
    return {
        "state": entry.state,
        "waiting_for": entry.waiting if entry.state == QUEUED else None,
        "why": entry.why or None,
        "apply": entry.settings.apply,
        "schedule": None if schedule is None else str(schedule),
        "schedule_seconds": 0.0 if schedule is None else schedule.period(now).total_seconds(),
        "next_due": None if schedule is None else _iso(schedule.due_after(entry.started, entry.first_seen)),
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
        "pid": None if run is None else run.worker.pid,
        "lease": _lease(entry, now),
    }


def _lease(entry: Entry, now: datetime) -> dict[str, Any]:
    lease = entry.lease or entry.other
    state = "held" if entry.lease is not None else "free" if entry.other is None else "elsewhere"
    return {
        "state": state,
        "holder": None if lease is None else asdict(lease.holder),
        "token": None if lease is None else lease.token,
        "expires": None if lease is None else _iso(lease.expires),
        "elsewhere_seconds": 0.0 if entry.other is None else _since(entry.other_since, now) or 0.0,
    }


def _iso(when: datetime | None) -> str | None:
    return None if when is None or when.year == _NEVER else when.isoformat(timespec="milliseconds")


def _since(when: datetime | None, now: datetime) -> float | None:
    return None if when is None else round(max(0.0, (now - when).total_seconds()), 3)
