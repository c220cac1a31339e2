"""Polls of tables' backlogs: when each is due, and what it found.

They are made on request, at once where an event announces a commit, less often while a table is idle, and not at once
after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

from memwal_ops.core.figures import Figures, jobs_of
from memwal_ops.core.leases import LastRun
from memwal_ops.errors import WorkerDiedError
from memwal_ops.log import get_logger
from memwal_ops.storage import locations
from memwal_ops.supervisor.scheduling.due import DueJobs, own_backlog
from memwal_ops.supervisor.scheduling.shared_state import SharedState
from memwal_ops.supervisor.state.outcomes import describe_exit
from memwal_ops.supervisor.state.tables import IDLE, QUEUED, WATCH, Clock, PollReading, TableJob, TableState
from memwal_ops.supervisor.workers.pools import WorkerProcess
from memwal_ops.supervisor.workers.protocol import PollRequest

# The first event after a while polls its table at once. While they keep coming, the time between two polls doubles.
_SHORTEST, _LONGEST = 1.0, 10.0
# S3 delivers events within seconds, and sometimes a minute.
_LATE_SECONDS = 120.0


@dataclass(slots=True)
class _Events:
    """Those of one table; all times are monotonic seconds.

    Attributes:
        due: when the next poll is due that they ask for; None: none is.
        asked: when the last one was; ``gap``: at least so long after it the next one is.
        polled: when the last poll began that was made while events could come; before the first: always.
        unannounced: since when a commit is known that no event announced; None: there is none.
    """

    last: float = float("-inf")
    due: float | None = None
    asked: float = float("-inf")
    gap: float = _SHORTEST
    polled: float = float("-inf")
    unannounced: float | None = None


class Announcements:
    """Events of tables, as far as they came. Only the scheduler's thread calls it."""

    def __init__(self, clock: Clock) -> None:
        self.alive = False
        self._clock = clock
        self._tables: dict[str, _Events] = {}
        self._waiting: set[str] = set()

    def take(self, table: str) -> None:
        """An event announces a commit to a table. Many that come before its poll begins are one."""
        now, of = self._clock.monotonic(), self._of(table)
        of.last, of.unannounced = now, None
        if of.due is None:
            of.due = max(now, of.asked + of.gap)
            self._waiting.add(table)

    def take_due(self) -> list[str]:
        """Return the tables that are to be polled now; they are returned once."""
        now = self._clock.monotonic()
        due = [name for name in self._waiting if (at := self._tables[name].due) is not None and at <= now]
        for name in due:
            of = self._tables[name]
            of.gap = min(2 * of.gap, _LONGEST) if now - of.asked <= 2 * of.gap else _SHORTEST
            of.asked, of.due = now, None
            self._waiting.discard(name)
        return due

    def polled(self, table: str, began: float, *, committed: bool) -> None:
        """A poll that began then found a commit since the one before, or none; its event may still come."""
        of = self._of(table)
        if committed and of.last < of.polled and of.unannounced is None:
            of.unannounced = self._clock.monotonic()
        of.polled = began

    def covers(self, table: str) -> bool:
        """Return whether events of a table come: polls by its timer are a net, and may be few."""
        of = self._tables.get(table)
        return self.alive and of is not None and of.last != float("-inf") and not self._is_late(of)

    def covered(self) -> int:
        """Return how many tables events come for."""
        return sum(map(self.covers, self._tables))

    def missed(self) -> list[str]:
        """Return the tables to which something was committed, without an event.

        Of those that never had one only if no table had any: a bucket may have no notification on purpose.
        """
        late = [(name, of) for name, of in self._tables.items() if self._is_late(of)]
        heard = any(of.last != float("-inf") for of in self._tables.values())
        return sorted(name for name, of in late if not heard or of.last != float("-inf"))

    def retain(self, tables: Collection[str]) -> None:
        """Forget all other tables."""
        self._tables = {name: of for name, of in self._tables.items() if name in tables}
        self._waiting &= self._tables.keys()

    def _of(self, table: str) -> _Events:
        return self._tables.setdefault(table, _Events())

    def _is_late(self, of: _Events) -> bool:
        return of.unannounced is not None and self._clock.monotonic() - of.unannounced > _LATE_SECONDS


# After a poll that failed the table waits as long as that took, and twice as long with each further one, up to ten
# times: a store that was away for a moment is read again soon, one that hangs takes a tenth of the worker's time.
_MAX_FACTOR, _MAX_PAUSE_SECONDS = 10.0, 300.0


