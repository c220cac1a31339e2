"""Whether reads and writes of one key are linearizable: as if each happened at one moment between its call and return.

Each write of a key has a value of its own, which makes this decidable in n log n (Gibbons and Korach, *Testing shared
memories*, SIAM J. Comput. 26, 1997). The calls that concern one value form a zone, from the first return to the last
call. If the first return is before the last call, the value must stand in the register all that time (a *forward*
zone). There is an order of all calls if and only if no two forward zones overlap, and no other zone lies within one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Call:
    """A read or write of one key.

    Attributes:
        writes: else it is a read, and ``value`` what it found; None: nothing.
        began: by a clock that all processes share, in ns.
        ended: infinite if it may still happen: its caller was killed, or was told of a failure.
    """

    key: int
    writes: bool
    value: int | None
    began: float
    ended: float = math.inf


@dataclass(frozen=True)
class _Zone:
    value: int | None
    first_return: float
    last_call: float

    @property
    def forward(self) -> bool:
        return self.first_return < self.last_call

    def __str__(self) -> str:
        return f"{self.value} (first return {self.first_return:.0f}, last call {self.last_call:.0f})"


def contradiction(calls: Iterable[Call]) -> str | None:
    """Why the calls on one key have no order that agrees with what was read and with time; None: they have one.

    Args:
        calls: all of one key, which has no value in the beginning.
    """
    clusters: dict[int | None, list[Call]] = {}
    for call in calls:
        clusters.setdefault(call.value, []).append(call)
    zones = []
    for value, cluster in clusters.items():
        written = [call for call in cluster if call.writes]
        read = [call for call in cluster if not call.writes]
        if value is None:
            written = [Call(0, True, None, -math.inf, -math.inf)]
        if not written:
            return f"{value} was read, and never written"
        (write,) = written
        early = [call for call in read if call.ended < write.began]
        if early:
            return f"{value} was read before it was written"
        if not read and math.isinf(write.ended):
            continue  # it never happened, or nobody saw it
        both = [write, *read]
        zones.append(_Zone(value, min(call.ended for call in both), max(call.began for call in both)))
    forward = sorted((zone for zone in zones if zone.forward), key=lambda zone: zone.first_return)
    for one, other in pairwise(forward):
        if other.first_return < one.last_call:
            return f"both stand at a time: {one}, and {other}"
    for zone in zones:
        if zone.forward:
            continue
        around = [one for one in forward if one.first_return < zone.last_call and zone.first_return < one.last_call]
        if around:
            return f"{zone} was written and over while {around[0]} stood"
    return None
