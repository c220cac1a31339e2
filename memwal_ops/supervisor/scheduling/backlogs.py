"""Poll the backlogs of tables, evaluate the results, and fire triggers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.core.bad_answers import bad_answers
from memwal_ops.core.figures import Figures, jobs_of
from memwal_ops.core.leases import LastRun
from memwal_ops.core.worth import missed_objective
from memwal_ops.errors import WorkerDiedError
from memwal_ops.log import get_logger
from memwal_ops.storage.locations import S3, scheme_of
from memwal_ops.supervisor.scheduling.announcements import Announcements
from memwal_ops.supervisor.state.outcomes import describe_exit
from memwal_ops.supervisor.state.tables import IDLE, WATCH, Reading
from memwal_ops.supervisor.workers.protocol import PollRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.core.job import Objective
    from memwal_ops.supervisor.config.effective import JobSettings
    from memwal_ops.supervisor.observe.metrics import Metrics
    from memwal_ops.supervisor.scheduling.clock import Clock
    from memwal_ops.supervisor.state.tables import TableJob, TableState
    from memwal_ops.supervisor.workers.pools import WorkerProcess

_ASK_AGAIN_AFTER = timedelta(hours=1)
_UNPRODUCTIVE_FOR = timedelta(minutes=10)
# A verification, which is daily, looks at an unchanged table once a week.
_SKIPS_OF_READERS = 6
# A store that does not respond must not occupy the only polling worker, which all other tables need too.
_HISTORY_SECONDS = 60.0
_FAILED_POLL_FACTOR, _MAX_PAUSE_SECONDS = 10.0, 300.0
# After so many polls without a change, the time between two polls doubles with each. A timer fires again within
# 1.2 times `poll`, its jitter included; the rest is a margin for a busy scheduler.
_UNCHANGED_POLLS, _NEXT_TIMER_FACTOR = 10, 1.5
# For at most this long, the figures of a table with an unchanged fingerprint are reused; then all are read again. The
# fingerprint does not show each write to a log: shorter where the time since the last one matters.
_READ_AGAIN_SECONDS, _UNFLUSHED_SECONDS, _EXPECTED_PART = 3600.0, 900.0, 4


class BacklogPolling:
    """The polls of all tables. Only the scheduler's thread calls it.

    Args:
        tables: the scheduler's tables, by name.
        number: returns the number of the next request.
        assign: sends a request to a worker of a pool.
        enqueue: queues a job of a table, with the reason.
        ran_elsewhere: takes the last run of a failing job by its lease, which may be of another process.
        is_done_elsewhere: whether a scheduled run is not necessary, given the last run of the job by its lease.
        in_fleet: whether other members had the table, so that its leases know more than the history of this one.
        count_used: takes what a poll of a table used.
        is_stopped: whether the triggers of a job are ignored.
        once: a poll is not repeated.
    """

    def __init__(
        self,
        tables: Mapping[str, TableState],
        *,
        clock: Clock,
        metrics: Metrics,
        number: Callable[[], int],
        assign: Callable[[str, Any], WorkerProcess],
        enqueue: Callable[[str, str, str], None],
        ran_elsewhere: Callable[[TableJob, LastRun], None],
        is_done_elsewhere: Callable[[TableJob, LastRun], bool],
        in_fleet: Callable[[], bool],
        count_used: Callable[[str, Mapping[str, Any]], None],
        is_stopped: Callable[[TableJob], bool],
        once: bool,
    ) -> None:
        """Poll nothing yet."""
        self._tables = tables
        self._clock = clock
        self._metrics = metrics
        self._number = number
        self._assign = assign
        self._enqueue = enqueue
        self._ran_elsewhere = ran_elsewhere
        self._is_done_elsewhere = is_done_elsewhere
        self._in_fleet = in_fleet
        self._count_used = count_used
        self._is_stopped = is_stopped
        self._once = once
        self.announced = Announcements(clock)
        self._polls: dict[int, tuple[TableState, WorkerProcess, Reading]] = {}
        self._log = get_logger(__name__)

    @property
    def in_flight(self) -> list[tuple[WorkerProcess, float]]:
        """Return the workers that poll a table, each with its start time (monotonic seconds)."""
        return [(worker, reading.began) for _, worker, reading in self._polls.values()]

    def request(self, table: str) -> None:
        """Request a poll of a table; ignored for some time after a poll that failed."""
        state = self._tables.get(table)
        if state is None or self._clock.monotonic() < state.poll_not_before:
            return
        if state.polling:
            state.poll_again = True
        elif state.poll_due is None:
            state.poll_due = self._clock.now()

    def may_skip(self, table: str) -> bool:
        """Whether a table may skip this poll: the next timer is still within ``idle_poll``.

        It has been idle long enough, or an event announces its next commit, and nothing else can make a job due.
        """
        state = self._tables.get(table)
        if state is None or any(entry.failures for entry in state.entries.values()):
            return False
        poll, longest = (span.total_seconds() for span in (state.table.settings.poll, state.table.settings.idle_poll))
        wait = min(poll * 2.0 ** min(max(state.unchanged - _UNCHANGED_POLLS, 0), 30), longest)
        if self.announced.covers(table) and _waits_for_commit(state):
            wait = longest
        return self._clock.monotonic() - state.poll_began + _NEXT_TIMER_FACTOR * poll <= wait

    def request_history(self, table: str) -> None:
        """Request a poll that reads the table's recent history, too; at most one in a minute."""
        state, now = self._tables.get(table), self._clock.monotonic()
        if state is not None and now - state.history_read >= _HISTORY_SECONDS:
            state.history_read, state.history_wanted = now, True
            self.request(table)

    def fingerprint_and_settings(self, entry: TableJob) -> tuple[str, JobSettings] | None:
        """The fingerprint of an entry's table as far as it is known, with the entry's settings; else None."""
        state = self._tables.get(entry.table.name)
        reading = None if state is None else state.reading
        wanted = entry.settings.job.skip_if_unchanged and entry.settings.heartbeat_url is None and not self._once
        return (reading.fingerprint, entry.settings) if wanted and reading is not None and reading.fingerprint else None

    def decide_at_next_poll(self, entry: TableJob) -> bool:
        """Leave it to the next poll whether a scheduled run is necessary; False if it is known to be necessary.

        Where that depends on the table's figures alone, no poll is requested: that of the timer is soon enough.
        """
        if entry.state != IDLE:
            return False
        unchanged, state = self._is_unchanged(entry), self._tables[entry.table.name]
        by_lease = self._asks_lease(state, entry)
        if not (unchanged or by_lease or entry.settings.skips_if_not_due):
            return False
        state.scheduled[entry.settings.name] = self._clock.monotonic()
        if unchanged or by_lease:
            self.request(entry.table.name)
        return True

    def begin(self, free: Callable[[str], int]) -> None:
        """Start as many polls as there are ``free`` workers in the pool, those that have waited longest first."""
        for table in self.announced.take_due():
            self.request(table)
        while free(WATCH):
            waiting = [state for state in self._tables.values() if state.poll_due is not None and not state.polling]
            if not waiting:
                return
            self._begin(min(waiting, key=lambda state: (state.poll_due, state.table.name)))

    def on_result(self, request: int, result: Mapping[str, Any]) -> bool:
        """Process a result if ``request`` is a poll; return whether it is."""
        if request not in self._polls:
            return False
        state, _, reading = self._polls.pop(request)
        if result.get("used"):
            self._count_used(state.table.name, result["used"])
        recorded = {name: LastRun.from_json(last) for name, last in result.get("recorded", {}).items()}
        if "recorded" in result:
            state.recorded = recorded
        self._polled(state, result, reading)
        for name, last in recorded.items():
            if name in state.entries:
                self._ran_elsewhere(state.entries[name], last)
        return True

    def on_worker_exit(self, request: int | None, status: int | None) -> bool:
        """Fail the poll that a worker was running when it exited; return whether it was running one."""
        error = WorkerDiedError(f"The process that polled the table's backlog exited ({describe_exit(status)}).")
        result = {"outcome": "failed", "message": str(error), "exit_code": error.exit_code}
        return request is not None and self.on_result(request, result)

    def record_run(self, entry: TableJob, figures: Mapping[str, float], remaining: Mapping[str, float] | None) -> None:
        """Record what blocked a run, which polls do not find: they only list objects. And the backlog that it left.

        Args:
            figures: the sums of the run.
            remaining: the backlog that it cannot reduce; empty: that of the last poll, as it published nothing; None:
                unknown.
        """
        kind = entry.table.settings.format
        state, blocked = self._tables.get(entry.table.name), Figures(figures, kind, "run").amount("blocked")
        if state is None or entry.removed:
            return
        left = None if remaining is None else dict(remaining or state.figures)
        if blocked is not None:
            state.blocked = blocked
            _raise_to(state.figures, kind, blocked)
            _raise_to(left or {}, kind, blocked)
        entry.unproductive_backlog = None if left is None else _amounts(entry, left)

    def _begin(self, state: TableState) -> None:
        jobs = tuple(dict.fromkeys((*jobs_of("backlog"), *state.entries)))
        storage = dict(state.table.settings.storage_options)
        options = {
            name: dict(entry.settings.options) for name, entry in state.entries.items() if entry.settings.options
        }
        known = self._fingerprint(state, jobs, options)
        asked = tuple(name for name, entry in state.entries.items() if entry.failures or self._asks_lease(state, entry))
        request = PollRequest(
            self._number(), state.table.uri, storage, jobs, options, state.history_wanted, known, asked, record=True
        )
        state.history_wanted = False
        state.polling, state.poll_due, state.poll_again = True, None, False
        state.poll_began = self._clock.monotonic()
        reading = Reading(state.poll_began, jobs, known or "", options)
        self._polls[request.id] = (state, self._assign(WATCH, request), reading)

    def _fingerprint(
        self, state: TableState, jobs: tuple[str, ...], options: Mapping[str, Mapping[str, Any]]
    ) -> str | None:
        """The fingerprint to poll a table with, see :class:`PollRequest`.

        No figures are reused after a run of this supervisor: not everything that it changes is in the fingerprint.
        """
        reading = state.reading
        if reading is None or state.blocked or state.backlog.amount("blocked"):
            return None
        running = any(entry.run is not None or entry.ended > reading.began for entry in state.entries.values())
        age = self._clock.monotonic() - reading.began
        same = (jobs, options) == (reading.jobs, reading.options)
        fresh = not running and age < _reuse_seconds(state) and not state.history_wanted and same
        return reading.fingerprint if fresh else ""

    def _polled(self, state: TableState, result: Mapping[str, Any], reading: Reading) -> None:
        state.polling = False
        if self._tables.get(state.table.name) is not state:
            return
        unchanged, good = bool(result.get("unchanged")), result["outcome"] == "succeeded"
        if unchanged:
            result = {**result, "figures": self._aged(state), "version": state.version}
        else:
            reading = replace(reading, fingerprint=result.get("fingerprint") or "")
        state.result_at = self._clock.monotonic()
        state.history = result.get("report") or state.history
        if result.get("applies") is not None:
            state.applies = frozenset(result["applies"])
        self._take_outcome(state, result, reading.began)
        idle = good and not state.blocked
        if good or result.get("figures"):
            # One job's figures may be missing; the poll counts if it has the backlog itself.
            same = self._take_figures(state, result)
            if not unchanged:
                state.reading = reading if good and same else None
            idle = idle and same and _is_idle(state)
            self._queue_triggered(state, reading.began)
            self._ask_again(state)
        else:
            state.reading = None
        self._decide_scheduled(state, reading.began)
        state.unchanged = state.unchanged + 1 if idle else 0
        if state.poll_again and not self._once:
            self.request(state.table.name)

    def _take_outcome(self, state: TableState, result: Mapping[str, Any], began: float) -> None:
        """Count a poll and keep its error; after a failure, the next one waits in proportion to its time."""
        good, before = result["outcome"] == "succeeded", state.error
        self._metrics.polls.labels(state.table.name, result["outcome"]).inc()
        state.error, state.error_code = None if good else str(result["message"]), int(result["exit_code"])
        now = self._clock.monotonic()
        state.poll_not_before = 0.0 if good else now + min((now - began) * _FAILED_POLL_FACTOR, _MAX_PAUSE_SECONDS)
        if not good and state.error != before:
            self._log.warning("poll_failed", table=state.table.name, error=state.error)

    def _take_figures(self, state: TableState, result: Mapping[str, Any]) -> bool:
        """Keep the figures of a poll; return whether they are those of the one before."""
        version, figures, waited = state.version, state.figures, state.backlog.amount("backlog")
        state.figures, state.version = dict(result["figures"]), result["version"]
        waiting = state.backlog.amount("backlog")
        if self.announced.alive and scheme_of(state.table.uri) in S3:
            # What a writer flushes waits for a merge, and is no version: a region's manifest announces it.
            flushed = None not in {waited, waiting} and (waiting or 0) > (waited or 0)
            committed = version is not None and (version != state.version or flushed)
            self.announced.polled(state.table.name, state.poll_began, committed=committed)
        if result["outcome"] == "succeeded" or waiting is not None:
            state.polled = self._clock.now()
        # An operator may have fixed it: what is still blocked is counted as behind, or the poll finds it itself.
        behind = state.backlog.amount("behind")
        state.blocked = state.blocked if behind is None else min(state.blocked, behind)
        _raise_to(state.figures, state.table.settings.format, state.blocked)
        return _is_same(state, version, figures)

    def _queue_triggered(self, state: TableState, began: float) -> None:
        """Queue the jobs whose trigger the figures meet, and those that restore an objective."""
        for entry in state.entries.values():
            why = triggered_by(entry.settings, state.figures, entry.table.settings.objectives)
            if why is None or self._is_unproductive(entry, state) or self._is_stopped(entry):
                continue
            if began < entry.ended:
                # Read before its last run ended: the backlog may be gone by now.
                state.poll_again = True
            else:
                self._enqueue(*entry.key, why)

    def _ask_again(self, state: TableState) -> None:
        """Queue a verification that found indexes to answer badly, if the table was written since, for example fixed.

        At most once an hour: on a table to which much is written, only a rebuild changes the answers.
        """
        now = self._clock.now()
        for entry in state.entries.values():
            bad = bad_answers(entry.answers)
            asked = {one.get("asked_version") for one in entry.answers}
            due = entry.finished is None or now - entry.finished >= _ASK_AGAIN_AFTER
            if bad and due and entry.settings.schedule is not None and state.version not in asked:
                self._enqueue(*entry.key, "answers")

    def _decide_scheduled(self, state: TableState, began: float) -> None:
        """Skip scheduled runs that would find nothing to do, and queue the others."""
        now = self._clock.now()
        for name, due in [*state.scheduled.items()]:
            entry = state.entries.get(name)
            last = (state.recorded or {}).get(name)
            if entry is not None and entry.started is None and last and self._is_done_elsewhere(entry, last):
                del state.scheduled[name]
                continue
            why = None if entry is None else self._why_skip(entry, state, began)
            if why is not None and began < due:
                continue  # something may have been written in between: the next poll decides
            del state.scheduled[name]
            if entry is not None and why is not None:
                entry.skips += 1
                self._metrics.skipped.labels(*entry.key, why).inc()
                entry.started = entry.finished = entry.succeeded = now
            elif entry is not None:
                self._enqueue(*entry.key, "schedule")

    def _why_skip(self, entry: TableJob, state: TableState, began: float) -> str | None:
        """Why a scheduled run would find nothing to do; None: it may find something."""
        if self._is_unchanged(entry):
            return "unchanged"
        if state.error is not None or not entry.settings.skips_if_not_due:
            return None
        # What a job before it writes may make it due: after the poll began, or, with `once`, where no poll follows.
        for name in entry.settings.job.after & state.entries.keys():
            if began < state.entries[name].ended or (self._once and state.entries[name].state != IDLE):
                return None
        return "not_due" if entry.settings.has_nothing_to_do(state.figures) else None

    def _asks_lease(self, state: TableState, entry: TableJob) -> bool:
        """Whether the next poll reads a job's last run from its lease: another member of the fleet may have run it.

        What that verified counts more than an older run that found the table sound.
        """
        unknown = entry.started is None or entry.settings.job.reads_only
        return unknown and state.recorded is None and not self._once and self._in_fleet()

    def _is_unchanged(self, entry: TableJob) -> bool:
        """Whether nothing was written to the table, and no setting changed, since before the job's last run.

        Files may be lost without a write: a job that only reads looks again after some skipped runs.
        """
        if entry.settings.job.reads_only and entry.skips >= _SKIPS_OF_READERS:
            return False
        return entry.unchanged_since is not None and entry.unchanged_since == self.fingerprint_and_settings(entry)

    def _aged(self, state: TableState) -> dict[str, float]:
        """The figures of a table that has not changed since the last poll: only ages grow."""
        passed, ages = self._clock.monotonic() - state.result_at, _ages(state)
        return {name: value + passed if value and name in ages else value for name, value in state.figures.items()}

    def _is_unproductive(self, entry: TableJob, state: TableState) -> bool:
        """Whether the last run, less than 10 minutes ago, could not reduce this very backlog.

        Or, of a job that follows its debt, could do only a part of it: what it could not do is a debt still, and each
        run would write it again, so that the schedule decides.
        """
        schedule = entry.settings.schedule
        if entry.settings.follows_debt and schedule is not None and entry.outcome == "partial" and entry.finished:
            return self._clock.now() - entry.finished < schedule.period(entry.finished)
        if not entry.unproductive_backlog or entry.finished is None:
            return False
        recent = self._clock.now() - entry.finished < _UNPRODUCTIVE_FOR
        return recent and entry.unproductive_backlog.items() <= _amounts(entry, state.figures).items()


