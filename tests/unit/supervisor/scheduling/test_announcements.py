"""Events of a table poll it soon, many as one; where they come, its timer may be slow; where they do not, it is not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import FakeWorker, Stage, vars_of

POLL, IDLE, HOUR = 30.0, 600.0, 3600.0
TEXT = (
    "defaults: {poll: 30s, idle_poll: 10m, jobs: {\n"
    "  compact: {when: fragments >= 3, schedule: null}, merge: {when: WHEN}}}\n"
    "tables: [{uri: s3://b/a}, {uri: /local}]\n"
)


class Polled:
    """A scheduler whose polls are answered at once, with a version that the test sets."""

    def __init__(self, folder: Path, when: str = "generations >= 8") -> None:
        self.stage = Stage(folder, TEXT.replace("WHEN", when))
        self.stage.scheduler.announced.alive = True
        self.figures: dict[str, float] = {"generations": 1.0, "oldest_age": 5.0, "fragments": 1.0}
        self.version, self.fails = 3, False
        self.times: list[float] = []
        self._answered: set[int] = set()

    @property
    def now(self) -> float:
        return self.stage.clock.seconds

    def event(self, *tables: str) -> None:
        self.stage.scheduler.on_events(tables or ["a"])

    def turn(self, seconds: float = 0.0) -> None:
        self.stage.turn(seconds)
        # One poll after the other: there is one worker.
        while asked := [one for one in self.stage.pools.given if self._is_new(one[1])]:
            for worker, request in asked:
                self._answered.add(request.id)
                if request.uri == "s3://b/a":
                    self.times.append(self.now)
                self._answer(worker, request)
            self.stage.turn()

    def _is_new(self, request: Any) -> bool:
        return isinstance(request, PollRequest) and request.id not in self._answered

    def _answer(self, worker: FakeWorker, request: PollRequest) -> None:
        answer = vars_of(Result(request.id, "succeeded", figures=dict(self.figures), version=self.version))
        if self.fails:
            answer |= {"outcome": "failed", "figures": {}, "message": "no answer", "exit_code": 20}
        self.stage.scheduler.on_message(worker, answer)  # type: ignore[arg-type]

    def run(self, seconds: float, *, every: float = 0.0) -> list[float]:
        """When the table is polled in that time, with its timer, and an event ``every`` so many seconds."""
        self.times = []
        ends, next_event = self.now + seconds, self.now + every
        next_poll = self.now
        while self.now < ends:
            if every and self.now >= next_event:
                self.version += 1
                self.event()
                next_event += every
            if self.now >= next_poll:
                self.stage.scheduler.poll("a", timed=True)
                self.stage.scheduler.poll("local", timed=True)
                next_poll += POLL
            self.turn(0.5 if every else 10.0)
        return self.times


@pytest.fixture
def polled(tmp_path: Path) -> Polled:
    return Polled(tmp_path)


def test_an_event_polls_its_table_at_once_and_a_due_job_starts(polled: Polled) -> None:
    polled.run(20 * POLL)
    polled.figures["fragments"] = 3.0
    polled.event("a", "unknown")
    polled.turn()
    assert polled.times[-1] == polled.now
    assert polled.stage.in_flight == [("a", "compact")]


def test_events_in_a_burst_are_one_poll(polled: Polled) -> None:
    polled.run(20 * POLL)
    polled.times = []
    for _ in range(1000):
        polled.event()
    for _ in range(20):
        polled.turn(0.1)
    assert len(polled.times) == 1
    polled.turn(30)
    assert len(polled.times) == 1, "no event is left over"


def test_while_events_keep_coming_polls_become_fewer_but_each_is_followed_by_one(polled: Polled) -> None:
    polled.run(20 * POLL)
    times = polled.run(600, every=0.5)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len([gap for gap in gaps if gap < 5]) <= 5
    assert 8 <= max(gaps) <= 11
    last = polled.now
    polled.event()
    assert any(at >= last for at in polled.run(12, every=100))


def test_an_event_during_a_poll_is_polled_after_it(polled: Polled) -> None:
    polled.run(20 * POLL)
    polled.event()
    polled.stage.turn()  # the poll is in flight
    polled.event()
    for _ in range(8):
        polled.turn(0.5)
    assert len({*polled.times[-2:]}) == 2
    assert polled.now - polled.times[-2] <= 5


def test_timers_are_slow_only_where_events_come(polled: Polled) -> None:
    """With a backlog, so that the table is not idle."""
    before = polled.run(HOUR)
    assert len(before) == HOUR / POLL, "no event came yet"
    polled.event()
    after = polled.run(HOUR)
    assert len(after) <= HOUR / IDLE * 1.3 + 1
    polled.stage.scheduler.announced.alive = False
    assert len(polled.run(HOUR)) >= HOUR / POLL * 0.9


@pytest.mark.parametrize("case", ["age", "failing", "blocked"])
def test_timers_stay_where_time_alone_may_make_a_job_due(tmp_path: Path, case: str) -> None:
    polled = Polled(tmp_path, "oldest_age >= 5m" if case == "age" else "generations >= 8")
    polled.fails = case == "failing"
    polled.figures |= {"blocked_regions": 1.0} if case == "blocked" else {}
    polled.stage.scheduler.tables["a"].blocked = float(case == "blocked")
    polled.run(POLL)
    polled.event()
    assert len(polled.run(HOUR)) >= HOUR / POLL * 0.9


def test_commits_without_events_are_found_and_polled_as_before(polled: Polled) -> None:
    announced = polled.stage.scheduler.announced
    polled.event()
    polled.run(HOUR)
    assert (announced.covered(), announced.missed()) == (1, [])
    polled.version += 1
    polled.run(IDLE + 4 * POLL)
    assert (announced.covered(), announced.missed()) == (0, ["a"])
    assert len(polled.run(HOUR)) >= HOUR / POLL * 0.9
    polled.event()
    assert (announced.covered(), announced.missed()) == (1, []), "they come again"


def test_generations_that_are_flushed_without_events_are_found_too(polled: Polled) -> None:
    """The bucket announces versions alone: a merge would wait for the slow timer each time, and nobody know."""
    announced = polled.stage.scheduler.announced
    polled.event()
    polled.run(HOUR)
    polled.figures["generations"] = 0.0
    polled.run(HOUR)
    assert announced.missed() == [], "a merge did that, and its commit has an event"
    polled.figures["generations"] = 2.0
    polled.run(IDLE + 4 * POLL)
    assert (announced.covered(), announced.missed()) == (0, ["a"])


def test_an_event_may_come_after_the_poll_that_found_its_commit(polled: Polled) -> None:
    polled.event()
    polled.run(2 * POLL)
    for _ in range(50):
        polled.version += 1
        polled.stage.scheduler.poll("a")
        polled.turn(60)
        polled.event()
        polled.turn(5)
        polled.run(60)
        assert polled.stage.scheduler.announced.missed() == []


def test_nothing_is_missed_while_the_queue_is_not_read(polled: Polled) -> None:
    polled.event()
    polled.stage.scheduler.announced.alive = False
    polled.run(2 * POLL)
    polled.version += 1
    polled.run(HOUR)
    assert polled.stage.scheduler.announced.missed() == []


def test_local_tables_have_no_events_to_miss(polled: Polled) -> None:
    polled.run(4 * POLL)
    polled.version += 1
    polled.run(HOUR)
    assert polled.stage.scheduler.announced.missed() == ["a"]


def test_tables_that_are_removed_are_forgotten(polled: Polled) -> None:
    polled.event()
    polled.stage.scheduler.set_tables([])
    polled.turn(1)
    assert polled.stage.scheduler.announced.covered() == 0
