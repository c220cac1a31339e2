"""The life of a run: which one is next, how it begins, what is watched while it runs, and how it ends.

The free workers of each pool get the jobs whose turn it is. A run begins once its job's lease is acquired, unless
another supervisor holds it or has just done what is due; it is ended if it hangs, exceeds its timeout or its memory
limit, or loses the lease. ``ended_by`` has the reason; the outcome follows from its worker's result or exit.
Only the scheduler's thread calls this.
"""

from __future__ import annotations

import heapq
import signal
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from memwal_ops.core.cost import money_of
from memwal_ops.core.figures import Figures
from memwal_ops.core.job import POOLS, Pool
from memwal_ops.core.leases import Lease
from memwal_ops.core.outlook import MAX_RATES, rates_of
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.registry import package_of
from memwal_ops.errors import LeaseLostError, MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage.api import DiskFullError
from memwal_ops.supervisor.scheduling import due
from memwal_ops.supervisor.scheduling.backlogs import SLOW_SECONDS, BacklogPolling
from memwal_ops.supervisor.scheduling.ranking import Ranking
from memwal_ops.supervisor.scheduling.shared_state import SharedState
from memwal_ops.supervisor.state import outcomes
from memwal_ops.supervisor.state.history import COMPLETED, FAILURES
from memwal_ops.supervisor.state.tables import IDLE, LEASING, QUEUED, RUNNING, Clock, RunState, TableJob
from memwal_ops.supervisor.workers.leasing import LeaseClient
from memwal_ops.supervisor.workers.pools import Pools, WorkerProcess
from memwal_ops.supervisor.workers.protocol import RunRequest, lease_document


class RunEnds:
    """Takes the ends of runs."""

    def __init__(self, shared: SharedState, ranking: Ranking, polling: BacklogPolling) -> None:
        self._shared, self._ranking, self._polling = shared, ranking, polling
        self._log = get_logger(__name__)

    def finish(
        self, entry: TableJob, outcome: str, details: dict[str, Any], remaining: Mapping[str, float] | None = None
    ) -> None:
        """Record the end of a run, whatever its outcome; ``remaining``: see ``Result`` of a worker."""
        shared = self._shared
        now, mono = shared.clock.now(), shared.clock.monotonic()
        run, entry.run = entry.run, None
        assert run is not None  # noqa: S101 - it is in flight
        shared.runs = {number: running for number, running in shared.runs.items() if running is not entry}
        debt = entry.settings.job.debts(run.plan.get("backlog") or {})
        if details.get("used") and debt:
            details = {**details, "used": {**details["used"], "debt": debt}}
        shared.recorder.finish(entry, run.number, now, outcome, {**details, "log": [*run.log]})
        if entry.lease is not None:
            lease, entry.lease = entry.lease, None
            if outcome != "lost":
                shared.release(entry, lease, outcome if outcome in {*COMPLETED, *FAILURES} else None)
        ran, published = mono - run.began, bool(details.get("versions"))
        self._count(entry, run, outcome, details, ran)
        due.count_run(entry, outcome, details.get("achieved"), now, published=published)
        if outcome in {*COMPLETED, *FAILURES}:
            self._polling.results.record_run(entry, details.get("figures") or {}, remaining if published else {})
        self._update(entry, outcome, now, run.started, details.get("exit_code") or 0)
        entry.unchanged_since = run.before if outcome == "succeeded" and not published else None
        entry.skips = 0
        self._log_end(entry, outcome, round(ran, 3), outcomes.log_fields(details))
        if outcome == "succeeded" and entry.settings.heartbeat_url is not None:
            timeout = shared.settings.config.heartbeat.timeout.total_seconds()
            shared.heartbeat.beat(entry.settings.heartbeat_url, *entry.key, timeout)
        if outcome in COMPLETED and published and not shared.once:
            self._polling.request(entry.table.name)

    def not_started(self, entry: TableJob, error: MemwalOpsError | None) -> None:
        """Record a run that could not start as a failed one."""
        shared, now = self._shared, self._shared.clock.now()
        plan = {"apply": entry.settings.apply, "options": dict(entry.settings.options)}
        entry.attempted = now
        number = shared.recorder.begin(entry, plan, now)
        details = {"reason": None, "error": None, "remedy": None} if error is None else outcomes.error_fields(error)
        shared.recorder.finish(entry, number, now, "failed", details)
        shared.metrics.runs.add(*entry.key, "failed")
        self._log.warning(
            "run_not_started", table=entry.table.name, job=entry.settings.name, **outcomes.log_fields(details)
        )
        self._update(entry, "failed", now, now, details.get("exit_code") or 1)

    def _count(self, entry: TableJob, run: RunState, outcome: str, details: Mapping[str, Any], ran: float) -> None:
        shared, now, name = self._shared, self._shared.clock.now(), entry.settings.name
        report, metrics = details.get("report"), shared.metrics
        if entry.settings.job.reads_only:
            answers = outcomes.answers_of(report, now.isoformat(timespec="milliseconds"))
            entry.answers = entry.answers if answers is None else answers
        if entry.settings.job.debt is not None and outcome == "succeeded":
            entry.rates = (*rates_of(name, [PastRun(ran, report or {})]), *entry.rates)[:MAX_RATES]
        if not entry.removed:
            metrics.runs.add(*entry.key, outcome)
            metrics.count_figures(*entry.key, Figures(details.get("figures") or {}, entry.table.settings.format, "run"))
        used = details.get("used")
        self._ranking.end(used, run.plan, now)
        if used is not None:
            metrics.count_usage(entry.table.name, used, money_of(used, shared.settings.config.prices.by_store()))
            if outcome == "succeeded":
                shared.recorder.add_spent(entry, ran, used, details.get("achieved"))
        metrics.run_seconds.labels(name).observe(ran)
        metrics.observe_phases(name, details.get("phases") or {})

    def _log_end(self, entry: TableJob, outcome: str, seconds: float, fields: dict[str, Any]) -> None:
        level, same = outcomes.LEVELS.get(outcome, 20), fields == entry.logged
        entry.logged = fields if "blocked" in fields else None
        if same:
            level, fields = 20, outcomes.repeated(fields)
        about = {"table": entry.table.name, "job": entry.settings.name, "outcome": outcome, "seconds": seconds}
        self._log.log(level, "run_finished", **about, **fields)

    def _update(self, entry: TableJob, outcome: str, now: datetime, started: datetime, code: int) -> None:
        shared = self._shared
        entry.outcome, entry.finished, entry.ended = outcome, now, shared.clock.monotonic()
        entry.state, entry.due, entry.waiting = IDLE, None, None
        shared.touch(entry.table.name)
        entry.asked_by, entry.asked_at, entry.at_once = None, None, False
        if shared.once:
            shared.codes.append(code)
        if outcome in {*COMPLETED, *FAILURES}:
            entry.started = started
        if outcome in COMPLETED:
            entry.failures, entry.not_before = 0, None
            if outcome == "succeeded":
                entry.succeeded = now
        elif outcome in FAILURES:
            entry.failures += 1
            shared.awake.add(entry.table.name)
            entry.not_before = now + due.wait_after(entry.failures, shared.settings.config.backoff, shared.random)
            if not shared.once and not entry.removed:
                due.queue_retry(entry, now, entry.not_before)


