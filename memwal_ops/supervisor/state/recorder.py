"""Record the scheduler's runs in the history, and read them back. A failure is logged, and stops no table.

The disk may be full, or another process may lock the file: the maintenance of tables continues, and a job with
unreadable runs counts as one that never ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.cost import MAX_RUNS, spent_by
from memwal_ops.core.next_run import rates_of
from memwal_ops.core.past_runs import PastRun
from memwal_ops.errors import HistoryError
from memwal_ops.log import get_logger
from memwal_ops.storage.metering import KINDS
from memwal_ops.supervisor.state.history import LastRuns
from memwal_ops.supervisor.state.outcomes import charged_runs, last_answers, past_runs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from memwal_ops.core.cost import Spent
    from memwal_ops.core.next_run import Rate
    from memwal_ops.core.prices import Prices
    from memwal_ops.supervisor.scheduling.clock import Clock
    from memwal_ops.supervisor.state.history import History
    from memwal_ops.supervisor.state.outcomes import Charged
    from memwal_ops.supervisor.state.tables import TableJob

_BUDGET_SECONDS = 30.0
# Of these, the newest one that asked: others failed.
_WITH_REPORT = 10


class RunRecorder:
    """Wraps the history for the scheduler.

    Args:
        supervisor: the name of this supervisor, recorded with each run.
    """

    def __init__(self, history: History, supervisor: str, clock: Clock) -> None:
        """Read nothing yet."""
        self._history = history
        self._supervisor = supervisor
        self._clock = clock
        self._past: dict[tuple[str, str, str], tuple[Spent, ...]] = {}
        self._spent: dict[tuple[str, str], tuple[float, bool]] = {}
        self._polls: dict[tuple[str, str, str], list[float]] = {}
        self._log = get_logger(__name__)

    def begin(self, entry: TableJob, plan: Mapping[str, Any], now: datetime) -> int | None:
        """Record the start of a run; return its number, or None if it could not be written."""
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

    def finish(
        self, entry: TableJob, number: int | None, now: datetime, outcome: str, details: Mapping[str, Any]
    ) -> None:
        """Record the end of a run of ``entry``; the time that it has spent of its budget is read again."""
        self._spent.pop(entry.key, None)
        if number is None:
            return
        try:
            self._history.finish(number, now, outcome, **details)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))

    def last(self, table: str, uri: str, job: str, now: datetime) -> LastRuns:
        """Return the last runs of a job on a table, and record when the job was first seen."""
        try:
            self._history.record_first_seen(table, job, now)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))
        try:
            return self._history.last(table, uri, job, now).clamped(now)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return LastRuns(now, None, None, None, None, 0)

    def last_answers(self, table: str, uri: str, job: str) -> list[Mapping[str, Any]]:
        """Return how well indexes answered, by the last run of a job that asked them."""
        try:
            runs = self._history.runs(table=table, job=job, limit=_WITH_REPORT)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return []
        return last_answers(run for run in runs if run["uri"] == uri)

    def rates(self, table: str, uri: str, job: str) -> tuple[Rate, ...]:
        """Return how fast the last runs of a job wrote rows of a table."""
        try:
            runs = self._history.runs(table=table, job=job, limit=_WITH_REPORT)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return ()
        return rates_of(job, past_runs(run for run in runs if run["uri"] == uri))

    def spent(self, entry: TableJob) -> tuple[Spent, ...]:
        """What the last runs of a job spent, the newest first; read from the history once."""
        key = (*entry.key, entry.table.uri)
        if key not in self._past:
            self._past[key] = ()
            try:
                runs = self._history.spent(entry.table.name, entry.table.uri, entry.settings.name, MAX_RUNS)
                self._past[key] = spent_by(
                    entry.settings.name, (PastRun(seconds, {}, used, achieved) for seconds, used, achieved in runs)
                )
            except HistoryError as error:
                self._log.error("history_not_read", error=str(error))
        return self._past[key]

    def add_spent(
        self, entry: TableJob, seconds: float, used: Mapping[str, Any] | None, achieved: Mapping[str, float] | None
    ) -> None:
        """Add a run that succeeded."""
        key = (*entry.key, entry.table.uri)
        newest = spent_by(entry.settings.name, [PastRun(seconds, {}, used, achieved)])
        self._past[key] = (*newest, *self.spent(entry))[:MAX_RUNS]

    def add_poll(self, table: str, used: Mapping[str, Any]) -> None:
        """Count what a poll of a table used, until :meth:`write_polls`."""
        requests = used.get("requests") or {}
        amounts = [1.0, *(requests.get(kind, 0) for kind in KINDS)]
        amounts += [used.get(name) or 0 for name in ("bytes_read", "bytes_written", "cpu_seconds")]
        key = table, self._clock.now().date().isoformat(), str(used.get("store"))
        before = self._polls.get(key, [0.0] * len(amounts))
        self._polls[key] = [one + more for one, more in zip(before, amounts, strict=True)]

    def write_polls(self) -> None:
        """Write what polls used to the history; where that fails, it is written with the next."""
        try:
            self._history.add_polls([(*key, *amounts) for key, amounts in self._polls.items()])
            self._polls.clear()
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))

    def charged(self, since: datetime, prices: Mapping[str, Prices]) -> list[Charged]:
        """Return what the fleet's budget is charged for since a time, see :func:`charged_runs`."""
        try:
            return charged_runs(self._history.ledger(since), prices)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return []

    def is_over_budget(self, entry: TableJob) -> bool:
        """Whether the runs of a job have used up its time budget; read from the history twice a minute."""
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
