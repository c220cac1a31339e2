"""What the conductor writes into the history and asks of it. A history that fails is logged, and stops no table.

Its disk may be full, or somebody may hold the file: the tables' maintenance goes on, and what is not known counts
as if nothing had run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.errors import HistoryError
from memwal_ops.log import get_logger
from memwal_ops.supervisor.history import LastRuns

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from memwal_ops.supervisor.clock import Clock
    from memwal_ops.supervisor.history import History
    from memwal_ops.supervisor.state import Entry

_BUDGET_SECONDS = 30.0


class Account:
    """The history as the conductor sees it.

    Args:
        supervisor: who writes.
    """

    def __init__(self, history: History, supervisor: str, clock: Clock) -> None:
        """Nothing is asked yet."""
        self._history = history
        self._supervisor = supervisor
        self._clock = clock
        self._spent: dict[tuple[str, str], tuple[float, bool]] = {}
        self._log = get_logger(__name__)

    def begin(self, entry: Entry, plan: Mapping[str, Any], now: datetime) -> int | None:
        """A run begins; its number, or None where it could not be written."""
        try:
            return self._history.begin(
                table=entry.table.name,
                uri=entry.table.uri,
                job=entry.settings.name,
                supervisor=self._supervisor,
                why=entry.why,
                plan=plan,
                now=now,
            )
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))
            return None

    def finish(self, entry: Entry, number: int | None, now: datetime, outcome: str, details: Mapping[str, Any]) -> None:
        """A run of ``entry`` has ended; what was spent of its budget is counted anew."""
        self._spent.pop(entry.key, None)
        if number is None:
            return
        try:
            self._history.finish(number, now, outcome, **details)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))

    def last(self, table: str, job: str, now: datetime) -> LastRuns:
        """What is known of a job on a table, which is known from now on."""
        try:
            self._history.see(table, job, now)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))
        try:
            return self._history.last(table, job, now).by(now)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return LastRuns(now, None, None, None, None, 0)

    def is_over_budget(self, entry: Entry) -> bool:
        """Whether the runs of a job have taken the time that they have; looked up twice a minute."""
        budget = entry.settings.budget
        if budget is None:
            return False
        mono = self._clock.monotonic()
        checked, over = self._spent.get(entry.key, (-_BUDGET_SECONDS, False))
        if mono - checked >= _BUDGET_SECONDS or entry.finished is None:
            since = self._clock.now() - budget.per
            try:
                over = self._history.seconds_since(*entry.key, since) >= budget.time.total_seconds()
            except HistoryError as error:
                self._log.error("history_not_read", error=str(error))
            self._spent[entry.key] = (mono, over)
        return over
