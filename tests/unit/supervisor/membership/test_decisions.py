"""Which members live, and which of them has a table: without a store, by a clock of the test."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from memwal_ops.supervisor.membership.reading import BEATS, FleetView, owner

HEARTBEAT = 15.0
TICK = HEARTBEAT / BEATS
TABLES = [f"s3://lake/t{number}.lance" for number in range(2000)]


def read(view: FleetView, at: float, **newest: int) -> FleetView:
    return view.after(newest, at, at + 0.01)


# -- rendezvous


@pytest.mark.parametrize("count", [2, 3, 9])
def test_a_member_that_leaves_moves_its_own_tables_alone(count: int) -> None:
    members = [f"m{number}" for number in range(count)]
    before = {table: owner(table, members) for table in TABLES}
    after = {table: owner(table, members[1:]) for table in TABLES}
    assert {table for table in TABLES if before[table] != after[table]} == {
        table for table in TABLES if before[table] == "m0"
    }
    # One in n, with what 2,000 draws vary by.
    assert all(abs(number / len(TABLES) - 1 / count) < 0.06 for number in Counter(before.values()).values())


def test_a_table_has_one_owner_whatever_the_order_of_the_members() -> None:
    members = ["a", "b", "c"]
    assert all(owner(table, members) == owner(table, members[::-1]) for table in TABLES)


# -- who lives


def test_a_member_lives_from_its_first_record_on() -> None:
    assert read(FleetView(HEARTBEAT), 0, b=1).living == {"b"}


def test_a_member_that_deleted_its_records_has_left_at_once() -> None:
    assert read(read(FleetView(HEARTBEAT), 0, b=1, c=5), TICK, c=6).living == {"c"}


def test_a_member_without_a_new_record_is_dead_within_two_heartbeats() -> None:
    view, at = read(FleetView(HEARTBEAT), TICK, b=1), TICK  # its record was written just after 0
    while view.living:
        assert at <= 2 * HEARTBEAT
        at += TICK
        view = read(view, at, b=1)
    assert at > HEARTBEAT


def test_a_dead_member_that_writes_again_lives() -> None:
    view = FleetView(HEARTBEAT)
    for at in range(9):
        view = read(view, at * TICK, b=1)
    assert view.living == set()
    assert read(view, 9 * TICK, b=2).living == {"b"}


def test_nobody_is_dead_after_a_time_without_readings() -> None:
    view = read(FleetView(HEARTBEAT), 0, b=1, c=1)
    view = read(view, 20 * HEARTBEAT, b=1, c=1)
    assert view.living == {"b", "c"}
    for tick in range(1, 7):
        view = read(view, 20 * HEARTBEAT + tick * TICK, b=1 + tick, c=1)
    assert view.living == {"b"}


def test_nobody_is_dead_by_an_outage_that_took_a_write_on_each_side_of_it() -> None:
    """The shortest history of bug 6 of docs/models/membership.pml."""
    view = read(FleetView(HEARTBEAT), 0, b=1)
    for tick in (1, 4, 5):
        view = read(view, tick * TICK, b=1)
    assert view.living == {"b"}


def test_a_dead_member_stays_dead_after_a_time_without_readings() -> None:
    view = FleetView(HEARTBEAT)
    for at in range(9):
        view = read(view, at * TICK, b=1)
    assert read(view, 20 * HEARTBEAT, b=1).living == set()


def test_the_age_counts_from_the_end_of_one_reading_to_the_begin_of_another() -> None:
    """A reading that took long proves nothing: its answer may be older than the record that follows it."""
    view = FleetView(HEARTBEAT).after({"b": 1}, 0.0, 10.0)
    assert view.after({"b": 1}, 11.0, 10.0 + 3 * HEARTBEAT).living == {"b"}


def test_records_of_the_dead_are_forgotten_later() -> None:
    view, at = FleetView(HEARTBEAT), 0.0
    while not view.forgotten:
        view, at = read(view, at, b=1, c=int(at)), at + TICK
        assert at < 30 * HEARTBEAT
    assert view.forgotten == {"b"}
    assert at > 10 * HEARTBEAT
    assert read(view, at, c=99999).seen.keys() == {"c"}


def test_a_member_announces_itself_once_it_knows_who_lives() -> None:
    view = read(FleetView(HEARTBEAT), 0, b=1, c=1)
    assert not view.settled
    view = read(view, TICK, b=2, c=1, d=1)
    assert not view.settled  # of c it is not known yet
    for at in range(2, 7):
        view = read(view, at * TICK, b=1 + at, c=1, d=at)
    assert view.settled
    assert view.living == {"b", "d"}
    assert FleetView(HEARTBEAT).after({}, 0, 0).settled


# -- several of them, at random


@dataclass
class Process:
    """A member with a clock of its own, which is anywhere; ``frozen`` ones neither write nor read."""

    name: str
    offset: float
    view: FleetView = field(default_factory=lambda: FleetView(HEARTBEAT))
    number: int = 0
    frozen: bool = False

    def watch(self, store: dict[str, int], at: float) -> None:
        self.view = self.view.after(store, at + self.offset, at + self.offset + 0.01)

    def tick(self, store: dict[str, int], at: float) -> None:
        self.number += 1
        store[self.name] = self.number
        others = {name: number for name, number in store.items() if name != self.name}
        self.view = self.view.after(others, at + self.offset, at + self.offset + 0.01)

    def has(self, table: str) -> bool:
        return owner(table, (*self.view.living, self.name)) == self.name


@pytest.mark.parametrize("seed", range(20))
def test_every_table_has_one_poller_two_heartbeats_after_anything(seed: int) -> None:
    """Members are killed, suspended and resumed, and the store is away at times; each has another clock.

    After two heartbeats (and one more for what begins at the end of them) without any of that, each table has exactly
    one member; and while the store was away, nobody took what others have.
    """
    draw = random.Random(seed)
    store: dict[str, int] = {}
    members = [Process(f"m{number}", draw.uniform(-1e6, 1e6)) for number in range(draw.randint(2, 6))]
    at = 0.0

    def run(heartbeats: float, *, reachable: bool = True) -> None:
        nonlocal at
        ends = at + heartbeats * HEARTBEAT
        while at < ends:
            for member in members:
                if reachable and not member.frozen:
                    member.tick(store, at + draw.uniform(0, TICK / 4))
            at += TICK

    def pollers(table: str) -> list[str]:
        return [member.name for member in members if not member.frozen and member.has(table)]

    run(1)
    for _ in range(12):
        what = draw.choice(["kill", "suspend", "resume", "outage", "join"])
        free = [member for member in members if not member.frozen]
        if what in {"kill", "suspend"} and len(free) > 1:
            victim = draw.choice(free)
            victim.frozen = True
            if what == "kill":
                members.remove(victim)
        elif what == "resume":
            for member in members:
                member.frozen = False
        elif what == "join":
            joined = Process(f"n{len(members)}-{at:.0f}", draw.uniform(-1e6, 1e6))
            joined.watch(store, at)
            while not joined.view.settled:
                run(1 / BEATS)
                joined.watch(store, at)
            joined.tick(store, at)
            members.append(joined)
            # It takes its share before the others give it up: there is no gap, and two poll it for one tick at most.
            assert all(joined.name in pollers(table) or len(pollers(table)) == 1 for table in TABLES[:50])
            assert all(pollers(table) for table in TABLES[:50])
            run(1 / BEATS)
            assert all(len(pollers(table)) == 1 for table in TABLES[:50]), f"seed {seed}"
        elif what == "outage":
            before = {table: pollers(table) for table in TABLES[:50]}
            run(draw.uniform(1, 30), reachable=False)
            assert {table: pollers(table) for table in TABLES[:50]} == before, f"seed {seed}"
            run(1 / BEATS)
            assert {table: pollers(table) for table in TABLES[:50]} == before, f"seed {seed}"
        run(3)
        assert all(len(pollers(table)) == 1 for table in TABLES[:50]), f"seed {seed}: {what} at {at:.0f}"
