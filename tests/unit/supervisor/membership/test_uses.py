"""One budget of a fleet: what members publish, and what all of them use together; without processes, by own clocks."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from memwal_ops.core.fleet_budget import CHARGED, Amounts, Charge, FleetBudget, Others
from memwal_ops.errors import ObjectNotFoundError, StorageError
from memwal_ops.storage.api import ObjectMeta
from memwal_ops.supervisor.membership.reading import BEATS, FleetView, Reading
from memwal_ops.supervisor.membership.records import (
    MAX_CHARGES,
    MemberRecord,
    MemberRecords,
    is_same,
    others_of,
    published,
    refused_use,
    use_of,
)

HEARTBEAT = 15.0
TICK = HEARTBEAT / BEATS
PER, LIMIT = 300.0, 40.0
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Store:
    """Objects with the times of a clock of its own; ``away``: each request fails."""

    def __init__(self) -> None:
        self.now = EPOCH
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.away = False

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        self.check()
        for path, (data, written) in sorted(self.objects.items()):
            if path.startswith(f"{prefix}/"):
                yield ObjectMeta(path, len(data), written, None)

    def get(self, path: str) -> bytes:
        self.check()
        if path not in self.objects:
            raise ObjectNotFoundError(path)
        return self.objects[path][0]

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.check()
        return self.objects.setdefault(path, (data, self.now))[1] is self.now

    def delete_many(self, paths: Iterable[str]) -> None:
        self.check()
        for path in paths:
            self.objects.pop(path, None)

    def check(self) -> None:
        if self.away:
            raise StorageError("It is away.")


@dataclass
class Supervisor:
    """A member with a budget; ``history`` is its state folder: when runs ended, by its clock, and what they used."""

    store: Store
    name: str
    instance: str
    offset: float
    history: list[tuple[float, float]]
    known: int = 1
    budget: FleetBudget = field(default_factory=lambda: FleetBudget({"cpu": LIMIT}, PER))
    view: FleetView = field(default_factory=lambda: FleetView(HEARTBEAT))
    runs: list[tuple[float, float]] = field(default_factory=list)
    joined: bool = False

    def start(self, at: float) -> None:
        """As a service does: by its history, and by nothing that it knows of others."""
        self.records = MemberRecords(self.store, self.name)  # type: ignore[arg-type]  # what it uses of a store
        self.reading = Reading(self.records, self.instance, HEARTBEAT)
        for ended, cpu in self.history:
            if ended > at + self.offset - PER:
                self.budget.add(ended, Amounts(cpu))
        self.budget.meet(Others(living=self.known - 1, until=0.0), at + self.offset)

    def document(self, at: float) -> MemberRecord:
        now = at + self.offset
        use = published(self.budget.limits, PER, self.budget.own, self.in_flight, now, shadow=False)
        return MemberRecord("p", self.instance, "h", "1", "now", 1, 1, "", json.loads(json.dumps(use)))

    def beat(self, at: float) -> None:
        if not self.joined:
            listed = self.records.listed()
            number = listed.newest.get(self.name)
            other = None if number is None else self.records.read(self.name, number)
            if number is not None and other is not None and other.instance != self.instance:
                self.records.end(self.name, number, other, listed.age(self.name))
            self.records.begin(listed)
            self.joined = True
        listed = self.records.beat(self.document(at))
        self.view = self.view.after(listed.newest, at, at + 0.01)
        now = at + self.offset
        self.reading.read(listed, now)
        self.reading.forget(self.view.forgotten, listed)
        if (others := self.reading.others(listed, len(self.view.living), now)) is not None:
            self.budget.meet(others, now)
        self.reading.sweep()
        self.known = 1 + len(self.view.living)

    @property
    def in_flight(self) -> Amounts:
        return Amounts(sum(cpu for _, cpu in self.runs))

    def end_runs(self, at: float) -> Iterator[tuple[float, float]]:
        while self.runs and self.runs[0][0] <= at:
            ends, cpu = heapq.heappop(self.runs)
            self.budget.add(ends + self.offset, Amounts(cpu))
            self.history.append((ends + self.offset, cpu))
            yield ends, cpu

    def may_start(self, at: float, cpu: float) -> bool:
        return self.budget.refuses(at + self.offset, self.in_flight, Amounts(cpu)) is None


class Fleet:
    """Members on one store, and what they really use."""

    def __init__(self, members: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.seed, self.at, self.store = seed, 0.0, Store()
        self.ended: list[tuple[float, float]] = []
        self.started: list[tuple[float, float]] = []
        self.lost: list[tuple[float, float]] = []
        self.members = [self.member(f"m{number}") for number in range(members)]
        self.worst = 0.0
        self.away_at: float | None = None

    def member(self, name: str, state: Supervisor | None = None) -> Supervisor:
        """A new one, or one that has the state folder of another one, on its machine."""
        if state is None:
            made = Supervisor(self.store, name, f"{name}-{self.draw.random()}", self.draw.uniform(-1e6, 1e6), [])
        else:
            made = Supervisor(self.store, name, state.instance, state.offset, state.history, state.known)
        made.start(self.at)
        return made

    def kill(self, member: Supervisor) -> None:
        """Its runs end without a record; what it started since its last record was written is not known."""
        self.members.remove(member)
        recent = sum(cpu for at, cpu in self.started if at > self.at - TICK)
        self.lost.append((self.at, recent))

    def used(self) -> float:
        """What was really used within the last ``PER``, and is in flight."""
        now = sum(cpu for ends, cpu in self.ended if ends > self.at - PER)
        return now + sum(member.in_flight.cpu for member in self.members)

    def begun(self, after: float, until: float) -> float:
        """What runs use that were started within a time."""
        recent = itertools.takewhile(lambda one: one[0] > after, reversed(self.started))
        return sum(cpu for at, cpu in recent if at <= until)

    def outage(self, seconds: float) -> None:
        """Let time pass without the store. Noticed after a heartbeat; that before it was not read."""
        self.away_at, self.store.away = self.at, True
        self.run(seconds)
        self.store.away = False
        self.run(2 * HEARTBEAT)
        self.away_at = None

    def run(self, seconds: float) -> None:
        """Let time pass; no more is used than the limit, and what was started within a heartbeat."""
        ends = self.at + seconds
        while self.at < ends:
            self.at += 1.0
            self.store.now = EPOCH + timedelta(seconds=self.at)
            for index, member in enumerate(self.members):
                if math.floor(self.at) % int(TICK) == index % int(TICK):
                    try:
                        member.beat(self.at)
                    except StorageError:
                        assert self.store.away
            for member in self.members:
                self.ended += member.end_runs(self.at)
                cpu = self.draw.choice([0.2, 1.0, 4.0])
                if self.draw.random() < 0.1 and (member.joined or self.store.away) and member.may_start(self.at, cpu):
                    heapq.heappush(member.runs, (self.at + self.draw.uniform(1, 90), cpu))
                    self.started.append((self.at, cpu))
                    most = LIMIT + self.begun(self.at - HEARTBEAT - 1, self.at)
                    if self.away_at is not None:
                        most += self.begun(self.away_at - HEARTBEAT - TICK, self.away_at + HEARTBEAT + TICK)
                    most += sum(cpu for at, cpu in self.lost if at > self.at - PER)
                    assert self.used() <= most + 1e-6, f"seed {self.seed}, at {self.at}"
                    self.worst = max(self.worst, self.used())


def counted(fleet: Fleet) -> list[float]:
    return [member.budget.used(fleet.at + member.offset).cpu for member in fleet.members]


@pytest.mark.parametrize("members", [1, 3, pytest.param(9, marks=pytest.mark.long)])
def test_members_use_one_budget_together(members: int) -> None:
    fleet = Fleet(members, seed=members)
    fleet.run(2 * PER)
    assert fleet.worst > 0.95 * LIMIT, "it is used"
    fleet.run(2 * PER)
    assert sum(cpu for ends, cpu in fleet.ended) > 3 * 0.8 * LIMIT, "and again in each period"


@pytest.mark.parametrize("seed", [*range(1), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
def test_the_limit_holds_whatever_happens_to_members(seed: int) -> None:
    """They are killed, come back with their state folder or without, under another name, leave, or lose the store."""
    fleet = Fleet(random.Random(seed).randint(2, 5), seed)
    fleet.run(4 * HEARTBEAT)
    draw, away = fleet.draw, list[Supervisor]()
    for _ in range(14):
        what = draw.choice(["kill", "leave", "return", "return", "lose", "rename", "outage"])
        gone = draw.choice(away) if away else None
        if what in {"kill", "leave"} and len(fleet.members) > 1:
            victim = draw.choice(fleet.members)
            if what == "leave":
                victim.records.leave(victim.document(fleet.at))
            fleet.kill(victim)
            away.append(victim)
        elif what in {"return", "lose", "rename"} and gone is not None:
            away.remove(gone)
            if what == "lose":
                back = fleet.member(gone.name)
            else:
                name = gone.name if what == "return" else f"{gone.name}r"
                back = fleet.member(name, gone)
            fleet.members.append(back)
        elif what == "outage":
            fleet.outage(draw.uniform(1, 30) * HEARTBEAT)
        fleet.run(draw.uniform(0.2, 25) * HEARTBEAT)


def test_what_is_published_is_small_and_ends_no_earlier() -> None:
    draw = random.Random(7)
    charges = [
        Charge(draw.uniform(-10, 5 * PER), Amounts(*(draw.uniform(0, 1e12) for _ in range(4)))) for _ in range(5000)
    ]
    found = json.loads(json.dumps(published({"cpu": 1.0}, PER, charges, Amounts(1.0), 0.0, shadow=False)))
    assert len(found["charges"]) <= MAX_CHARGES
    assert len(json.dumps(found)) < 4096
    use = use_of("b", found, EPOCH, EPOCH, 1000.0)
    assert use is not None
    for after in (0.0, PER / 7, PER, 4 * PER):
        real = sum(one.used.cpu for one in charges if one.ends > after)
        seen = sum(one.used.cpu for one in use.charges if one.ends > 1000.0 + after)
        late = sum(one.used.cpu for one in charges if after - 5 * PER / MAX_CHARGES < one.ends <= after)
        assert real * 0.999 <= seen <= (real + late) * 1.001


def test_a_record_is_as_old_as_the_store_says() -> None:
    found = published({"cpu": 1.0}, PER, [Charge(PER, Amounts(2.0))], Amounts(), 0.0, shadow=False)
    use = use_of("b", found, EPOCH, EPOCH + timedelta(seconds=100), 5e9)
    assert use is not None
    assert use.charges == (Charge(5e9 + PER - 100, Amounts(2.0)),)
    assert use_of("b", found, EPOCH, EPOCH + timedelta(seconds=PER), 0.0).charges == ()  # type: ignore[union-attr]  # it is one


@pytest.mark.parametrize("key", ["charges", "in_flight", "per"])
@pytest.mark.parametrize(
    "value", ["x", [["x"]], [[-1.0, 1, 1, 1, 1]], [[math.nan] * 5], [[5, *[1e308] * 4]] * 3, None, [[1.0]], {}]
)
def test_a_record_that_cannot_be_read_is_no_use(key: str, value: Any) -> None:
    """It is written by another process, whatever that is."""
    found = published({"cpu": 1.0}, PER, [Charge(PER, Amounts(2.0))], Amounts(), 0.0, shadow=False)
    use = use_of("b", {**found, key: value}, EPOCH, EPOCH, 0.0)
    assert use is None or all(one.used.cpu >= 0 for one in use.charges)


@pytest.mark.parametrize(
    ("cpu", "in_flight", "why"),
    [
        (3600.0, 100.0, ""),
        (1e9, 0.0, "cpu of 1e+09"),
        (0.0, 1e9, "cpu of 1e+09"),
        (-5.0, 0.0, "it cannot be read"),
    ],
)
def test_use_beyond_what_the_wall_clock_allows_is_left_out_and_named(cpu: float, in_flight: float, why: str) -> None:
    """It would keep all members from running anything for as long as it is charged."""
    found = published({"cpu": 1.0}, PER, [Charge(PER, Amounts(cpu))], Amounts(in_flight), 0.0, shadow=False)
    assert (use_of("b", found, EPOCH, EPOCH, 0.0, PER) is None) == bool(why)
    assert refused_use(found, PER).startswith(why)
    assert bool(refused_use(found, PER)) == bool(why)


def reading_of_a_dead_one(charges: list[Any], in_flight: list[Any]) -> tuple[Store, MemberRecords, Reading]:
    """A member that has read the last record of another one, and forgotten it."""
    store = Store()
    dead, records = (MemberRecords(store, name) for name in ("dead", "us"))  # type: ignore[arg-type]  # what they use of it
    use = published({"cpu": 1.0}, PER, [], Amounts(), 0.0, shadow=False)
    document = MemberRecord("p", "dead", "h", "1", "now", 1, 1, "", {**use, "charges": charges, "in_flight": in_flight})
    dead.begin(dead.listed())
    dead.beat(document)
    records.begin(records.listed())
    reading, listed = Reading(records, "us", HEARTBEAT), records.beat(replace(document, instance="us", budget=use))
    reading.per = PER
    reading.read(listed, 0.0)
    reading.forget(["dead"], listed)
    return store, records, reading


@pytest.mark.parametrize("huge", [10**400, 1e300, -(10**400)], ids=["integer", "number", "negative"])
def test_a_member_that_wrote_anything_can_be_forgotten(huge: float) -> None:
    """Else each heartbeat of the others would fail, and none would see who comes and goes."""
    store, records, reading = reading_of_a_dead_one([[huge] * 5], [huge] * 4)
    assert not [path for path in store.objects if "/dead/" in path and path.endswith(".json")]
    others = reading.others(records.listed(), 0, 0.0)
    assert others is not None
    assert (others.charges, others.in_flight) == ((), Amounts())


def test_what_a_dead_member_used_is_charged_for_some_periods_whatever_its_limit_was() -> None:
    """One with a limit of almost nothing charges a run for years."""
    store, records, reading = reading_of_a_dead_one([[1e9, LIMIT, 0, 0, 0]], [0.0] * 4)
    others = reading.others(records.listed(), 0, 0.0)
    assert others is not None
    assert others.charges == (Charge(CHARGED * PER, Amounts(LIMIT)),)
    reading.others(records.listed(), 0, CHARGED * PER)
    reading.sweep()
    assert not [path for path in store.objects if "/dead/" in path]


def test_a_record_of_the_future_ends_no_charge_of_others() -> None:
    """The clock of a shared folder was set back: by the newest record, all others would be as old as that is ahead."""
    fleet = Fleet(3, seed=1)
    used, fast, reader = fleet.members
    used.budget.add(used.offset, Amounts(7.0))
    used.beat(0.0)
    fleet.store.now = EPOCH + timedelta(days=1)
    fast.beat(0.0)
    fleet.store.now = EPOCH
    reader.beat(0.0)
    assert reader.budget.used(reader.offset).cpu == 7.0


def test_one_history_is_counted_once_and_never_ones_own() -> None:
    old, new = (
        use_of(
            instance,
            published({"cpu": 1.0}, PER, [Charge(PER, Amounts(cpu))], Amounts(1.0), 0.0, shadow=False),
            at,
            at,
            0.0,
        )
        for instance, cpu, at in (("b", 5.0, EPOCH), ("b", 7.0, EPOCH + timedelta(seconds=9)))
    )
    assert [one.used.cpu for one in others_of([new, old, None], "a", 1, 0.0).charges] == [7.0]
    assert others_of([old, new], "b", 1, 0.0).charges == ()


def test_budgets_are_compared() -> None:
    one = published({"cpu": 1.0}, PER, [], Amounts(), 0.0, shadow=False)
    assert is_same(one, {**one, "in_flight": [1.0]})
    assert not is_same(one, {**one, "per": 1.0})
    assert not is_same(one, None)
    assert is_same(None, None)
