"""What ``memwal-ops status`` tells: every table of a configuration, with or without a service that runs.

Backlogs and leases come from the tables themselves, runs from the history; what only a running service can
know (what is queued, what it waits for) from its status. Nothing is written anywhere.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.leases import list_leases
from memwal_ops.core.table import open_table
from memwal_ops.errors import HistoryError, MemwalOpsError, StoreUnavailableError, runbook
from memwal_ops.jobs.inspect import inspect
from memwal_ops.jobs.registry import load_jobs
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.history import History
from memwal_ops.supervisor.job_answers import unexpected
from memwal_ops.supervisor.looking import look_at
from memwal_ops.supervisor.state import Entry
from memwal_ops.supervisor.state_dir import history_path, state_dir
from memwal_ops.supervisor.status import job_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from memwal_ops.core.leases import Lease
    from memwal_ops.supervisor.discovery import FoundTable
    from memwal_ops.supervisor.settings import Settings

_AT_ONCE = 8
_BLOCKED = 10


@dataclass(frozen=True, slots=True)
class Seen:
    """What a table itself says."""

    version: int | None = None
    figures: Mapping[str, float] | None = None
    blocked: tuple[Mapping[str, Any], ...] = ()
    leases: tuple[Lease, ...] = ()
    error: MemwalOpsError | None = None


class Survey:
    """Asks all tables, and the history once.

    Args:
        settings: the configuration.
        status: what the running service says of itself, or None.
    """

    def __init__(self, settings: Settings, status: Mapping[str, Any] | None) -> None:
        """Open the history, if there is one."""
        self._told = {} if status is None else {(one["name"], one["uri"]): one for one in status["tables"]}
        self._instance = _instance(state_dir(settings.config))
        self.history_error: str | None = None
        self._history: History | None = None
        try:
            self._history = History.open_to_read(history_path(settings.config))
        except HistoryError as error:
            self.history_error = redact(str(error))

    def close(self) -> None:
        """Let go of the history."""
        if self._history is not None:
            self._history.close()

    def tables(self, found: Sequence[FoundTable], patience: timedelta) -> list[dict[str, Any]]:
        """A document for each table, by name; one that does not answer in time is told as such."""
        seen = _ask_all(found, patience)
        return [self._document(table, seen[table.name]) for table in sorted(found, key=lambda one: one.name)]

    def last_error(self, table: str, job: str) -> Mapping[str, Any] | None:
        """Why a job failed last: reason, message, remedy and the exit code."""
        runs = self._runs(table=table, job=job, failed=True, limit=1)
        return {**runs[0]["error"], "exit_code": runs[0]["exit_code"]} if runs and runs[0]["error"] else None

    def _document(self, table: FoundTable, seen: Seen) -> dict[str, Any]:
        now = datetime.now(UTC)
        told = self._told.get((table.name, table.uri))
        figures = dict(seen.figures or {})
        blocked = [*seen.blocked] or self._blocked_at_merge(table, figures)
        if blocked and "blocked_regions" in figures:
            figures["blocked_regions"] = max(figures["blocked_regions"], len({one["region_id"] for one in blocked}))
        jobs = {name: job for name, job in table.settings.jobs.items() if job.enabled}
        known = {} if told is None else told["jobs"]
        leases = {lease.job: lease for lease in seen.leases}
        return {
            "name": table.name,
            "uri": table.uri,
            "version": seen.version,
            "backlog": figures,
            "looked_at": now.isoformat(timespec="milliseconds"),
            "seconds_since_look": 0.0,
            "look_error": None if seen.error is None else redact(str(seen.error)),
            "error": None if seen.error is None else error_document(seen.error),
            "clock_skew_seconds": None if told is None else told["clock_skew_seconds"],
            "blocked": blocked,
            "jobs": {
                name: self._job(Entry(table, jobs[name], now), leases.get(name), known.get(name), now)
                for name in sorted(jobs)
            },
        }

    def _job(self, entry: Entry, lease: Lease | None, known: Mapping[str, Any] | None, now: datetime) -> dict[str, Any]:
        """As the running service tells it, else as the history does; the lease as it stands on the table."""
        entry = self._after(entry, now)
        if lease is not None:
            last = lease.last
            if last is not None and (entry.finished is None or last.finished > entry.finished):
                # Another supervisor's run, or one of a history that is elsewhere.
                entry.started = entry.finished = last.finished
                entry.outcome = last.outcome
                entry.succeeded = last.finished if last.outcome == "succeeded" else entry.succeeded
            if lease.stands(now):
                ours = lease.holder.instance == self._instance
                entry.lease, entry.other = (lease, None) if ours else (None, lease)
        told = job_status(entry, now, 0.0)
        if known is None:
            return told
        since = known["lease"]["elsewhere_seconds"]
        return {**known, "lease": {**told["lease"], "elsewhere_seconds": since}}

    def _after(self, entry: Entry, now: datetime) -> Entry:
        if self._history is not None:
            try:
                return Entry.after(self._history.last(*entry.key, now).by(now), entry.table, entry.settings)
            except HistoryError as error:
                self._give_up(error)
        return entry

    def _runs(self, **filters: Any) -> list[dict[str, Any]]:
        if self._history is not None:
            try:
                return self._history.runs(**filters)
            except HistoryError as error:
                self._give_up(error)
        return []

    def _give_up(self, error: HistoryError) -> None:
        """A history that is damaged hides no table."""
        self.close()
        self._history, self.history_error = None, redact(str(error))

    def _blocked_at_merge(self, table: FoundTable, figures: Mapping[str, float]) -> list[Mapping[str, Any]]:
        """What only a merge finds, because it opens what a look only lists: as the last one told it."""
        if not figures.get("regions_behind"):
            return []
        runs = self._runs(table=table.uri, job="merge", limit=1)
        if not runs or runs[0]["exit_code"] != _BLOCKED:
            return []
        return [*((runs[0]["report"] or {}).get("blocked") or ())]


def error_document(error: MemwalOpsError) -> dict[str, Any]:
    """An error, with its page; the keys are those that every command has with ``--json``."""
    return {
        "reason": error.reason,
        "message": redact(str(error)),
        "remedy": redact(error.remedy),
        "exit_code": error.exit_code,
        "runbook": runbook(error.exit_code),
    }


def _ask_all(tables: Sequence[FoundTable], patience: timedelta) -> dict[str, Seen]:
    """Every table, a few at once. The threads are left alone in the end: nobody waits for a store that hangs."""
    waiting: queue.SimpleQueue[FoundTable] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, Seen]] = queue.SimpleQueue()
    for table in tables:
        waiting.put(table)

    def work() -> None:
        while True:
            try:
                table = waiting.get_nowait()
            except queue.Empty:
                return
            answers.put((table.name, _ask(table)))

    load_jobs()
    for _ in range(min(_AT_ONCE, len(tables))):
        threading.Thread(target=work, name="status", daemon=True).start()
    seconds = patience.total_seconds()
    late = StoreUnavailableError(f"It did not answer within {seconds:g} s (--timeout).")
    seen = {table.name: Seen(error=late) for table in tables}
    ends = time.monotonic() + seconds
    for _ in tables:
        try:
            name, answer = answers.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        seen[name] = answer
    return seen


def _ask(found: FoundTable) -> Seen:
    seen = Seen()
    try:
        table = open_table(found.uri, found.settings.storage_options)
        merge = load_jobs()["merge"]
        wanted = [merge, *(one.job for one in found.settings.jobs.values() if one.enabled and one.job is not merge)]
        figures, faults = look_at(table, wanted)
        seen = Seen(table.version, figures, error=faults[0] if faults else None)
        seen = replace(seen, leases=list_leases(table.store))
        if figures.get("blocked_regions"):
            states = inspect(table).regions
            seen = replace(seen, blocked=tuple(one.fault.to_json() for one in states if one.fault is not None))
    except MemwalOpsError as error:
        return replace(seen, error=seen.error or error)
    except Exception as error:  # noqa: BLE001 - one table must not hide the others
        return replace(seen, error=seen.error or unexpected(error, None))
    return seen


def _instance(folder: str) -> str | None:
    """Who the service of a state folder is; None where it never ran here."""
    try:
        with open(os.path.join(folder, "instance"), encoding="ascii") as file:
            return str(uuid.UUID(file.read().strip()))
    except (OSError, ValueError):
        return None
