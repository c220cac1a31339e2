"""Choose whose turn it is of what is due over all tables (:class:`Turns`), for a supervisor and for its plan.

What must not be delayed comes first. Of the rest, one part in :data:`SHARE` of what runs cost goes to the job that has
waited longest, whatever it is worth; missed objectives come before all other turns, then what saves most for its cost.

So nothing starves: until a job starts, its pool starts runs that cost at most :data:`SHARE` times what was due before
it and itself cost, and one run more. Each start adds a part of its cost to a credit. The oldest job is taken as soon as
the credit covers its cost, which it then pays: only what was due before a job can be paid for before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.core.worth import Worth

    Allows = Callable[["Due", bool], bool]

SHARE = 8
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
    """The turns of one pool."""

    def __init__(self) -> None:
        """Start with no credit."""
        self._credit = 0.0

    def choose(self, due: Iterable[Due], allows: Allows = _all) -> Due | None:
        """Whose turn it is; None: nothing is due, or allowed.

        Args:
            due: what is due.
            allows: whether something may start, by age or by worth.
        """
        due = [*due]
        if urgent := [one for one in due if one.urgent]:
            return min(urgent, key=lambda one: (-one.urgent, *one.age))
        oldest = min(due, key=lambda one: one.age, default=None)
        if oldest is not None and self._owes(oldest) and allows(oldest, BY_AGE):
            return oldest
        return min((one for one in due if allows(one, BY_WORTH)), key=lambda one: one.rank, default=None)

    def begin(self, one: Due, *, oldest: bool) -> None:
        """Count a start; ``oldest``: of all that was due, this had waited longest."""
        costs = one.worth.effort
        self._credit = max(0.0, self._credit + costs / SHARE - (costs if oldest else 0.0))

    def in_order(self, due: Iterable[Due], allows: Allows = _all) -> Iterator[Due]:
        """All that may start, in the order of their turns if nothing else becomes due; see :meth:`choose`."""
        due = [*due]
        rest = [one for one in due if not one.urgent]
        by_age = sorted(rest, key=lambda one: one.age, reverse=True)
        by_rank = sorted(rest, key=lambda one: one.rank, reverse=True)
        for one in sorted((one for one in due if one.urgent), key=lambda one: (-one.urgent, *one.age)):
            self.begin(one, oldest=False)
            yield one
        taken: set[tuple[str, str]] = set()
        while by_age and by_rank:
            if by_age[-1].key in taken:
                by_age.pop()
            elif by_rank[-1].key in taken:
                by_rank.pop()
            else:
                oldest = by_age[-1]
                mine = self._owes(oldest) and allows(oldest, BY_AGE)
                one = oldest if mine else by_rank.pop()
                if mine or allows(one, BY_WORTH):
                    self.begin(one, oldest=one is oldest)
                    taken.add(one.key)
                    yield one

    def _owes(self, oldest: Due) -> bool:
        return self._credit >= oldest.worth.effort
