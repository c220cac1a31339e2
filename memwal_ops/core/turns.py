"""Choose whose turn it is of what is due over all tables (:class:`Turns`), for a supervisor and for its plan.

What must not be delayed comes first. Of the rest, one part in :data:`SHARE` of what runs cost goes to the job that has
waited longest, whatever it is worth; missed objectives come before all other turns, then what saves most for its cost.

So nothing starves: until a job starts, its pool starts runs that cost at most :data:`SHARE` times what was due before
it and itself cost, and one run more. Each start adds a part of its cost to a credit. The oldest job is taken as soon as
the credit covers its cost, which it then pays: only what was due before a job can be paid for before it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.core.worth import Worth

SHARE = 8


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


class Turns:
    """The turns of one pool."""

    def __init__(self, credit: float = 0.0) -> None:
        """``credit``: what the job that has waited longest may cost by now."""
        self._credit = credit

    def choose(self, due: Iterable[Due]) -> Due | None:
        """Whose turn it is; None: nothing is due."""
        due = [*due]
        if not due:
            return None
        if urgent := [one for one in due if one.urgent]:
            return min(urgent, key=lambda one: (-one.urgent, *one.age))
        oldest = min(due, key=lambda one: one.age)
        return oldest if self._credit >= oldest.worth.effort else min(due, key=lambda one: one.rank)

    def begin(self, one: Due, *, oldest: bool) -> None:
        """Count a start; ``oldest``: of all that was due, this had waited longest."""
        costs = one.worth.effort
        self._credit = max(0.0, self._credit + costs / SHARE - (costs if oldest else 0.0))

    def in_order(self, due: Iterable[Due]) -> Iterator[Due]:
        """All of them, in the order of their turns if nothing else becomes due."""
        due = [*due]
        urgent = sorted((one for one in due if one.urgent), key=lambda one: (-one.urgent, *one.age))
        rest = [one for one in due if not one.urgent]
        by_age = [(one.age, number) for number, one in enumerate(rest)]
        by_rank = [(one.rank, number) for number, one in enumerate(rest)]
        heapq.heapify(by_age)
        heapq.heapify(by_rank)
        for one in urgent:
            self.begin(one, oldest=False)
            yield one
        taken: set[int] = set()
        while len(taken) < len(rest):
            while by_age[0][1] in taken:
                heapq.heappop(by_age)
            while by_rank[0][1] in taken:
                heapq.heappop(by_rank)
            oldest = by_age[0][1]
            number = oldest if self._credit >= rest[oldest].worth.effort else by_rank[0][1]
            self.begin(rest[number], oldest=number == oldest)
            taken.add(number)
            yield rest[number]
