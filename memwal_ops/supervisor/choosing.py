"""Which of the jobs that are due runs next: of those that may, the one that has waited longest.

A table that is always behind comes to the end of the queue with every run, so that no table starves.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.supervisor.state import QUEUED
from memwal_ops.supervisor.windows import is_open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.supervisor.state import Entry

_NEVER = datetime.min.replace(tzinfo=UTC)


def choose(entries: Iterable[Entry], now: datetime, over_budget: Callable[[Entry], bool]) -> Entry | None:
    """The next to run, or None. What a queued one waits for is written down in it."""
    best: Entry | None = None
    for entry in entries:
        if entry.state != QUEUED:
            continue
        entry.waiting = _obstacle(entry, now, over_budget)
        if entry.waiting == "worker" and (best is None or _order(entry) < _order(best)):
            best = entry
    return best


def _obstacle(entry: Entry, now: datetime, over_budget: Callable[[Entry], bool]) -> str:
    if entry.not_before is not None and now < entry.not_before:
        return "lease" if entry.other is not None else "backoff"
    if not is_open(entry.settings.windows, now, entry.settings.zone):
        return "window"
    return "budget" if over_budget(entry) else "worker"


def _order(entry: Entry) -> tuple[datetime, datetime, tuple[str, str]]:
    return entry.due or _NEVER, entry.started or _NEVER, entry.key
