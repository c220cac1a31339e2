"""The state of tables, jobs and runs in memory, and its clock. Only the scheduler's thread writes it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from memwal_ops.core.figures import Figures
from memwal_ops.core.leases import LastRun, Lease
from memwal_ops.core.outlook import Rate
from memwal_ops.supervisor.config.effective import JobSettings
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.state.history import LastRuns
from memwal_ops.supervisor.workers.pools import WorkerProcess


class Clock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the wall clock time: time zone aware, UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()


IDLE, QUEUED, LEASING, RUNNING = "idle", "queued", "leasing", "running"
WATCH = "watch"
MAX_LOG_LINES = 200


@dataclass(slots=True)
class RunState:
    """A run in flight. Times are monotonic seconds, except ``started`` (wall clock).

    Attributes:
        number: its number in the history; None if that could not be written.
        worker: the process that runs it; ``working``: the process has begun it (a new one has to start first).
        began: when the request was sent to the worker; from ``working`` on, when the worker began it.
        progress: when it last made progress.
        cpu: processor seconds of the worker at that time.
        ended_by: why the supervisor ends it: hung, timeout, memory, lost, stop, cancel, or abort (cancelled at once).
        log: the last lines that its worker logged.
        opened: what the worker opened last, if a signal ended it.
        signalled: when the worker was asked to end it.
        before: the table's fingerprint and the job's settings before it, see :attr:`TableJob.unchanged_since`.
        doing: what its job reported last, a document of :class:`memwal_ops.core.context.Progress`; ``doing_since``:
            when it began that activity, and how much of it was done then.
    """

    number: int | None
    worker: WorkerProcess
    began: float
    started: datetime
    progress: float
    cpu: float = 0.0
    ended_by: str | None = None
    signalled: float | None = None
    before: tuple[str, JobSettings] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    killed: bool = False
    opened: str = ""
    working: bool = False
    cancelled_by: str = ""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LOG_LINES))
    doing: Mapping[str, Any] | None = None
    doing_since: tuple[float, int] = (0.0, 0)

    def report(self, doing: Mapping[str, Any] | None, mono: float) -> None:
        """Take what its job reports."""
        self.progress = mono
        if doing is not None and (self.doing is None or self.doing["activity"] != doing["activity"]):
            self.doing_since = mono, doing["done"]
        self.doing = doing or self.doing

    def doing_status(self, mono: float) -> dict[str, Any] | None:
        """The document ``progress`` of a job's status."""
        if self.doing is None:
            return None
        (since, first), done, total = self.doing_since, self.doing["done"], self.doing["total"]
        known = total is not None and done > first
        left = (total - done) * (mono - since) / (done - first) if known else None
        return {**self.doing, "seconds_left": None if left is None else round(max(0.0, left), 1)}


_KEPT = ("at_once", "fruitless", "skips", "unproductive_backlog")
_KEPT_TIMES = ("due", "not_before", "attempted", "fruitless_at")


