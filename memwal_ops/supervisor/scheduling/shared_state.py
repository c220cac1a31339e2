"""What all parts of the scheduler share: its tables and their jobs, what is configured, and what they work with."""

from __future__ import annotations

import itertools
from dataclasses import InitVar, dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from memwal_ops.supervisor.state.outcomes import RunRecorder
from memwal_ops.supervisor.state.pauses import Pauses
from memwal_ops.supervisor.state.tables import IDLE, QUEUED, Clock, TableJob, TableState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.core.leases import Lease
    from memwal_ops.supervisor.config.effective import Settings
    from memwal_ops.supervisor.observe.heartbeat import Heartbeat
    from memwal_ops.supervisor.observe.metrics import Metrics
    from memwal_ops.supervisor.state.history import History
    from memwal_ops.supervisor.workers.leasing import LeaseClient
    from memwal_ops.supervisor.workers.pools import Pools, WorkerProcess


@dataclass(eq=False, kw_only=True)
class SharedState:
    """Holds the tables of a scheduler.

    Attributes:
        leases: the lease client; None if leases are disabled.
        once: run what is due once: no retries, no repeated polls.
        changed: a job may have become able to start since the last dispatch.
        awake: the tables that were idle, and are polled every ``poll`` again.
        touched: the tables of whose queued jobs that may be true, or whose turn may have changed; None: all.
        runs: the jobs that run, by the number of their request.
        skews: this clock minus the store's, by table.
        codes: with ``once``, the exit codes of the runs.
        leased_elsewhere: with ``once``, the jobs that were due and whose lease another supervisor holds.
    """

    settings: Settings = field(kw_only=False)
    history: InitVar[History]
    supervisor: InitVar[str]
    pools: Pools
    leases: LeaseClient | None
    metrics: Metrics
    heartbeat: Heartbeat
    clock: Clock = field(default_factory=Clock)
    pauses: Pauses = field(default_factory=Pauses)
    once: bool = False
    stopping: bool = False
    changed: bool = True
    touched: set[str] | None = None
    awake: set[str] = field(default_factory=set)
    leasing: dict[tuple[str, str], TableJob] = field(default_factory=dict)
    tables: dict[str, TableState] = field(default_factory=dict)
    runs: dict[int, TableJob] = field(default_factory=dict)
    skews: dict[str, float] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    leased_elsewhere: list[dict[str, Any]] = field(default_factory=list)
    random: Random = field(default_factory=Random)

    def __post_init__(self, history: History, supervisor: str) -> None:
        """There are no tables yet."""
        self.recorder = RunRecorder(history, supervisor, self.clock)
        self._numbers = itertools.count(1)

    def entries(self) -> Iterator[TableJob]:
        """Return every job on every table."""
        return (entry for state in self.tables.values() for entry in state.entries.values())

    def find(self, table: str, job: str) -> TableJob | None:
        """Return a job on a table; None: there is none."""
        state = self.tables.get(table)
        return None if state is None else state.entries.get(job)

    def enqueue(self, table: str, job: str, why: str) -> None:
        """Queue a job to be run as soon as it may; does nothing if it is queued or running already."""
        entry = self.find(table, job)
        if entry is not None and not self.stopping and entry.state == IDLE:
            entry.state, entry.due, entry.why, entry.waiting = QUEUED, self.clock.now(), why, "worker"
            self.touch(table)

    def touch(self, table: str | None = None) -> None:
        """Look at the queued jobs of a table, or of all, again."""
        self.changed = True
        if table is None:
            self.touched = None
        elif self.touched is not None:
            self.touched.add(table)

    def begun(self) -> list[TableJob]:
        """Return the jobs that run, and those that wait for their lease."""
        return [*self.runs.values(), *self.leasing.values()]

    def is_paused(self, entry: TableJob) -> bool:
        """Whether a job, its table or everything is paused."""
        return self.pauses.covering(*entry.key, self.clock.now()) is not None

    @property
    def instance(self) -> str | None:
        """That of this supervisor in leases; None if they are disabled."""
        return None if self.leases is None else self.leases.holder.instance

    def next_number(self) -> int:
        """Return the number of the next request to a worker."""
        return next(self._numbers)

    def assign(self, pool: str, request: Any) -> WorkerProcess:
        """Send a request to a free worker of a pool."""
        known = {worker.pid for worker in self.pools.all()}
        worker = self.pools.assign(pool, request)
        if worker.pid not in known:
            self.metrics.worker_starts.labels(pool).inc()
        return worker

    def release(self, entry: TableJob, lease: Lease, outcome: str | None) -> None:
        """Release the lease of a job, with the outcome of its run; None: it did not run."""
        if self.leases is not None:
            self.leases.release(entry.table, lease, outcome)
