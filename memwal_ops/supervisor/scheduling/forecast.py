"""Forecast what a service will run: its scheduler, on a virtual clock (:func:`forecast`).

It begins with what the service knows, and decides as the service does, by the same code. Runs and polls are played: a
run takes and uses what past runs of the job did. One that succeeded last does all that is due; one that failed last,
or whose triggers achieved nothing, does so again. What writers add is not known.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import add
from random import Random
from typing import Any

from memwal_ops.core.answers import bad_answers
from memwal_ops.core.cost import Cost, expected_cost
from memwal_ops.core.figures import jobs_of
from memwal_ops.core.fleet_budget import Others
from memwal_ops.core.worth import Worth
from memwal_ops.log import quiet
from memwal_ops.supervisor.config.effective import Settings
from memwal_ops.supervisor.observe.status_document import BudgetStatus
from memwal_ops.supervisor.scheduling.backlogs import ages_of, watched_ages
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.scheduling.due import breaker_status, triggered_by
from memwal_ops.supervisor.scheduling.scheduler import Scheduler
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.state.history import History, LastRuns
from memwal_ops.supervisor.state.outcomes import OVER_BUDGET
from memwal_ops.supervisor.state.pauses import Pauses
from memwal_ops.supervisor.state.tables import IDLE, QUEUED, WATCH, Clock, PollReading, TableJob, TableState
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from memwal_ops.text import time_text

_SECONDS = 1.0
"""Of a run of which no past run shows it."""
_ALL = 1000
_POLLS = 200
"""So often at most a table is polled within a forecast."""


@dataclass(frozen=True, slots=True)
class ForecastJob:
    """One job on one table.

    Attributes:
        at: when it runs first; None: not within the time that was asked for.
        cost: of one run; None: no past run shows it.
        waiting_for: what it waits for at the end, as in the service's status; None: it is not due.
        limit: that of the fleet's budget which a run would pass, until ``frees``.
    """

    table: str
    job: str
    at: datetime | None
    why: str
    runs: int
    cost: Cost | None
    worth: Worth
    acts: bool
    waiting_for: str | None = None
    limit: str | None = None
    frees: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry of ``runs``, or of ``undone``."""
        shared = {"table": self.table, "job": self.job, "why": self.why, "worth": self.worth.to_json()}
        if self.at is None:
            return {**shared, "waiting_for": self.waiting_for, "limit": self.limit, "frees": _text(self.frees)}
        cost = None if self.cost is None else self.cost.to_json()
        return {**shared, "at": _text(self.at), "runs": self.runs, "apply": self.acts, "cost": cost}


@dataclass(frozen=True, slots=True)
class Start:
    """One run of a forecast: when it starts, of which table and job, and why."""

    at: datetime
    table: str
    job: str
    why: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """What runs, in the order of starts, and what each job comes to; the budget as it is now."""

    starts: tuple[Start, ...]
    jobs: tuple[ForecastJob, ...]
    budget: BudgetStatus | None


def forecast(
    settings: Settings,
    tables: Sequence[FoundTable],
    documents: Iterable[Mapping[str, Any]],
    pauses: Pauses,
    history: History | None,
    now: datetime,
    span: timedelta,
    *,
    others: Others | None = None,
    owed: Mapping[str, float] | None = None,
) -> Forecast:
    """What a service runs within a time: every enabled job of every table.

    Args:
        documents: the status of each, of the service, or as its state folder and the tables show it.
        others: what other members of the fleet use of the budget.
        owed: by pool what its oldest job is owed, of the service's status.
    """
    with quiet():
        simulation = _Simulation(settings, pauses, history, now, span)
        if others is not None:
            simulation.scheduler.ranking.meet(others, now)
        simulation.restore(tables, documents, owed or {})
        simulation.settle()
        budget = simulation.scheduler.ranking.to_json(simulation.scheduler.begun(), now)
        simulation.run(now + span)
    return Forecast((*simulation.starts,), (*simulation.jobs(),), budget)


class _VirtualClock(Clock):
    """Stands still until it is moved."""

    def __init__(self, now: datetime) -> None:
        self.began = self.time = now

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return (self.time - self.began).total_seconds()


class _NoJitter(Random):
    """Draws the least: a forecast has no jitter."""

    def random(self) -> float:
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        del b
        return a