@dataclass(slots=True)
class TableJob:
    """One job on one table.

    Attributes:
        due: since when it is due (wall clock); None if it is not.
        why: what made it due: ``schedule``, ``when: ...``, ``objective ...``, ``retry``, ``answers``, ``request``.
        asked_by: the user who requested the run that is due or in flight, at ``asked_at``; None: it was not requested.
        at_once: it runs before others, in a closed window, and beyond its budget.
        not_before: it does not start before this time (wall clock).
        waiting: what it waits for: paused, window, backoff, breaker, budget, over_budget (that of the fleet), lease,
            worker, or earlier (an upstream job).
        lease: the lease that this supervisor holds for it; ``lease_requested``: when it was requested, monotonic.
        renewed: when that was last renewed, monotonic; ``renew_at``: when to renew it next.
        other: the lease that another supervisor holds; ``other_since``: since when it has prevented a run.
        attempted: when its last run began, however that ended.
        ended: when its last run in this process ended, monotonic.
        unproductive_backlog: the backlog that the last run could not reduce: it published nothing, or was blocked; its
            trigger fires again when the backlog has changed, or after some time.
        unchanged_since: the table's fingerprint before the last run, and the settings of the run, if it succeeded and
            published nothing: with both unchanged, another run would find nothing to do.
        skips: how many scheduled runs in a row were not necessary.
        removed: its job or table is no longer configured; the run in flight finishes.
        answers: how well indexes answered, by the last run that asked them.
        logged: why a part was blocked, as it was last logged; None: nothing was.
        fruitless: so many of its last runs by trigger achieved nothing; ``fruitless_at``: when the last of them ended.
        rates: how fast the last runs wrote rows, the newest first, by which the next one is estimated.
    """

    table: FoundTable
    settings: JobSettings
    first_seen: datetime
    state: str = IDLE
    due: datetime | None = None
    why: str = ""
    asked_by: str | None = None
    asked_at: datetime | None = None
    at_once: bool = False
    not_before: datetime | None = None
    waiting: str | None = None
    run: RunState | None = None
    lease: Lease | None = None
    lease_requested: float = 0.0
    renewed: float = 0.0
    renew_at: float = 0.0
    renewing: bool = False
    other: Lease | None = None
    other_since: datetime | None = None
    started: datetime | None = None
    finished: datetime | None = None
    succeeded: datetime | None = None
    outcome: str | None = None
    failures: int = 0
    attempted: datetime | None = None
    ended: float = float("-inf")
    unproductive_backlog: dict[str, float] | None = None
    logged: dict[str, Any] | None = None
    unchanged_since: tuple[str, JobSettings] | None = None
    skips: int = 0
    removed: bool = False
    answers: Sequence[Mapping[str, Any]] = ()
    rates: tuple[Rate, ...] = ()
    fruitless: int = 0
    fruitless_at: datetime | None = None

    @classmethod
    def from_history(cls, last: LastRuns, table: FoundTable, settings: JobSettings) -> TableJob:
        """Return the entry of a job, with its last runs from the history."""
        return cls(
            table,
            settings,
            last.first_seen,
            started=last.started,
            finished=last.finished,
            succeeded=last.succeeded,
            outcome=last.outcome,
            failures=last.failures,
            attempted=last.attempted,
            fruitless=last.fruitless,
            fruitless_at=last.fruitless_at,
        )

    @property
    def key(self) -> tuple[str, str]:
        """Return the names of the table and the job."""
        return self.table.name, self.settings.name

    def clock_set_back(self, by: timedelta, now: datetime) -> None:
        """Correct the times after the wall clock was set back by ``by``.

        No past event lies in the future then, and no wait becomes longer.
        """
        if self.not_before is not None:
            self.not_before -= by
        self.first_seen = min(self.first_seen, now)
        for name in ("due", "started", "finished", "succeeded", "attempted", "other_since", "fruitless_at"):
            when = getattr(self, name)
            setattr(self, name, None if when is None else min(when, now))

    def remembered(self, mono: float, fingerprint: str | None) -> dict[str, Any]:
        """What the scheduler knows of it beside its status, by which a forecast goes on; only what is set."""
        kept: dict[str, Any] = {name: getattr(self, name) for name in _KEPT if getattr(self, name)}
        kept |= {name: when.isoformat() for name in _KEPT_TIMES if (when := getattr(self, name)) is not None}
        kept |= {"ended_seconds": mono - self.ended} if self.ended > float("-inf") else {}
        before = None if self.run is None else self.run.before
        kept |= {"before": before[0]} if before is not None and before[1] == self.settings else {}
        unchanged = fingerprint is not None and self.unchanged_since == (fingerprint, self.settings)
        return kept | ({"unchanged": fingerprint} if unchanged else {})

    def recall(self, status: Mapping[str, Any], mono: float) -> None:
        """Take over what a status document of it has, with what it remembered."""
        for name, key in (("started", "last_started"), ("finished", "last_finished"), ("succeeded", "last_success")):
            setattr(self, name, None if status[key] is None else datetime.fromisoformat(status[key]))
        self.outcome, self.failures = status["last_outcome"], status["consecutive_failures"]
        self.state = QUEUED if status["state"] in {QUEUED, LEASING} else IDLE
        self.waiting, self.why = status["waiting_for"] or "worker", status["why"] or ""
        known = status["scheduling"]
        for name in _KEPT:
            setattr(self, name, known.get(name, getattr(type(self)(self.table, self.settings, self.first_seen), name)))
        for name in _KEPT_TIMES:
            setattr(self, name, datetime.fromisoformat(known[name]) if name in known else None)
        self.ended = mono - known["ended_seconds"] if "ended_seconds" in known else float("-inf")
        self.unchanged_since = (known["unchanged"], self.settings) if "unchanged" in known else None

    def matches(self, uri: str, name: str, job: str) -> bool:
        """Whether this is the entry of that job on that table."""
        return (self.table.uri, self.table.name, self.settings.name) == (uri, name, job)


