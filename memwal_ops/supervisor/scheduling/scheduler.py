"""Decide which jobs run: the supervisor's event loop, on a single thread.

Everything that happens elsewhere (a timer fires, a worker sends its result, a lease is granted, a pattern was
expanded) is posted as a function and called here, one after the other. ``step`` does that, then checks what
depends on time: leases to be renewed, jobs that hang. So no decision takes a lock, and tests and forecasts drive the
loop with their own clock.

What runs next, how a run begins and ends stands in :mod:`memwal_ops.supervisor.scheduling.runs`; when a backlog is read
and what makes a job due by it in :mod:`memwal_ops.supervisor.scheduling.backlogs`. Short requests of users (the plan of
a job, a hold) are errands: they are assigned to workers beside runs and polls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from memwal_ops.errors import WorkerDiedError
from memwal_ops.log import get_logger
from memwal_ops.supervisor.config.effective import JobSettings, Settings
from memwal_ops.supervisor.scheduling import runs
from memwal_ops.supervisor.scheduling.backlogs import BacklogPolling
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.scheduling.due import resume
from memwal_ops.supervisor.scheduling.ranking import Ranking
from memwal_ops.supervisor.scheduling.shared_state import SharedState
from memwal_ops.supervisor.state import outcomes
from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.state.tables import RunState, TableJob, TableState
from memwal_ops.supervisor.workers.pools import WorkerProcess

_Make = Callable[[int], Any]
_Then = Callable[[Mapping[str, Any]], None]
_Wanted = Callable[[], bool]

_ASK_SECONDS = 10.0
_Reply = TypeVar("_Reply")


class EventLoop:
    """The events of a scheduler; :meth:`call` holds ``lock``, which readers on other threads take.

    ``on_error``: called after an unexpected error, which is logged.
    """

    def __init__(self, on_error: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._on_error = on_error
        self._log = get_logger(__name__)

    def post(self, event: Callable[[], None]) -> None:
        """Call ``event`` on the scheduler's thread, soon; from any thread."""
        self._events.put(event)

    def ask(self, question: Callable[[], _Reply], timeout: float | None = None) -> _Reply:
        """Call ``question`` on the scheduler's thread, and return its result, or raise what it raised.

        Raises ``TimeoutError``: the loop did not call it in time; it will not be called any more.
        """
        answer: Future[_Reply] = Future()

        def reply() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    answer.set_exception(error)

        self.post(reply)
        try:
            return answer.result(_ASK_SECONDS if timeout is None else timeout)
        except TimeoutError:
            answer.cancel()
            raise

    def handle(self, seconds: float) -> None:
        """Wait for events for at most ``seconds``, and call them."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return
        self.call(event)
        while not self._events.empty():
            self.call(self._events.get())

    def call(self, handler: Callable[[], None]) -> None:
        """Log and count an unexpected error: one bug must not end the maintenance of all tables."""
        with self.lock:
            try:
                handler()
            except Exception:  # noqa: BLE001 - see above
                self._on_error()
                self._log.exception("internal_error")


def reconcile(
    tables: dict[str, TableState], found: Iterable[FoundTable], new_entry: Callable[[FoundTable, JobSettings], TableJob]
) -> set[str]:
    """Update ``tables`` in place, and return the names of those that were removed.

    Entries that are kept keep their state; those that are removed are marked, because their run may be in flight.
    """
    wanted = {table.name: table for table in found}
    removed = tables.keys() - wanted.keys()
    for name in removed:
        _mark_removed(tables.pop(name))
    for name, table in wanted.items():
        state = tables.get(name)
        if state is not None and state.table.uri != table.uri:
            _mark_removed(state)
            state = None
        if state is None:
            state = tables[name] = TableState(table)
        changed = state.table.settings.storage_options != table.settings.storage_options
        if changed:
            state.poll_not_before = 0.0
        state.table = table
        _reconcile_jobs(state, table, new_entry, changed=changed)
    return removed


def _reconcile_jobs(
    state: TableState, table: FoundTable, new_entry: Callable[[FoundTable, JobSettings], TableJob], *, changed: bool
) -> None:
    jobs = {job.name: job for job in table.settings.jobs.values() if job.enabled}
    for job in [job for job in state.entries if job not in jobs]:
        state.entries.pop(job).removed = True
    for job, settings in jobs.items():
        if job in state.entries:
            entry = state.entries[job]
            if changed or entry.settings != settings:
                entry.not_before = None  # the change may have fixed what made it fail
            entry.table, entry.settings = table, settings
        else:
            state.entries[job] = new_entry(table, settings)


def _mark_removed(state: TableState) -> None:
    for entry in state.entries.values():
        entry.removed = True


MAX_WAITING = 20


class Errands:
    """Errands that wait for a worker, and those in flight; only the scheduler's thread calls this."""

    def __init__(
        self, number: Callable[[], int], assign: Callable[[str, Any], WorkerProcess], monotonic: Callable[[], float]
    ) -> None:
        self._number, self._assign, self._monotonic = number, assign, monotonic
        self._waiting: list[tuple[str, _Make, _Then, _Wanted]] = []
        self._running: dict[int, tuple[WorkerProcess, float, _Then]] = {}

    @property
    def in_flight(self) -> Iterator[tuple[WorkerProcess, float]]:
        """The workers of those in flight, each with its start time."""
        return ((worker, began) for worker, began, _ in self._running.values())

    def add(self, pool: str, make: _Make, then: _Then, is_wanted: _Wanted = lambda: True) -> bool:
        """Queue an errand; ``make`` returns its request, ``then`` gets its result. False: too many wait.

        What is not wanted any more, when a worker is free, is not begun: its caller was told that it is not done.
        """
        self._waiting = [errand for errand in self._waiting if errand[3]()]
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append((pool, make, then, is_wanted))
        return True

    def begin(self, free: Callable[[str], int]) -> None:
        """Start those whose pool has a free worker."""
        for errand in [*self._waiting]:
            pool, make, then, is_wanted = errand
            if not is_wanted():
                self._waiting.remove(errand)
            elif free(pool):
                self._waiting.remove(errand)
                number = self._number()
                self._running[number] = (self._assign(pool, make(number)), self._monotonic(), then)

    def on_result(self, request: int, result: Mapping[str, Any]) -> bool:
        """Return a result, if the request is an errand; return whether it is."""
        if request not in self._running:
            return False
        self._running.pop(request)[2](result)
        return True

    def on_worker_exit(self, request: int | None, status: int | None) -> bool:
        """Fail the errand of a worker that exited; return whether it had one."""
        error = WorkerDiedError(f"The process that worked on it exited ({outcomes.describe_exit(status)}).")
        return request is not None and self.on_result(
            request, {"outcome": "failed", "message": str(error), "reason": error.reason, "report": None}
        )


