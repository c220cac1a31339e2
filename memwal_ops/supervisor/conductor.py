"""The supervisor's mind: what is due, what runs, what became of it. One thread, fed by events.

Everything that happens elsewhere (a schedule fires, a worker answers, a lease is granted, a pattern was
looked at) is posted as a function and called here, one after the other. ``step`` does that, and looks at
time itself: leases to be renewed, jobs that hang. So there is no lock in any decision, and tests drive it
with a clock of their own.
"""

from __future__ import annotations

import queue
import random
import threading
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import WorkerDiedError
from memwal_ops.jobs.api import POOLS
from memwal_ops.log import get_logger
from memwal_ops.supervisor.account import Account
from memwal_ops.supervisor.backoff import wait_after
from memwal_ops.supervisor.choosing import choose, goes_before
from memwal_ops.supervisor.clock import Clock
from memwal_ops.supervisor.endings import LEVELS, STOPPED, ending, of_answer, of_death, told
from memwal_ops.supervisor.history import FAILURES
from memwal_ops.supervisor.requests import LookRequest, RunRequest, lease_document
from memwal_ops.supervisor.state import IDLE, LEASING, QUEUED, RUNNING, WATCH, Entry, RunState, TableState
from memwal_ops.supervisor.watching import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from memwal_ops.core.leases import Lease
    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.supervisor.discovery import FoundTable
    from memwal_ops.supervisor.heartbeat import Heartbeat
    from memwal_ops.supervisor.history import History
    from memwal_ops.supervisor.leasing import LeaseDesk
    from memwal_ops.supervisor.metrics import Metrics
    from memwal_ops.supervisor.pools import Pools, WorkerProcess
    from memwal_ops.supervisor.settings import JobSettings, Settings

_RETRY = timedelta(minutes=1)
_FRUITLESS = timedelta(minutes=10)
_SHARED = 0.9
# A store that does not answer must not keep the only watcher from the other tables.
_FAILED_LOOK, _LONGEST_PAUSE = 10.0, 300.0
_PARTLY = ("succeeded", "partial")


