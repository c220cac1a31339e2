"""What the pages show of the scheduler's tables: their status, what expiries reported, what they cost."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import HistoryError
from memwal_ops.log import get_logger
from memwal_ops.supervisor.observe.status import table_stamps, tables_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memwal_ops.supervisor.observe.spending import Spending
    from memwal_ops.supervisor.observe.status_document import TableStatus
    from memwal_ops.supervisor.scheduling.scheduler import Scheduler
    from memwal_ops.supervisor.scheduling.timers import Timers
    from memwal_ops.supervisor.state.history import History


class ScheduledTables:
    """The scheduler's tables, for the pages."""

    def __init__(self, scheduler: Scheduler, timers: Timers, history: History, spending: Spending) -> None:
        self._scheduler, self._timers, self._history, self._spending = scheduler, timers, history, spending
        self._lock = threading.Lock()
        self._later: dict[str, Mapping[str, Any]] = {}
        self._last_run = 0

    def stamps(self) -> Mapping[str, object]:
        """See overview.Tables."""
        return table_stamps(self._scheduler)

    def status(self, names: Iterable[str]) -> list[TableStatus]:
        """See overview.Tables."""
        return tables_status(self._scheduler, names, self._timers.next_run)

    def deletable_later(self) -> Mapping[str, Mapping[str, Any]]:
        """What runs of expire reported, with those since the last call, if the history can be read."""
        with self._lock, self._logged():
            for number, table, later in self._history.deletable_later(self._last_run):
                self._later[table], self._last_run = later, number
        return dict(self._later)

    def costs(self) -> Mapping[str, float]:
        """See overview.Tables."""
        return self._spending.week()

    def read_costs(self) -> None:
        """See overview.Tables."""
        with self._logged():
            self._spending.read()

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """A history that cannot be read leaves pages with what was read before."""
        try:
            yield
        except HistoryError as error:
            get_logger(__name__).error("history_not_read", error=str(error))
