"""When a job that failed or was interrupted runs again: backoff, restarts, and successes of other processes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.leases import BY_HAND
from memwal_ops.supervisor.state.history import COMPLETED
from memwal_ops.supervisor.state.tables import QUEUED

if TYPE_CHECKING:
    import random
    from datetime import datetime

    from memwal_ops.core.leases import LastRun, Lease
    from memwal_ops.supervisor.config.model import BackoffConfig
    from memwal_ops.supervisor.state.history import LastRuns
    from memwal_ops.supervisor.state.tables import TableJob

RETRY = "retry"
_RETRY_AFTER = timedelta(minutes=1)
_JITTER = 0.2
_DONE_ELSEWHERE_FRACTION = 0.9


def wait_after(failures: int, config: BackoffConfig, random_: random.Random) -> timedelta:
    """Return the wait after ``failures`` consecutive failures.

    Below ``config.failures`` one minute for each; then ``first``, doubling up to ``longest``, each up to a fifth longer
    (jitter).
    """
    over = failures - config.failures
    if over < 0:
        return _RETRY_AFTER * failures
    wait = min(config.first * 2 ** min(over, 40), config.longest) if over < 40 else config.longest  # noqa: PLR2004 - 2**40 of anything is longer
    return wait * (1 + _JITTER * random_.random())


def queue_retry(entry: TableJob, now: datetime, not_before: datetime | None) -> None:
    """Queue a job again."""
    entry.state, entry.due, entry.why, entry.not_before = QUEUED, now, RETRY, not_before
    entry.waiting = "worker" if not_before is None else "backoff"


def resume(entry: TableJob, last: LastRuns, config: BackoffConfig, random_: random.Random, now: datetime) -> None:
    """Queue a job at the start of the service if its last run failed or was interrupted.

    An interrupted one is due at once, as its own backoff was over. Otherwise the backoff continues.
    """
    if last.interrupted:
        queue_retry(entry, now, None)
    elif last.failures:
        queue_retry(entry, now, (last.failed or now) + wait_after(last.failures, config, random_))


def leave_backoff(entry: TableJob, last: LastRun, instance: str | None, skew: timedelta) -> None:
    """End the backoff of a job that another process has run successfully since, and make it due.

    It is due as the other process may have run it with other options.

    Args:
        entry: a job that failed.
        last: the last run by its lease.
        instance: this supervisor's.
        skew: how far the store's clock is behind.
    """
    finished = last.finished + skew
    newer = entry.attempted is not None and finished > entry.attempted
    if not newer or entry.run is not None or last.instance == instance or last.outcome not in COMPLETED:
        return
    entry.failures, entry.not_before = 0, None
    entry.outcome, entry.finished = last.outcome, finished
    if last.outcome == "succeeded":
        entry.succeeded = finished


def found_damage(entry: TableJob, last: LastRun, instance: str | None) -> bool:
    """Whether another supervisor's run found damage after the last run of this one, by the last run in a lease.

    What it is, only that one's history has.
    """
    newer = entry.attempted is None or last.finished > entry.attempted
    return newer and _is_finding(entry, last.outcome) and last.instance not in {instance, BY_HAND}


def is_done_elsewhere(entry: TableJob, lease: Lease, polled: datetime | None, now: datetime) -> bool:
    """Return whether another supervisor has just done what is due, by the lease that was acquired for it; record that.

    Both times in the lease are from the store's clock.
    """
    if lease.last is None:
        return False
    if entry.why == "schedule" and entry.settings.schedule is not None:
        within = entry.settings.schedule.period(now) * _DONE_ELSEWHERE_FRACTION
    else:
        # It may have done what failed here, or merged the backlog that triggered the run.
        since = entry.attempted if entry.why == RETRY else polled
        if since is None:
            return False
        within = now - since
    return _take_run(entry, lease.last, lease.holder.instance, now, lease.written - lease.last.finished, within)


def is_schedule_met(entry: TableJob, last: LastRun, instance: str, now: datetime) -> bool:
    """Return whether another supervisor has done what a schedule asks for, by the last run in a lease; record that."""
    schedule = entry.settings.schedule
    if schedule is None:
        return False
    within = schedule.period(now) * _DONE_ELSEWHERE_FRACTION
    return _take_run(entry, last, instance, now, max(now - last.finished, timedelta(0)), within)


def _take_run(entry: TableJob, last: LastRun, instance: str, now: datetime, age: timedelta, within: timedelta) -> bool:
    """Take a run of another instance as the last one, if it completed and is not older than ``within``."""
    if last.instance in {instance, BY_HAND} or last.outcome not in COMPLETED or age >= within:
        return False
    if _is_finding(entry, last.outcome):
        return False  # what it found is to be known here, too
    entry.started = entry.finished = now - age
    entry.outcome, entry.failures = last.outcome, 0
    if last.outcome == "succeeded":
        entry.succeeded = entry.finished
    return True


def _is_finding(entry: TableJob, outcome: str) -> bool:
    """Whether a run with that outcome is one that found damage."""
    return entry.settings.job.reads_only and outcome == "partial"