class Conductor:
    """See the module.

    Args:
        settings: the configuration that holds.
        history: where runs are written down.
        desk: for leases; None where they are off.
        once: retry nothing and repeat no look: what is due runs once.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        history: History,
        pools: Pools,
        desk: LeaseDesk | None,
        metrics: Metrics,
        heartbeat: Heartbeat,
        supervisor: str,
        clock: Clock | None = None,
        once: bool = False,
    ) -> None:
        """Nothing runs yet."""
        self.settings = settings
        self.pools = pools
        self.desk = desk
        self.metrics = metrics
        self.tables: dict[str, TableState] = {}
        self.lock = threading.RLock()
        self.stopping = False
        self.codes: list[int] = []
        # With `once`: what was due and is another's at the moment.
        self.left: list[dict[str, Any]] = []
        self.skews: dict[str, float] = {}
        self._heartbeat = heartbeat
        self.clock = clock or Clock()
        self._account = Account(history, supervisor, self.clock)
        self._once = once
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._random = random.Random()  # noqa: S311 - jitter
        self._requests = 0
        self._runs: dict[int, Entry] = {}
        self._looks: dict[int, tuple[TableState, WorkerProcess, float]] = {}
        self._watch = Watch(pools, desk, self.clock, self.skews)
        self._log = get_logger(__name__)

    # -- from any thread

    def post(self, event: Callable[[], None]) -> None:
        """Have something called on the conductor's thread."""
        self._events.put(event)

    def on_message(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        """What a worker says; None: it has ended."""
        self.post(lambda: self._heard(worker, message))

    # -- the conductor's thread

    def step(self, seconds: float) -> None:
        """Wait for events up to that long, and do what they and the time ask for."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            pass
        else:
            self._do(event)
            while not self._events.empty():
                self._do(self._events.get())
        self._do(self._look_after)
        if not self.stopping:
            self._do(self._dispatch)

    def _do(self, work: Callable[[], None]) -> None:
        """One bug must not end the maintenance of all tables; it is logged, and counted."""
        with self.lock:
            try:
                work()
            except Exception:  # noqa: BLE001 - see above
                self.metrics.internal_errors.inc()
                self._log.exception("internal_error")

    def _look_after(self) -> None:
        self._watch.watch([*self._runs.values()], [(worker, began) for _, worker, began in self._looks.values()])

    def set_settings(self, settings: Settings) -> None:
        """A new configuration; the tables follow by :meth:`set_tables`."""
        self.settings = settings
        self.pools.configure(dict(settings.config.pools))
        self.pools.log_level = settings.config.log_level.upper()
        if self.desk is not None:
            self.desk.ttl = settings.config.leases.ttl
            self.desk.forget_stores()

    def set_tables(self, found: Iterable[FoundTable]) -> None:
        """These are the tables from now on. Runs in hand on others end by themselves."""
        now = self.clock.now()
        wanted = {table.name: table for table in found}
        for name in [name for name in self.tables if name not in wanted]:
            for entry in self.tables.pop(name).entries.values():
                entry.removed = True
            self.metrics.forget_table(name)
        for name, table in wanted.items():
            state = self.tables.get(name)
            if state is not None and state.table.uri != table.uri:
                for entry in state.entries.values():
                    entry.removed = True
                state = None
            if state is None:
                state = self.tables[name] = TableState(table)
            state.table = table
            jobs = {job.name: job for job in table.settings.jobs.values() if job.enabled}
            for job in [job for job in state.entries if job not in jobs]:
                state.entries.pop(job).removed = True
            for job, settings in jobs.items():
                if job in state.entries:
                    entry = state.entries[job]
                    if entry.settings != settings:
                        entry.not_before = None  # somebody may have mended what made it fail
                    entry.table, entry.settings = table, settings
                else:
                    state.entries[job] = self._entry(table, settings, now)
            self.metrics.know(name, state.entries)

    def due(self, table: str, job: str, why: str) -> None:
        """A job is to be run as soon as it may; nothing where it waits or runs already."""
        entry = self._find(table, job)
        if entry is None or self.stopping:
            return
        if entry.state == IDLE:
            entry.state, entry.due, entry.why, entry.waiting = QUEUED, self.clock.now(), why, "worker"

    def due_by_clock(self) -> None:
        """Mark everything whose schedule says so, by the last runs that the history knows."""
        now = self.clock.now()
        for entry in self.entries():
            schedule = entry.settings.schedule
            if schedule is not None and schedule.is_due(now, entry.started, entry.first_seen):
                self.due(*entry.key, "schedule")

    def put_back(self, by: timedelta) -> None:
        """The clock was put back by that much: what was noted by it lies as much ahead."""
        now = self.clock.now()
        for state in self.tables.values():
            state.put_back(by, now)
            for entry in state.entries.values():
                entry.put_back(by, now)

    def look(self, table: str) -> None:
        """Read a table's backlog soon."""
        state = self.tables.get(table)
        if state is None or self.stopping or self.clock.monotonic() < state.look_not_before:
            return
        if state.looking:
            state.look_again = True
        elif state.look_due is None:
            state.look_due = self.clock.now()

    def entries(self) -> Iterator[Entry]:
        """Every job on every table."""
        return (entry for state in self.tables.values() for entry in state.entries.values())

    @property
    def in_hand(self) -> int:
        """Runs, and leases that were asked for."""
        return len(self._runs) + sum(entry.state == LEASING for entry in self.entries())

    @property
    def waits(self) -> bool:
        """Whether anything is under way, or waits for nothing but a worker."""
        looks = any(state.looking or state.look_due is not None for state in self.tables.values())
        queued = any(entry.state == QUEUED and entry.waiting in {"worker", "earlier"} for entry in self.entries())
        return bool(self.in_hand or looks or queued)

    def stop(self) -> None:
        """Begin nothing more; let each run finish the step in hand."""
        if self.stopping:
            return
        self.stopping = True
        for state in self.tables.values():
            state.look_due = None
        for entry in self._runs.values():
            self._watch.ask_to_stop(entry, "stop")

    def abandon(self) -> None:
        """Every run that is still in hand has ended with its worker; write that down and give back its lease."""
        for entry in [*self._runs.values()]:
            self._finish(entry, "stopped", dict(STOPPED))

    # -- dispatching

    def _dispatch(self) -> None:
        now = self.clock.now()
        for pool in POOLS:
            mine = [entry for entry in self.entries() if entry.settings.job.pool == pool]
            reserved = sum(entry.state == LEASING for entry in mine)
            # Asked also where there is no room: what the others wait for is shown.
            while (entry := self._chosen(mine, now)) is not None and self.pools.free(pool) > reserved:
                self._begin(entry)
                reserved += entry.state == LEASING
        while self.pools.free(WATCH):
            waiting = [state for state in self.tables.values() if state.look_due is not None and not state.looking]
            if not waiting:
                break
            self._begin_look(min(waiting, key=lambda state: (state.look_due, state.table.name)))

    def _begin(self, entry: Entry) -> None:
        entry.not_before = None
        if self.desk is None or not entry.settings.apply:
            # A plan only reads: it needs no lease, and may not be allowed to write one.
            self._start(entry, None)
            return
        entry.state = LEASING
        self.desk.acquire(entry.table, entry.settings.name, lambda found, error: self._leased(entry, found, error))

    def _leased(
        self, entry: Entry, found: tuple[Lease | None, Lease | None] | None, error: MemwalOpsError | None
    ) -> None:
        now = self.clock.now()
        lease, before = (None, None) if found is None else found
        if entry.removed or self.stopping:
            entry.state = IDLE
            if lease is not None:
                self._release(entry, lease, None)
            return
        if found is None:
            self._note_failure(entry, error)
            return
        if lease is None:
            self._kept_away(entry, before, now)
            return
        self.skews[entry.table.name] = (now - lease.written).total_seconds()
        entry.other, entry.other_since = None, None
        if self._was_shared(entry, lease, now):
            self._release(entry, lease, None)
            self.metrics.skipped.labels(*entry.key, "shared").inc()
            entry.state, entry.due = IDLE, None
        else:
            self._start(entry, lease)

    def _kept_away(self, entry: Entry, other: Lease | None, now: datetime) -> None:
        """Another supervisor does it: ask again while it is due."""
        if entry.other is None:
            entry.other_since = now
            self.metrics.skipped.labels(*entry.key, "held").inc()
        entry.other = other
        if self._once:
            entry.state, entry.due = IDLE, None
            holder, expires = (
                (None, None) if other is None else (other.holder.name, other.expires.isoformat(timespec="seconds"))
            )
            self.left.append({"table": entry.table.name, "job": entry.key[1], "holder": holder, "expires": expires})
            return
        assert self.desk is not None  # noqa: S101 - who asked has one
        entry.state = QUEUED
        entry.not_before = now + self.desk.ttl / 10 * (1 + self._random.random())

    def _was_shared(self, entry: Entry, lease: Lease, now: datetime) -> bool:
        """Whether another supervisor has just done what is due; both times are the store's."""
        last, schedule = lease.last, entry.settings.schedule
        if last is None or last.instance == lease.holder.instance or last.outcome not in _PARTLY:
            return False
        age = lease.written - last.finished
        if entry.why == "schedule" and schedule is not None:
            shared = age < schedule.period(now) * _SHARED
        else:
            # The backlog that asked for it may be the one that the other has merged: look again.
            looked = self.tables[entry.table.name].looked
            shared = looked is not None and age < now - looked
            if shared:
                self.look(entry.table.name)
        if shared:
            entry.started = entry.finished = now - age
            entry.outcome = last.outcome
            if last.outcome == "succeeded":
                entry.succeeded = entry.finished
        return shared

    def _start(self, entry: Entry, lease: Lease | None) -> None:
        now, mono = self.clock.now(), self.clock.monotonic()
        settings, state = entry.settings, self.tables[entry.table.name]
        plan = {
            "apply": settings.apply,
            "options": dict(settings.options),
            "backlog": state.figures,
            "version": state.version,
            "token": None if lease is None else lease.token,
            "waited_seconds": 0.0 if entry.due is None else round((now - entry.due).total_seconds(), 3),
        }
        number = self._account.begin(entry, plan, now)
        self._requests += 1
        request = RunRequest(
            id=self._requests,
            uri=entry.table.uri,
            storage_options=dict(entry.table.settings.storage_options),
            job=settings.name,
            options=dict(settings.options),
            apply=settings.apply,
            lease=None if lease is None else lease_document(lease),
        )
        worker = self._give(settings.job.pool, request)
        entry.lease, entry.renewed, entry.renewing = lease, mono, False
        entry.renew_at = mono + (0.0 if lease is None else lease.ttl.total_seconds() / 3)
        entry.run = RunState(number, worker, mono, now, mono)
        entry.state, entry.waiting = RUNNING, None
        self._runs[request.id] = entry
        self._log.info("run_started", table=entry.table.name, job=settings.name, why=entry.why, pid=worker.pid)

    def _begin_look(self, state: TableState) -> None:
        self._requests += 1
        jobs = tuple(dict.fromkeys(("merge", *state.entries)))
        request = LookRequest(self._requests, state.table.uri, dict(state.table.settings.storage_options), jobs)
        state.looking, state.look_due, state.look_again = True, None, False
        self._looks[request.id] = (state, self._give(WATCH, request), self.clock.monotonic())

    def _give(self, pool: str, request: Any) -> WorkerProcess:
        known = {worker.pid for worker in self.pools.all()}
        worker = self.pools.give(pool, request)
        if worker.pid not in known:
            self.metrics.worker_starts.labels(pool).inc()
        return worker

    def _chosen(self, entries: list[Entry], now: datetime) -> Entry | None:
        return choose(entries, now, self._account.is_over_budget, self._held_back)

    def _held_back(self, entry: Entry) -> bool:
        """Whether an earlier job on its table comes first."""
        if entry.started is not None and not self._once:
            return False
        others = self.tables[entry.table.name].entries.values()
        return any(goes_before(other, entry, always=self._once) for other in others)

    # -- what workers say

    def _heard(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        if message is None:
            self.pools.forget(worker)
            if worker.request is not None:
                self._died(worker)
        elif message["say"] in {"began", "progress"}:
            entry = self._runs.get(message["id"])
            if entry is not None and entry.run is not None:
                entry.run.progress = self.clock.monotonic()
                if message["say"] == "began":
                    # What the process took to start is not the job's.
                    entry.run.began, entry.run.working = entry.run.progress, True
        elif message["say"] == "done":
            self.pools.take_back(worker)
            if message["id"] in self._looks:
                state, _, began = self._looks.pop(message["id"])
                self._looked(state, message, began)
            elif message["id"] in self._runs:
                entry = self._runs[message["id"]]
                self._finish(entry, *of_answer(entry, message))

    def _died(self, worker: WorkerProcess) -> None:
        request, worker.request = worker.request, None
        self.metrics.worker_deaths.labels(worker.pool).inc()
        if request in self._looks:
            state, _, began = self._looks.pop(request)
            error = WorkerDiedError(f"The process that looked at the table ended ({ending(worker.exit_status)}).")
            self._looked(state, {"outcome": "failed", "message": str(error), "exit_code": error.exit_code}, began)
            return
        entry = self._runs.get(request or 0)
        if entry is not None:
            memory = self.pools.limit(worker.pool).memory
            self._finish(entry, *of_death(entry, worker.pid, worker.exit_status, memory))

    def _finish(self, entry: Entry, outcome: str, details: dict[str, Any]) -> None:
        """A run has ended, in whatever way."""
        now, mono = self.clock.now(), self.clock.monotonic()
        run, entry.run = entry.run, None
        assert run is not None  # noqa: S101 - it is in hand
        self._runs = {number: one for number, one in self._runs.items() if one is not entry}
        self._account.finish(entry, run.number, now, outcome, details)
        if not entry.removed:
            self.metrics.runs.labels(*entry.key, outcome).inc()
            self.metrics.count_figures(*entry.key, details.get("figures") or {})
        self.metrics.run_seconds.labels(entry.settings.name).observe(mono - run.began)
        self.metrics.observe_phases(entry.settings.name, details.get("phases") or {})
        if entry.lease is not None:
            lease, entry.lease = entry.lease, None
            if outcome != "lost":
                self._release(entry, lease, outcome if outcome in {*_PARTLY, *FAILURES} else None)
        self._note_blocked(entry, details.get("figures") or {})
        published = bool(details.get("versions"))
        self._settle(entry, outcome, now, run.started, details.get("exit_code") or 0, published=published)
        self._log.log(
            LEVELS.get(outcome, 20),
            "run_finished",
            table=entry.table.name,
            job=entry.settings.name,
            outcome=outcome,
            decision=details.get("decision"),
            error=details.get("error"),
            seconds=round(mono - run.began, 3),
        )
        if outcome == "succeeded" and entry.settings.heartbeat_url is not None:
            timeout = self.settings.config.heartbeat.timeout.total_seconds()
            self._heartbeat.beat(entry.settings.heartbeat_url, *entry.key, timeout)
        if outcome in _PARTLY and details.get("versions") and not self._once:
            self.look(entry.table.name)

    def _settle(
        self, entry: Entry, outcome: str, now: datetime, started: datetime, code: int, *, published: bool = False
    ) -> None:
        """What a run's end means for the next one."""
        entry.outcome, entry.finished = outcome, now
        entry.state, entry.due, entry.waiting = IDLE, None, None
        if self._once:
            self.codes.append(code)
        if outcome in {*_PARTLY, *FAILURES}:
            entry.started = started
            state = self.tables.get(entry.table.name)
            entry.fruitless = None if published or state is None else _amounts(entry, state)
        if outcome in _PARTLY:
            entry.failures = 0
            entry.not_before = None
            if outcome == "succeeded":
                entry.succeeded = now
        elif outcome in FAILURES:
            entry.failures += 1
            wait = wait_after(entry.failures, self.settings.config.backoff, self._random)
            entry.not_before = now + (wait or _RETRY * entry.failures)
            if not self._once and not entry.removed:
                entry.state, entry.due, entry.why = QUEUED, now, "retry"
                entry.waiting = "backoff"

    def _note_failure(self, entry: Entry, error: MemwalOpsError | None) -> None:
        """A run that could not begin: it is written down like one that did."""
        now = self.clock.now()
        plan = {"apply": entry.settings.apply, "options": dict(entry.settings.options)}
        number = self._account.begin(entry, plan, now)
        details = {"reason": None, "error": None, "remedy": None} if error is None else told(error)
        self._account.finish(entry, number, now, "failed", details)
        self.metrics.runs.labels(*entry.key, "failed").inc()
        self._log.warning("run_not_started", table=entry.table.name, job=entry.settings.name, error=details["error"])
        self._settle(entry, "failed", now, now, details.get("exit_code") or 1)

    def _release(self, entry: Entry, lease: Lease, outcome: str | None) -> None:
        if self.desk is not None:
            self.desk.release(entry.table, lease, outcome)

    def _looked(self, state: TableState, answer: Mapping[str, Any], began: float) -> None:
        state.looking = False
        if self.tables.get(state.table.name) is not state:
            return
        good = answer["outcome"] == "succeeded"
        self.metrics.looks.labels(state.table.name, answer["outcome"]).inc()
        before, state.error = state.error, None if good else str(answer["message"])
        state.error_code = int(answer["exit_code"])
        took = self.clock.monotonic() - began
        state.look_not_before = 0.0 if good else self.clock.monotonic() + min(took * _FAILED_LOOK, _LONGEST_PAUSE)
        if good or answer.get("figures"):
            # One job's figures may be missing; the backlog was read where that of merge is there.
            state.figures, state.version = dict(answer["figures"]), answer["version"]
            state.looked = self.clock.now() if good or "generations" in state.figures else state.looked
            # Somebody may have merged by hand: a blocked region is behind, or the look sees for itself what is wrong.
            state.blocked = min(state.blocked, state.figures.get("regions_behind", state.blocked))
            _raise_to(state.figures, state.blocked)
            for entry in state.entries.values():
                when = entry.settings.when
                if when is not None and when.holds(state.figures) and not self._is_fruitless(entry, state):
                    self.due(*entry.key, f"when: {when.text}")
        if not good and state.error != before:
            self._log.warning("look_failed", table=state.table.name, error=state.error)
        if state.look_again and not self._once:
            self.look(state.table.name)

    def _note_blocked(self, entry: Entry, figures: Mapping[str, float]) -> None:
        """A merge opens what a look only lists: a generation that is damaged is known by the merge alone."""
        state = self.tables.get(entry.table.name)
        if state is not None and not entry.removed and "regions_blocked" in figures:
            state.blocked = figures["regions_blocked"]
            _raise_to(state.figures, state.blocked)

    def _is_fruitless(self, entry: Entry, state: TableState) -> bool:
        """Whether the last run published nothing, a moment ago, with the same backlog."""
        if entry.fruitless is None or entry.finished is None:
            return False
        return self.clock.now() - entry.finished < _FRUITLESS and entry.fruitless == _amounts(entry, state)

    # -- the tables

    def _entry(self, table: FoundTable, settings: JobSettings, now: datetime) -> Entry:
        adopted = next((one for one in self._runs.values() if one.is_of(table.uri, table.name, settings.name)), None)
        if adopted is not None and adopted.removed:
            # It was taken out while it ran, and is back: the run in hand is its own.
            adopted.removed, adopted.table, adopted.settings = False, table, settings
            return adopted
        last = self._account.last(table.name, settings.name, now)
        entry = Entry.after(last, table, settings)
        wait = wait_after(last.failures, self.settings.config.backoff, self._random)
        if wait and last.finished is not None:
            entry.not_before = last.finished + wait
        return entry

    def _find(self, table: str, job: str) -> Entry | None:
        state = self.tables.get(table)
        return None if state is None else state.entries.get(job)


def _raise_to(figures: dict[str, float], blocked: float) -> None:
    if "blocked_regions" in figures:
        figures["blocked_regions"] = max(figures["blocked_regions"], blocked)


def _amounts(entry: Entry, state: TableState) -> dict[str, float]:
    """The backlog that a job works off, without ages, which grow by themselves."""
    figures = entry.settings.job.figures
    when = entry.settings.when
    names = figures.keys() | (when.figures if when is not None else frozenset())
    return {name: state.figures[name] for name in names & state.figures.keys() if figures.get(name) != "seconds"}