_KILL_SECONDS = 5.0
CANCEL_SECONDS = 60.0
"""How long a run that was cancelled may finish its current step."""
_GENTLY = ("stop", "cancel")
_START_SECONDS = 120.0
# A store that hangs must not prevent the polls of all other tables.
_POLL_SECONDS = 300.0
_CPU_SECONDS = 0.5
_RENEW_AGAIN_SECONDS = 1.0


class Watchdog:
    """Checks all runs and polls in flight. It writes this clock minus the store's into ``skews``, by table."""

    def __init__(self, pools: Pools, leases: LeaseClient | None, clock: Clock, skews: dict[str, float]) -> None:
        self._pools, self._leases, self._clock, self._skews = pools, leases, clock, skews
        self._log = get_logger(__name__)

    def check(self, runs: Iterable[TableJob], polls: Iterable[tuple[WorkerProcess, float]]) -> None:
        """Renew what must be renewed, end what must be ended; ``polls``: workers of polls and errands, since when."""
        mono = self._clock.monotonic()
        for worker, began in polls:
            limit = self._pools.limit(worker.pool).memory
            heavy = limit is not None and (worker.resident_bytes() or 0) > limit
            if heavy or mono - began > _POLL_SECONDS:
                worker.signal(signal.SIGKILL)
        for entry in runs:
            run = entry.run
            assert run is not None  # noqa: S101 - it is in flight
            self._renew(entry, mono)
            if run.signalled is not None:
                if run.ended_by == "cancel" and mono - run.signalled > CANCEL_SECONDS:
                    self.end(entry, "abort")
                elif run.ended_by not in _GENTLY and mono - run.signalled > _KILL_SECONDS and not run.killed:
                    run.killed = True
                    run.worker.signal(signal.SIGKILL)
                continue
            cpu = run.worker.cpu_seconds()
            if cpu is not None and cpu - run.cpu >= _CPU_SECONDS:
                run.cpu, run.progress = cpu, mono
            limit = self._pools.limit(run.worker.pool).memory
            resident = run.worker.resident_bytes() if limit is not None else None
            if limit is not None and resident is not None and resident > limit:
                run.ended_by, run.signalled, run.killed = "memory", mono, True
                run.worker.signal(signal.SIGKILL)
            elif mono - run.progress > entry.settings.hung_after.total_seconds() + (
                0 if run.working else _START_SECONDS
            ):
                self.end(entry, "hung")
            elif (
                entry.settings.timeout is not None
                and run.working
                and mono - run.began > entry.settings.timeout.total_seconds()
            ):
                self.end(entry, "timeout")

    def _renew(self, entry: TableJob, mono: float) -> None:
        lease, client = entry.lease, self._leases
        lost = entry.run is not None and entry.run.ended_by == "lost"
        if lease is None or client is None or lost or entry.renewing or mono < entry.renew_at:
            return
        entry.renewing = True

        def on_result(renewed: Lease | None, error: MemwalOpsError | None) -> None:
            entry.renewing = False
            if entry.lease is None or entry.lease.token != lease.token:
                return
            if renewed is not None:
                entry.lease, entry.renewed = renewed, mono
                entry.renew_at = mono + lease.ttl.total_seconds() / 3
                self._skews[entry.table.name] = (self._clock.now() - renewed.written).total_seconds()
                return
            late = self._clock.monotonic() - entry.renewed > lease.ttl.total_seconds()
            if isinstance(error, LeaseLostError) or late:
                self._log.warning("lease_lost", table=entry.table.name, job=entry.settings.name, error=str(error))
                self.end(entry, "lost")
            else:
                entry.renew_at = self._clock.monotonic() + _RENEW_AGAIN_SECONDS

        client.renew(entry.table, lease, on_result)

    def ask_to_stop(self, entry: TableJob, why: str) -> None:
        """Ask a run to stop after its current step."""
        run = entry.run
        if run is not None and run.ended_by is None:
            run.ended_by = why
            run.signalled = self._clock.monotonic()
            run.worker.send({"do": "stop", "id": run.worker.request})

    def end(self, entry: TableJob, why: str) -> None:
        """End a run: SIGTERM now, SIGKILL 5 seconds later."""
        run = entry.run
        if run is not None and run.ended_by in {None, *_GENTLY}:
            run.ended_by = why
            run.signalled = self._clock.monotonic()
            run.worker.quitting = True
            run.worker.signal(signal.SIGTERM)


