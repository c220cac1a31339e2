"""Which of the jobs that are due runs next: of those that may, the one that has waited longest.

A table that is always behind comes to the end of the queue with every run, so that no table starves.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.supervisor.state import LEASING, QUEUED, RUNNING
from memwal_ops.supervisor.windows import is_open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from memwal_ops.supervisor.state import Entry

_NEVER = datetime.min.replace(tzinfo=UTC)
# What the ones do, the others would have to do again after them.
_RANKS: Mapping[str, int] = {"merge": 0, "catchup": 1, "compact": 2, "snapshot": 2, "expire": 3, "gc": 4}
_COMING = frozenset({"worker", "earlier"})


def goes_before(other: Entry, entry: Entry, *, always: bool) -> bool:
    """Whether a job waits until another one on its table is done: with the first run of both, or ``always``.

    Later on nobody waits: where merges follow each other without end, nothing else would ever run.
    """
    if _RANKS.get(other.settings.name, len(_RANKS)) >= _RANKS.get(entry.settings.name, -1):
        return False
    if not always and (other.started is not None or entry.started is not None):
        return False
    return other.state in {LEASING, RUNNING} or (other.state == QUEUED and other.waiting in _COMING)


def choose(
    entries: Iterable[Entry],
    now: datetime,
    over_budget: Callable[[Entry], bool],
    held_back: Callable[[Entry], bool],
) -> Entry | None:
    """The next to run, or None. What a queued one waits for is written down in it."""
    best: Entry | None = None
    for entry in entries:
        if entry.state != QUEUED:
            continue
        entry.waiting = _obstacle(entry, now, over_budget, held_back)
        if entry.waiting == "worker" and (best is None or _order(entry) < _order(best)):
            best = entry
    return best


def _obstacle(
    entry: Entry, now: datetime, over_budget: Callable[[Entry], bool], held_back: Callable[[Entry], bool]
) -> str:
    if entry.not_before is not None and now < entry.not_before:
        return "lease" if entry.other is not None else "backoff"
    if not is_open(entry.settings.windows, now, entry.settings.zone):
        return "window"
    if over_budget(entry):
        return "budget"
    return "earlier" if held_back(entry) else "worker"


def _order(entry: Entry) -> tuple[datetime, datetime, tuple[str, str]]:
    return entry.due or _NEVER, entry.started or _NEVER, entry.key
