"""Which process gets what, and when one is replaced; without any process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops.supervisor.config.model import PoolConfig, PoolsConfig
from memwal_ops.supervisor.workers import pools as module
from memwal_ops.supervisor.workers.pools import Pools


class Process:
    """A worker that only remembers."""

    made: list[Process]

    def __init__(self, pool: str, on_message: Callable[..., None], log_level: str) -> None:
        self.pool, self.runs, self.request, self.quitting, self.aside = pool, 0, None, False, False
        self.pid = 100 + len(Process.made)
        self.memory, self.stubborn = 0, False
        self.did: list[Any] = []
        Process.made.append(self)

    def send(self, request: Any) -> None:
        self.did.append(request)

    def quit(self) -> None:
        self.quitting = True
        self.did.append("quit")

    def signal(self, number: signal.Signals) -> None:
        self.did.append(number)

    def wait(self, timeout: float) -> bool:
        return not self.stubborn or signal.SIGKILL in self.did

    def resident_bytes(self) -> int:
        return self.memory


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    Process.made = []
    monkeypatch.setattr(module, "WorkerProcess", Process)
    made = Pools(lambda *_: None)
    made.configure(dict(PoolsConfig(merge=PoolConfig(workers=2, max_runs=3, memory=1000))))
    return made


def give(pools: Pools, number: int, pool: str = "merge") -> Process:
    return pools.assign(pool, SimpleNamespace(id=number))  # type: ignore[return-value]


def test_an_idle_one_is_used_again(pools: Pools) -> None:
    first = give(pools, 1)
    assert pools.free("merge") == 1
    second = give(pools, 2)
    assert (pools.free("merge"), second is first) == (0, False)
    pools.release(first)  # type: ignore[arg-type]
    assert give(pools, 3) is first
    assert pools.free("build") == 1


def test_it_is_replaced_after_some_runs(pools: Pools) -> None:
    used = []
    for number in range(7):
        worker = give(pools, number)
        used.append(worker.pid)
        pools.release(worker)  # type: ignore[arg-type]
        if worker.quitting:
            pools.forget(worker)  # type: ignore[arg-type]
    assert used == [100] * 3 + [101] * 3 + [102]
    assert pools.recycled == 2


def test_it_is_replaced_when_it_has_grown(pools: Pools) -> None:
    worker = give(pools, 1)
    worker.memory = 501
    pools.release(worker)  # type: ignore[arg-type]
    assert worker.quitting
    assert give(pools, 2) is not worker


def test_fewer_workers_from_now_on(pools: Pools) -> None:
    first, second = give(pools, 1), give(pools, 2)
    pools.release(first)  # type: ignore[arg-type]
    pools.configure(dict(PoolsConfig()))
    assert (first.quitting, second.quitting) == (True, False)
    assert pools.free("merge") == 0


def test_the_end(pools: Pools) -> None:
    first, second = give(pools, 1), give(pools, 2)
    second.stubborn = True
    pools.close(0.0)
    assert signal.SIGTERM in first.did
    assert signal.SIGKILL not in first.did
    assert second.did[-1] is signal.SIGKILL


def test_what_hangs_is_set_aside_and_keeps_no_other_waiting(pools: Pools) -> None:
    hangs = give(pools, 1, "watch")
    assert pools.free("watch") == 0
    hangs.aside = True
    assert pools.free("watch") == 1
    other = give(pools, 2, "watch")
    assert other is not hangs
    pools.release(hangs)  # type: ignore[arg-type]
    assert (hangs.aside, hangs.quitting, pools.free("watch")) == (False, False, 0)
    pools.release(other)  # type: ignore[arg-type]
    assert (hangs.quitting, other.quitting) == (False, True), "one more than the pool has"


def test_after_slow_starts_one_that_has_started_is_used_again(pools: Pools) -> None:
    """On a busy machine each first poll is set aside while its process starts, and the next one begins in another."""
    started = []
    for number in range(3):
        started.append(give(pools, number, "watch"))
        started[-1].aside = True
    last = give(pools, 3, "watch")
    pools.release(started[0])  # type: ignore[arg-type]
    assert not started[0].quitting, "the last one may take long to start, and be set aside, too"
    last.aside = True
    for number in (4, 5):  # a second time: it was not set aside now
        assert (pools.free("watch"), give(pools, number, "watch")) == (1, started[0])
        pools.release(started[0])  # type: ignore[arg-type]
    give(pools, 6, "watch")
    for worker in (*started[1:], last, started[0]):
        pools.release(worker)  # type: ignore[arg-type]
    assert sum(not worker.quitting for worker in Process.made) == 1
