"""When a table's backlog is polled: on request, less often while it is idle, and not at once after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.figures import jobs_of
from memwal_ops.core.leases import LastRun
from memwal_ops.errors import WorkerDiedError
from memwal_ops.supervisor.scheduling.announcements import Announcements
from memwal_ops.supervisor.scheduling.due import DueJobs
from memwal_ops.supervisor.scheduling.poll_results import PollResults, ages_of, watched_ages
from memwal_ops.supervisor.state.outcomes import describe_exit
from memwal_ops.supervisor.state.tables import IDLE, WATCH, Reading
from memwal_ops.supervisor.workers.protocol import PollRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.supervisor.scheduling.shared_state import SharedState
    from memwal_ops.supervisor.state.tables import TableJob, TableState
    from memwal_ops.supervisor.workers.pools import WorkerProcess

# A store that does not respond must not occupy the only polling worker, which all other tables need too.
_HISTORY_SECONDS = 60.0
# After so many polls without a change, the time between two polls doubles with each. A timer fires again within
# 1.2 times `poll`, its jitter included; the rest is a margin for a busy scheduler.
_UNCHANGED_POLLS, _NEXT_TIMER_FACTOR = 10, 1.5
# For at most this long, the figures of a table with an unchanged fingerprint are reused; then all are read again. The
# fingerprint does not show each write to a log: shorter where the time since the last one matters.
_READ_AGAIN_SECONDS, _UNFLUSHED_SECONDS, _EXPECTED_PART = 3600.0, 900.0, 4


class BacklogPolling:
    """The polls of all tables. Only the scheduler's thread calls it.

    Attributes:
        announced: the tables whose commits are announced by events.
        due: the jobs that a poll makes due.
    """

    def __init__(self, shared: SharedState) -> None:
        """Poll nothing yet."""
        self._shared = shared
        self.announced = Announcements(shared.clock)
        self.due = DueJobs(shared)
        self.results = PollResults(shared, self.announced, self.due)
        self._polls: dict[int, tuple[TableState, WorkerProcess, Reading]] = {}
        # The tables whose poll is due, the longest first.
        self._waiting: dict[str, None] = {}

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
            self._waiting[table] = None

    def may_skip(self, table: str) -> bool:
        """Whether a table may skip this poll: the next timer is still within ``idle_poll``.

        It has been idle long enough, or an event announces its next commit, and nothing else can make a job due.
        """
        state = self._shared.tables.get(table)
        if state is None or any(entry.failures for entry in state.entries.values()):
            return False
        poll, longest = (span.total_seconds() for span in (state.table.settings.poll, state.table.settings.idle_poll))
        wait = min(poll * 2.0 ** min(max(state.unchanged - _UNCHANGED_POLLS, 0), 30), longest)
        if self.announced.covers(table) and _waits_for_commit(state):
            wait = longest
        return self._shared.clock.monotonic() - state.poll_began + _NEXT_TIMER_FACTOR * poll <= wait

    def request_history(self, table: str) -> None:
        """Request a poll that reads the table's recent history, too; at most one in a minute."""
        state, now = self._shared.tables.get(table), self._shared.clock.monotonic()
        if state is not None and now - state.history_read >= _HISTORY_SECONDS:
            state.history_read, state.history_wanted = now, True
            self.request(table)

    def decide_at_next_poll(self, entry: TableJob) -> bool:
        """Leave it to the next poll whether a scheduled run is necessary; False if it is known to be necessary.

        Where that depends on the table's figures alone, no poll is requested: that of the timer is soon enough.
        """
        if entry.state != IDLE:
            return False
        unchanged, state = self.due.is_unchanged(entry), self._shared.tables[entry.table.name]
        by_lease = self.due.asks_lease(state, entry)
        if not (unchanged or by_lease or entry.settings.skips_if_not_due):
            return False
        state.scheduled[entry.settings.name] = self._shared.clock.monotonic()
        if unchanged or by_lease:
            self.request(entry.table.name)
        return True

    def begin(self, free: Callable[[str], int]) -> None:
        """Start as many polls as there are ``free`` workers in the pool, those that have waited longest first."""
        for table in self.announced.take_due():
            self.request(table)
        while self._waiting and free(WATCH):
            table = next(iter(self._waiting))
            del self._waiting[table]
            state = self._shared.tables.get(table)
            if state is not None and state.poll_due is not None and not state.polling:
                self._begin(state)

    def on_result(self, request: int, result: Mapping[str, Any]) -> bool:
        """Process a result if ``request`` is a poll; return whether it is."""
        if request not in self._polls:
            return False
        state, _, reading = self._polls.pop(request)
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
                self._shared.changed = True
        return True

    def on_worker_exit(self, request: int | None, status: int | None) -> bool:
        """Fail the poll that a worker was running when it exited; return whether it was running one."""
        error = WorkerDiedError(f"The process that polled the table's backlog exited ({describe_exit(status)}).")
        result = {"outcome": "failed", "message": str(error), "exit_code": error.exit_code}
        return request is not None and self.on_result(request, result)

    def _begin(self, state: TableState) -> None:
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
        reading = Reading(state.poll_began, jobs, known or "", options)
        self._polls[request.id] = (state, self._shared.assign(WATCH, request), reading)

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


def _reuse_seconds(state: TableState) -> float:
    """For how long the figures of a table with an unchanged fingerprint are reused."""
    expected = state.table.settings.expect_writes_within
    left = _UNFLUSHED_SECONDS if state.backlog.amount("unflushed") else _READ_AGAIN_SECONDS
    return left if expected is None else min(left, expected.total_seconds() / _EXPECTED_PART)


def _waits_for_commit(state: TableState) -> bool:
    """Whether what a poll found stays the same until something is committed: no part is blocked, no age is watched."""
    if state.error is not None or state.blocked:
        return False
    ages = {name for name in ages_of(state) if state.figures.get(name)}
    return not ages & watched_ages(state) and not (ages and "max_backlog_age" in state.table.settings.objectives)