_Answer = TypeVar("_Answer")


@dataclass(eq=False)
class Scheduler(SharedState):
    """The event loop of one supervisor (see the module)."""

    def __post_init__(self, history: History, supervisor: str) -> None:
        """Nothing runs yet."""
        super().__post_init__(history, supervisor)
        self._loop = EventLoop(self.metrics.internal_errors.inc)
        self.lock = self._loop.lock
        self.ranking = Ranking(self.tables, self.recorder)
        self.ranking.configure(self.settings, self.clock.now())
        self._polling = BacklogPolling(self)
        self.announced = self._polling.announced
        self._ends = runs.RunEnds(self, self.ranking, self._polling)
        self._starter = runs.Starter(self, self.ranking, self._polling, self._ends)
        self._dispatcher = runs.Dispatcher(self, self.ranking, self._starter)
        self.errands = Errands(self.next_number, self.assign, self.clock.monotonic)
        self._watchdog = runs.Watchdog(self.pools, self.leases, self.clock, self.skews)

    # -- from any thread

    def post(self, event: Callable[[], None]) -> None:
        """Call ``event`` on the scheduler's thread, soon."""
        self._loop.post(event)

    def on_message(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        """Take a message of a worker; None: the worker has exited."""
        self.post(lambda: self._on_worker_message(worker, message))

    def ask(self, question: Callable[[], _Answer], **limits: float) -> _Answer:
        """Return what ``question`` returns on the scheduler's thread, see :meth:`EventLoop.ask`; it shows at once."""

        def asked() -> _Answer:
            self.touch()
            return question()

        return self._loop.ask(asked, **limits)

    # -- the scheduler's thread

    def step(self, seconds: float) -> None:
        """Wait for events for at most ``seconds``, handle them, then check the running jobs and start what is due."""
        self._loop.handle(seconds)
        self._loop.call(self._check_runs)
        if not self.stopping:
            self._loop.call(self._dispatch)

    def _check_runs(self) -> None:
        self._watchdog.check([*self.runs.values()], [*self._polling.in_flight, *self.errands.in_flight])

    def _dispatch(self) -> None:
        self.errands.begin(self.pools.free)
        self._dispatcher.dispatch()
        self._polling.begin(self.pools.free)

    def set_settings(self, settings: Settings) -> None:
        """Apply a new configuration; :meth:`set_tables` applies its tables."""
        self.settings = settings
        self.awake |= self.tables.keys()
        self.ranking.configure(settings, self.clock.now())
        self.touch()
        self.pools.configure(dict(settings.config.pools))
        self.pools.log_level = settings.config.log_level.upper()
        if self.leases is not None:
            self.leases.ttl = settings.config.leases.ttl
            self.leases.forget_stores()

    def set_tables(self, found: Iterable[FoundTable]) -> None:
        """Make ``found`` the tables to maintain. Running jobs on tables that are removed finish."""
        now = self.clock.now()
        removed = reconcile(self.tables, found, lambda table, settings: self._new_entry(table, settings, now))
        self.metrics.forget_tables(removed)
        self.announced.retain(self.tables)
        self.touch()
        for name, state in self.tables.items():
            self.metrics.init_table(name, state.entries)

    def cancel(self, entry: TableJob, by: str) -> bool:
        """Ask the run of a job to stop after its current step; a second time, end it at once, and return True."""
        run = entry.run
        assert run is not None  # noqa: S101 - the caller checked it
        run.cancelled_by = run.cancelled_by or by
        if run.ended_by == "cancel":
            self._watchdog.end(entry, "abort")
        else:
            self._watchdog.ask_to_stop(entry, "cancel")
        return run.ended_by != "cancel"

    def on_schedule(self, table: str, job: str) -> None:
        """Queue a job that is due by its schedule, unless the next poll may find that there is nothing to do."""
        entry = self.find(table, job)
        if entry is None or self.stopping or not self.tables[table].applies_to(entry):
            return
        if not self._polling.decide_at_next_poll(entry):
            self.enqueue(table, job, "schedule")

    def queue_scheduled(self) -> None:
        """Queue every job that is due by its schedule, given its last run in the history."""
        now = self.clock.now()
        for entry in self.entries():
            schedule = entry.settings.schedule
            if schedule is not None and schedule.is_due(now, entry.started, entry.first_seen):
                self.on_schedule(*entry.key)

    def clock_set_back(self, by: timedelta) -> None:
        """Correct all recorded times after the wall clock was set back by ``by``: they lie that far in the future."""
        now = self.clock.now()
        self.touch()
        for state in self.tables.values():
            state.clock_set_back(by, now)
            for entry in state.entries.values():
                entry.clock_set_back(by, now)

    def poll(self, table: str, *, timed: bool = False) -> None:
        """Request a poll of a table's backlog; by its timer (``timed``), an idle table skips some."""
        if not self.stopping and not (timed and self._polling.skips(table)):
            self._polling.request(table)

    def on_events(self, tables: Iterable[str]) -> None:
        """Poll tables soon: events of their store announce commits."""
        for table in self.tables.keys() & set(tables):
            self.announced.take(table)

    def read_history(self, table: str) -> None:
        """Request the recent history of a table, for its page."""
        if not self.stopping:
            self._polling.request_history(table)

    @property
    def in_flight(self) -> int:
        """How many runs are in flight, and lease requests."""
        return len(self.runs) + len(self.leasing)

    @property
    def has_work(self) -> bool:
        """Whether anything is in flight, or is queued and waits for nothing but a worker.

        What waits for an upstream job does not count by itself: that one may wait for the end of a budget or a window.
        """
        polls = any(state.polling or state.poll_due is not None for state in self.tables.values())
        if self.in_flight or polls or self.touched is None or self.touched:
            return True
        deferred = self.ranking.deferred(self.begun(), self.clock.now())
        return any(entry.key not in deferred for entry in self.ranking.ready())

    def mark_deferred(self) -> dict[tuple[str, str], str]:
        """Let what waits for the budget of the fleet show it; return the limit of each."""
        deferred = self.ranking.deferred(self.begun(), self.clock.now())
        for entry in self.ranking.ready():
            entry.waiting = outcomes.OVER_BUDGET if entry.key in deferred else "worker"
        return deferred

    def next_change(self) -> datetime | None:
        """Return when a queued job may become able to start by time alone; None: never."""
        return self._dispatcher.next_change()

    def resume_run(self, entry: TableJob, seconds: float) -> RunState:
        """Let a job run that began so many seconds ago: a forecast goes on with it."""
        self._starter.start(entry, None)
        assert entry.run is not None  # noqa: S101 - it was started
        entry.run.began -= seconds
        entry.run.started -= timedelta(seconds=seconds)
        return entry.run

    def polls_to_skip(self, table: str) -> int:
        """Return how many polls by the timer of an idle table are left out from now on."""
        return self._polling.skips(table)

    def stop(self) -> None:
        """Start nothing more; let each run finish its current step."""
        if self.stopping:
            return
        self.stopping = True
        for state in self.tables.values():
            state.poll_due = None
        for entry in self.runs.values():
            self._watchdog.ask_to_stop(entry, "stop")

    def abandon(self) -> None:
        """Record every run that is still in flight as stopped, and release its lease; its worker has exited."""
        for entry in [*self.runs.values()]:
            self._ends.finish(entry, "stopped", dict(outcomes.STOPPED))

    # -- messages of workers

    def _on_worker_message(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        if message is None:
            self.pools.forget(worker)
            if worker.request is not None:
                self._on_worker_exit(worker)
        elif message["type"] in {"began", "progress", "log"}:
            entry = self.runs.get(message["id"])
            if entry is not None and entry.run is not None:
                if message["type"] == "log":
                    entry.run.log.append(message["line"])
                entry.run.report(message.get("doing"), self.clock.monotonic())
                if message["type"] == "began":
                    # The time that the process took to start does not count as the job's.
                    entry.run.began, entry.run.working = entry.run.progress, True
        elif message["type"] == "opened":
            entry = self.runs.get(message["id"])
            if entry is not None and entry.run is not None:
                entry.run.opened = message["what"]
        elif message["type"] == "done":
            self.pools.release(worker)
            if self._polling.on_result(message["id"], message):
                return
            self.changed = True  # a worker of its pool is free
            if not self.errands.on_result(message["id"], message) and message["id"] in self.runs:
                entry = self.runs[message["id"]]
                self._ends.finish(entry, *outcomes.classify_result(entry, message), remaining=message["remaining"])

    def _on_worker_exit(self, worker: WorkerProcess) -> None:
        request, worker.request = worker.request, None
        self.changed = True
        self.metrics.worker_deaths.labels(worker.pool).inc()
        status = worker.exit_status
        if self._polling.on_worker_exit(request, status) or self.errands.on_worker_exit(request, status):
            return
        entry = self.runs.get(request or 0)
        if entry is not None:
            memory = self.pools.limit(worker.pool).memory
            self._ends.finish(entry, *outcomes.classify_exit(entry, worker.pid, worker.exit_status, memory))

    # -- the tables

    def _new_entry(self, table: FoundTable, settings: JobSettings, now: datetime) -> TableJob:
        running = next(
            (entry for entry in self.runs.values() if entry.matches(table.uri, table.name, settings.name)), None
        )
        if running is not None and running.removed:
            # The table was removed while the job ran, and is back: the run in flight is this entry's own.
            running.removed, running.table, running.settings = False, table, settings
            return running
        last = self.recorder.last(table.name, table.uri, settings.name, now)
        entry = TableJob.from_history(last, table, settings)
        if settings.job.reads_only:
            entry.answers = self.recorder.last_answers(table.name, table.uri, settings.name)
        if settings.job.debt is not None:
            entry.rates = self.recorder.rates(table.name, table.uri, settings.name)
        resume(entry, last, self.settings.config.backoff, self.random, now)
        return entry