def triggered_by(
    settings: JobSettings, figures: Mapping[str, float], objectives: Mapping[Objective, float]
) -> str | None:
    """Why backlog figures make a job due: its trigger, or an objective of its table that it restores; None: neither."""
    if settings.when is not None and settings.when.is_met(figures):
        return f"when: {settings.when.text}"
    missed = missed_objective(settings.job, figures, objectives) if settings.apply else None
    return None if missed is None or settings.has_nothing_to_do(figures) else str(missed)


def _reuse_seconds(state: TableState) -> float:
    """For how long the figures of a table with an unchanged fingerprint are reused."""
    expected = state.table.settings.expect_writes_within
    left = _UNFLUSHED_SECONDS if state.backlog.amount("unflushed") else _READ_AGAIN_SECONDS
    return left if expected is None else min(left, expected.total_seconds() / _EXPECTED_PART)


def _is_same(state: TableState, version: int | None, figures: Mapping[str, float]) -> bool:
    """Whether a poll found the version and the figures of the one before, ages aside."""
    ages = _ages(state)
    return version == state.version is not None and all(
        figures.get(name) == value for name, value in state.figures.items() if name not in ages
    )


def _is_idle(state: TableState) -> bool:
    """Whether a poll found nothing waiting, and no trigger that an age could fire."""
    watched = {name for entry in state.entries.values() if entry.settings.when for name in entry.settings.when.figures}
    return not state.backlog.amount("backlog") and not any(state.figures.get(name) for name in _ages(state) & watched)


