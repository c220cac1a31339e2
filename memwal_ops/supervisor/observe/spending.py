"""What the runs of a history used, what that cost, and what they achieved (:func:`ledger_document`).

For the page of all tables, the last week is summed up table by table (:class:`Spending`). Each run is read once, when
it has ended: a history of 200,000 runs takes seconds to read, and pages never wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, Literal, Protocol

from memwal_ops.core import cost
from memwal_ops.core.usage import SUMS
from memwal_ops.storage.metering import KINDS
from memwal_ops.supervisor.config.model import PricesConfig
from memwal_ops.supervisor.state.history import FAILURES
from memwal_ops.supervisor.state.outcomes import OVER_BUDGET

Spent = tuple[dict[str, Any], Sequence[Mapping[str, Any]]]


By = Literal["table", "job", "day"]
BY: tuple[By, ...] = ("table", "job", "day")


@dataclass(slots=True)
class Sums:
    """The sums of some runs; see :meth:`to_json`."""

    runs: int = 0
    polls: int = 0
    failed: int = 0
    unmeasured: int = 0
    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    peak_memory: int = 0
    money: float = 0.0
    achieved: Counter[str] = field(default_factory=Counter)
    saves: float = 0.0

    def add(self, run: Mapping[str, Any], prices: Mapping[str, cost.Prices]) -> None:
        """Add one run of :meth:`memwal_ops.supervisor.state.history.History.ledger`."""
        used, achieved = run["used"], run["achieved"] or {}
        self.runs += 1
        self.failed += run["outcome"] in FAILURES
        self.seconds += max(0.0, run["finished"] - run["started"])
        if not used:
            self.unmeasured += 1
            return
        self._add_used(used, prices)
        self.peak_memory = max(self.peak_memory, used.get("peak_memory") or 0)
        self.achieved.update({name: achieved[name] for name in SUMS if name in achieved})
        self.saves += cost.monthly_storage(achieved.get("bytes_freed", 0), str(used.get("store")), prices)

    def add_sums(self, other: Sums) -> None:
        """Add the runs of others."""
        for name in ("runs", "failed", "unmeasured", "seconds", "money", "saves"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("requests", "used", "achieved"):
            getattr(self, name).update(getattr(other, name))

    def add_polls(self, polls: Mapping[str, Any], prices: Mapping[str, cost.Prices]) -> None:
        """Add one entry of :meth:`memwal_ops.supervisor.state.history.History.polls`."""
        self.polls += polls["polls"]
        self._add_used(polls["used"], prices)

    def _add_used(self, used: Mapping[str, Any], prices: Mapping[str, cost.Prices]) -> None:
        self.requests.update(used.get("requests") or {})
        self.used.update({name: used.get(name) or 0 for name in ("bytes_read", "bytes_written", "cpu_seconds")})
        self.money += cost.money_of(used, prices)

    def to_json(self) -> dict[str, Any]:
        """The sums: ``money`` is what they cost, ``saves_monthly`` what storing the bytes they freed would."""
        return {
            "runs": self.runs,
            "polls": self.polls,
            "failed": self.failed,
            "unmeasured": self.unmeasured,
            "seconds": round(self.seconds, 3),
            "requests": {kind: int(self.requests[kind]) for kind in KINDS},
            "bytes_read": int(self.used["bytes_read"]),
            "bytes_written": int(self.used["bytes_written"]),
            "cpu_seconds": round(self.used["cpu_seconds"], 3),
            "peak_memory": self.peak_memory,
            "money": round(self.money, 6),
            "achieved": {name: int(self.achieved[name]) for name in SUMS},
            "saves_monthly": round(self.saves, 6),
        }


@dataclass(slots=True)
class Shadow:
    """What a shadow budget would have done. Runs held back, with their money, and others begun first."""

    held: int = 0
    money: float = 0.0
    others: int = 0

    def add(self, run: Mapping[str, Any], prices: Mapping[str, cost.Prices]) -> None:
        """Add one run of a ledger."""
        would = ((run["plan"] or {}).get("shadow") or {}).get("would")
        self.others += would == "run_other"
        if would == OVER_BUDGET:
            self.held += 1
            self.money += cost.money_of(run["used"] or {}, prices)

    def to_json(self) -> dict[str, Any]:
        """The entry ``shadow``."""
        return {"held": self.held, "money": round(self.money, 6), "others": self.others}


def ledger_document(
    runs: Iterable[Mapping[str, Any]],
    prices: Mapping[str, cost.Prices],
    currency: str,
    by: By,
    since: datetime,
    polls: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The document of ``memwal-ops cost``: the sums of all runs, and of those of each table, job or day.

    The dearest first, days in their order. ``polls``: what of that is of polls. ``shadow``: what a budget that is a
    shadow would have done. ``estimates``: how wrong those were that were made when runs began.
    """
    groups: dict[str, Sums] = {}
    total = Sums()
    errors: list[float] = []
    polled, shadow = Sums(), Shadow()
    for poll in polls:
        for sums in (groups.setdefault("poll" if by == "job" else poll[by], Sums()), total, polled):
            sums.add_polls(poll, prices)
    for run in runs:
        key = f"{datetime.fromtimestamp(run['started'], UTC):%Y-%m-%d}" if by == "day" else str(run[by])
        groups.setdefault(key, Sums()).add(run, prices)
        total.add(run, prices)
        errors += _errors(run, prices)
        shadow.add(run, prices)
    parts = [{by: key, **sums.to_json()} for key, sums in groups.items()]
    if by == "day":
        parts.sort(key=lambda entry: str(entry["day"]))
    else:
        parts.sort(key=lambda entry: (-entry["money"], -entry["cpu_seconds"], entry[by]))
    return {
        "since": since.isoformat(timespec="seconds"),
        "currency": currency,
        "by": by,
        "groups": parts,
        "total": total.to_json(),
        "polls": {"polls": polled.polls, "requests": sum(polled.requests.values()), "money": round(polled.money, 6)},
        "shadow": shadow.to_json(),
        "estimates": {"runs": len(errors), "error": round(median(errors), 3) if errors else None},
        "prices": {store: price.to_json() for store, price in prices.items()},
    }