class _Unrecorded:
    """Takes the place of metrics and heartbeats: nothing is counted, and an error ends the forecast."""

    def __getattr__(self, _: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    @property
    def internal_errors(self) -> Any:
        return _Raised()


class _Raised:
    def inc(self) -> None:
        raise  # noqa: PLE0704 - the error that is being handled


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker that does nothing."""

    pool: str
    clock: Clock
    pid: int = 0
    request: int | None = None
    quitting: bool = False
    aside: bool = False

    def send(self, _: Any) -> None:
        """Drop a message."""

    def signal(self, _: Any) -> None:
        """Drop a signal."""

    def resident_bytes(self) -> int | None:
        return None

    def cpu_seconds(self) -> float | None:
        return self.clock.monotonic()  # it makes progress


class _Pools:
    """Workers of all pools; requests are kept in ``requests``."""

    def __init__(self, clock: Clock, limits: Mapping[str, Any]) -> None:
        self._clock, self._limits = clock, dict(limits)
        self._busy = dict.fromkeys(limits, 0)
        self.requests: list[tuple[_Worker, Any]] = []

    def limit(self, pool: str) -> Any:
        return self._limits[pool]

    def free(self, pool: str) -> int:
        return _ALL if pool == WATCH else int(self._limits[pool].workers - self._busy[pool])  # polls take no time

    def assign(self, pool: str, request: Any) -> _Worker:
        self._busy[pool] += 1
        worker = _Worker(pool, self._clock, request=request.id)
        self.requests.append((worker, request))
        return worker

    def release(self, worker: _Worker) -> None:
        self._busy[worker.pool] -= 1

    def all(self) -> Iterator[_Worker]:
        return iter(())


class _History:
    """A run history that is read, and whose new runs are kept apart."""

    def __init__(self, past: History | None) -> None:
        self._past = past
        self._numbers = itertools.count(1)
        self._runs: dict[int, tuple[tuple[str, str], float]] = {}
        self._ended: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def record_first_seen(self, *_: Any) -> None:
        """Keep nothing."""

    def add_polls(self, _: Any) -> None:
        """Keep nothing."""

    def last(self, table: str, uri: str, job: str, now: datetime) -> LastRuns:
        none = LastRuns(now, None, None, None, None, 0)
        return none if self._past is None else self._past.last(table, uri, job, now)

    def runs(self, **filters: Any) -> list[dict[str, Any]]:
        return [] if self._past is None else self._past.runs(**filters)

    def spent(self, *job: Any) -> list[Any]:
        return [] if self._past is None else self._past.spent(*job)

    def ledger(self, since: datetime) -> Iterable[dict[str, Any]]:
        return () if self._past is None else self._past.ledger(since)

    def ended_since(self, table: str, job: str, since: datetime) -> list[tuple[float, float]]:
        past = [] if self._past is None else self._past.ended_since(table, job, since)
        return past + [ended for ended in self._ended.get((table, job), ()) if ended[1] > since.timestamp()]

    def begin(self, *, table: str, job: str, now: datetime, **_: Any) -> int:
        number = next(self._numbers)
        self._runs[number] = (table, job), now.timestamp()
        return number

    def set_back(self, number: int | None, seconds: float) -> None:
        """Let a run have begun so long before."""
        if number is not None:
            key, began = self._runs[number]
            self._runs[number] = key, began - seconds

    def finish(self, number: int, now: datetime, *_: Any, **__: Any) -> None:
        key, began = self._runs.pop(number)
        self._ended.setdefault(key, []).append((began, now.timestamp()))


@dataclass(slots=True)
class _Played:
    """A table as its polls find it: figures at a time, version, fingerprint, what applies; ``error``: of each poll."""

    figures: dict[str, float]
    at: datetime
    version: int
    fingerprint: str
    applies: tuple[str, ...] | None
    error: str | None
    quiet: bool = False


class _Timers(Timers):
    """Those of a forecast: polls that cannot find anything are left out."""

    def __init__(self, simulation: _Simulation, grace: timedelta, span: timedelta) -> None:
        super().__init__(simulation.scheduler, grace, _NoJitter())
        self._simulation, self._least = simulation, span / _POLLS

    def _add(self, key: tuple[str, ...], setting: object, after: Any, jitter: float, first: datetime) -> None:
        if key[0] == "poll":
            assert isinstance(setting, timedelta)  # noqa: S101 - its interval
            after = partial(add, max(self._least, setting))
        super()._add(key, setting, after, jitter, first)

    def _fire(self, key: tuple[str, ...]) -> None:
        if key[0] != "poll" or not self._simulation.passes_poll(key[1]):
            super()._fire(key)


@dataclass(eq=False)
class _Simulation:
    """A scheduler without processes, stores or time."""

    settings: Settings
    pauses: Pauses
    history: History | None
    now: datetime
    span: timedelta
    starts: list[Start] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clock = _VirtualClock(self.now)
        self._pools = _Pools(self._clock, dict(self.settings.config.pools))
        self._records = _History(self.history)
        nothing: Any = _Unrecorded()
        self.scheduler = Scheduler(
            self.settings,
            history=self._records,  # type: ignore[arg-type]  # what the scheduler uses of it
            supervisor="plan",
            pools=self._pools,  # type: ignore[arg-type]  # what the scheduler uses of them
            leases=None,
            metrics=nothing,
            heartbeat=nothing,
            clock=self._clock,
            pauses=self.pauses,
            random=_NoJitter(),
        )
        self._timers = _Timers(self, self.settings.config.misfire_grace, self.span)
        self._tables: dict[str, _Played] = {}
        self._ends: list[tuple[datetime, int, _Worker, TableJob]] = []
        self._runs: dict[tuple[str, str], list[Start]] = {}
        self._first: dict[tuple[str, str], tuple[Cost | None, Worth]] = {}
        self._polled: list[TableState] = []

    # -- what the service knows

    def restore(
        self, tables: Sequence[FoundTable], documents: Iterable[Mapping[str, Any]], credits_: Mapping[str, float]
    ) -> None:
        """Take over what a service knows; where none runs, what one knows that starts now."""
        scheduler = self.scheduler
        scheduler.set_tables(tables)
        running: list[tuple[TableJob, Mapping[str, Any]]] = []
        moved: dict[tuple[str, ...], str] = {}
        for document in documents:
            state = scheduler.tables.get(document["name"])
            if state is None:
                continue
            self._play(document)
            if document.get("scheduling") is None:
                continue
            self._restore_table(state, document)
            moved["poll", document["name"]] = document["scheduling"].get("next_poll", "")
            for name, status in document["jobs"].items():
                entry = state.entries.get(name)
                if entry is None:
                    continue
                entry.recall(status, self._clock.monotonic())
                moved["run", document["name"], name] = status["next_due"] or ""
                if status["state"] == "running":
                    running.append((entry, status))
        for entry, status in running:
            seconds, before = status["running_seconds"], status["scheduling"].get("before")
            run = scheduler.resume_run(entry, seconds)
            run.before = None if before is None else (before, entry.settings)
            self._records.set_back(run.number, seconds)
            self._take_requests(passed=seconds)
        scheduler.ranking.owe(credits_)
        self._timers.start()
        self._timers.sync()
        for key, text in moved.items():
            if text and self._timers.has(key):
                self._timers.move(key, max(self.now, datetime.fromisoformat(text)))

    def _play(self, document: Mapping[str, Any]) -> None:
        known = document.get("scheduling") or {}
        error = document["look_error"]
        jobs = document["jobs"]
        runs = [job["scheduling"] for job in jobs.values() if job.get("scheduling")]
        before = [run.get(name) for run in runs for name in ("before", "unchanged")]
        read = document["looked_at"] is not None and error is None
        self._tables[document["name"]] = _Played(
            dict(document["backlog"]),
            self.now if document["looked_at"] is None else datetime.fromisoformat(document["looked_at"]),
            document["version"] or 0,
            known.get("fingerprint") or next(filter(None, before), "0"),
            tuple(name for name, job in jobs.items() if job.get("applies", True)) if read else None,
            error,
        )

    def _restore_table(self, state: TableState, document: Mapping[str, Any]) -> None:
        played, known, mono = self._tables[document["name"]], document["scheduling"], self._clock.monotonic()
        state.figures, state.version = dict(document["backlog"]), document["version"]
        state.error = document["look_error"]
        state.applies = None if played.applies is None else frozenset(played.applies)
        if document["looked_at"] is not None:
            state.polled = datetime.fromisoformat(document["looked_at"])
        state.recall(known, mono)
        if (age := known.get("reading_seconds")) is not None:
            options = {name: entry.settings.options for name, entry in state.entries.items() if entry.settings.options}
            jobs = tuple(dict.fromkeys((*jobs_of("backlog"), *state.entries)))
            state.reading = PollReading(mono - age, jobs, played.fingerprint, options)

    # -- time

    def run(self, until: datetime) -> None:
        """Let time pass until then."""
        while True:
            self.settle()
            times = [self._timers.next_time(), self.scheduler.next_change()]
            times += [self._ends[0][0]] if self._ends else []
            following = min((time for time in times if time is not None), default=None)
            if following is None or following > until:
                return
            self._clock.time = max(following, self._clock.time)
            self._timers.fire()
            self._end_runs()

    def settle(self) -> None:
        """Do all that happens now."""
        while True:
            self.scheduler.step(0.0)
            for state in self._polled:
                played = self._tables[state.table.name]
                played.quiet = played.error is None and self._is_quiet(state)
            self._polled.clear()
            if not self._pools.requests:
                return
            self._take_requests()

    def _take_requests(self, passed: float | None = None) -> None:
        requests, self._pools.requests = self._pools.requests, []
        for worker, request in requests:
            if isinstance(request, PollRequest):
                self._answer_poll(worker, request)
            else:
                self._begin_run(worker, request.id, passed)

    def _begin_run(self, worker: _Worker, number: int, passed: float | None) -> None:
        entry = self.scheduler.runs[number]
        start = Start(self._clock.now(), *entry.key, self._why(entry) if passed is None else "it is running")
        self.starts.append(start)
        if entry.key not in self._first:
            self._first[entry.key] = self._cost(entry), self.scheduler.ranking.worth(entry)
        self._runs.setdefault(entry.key, []).append(start)
        self._tables[entry.table.name].quiet = False
        self._send(worker, {"type": "began", "id": number})
        cost = self.scheduler.ranking.cost(entry)
        seconds = _SECONDS if cost is None else float(cost["seconds"])
        ends = self._clock.now() + timedelta(seconds=max(0.001, seconds - (passed or 0.0)))
        heapq.heappush(self._ends, (ends, number, worker, entry))

    def _end_runs(self) -> None:
        while self._ends and self._ends[0][0] <= self._clock.now():
            _, number, worker, entry = heapq.heappop(self._ends)
            self._tables[entry.table.name].quiet = False
            self._send(worker, _message(self._result(number, entry)))

    def _send(self, worker: _Worker, message: dict[str, Any]) -> None:
        self.scheduler.on_message(worker, message)  # type: ignore[arg-type]  # see _Pools

    def _result(self, number: int, entry: TableJob) -> Result:
        played = self._tables[entry.table.name]
        used = self.scheduler.ranking.expected_use(entry)
        if entry.failures or played.error is not None:
            return Result(number, "failed", exit_code=1, reason="failed", message="It failed last.", used=used)
        due = {name for name in _debts(entry) if played.figures.get(name)}
        if not (due and entry.settings.apply) or entry.fruitless:
            return Result(number, "succeeded", used=used)
        played.figures |= dict.fromkeys(due, 0.0)
        played.version += 1
        played.fingerprint += "+"
        return Result(number, "succeeded", used=used, versions=(played.version,), achieved={"fragments": 1.0})

    # -- polls

    def passes_poll(self, name: str) -> bool:
        """Whether a poll by the timer would find what the last one found, and make nothing due; it is counted."""
        state, played = self.scheduler.tables[name], self._tables[name]
        if not played.quiet or state.scheduled or state.poll_again or state.polling or state.poll_due is not None:
            return False
        if not self.scheduler.polls_to_skip(name):
            state.poll_began, state.polled = self._clock.monotonic(), self._clock.now()
            state.unchanged += 1
        return True

    def _answer_poll(self, worker: _Worker, request: PollRequest) -> None:
        table = next(state for state in self.scheduler.tables.values() if state.table.uri == request.uri)
        played = self._tables[table.table.name]
        if played.error is not None:
            answer = Result(request.id, "failed", exit_code=1, message=played.error)
        elif request.fingerprint and request.fingerprint == played.fingerprint:
            answer = Result(request.id, "succeeded", fingerprint=played.fingerprint, unchanged=True)
        else:
            passed = (self._clock.now() - played.at).total_seconds()
            ages = ages_of(table)
            older = {name: value + passed for name, value in played.figures.items() if value and name in ages}
            fingerprint = None if request.fingerprint is None else played.fingerprint
            answer = Result(
                request.id,
                "succeeded",
                figures=played.figures | older,
                version=played.version,
                fingerprint=fingerprint,
                applies=played.applies,
            )
        self._send(worker, _message(answer))
        played.quiet = False
        self._polled.append(table)

    def _is_quiet(self, state: TableState) -> bool:
        known = state.reading is not None and state.reading.fingerprint  # by which a run is not necessary
        if not known or any(state.figures.get(name) for name in watched_ages(state)):
            return False
        objectives = state.table.settings.objectives
        if "max_backlog_age" in objectives or any(bad_answers(entry.answers) for entry in state.entries.values()):
            return False
        return not any(
            entry.state == IDLE and triggered_by(entry.settings, state.figures, objectives) is not None
            for entry in state.entries.values()
        )

    # -- what it comes to

    def jobs(self) -> Iterator[ForecastJob]:
        """Every job: those that run, in their order; then the others, those that miss an objective first."""
        undone = [
            self._undone(state, entry)
            for state in self.scheduler.tables.values()
            for entry in state.entries.values()
            if entry.key not in self._runs
        ]
        for key, starts in self._runs.items():
            entry = self.scheduler.tables[key[0]].entries[key[1]]
            cost, worth = self._first[key]
            yield ForecastJob(*key, starts[0].at, starts[0].why, len(starts), cost, worth, entry.settings.apply)
        undone.sort(key=lambda job: (job.worth.missed is None, -job.worth.ratio, job.table, job.job))
        yield from undone

    def _cost(self, entry: TableJob) -> Cost | None:
        prices = self.settings.config.prices
        past = self.scheduler.recorder.spent(entry)
        work = entry.settings.job.work_due(self.scheduler.tables[entry.table.name].figures)
        return expected_cost(past, work, prices.by_store(), prices.currency)

    def _undone(self, state: TableState, entry: TableJob) -> ForecastJob:
        ranking, now = self.scheduler.ranking, self._clock.now()
        waits, limit, frees = (entry.waiting if entry.state == QUEUED else None), None, None
        if waits in {"worker", OVER_BUDGET}:
            limit = ranking.refusal(entry, self.scheduler.begun(), now)
            waits = "worker" if limit is None else OVER_BUDGET
            frees = None if limit is None else ranking.frees(entry, now)
        why = self._why_undone(state, entry, waits, limit, frees)
        worth = ranking.worth(entry)
        return ForecastJob(
            *entry.key, None, why, 0, None, worth, entry.settings.apply, waiting_for=waits, limit=limit, frees=frees
        )

    def _why(self, entry: TableJob) -> str:
        why = f"schedule: {entry.settings.schedule}" if entry.why == "schedule" else entry.why
        return f"{why}; after {entry.failures} failures in a row it waited" if entry.failures else why

    def _why_undone(
        self, state: TableState, entry: TableJob, waits: str | None, limit: str | None, frees: datetime | None
    ) -> str:
        settings, now = entry.settings, self._clock.now()
        if not state.applies_to(entry):
            return "it does not apply to this table"
        pause = self.pauses.covering(*entry.key, now)
        if pause is not None:
            until = "until it is resumed" if pause.until is None else f"until {_text(pause.until)}"
            return f"it is paused {until}: {pause.reason}" if pause.reason else f"it is paused {until}"
        after = f"after {entry.failures} failures in a row it waits"
        until = "" if entry.not_before is None else f" until {_text(entry.not_before)}"
        texts = {
            "window": "its windows are closed until then",
            "budget": "its own budget is used up",
            "worker": "its pool has no free worker until then",
            "earlier": "another job on its table runs before it",
            "backoff": f"{after}{until}",
            "breaker": f"{after} for its circuit breaker{until}",
            "lease": f"another supervisor has its lease{until}",
        }
        if waits == OVER_BUDGET:
            return f"{OVER_BUDGET}: {limit} is used up until {_text(frees) if frees is not None else 'then'}"
        if waits is not None:
            return texts.get(waits, waits)
        return self._why_idle(state, entry, settings.schedule is not None)

    def _why_idle(self, state: TableState, entry: TableJob, scheduled: bool) -> str:  # noqa: FBT001 - see its caller
        settings, debt = entry.settings, entry.settings.job.debt
        stopped = breaker_status(entry, self.settings.config.backoff.longest, self._clock.now())
        if stopped is not None and not scheduled:
            return f"its circuit breaker is open until {stopped['until']}: its last runs achieved nothing"
        if state.error is not None:
            return f"the table cannot be read: {state.error}"
        if debt is not None and settings.has_nothing_to_do(state.figures):
            return f"nothing is due: {debt.nothing_due.rstrip('.')}"
        if not scheduled:
            return "it has no schedule" + ("" if settings.when is None else f", and not yet so: {settings.when.text}")
        if entry.skips:
            return "nothing was written since its last run"
        fires = self._timers.next_run(*entry.key)
        return "it is not due" if fires is None else f"it is due in {time_text((fires - self.now).total_seconds())}"


def _debts(entry: TableJob) -> set[str]:
    spec, when = entry.settings.job, entry.settings.when
    names = set(spec.objectives.values()) | (set() if when is None else set(when.figures))
    names |= {saving.metric for saving in spec.saves}
    if spec.debt is not None:
        names |= {spec.debt.due, spec.debt.rows, spec.debt.bytes_written, spec.debt.bytes_read}
        names |= set() if spec.debt.checks is None else {spec.debt.checks}
    return names


def _message(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__dataclass_fields__}


def _text(when: datetime | None) -> str | None:
    return None if when is None else when.astimezone(UTC).isoformat(timespec="seconds")
