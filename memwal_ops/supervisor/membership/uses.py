"""What members of a fleet publish of what they use, and what each counts of the others.

A charge is written as the seconds that are left of it. A reader adds the age of the record, by the clock of the store:
no time that another machine wrote is compared. A state folder has one history of runs: of several records with its
identity the newest counts, whatever the names of the members, and its own supervisor counts its history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.fleet_budget import CHARGED, NOTHING, Amounts, Charge, Others

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    Published = Mapping[str, Any]

MAX_CHARGES = 32
# More than anything that a run uses: a record that says so is not believed.
_MOST = 1e18
_SAME = ("limits", "per", "shadow")


@dataclass(frozen=True, slots=True)
class Use:
    """What one member uses.

    Attributes:
        instance: of its state folder.
        written: when it wrote that, by the clock of the store.
        charges: they end by the clock of the reader.
        in_flight: what its runs are expected to use.
    """

    instance: str
    written: datetime
    charges: tuple[Charge, ...]
    in_flight: Amounts


def published(
    limits: Mapping[str, float], per: float, charges: Iterable[Charge], in_flight: Amounts, now: float, *, shadow: bool
) -> dict[str, Any]:
    """What a member writes of its budget: ``MAX_CHARGES`` charges at most, none of which ends too early."""
    left = [(one.ends - now, one) for one in charges if one.ends > now]
    step = max((seconds for seconds, _ in left), default=0.0) / MAX_CHARGES
    sums: dict[int, tuple[Amounts, Amounts]] = {}
    for seconds, one in left:
        part = min(MAX_CHARGES, math.ceil(seconds / step))
        used, kept = sums.get(part, (NOTHING, NOTHING))
        sums[part] = used.plus(one.used), kept.plus(one.kept)
    written = [[part * step, *used, *(kept if any(kept) else ())] for part, (used, kept) in sorted(sums.items())]
    return {
        "limits": dict(limits),
        "per": per,
        "shadow": shadow,
        "in_flight": _short(in_flight),
        "charges": [_short(one) for one in written],
    }


def as_ended(found: Published) -> dict[str, Any]:
    """What is kept of a member that ended: what its runs were expected to use counts as used."""
    charges = [*found["charges"], *([[found["per"], *found["in_flight"]]] if any(found["in_flight"]) else [])]
    return {**found, "charges": charges, "in_flight": [0.0] * len(NOTHING)}


def aged(found: Published, age: float) -> dict[str, Any]:
    """The same, as it is some seconds later."""
    charges = [[_number(left) - age, *amounts] for left, *amounts in found["charges"]]
    return {**found, "charges": [one for one in charges if one[0] > 0]}


def use_of(
    instance: str, found: Published | None, written: datetime, store_now: datetime, now: float, per: float = math.inf
) -> Use | None:
    """What a record says, by the clock of the reader; None: nothing, or nothing that can be read.

    Args:
        instance: of its state folder.
        found: what :func:`published` returned there.
        written: when it was written, by the clock of the store.
        store_now: the time of the store.
        now: the time of the reader.
        per: of the reader's budget: whatever the limits of the other are, it is charged as long as a run of the reader.
    """
    if found is None:
        return None
    try:
        charges = [[min(_number(left), CHARGED * per), *amounts] for left, *amounts in found["charges"]]
        later = aged({"charges": charges}, max(0.0, (store_now - written).total_seconds()))
        ends = tuple(_charge(one, now) for one in later["charges"][: 2 * MAX_CHARGES])
        return Use(instance, written, ends, _amounts(found["in_flight"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def others_of(uses: Iterable[Use | None], instance: str, living: int, until: float) -> Others:
    """What others use; ``instance``: that of the reader. See :class:`Others`."""
    newest: dict[str, Use] = {}
    for use in uses:
        if use is not None and use.instance != instance:
            known = newest.get(use.instance)
            newest[use.instance] = use if known is None or known.written <= use.written else known
    in_flight = NOTHING
    for use in newest.values():
        in_flight = in_flight.plus(use.in_flight)
    return Others(tuple(charge for use in newest.values() for charge in use.charges), in_flight, living, until)


def is_same(one: Published | None, other: Published | None) -> bool:
    """Whether two members have the same budget, or both none."""
    if one is None or other is None:
        return one is other
    return all(one.get(name) == other.get(name) for name in _SAME)


def _charge(numbers: Sequence[object], now: float) -> Charge:
    left, used, kept = _number(numbers[0]), numbers[1:5], numbers[5:9]
    return Charge(now + left, _amounts(used), _amounts(kept) if kept else NOTHING)


def _amounts(numbers: Iterable[object]) -> Amounts:
    return Amounts(*(_number(one) for one in numbers))


def _number(found: object) -> float:
    number = float(found)  # type: ignore[arg-type]  # raises what use_of expects
    if not 0 <= number <= _MOST:
        raise ValueError(f"{number} is below 0, or more than any run uses")
    return number


def _short(numbers: Iterable[float]) -> list[float]:
    return [float(f"{one:.6g}") for one in numbers]