def _waits_for_commit(state: TableState) -> bool:
    """Whether what a poll found stays the same until something is committed: no part is blocked, no age is watched."""
    if state.error is not None or state.blocked:
        return False
    ages = {name for name in _ages(state) if state.figures.get(name)}
    watched = {name for entry in state.entries.values() if entry.settings.when for name in entry.settings.when.figures}
    return not ages & watched and not (ages and "max_backlog_age" in state.table.settings.objectives)


def _ages(state: TableState) -> set[str]:
    """The figures that grow by themselves: backlog metrics in seconds."""
    metrics = (entry.settings.job.backlog_metrics for entry in state.entries.values())
    return {name for one in metrics for name, metric in one.items() if metric.unit == "seconds"}


def _raise_to(figures: dict[str, float], kind: str | None, blocked: float) -> None:
    name = Figures(figures, kind).name_of("blocked")
    if name is not None:
        figures[name] = max(figures[name], blocked)


def _amounts(entry: TableJob, figures: Mapping[str, float]) -> dict[str, float]:
    """Return those of the figures that are of a job's backlog: ages grow by themselves, and others flush the log."""
    metrics = entry.settings.job.backlog_metrics
    when = entry.settings.when
    names = metrics.keys() | (when.figures if when is not None else frozenset())
    left_out = {name for name, metric in metrics.items() if metric.unit == "seconds" or metric.role == "unflushed"}
    return {name: figures[name] for name in (names - left_out) & figures.keys()}