# Whether the budget of the fleet defers the job for which one waits depends on all others: it is asked again.
_LOOK_AGAIN = timedelta(seconds=30)
# While the budget of the fleet defers something, it is asked again after so many seconds.
_ASK_SECONDS = 1.0


class Dispatcher:
    """Chooses which of the due jobs start.

    A queued job is looked at when something of its table has changed, or when the time comes for which it waits; so a
    start costs no more where thousands of jobs wait.
    """

    def __init__(self, shared: SharedState, ranking: Ranking, starter: Starter) -> None:
        self._shared, self._ranking, self._starter = shared, ranking, starter
        self._ask_at = float("-inf")
        # When to look at a job again; of each only the time in ``_at`` counts.
        self._wakes: list[tuple[datetime, tuple[str, str]]] = []
        self._at: dict[tuple[str, str], datetime] = {}

    def dispatch(self) -> None:
        """Start as many jobs as there are free workers; does nothing where no job can have become able to start."""
        shared = self._shared
        now, mono = shared.clock.now(), shared.clock.monotonic()
        self._look(now)
        if not shared.changed and mono < self._ask_at:
            return
        shared.changed, self._ask_at = False, mono + _ASK_SECONDS
        for pool in POOLS:
            while shared.pools.free(pool) > self._starter.leasing(pool, mono):
                entry = self._ranking.choose(pool, shared.begun(), now)
                if entry is None:
                    break
                self._ranking.discard(entry)
                if self._starter.hangs(entry, mono):
                    self._wake(entry, now + _LOOK_AGAIN)
                else:
                    self._starter.begin(entry)

    def next_change(self) -> datetime | None:
        """When a job may become able to start by time alone; None: never."""
        now = self._shared.clock.now()
        while self._wakes and self._at.get(self._wakes[0][1]) != self._wakes[0][0]:
            heapq.heappop(self._wakes)
        times = [self._ranking.next_change(now), self._wakes[0][0] if self._wakes else None]
        return min((when for when in times if when is not None), default=None)

    def _look(self, now: datetime) -> None:
        """Find what the queued jobs wait for of which that may have changed."""
        shared = self._shared
        if shared.touched is None:
            self._ranking.clear()
            self._wakes.clear()
            self._at.clear()
            shared.touched = {*shared.tables}
        while self._wakes and self._wakes[0][0] <= now:
            when, (table, job) = heapq.heappop(self._wakes)
            entry = shared.find(table, job)
            if entry is not None and self._at.get(entry.key) == when:
                del self._at[entry.key]
                self._evaluate(entry, now)
        while shared.touched:
            tables, shared.touched = shared.touched, set()
            for name in sorted(tables & shared.tables.keys()):
                for entry in shared.tables[name].entries.values():
                    self._evaluate(entry, now)

    def _evaluate(self, entry: TableJob, now: datetime) -> None:
        shared = self._shared
        if entry.state != QUEUED:
            self._ranking.discard(entry)
            return
        before = entry.waiting
        entry.waiting = due.waits_for(
            entry,
            now,
            paused=shared.is_paused(entry),
            over_budget=lambda entry: shared.recorder.budget_frees(entry) is not None,
            must_wait=lambda entry: self._must_wait(entry, now),
        )
        if (before in due.RUNS_SOON) != (entry.waiting in due.RUNS_SOON):
            shared.touch(entry.table.name)  # others on its table wait for it, or no longer
        if entry.waiting == "worker":
            shared.changed = True
            self._ranking.put(entry)
            return
        self._ranking.discard(entry)
        self._wake(entry, self._ends(entry, now))

    def _wake(self, entry: TableJob, when: datetime | None) -> None:
        if when is not None and self._at.get(entry.key) != when:
            self._at[entry.key] = when
            heapq.heappush(self._wakes, (when, entry.key))

    def _ends(self, entry: TableJob, now: datetime) -> datetime | None:
        """When what a job waits for may have ended; None: not by time."""
        if entry.waiting == "window":
            return (now + timedelta(minutes=1)).replace(second=0, microsecond=0)
        if entry.waiting == "paused":
            pause = self._shared.pauses.covering(*entry.key, now)
            return None if pause is None else pause.until
        if entry.waiting == "budget":
            return self._shared.recorder.budget_frees(entry)
        return now + _LOOK_AGAIN if entry.waiting == "earlier" else entry.not_before

    def _must_wait(self, entry: TableJob, now: datetime) -> bool:
        shared = self._shared
        if entry.started is not None and not shared.once:
            return False
        state = shared.tables[entry.table.name]
        return any(
            due.must_run_before(other, entry, always=shared.once, undecided=name in state.scheduled)
            and (other.state != QUEUED or self._ranking.refusal(other, shared.begun(), now) is None)
            for name, other in state.entries.items()
        )