def _errors(run: Mapping[str, Any], prices: Mapping[str, cost.Prices]) -> list[float]:
    expected = (run["plan"] or {}).get("cost")
    if not expected or not run["used"] or run["outcome"] != "succeeded":
        return []
    actual = cost.money_of(run["used"], prices)
    if actual:
        return [cost.relative_error(float(expected["money"]), actual)]
    return [cost.relative_error(float(expected["seconds"]), max(0.001, run["finished"] - run["started"]))]


WEEK = timedelta(days=7)
_BUCKET_SECONDS = 6 * 3600
_CHUNK = 2000
_VALID_SECONDS, _MAX_KNOWN = 60.0, 200


class UsageLedger(Protocol):
    """The run history, as far as it has what runs used."""

    def first_run(self, since: datetime) -> int:
        """Return a number below those of all runs that started since a time."""

    def used_by(self, after: int, running: Collection[int], limit: int) -> Sequence[Mapping[str, Any]]:
        """Return what runs used and achieved: of those above a number at most ``limit``, and of others."""

    def ledger(self, since: datetime, table: str | None = None) -> Iterable[Mapping[str, Any]]:
        """Return what each run used and achieved that ended since a time."""


class Spending:
    """What runs cost. Safe on any thread."""

    def __init__(self, history: UsageLedger, prices: Callable[[], PricesConfig]) -> None:
        self._history, self._prices = history, prices
        self._lock = threading.Lock()
        self._began: PricesConfig | None = None
        self._after, self._running = 0, set[int]()
        self._buckets: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._sums: defaultdict[int, Sums] = defaultdict(Sums)
        self._week: dict[str, float] = {}
        self._total, self._read_at = Sums(), ""
        self._spent: dict[tuple[str, timedelta], tuple[float, Spent]] = {}

    @property
    def currency(self) -> str:
        """The currency of all amounts."""
        return self._prices().currency

    def week(self) -> Mapping[str, float]:
        """Return what the runs of the last seven days cost, by table, as last read; without tables that ran nothing."""
        return self._week

    def total(self) -> dict[str, Any]:
        """Return the sums of the runs of the last seven days, see :meth:`Sums.to_json`; ``read``: as of when."""
        return {**self._total.to_json(), "read": self._read_at}

    def read(self) -> None:
        """Read the runs that have ended since the last call; all of the week at first, and when prices have changed.

        Raises ``HistoryError``: the history cannot be read.
        """
        with self._lock:
            configured, now = self._prices(), datetime.now(UTC)
            if configured != self._began:
                self._after, self._running = self._history.first_run(now - WEEK), set()
                self._buckets.clear()
                self._sums.clear()
                self._began = configured
            prices, more = configured.by_store(), True
            while more:
                runs = self._history.used_by(self._after, self._running, _CHUNK)
                more = sum(run["id"] > self._after for run in runs) == _CHUNK
                for run in runs:
                    self._add(run, prices)
            self._sum_up(now)

    def _add(self, run: Mapping[str, Any], prices: Mapping[str, cost.Prices]) -> None:
        number, table, ended, used = (run[name] for name in ("id", "table", "finished", "used"))
        self._after = max(self._after, number)
        if ended is None:
            self._running.add(number)
            return
        self._running.discard(number)
        self._sums[int(ended // _BUCKET_SECONDS)].add(run, prices)
        if used:
            bucket = self._buckets[int(ended // _BUCKET_SECONDS)]
            bucket[table] = bucket.get(table, 0.0) + cost.money_of(used, prices)

    def _sum_up(self, now: datetime) -> None:
        first = int((now - WEEK).timestamp() // _BUCKET_SECONDS)
        week: dict[str, float] = {}
        for at, bucket in [*self._buckets.items()]:
            if at < first:
                del self._buckets[at]
                continue
            for table, money in bucket.items():
                week[table] = week.get(table, 0.0) + money
        self._week, self._total, self._read_at = week, Sums(), now.isoformat()
        for at in [*self._sums]:
            if at < first:
                del self._sums[at]
            else:
                self._total.add_sums(self._sums[at])

    def of(self, table: str, span: timedelta) -> Spent:
        """Return the ledger of a table of the last seven days by job, and the runs of a time with their ``money``.

        Both are at most a minute old: a table may have run ten thousand times, and its page refreshes itself.

        ``span``: of the runs, the oldest of them first.
        """
        known, now = self._spent.get((table, span)), time.monotonic()
        if known is not None and now - known[0] < _VALID_SECONDS:
            return known[1]
        spending = self._read_of(table, span)
        with self._lock:
            if len(self._spent) >= _MAX_KNOWN:
                self._spent.clear()
            self._spent[table, span] = (now, spending)
        return spending

    def _read_of(self, table: str, span: timedelta) -> Spent:
        prices, now = self._prices().by_store(), datetime.now(UTC)
        since, week = now - span, now - WEEK
        runs = [*self._history.ledger(min(since, week), table)]
        recent = [run for run in runs if run["finished"] >= week.timestamp()]
        ended = [run for run in reversed(runs) if run["finished"] >= since.timestamp()]
        document = ledger_document(recent, prices, self.currency, "job", week)
        return document, [{**run, "money": cost.money_of(run["used"] or {}, prices)} for run in ended]
