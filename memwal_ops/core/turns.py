"""Choose whose turn it is of what is due over all tables (:class:`Turns`), for a supervisor and for its plan.

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.core.worth import Worth

    Allows = Callable[["Due", bool], bool]

SHARE = 8
ASKED, SAFETY = 2, 1
"""How urgent something is that someone asked for, or that keeps a table safe."""
BY_AGE, BY_WORTH = True, False
"""Why it is the turn of a job."""


@dataclass(frozen=True, slots=True)
class Due:
    """A job of a table that may start now.

    Attributes:
        key: of its table and job.
        since: since when it is due; anything that can be ordered.
        worth: of its next run.
        urgent: it is not delayed; the greatest first, 0: it takes its turn.
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
        """Start with no credit, and nothing due."""
        self.credit = 0.0
        self._due: dict[tuple[str, str], Due] = {}
        self._by_age: list[tuple[Any, ...]] = []
        self._by_rank: list[tuple[Any, ...]] = []
        self._urgent: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        """How much is due."""
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

        Args:
            allows: whether something may start, by age or by worth.
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
