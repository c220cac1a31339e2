"""A fleet that exists only as figures, maintained by several orders of runs under one budget.

Arrivals follow a power law, a part of the tables has bursts, a part is dead. Sizes of rows, and so the cost of a run by
what it saves, differ by orders of magnitude. The order and the budget of memwal-ops are the real ones
(:mod:`memwal_ops.core.worth`, :mod:`memwal_ops.core.fleet_budget`, :mod:`memwal_ops.core.worth`). The oracle knows what
each run will really use, keeps nothing for objectives, owes no turn to anybody, and chooses in hindsight how many
fragments a run is worth at least.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.line_chart import line_chart
from benchmarks.markdown import head, row
from memwal_ops.core.cost import LIST_PRICES, Spent, money_of, money_text
from memwal_ops.core.fleet_budget import FleetBudget, amounts_of
from memwal_ops.core.job import DebtSpec, JobSpec, Saving
from memwal_ops.core.options import Options
from memwal_ops.core.worth import Due, Turns, expected_amounts, worth_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from memwal_ops.core.worth import Worth

    Order = Callable[["Simulation", float], Iterable["Table"]]

DAY = 86_400.0
DUE_FRAGMENTS = 8
JOB = JobSpec(
    name="compact",
    summary="Of the simulation.",
    options=Options,
    load="",
    debt=DebtSpec(
        due="fragments", when="", nothing_due="", rows="rows", bytes_written="debt_bytes", bytes_read="debt_bytes"
    ),
    saves=(Saving("fragments", "fragments"),),
    objectives={"max_fragments": "fragments"},
)
_PAST = 4
_STEP, _PART = 1800.0, 10
_LEAST = (2, 16, 64)
_DRAWN = 8  # each such step
_SPEED = 50 << 20
_ZIPF = 1.1
_ROWS_OF_A_FRAGMENT = 1000


@dataclass(slots=True)
class Table:
    """One table: ``rate`` fragments a day, ``row`` bytes of a row, and what waits in it."""

    number: int
    rate: float
    row: float
    burst: bool
    objective: float | None
    fragments: float = 0.0
    since: float | None = None
    ran: float = 0.0
    past: tuple[Spent, ...] = ()
    known: tuple[float, Worth] | None = None

    @property
    def missed(self) -> bool:
        """Whether it does not keep its objective."""
        return self.objective is not None and self.fragments > self.objective

    @property
    def figures(self) -> dict[str, float]:
        """As a poll reads them."""
        rows = self.fragments * _ROWS_OF_A_FRAGMENT
        return {"fragments": self.fragments, "rows": rows, "debt_bytes": rows * self.row}

    def used(self, noise: float) -> dict[str, Any]:
        """What a run now uses."""
        figures = self.figures
        requests = {"get": 20 + 2 * self.fragments, "put": 10 + figures["debt_bytes"] / _SPEED, "list": 2, "delete": 0}
        cpu = noise * (1 + figures["debt_bytes"] / _SPEED)
        written = figures["debt_bytes"]
        return {
            "store": "s3",
            "requests": requests,
            "cpu_seconds": cpu,
            "bytes_written": written,
            "work": figures["rows"],
        }


@dataclass(slots=True)
class Outcome:
    """What one order came to: ``debt`` by time, in money a day; ``area`` under it, in money."""

    name: str
    debt: list[float] = field(default_factory=list)
    area: float = 0.0
    runs: int = 0
    cpu: float = 0.0
    money: float = 0.0
    missed: int = 0
    worst_wait: float = 0.0


def fleet(number: int, seed: int) -> list[Table]:
    """So many tables."""
    chance = random.Random(seed)
    ranks = [*range(1, number + 1)]
    chance.shuffle(ranks)
    tables = []
    for index, rank in enumerate(ranks):
        dead = chance.random() < 0.3  # noqa: PLR2004 - the part of dead tables
        rate = 0.0 if dead else max(2.0, 5000 * rank**-_ZIPF)
        row = min(200_000.0, chance.lognormvariate(6.5, 1.8))
        objective = 200.0 if not dead and rate < 300 and chance.random() < 0.2 else None  # noqa: PLR2004 - its part
        tables.append(Table(index, rate, row, chance.random() < 0.05, objective, fragments=chance.random() * 8))  # noqa: PLR2004 - with bursts
    return tables


class Simulation:
    """One fleet under one order, for ``days``, in steps of ``step`` seconds."""

    def __init__(self, tables: int, seed: int, days: float, cpu: float | None, *, keeps: bool = False) -> None:
        """``cpu``: processor seconds a day; None: without a limit. ``keeps``: a part is kept for objectives."""
        self.tables = fleet(tables, seed)
        self._chance = random.Random(seed + 1)
        self.days = days
        self.limits = {} if cpu is None else {"cpu": cpu}
        self.budget = FleetBudget(self.limits, DAY, keeps=keeps)
        self.turns = Turns()

    def run(self, name: str, order: Order) -> Outcome:
        """Let time pass."""
        outcome, now = Outcome(name), 0.0
        noises = {one.number: self._chance.lognormvariate(0, 0.3) for one in self.tables}
        while now < self.days * DAY:
            now += _STEP
            self._arrive()
            for table in self.tables:
                if table.since is None and table.fragments >= DUE_FRAGMENTS:
                    table.since = now
            for table in order(self, now):
                used = table.used(noises[table.number] * self._chance.lognormvariate(0, 0.15))
                money = money_of(used, LIST_PRICES)
                self.budget.add(now, amounts_of(used, money), objective=table.missed)
                outcome.runs += 1
                outcome.cpu += used["cpu_seconds"]
                outcome.money += money
                if table.since is not None:
                    outcome.worst_wait = max(outcome.worst_wait, now - table.since)
                spent = Spent(used["cpu_seconds"], used, used["work"], {"fragments": table.fragments})
                table.past = (spent, *table.past)[:_PAST]
                table.fragments, table.since, table.ran, table.known = 1.0, None, now, None
            debt = sum(debt_of(one) for one in self.tables)
            outcome.debt.append(debt)
            outcome.area += debt * _STEP / DAY
            outcome.missed += sum(one.missed for one in self.tables)
        waits = [now - one.since for one in self.tables if one.since is not None]
        outcome.worst_wait = max([outcome.worst_wait, *waits])
        return outcome

    def _arrive(self) -> None:
        days = _STEP / DAY
        for table in self.tables:
            # A burst: twenty times as much in one hour of twenty.
            factor = 1.0 if not table.burst else 20.0 if self._chance.random() < 0.05 else 0.0  # noqa: PLR2004 - see above
            if table.rate:
                table.fragments += factor * table.rate * days * self._chance.uniform(0.5, 1.5)

    def due(self) -> list[Table]:
        """What is due."""
        return [one for one in self.tables if one.since is not None]

    def worth(self, table: Table) -> Worth:
        """By the real policy, by estimates."""
        if table.known is None or table.known[0] != table.fragments:
            limits = {} if table.objective is None else {"max_fragments": table.objective}
            found = worth_of(JOB, table.figures, table.past, objectives=limits, limits=self.limits)  # type: ignore[arg-type]  # plain names
            table.known = (table.fragments, found)
        return table.known[1]


_OF_A_FRAGMENT = worth_of(JOB, {"fragments": 1.0}, ()).saves


def debt_of(table: Table) -> float:
    """In money a day."""
    return max(0.0, table.fragments - 1) * _OF_A_FRAGMENT


def nothing(_: Simulation, __: float) -> Iterable[Table]:
    """No run."""
    return ()


def everything(simulation: Simulation, _: float) -> Iterable[Table]:
    """All that is due, at once."""
    return simulation.due()


def objectives_alone(simulation: Simulation, _: float) -> Iterable[Table]:
    """What misses its objective."""
    return [one for one in simulation.due() if one.missed]


def _within(simulation: Simulation, now: float, tables: Iterable[Table]) -> Iterator[Table]:
    for table in tables:
        if simulation.budget.refuses(now) is not None:
            return
        yield table


def oldest_due(simulation: Simulation, now: float) -> Iterable[Table]:
    """That which has been due longest: the order of earlier releases."""
    return _within(simulation, now, sorted(simulation.due(), key=lambda one: (one.since, one.number)))


def longest_not_run(simulation: Simulation, now: float) -> Iterable[Table]:
    """That which ran longest ago."""
    return _within(simulation, now, sorted(simulation.due(), key=lambda one: (one.ran, one.number)))


def ours(simulation: Simulation, now: float) -> Iterator[Table]:
    """The order of memwal-ops."""
    known = {("", str(one.number)): one for one in simulation.due()}

    def allows(one: Due, turn: bool) -> bool:  # noqa: FBT001 - see Turns.choose
        own = None if turn else expected_amounts(JOB, known[one.key].figures, known[one.key].past)
        return simulation.budget.refuses(now, own=own, objective=one.worth.missed is not None) is None

    turns = simulation.turns
    for key, table in known.items():
        turns.put(Due(key, table.since, simulation.worth(table)))
    while (due := turns.choose(allows)) is not None:
        turns.begin(due, oldest=due is turns.oldest)
        turns.discard(due.key)
        yield known[due.key]


def oracle(least: int) -> Order:
    """What removes most debt for what it really uses, of all tables with so many fragments at least."""

    def gain(table: Table) -> float:
        return debt_of(table) / float(table.used(1.0)["cpu_seconds"])

    def order(simulation: Simulation, now: float) -> Iterable[Table]:
        known = [one for one in simulation.tables if one.fragments >= least]
        return _within(simulation, now, sorted(known, key=gain, reverse=True))

    return order


ORDERS: Mapping[str, Order] = {
    "due longest": oldest_due,
    "ran earliest": longest_not_run,
    "memwal-ops": ours,
}


def simulate(tables: int, days: float, seed: int, images: Path | None) -> None:
    """Print what each order comes to at a tenth of the processor time, as Markdown; draw the debt."""

    def run(name: str, order: Order, cpu: float | None = None) -> Outcome:
        return Simulation(tables, seed, days, cpu, keeps=order is ours).run(name, order)

    untouched, unlimited = run("none", nothing), run("all", everything)
    alone = run("objectives", objectives_alone)
    cpu = unlimited.cpu / days / _PART
    needed = f"{unlimited.cpu / days / 3600:.1f} h without a limit"
    print(f"\n{tables:,} tables, {days:g} days: {cpu / 3600:.1f} h of processor a day, {needed}.")
    missed = f"{alone.missed * _STEP / 3600:,.0f} table hours"
    print(f"Objectives alone need {alone.cpu / days / cpu:.1%} of that, and are missed for {missed}.")
    columns = ("runs", "of the budget", "money", "worst wait")
    head("order", "debt reduction", "objectives missed", *columns)
    found = [run(name, order, cpu) for name, order in ORDERS.items()]
    found.append(min((run("oracle", oracle(least), cpu) for least in _LEAST), key=lambda one: one.area))
    best = untouched.area - found[-1].area
    for one in found:
        part, money = (untouched.area - one.area) / best, money_text(one.money)
        missed, wait = f"{one.missed * _STEP / 3600:,.0f} table hours", f"{one.worst_wait / 3600:.0f} h"
        row(
            one.name,
            f"{part:.0%}",
            missed,
            f"{one.runs:,}",
            f"{one.cpu / days / cpu:.0%}",
            money,
            wait,
        )
    if images is not None:
        steps = range(_DRAWN - 1, len(untouched.debt), _DRAWN)
        labels = [f"day {(step + 1) * _STEP / DAY:.1f}" for step in steps]
        series = {"no runs": untouched} | {one.name: one for one in found}
        lines = {name: [one.debt[step] for step in steps] for name, one in series.items()}
        images.joinpath("fleet-debt.svg").write_bytes(line_chart(lines, labels, "${:,.2f}"))
