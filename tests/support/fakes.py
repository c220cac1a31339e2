"""A scheduler without processes, stores or time: workers answer when the test says so, the clock stands still."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from memwal_ops.core.leases import Holder, LastRun, Lease
from memwal_ops.errors import MemwalOpsError, StoreUnavailableError
from memwal_ops.supervisor.config.effective import Settings
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.observe.metrics import Metrics
from memwal_ops.supervisor.observe.status import status_of
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from memwal_ops.supervisor.scheduling.scheduler import Scheduler
from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.state.tables import Clock
from memwal_ops.supervisor.workers.protocol import PollRequest, Result

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
US, THEM = Holder("us", "us@here"), Holder("them", "them@there")


class FakeClock(Clock):
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return 1000 + self.seconds


@dataclass
class FakeWorker:
    pool: str
    pid: int
    request: int | None = None
    quitting: bool = False
    aside: bool = False
    signals: list[signal.Signals] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    memory: int | None = None
    cpu: float | None = None
    exit_status: int | None = None

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def resident_bytes(self) -> int | None:
        return self.memory

    def cpu_seconds(self) -> float | None:
        return self.cpu


class FakePools:
    def __init__(self) -> None:
        self.limits: dict[str, Any] = {}
        self.log_level = "INFO"
        self.workers: list[FakeWorker] = []
        self.given: list[tuple[FakeWorker, Any]] = []

    def configure(self, limits: Mapping[str, Any]) -> None:
        self.limits = dict(limits)

    def limit(self, pool: str) -> Any:
        return self.limits[pool]

    def free(self, pool: str) -> int:
        busy = sum(one.pool == pool and one.request is not None and not one.aside for one in self.workers)
        return self.limits[pool].workers - busy

    def assign(self, pool: str, request: Any) -> FakeWorker:
        worker = next((one for one in self.workers if one.pool == pool and one.request is None), None)
        if worker is None:
            worker = FakeWorker(pool, 100 + len(self.workers))
            self.workers.append(worker)
        worker.request = request.id
        self.given.append((worker, request))
        return worker

    def release(self, worker: FakeWorker) -> None:
        worker.request, worker.aside = None, False

    def forget(self, worker: FakeWorker) -> None:
        self.workers.remove(worker)

    def all(self) -> Iterator[FakeWorker]:
        return iter([*self.workers])


class FakeLeaseClient:
    """Grants what ``held`` does not keep away; everything is answered at once."""

    def __init__(self, post: Callable[[Callable[[], None]], None], clock: FakeClock) -> None:
        self.holder, self.ttl, self._post, self._clock = US, timedelta(minutes=5), post, clock
        self.held: dict[tuple[str, str], Lease] = {}
        self.last: dict[tuple[str, str], LastRun] = {}
        self.refusal: MemwalOpsError | None = None
        self.renewals: list[Lease] = []
        self.released: list[tuple[str, str, str | None]] = []
        # The tables whose store does not answer, and by request the call that fails it.
        self.hanging: set[str] = set()
        self.unanswered: dict[tuple[str, str], Callable[[], None]] = {}
        self._number = 0

    def acquire(self, table: FoundTable, job: str, then: Callable[[Any, Any], None]) -> None:
        key, refusal = (table.name, job), self.refusal
        if table.name in self.hanging:
            self.unanswered[key] = lambda: self._post(lambda: then(None, StoreUnavailableError("no answer")))
            return
        if refusal is not None:
            self._post(lambda: then(None, refusal))
            return
        other = self.held.get(key)
        lease = None if other is not None else self.lease(job, US, last=self.last.get(key))
        self._post(lambda: then((lease, other), None))

    def renew(self, table: FoundTable, lease: Lease, then: Callable[[Any, Any], None]) -> None:
        self.renewals.append(lease)
        refusal, better = self.refusal, replace(lease, number=lease.number + 1, written=self._clock.now())
        self._post(lambda: then(None if refusal else better, refusal))

    def release(self, table: FoundTable, lease: Lease, outcome: str | None) -> None:
        self.released.append((table.name, lease.job, outcome))

    def forget_stores(self) -> None:
        pass

    def lease(self, job: str, holder: Holder, last: LastRun | None = None) -> Lease:
        self._number += 1
        now = self._clock.now()
        return Lease(job, self._number, self._number, holder, now, now, self.ttl, None, last)


class FakeHeartbeat:
    def __init__(self) -> None:
        self.beats: list[tuple[str, str, str]] = []

    def beat(self, url: str, table: str, job: str, timeout: float) -> None:
        self.beats.append((url, table, job))


class Stage:
    """Everything together. ``text`` is the configuration; tables are what it names."""

    def __init__(
        self, folder: Path, text: str, *, once: bool = False, leases: bool = True, seconds: float = 0.0
    ) -> None:
        self.folder = folder
        self._began: set[int] = set()
        self.settings = self.load(text)
        self.clock = FakeClock()
        self.clock.seconds = seconds
        self.pools = FakePools()
        self.pools.configure(dict(self.settings.config.pools))
        self.history = History.open(str(folder / "history.sqlite"))
        self.heartbeat = FakeHeartbeat()
        self.metrics = Metrics(dict)
        self.leases = FakeLeaseClient(self.post, self.clock)
        self.scheduler = Scheduler(
            self.settings,
            history=self.history,
            pools=self.pools,  # type: ignore[arg-type]
            leases=self.leases if leases else None,  # type: ignore[arg-type]
            metrics=self.metrics,
            heartbeat=self.heartbeat,  # type: ignore[arg-type]
            supervisor="us@here",
            clock=self.clock,
            once=once,
        )
        self.scheduler.set_tables(self.tables(self.settings))

    def post(self, event: Callable[[], None]) -> None:
        self.scheduler.post(event)

    def load(self, text: str) -> Settings:
        path = self.folder / "config.yaml"
        path.write_text(text)
        return load_settings(str(path), {})

    @staticmethod
    def tables(settings: Settings) -> list[FoundTable]:
        return [FoundTable(one.name, str(one.uri), one) for one in settings.tables]

    def turn(self, seconds: float = 0.0) -> None:
        """Time passes, and everything that was posted is done."""
        self.clock.seconds += seconds
        for _ in range(6):
            self.scheduler.step(0.0)
            for worker, request in self.pools.given:
                if request.id not in self._began:
                    self._began.add(request.id)
                    self.scheduler.on_message(worker, {"type": "began", "id": request.id})  # type: ignore[arg-type]

    def due(self, table: str, job: str = "merge", why: str = "schedule") -> None:
        self.scheduler.enqueue(table, job, why)

    @property
    def in_flight(self) -> list[tuple[str, str]]:
        """What runs, the first begun first."""
        runs = [(request.id, worker) for worker, request in self.pools.given if worker.request == request.id]
        wanted = {number for number, _ in runs}
        return [
            (request.uri.rsplit("/", 1)[-1], request.job)
            for _, request in self.pools.given
            if request.id in wanted and not isinstance(request, PollRequest)
        ]

    def request(self, table: str, job: str = "merge") -> tuple[FakeWorker, Any]:
        """The last request for a job on a table."""
        return next(
            (worker, request)
            for worker, request in reversed(self.pools.given)
            if not isinstance(request, PollRequest) and (request.uri, request.job) == (f"/{table}", job)
        )

    def answer(self, table: str, job: str = "merge", outcome: str = "succeeded", **details: Any) -> None:
        """A worker is done with its run."""
        worker, request = self.request(table, job)
        self.scheduler.on_message(worker, vars_of(Result(request.id, outcome, **details)))  # type: ignore[arg-type]
        self.turn()

    def die(self, table: str, job: str = "merge", status: int = -9) -> None:
        """A worker ends in a run."""
        worker, _ = self.request(table, job)
        worker.exit_status = status
        self.scheduler.on_message(worker, None)  # type: ignore[arg-type]
        self.turn()

    def see(
        self,
        table: str,
        recorded: Mapping[str, Any] | None = None,
        applies: tuple[str, ...] | None = None,
        **figures: float,
    ) -> None:
        """A poll of a table is asked for, and answered; `recorded`: the last runs by the leases."""
        self.scheduler.poll(table)
        self.turn()
        worker, request = next(
            (worker, request)
            for worker, request in reversed(self.pools.given)
            if isinstance(request, PollRequest) and request.uri == f"/{table}"
        )
        answer = Result(request.id, "succeeded", figures=figures, version=3, recorded=recorded or {}, applies=applies)
        self.scheduler.on_message(worker, vars_of(answer))  # type: ignore[arg-type]
        self.turn()

    def job(self, table: str, job: str = "merge") -> dict[str, Any]:
        """A job as the status shows it."""
        tables, _ = status_of(self.scheduler)
        return next(one["jobs"][job] for one in tables if one["name"] == table)

    def outcomes(self, **filters: Any) -> list[str]:
        """Outcomes in the history, the oldest first."""
        return [one["outcome"] for one in reversed(self.history.runs(**filters))]


def vars_of(answer: Result) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in answer.__dataclass_fields__}
