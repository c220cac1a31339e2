"""Stop a job that keeps failing, or whose triggers keep starting runs that achieve nothing: a circuit breaker.

What fails waits by its backoff, see :mod:`memwal_ops.supervisor.scheduling.backoff`. What achieves nothing succeeds:
here its triggers are ignored for ``backoff.longest``, then one run tries again. Its schedule goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.supervisor.scheduling.priority import BREAKER_FAILURES
from memwal_ops.supervisor.state.history import COMPLETED, is_triggered

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from memwal_ops.supervisor.observe.status_document import BreakerStatus
    from memwal_ops.supervisor.state.tables import TableJob

MAX_FRUITLESS = 5
"""So many runs by trigger in a row may achieve nothing."""


def is_open(entry: TableJob, longest: timedelta, now: datetime) -> bool:
    """Whether the triggers of a job are ignored."""
    return (until := _closes(entry, longest)) is not None and now < until


def breaker_status(entry: TableJob, longest: timedelta, now: datetime) -> BreakerStatus | None:
    """The document ``breaker`` of a job's status; None: it is not stopped."""
    if entry.failures >= BREAKER_FAILURES and entry.not_before is not None and now < entry.not_before:
        return {"reason": "failures", "runs": entry.failures, "until": entry.not_before.isoformat(timespec="seconds")}
    until = _closes(entry, longest)
    if until is None or now >= until:
        return None
    return {"reason": "saves_nothing", "runs": entry.fruitless, "until": until.isoformat(timespec="seconds")}


def count_run(
    entry: TableJob, outcome: str, achieved: Mapping[str, float] | None, now: datetime, *, published: bool
) -> None:
    """Count a run that ended. What is due by its schedule and finds nothing to do counts neither way."""
    if achieved or published:
        entry.fruitless, entry.fruitless_at = 0, None
    elif outcome in COMPLETED and is_triggered(entry.why):
        entry.fruitless, entry.fruitless_at = entry.fruitless + 1, now


def _closes(entry: TableJob, longest: timedelta) -> datetime | None:
    """When it ends; None: it did not begin, or what the job achieves is not measured."""
    measured = entry.settings.apply and (entry.settings.job.saves or entry.settings.job.objectives)
    if not measured or entry.fruitless < MAX_FRUITLESS or entry.fruitless_at is None:
        return None
    return entry.fruitless_at + longest
