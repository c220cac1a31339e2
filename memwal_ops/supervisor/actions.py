"""Act on a running service: run, retry and cancel jobs, pause and resume jobs, tables and the fleet.

Each action is decided on the scheduler's thread, so that it sees and changes one state; callers wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from memwal_ops.core.registry import package_of
from memwal_ops.supervisor.scheduling.due import ignores_triggers
from memwal_ops.supervisor.scheduling.scheduler import Scheduler
from memwal_ops.supervisor.state import pauses, tables
from memwal_ops.supervisor.workers.protocol import HoldRequest, RunRequest
from memwal_ops.text import counted, parse_duration

_Then = Callable[[Mapping[str, Any]], None]
_Wanted = Callable[[], bool]

REQUEST = "request"
"""Why a job runs that a user requested."""
# Less than a request may take.
_ERRAND_SECONDS = 20.0
_MAX_PAUSE = timedelta(days=3650)


class UnknownTargetError(Exception):
    """There is no such table or job."""


class ActionConflictError(Exception):
    """The action does not fit what the service does now; the message says why."""


class Actions:
    """What can be done to a running scheduler. ``by`` is who asks."""

    def __init__(self, scheduler: Scheduler, elsewhere: Callable[[str], str] = lambda _: "") -> None:
        self._scheduler, self._elsewhere = scheduler, elsewhere

    def run(self, table: str, job: str, by: str) -> dict[str, Any]:
        """Queue a job to run as soon as a worker is free: before others, in a closed window, and beyond its budget."""
        return self._scheduler.ask(lambda: self._run(self._entry(table, job), by))

    def retry(self, table: str | None, job: str | None, by: str) -> dict[str, Any]:
        """End the backoff, and close the circuit breaker, of a job, of all jobs on a table, or of all jobs."""
        return self._scheduler.ask(lambda: self._retry(self._entries(table, job), by))

    def cancel(self, table: str, job: str, by: str) -> dict[str, Any]:
        """Ask a run to stop after its current step, within a minute; asked again, end it at once."""
        return self._scheduler.ask(lambda: self._cancel(self._entry(table, job), by))

    def pause(
        self, table: str | None, job: str | None, by: str, *, until: datetime | None, reason: str
    ) -> dict[str, Any]:
        """Start no more runs of a job, a table or the fleet; those in flight finish."""
        return self._scheduler.ask(lambda: self._pause(self._scope(table, job), by, until, reason))

    def resume(self, table: str | None, job: str | None) -> dict[str, Any]:
        """End a pause: that of exactly this job, table or fleet."""
        return self._scheduler.ask(lambda: self._resume(table, job))

    def plan(self, table: str, job: str) -> dict[str, Any]:
        """Plan a job on a worker, which changes nothing; return its report."""

        def begin(then: _Then, is_wanted: _Wanted) -> bool:
            entry = self._entry(table, job)
            settings, named = entry.settings, entry.table

            def request(number: int) -> RunRequest:
                storage, options = dict(named.settings.storage_options), dict(settings.options)
                foreign = package_of(settings.job) is not None
                return RunRequest(
                    number, named.uri, storage, job, options, apply=False, named=settings.named, foreign=foreign
                )

            return self._scheduler.errands.add(settings.job.pool, request, then, is_wanted)

        planned = self._wait_for(begin)
        return {"table": table, "job": job, "report": dict(planned["report"]), "text": planned["text"]}

    def hold(self, table: str, **what: Any) -> dict[str, Any]:
        """Take or end a hold of a table on a worker; ``what``: see :class:`HoldRequest`."""

        def begin(then: _Then, is_wanted: _Wanted) -> bool:
            self._check_table(table)
            named = self._scheduler.tables[table].table
            storage = dict(named.settings.storage_options)
            return self._scheduler.errands.add(
                tables.WATCH, lambda number: HoldRequest(number, named.uri, storage, **what), then, is_wanted
            )

        return {"table": table, **self._wait_for(begin)["report"]}

    def _wait_for(self, begin: Callable[[_Then, _Wanted], bool]) -> Mapping[str, Any]:
        """Begin an errand on the scheduler's thread, and return its result, which has a report."""
        answer: Future[Mapping[str, Any]] = Future()

        def give(result: Mapping[str, Any]) -> None:
            with suppress(InvalidStateError):  # the request has timed out
                answer.set_result(result)

        def queue() -> None:
            self._check_not_stopping()
            if not begin(give, lambda: not answer.cancelled()):
                raise ActionConflictError("Too many plans and holds wait for a worker: ask again later.")

        self._scheduler.ask(queue)
        try:
            result = answer.result(_ERRAND_SECONDS)
        except TimeoutError:
            answer.cancel()
            raise TimeoutError(
                f"It is not done after {_ERRAND_SECONDS:g} s: its worker is busy, or it takes longer. Use the command."
            ) from None
        if result["report"] is None:
            remedy = result.get("remedy") or ""
            raise ActionConflictError(f"{result['reason']}: {result['message'].rstrip('.')}. {remedy}".rstrip())
        return result

    # -- on the scheduler's thread

    def _run(self, entry: tables.TableJob, by: str) -> dict[str, Any]:
        self._check_not_stopping()
        now = self._scheduler.clock.now()
        pause = self._scheduler.pauses.covering(*entry.key, now)
        if pause is not None:
            until = "" if pause.until is None else f" until {pause.until:%Y-%m-%d %H:%M:%S} UTC"
            raise ActionConflictError(f"It is paused{until} by {pause.by}: resume it first.")
        if entry.state == tables.RUNNING:
            raise ActionConflictError("It is running already.")
        if entry.state == tables.IDLE:
            self._scheduler.enqueue(*entry.key, REQUEST)
        if entry.state == tables.QUEUED and entry.other is None:
            entry.not_before = None
        entry.why, entry.asked_by, entry.asked_at, entry.at_once = REQUEST, by, now, True
        return {**_target(entry), "state": entry.state}

    def _retry(self, entries: Iterable[tables.TableJob], by: str) -> dict[str, Any]:
        self._check_not_stopping()
        now, longest = self._scheduler.clock.now(), self._scheduler.settings.config.backoff.longest
        requested = [*entries]
        entries = [entry for entry in requested if not self._scheduler.is_paused(entry)]
        if requested and not entries:
            raise ActionConflictError("It is paused: resume it first.")
        waiting = [
            entry
            for entry in entries
            if entry.state == tables.QUEUED
            and entry.failures
            and entry.not_before is not None
            and entry.not_before > now
        ]
        stopped = [entry for entry in entries if ignores_triggers(entry, longest, now)]
        if not waiting and not stopped:
            raise ActionConflictError("Nothing here waits in backoff, and no circuit breaker is open.")
        for entry in waiting:
            entry.not_before, entry.asked_by, entry.asked_at = None, by, now
        for entry in stopped:
            entry.fruitless, entry.fruitless_at, entry.unproductive_backlog = 0, None, None
            self._scheduler.poll(entry.table.name)
        return {"retried": [_target(entry) for entry in [*waiting, *stopped]]}

    def _cancel(self, entry: tables.TableJob, by: str) -> dict[str, Any]:
        if entry.run is None:
            waits = {tables.QUEUED: "it is queued: pause it", tables.LEASING: "it is about to start: ask again"}
            why = waits.get(entry.state, "it is idle")
            raise ActionConflictError(f"There is no run to cancel: {why}.")
        at_once = self._scheduler.cancel(entry, by)
        return {**_target(entry), "run": entry.run.number, "at_once": at_once}

    def _pause(self, scope: pauses.Scope, by: str, until: datetime | None, reason: str) -> dict[str, Any]:
        pause = pauses.Pause(until, reason, by, self._scheduler.clock.now())
        self._scheduler.pauses.set(scope, pause)
        running = [_target(entry) for entry in self._covered(scope) if entry.run is not None]
        return {"paused": pause.to_json(), "still_running": running}

    def _resume(self, table: str | None, job: str | None) -> dict[str, Any]:
        scope = tuple(part for part in (table, job) if part is not None)
        if self._scheduler.pauses.of(scope, self._scheduler.clock.now()) is None:
            self._scope(table, job)
            raise ActionConflictError("It is not paused itself." if scope else "The fleet is not paused.")
        self._scheduler.pauses.remove([scope])
        return {"resumed": {"table": table, "job": job}}

    def _check_not_stopping(self) -> None:
        if self._scheduler.stopping:
            raise ActionConflictError("The service is stopping.")

    def _scope(self, table: str | None, job: str | None) -> pauses.Scope:
        if table is None:
            return pauses.FLEET
        if job is None:
            self._check_table(table)
            return (table,)
        return self._entry(table, job).key

    def _check_table(self, table: str) -> None:
        if table not in self._scheduler.tables:
            if member := self._elsewhere(table):
                raise UnknownTargetError(f"The table {table!r} is that of the member {member!r} of the fleet; ask it.")
            raise UnknownTargetError(
                f"The service has no table {table!r}; it has {counted(len(self._scheduler.tables), 'table')}."
            )

    def _entry(self, table: str, job: str) -> tables.TableJob:
        self._check_table(table)
        entries = self._scheduler.tables[table].entries
        if job not in entries:
            raise UnknownTargetError(f"The table has no job {job!r}; its jobs: {', '.join(sorted(entries)) or 'none'}.")
        return entries[job]

    def _entries(self, table: str | None, job: str | None) -> list[tables.TableJob]:
        if table is not None and job is not None:
            return [self._entry(table, job)]
        return self._covered(self._scope(table, None))

    def _covered(self, scope: pauses.Scope) -> list[tables.TableJob]:
        return [entry for entry in self._scheduler.entries() if entry.key[: len(scope)] == scope]


def end_of_pause(until: str | None, duration: str | None, now: datetime | None = None) -> datetime | None:
    """Return when a pause ends: at a time (ISO 8601) or after a duration; None: when it is resumed.

    Raises ``ValueError``: both are given, or the time is invalid or past.
    """
    now = now or datetime.now(UTC)
    if until is not None and duration is not None:
        raise ValueError("Give either until or for.")
    if duration is not None:
        span = parse_duration(duration)
        if not timedelta(0) < span <= _MAX_PAUSE:
            raise ValueError(f"A pause lasts more than 0s, and at most {_MAX_PAUSE.days} days.")
        return now + span
    if until is None:
        return None
    try:
        end = datetime.fromisoformat(until)
        end = end.replace(tzinfo=UTC) if end.tzinfo is None else end.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{until!r} is not a time such as 2026-11-27T06:00:00Z.") from error
    if not now < end <= now + _MAX_PAUSE:
        raise ValueError(f"A pause ends in the future, and within {_MAX_PAUSE.days} days: not at {until}.")
    return end


def _target(entry: tables.TableJob) -> dict[str, str]:
    return {"table": entry.key[0], "job": entry.key[1]}