@dataclass(frozen=True, slots=True)
class PollReading:
    """A poll that read all figures of a table.

    Attributes:
        began: when it was sent to a worker, monotonic.
        jobs: the jobs whose figures it read; ``options``: by job, those of its runs.
        fingerprint: the table's fingerprint at that time; empty if none was asked for, or there is none.
    """

    began: float
    jobs: tuple[str, ...]
    fingerprint: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class TableState:
    """One table: its backlog at the last poll, and its jobs.

    ``blocked``: how many parts of the table blocked the last run; a poll finds only some of the causes.
    ``poll_began``: when its last poll was sent to a worker, monotonic; ``result_at``: when its result arrived.
    ``unchanged``: how many consecutive polls found it idle; ``failed_polls``: how many failed.
    ``reading``: the last poll that read everything, if it was the first, or the one before found the same; else None.
    ``scheduled``: jobs due by their schedules, and since when (monotonic); the next poll decides whether they run.
    ``history``: its recent history; ``history_read``: when that was requested, monotonic; ``history_wanted``: the next
    poll reads it. ``recorded``: the last runs of its jobs by their leases, where a poll asked for them; None: none did.
    ``applies``: those of its jobs that apply to it, by the last poll; None: that is not known.
    """

    table: FoundTable
    entries: dict[str, TableJob] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    version: int | None = None
    polled: datetime | None = None
    poll_due: datetime | None = None
    polling: bool = False
    poll_again: bool = False
    blocked: float = 0.0
    error: str | None = None
    error_code: int = 0
    poll_not_before: float = 0.0
    failed_polls: int = 0
    poll_began: float = float("-inf")
    result_at: float = float("-inf")
    reading: PollReading | None = None
    scheduled: dict[str, float] = field(default_factory=dict)
    unchanged: int = 0
    history: Mapping[str, Any] | None = None
    history_read: float = float("-inf")
    history_wanted: bool = False
    recorded: Mapping[str, LastRun] | None = None
    applies: frozenset[str] | None = None

    @property
    def backlog(self) -> Figures:
        """The figures with their meaning."""
        return Figures(self.figures, self.table.settings.format)

    def remembered(self, mono: float, next_poll: datetime | None) -> dict[str, Any]:
        """What the scheduler knows of it beside its status, by which a forecast goes on."""
        reading = self.reading
        return {
            "next_poll": None if next_poll is None else next_poll.isoformat(),
            "unchanged": self.unchanged,
            "poll_seconds": None if self.polled is None else mono - self.poll_began,
            "not_before_seconds": max(0.0, self.poll_not_before - mono),
            "failed_polls": self.failed_polls,
            "blocked": self.blocked,
            "scheduled": {name: mono - due for name, due in self.scheduled.items()},
            "reading_seconds": None if reading is None else mono - reading.began,
            "fingerprint": "" if reading is None else reading.fingerprint,
        }

    def recall(self, known: Mapping[str, Any], mono: float) -> None:
        """Take over what it remembered."""
        self.unchanged, self.failed_polls, self.blocked = known["unchanged"], known["failed_polls"], known["blocked"]
        if known["poll_seconds"] is not None:
            self.poll_began = self.result_at = mono - known["poll_seconds"]
        self.poll_not_before = mono + known["not_before_seconds"]
        self.scheduled = {name: mono - seconds for name, seconds in known["scheduled"].items()}

    def applies_to(self, entry: TableJob) -> bool:
        """Whether a job applies, as far as polls have shown; one that its own entry names fails if it does not."""
        return self.applies is None or entry.settings.named or entry.settings.name in self.applies

    def clock_set_back(self, by: timedelta, now: datetime) -> None:
        """Correct the times after the wall clock was set back by ``by``."""
        if self.polled is not None:
            self.polled -= by
        if self.poll_due is not None:
            self.poll_due = now
