"""Decide which jobs run: the supervisor's event loop, on a single thread.

Everything that happens elsewhere (a timer fires, a worker sends its result, a lease is granted, a pattern was
expanded) is posted as a function and called here, one after the other. ``step`` does that, then checks what
depends on time: leases to be renewed, jobs that hang. So no decision takes a lock, and tests drive the loop
with their own clock.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from memwal_ops.core.figures import Figures
from memwal_ops.core.job import POOLS
from memwal_ops.core.next_run import MAX_RATES, rates_of
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.prices import money_of
from memwal_ops.core.registry import package_of
from memwal_ops.log import get_logger
from memwal_ops.storage.disk_full import DiskFullError
from memwal_ops.supervisor.scheduling.backlogs import BacklogPolling
from memwal_ops.supervisor.scheduling.backoff import (
    found_damage,
    is_done_elsewhere,
    is_schedule_met,
    leave_backoff,
    queue_retry,
    resume,
    wait_after,
)
from memwal_ops.supervisor.scheduling.breaker import count_run, is_open
from memwal_ops.supervisor.scheduling.clock import Clock
from memwal_ops.supervisor.scheduling.errands import Errands
from memwal_ops.supervisor.scheduling.priority import may_start, must_run_before
from memwal_ops.supervisor.scheduling.ranking import Ranking
from memwal_ops.supervisor.scheduling.reconcile import reconcile
from memwal_ops.supervisor.state.history import COMPLETED, FAILURES
from memwal_ops.supervisor.state.outcomes import (
    LEVELS,
    STOPPED,
    answers_of,
    classify_exit,
    classify_result,
    error_fields,
    log_fields,
    repeated,
)
from memwal_ops.supervisor.state.pauses import Pauses
from memwal_ops.supervisor.state.recorder import RunRecorder
from memwal_ops.supervisor.state.tables import IDLE, LEASING, QUEUED, RUNNING, RunState, TableJob, TableState
from memwal_ops.supervisor.workers.protocol import RunRequest, lease_document
from memwal_ops.supervisor.workers.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from memwal_ops.core.job import Pool
    from memwal_ops.core.leases import LastRun, Lease
    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.supervisor.config.effective import JobSettings, Settings
    from memwal_ops.supervisor.observe.heartbeat import Heartbeat
    from memwal_ops.supervisor.observe.metrics import Metrics
    from memwal_ops.supervisor.scheduling.discovery import FoundTable
    from memwal_ops.supervisor.state.history import History
    from memwal_ops.supervisor.workers.leasing import LeaseClient
    from memwal_ops.supervisor.workers.pools import Pools, WorkerProcess

_ASK_SECONDS = 10.0
# While no worker of a pool is free, what its queued entries wait for, which the status shows, is evaluated this often.
_EVALUATE_SECONDS = 1.0
_Answer = TypeVar("_Answer")


class Scheduler:
    """The event loop of one supervisor (see the module).

    Args:
        settings: the effective configuration.
        history: where runs are recorded.
        leases: the lease client; None if leases are disabled.
        pauses: what is paused; None: nothing is.
        once: run what is due once: no retries, no repeated polls.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        history: History,
        pools: Pools,
        leases: LeaseClient | None,
        metrics: Metrics,
        heartbeat: Heartbeat,
        supervisor: str,
        clock: Clock | None = None,
        once: bool = False,
        pauses: Pauses | None = None,
    ) -> None:
        """Nothing runs yet."""
        self.pauses = Pauses() if pauses is None else pauses
        self.settings = settings
        self.pools = pools
        self.leases = leases
        self.metrics = metrics
        self.tables: dict[str, TableState] = {}
        self.lock = threading.RLock()
        self.stopping = False
        self.codes: list[int] = []
        # With `once`: the jobs that were due and whose lease another supervisor holds.
        self.leased_elsewhere: list[dict[str, Any]] = []
        self.skews: dict[str, float] = {}
        self._heartbeat = heartbeat
        self.clock = clock or Clock()
        self._recorder = RunRecorder(history, supervisor, self.clock)
        self.ranking = Ranking(self.tables, self._recorder)
        self.ranking.configure(settings, self.clock.now())
        self._once = once
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._random = random.Random()  # noqa: S311 - jitter
        self._numbers = itertools.count(1)
        self._evaluate_at = float("-inf")
        self._runs: dict[int, TableJob] = {}
        self._polling = BacklogPolling(
            self.tables,
            clock=self.clock,
            metrics=metrics,
            number=lambda: next(self._numbers),
            assign=self._assign,
            enqueue=self.enqueue,
            ran_elsewhere=self._ran_elsewhere,
            is_done_elsewhere=self._is_done_elsewhere,
            in_fleet=lambda: self.settings.config.fleet is not None,
            count_used=self._recorder.add_poll,
            is_stopped=lambda entry: is_open(entry, self.settings.config.backoff.longest, self.clock.now()),
            once=once,
        )
        self.announced = self._polling.announced
        self.errands = Errands(lambda: next(self._numbers), self._assign, self.clock.monotonic)
        self._watchdog = Watchdog(pools, leases, self.clock, self.skews)
        self._log = get_logger(__name__)

    # -- from any thread

    def post(self, event: Callable[[], None]) -> None:
        """Call ``event`` on the scheduler's thread, soon."""
        self._events.put(event)

    def on_message(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        """Take a message of a worker; None: the worker has exited."""
        self.post(lambda: self._on_worker_message(worker, message))

    def ask(self, question: Callable[[], _Answer], timeout: float = _ASK_SECONDS) -> _Answer:
        """Call ``question`` on the scheduler's thread, and return its result, or raise what it raised.

        Raises:
            TimeoutError: the loop did not call it in time; it will not be called any more.
        """
        answer: Future[_Answer] = Future()

        def reply() -> None:
            self._evaluate_at = float("-inf")  # what it changes shows at once
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    answer.set_exception(error)

        self.post(reply)
        try:
            return answer.result(timeout)
        except TimeoutError:
            answer.cancel()
            raise

    # -- the scheduler's thread

    def step(self, seconds: float) -> None:
        """Wait for events for at most ``seconds``, handle them, then check the running jobs and start what is due."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            pass
        else:
            self._call(event)
            while not self._events.empty():
                self._call(self._events.get())
        self._call(self._check_runs)
        if not self.stopping:
            self._call(self._dispatch)

    def _call(self, handler: Callable[[], None]) -> None:
        """Log and count an unexpected error: one bug must not end the maintenance of all tables."""
        with self.lock:
            try:
                handler()
            except Exception:  # noqa: BLE001 - see above
                self.metrics.internal_errors.inc()
                self._log.exception("internal_error")

    def _check_runs(self) -> None:
        self._watchdog.check([*self._runs.values()], [*self._polling.in_flight, *self.errands.in_flight])

    def set_settings(self, settings: Settings) -> None:
        """Apply a new configuration; :meth:`set_tables` applies its tables."""
        self.settings = settings
        self.ranking.configure(settings, self.clock.now())
        self.pools.configure(dict(settings.config.pools))
        self.pools.log_level = settings.config.log_level.upper()
        if self.leases is not None:
            self.leases.ttl = settings.config.leases.ttl
            self.leases.forget_stores()

    def set_tables(self, found: Iterable[FoundTable]) -> None:
        """Make ``found`` the tables to maintain. Running jobs on tables that are removed finish."""
        now = self.clock.now()
        removed = reconcile(self.tables, found, lambda table, settings: self._new_entry(table, settings, now))
        for name in removed:
            self.metrics.forget_table(name)
        self.announced.retain(self.tables)
        for name, state in self.tables.items():
            self.metrics.init_table(name, state.entries)

    def enqueue(self, table: str, job: str, why: str) -> None:
        """Queue a job to be run as soon as it may; does nothing if it is queued or running already."""
        entry = self._find(table, job)
        if entry is None or self.stopping:
            return
        if entry.state == IDLE:
            entry.state, entry.due, entry.why, entry.waiting = QUEUED, self.clock.now(), why, "worker"

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
        entry = self._find(table, job)
        if entry is None or self.stopping or not self._polling.decide_at_next_poll(entry):
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
        for state in self.tables.values():
            state.clock_set_back(by, now)
            for entry in state.entries.values():
                entry.clock_set_back(by, now)

    def poll(self, table: str, *, timed: bool = False) -> None:
        """Request a poll of a table's backlog; by its timer (``timed``), an idle table skips some."""
        if not self.stopping and not (timed and self._polling.may_skip(table)):
            self._polling.request(table)

    def on_events(self, tables: Iterable[str]) -> None:
        """Poll tables soon: events of their store announce commits."""
        for table in self.tables.keys() & set(tables):
            self.announced.take(table)

    def read_history(self, table: str) -> None:
        """Request the recent history of a table, for its page."""
        if not self.stopping:
            self._polling.request_history(table)

    def entries(self) -> Iterator[TableJob]:
        """Return every job on every table."""
        return (entry for state in self.tables.values() for entry in state.entries.values())

    @property
    def in_flight(self) -> int:
        """How many runs are in flight, and lease requests."""
        return len(self._runs) + sum(entry.state == LEASING for entry in self.entries())

    @property
    def has_work(self) -> bool:
        """Whether anything is in flight, or is queued and waits for nothing but a worker.

        What waits for an upstream job does not count by itself: that one may wait for the end of a budget or a window.
        """
        polls = any(state.polling or state.poll_due is not None for state in self.tables.values())
        queued = any(entry.state == QUEUED and entry.waiting == "worker" for entry in self.entries())
        return bool(self.in_flight or polls or queued)

    def write_polls(self) -> None:
        """Write what polls used since the last time."""
        self._recorder.write_polls()

    def stop(self) -> None:
        """Start nothing more; let each run finish its current step."""
        if self.stopping:
            return
        self.stopping = True
        for state in self.tables.values():
            state.poll_due = None
        for entry in self._runs.values():
            self._watchdog.ask_to_stop(entry, "stop")

    def abandon(self) -> None:
        """Record every run that is still in flight as stopped, and release its lease; its worker has exited."""
        for entry in [*self._runs.values()]:
            self._finish(entry, "stopped", dict(STOPPED))

    # -- dispatching

    def _dispatch(self) -> None:
        self.errands.begin(self.pools.free)
        now, mono = self.clock.now(), self.clock.monotonic()
        waiting = [entry for entry in self.entries() if entry.state in {QUEUED, LEASING}]
        evaluate = mono >= self._evaluate_at
        if evaluate:
            self._evaluate_at = mono + _EVALUATE_SECONDS
        for pool in POOLS:
            candidates = [entry for entry in waiting if entry.settings.job.pool == pool]
            reserved = sum(entry.state == LEASING for entry in candidates)
            if not candidates or not (evaluate or self.pools.free(pool) > reserved):
                continue
            while (entry := self._next_entry(pool, candidates, now)) is not None and self.pools.free(pool) > reserved:
                self._begin(entry)
                reserved += entry.state == LEASING
        self._polling.begin(self.pools.free)

    def _begin(self, entry: TableJob) -> None:
        entry.not_before = None
        if self.leases is None or not entry.settings.apply:
            # A plan only reads: it needs no lease, and may lack the permission to write one.
            self._start(entry, None)
            return
        entry.state = LEASING
        self.leases.acquire(
            entry.table, entry.settings.name, lambda result, error: self._on_lease_result(entry, result, error)
        )

    def _on_lease_result(
        self, entry: TableJob, result: tuple[Lease | None, Lease | None] | None, error: MemwalOpsError | None
    ) -> None:
        """Start the run, or request the lease again later.

        ``result``: the lease that this supervisor acquired, if any, and the newest one before it.
        """
        now = self.clock.now()
        lease, before = (None, None) if result is None else result
        if entry.removed or self.stopping:
            entry.state = IDLE
            if lease is not None:
                self._release(entry, lease, None)
            return
        if self._is_paused(entry):
            # Paused while the lease was requested: the user was told that nothing runs.
            entry.state, entry.waiting = QUEUED, "paused"
            if lease is not None:
                self._release(entry, lease, None)
            return
        if result is None:
            if isinstance(error, DiskFullError) and entry.settings.job.deletes:
                # It frees the space that its lease would need. Leases save work; no proof depends on one.
                self._log.warning("lease_not_taken", table=entry.table.name, **log_fields(error_fields(error)))
                self._start(entry, None)
            else:
                self._record_not_started(entry, error)
            return
        if lease is None:
            self._lease_held(entry, before, now)
            return
        self.skews[entry.table.name] = (now - lease.written).total_seconds()
        entry.other, entry.other_since = None, None
        if not entry.at_once and is_done_elsewhere(entry, lease, self.tables[entry.table.name].polled, now):
            if entry.why != "schedule":
                self.poll(entry.table.name)
            self._release(entry, lease, None)
            self.metrics.skipped.labels(*entry.key, "shared").inc()
            entry.state, entry.due = IDLE, None
        else:
            self._start(entry, lease)

    def _lease_held(self, entry: TableJob, other: Lease | None, now: datetime) -> None:
        """Another supervisor holds the lease: request it again later, as long as the job is due."""
        if entry.other is None:
            entry.other_since = now
            self.metrics.skipped.labels(*entry.key, "held").inc()
        entry.other = other
        if self._once:
            entry.state, entry.due = IDLE, None
            holder, expires = (
                (None, None) if other is None else (other.holder.name, other.expires.isoformat(timespec="seconds"))
            )
            self.leased_elsewhere.append(
                {"table": entry.table.name, "job": entry.key[1], "holder": holder, "expires": expires}
            )
            return
        assert self.leases is not None  # noqa: S101 - the lease was requested from it
        entry.state = QUEUED
        entry.not_before = now + self.leases.ttl / 10 * (1 + self._random.random())

    def _start(self, entry: TableJob, lease: Lease | None) -> None:
        now, mono = self.clock.now(), self.clock.monotonic()
        settings, state = entry.settings, self.tables[entry.table.name]
        plan = {
            "apply": settings.apply,
            "options": dict(settings.options),
            "backlog": state.figures,
            "version": state.version,
            "token": None if lease is None else lease.token,
            "waited_seconds": 0.0 if entry.due is None else round((now - entry.due).total_seconds(), 3),
            **({} if entry.asked_by is None else {"asked_by": entry.asked_by}),
            **self.ranking.begin(entry),
        }
        number = self._recorder.begin(entry, plan, now)
        request = RunRequest(
            id=next(self._numbers),
            uri=entry.table.uri,
            storage_options=dict(entry.table.settings.storage_options),
            job=settings.name,
            options=dict(settings.options),
            apply=settings.apply,
            lease=None if lease is None else lease_document(lease),
            named=settings.named,
            foreign=package_of(settings.job) is not None,
        )
        worker = self._assign(settings.job.pool, request)
        entry.lease, entry.renewed, entry.renewing = lease, mono, False
        entry.renew_at = mono + (0.0 if lease is None else lease.ttl.total_seconds() / 3)
        before = self._polling.fingerprint_and_settings(entry)
        entry.run = RunState(number, worker, mono, now, mono, before=before, plan=plan)
        entry.state, entry.waiting, entry.attempted = RUNNING, None, now
        self._runs[request.id] = entry
        self._log.info("run_started", table=entry.table.name, job=settings.name, why=entry.why, pid=worker.pid)

    def _assign(self, pool: str, request: Any) -> WorkerProcess:
        known = {worker.pid for worker in self.pools.all()}
        worker = self.pools.assign(pool, request)
        if worker.pid not in known:
            self.metrics.worker_starts.labels(pool).inc()
        return worker

    def _next_entry(self, pool: Pool, entries: list[TableJob], now: datetime) -> TableJob | None:
        ready = may_start(entries, now, self._recorder.is_over_budget, self._must_wait, self._is_paused)
        return self.ranking.choose(pool, ready, self.begun(), now)

    def begun(self) -> list[TableJob]:
        """Return the jobs that run, and those that wait for their lease."""
        leasing = (entry for entry in self.entries() if entry.state == LEASING)
        return [*self._runs.values(), *leasing]

    def _is_paused(self, entry: TableJob) -> bool:
        return self.pauses.covering(*entry.key, self.clock.now()) is not None

    def _must_wait(self, entry: TableJob) -> bool:
        """Whether another job on its table must run before."""
        if entry.started is not None and not self._once:
            return False
        state = self.tables[entry.table.name]
        return any(
            must_run_before(other, entry, always=self._once, undecided=name in state.scheduled)
            for name, other in state.entries.items()
        )

    # -- messages of workers

    def _on_worker_message(self, worker: WorkerProcess, message: dict[str, Any] | None) -> None:
        if message is None:
            self.pools.forget(worker)
            if worker.request is not None:
                self._on_worker_exit(worker)
        elif message["type"] in {"began", "progress", "log"}:
            entry = self._runs.get(message["id"])
            if entry is not None and entry.run is not None:
                if message["type"] == "log":
                    entry.run.log.append(message["line"])
                entry.run.progress = self.clock.monotonic()
                if message["type"] == "began":
                    # The time that the process took to start does not count as the job's.
                    entry.run.began, entry.run.working = entry.run.progress, True
        elif message["type"] == "done":
            self.pools.release(worker)
            if self._polling.on_result(message["id"], message) or self.errands.on_result(message["id"], message):
                return
            if message["id"] in self._runs:
                entry = self._runs[message["id"]]
                self._finish(entry, *classify_result(entry, message), remaining=message["remaining"])

    def _on_worker_exit(self, worker: WorkerProcess) -> None:
        request, worker.request = worker.request, None
        self.metrics.worker_deaths.labels(worker.pool).inc()
        status = worker.exit_status
        if self._polling.on_worker_exit(request, status) or self.errands.on_worker_exit(request, status):
            return
        entry = self._runs.get(request or 0)
        if entry is not None:
            memory = self.pools.limit(worker.pool).memory
            self._finish(entry, *classify_exit(entry, worker.pid, worker.exit_status, memory))

    def _finish(
        self, entry: TableJob, outcome: str, details: dict[str, Any], remaining: Mapping[str, float] | None = None
    ) -> None:
        """Record the end of a run, whatever its outcome; ``remaining``: see :class:`Result`."""
        now, mono = self.clock.now(), self.clock.monotonic()
        run, entry.run = entry.run, None
        assert run is not None  # noqa: S101 - it is in flight
        self._runs = {number: running for number, running in self._runs.items() if running is not entry}
        debt = entry.settings.job.debts(run.plan.get("backlog") or {})
        if details.get("used") and debt:
            details = {**details, "used": {**details["used"], "debt": debt}}
        self._recorder.finish(entry, run.number, now, outcome, {**details, "log": [*run.log]})
        if entry.settings.job.reads_only:
            answers = answers_of(details.get("report"), now.isoformat(timespec="milliseconds"))
            entry.answers = entry.answers if answers is None else answers
        if entry.settings.job.debt is not None and outcome == "succeeded":
            done = PastRun(mono - run.began, details.get("report") or {})
            entry.rates = (*rates_of(entry.settings.name, [done]), *entry.rates)[:MAX_RATES]
        if not entry.removed:
            self.metrics.runs.labels(*entry.key, outcome).inc()
            sums = Figures(details.get("figures") or {}, entry.table.settings.format, "run")
            self.metrics.count_figures(*entry.key, sums)
        self.ranking.end(details.get("used"), run.plan, now)
        if (used := details.get("used")) is not None:
            self.metrics.count_usage(entry.table.name, used, money_of(used, self.settings.config.prices.by_store()))
            if outcome == "succeeded":
                self._recorder.add_spent(entry, mono - run.began, used, details.get("achieved"))
        self.metrics.run_seconds.labels(entry.settings.name).observe(mono - run.began)
        self.metrics.observe_phases(entry.settings.name, details.get("phases") or {})
        if entry.lease is not None:
            lease, entry.lease = entry.lease, None
            if outcome != "lost":
                self._release(entry, lease, outcome if outcome in {*COMPLETED, *FAILURES} else None)
        published = bool(details.get("versions"))
        count_run(entry, outcome, details.get("achieved"), now, published=published)
        if outcome in {*COMPLETED, *FAILURES}:
            self._polling.record_run(entry, details.get("figures") or {}, remaining if published else {})
        self._update_entry(entry, outcome, now, run.started, details.get("exit_code") or 0)
        entry.unchanged_since = run.before if outcome == "succeeded" and not published else None
        entry.skips = 0
        self._log_end(entry, outcome, round(mono - run.began, 3), log_fields(details))
        if outcome == "succeeded" and entry.settings.heartbeat_url is not None:
            timeout = self.settings.config.heartbeat.timeout.total_seconds()
            self._heartbeat.beat(entry.settings.heartbeat_url, *entry.key, timeout)
        if outcome in COMPLETED and details.get("versions") and not self._once:
            self.poll(entry.table.name)

    def _log_end(self, entry: TableJob, outcome: str, seconds: float, fields: dict[str, Any]) -> None:
        """Log the end of a run. What blocks a part of the table is logged once, and again when it changes."""
        level, same = LEVELS.get(outcome, 20), fields == entry.logged
        entry.logged = fields if "blocked" in fields else None
        if same:
            level, fields = 20, repeated(fields)
        self._log.log(
            level,
            "run_finished",
            table=entry.table.name,
            job=entry.settings.name,
            outcome=outcome,
            seconds=seconds,
            **fields,
        )

    def _update_entry(self, entry: TableJob, outcome: str, now: datetime, started: datetime, code: int) -> None:
        """Update a job's entry after a run: its outcome, its failures, and when the next run may begin."""
        entry.outcome, entry.finished, entry.ended = outcome, now, self.clock.monotonic()
        entry.state, entry.due, entry.waiting = IDLE, None, None
        entry.asked_by, entry.at_once = None, False
        if self._once:
            self.codes.append(code)
        if outcome in {*COMPLETED, *FAILURES}:
            entry.started = started
        if outcome in COMPLETED:
            entry.failures = 0
            entry.not_before = None
            if outcome == "succeeded":
                entry.succeeded = now
        elif outcome in FAILURES:
            entry.failures += 1
            entry.not_before = now + wait_after(entry.failures, self.settings.config.backoff, self._random)
            if not self._once and not entry.removed:
                queue_retry(entry, now, entry.not_before)

    def _record_not_started(self, entry: TableJob, error: MemwalOpsError | None) -> None:
        """Record a run that could not start as a failed one."""
        now = self.clock.now()
        plan = {"apply": entry.settings.apply, "options": dict(entry.settings.options)}
        entry.attempted = now
        number = self._recorder.begin(entry, plan, now)
        details = {"reason": None, "error": None, "remedy": None} if error is None else error_fields(error)
        self._recorder.finish(entry, number, now, "failed", details)
        self.metrics.runs.labels(*entry.key, "failed").inc()
        self._log.warning("run_not_started", table=entry.table.name, job=entry.settings.name, **log_fields(details))
        self._update_entry(entry, "failed", now, now, details.get("exit_code") or 1)

    def _ran_elsewhere(self, entry: TableJob, last: LastRun) -> None:
        instance = None if self.leases is None else self.leases.holder.instance
        again = found_damage(entry, last, instance)
        leave_backoff(entry, last, instance, timedelta(seconds=self.skews.get(entry.table.name, 0.0)))
        if again:
            self.enqueue(*entry.key, "schedule")

    def _is_done_elsewhere(self, entry: TableJob, last: LastRun) -> bool:
        if self.leases is None or not is_schedule_met(entry, last, self.leases.holder.instance, self.clock.now()):
            return False
        self.metrics.skipped.labels(*entry.key, "shared").inc()
        return True

    def _release(self, entry: TableJob, lease: Lease, outcome: str | None) -> None:
        if self.leases is not None:
            self.leases.release(entry.table, lease, outcome)

    # -- the tables

    def _new_entry(self, table: FoundTable, settings: JobSettings, now: datetime) -> TableJob:
        running = next(
            (entry for entry in self._runs.values() if entry.matches(table.uri, table.name, settings.name)), None
        )
        if running is not None and running.removed:
            # The table was removed while the job ran, and is back: the run in flight is this entry's own.
            running.removed, running.table, running.settings = False, table, settings
            return running
        last = self._recorder.last(table.name, table.uri, settings.name, now)
        entry = TableJob.from_history(last, table, settings)
        if settings.job.reads_only:
            entry.answers = self._recorder.last_answers(table.name, table.uri, settings.name)
        if settings.job.debt is not None:
            entry.rates = self._recorder.rates(table.name, table.uri, settings.name)
        resume(entry, last, self.settings.config.backoff, self._random, now)
        return entry

    def _find(self, table: str, job: str) -> TableJob | None:
        state = self.tables.get(table)
        return None if state is None else state.entries.get(job)