class Starter:
    """Starts the jobs whose turn it is."""

    def __init__(self, shared: SharedState, ranking: Ranking, polling: BacklogPolling, ends: RunEnds) -> None:
        self._shared, self._ranking, self._polling, self._ends = shared, ranking, polling, ends
        self._log = get_logger(__name__)

    def leasing(self, pool: Pool, mono: float) -> int:
        """Return how many jobs of a pool wait for their leases, but for those whose stores hang."""
        leasing = (entry for entry in self._shared.leasing.values() if mono - entry.lease_requested <= SLOW_SECONDS)
        return sum(entry.settings.job.pool == pool for entry in leasing)

    def hangs(self, entry: TableJob, mono: float) -> bool:
        """Whether the store of a job has not answered a request of a lease for some time."""
        slow = [other for other in self._shared.leasing.values() if mono - other.lease_requested > SLOW_SECONDS]
        return bool(slow) and entry.table.store in {other.table.store for other in slow}

    def begin(self, entry: TableJob) -> None:
        """Start a job, once its lease is acquired."""
        entry.not_before = None
        leases = self._shared.leases
        if leases is None or not entry.settings.apply:
            # A plan only reads: it needs no lease, and may lack the permission to write one.
            self.start(entry, None)
            return
        entry.state = LEASING
        self._shared.leasing[entry.key] = entry
        entry.lease_requested = self._shared.clock.monotonic()
        leases.acquire(
            entry.table, entry.settings.name, lambda result, error: self._on_lease_result(entry, result, error)
        )

    def _on_lease_result(
        self, entry: TableJob, result: tuple[Lease | None, Lease | None] | None, error: MemwalOpsError | None
    ) -> None:
        """Start the run with the lease that was acquired, or request it again later, by the newest one before it."""
        shared = self._shared
        shared.leasing.pop(entry.key, None)
        shared.touch(entry.table.name)
        lease, before = (None, None) if result is None else result
        gone = entry.removed or shared.stopping
        if gone or shared.is_paused(entry):
            # Paused while the lease was requested: the user was told that nothing runs.
            entry.state, entry.waiting = (IDLE, entry.waiting) if gone else (QUEUED, "paused")
            if lease is not None:
                shared.release(entry, lease, None)
        elif result is None and isinstance(error, DiskFullError) and entry.settings.job.deletes:
            # It frees the space that its lease would need. Leases save work; no proof depends on one.
            self._log.warning(
                "lease_not_taken", table=entry.table.name, **outcomes.log_fields(outcomes.error_fields(error))
            )
            self.start(entry, None)
        elif result is None:
            self._ends.not_started(entry, error)
        elif lease is None:
            self._held(entry, before)
        else:
            self._acquired(entry, lease)

    def _acquired(self, entry: TableJob, lease: Lease) -> None:
        shared, now = self._shared, self._shared.clock.now()
        shared.skews[entry.table.name] = (now - lease.written).total_seconds()
        entry.other, entry.other_since = None, None
        if entry.at_once or not due.is_done_elsewhere(entry, lease, shared.tables[entry.table.name].polled, now):
            self.start(entry, lease)
            return
        if entry.why != "schedule":
            self._polling.request(entry.table.name)
        shared.release(entry, lease, None)
        shared.metrics.skipped.add(*entry.key, "shared")
        entry.state, entry.due = IDLE, None

    def _held(self, entry: TableJob, other: Lease | None) -> None:
        """Another supervisor holds the lease: request it again later, as long as the job is due."""
        shared, now = self._shared, self._shared.clock.now()
        if entry.other is None:
            entry.other_since = now
            shared.metrics.skipped.add(*entry.key, "held")
        entry.other = other
        if shared.once:
            entry.state, entry.due = IDLE, None
            shared.leased_elsewhere.append(_leased(entry, other))
            return
        assert shared.leases is not None  # noqa: S101 - the lease was requested from it
        entry.state = QUEUED
        entry.not_before = now + shared.leases.ttl / 10 * (1 + shared.random.random())

    def start(self, entry: TableJob, lease: Lease | None) -> None:
        """Start a job, with its lease, if it needs one."""
        shared, settings = self._shared, entry.settings
        now, mono, state = shared.clock.now(), shared.clock.monotonic(), shared.tables[entry.table.name]
        options = {**settings.options, **self._polling.due.retraining(entry)[1]}
        plan = {
            "apply": settings.apply,
            "options": options,
            "backlog": state.figures,
            "version": state.version,
            "token": None if lease is None else lease.token,
            "waited_seconds": 0.0 if entry.due is None else round((now - entry.due).total_seconds(), 3),
            **({} if entry.asked_by is None else {"asked_by": entry.asked_by}),
            **self._ranking.begin(entry),
        }
        number = shared.recorder.begin(entry, plan, now)
        request = RunRequest(
            id=shared.next_number(),
            uri=entry.table.uri,
            storage_options=dict(entry.table.settings.storage_options),
            job=settings.name,
            options=options,
            apply=settings.apply,
            lease=None if lease is None else lease_document(lease),
            named=settings.named,
            foreign=package_of(settings.job) is not None,
        )
        worker = shared.assign(settings.job.pool, request)
        entry.lease, entry.renewed, entry.renewing = lease, mono, False
        entry.renew_at = mono + (0.0 if lease is None else lease.ttl.total_seconds() / 3)
        before = self._polling.due.fingerprint_and_settings(entry)
        entry.run = RunState(number, worker, mono, now, mono, before=before, plan=plan)
        entry.state, entry.waiting, entry.attempted = RUNNING, None, now
        shared.runs[request.id] = entry
        self._log.info("run_started", table=entry.table.name, job=settings.name, why=entry.why, pid=worker.pid)


def _leased(entry: TableJob, other: Lease | None) -> dict[str, Any]:
    expires: datetime | None = None if other is None else other.expires
    return {
        "table": entry.table.name,
        "job": entry.settings.name,
        "holder": None if other is None else other.holder.name,
        "expires": None if expires is None else expires.isoformat(timespec="seconds"),
    }
