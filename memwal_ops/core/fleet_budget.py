"""Limit what all runs of a fleet together use in a time (:class:`FleetBudget`).

Each member counts its own runs exactly, and those of the others by what it last read of them (:class:`Others`). What
others use within the time between two readings is not seen: by so much the members may exceed a limit together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

CHARGED = 4
"""So many times ``per`` a run is charged at most: what exceeded a limit is charged for longer than once."""
_KEPT, _OWN = 0.05, 0.5
"""For runs that restore objectives: a part of each limit that is kept free, and a part that they have in any case."""


class Amounts(NamedTuple):
    """What runs use: processor seconds, bytes written, requests, money."""

    cpu: float = 0.0
    bytes_written: float = 0.0
    requests: float = 0.0
    money: float = 0.0

    def plus(self, other: Amounts, sign: float = 1.0) -> Amounts:
        """The sum; with a ``sign`` of -1 the difference."""
        (cpu, written, requests, money), (more, bytes_more, requests_more, money_more) = self, other
        return Amounts(
            cpu + sign * more, written + sign * bytes_more, requests + sign * requests_more, money + sign * money_more
        )

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


class Charge(NamedTuple):
    """What is charged until a time; ``kept``: the part of it that restored objectives."""

    ends: float
    used: Amounts
    kept: Amounts = NOTHING


class Charges:
    """Charges, each of which ends."""

    def __init__(self, charges: Iterable[Charge] = ()) -> None:
        self._heap = [*charges]
        heapq.heapify(self._heap)
        self._sum = self._kept = NOTHING
        for charge in self._heap:
            self._sum, self._kept = self._sum.plus(charge.used), self._kept.plus(charge.kept)

    def add(self, charge: Charge) -> None:
        """Keep one more."""
        heapq.heappush(self._heap, charge)
        self._sum, self._kept = self._sum.plus(charge.used), self._kept.plus(charge.kept)

    def at(self, now: float) -> tuple[Amounts, Amounts]:
        """The sums of what has not ended: used, and kept."""
        while self._heap and self._heap[0].ends <= now:
            ended = heapq.heappop(self._heap)
            self._sum, self._kept = self._sum.plus(ended.used, -1.0), self._kept.plus(ended.kept, -1.0)
        if not self._heap:
            self._sum = self._kept = NOTHING  # no rounding errors are left
        return self._sum, self._kept

    @property
    def first_end(self) -> float | None:
        """When the first of them ends; None: there is none."""
        return self._heap[0].ends if self._heap else None

    def __iter__(self) -> Iterator[Charge]:
        """Those that are kept, in no order."""
        return iter(self._heap)


@dataclass(frozen=True, slots=True)
class Others:
    """What the other members of a fleet use, as last read.

    ``charges``: of all of them, also of those that ended. ``until``: after that time what was read is too old.
    """

    charges: tuple[Charge, ...] = ()
    in_flight: Amounts = NOTHING
    living: int = 0
    until: float = float("inf")


class BudgetGate(Protocol):
    """Refuses runs at one time, see :meth:`FleetBudget.refuses`."""

    def __call__(self, own: Amounts | None, *, objective: bool) -> str | None:
        """The limit that keeps a run from starting; None: it may start."""


class FleetBudget:
    """What runs have used within the last ``per`` seconds, beside the limits.

    A run starts if what it is expected to use fits. One whose turn it is, as it has waited longest, starts as long as
    no limit is reached, and so does one that restores an objective: these have half of each limit in any case.
    What exceeds a limit is charged for longer, in proportion: in the long run no more is used than the limits allow.

    While the other members cannot be read, each of those that lived is taken to use as much as this one does since:
    then each has its part of what was left, and after ``per`` of the limits.

    ``keeps``: some table has objectives.
    """

    def __init__(self, limits: Mapping[str, float], per: float, *, keeps: bool = False) -> None:
        self.limits = limits
        self.per = per
        self.others = Others()
        self._keeps = keeps
        self._own, self._theirs, self._unseen = Charges(), Charges(), Charges()

    @property
    def own(self) -> Charges:
        """What runs of this member are charged."""
        return self._own

    def meet(self, others: Others, now: float) -> None:
        """Count what others use; if that is too old by now, they are taken to use as much as this member did."""
        self.others, self._theirs = others, Charges(others.charges)
        self._unseen = Charges(self._own if self.is_alone(now) else ())

    def is_alone(self, now: float) -> bool:
        """Whether what others use can no longer be read."""
        return now > self.others.until

    def add(self, finished: float, used: Amounts, *, objective: bool = False) -> None:
        """Add a run that ended, in the order in which runs end; ``objective``: it restored one."""
        if self.limits:
            spent = self.used(finished).plus(used)
            most = max(getattr(spent, name) / limit for name, limit in self.limits.items())
            charge = Charge(finished + self.per * max(1.0, most), used, used if objective else NOTHING)
            self._own.add(charge)
            self._unseen.add(charge)

    def used(self, now: float) -> Amounts:
        """What was used within the last ``per``, and what is charged for longer."""
        return self._charged(now)[0]

    def in_flight(self, now: float, own: Amounts) -> Amounts:
        """What runs of all members are expected to use; ``own``: those of this one."""
        return self.others.in_flight.plus(own, 1.0 + self._unread(now))

    def refuses(
        self, now: float, in_flight: Amounts = NOTHING, own: Amounts | None = None, *, objective: bool = False
    ) -> str | None:
        """The limit that keeps a run from starting; None: it may start.

        ``in_flight``: what the runs of this member that have not ended are expected to use. ``own``: what it is
        expected to use itself, if that must fit.
        """
        return self.gate(now, in_flight)(own, objective=objective)

    def gate(self, now: float, in_flight: Amounts = NOTHING) -> BudgetGate:
        """:meth:`refuses` of many runs at one time."""
        spent, kept = self._charged(now)
        spent, times = spent.plus(self.in_flight(now, in_flight)), 1.0 + self._unread(now)

        def refuses(own: Amounts | None, *, objective: bool) -> str | None:
            uses = None if own is None or not self.limits else NOTHING.plus(own, times)
            return self._reached(spent, kept, uses, objective=objective)

        return refuses

    def next_end(self, now: float) -> float | None:
        """When the next charge ends, and runs may fit again; None: nothing is charged."""
        self._charged(now)
        ends = [charges.first_end for charges in (self._own, self._theirs) if charges.first_end is not None]
        if self.others.living and now < self.others.until < float("inf"):
            ends.append(self.others.until)  # they are taken to use as much as this one from then on
        return min(ends, default=None)

    def frees_at(self, now: float, own: Amounts | None = None, *, objective: bool = False) -> float:
        """When the next run may start, if no other does until then."""
        (spent, kept), at = self._charged(now), now
        for ends, used, restored in sorted([*self._own, *self._theirs]):
            if self._reached(spent, kept, own, objective=objective) is None:
                break
            spent, kept, at = spent.plus(used, -1.0), kept.plus(restored, -1.0), ends
        return at

    def _charged(self, now: float) -> tuple[Amounts, Amounts]:
        used, kept = self._own.at(now)
        for charges, times in ((self._theirs, 1), (self._unseen, self._unread(now))):
            more, restored = charges.at(now)
            if times:
                used, kept = used.plus(more, times), kept.plus(restored, times)
        return used, kept

    def _unread(self, now: float) -> int:
        return self.others.living if self.is_alone(now) else 0

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
