"""Estimate what a run will cost, by what the past runs of its job on its table used (:func:`expected_cost`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from memwal_ops.core.outlook import rows_done
from memwal_ops.core.prices import CURRENCY, LIST_PRICES, money_of, money_text
from memwal_ops.storage.metering import KINDS
from memwal_ops.text import counted, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memwal_ops.core.past_runs import PastRun
    from memwal_ops.core.prices import Prices

MAX_RUNS = 12
"""So many past runs are used."""
_TO_FIT = 3  # runs of different sizes, from which a fixed part and a part by size can be told apart
_MIN_FOR_ERROR = 2


@dataclass(frozen=True, slots=True)
class Spent:
    """What one past run spent.

    Attributes:
        seconds: how long it took.
        used: its document, see :class:`memwal_ops.core.usage.Measurement`.
        work: how much it did, see :func:`memwal_ops.core.outlook.rows_done`; 0: nothing, or that cannot be told.
        achieved: what it achieved, see :func:`memwal_ops.core.achieved.achieved_by`.
    """

    seconds: float
    used: Mapping[str, Any]
    work: float
    achieved: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run will cost.

    Attributes:
        requests: by kind.
        bytes_read: of objects.
        bytes_written: of objects.
        cpu_seconds: processor time.
        seconds: how long it takes.
        money: in ``currency``.
        currency: that of the prices.
        runs: how many past runs it is estimated by.
        error: by how much the same estimate was wrong about these runs, in the median: 0.1 is 10 %; None: too few.
    """

    requests: Mapping[str, float]
    bytes_read: float
    bytes_written: float
    cpu_seconds: float
    seconds: float
    money: float
    currency: str
    runs: int
    error: float | None

    def to_json(self) -> dict[str, Any]:
        """The document ``cost``."""
        return {
            "requests": {kind: round(number) for kind, number in self.requests.items()},
            "bytes_read": round(self.bytes_read),
            "bytes_written": round(self.bytes_written),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "seconds": round(self.seconds, 3),
            "money": round(self.money, 6),
            "currency": self.currency,
            "runs": self.runs,
            "error": None if self.error is None else round(self.error, 3),
        }


def spent_by(job: str, runs: Iterable[PastRun]) -> tuple[Spent, ...]:
    """What past runs of a job spent, of those that recorded it, the newest first."""
    recorded = (run for run in runs if run.used)
    return tuple(
        Spent(
            run.seconds,
            run.used or {},
            float((run.used or {}).get("work") or rows_done(job, run.report)),
            run.achieved or {},
        )
        for run in recorded
    )[:MAX_RUNS]


def expected_cost(
    past: Sequence[Spent],
    work: float | None = None,
    prices: Mapping[str, Prices] = LIST_PRICES,
    currency: str = CURRENCY,
) -> Cost | None:
    """What the next run will cost; None if no past run shows it.

    Args:
        past: what past runs spent, the newest first.
        work: how much the next one has to do; None: that is not known.
        prices: by store.
        currency: that of the prices.
    """
    alike = _comparable(past, work)
    if not alike:
        return None

    def guess(amount: Callable[[Spent], float]) -> float:
        return _estimate([(run.work, float(amount(run))) for run in alike], work)

    return Cost(
        requests={kind: guess(partial(_requests, kind)) for kind in KINDS},
        bytes_read=guess(lambda run: run.used.get("bytes_read") or 0),
        bytes_written=guess(lambda run: run.used.get("bytes_written") or 0),
        cpu_seconds=guess(lambda run: run.used.get("cpu_seconds") or 0),
        seconds=guess(lambda run: run.seconds),
        money=guess(lambda run: money_of(run.used, prices)),
        currency=currency,
        runs=len(alike),
        error=_error(alike, prices),
    )


def describe_cost(cost: Mapping[str, Any]) -> str:
    """The document ``cost`` as a clause: ``about 3,100 requests, 4.2 GiB, $0.02, 40 s, by the last 12 runs``."""
    moved = cost["bytes_read"] + cost["bytes_written"]
    parts = [f"{_rounded(sum(cost['requests'].values())):,} requests", size_text(moved)]
    parts += [money_text(cost["money"], cost["currency"])] if cost["money"] else []
    parts.append(time_text(max(1.0, cost["seconds"])))
    runs = cost["runs"]
    by = f"by the last {counted(runs, 'run') if runs > 1 else 'run'}"
    error = "" if cost["error"] is None else f", whose own cost this tells within {cost['error']:.0%}"
    return f"about {', '.join(parts)}, {by}{error}"


def relative_error(expected: float, actual: float) -> float:
    """By how much an estimate was wrong, relative to what came; at most 10."""
    if expected == actual:
        return 0.0
    return min(10.0, abs(expected - actual) / actual) if actual else 10.0


def _comparable(past: Sequence[Spent], work: float | None) -> list[Spent]:
    """Of the past runs those that say something about one with so much work: none that did nothing, if it is to act."""
    acted = [run for run in past if run.work]
    return (acted or [*past])[:MAX_RUNS] if work is None or work else [*past][:MAX_RUNS]


def _estimate(points: Sequence[tuple[float, float]], work: float | None) -> float:
    """An amount for so much work: a fixed part and one by work, if runs of different sizes show these; else a median.

    Args:
        points: of each past run its work, and the amount.
        work: that of the next run.
    """
    sizes = {size for size, _ in points if size}
    if not work or not sizes:
        return median(amount for _, amount in points)
    if len(sizes) < _TO_FIT:
        # Two points say little: more work costs more, and less work not less.
        return median(amount * max(1.0, work / size) for size, amount in points if size)
    by_size = sum(size for size, _ in points) / len(points)
    mean = sum(amount for _, amount in points) / len(points)
    spread = sum((size - by_size) ** 2 for size, _ in points)
    slope = sum((size - by_size) * (amount - mean) for size, amount in points) / spread
    fixed = mean - slope * by_size
    if slope <= 0:
        return median(amount for _, amount in points)
    return fixed + slope * work if fixed >= 0 else work * mean / by_size


def _error(past: Sequence[Spent], prices: Mapping[str, Prices]) -> float | None:
    """How wrong the estimate was about each past run, by those before it: of its money, or of its time if that is 0."""
    older_first = [*reversed(past)]

    def amount(run: Spent) -> float:
        return money_of(run.used, prices) or run.seconds

    errors = [
        relative_error(_estimate([(one.work, amount(one)) for one in older_first[:number]], run.work), amount(run))
        for number, run in enumerate(older_first)
        if number
    ]
    return median(errors) if len(errors) >= _MIN_FOR_ERROR else None


def _requests(kind: str, run: Spent) -> float:
    return float((run.used.get("requests") or {}).get(kind, 0))


def _rounded(number: float) -> int:
    """With two digits: an estimate has no more."""
    whole = round(number)
    digits = len(str(whole)) - 2
    return round(whole, -digits) if digits > 0 else whole