class PollResults:
    """Takes the results of polls."""

    def __init__(self, shared: SharedState, announced: Announcements, due: DueJobs) -> None:
        self._shared, self._announced, self._due = shared, announced, due
        self._shared_sets: dict[frozenset[str], frozenset[str]] = {}  # of jobs that apply: few, for many tables
        self._log = get_logger(__name__)

    def take(self, state: TableState, result: Mapping[str, Any], reading: PollReading) -> None:
        """Take the result of a poll, and queue what is due by it."""
        state.polling = False
        if self._shared.tables.get(state.table.name) is not state:
            return
        unchanged, good = bool(result.get("unchanged")), result["outcome"] == "succeeded"
        if unchanged:
            result = {**result, "figures": self._aged(state), "version": state.version}
        else:
            reading = replace(reading, fingerprint=result.get("fingerprint") or "")
        state.result_at = self._shared.clock.monotonic()
        state.history = result.get("report") or state.history
        if result.get("applies") is not None:
            state.applies = self._shared_sets.setdefault(applies := frozenset(result["applies"]), applies)
            for entry in state.entries.values():
                if entry.state == QUEUED and not entry.at_once and not state.applies_to(entry):
                    entry.state, entry.due, entry.waiting = IDLE, None, None
                    self._shared.touch(state.table.name)
        self._take_outcome(state, result, reading.began)
        idle = good and not state.blocked
        if good or result.get("figures"):
            # One job's figures may be missing; the poll counts if it has the backlog itself.
            first = state.polled is None
            same = self._take_figures(state, result)
            if not unchanged:
                state.reading = reading if good and (same or first) else None
            ages = any(state.figures.get(name) for name in watched_ages(state))
            idle = idle and same and not ages and not state.backlog.amount("backlog")
            self._due.queue_triggered(state, reading.began)
            self._due.queue_asking(state)
            self._due.queue_retraining(state)
        else:
            state.reading = None
        self._due.decide_scheduled(state, reading.began)
        if any(entry.state == QUEUED for entry in state.entries.values()):
            self._shared.touch(state.table.name)  # their worth may have changed, and whether they wait
        if state.unchanged and not idle:
            self._shared.awake.add(state.table.name)
        state.unchanged = state.unchanged + 1 if idle else 0

    def _take_outcome(self, state: TableState, result: Mapping[str, Any], began: float) -> None:
        """Count a poll and keep its error; after a failure, the next one waits, see ``_MAX_FACTOR``."""
        good, before = result["outcome"] == "succeeded", state.error
        self._shared.metrics.polls.add(state.table.name, result["outcome"])
        state.error, state.error_code = None if good else str(result["message"]), int(result["exit_code"])
        now = self._shared.clock.monotonic()
        state.failed_polls = 0 if good else state.failed_polls + 1
        factor = min(2.0 ** min(state.failed_polls - 1, 10), _MAX_FACTOR)
        state.poll_not_before = 0.0 if good else now + min((now - began) * factor, _MAX_PAUSE_SECONDS)
        if not good and state.error != before:
            self._log.warning("poll_failed", table=state.table.name, error=state.error)

    def _take_figures(self, state: TableState, result: Mapping[str, Any]) -> bool:
        version, figures, waited = state.version, state.figures, state.backlog.amount("backlog")
        # Each answer has strings of its own: of ten thousand tables, 15 MB.
        state.figures = {intern(name): value for name, value in result["figures"].items()}
        state.version = result["version"]
        waiting = state.backlog.amount("backlog")
        if self._announced.alive and locations.scheme_of(state.table.uri) in locations.S3:
            # What a writer flushes waits for a merge, and is not a version: a region's manifest announces it.
            flushed = None not in {waited, waiting} and (waiting or 0) > (waited or 0)
            committed = version is not None and (version != state.version or flushed)
            self._announced.polled(state.table.name, state.poll_began, committed=committed)
        if result["outcome"] == "succeeded" or waiting is not None:
            state.polled = self._shared.clock.now()
        # An operator may have fixed it: what is still blocked is counted as behind, or the poll finds it itself.
        behind = state.backlog.amount("behind")
        state.blocked = state.blocked if behind is None else min(state.blocked, behind)
        _raise_to(state.figures, state.table.settings.format, state.blocked)
        return _is_same(state, version, figures)

    def _aged(self, state: TableState) -> dict[str, float]:
        passed, ages = self._shared.clock.monotonic() - state.result_at, ages_of(state)
        return {name: value + passed if value and name in ages else value for name, value in state.figures.items()}

    def record_run(self, entry: TableJob, figures: Mapping[str, float], remaining: Mapping[str, float] | None) -> None:
        """Record what blocked a run, which polls do not find: they only list objects. And the backlog that it left.

        ``remaining``: the backlog that it cannot reduce; empty: that of the last poll, as it published nothing; None:
        unknown.
        """
        kind = entry.table.settings.format
        state, blocked = self._shared.tables.get(entry.table.name), Figures(figures, kind, "run").amount("blocked")
        if state is None or entry.removed:
            return
        left = None if remaining is None else dict(remaining or state.figures)
        if blocked is not None:
            state.blocked = blocked
            _raise_to(state.figures, kind, blocked)
            _raise_to(left or {}, kind, blocked)
        entry.unproductive_backlog = None if left is None else own_backlog(entry, left)


