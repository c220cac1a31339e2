"""Decide when tables are polled because of events that announce their commits, and whether events come for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from memwal_ops.supervisor.scheduling.clock import Clock

# The first event after a while polls its table at once. While they keep coming, the time between two polls doubles.
_SHORTEST, _LONGEST = 1.0, 10.0
# S3 delivers events within seconds, and sometimes a minute.
_LATE_SECONDS = 120.0


@dataclass(slots=True)
class _Events:
    """Those of one table; all times are monotonic seconds.

    Attributes:
        last: when the last one came.
        due: when the next poll is due that they ask for; None: none is.
        asked: when the last one was; ``gap``: at least so long after it the next one is.
        polled: when the last poll began that was made while events could come; before the first: always.
        unannounced: since when a commit is known that no event announced; None: there is none.
    """

    last: float = float("-inf")
    due: float | None = None
    asked: float = float("-inf")
    gap: float = _SHORTEST
    polled: float = float("-inf")
    unannounced: float | None = None


class Announcements:
    """Events of tables, as far as they came. Only the scheduler's thread calls it."""

    def __init__(self, clock: Clock) -> None:
        """Nothing is announced."""
        self.alive = False
        self._clock = clock
        self._tables: dict[str, _Events] = {}
        self._waiting: set[str] = set()

    def take(self, table: str) -> None:
        """An event announces a commit to a table. Many that come before its poll begins are one."""
        now, of = self._clock.monotonic(), self._of(table)
        of.last, of.unannounced = now, None
        if of.due is None:
            of.due = max(now, of.asked + of.gap)
            self._waiting.add(table)

    def take_due(self) -> list[str]:
        """Return the tables that are to be polled now; they are returned once."""
        now = self._clock.monotonic()
        due = [name for name in self._waiting if (at := self._tables[name].due) is not None and at <= now]
        for name in due:
            of = self._tables[name]
            of.gap = min(2 * of.gap, _LONGEST) if now - of.asked <= 2 * of.gap else _SHORTEST
            of.asked, of.due = now, None
            self._waiting.discard(name)
        return due

    def polled(self, table: str, began: float, *, committed: bool) -> None:
        """A poll that began then found a commit since the one before, or none; its event may still come."""
        of = self._of(table)
        if committed and of.last < of.polled and of.unannounced is None:
            of.unannounced = self._clock.monotonic()
        of.polled = began

    def covers(self, table: str) -> bool:
        """Return whether events of a table come: polls by its timer are a net, and may be few."""
        of = self._tables.get(table)
        return self.alive and of is not None and of.last != float("-inf") and not self._is_late(of)

    def covered(self) -> int:
        """Return how many tables events come for."""
        return sum(map(self.covers, self._tables))

    def missed(self) -> list[str]:
        """Return the tables to which something was committed, without an event.

        Of those that never had one only if no table had any: a bucket may have no notification on purpose.
        """
        late = [(name, of) for name, of in self._tables.items() if self._is_late(of)]
        heard = any(of.last != float("-inf") for of in self._tables.values())
        return sorted(name for name, of in late if not heard or of.last != float("-inf"))

    def retain(self, tables: Collection[str]) -> None:
        """Forget all other tables."""
        self._tables = {name: of for name, of in self._tables.items() if name in tables}
        self._waiting &= self._tables.keys()

    def _of(self, table: str) -> _Events:
        return self._tables.setdefault(table, _Events())

    def _is_late(self, of: _Events) -> bool:
        return of.unannounced is not None and self._clock.monotonic() - of.unannounced > _LATE_SECONDS
