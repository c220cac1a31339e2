"""Limit what all runs of a supervisor together use in a time (:class:`FleetBudget`)."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEPT = 0.1
"""The part of each limit that only runs for missed objectives may use."""


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

    A run may start as long as no limit is reached. One that exceeds a limit is charged for longer, in proportion, so
    that in the long run no more is used than the limits allow.

    Args:
        limits: by name of an amount.
        per: the time.
        keeps: a tenth of each limit is kept for runs that restore objectives, as some table has any.
    """

    def __init__(self, limits: Mapping[str, float], per: float, *, keeps: bool = False) -> None:
        """Nothing was used yet."""
        self.limits = limits
        self.per = per
        self._keeps = keeps
        self._runs: list[tuple[float, Amounts]] = []  # a heap, by when they are charged no more
        self._sum = NOTHING

    def add(self, finished: float, used: Amounts) -> None:
        """Add a run that ended, in the order in which runs end."""
        if self.limits:
            self._sum = self.used(finished).plus(used)
            most = max(getattr(self._sum, name) / limit for name, limit in self.limits.items())
            heapq.heappush(self._runs, (finished + self.per * max(1.0, most), used))

    def used(self, now: float) -> Amounts:
        """What was used within the last ``per``, and what is charged for longer."""
        while self._runs and self._runs[0][0] <= now:
            self._sum = self._sum.plus(heapq.heappop(self._runs)[1], -1.0)
        if not self._runs:
            self._sum = NOTHING  # no rounding errors are left
        return self._sum

    def refuses(self, now: float, in_flight: Amounts = NOTHING, *, objective: bool = False) -> str | None:
        """The limit that keeps a run from starting; None: it may start.

        Args:
            now: the time.
            in_flight: what the runs that have not ended are expected to use.
            objective: the run restores an objective.
        """
        return self._reached(self.used(now).plus(in_flight), objective=objective)

    def frees_at(self, now: float, *, objective: bool = False) -> float:
        """When the next run may start, if no other does until then."""
        spent, at = self.used(now), now
        for ends, used in sorted(self._runs):
            if self._reached(spent, objective=objective) is None:
                break
            spent, at = spent.plus(used, -1.0), ends
        return at

    def _reached(self, spent: Amounts, *, objective: bool) -> str | None:
        part = 1.0 if objective or not self._keeps else 1.0 - _KEPT
        return next((name for name, limit in self.limits.items() if getattr(spent, name) >= part * limit), None)