def _is_same(state: TableState, version: int | None, figures: Mapping[str, float]) -> bool:
    ages = ages_of(state)
    return version == state.version is not None and all(
        figures.get(name) == value for name, value in state.figures.items() if name not in ages
    )


def watched_ages(state: TableState) -> set[str]:
    """The figures that grow by themselves, and that a trigger reads."""
    whens = [entry.settings.when for entry in state.entries.values()]
    return ages_of(state) & {name for when in whens if when is not None for name in when.figures}


def ages_of(state: TableState) -> set[str]:
    """The figures that grow by themselves: backlog metrics in seconds."""
    metrics = (entry.settings.job.backlog_metrics for entry in state.entries.values())
    return {name for by_name in metrics for name, metric in by_name.items() if metric.unit == "seconds"}


def _raise_to(figures: dict[str, float], kind: str | None, blocked: float) -> None:
    name = Figures(figures, kind).name_of("blocked")
    if name is not None:
        figures[name] = max(figures[name], blocked)


# A store that does not respond must not occupy the only polling worker, which all other tables need too.
_HISTORY_SECONDS = 60.0
# After so many polls without a change, the time between two polls doubles with each. A timer fires again within
# 1.2 times `poll`, its jitter included; the rest is a margin for a busy scheduler.
_UNCHANGED_POLLS, _NEXT_TIMER_FACTOR = 10, 0.5
# Where no `idle_poll` is given: of 10,000 idle tables, some 17 are polled in a second, in 4 % of a core.
_SECONDS_PER_TABLE, _MAX_IDLE_SECONDS = 0.06, 600.0
# For at most this long, the figures of a table with an unchanged fingerprint are reused; then all are read again. The
# fingerprint does not show each write to a log: shorter where the time since the last one matters.
_READ_AGAIN_SECONDS, _UNFLUSHED_SECONDS, _EXPECTED_PART = 3600.0, 900.0, 4


# A poll that takes so long is set aside: it keeps its process, and its worker is free for others, of so many stores. A
# request of a lease keeps no worker for longer, either.
SLOW_SECONDS, _MAX_ASIDE = 5.0, 4


@dataclass(slots=True)
class _StorePolls:
    """The polls of one store: one that hangs delays no other.

    Attributes:
        local: it is this machine's file system, whose tables are read first.
        waiting: the tables whose poll is due, the longest first.
        hangs: its last poll failed after a long time; then one at a time is begun, aside.
        began: when its last poll began, monotonic; ``answered``: when one last succeeded.
    """

    local: bool
    waiting: dict[str, None] = field(default_factory=dict)
    in_flight: list[WorkerProcess] = field(default_factory=list)
    hangs: bool = False
    began: float = float("-inf")
    answered: float = float("-inf")

    def may_begin(self, *, free: bool, aside: bool) -> bool:
        """Whether another poll may begin, with a ``free`` worker of the pool, or ``aside``."""
        if self.hangs:
            return aside and not self.in_flight
        slow = any(worker.aside for worker in self.in_flight)
        return free and (self.local or not slow or self.answered >= self.began)


