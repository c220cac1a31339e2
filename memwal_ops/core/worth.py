"""Choose which due job runs next (:class:`Turns`), by what each is worth (:class:`Worth`): what it saves in a day.

A policy is a function of what a poll read and of what past runs spent and achieved. The figures of worth are rough, and
rank jobs only: what a day of readers costs is not known, so that a table is taken to be scanned :data:`READS` times.

What must not be delayed comes first. Of the rest, one part in :data:`SHARE` of what runs cost goes to the job that has
waited longest, whatever it is worth; missed objectives come before all other turns, then what saves most for its cost.

So nothing starves: until a job starts, its pool starts runs that cost at most :data:`SHARE` times what was due before
it and itself cost, and one run more. Each start adds a part of its cost to a credit. The oldest job is taken as soon as
the credit covers its cost, which it then pays: only what was due before a job can be paid for before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.cost import LIST_PRICES, Prices, Spent, expected_cost, money_of
from memwal_ops.core.fleet_budget import Amounts, amounts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from memwal_ops.core.job import JobSpec, Objective

    Allows = Callable[["Due", bool], bool]

SHARE = 8
ASKED, SAFETY = 2, 1
"""How urgent something is that someone asked for, or that keeps a table safe."""
BY_AGE, BY_WORTH = True, False
"""Why it is the turn of a job."""


@dataclass(frozen=True, slots=True)
class Due:
    """A job of a table that may start now.

    ``since``: since when it is due; anything that can be ordered. ``urgent``: it is not delayed; the greatest first, 0:
    it takes its turn.
    """

    key: tuple[str, str]
    since: Any
    worth: Worth
    urgent: int = 0

    @property
    def rank(self) -> tuple[bool, float, float, Any, tuple[str, str]]:
        """Its place by worth."""
        missed = self.worth.missed
        excess = 0.0 if missed is None else missed.figure / max(missed.limit, 1.0) * self.worth.weight
        return missed is None, -excess, -self.worth.ratio, self.since, self.key

    @property
    def age(self) -> tuple[Any, tuple[str, str]]:
        """Its place by how long it has waited."""
        return self.since, self.key


def _all(_: Due, __: bool) -> bool:  # noqa: FBT001 - see Turns.choose
    return True


class Turns:
    """The turns of one pool: what is due, in both orders, and what the oldest of it is owed."""

    def __init__(self) -> None:
        self.credit = 0.0
        self._due: dict[tuple[str, str], Due] = {}
        self._by_age: list[tuple[Any, ...]] = []
        self._by_rank: list[tuple[Any, ...]] = []
        self._urgent: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._due)

    def get(self, key: tuple[str, str]) -> Due:
        """What is due of a table and a job."""
        return self._due[key]

    def put(self, due: Due) -> None:
        """Add what became due, or replace it as its worth has changed."""
        if self._due.get(due.key) == due:
            return
        self.discard(due.key)
        self._due[due.key] = due
        for order, place in self._places(due):
            insort(order, place)

    def discard(self, key: tuple[str, str]) -> None:
        """Remove what is not due any more, or has started."""
        due = self._due.pop(key, None)
        if due is not None:
            for order, place in self._places(due):
                del order[bisect_left(order, place)]

    def clear(self) -> None:
        """Remove all; the credit stays."""
        for kept in (self._due, self._by_age, self._by_rank, self._urgent):
            kept.clear()

    @property
    def oldest(self) -> Due | None:
        """What has waited longest."""
        return self._due[self._by_age[0][-1]] if self._by_age else None

    @property
    def first(self) -> Due | None:
        """What someone asked for, else what has waited longest: the order of a service without a budget."""
        asked = self._urgent and -self._urgent[0][0] >= ASKED
        return self._due[self._urgent[0][-1]] if asked else self.oldest

    def choose(self, allows: Allows = _all) -> Due | None:
        """Whose turn it is; None: nothing is due, or allowed.

        ``allows``: whether something may start, by age or by worth.
        """
        if self._urgent:
            return self._due[self._urgent[0][-1]]
        oldest = self.oldest
        if oldest is not None and self.credit >= oldest.worth.effort and allows(oldest, BY_AGE):
            return oldest
        return next((due for place in self._by_rank if allows(due := self._due[place[-1]], BY_WORTH)), None)

    def begin(self, due: Due, *, oldest: bool) -> None:
        """Count a start; ``oldest``: of all that was due, this had waited longest."""
        costs = due.worth.effort
        self.credit = max(0.0, self.credit + costs / SHARE - (costs if oldest else 0.0))

    def _places(self, due: Due) -> Iterator[tuple[list[tuple[Any, ...]], tuple[Any, ...]]]:
        """The orders in which something is, each with its place; the key is last."""
        yield self._by_age, due.age
        if due.urgent:
            yield self._urgent, (-due.urgent, *due.age)
        else:
            yield self._by_rank, due.rank


READS = 100.0
"""So often a day a table is taken to be read as a whole."""
_MONTH = 30.0
_GIB = 1 << 30
# By kind of a saving, what a run achieves of it.
_ACHIEVED = {"fragments": ("fragments",), "rows": ("rows_merged", "rows_indexed"), "bytes": ("bytes_freed",)}
# What makes a scan dearer, in GET requests: a fragment is two, and a request reads so many rows that no index covers or
# that wait in a log.
_GETS_OF_A_FRAGMENT, _ROWS_OF_A_GET = 2.0, 50_000.0
# On a store without prices, jobs are ranked by those of S3 and of a core.
_RANKING = Prices(**{**LIST_PRICES["s3"].to_json(), "cpu": 0.04})
# A run of which nothing is known: requests of any run, bytes of a request, bytes that a core writes in a second.
_GETS, _PUTS, _BYTES_OF_A_REQUEST, _BYTES_PER_SECOND = 40, 10, 8 << 20, 50 << 20


@dataclass(frozen=True, slots=True)
class Missed:
    """An objective that a table does not meet: its name, the figure, and the limit."""

    objective: str
    figure: float
    limit: float

    def __str__(self) -> str:
        """As the reason of a run."""
        return f"objective {self.objective}: {self.figure:,.0f}, at most {self.limit:,.0f}"

    def to_json(self) -> dict[str, Any]:
        """The entry of ``missed``."""
        return {"objective": self.objective, "figure": self.figure, "limit": self.limit}


@dataclass(frozen=True, slots=True)
class Worth:
    """What the next run of a job is worth.

    Attributes:
        saves: what it saves in a day, in money, by the debt that the poll found and by how often past runs achieved
            anything.
        complete: whether the poll found all that it saves; else ``saves`` ranks it by what is known, and is not told.
        missed: the objective of the table that it would restore; None: all are met.
        share: what part of the fleet's budget it uses; None: there is none.
    """

    saves: float
    costs: float
    weight: float = 1.0
    missed: Missed | None = None
    share: float | None = None
    complete: bool = True

    @property
    def effort(self) -> float:
        """What it costs, as jobs are ranked by it: of the budget, or in money."""
        return self.share or self.costs

    @property
    def ratio(self) -> float:
        """What it saves in a day for what it costs, by the weight of its table."""
        return self.weight * self.saves / self.effort

    def to_json(self) -> dict[str, Any]:
        """The document ``worth``."""
        missed = None if self.missed is None else self.missed.to_json()
        saves, ratio = (round(self.saves, 9), round(self.ratio, 3)) if self.complete else (None, None)
        figures = {"saves_daily": saves, "costs": round(self.costs, 9), "weight": self.weight}
        share = {} if self.share is None else {"share": round(self.share, 9)}
        return {**figures, **share, "ratio": ratio, "missed": missed}


def worth_of(
    spec: JobSpec,
    figures: Mapping[str, float],
    past: Sequence[Spent],
    *,
    weight: float = 1.0,
    objectives: Mapping[Objective, float] | None = None,
    limits: Mapping[str, float] | None = None,
) -> Worth:
    """What the next run of a job is worth.

    ``past``: what its past runs spent and achieved, the newest first. ``limits``: of the fleet's budget, by name of an
    amount.
    """
    saves = sum(_saved(save.kind, figures.get(save.metric, 0.0)) for save in spec.saves)
    uses = expected_amounts(spec, figures, past)
    return Worth(
        # What past runs really saved of what was due goes into the next ranking.
        saves * ((1 + sum(map(_achieved, past))) / (1 + len(past))),
        uses.money,
        weight,
        missed_objective(spec, figures, objectives),
        uses.share(limits) if limits else None,
        complete=all(save.metric in figures for save in spec.saves),
    )


def missed_objective(
    spec: JobSpec, figures: Mapping[str, float], objectives: Mapping[Objective, float] | None
) -> Missed | None:
    """The objective that a run of the job would restore, of several the one that is missed most; None: none."""
    missed = [
        Missed(name, figures[metric], limit)
        for name, limit in (objectives or {}).items()
        if (metric := spec.objectives.get(name)) is not None and figures.get(metric, 0.0) > limit
    ]
    return max(missed, key=lambda objective: objective.figure / max(objective.limit, 1.0), default=None)


def _saved(kind: str, amount: float) -> float:
    if kind == "bytes":
        return amount / _GIB * _RANKING.stored / _MONTH
    gets = amount * _GETS_OF_A_FRAGMENT if kind == "fragments" else amount / _ROWS_OF_A_GET
    return READS * gets * _RANKING.get / 1000


def _achieved(run: Spent) -> float:
    """The part of the debt that a run achieved; where that was not recorded, whether it achieved anything."""
    debts = run.used.get("debt") or {}
    parts = [
        sum(max(0.0, run.achieved.get(name, 0.0)) for name in _ACHIEVED[kind]) / debt
        for kind, debt in debts.items()
        if debt and kind in _ACHIEVED
    ]
    return min(1.0, max(parts)) if parts else float(bool(run.achieved))


def expected_amounts(spec: JobSpec, figures: Mapping[str, float], past: Sequence[Spent]) -> Amounts:
    """What the next run of a job uses, by past runs or by what is due; money by the prices of the ranking."""
    ranking = dict.fromkeys(LIST_PRICES, _RANKING)
    cost = expected_cost(past, spec.work_due(figures), ranking)
    if cost is not None and cost.money > 0:
        return amounts_of(cost.to_json(), cost.money)
    written = 0.0 if spec.debt is None else figures.get(spec.debt.bytes_written, 0.0)
    # Each part that is due is opened, however small it is: a first run on many of them must not seem cheap.
    parts = 0.0 if spec.debt is None else figures.get(spec.debt.due, 0.0)
    requests = {"get": _GETS + parts + written / _BYTES_OF_A_REQUEST, "put": _PUTS + written / _BYTES_OF_A_REQUEST}
    used = {"store": "s3", "requests": requests, "cpu_seconds": 1 + written / _BYTES_PER_SECOND}
    return amounts_of({**used, "bytes_written": written}, money_of(used, ranking))
