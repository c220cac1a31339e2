"""An idle table is polled less often, down to a bound within which a write is seen; anything new ends that at once."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from memwal_ops.supervisor.scheduling.backlogs import idle_seconds
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import Stage, vars_of

POLL, IDLE, MINUTES = 30.0, 600.0, 60.0
TEXT = (
    "defaults: {poll: 30s, idle_poll: 10m, jobs: {merge: {when: generations >= 1 or oldest_age > 5m, schedule: 10d}}}\n"
    "tables: [{uri: /a}]\n"
)


class Polled:
    """A table, polled by a timer of the service: every 30 s, up to a fifth later."""

    def __init__(self, folder: Path, text: str = TEXT) -> None:
        self.stage = Stage(folder, text)
        self.figures: dict[str, float] = {"generations": 0.0, "oldest_age": 0.0}
        self.version = 3
        self.fails = False
        self.fingerprint: str | None = None
        self.asked: list[str | None] = []
        self._timers = Timers(self.stage.scheduler, timedelta(hours=1), random.Random(1))
        self._timers.start()
        self._timers.sync()
        for key in [key for key in self._timers._timers if key[0] == "run"]:
            del self._timers._timers[key]
        for state in self.stage.scheduler.tables.values():
            state.scheduled.clear()
        self._answered: set[int] = set()

    def run(self, seconds: float) -> list[float]:
        """When the table was polled in that time."""
        times, end = [], self.stage.clock.seconds + seconds
        while self.stage.clock.seconds < end:
            self._timers.fire()
            self.stage.turn()
            for worker, request in [*self.stage.pools.given]:
                if isinstance(request, PollRequest) and request.id not in self._answered:
                    self._answered.add(request.id)
                    times.append(self.stage.clock.seconds)
                    self.asked.append(request.fingerprint)
                    answer = Result(request.id, "succeeded", figures=dict(self.figures), version=self.version)
                    if request.fingerprint is not None:
                        answer = replace(answer, fingerprint=self.fingerprint)
                    if request.fingerprint and request.fingerprint == self.fingerprint:
                        answer = Result(request.id, "succeeded", fingerprint=self.fingerprint, unchanged=True)
                    found = vars_of(answer)
                    if self.fails:
                        found |= {
                            "outcome": "failed",
                            "figures": {},
                            "unchanged": False,
                            "message": "no answer",
                            "exit_code": 20,
                        }
                    self.stage.scheduler.on_message(worker, found)  # type: ignore[arg-type]
                    self.stage.turn()
            due = self._timers.next_time()
            assert due is not None
            self.stage.turn(max(0.1, (due - self.stage.clock.now()).total_seconds()))
        return times


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def test_an_idle_table_costs_a_few_polls_an_hour_and_none_is_later_than_the_bound(tmp_path: Path) -> None:
    polled = Polled(tmp_path)
    first = gaps(polled.run(5 * MINUTES))
    assert max(first) <= 1.2 * POLL, "nothing is skipped in the first minutes"
    polled.run(60 * MINUTES)
    later = polled.run(240 * MINUTES)
    assert len(later) < 4 * 60 * MINUTES / IDLE * 1.2
    assert max(gaps(later)) <= IDLE


@pytest.mark.parametrize("hours", [1, 7])
def test_a_write_after_long_idleness_is_seen_within_the_bound(tmp_path: Path, hours: int) -> None:
    polled = Polled(tmp_path)
    polled.run(hours * 60 * MINUTES)
    polled.figures["generations"] = 1.0
    written = polled.stage.clock.seconds
    seen = polled.run(IDLE)
    assert seen[0] - written <= IDLE
    assert polled.stage.in_flight == [("a", "merge")]
    assert max(gaps(seen)) <= 1.2 * POLL, "from then on every timer polls"


@pytest.mark.parametrize("what", ["version", "age", "blocked", "failure"])
def test_anything_new_ends_it(tmp_path: Path, what: str) -> None:
    polled = Polled(tmp_path)
    polled.run(120 * MINUTES)
    state = polled.stage.scheduler.tables["a"]
    assert state.unchanged > 10
    if what == "version":
        polled.version = 4
    elif what == "age":
        polled.figures["oldest_age"] = 1.0  # the trigger may fire by it without a write
    elif what == "blocked":
        state.blocked = 1.0
    else:
        polled.fails = True
    changed = polled.stage.clock.seconds
    while state.unchanged:
        polled.run(POLL)
    assert polled.stage.clock.seconds - changed <= IDLE + 1.2 * POLL
    assert max(gaps(polled.run(4 * MINUTES))) <= 1.2 * POLL


def test_the_same_bound_as_poll_skips_nothing(tmp_path: Path) -> None:
    polled = Polled(tmp_path, TEXT.replace("idle_poll: 10m", "idle_poll: 30s"))
    polled.run(60 * MINUTES)
    assert max(gaps(polled.run(60 * MINUTES))) <= 1.2 * POLL


@pytest.mark.parametrize("given", [True, False])
def test_of_many_tables_each_is_polled_less_often_unless_told(tmp_path: Path, given: bool) -> None:
    """10,000 idle tables cost a bounded part of a core; a write is seen within ten minutes all the same."""
    polled = Polled(tmp_path, TEXT if given else TEXT.replace("idle_poll: 10m", "idle_poll: 2m"))
    (state,) = polled.stage.scheduler.tables.values()
    assert idle_seconds(state, 1) == idle_seconds(state, 10_000) == (IDLE if given else 120)
    default = Polled(tmp_path, TEXT.replace("idle_poll: 10m, ", ""))
    (state,) = default.stage.scheduler.tables.values()
    assert [idle_seconds(state, tables) for tables in (1, 5_000, 8_000, 10_000, 10**6)] == [300, 300, 480, 600, 600]


def test_what_somebody_asks_for_is_not_skipped(tmp_path: Path) -> None:
    """A run that published, or a page that is opened: only timers wait."""
    polled = Polled(tmp_path)
    polled.run(120 * MINUTES)
    before = len(polled.stage.pools.given)
    polled.stage.scheduler.poll("a")
    polled.stage.turn()
    assert len(polled.stage.pools.given) == before + 1


def test_a_table_that_does_not_change_is_read_once_an_hour(tmp_path: Path) -> None:
    polled = Polled(tmp_path)
    polled.fingerprint = "a b"
    polled.run(4 * POLL)
    assert polled.asked[:4] == ["", "a b", "a b", "a b"], "the first poll of a table that was just taken reads all"
    polled.asked.clear()
    polled.run(24 * 60 * MINUTES)
    assert 20 <= polled.asked.count("") <= 24
    assert polled.asked.count("a b") == len(polled.asked) - polled.asked.count("")


def test_ages_grow_while_nothing_is_read(tmp_path: Path) -> None:
    """And fire the trigger, although no poll reads them."""
    polled = Polled(tmp_path, TEXT.replace("generations >= 1 or oldest_age > 5m", "oldest_age > 10m"))
    polled.fingerprint, polled.figures = "a b", {"generations": 1.0, "oldest_age": 1.0}
    polled.run(4 * POLL)
    state = polled.stage.scheduler.tables["a"]
    before, since = state.figures["oldest_age"], polled.stage.clock.seconds
    polled.run(8 * POLL)
    assert polled.asked[-8:] == ["a b"] * 8, "what waits below its trigger is not read again, either"
    assert state.figures["oldest_age"] == pytest.approx(before + polled.stage.clock.seconds - since, abs=1.2 * POLL)
    assert polled.stage.in_flight == []
    polled.run(14 * POLL)
    assert polled.stage.in_flight == [("a", "merge")]


@pytest.mark.parametrize("what", ["write", "blocked", "failure", "history", "run"])
def test_what_a_fingerprint_does_not_show_is_read(tmp_path: Path, what: str) -> None:
    polled = Polled(tmp_path)
    polled.fingerprint = "a b"
    polled.run(20 * POLL)
    state = polled.stage.scheduler.tables["a"]
    assert polled.asked[-1] == "a b"
    polled.asked.clear()
    if what == "write":
        polled.fingerprint, polled.version = "a c", 4
    elif what == "blocked":
        state.blocked = 1.0
    elif what == "failure":
        polled.fails = True
    elif what == "history":
        state.history_wanted = True
    else:
        next(iter(state.entries.values())).ended = polled.stage.clock.monotonic()
    while not polled.asked:
        polled.run(POLL)
    expected = {"write": "a b", "blocked": None, "failure": "a b", "history": "", "run": ""}
    assert polled.asked[0] == expected[what]
    if what in {"write", "failure"}:
        assert state.version == (4 if what == "write" else 3)
        polled.run(2 * POLL)
        assert polled.asked[1] is None, "the next poll reads all, and asks for no fingerprint before it finds the same"