class BacklogPolling:
    """The polls of all tables. Only the scheduler's thread calls it.

    ``announced``: the tables whose commits are announced by events.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self.announced = Announcements(shared.clock)
        self.due = DueJobs(shared)
        self.results = PollResults(shared, self.announced, self.due)
        self._polls: dict[int, tuple[TableState, WorkerProcess, PollReading]] = {}
        self._stores: dict[str, _StorePolls] = {}

    @property
    def in_flight(self) -> list[tuple[WorkerProcess, float]]:
        """Return the workers that poll a table, each with its start time (monotonic seconds)."""
        return [(worker, reading.began) for _, worker, reading in self._polls.values()]

    def request(self, table: str) -> None:
        """Request a poll of a table; ignored for some time after a poll that failed."""
        state = self._shared.tables.get(table)
        if state is None or self._shared.stopping or self._shared.clock.monotonic() < state.poll_not_before:
            return
        if state.polling:
            state.poll_again = True
        elif state.poll_due is None:
            state.poll_due = self._shared.clock.now()
            self._store_of(state).waiting[table] = None

    def skips(self, table: str) -> int:
        """How many polls of its timer a table may skip from this one on, so that the next is within ``idle_poll``.

        It has been idle long enough, or an event announces its next commit, and nothing else can make a job due.
        """
        state = self._shared.tables.get(table)
        if state is None or any(entry.failures for entry in state.entries.values()):
            return 0
        poll, longest = state.table.settings.poll.total_seconds(), idle_seconds(state, len(self._shared.tables))
        wait = min(poll * 2.0 ** min(max(state.unchanged - _UNCHANGED_POLLS, 0), 30), longest)
        if self.announced.covers(table) and _waits_for_commit(state):
            wait = longest
        passed = self._shared.clock.monotonic() - state.poll_began
        return max(0, int((wait - passed) / poll - _NEXT_TIMER_FACTOR)) if passed < wait else 0

    def request_history(self, table: str) -> None:
        """Request a poll that reads the table's recent history, too; at most one in a minute."""
        state, now = self._shared.tables.get(table), self._shared.clock.monotonic()
        if state is not None and now - state.history_read >= _HISTORY_SECONDS:
            state.history_read, state.history_wanted = now, True
            self.request(table)

    def decide_at_next_poll(self, entry: TableJob) -> bool:
        """Leave it to the next poll whether a scheduled run is necessary; False if it is known to be necessary.

        The first poll shows which jobs apply to the table. Where the decision depends on the table's figures alone, no
        poll is requested: that of the timer is soon enough.
        """
        if entry.state != IDLE:
            return False
        unchanged, state = self.due.is_unchanged(entry), self._shared.tables[entry.table.name]
        by_lease = self.due.asks_lease(state, entry)
        unread = state.polled is None and state.error is None and not entry.settings.named
        if not (unchanged or by_lease or unread or entry.settings.skips_if_not_due):
            return False
        state.scheduled[entry.settings.name] = self._shared.clock.monotonic()
        if unchanged or by_lease or unread:
            self.request(entry.table.name)
        return True

    def begin(self, free: Callable[[str], int]) -> None:
        """Start as many polls as there are ``free`` workers in the pool.

        The store with the fewest polls in flight is the first, and of it the table that has waited longest.
        """
        for table in self.announced.take_due():
            self.request(table)
        now = self._shared.clock.monotonic()
        asides = sum(worker.aside for worker, _ in self.in_flight)
        for worker, began in self.in_flight:
            if asides < _MAX_ASIDE and not worker.aside and now - began > SLOW_SECONDS:
                worker.aside, asides = True, asides + 1
        while True:
            slots = {"free": bool(free(WATCH)), "aside": asides < _MAX_ASIDE}
            able = [store for store in self._stores.values() if store.waiting and store.may_begin(**slots)]
            if not able:
                return
            store = min(able, key=lambda store: (len(store.in_flight), not store.local, store.began))
            table = next(iter(store.waiting))
            del store.waiting[table]
            state = self._shared.tables.get(table)
            if state is not None and state.poll_due is not None and not state.polling:
                worker = self._begin(state)
                worker.aside, store.began = store.hangs, now
                store.in_flight.append(worker)
                asides += worker.aside

    def _store_of(self, state: TableState) -> _StorePolls:
        key = state.table.store
        return self._stores.setdefault(key, _StorePolls(local=key == locations.LOCAL_STORE))

    def on_result(self, request: int, result: Mapping[str, Any]) -> bool:
        """Process a result if ``request`` is a poll; return whether it is."""
        if request not in self._polls:
            return False
        state, worker, reading = self._polls.pop(request)
        now = self._shared.clock.monotonic()
        store = next(store for store in self._stores.values() if worker in store.in_flight)
        store.in_flight.remove(worker)
        if result["outcome"] == "succeeded":
            store.answered, store.hangs = now, False
        else:
            store.hangs = not store.local and now - reading.began > SLOW_SECONDS
        self._shared.pools.spare = int(any(other.hangs for other in self._stores.values()))
        if result.get("used"):
            self._shared.recorder.add_poll(state.table.name, result["used"])
        recorded = {name: LastRun.from_json(last) for name, last in result.get("recorded", {}).items()}
        if "recorded" in result:
            state.recorded = recorded
        self.results.take(state, result, reading)
        if state.poll_again and not self._shared.once:
            self.request(state.table.name)
        for name, last in recorded.items():
            if name in state.entries:
                self.due.ran_elsewhere(state.entries[name], last)
                self._shared.touch(state.table.name)
        return True

    def on_worker_exit(self, request: int | None, status: int | None) -> bool:
        """Fail the poll that a worker was running when it exited; return whether it was running one."""
        error = WorkerDiedError(f"The process that polled the table's backlog exited ({describe_exit(status)}).")
        result = {"outcome": "failed", "message": str(error), "exit_code": error.exit_code}
        return request is not None and self.on_result(request, result)

    def _begin(self, state: TableState) -> WorkerProcess:
        jobs = tuple(dict.fromkeys((*jobs_of("backlog"), *state.entries)))
        storage = dict(state.table.settings.storage_options)
        options = {
            name: dict(entry.settings.options) for name, entry in state.entries.items() if entry.settings.options
        }
        known = self._fingerprint(state, jobs, options)
        asked = tuple(
            name for name, entry in state.entries.items() if entry.failures or self.due.asks_lease(state, entry)
        )
        request = PollRequest(
            self._shared.next_number(),
            state.table.uri,
            storage,
            jobs,
            options,
            state.history_wanted,
            known,
            asked,
            record=True,
        )
        state.history_wanted = False
        state.polling, state.poll_due, state.poll_again = True, None, False
        state.poll_began = self._shared.clock.monotonic()
        reading = PollReading(state.poll_began, jobs, known or "", options)
        worker = self._shared.assign(WATCH, request)
        self._polls[request.id] = (state, worker, reading)
        return worker

    def _fingerprint(
        self, state: TableState, jobs: tuple[str, ...], options: Mapping[str, Mapping[str, Any]]
    ) -> str | None:
        """The fingerprint to poll a table with, see :class:`PollRequest`.

        No figures are reused after a run of this supervisor: not everything that it changes is in the fingerprint.
        """
        reading = state.reading
        if state.polled is None:
            return ""  # a table that was just taken: nothing else may happen to it until the next poll
        if reading is None or state.blocked or state.backlog.amount("blocked"):
            return None
        running = any(entry.run is not None or entry.ended > reading.began for entry in state.entries.values())
        age = self._shared.clock.monotonic() - reading.began
        same = (jobs, options) == (reading.jobs, reading.options)
        fresh = not running and age < _reuse_seconds(state) and not state.history_wanted and same
        return reading.fingerprint if fresh else ""


def idle_seconds(state: TableState, tables: int) -> float:
    """The longest time between two polls of an idle table, one of so many."""
    settings, longest = state.table.settings, state.table.settings.idle_poll.total_seconds()
    many = 0.0 if settings.idle_poll_given else min(_SECONDS_PER_TABLE * tables, _MAX_IDLE_SECONDS)
    return max(longest, many)


def _reuse_seconds(state: TableState) -> float:
    expected = state.table.settings.expect_writes_within
    left = _UNFLUSHED_SECONDS if state.backlog.amount("unflushed") else _READ_AGAIN_SECONDS
    return left if expected is None else min(left, expected.total_seconds() / _EXPECTED_PART)


def _waits_for_commit(state: TableState) -> bool:
    """Whether what a poll found stays the same until something is committed: no part is blocked, no age is watched."""
    if state.error is not None or state.blocked:
        return False
    ages = {name for name in ages_of(state) if state.figures.get(name)}
    return not ages & watched_ages(state) and not (ages and "max_backlog_age" in state.table.settings.objectives)
