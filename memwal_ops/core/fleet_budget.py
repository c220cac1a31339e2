"""Limit what all runs of a supervisor together use in a time (:class:`FleetBudget`)."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEPT, _OWN = 0.05, 0.25
"""For runs that restore objectives: a part of each limit that is kept free, and a part that they have in any case."""


class Amounts(NamedTuple):
    """What runs use: processor seconds, bytes written, requests, money."""

    cpu: float = 0.0
    bytes_written: float = 0.0
    requests: float = 0.0
    money: float = 0.0

    def plus(self, other: Amounts, sign: float = 1.0) -> Amounts:
        """The sum; with a ``sign`` of -1 the difference."""
        return Amounts(*(one + sign * more for one, more in zip(self, other, strict=True)))

    def share(self, limits: Mapping[str, float]) -> float:
        """What part of the limits it is, by name of an amount, in sum."""
        return sum(float(getattr(self, name)) / limit for name, limit in limits.items())


NOTHING = Amounts()


def amounts_of(used: Mapping[str, Any] | None, money: float | None = None) -> Amounts:
    """The amounts of a run's ``used``, or of its ``cost``, which has its money."""
    if not used:
        return NOTHING
    requests = sum((used.get("requests") or {}).values())
    spent = used.get("money", 0.0) if money is None else money
    return Amounts(float(used.get("cpu_seconds") or 0), float(used.get("bytes_written") or 0), requests, float(spent))


class FleetBudget:
    """What runs have used within the last ``per`` seconds, beside the limits.

    A run starts if what it is expected to use fits. One whose turn it is, as it has waited longest, starts as long as
    no limit is reached, and so does one that restores an objective: these have a quarter of each limit in any case.
    What exceeds a limit is charged for longer, in proportion: in the long run no more is used than the limits allow.

    Args:
        limits: by name of an amount.
        per: the time.
        keeps: some table has objectives.
    """

    def __init__(self, limits: Mapping[str, float], per: float, *, keeps: bool = False) -> None:
        """Nothing was used yet."""
        self.limits = limits
        self.per = per
        self._keeps = keeps
        self._runs: list[tuple[float, Amounts, Amounts]] = []  # a heap, by when they are charged no more
        self._sum = self._objectives = NOTHING

    def add(self, finished: float, used: Amounts, *, objective: bool = False) -> None:
        """Add a run that ended, in the order in which runs end; ``objective``: it restored one."""
        if self.limits:
            self._sum = self.used(finished).plus(used)
            kept = used if objective else NOTHING
            self._objectives = self._objectives.plus(kept)
            most = max(getattr(self._sum, name) / limit for name, limit in self.limits.items())
            heapq.heappush(self._runs, (finished + self.per * max(1.0, most), used, kept))

    def used(self, now: float) -> Amounts:
        """What was used within the last ``per``, and what is charged for longer."""
        while self._runs and self._runs[0][0] <= now:
            _, used, kept = heapq.heappop(self._runs)
            self._sum, self._objectives = self._sum.plus(used, -1.0), self._objectives.plus(kept, -1.0)
        if not self._runs:
            self._sum = self._objectives = NOTHING  # no rounding errors are left
        return self._sum

    def refuses(
        self, now: float, in_flight: Amounts = NOTHING, own: Amounts | None = None, *, objective: bool = False
    ) -> str | None:
        """The limit that keeps a run from starting; None: it may start.

        Args:
            now: the time.
            in_flight: what the runs that have not ended are expected to use.
            own: what it is expected to use itself, if that must fit.
            objective: it restores an objective.
        """
        return self._reached(self.used(now).plus(in_flight), self._objectives, own, objective=objective)

    def frees_at(self, now: float, own: Amounts | None = None, *, objective: bool = False) -> float:
        """When the next run may start, if no other does until then."""
        spent, kept, at = self.used(now), self._objectives, now
        for ends, used, restored in sorted(self._runs):
            if self._reached(spent, kept, own, objective=objective) is None:
                break
            spent, kept, at = spent.plus(used, -1.0), kept.plus(restored, -1.0), ends
        return at

    def _reached(self, spent: Amounts, restored: Amounts, own: Amounts | None, *, objective: bool) -> str | None:
        """The limit that is reached, or would be exceeded by a run; any run fits where nothing was used."""
        for name, limit in self.limits.items():
            amount = getattr(spent, name)
            if objective:
                reached = amount >= limit and getattr(restored, name) >= self._keeps * _OWN * limit
            else:
                most = limit * (1.0 - self._keeps * _KEPT)
                reached = amount >= most or (own is not None and amount > 0 and amount + getattr(own, name) > most)
            if reached:
                return name
        return None
