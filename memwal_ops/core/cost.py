"""Estimate what a run will use, by the past runs of its job on its table (:func:`expected_cost`), and what that costs.

List prices of stores are those without discounts, in USD, of the source and date that each names. They differ by region
and by contract: ``prices`` in a configuration replaces any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

from memwal_ops import text
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.usage import rows_done
from memwal_ops.storage.metering import KINDS

CURRENCY = "USD"
_GIB = 1 << 30
_REQUESTS = 1000
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one store.

    Attributes:
        get: of 1,000 GET and HEAD requests.
        put: of 1,000 PUT and COPY requests, and parts of uploads.
        list: of 1,000 LIST requests.
        delete: of 1,000 DELETE requests.
        read: of a GiB that is read; a reader in the same region mostly pays nothing.
        written: of a GiB that is written.
        stored: of a GiB that is stored for a month.
        cpu: of an hour of one core of the machine that runs the jobs.
        date: when the source had these prices.
        source: where they are from.
    """

    get: float = 0.0
    put: float = 0.0
    list: float = 0.0
    delete: float = 0.0
    read: float = 0.0
    written: float = 0.0
    stored: float = 0.0
    cpu: float = 0.0
    date: str = ""
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry of ``prices``."""
        return asdict(self)


LIST_PRICES: Mapping[str, Prices] = {
    "s3": Prices(
        get=0.0004,
        put=0.005,
        list=0.005,
        stored=0.023,
        date="2025-01",
        source="https://aws.amazon.com/s3/pricing/ (S3 Standard, us-east-1)",
    ),
    "gcs": Prices(
        get=0.0004,
        put=0.005,
        list=0.005,
        stored=0.020,
        date="2025-01",
        source="https://cloud.google.com/storage/pricing (Standard, us-central1)",
    ),
    "azure": Prices(
        get=0.0004,
        put=0.005,
        list=0.005,
        stored=0.018,
        date="2025-01",
        source="https://azure.microsoft.com/pricing/details/storage/blobs/ (Hot, LRS, East US)",
    ),
    "local": Prices(),
}
"""By the store that a run's ``used`` names."""


def money_of(used: Mapping[str, Any], prices: Mapping[str, Prices]) -> float:
    """What a run cost."""
    price = prices.get(str(used.get("store")), Prices())
    requests = used.get("requests") or {}
    asked = sum(float(requests.get(kind, 0)) * float(getattr(price, kind)) for kind in KINDS) / _REQUESTS
    moved = float(used.get("bytes_read") or 0) * price.read + float(used.get("bytes_written") or 0) * price.written
    return asked + moved / _GIB + float(used.get("cpu_seconds") or 0) / _HOUR * price.cpu


def monthly_storage(size: float, store: str, prices: Mapping[str, Prices]) -> float:
    """What so many bytes cost in a month."""
    return size / _GIB * prices.get(store, Prices()).stored


def money_text(amount: float, currency: str = CURRENCY) -> str:
    """An amount with two decimals, or with two digits if it is less: ``$1.20``, ``$0.0042``, ``0.50 EUR``."""
    digits = f"{amount:,.2f}" if amount >= 0.01 or not amount else f"{amount:.2g}"  # noqa: PLR2004 - a cent
    if "e" in digits:
        digits = "0.00"
    return f"${digits}" if currency == CURRENCY else f"{digits} {currency}"


MAX_RUNS = 12
"""So many past runs are used."""
_TO_FIT = 3  # runs of different sizes, from which a fixed part and a part by size can be told apart
_MIN_FOR_ERROR = 2


@dataclass(frozen=True, slots=True)
class Spent:
    """What one past run spent.

    Attributes:
        used: its document, see :class:`memwal_ops.core.usage.Measurement`.
        work: how much it did, see :func:`memwal_ops.core.outlook.rows_done`; 0: nothing, or that cannot be told.
        achieved: what it achieved, see :func:`memwal_ops.core.usage.achieved_by`.
    """

    seconds: float
    used: Mapping[str, Any]
    work: float
    achieved: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run will cost.

    Attributes:
        money: in ``currency``.
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

    ``work``: how much the next one has to do; None: that is not known.
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
    parts = [f"{_rounded(sum(cost['requests'].values())):,} requests", text.size_text(moved)]
    parts += [money_text(cost["money"], cost["currency"])] if cost["money"] else []
    parts.append(text.time_text(max(1.0, cost["seconds"])))
    runs = cost["runs"]
    by = f"by the last {text.counted(runs, 'run') if runs > 1 else 'run'}"
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
    """An amount for so much work, by points of work and amount: a fixed part and one by work, or else a median."""
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
        relative_error(
            _estimate([(previous.work, amount(previous)) for previous in older_first[:number]], run.work), amount(run)
        )
        for number, run in enumerate(older_first)
        if number
    ]
    return median(errors) if len(errors) >= _MIN_FOR_ERROR else None


def _requests(kind: str, run: Spent) -> float:
    return float((run.used.get("requests") or {}).get(kind, 0))


def _rounded(number: float) -> int:
    whole = round(number)
    digits = len(str(whole)) - 2
    return round(whole, -digits) if digits > 0 else whole
