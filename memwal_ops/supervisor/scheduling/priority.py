"""Choose which due job runs next: of those that may run, the one that has waited longest.

A job that only reads counts as due by one interval later: what changes tables goes first, until it has waited as long.

With each run a table moves to the end of the queue, so one that is always behind does not starve the others.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.supervisor.scheduling.windows import is_open
from memwal_ops.supervisor.state.tables import LEASING, QUEUED, RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.supervisor.state.tables import Entry

_NEVER = datetime.min.replace(tzinfo=UTC)
_RUNS_SOON = frozenset({"worker", "earlier"})


def must_run_before(other: Entry, entry: Entry, *, always: bool, undecided: bool = False) -> bool:
    """Whether ``other``, on the same table, must finish before ``entry`` may start.

    True if ``entry``'s job runs after ``other``'s (``JobSpec.after``) and it is the first run of both, or ``always``:
    ``entry`` would have to repeat its work after ``other``. Later runs do not wait: while merges follow each other
    without a pause, nothing else would ever run.

    ``undecided``: ``other`` is due by its schedule, and the next poll decides whether it has anything to do.
    """
    after_each_other = entry.settings.name in other.settings.job.after
    if other.settings.name not in entry.settings.job.after or after_each_other:
        return False
    if not always and (other.started is not None or entry.started is not None):
        return False
    return undecided or other.state in {LEASING, RUNNING} or (other.state == QUEUED and other.waiting in _RUNS_SOON)


def choose(
    entries: Iterable[Entry],
    now: datetime,
    over_budget: Callable[[Entry], bool],
    must_wait: Callable[[Entry], bool],
    is_paused: Callable[[Entry], bool],
) -> Entry | None:
    """Return the entry to run next, or None; set ``waiting`` of every queued entry."""
    best: Entry | None = None
    for entry in entries:
        if entry.state != QUEUED:
            continue
        entry.waiting = "paused" if is_paused(entry) else _waits_for(entry, now, over_budget, must_wait)
        if entry.waiting == "worker" and (best is None or _order(entry) < _order(best)):
            best = entry
    return best


def _waits_for(
    entry: Entry, now: datetime, over_budget: Callable[[Entry], bool], must_wait: Callable[[Entry], bool]
) -> str:
    """Return what keeps a queued entry from starting; ``earlier`` is an upstream job, ``worker`` a free worker."""
    if entry.not_before is not None and now < entry.not_before:
        return "lease" if entry.other is not None else "backoff"
    if not entry.at_once and not is_open(entry.settings.windows, now, entry.settings.zone):
        return "window"
    if not entry.at_once and over_budget(entry):
        return "budget"
    return "earlier" if must_wait(entry) else "worker"


def _order(entry: Entry) -> tuple[bool, datetime, datetime, tuple[str, str]]:
    due = entry.due or _NEVER
    if entry.settings.job.reads_only and entry.due is not None and entry.settings.schedule is not None:
        due += entry.settings.schedule.period(due)
    return not entry.at_once, due, entry.started or _NEVER, entry.key
