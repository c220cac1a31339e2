"""Sum up what the runs of the last week cost, table by table, for the page of all tables (:class:`Spending`).

Each run is read once, when it has ended: a history of 200,000 runs takes seconds to read, and pages never wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from memwal_ops.core.prices import money_of
from memwal_ops.supervisor.observe.ledger import ledger_document

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from memwal_ops.core.prices import Prices

    Spent = tuple[dict[str, Any], Sequence[tuple[float, float]]]
    EndedRun = tuple[int, str, float | None, Mapping[str, Any] | None]

WEEK = timedelta(days=7)
_BUCKET_SECONDS = 6 * 3600
_CHUNK = 2000
_VALID_SECONDS, _MAX_KNOWN = 60.0, 200


class Ledger(Protocol):
    """The run history, as far as it has what runs used."""

    def first_run(self, since: datetime) -> int:
        """Return a number below those of all runs that started since a time."""

    def used_by(self, after: int, running: Collection[int], limit: int) -> Sequence[EndedRun]:
        """Return number, table, end and ``used`` of runs: of those above a number at most ``limit``, and of others."""

    def ledger(self, since: datetime, table: str | None = None) -> Iterable[Mapping[str, Any]]:
        """Return what each run used and achieved that ended since a time."""


class Configured(Protocol):
    """The prices of a configuration."""

    @property
    def currency(self) -> str:
        """Of all prices."""

    def by_store(self) -> Mapping[str, Prices]:
        """Return the prices by store."""


class Spending:
    """What runs cost. Safe on any thread.

    Args:
        history: the runs.
        prices: returns the prices of the configuration in effect.
    """

    def __init__(self, history: Ledger, prices: Callable[[], Configured]) -> None:
        """Read nothing yet."""
        self._history, self._prices = history, prices
        self._lock = threading.Lock()
        self._began: Configured | None = None
        self._after, self._running = 0, set[int]()
        self._buckets: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._week: dict[str, float] = {}
        self._spent: dict[tuple[str, timedelta], tuple[float, Spent]] = {}

    @property
    def currency(self) -> str:
        """The currency of all amounts."""
        return self._prices().currency

    def week(self) -> Mapping[str, float]:
        """Return what the runs of the last seven days cost, by table, as last read; without tables that ran nothing."""
        return self._week

    def read(self) -> None:
        """Read the runs that have ended since the last call; all of the week at first, and when prices have changed.

        Raises:
            HistoryError: the history cannot be read.
        """
        with self._lock:
            configured, now = self._prices(), datetime.now(UTC)
            if configured != self._began:
                self._after, self._running = self._history.first_run(now - WEEK), set()
                self._buckets.clear()
                self._began = configured
            prices, more = configured.by_store(), True
            while more:
                found = self._history.used_by(self._after, self._running, _CHUNK)
                more = sum(number > self._after for number, *_ in found) == _CHUNK
                for run in found:
                    self._add(*run, prices)
            self._sum_up(now)

    def _add(
        self, number: int, table: str, ended: float | None, used: Mapping[str, Any] | None, prices: Mapping[str, Prices]
    ) -> None:
        self._after = max(self._after, number)
        if ended is None:
            self._running.add(number)
            return
        self._running.discard(number)
        if used:
            bucket = self._buckets[int(ended // _BUCKET_SECONDS)]
            bucket[table] = bucket.get(table, 0.0) + money_of(used, prices)

    def _sum_up(self, now: datetime) -> None:
        first = int((now - WEEK).timestamp() // _BUCKET_SECONDS)
        week: dict[str, float] = {}
        for at, bucket in [*self._buckets.items()]:
            if at < first:
                del self._buckets[at]
                continue
            for table, money in bucket.items():
                week[table] = week.get(table, 0.0) + money
        self._week = week

    def of(self, table: str, span: timedelta) -> Spent:
        """Return the ledger of a table of the last seven days by its jobs, and what each run of a time cost.

        Both are at most a minute old: a table may have run ten thousand times, and its page refreshes itself.

        Args:
            table: its name.
            span: of the runs in the second: when each ended, in seconds since 1970, and its cost.
        """
        known, now = self._spent.get((table, span)), time.monotonic()
        if known is not None and now - known[0] < _VALID_SECONDS:
            return known[1]
        found = self._read_of(table, span)
        with self._lock:
            if len(self._spent) >= _MAX_KNOWN:
                self._spent.clear()
            self._spent[table, span] = (now, found)
        return found

    def _read_of(self, table: str, span: timedelta) -> Spent:
        prices, now = self._prices().by_store(), datetime.now(UTC)
        since, week = now - span, now - WEEK
        runs = [*self._history.ledger(min(since, week), table)]
        recent = [run for run in runs if run["finished"] >= week.timestamp()]
        spent = [(run["finished"], money_of(run["used"], prices)) for run in reversed(runs) if run["used"]]
        document = ledger_document(recent, prices, self.currency, "job", week)
        return document, [one for one in spent if one[0] >= since.timestamp()]
