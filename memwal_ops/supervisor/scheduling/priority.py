"""Find which due jobs may run, and what the others wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.supervisor.scheduling.windows import is_open
from memwal_ops.supervisor.state.tables import LEASING, QUEUED, RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from memwal_ops.supervisor.state.tables import TableJob

BREAKER_FAILURES = 10
"""From so many failures in a row on, a job waits for its circuit breaker."""
_RUNS_SOON = frozenset({"worker", "earlier"})


def must_run_before(other: TableJob, entry: TableJob, *, always: bool, undecided: bool = False) -> bool:
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


def may_start(
    entries: Iterable[TableJob],
    now: datetime,
    over_budget: Callable[[TableJob], bool],
    must_wait: Callable[[TableJob], bool],
    is_paused: Callable[[TableJob], bool],
) -> list[TableJob]:
    """Return the entries that wait for nothing but a worker; set ``waiting`` of every queued entry."""
    queued = [entry for entry in entries if entry.state == QUEUED]
    for entry in queued:
        entry.waiting = "paused" if is_paused(entry) else _waits_for(entry, now, over_budget, must_wait)
    return [entry for entry in queued if entry.waiting == "worker"]


def _waits_for(
    entry: TableJob, now: datetime, over_budget: Callable[[TableJob], bool], must_wait: Callable[[TableJob], bool]
) -> str:
    """Return what keeps a queued entry from starting; ``earlier`` is an upstream job, ``worker`` a free worker."""
    if entry.not_before is not None and now < entry.not_before:
        if entry.other is not None:
            return "lease"
        return "breaker" if entry.failures >= BREAKER_FAILURES else "backoff"
    if not entry.at_once and not is_open(entry.settings.windows, now, entry.settings.zone):
        return "window"
    if not entry.at_once and over_budget(entry):
        return "budget"
    return "earlier" if must_wait(entry) else "worker"
