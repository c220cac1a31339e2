"""What the supervisor knows of its tables at a moment. Only its own thread writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from memwal_ops.core.leases import Lease
    from memwal_ops.supervisor.discovery import FoundTable
    from memwal_ops.supervisor.history import LastRuns
    from memwal_ops.supervisor.pools import WorkerProcess
    from memwal_ops.supervisor.settings import JobSettings

IDLE, QUEUED, LEASING, RUNNING = "idle", "queued", "leasing", "running"
WATCH = "watch"


@dataclass(slots=True)
class RunState:
    """A run in hand. Times are monotonic, unless they say otherwise.

    Attributes:
        number: its number in the history; None where that could not be written.
        worker: who runs it; ``working``: it has taken it up, which a process that has to start first does later.
        began: when it was given to the worker, and then, when that took it up.
        progress: when it last showed life.
        cpu: processor seconds of the worker by then.
        ended_by: why the supervisor ends it: hung, timeout, memory, lost or stop.
        signalled: when it was told to end.
    """

    number: int | None
    worker: WorkerProcess
    began: float
    started: datetime
    progress: float
    cpu: float = 0.0
    ended_by: str | None = None
    signalled: float | None = None
    killed: bool = False
    working: bool = False


@dataclass(slots=True)
class Entry:
    """One job on one table.

    Attributes:
        due: since when it waits to be run (wall clock); None while nothing is due.
        why: what made it due: ``schedule``, ``when: ...``, ``retry``.
        not_before: it is left alone until then.
        waiting: what it waits for: window, backoff, budget, lease or worker.
        lease: the lease that we hold for it.
        renewed: when that was last renewed, monotonic; ``renew_at``: when to do it next.
        other: the lease by which another supervisor keeps us away, and since when.
        failures: failures in a row.
        fruitless: the backlog with which the last run published nothing: its trigger waits until that changes.
    """

    table: FoundTable
    settings: JobSettings
    first_seen: datetime
    state: str = IDLE
    due: datetime | None = None
    why: str = ""
    not_before: datetime | None = None
    waiting: str | None = None
    run: RunState | None = None
    lease: Lease | None = None
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
    fruitless: dict[str, float] | None = None
    removed: bool = False

    @classmethod
    def after(cls, last: LastRuns, table: FoundTable, settings: JobSettings) -> Entry:
        """One that goes on from what the history knows."""
        return cls(
            table,
            settings,
            last.first_seen,
            started=last.started,
            finished=last.finished,
            succeeded=last.succeeded,
            outcome=last.outcome,
            failures=last.failures,
        )

    @property
    def key(self) -> tuple[str, str]:
        """Table and job."""
        return self.table.name, self.settings.name

    def put_back(self, by: timedelta, now: datetime) -> None:
        """See the conductor: nothing that has been lies ahead, and nothing is put off for longer than it was."""
        if self.not_before is not None:
            self.not_before -= by
        self.first_seen = min(self.first_seen, now)
        for name in ("due", "started", "finished", "succeeded", "other_since"):
            when = getattr(self, name)
            setattr(self, name, None if when is None else min(when, now))

    def is_of(self, uri: str, name: str, job: str) -> bool:
        """Whether it is that job on that table."""
        return (self.table.uri, self.table.name, self.settings.name) == (uri, name, job)


@dataclass(slots=True)
class TableState:
    """One table: its backlog at the last look, and its jobs.

    ``blocked``: regions that the last merge could not merge to their end; a look sees only some of the reasons.
    """

    table: FoundTable
    entries: dict[str, Entry] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    version: int | None = None
    looked: datetime | None = None
    look_due: datetime | None = None
    looking: bool = False
    look_again: bool = False
    blocked: float = 0.0
    error: str | None = None
    error_code: int = 0
    look_not_before: float = 0.0

    def put_back(self, by: timedelta, now: datetime) -> None:
        """See the conductor."""
        if self.looked is not None:
            self.looked -= by
        if self.look_due is not None:
            self.look_due = now
