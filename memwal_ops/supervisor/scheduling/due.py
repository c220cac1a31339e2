"""When is a job due, and what keeps a due one from starting: windows, budgets, order, backoff, circuit breakers.

It is due by its schedule, by the figures of a poll, by what indexes answered, or because it failed or was interrupted.
What fails waits by its backoff. What achieves nothing succeeds: its triggers are ignored for ``backoff.longest``, then
one run tries again; its schedule goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from memwal_ops.core import leases
from memwal_ops.core.answers import bad_answers, fallen_recall
from memwal_ops.core.job import Objective
from memwal_ops.core.worth import missed_objective
from memwal_ops.supervisor.config.effective import JobSettings
from memwal_ops.supervisor.config.model import BackoffConfig
from memwal_ops.supervisor.observe.status_document import BreakerStatus
from memwal_ops.supervisor.scheduling.schedules import in_window
from memwal_ops.supervisor.scheduling.shared_state import SharedState
from memwal_ops.supervisor.state import history, tables
from memwal_ops.supervisor.state.outcomes import OVER_BUDGET

BREAKER_FAILURES = 10
"""From so many failures in a row on, a job waits for its circuit breaker."""
RUNS_SOON = frozenset({"worker", "earlier", OVER_BUDGET})
"""What a job waits for that runs before others on its table, unless the budget of the fleet defers it."""


def must_run_before(other: tables.TableJob, entry: tables.TableJob, *, always: bool, undecided: bool = False) -> bool:
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
    return (
        undecided
        or other.state in {tables.LEASING, tables.RUNNING}
        or (other.state == tables.QUEUED and other.waiting in RUNS_SOON)
    )


def waits_for(
    entry: tables.TableJob,
    now: datetime,
    *,
    paused: bool,
    over_budget: Callable[[tables.TableJob], bool],
    must_wait: Callable[[tables.TableJob], bool],
) -> str:
    """Return what keeps a queued entry from starting; ``earlier`` is an upstream job, ``worker`` a free worker."""
    if paused:
        return "paused"
    if entry.not_before is not None and now < entry.not_before:
        if entry.other is not None:
            return "lease"
        return "breaker" if entry.failures >= BREAKER_FAILURES else "backoff"
    if not entry.at_once and not in_window(entry.settings.windows, now, entry.settings.zone):
        return "window"
    if not entry.at_once and over_budget(entry):
        return "budget"
    return "earlier" if must_wait(entry) else "worker"


MAX_FRUITLESS = 5
"""So many runs by trigger in a row may achieve nothing."""


def ignores_triggers(entry: tables.TableJob, longest: timedelta, now: datetime) -> bool:
    """Whether the triggers of a job are ignored."""
    return (until := _closes(entry, longest)) is not None and now < until


def breaker_status(entry: tables.TableJob, longest: timedelta, now: datetime) -> BreakerStatus | None:
    """The document ``breaker`` of a job's status; None: it is not stopped."""
    if entry.failures >= BREAKER_FAILURES and entry.not_before is not None and now < entry.not_before:
        return {"reason": "failures", "runs": entry.failures, "until": entry.not_before.isoformat(timespec="seconds")}
    until = _closes(entry, longest)
    if until is None or now >= until:
        return None
    return {"reason": "saves_nothing", "runs": entry.fruitless, "until": until.isoformat(timespec="seconds")}


def count_run(
    entry: tables.TableJob, outcome: str, achieved: Mapping[str, float] | None, now: datetime, *, published: bool
) -> None:
    """Count a run that ended. What is due by its schedule and finds nothing to do counts neither way."""
    if achieved or published:
        entry.fruitless, entry.fruitless_at = 0, None
    elif outcome in history.COMPLETED and history.is_triggered(entry.why):
        entry.fruitless, entry.fruitless_at = entry.fruitless + 1, now


def _closes(entry: tables.TableJob, longest: timedelta) -> datetime | None:
    """When it ends; None: it did not begin, or what the job achieves is not measured."""
    measured = entry.settings.apply and (entry.settings.job.saves or entry.settings.job.objectives)
    if not measured or entry.fruitless < MAX_FRUITLESS or entry.fruitless_at is None:
        return None
    return entry.fruitless_at + longest


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


def queue_retry(entry: tables.TableJob, now: datetime, not_before: datetime | None) -> None:
    """Queue a job again."""
    entry.state, entry.due, entry.why, entry.not_before = tables.QUEUED, now, RETRY, not_before
    entry.waiting = "worker" if not_before is None else "backoff"


def resume(
    entry: tables.TableJob, last: history.LastRuns, config: BackoffConfig, random_: random.Random, now: datetime
) -> None:
    """Queue a job at the start of the service if its last run failed or was interrupted.

    An interrupted one is due at once, as its own backoff was over. Otherwise the backoff continues.
    """
    if last.interrupted:
        queue_retry(entry, now, None)
    elif last.failures:
        queue_retry(entry, now, (last.failed or now) + wait_after(last.failures, config, random_))


def leave_backoff(entry: tables.TableJob, last: leases.LastRun, instance: str | None, skew: timedelta) -> None:
    """End the backoff of a job that another process has run successfully since, and make it due.

    It is due as the other process may have run it with other options.

    ``skew``: how far the store's clock is behind.
    """
    finished = last.finished + skew
    newer = entry.attempted is not None and finished > entry.attempted
    if not newer or entry.run is not None or last.instance == instance or last.outcome not in history.COMPLETED:
        return
    entry.failures, entry.not_before = 0, None
    entry.outcome, entry.finished = last.outcome, finished
    if last.outcome == "succeeded":
        entry.succeeded = finished


def found_damage(entry: tables.TableJob, last: leases.LastRun, instance: str | None) -> bool:
    """Whether another supervisor's run found damage after the last run of this one, by the last run in a lease.

    What it is, only that one's history has.
    """
    newer = entry.attempted is None or last.finished > entry.attempted
    return newer and _is_finding(entry, last.outcome) and last.instance not in {instance, leases.BY_HAND}


def is_done_elsewhere(entry: tables.TableJob, lease: leases.Lease, polled: datetime | None, now: datetime) -> bool:
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


def is_schedule_met(entry: tables.TableJob, last: leases.LastRun, instance: str, now: datetime) -> bool:
    """Return whether another supervisor has done what a schedule asks for, by the last run in a lease; record that."""
    schedule = entry.settings.schedule
    if schedule is None:
        return False
    within = schedule.period(now) * _DONE_ELSEWHERE_FRACTION
    return _take_run(entry, last, instance, now, max(now - last.finished, timedelta(0)), within)


def _take_run(
    entry: tables.TableJob, last: leases.LastRun, instance: str, now: datetime, age: timedelta, within: timedelta
) -> bool:
    """Take a run of another instance as the last one, if it completed and is not older than ``within``."""
    if last.instance in {instance, leases.BY_HAND} or last.outcome not in history.COMPLETED or age >= within:
        return False
    if _is_finding(entry, last.outcome):
        return False  # what it found is to be known here, too
    entry.started = entry.finished = now - age
    entry.outcome, entry.failures = last.outcome, 0
    if last.outcome == "succeeded":
        entry.succeeded = entry.finished
    return True


def _is_finding(entry: tables.TableJob, outcome: str) -> bool:
    return entry.settings.job.reads_only and outcome == "partial"


_ASK_AGAIN_AFTER = timedelta(hours=1)
_UNPRODUCTIVE_FOR = timedelta(minutes=10)
# A verification, which is daily, looks at an unchanged table once a week.
_SKIPS_OF_READERS = 6


class DueJobs:
    """Queues the jobs that are due."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def queue_triggered(self, state: tables.TableState, began: float) -> None:
        """Queue the jobs whose trigger the figures meet, and those that restore an objective."""
        for entry in filter(state.applies_to, state.entries.values()):
            why = triggered_by(entry.settings, state.figures, entry.table.settings.objectives)
            if why is None or self._is_unproductive(entry, state) or self._is_stopped(entry):
                continue
            if began < entry.ended:
                # Read before its last run ended: the backlog may be gone by now.
                state.poll_again = True
            else:
                self._shared.enqueue(*entry.key, why)

    def ran_elsewhere(self, entry: tables.TableJob, last: leases.LastRun) -> None:
        """Take the last run of a job by its lease, which may be of another process."""
        shared = self._shared
        again = found_damage(entry, last, shared.instance)
        leave_backoff(entry, last, shared.instance, timedelta(seconds=shared.skews.get(entry.table.name, 0.0)))
        if again:
            shared.enqueue(*entry.key, "schedule")

    def queue_asking(self, state: tables.TableState) -> None:
        """Queue a verification that found indexes to answer badly, if the table was written since, for example fixed.

        At most once an hour: on a table to which much is written, only a rebuild changes the answers.
        """
        now = self._shared.clock.now()
        for entry in state.entries.values():
            bad = bad_answers(entry.answers)
            asked = {answer.get("asked_version") for answer in entry.answers}
            due = entry.finished is None or now - entry.finished >= _ASK_AGAIN_AFTER
            if bad and due and entry.settings.schedule is not None and state.version not in asked:
                self._shared.enqueue(*entry.key, "answers")

    def queue_retraining(self, state: tables.TableState) -> None:
        """Queue what may train indexes anew of which a verification found that their recall fell."""
        for entry in filter(state.applies_to, state.entries.values()):
            why, _ = self.retraining(entry)
            if why and entry.state == tables.IDLE:
                self._shared.enqueue(*entry.key, f"answers: {why}")

    def retraining(self, entry: tables.TableJob) -> tuple[str, Mapping[str, Any]]:
        """Why the next run of a job may train indexes anew, with the options of that; empty: it may not.

        Each verification counts for one run. That no index is trained twice in a week follows from when it was built.
        """
        options, now = entry.settings.job.low_recall_options, self._shared.clock.now()
        state = self._shared.tables.get(entry.table.name)
        if not options or options.keys() & entry.settings.options.keys() or state is None:
            return "", {}
        found = [one for other in state.entries.values() for one in fallen_recall(other.answers, now)]
        new = [why for why, asked in found if entry.attempted is None or entry.attempted < asked]
        return "; ".join(new), options if new else {}

    def decide_scheduled(self, state: tables.TableState, began: float) -> None:
        """Skip scheduled runs that would find nothing to do, and queue the others."""
        now = self._shared.clock.now()
        for name, due in [*state.scheduled.items()]:
            entry = state.entries.get(name)
            if entry is not None and not state.applies_to(entry):
                entry = None
            last = (state.recorded or {}).get(name)
            if entry is not None and entry.started is None and last and self._is_done_elsewhere(entry, last):
                del state.scheduled[name]
                continue
            why = None if entry is None else self._why_skip(entry, state, began)
            if why is not None and began < due:
                continue  # something may have been written in between: the next poll decides
            del state.scheduled[name]
            if entry is not None and why is not None:
                entry.skips += 1
                self._shared.metrics.skipped.add(*entry.key, why)
                entry.started = entry.finished = entry.succeeded = now
            elif entry is not None:
                self._shared.enqueue(*entry.key, "schedule")

    def _why_skip(self, entry: tables.TableJob, state: tables.TableState, began: float) -> str | None:
        if self.is_unchanged(entry):
            return "unchanged"
        if state.error is not None or not entry.settings.skips_if_not_due:
            return None
        # What a job before it writes may make it due: after the poll began, or, with `once`, where no poll follows.
        for name in entry.settings.job.after & state.entries.keys():
            if began < state.entries[name].ended or (self._shared.once and state.entries[name].state != tables.IDLE):
                return None
        return "not_due" if entry.settings.has_nothing_to_do(state.figures) else None

    def _is_stopped(self, entry: tables.TableJob) -> bool:
        return ignores_triggers(entry, self._shared.settings.config.backoff.longest, self._shared.clock.now())

    def _is_done_elsewhere(self, entry: tables.TableJob, last: leases.LastRun) -> bool:
        shared = self._shared
        if shared.instance is None or not is_schedule_met(entry, last, shared.instance, shared.clock.now()):
            return False
        shared.metrics.skipped.add(*entry.key, "shared")
        return True

    def asks_lease(self, state: tables.TableState, entry: tables.TableJob) -> bool:
        """Whether the next poll reads a job's last run from its lease: another member of the fleet may have run it.

        What that verified counts more than an older run that found the table sound.
        """
        unknown = state.recorded is None and (entry.started is None or entry.settings.job.reads_only)
        return unknown and not self._shared.once and self._shared.settings.config.fleet is not None

    def is_unchanged(self, entry: tables.TableJob) -> bool:
        """Whether nothing was written to the table, and no setting changed, since before the job's last run.

        Files may be lost without a write: a job that only reads looks again after some skipped runs.
        """
        if entry.settings.job.reads_only and entry.skips >= _SKIPS_OF_READERS:
            return False
        return entry.unchanged_since is not None and entry.unchanged_since == self.fingerprint_and_settings(entry)

    def fingerprint_and_settings(self, entry: tables.TableJob) -> tuple[str, JobSettings] | None:
        """The fingerprint of an entry's table as far as it is known, with the entry's settings; else None."""
        state = self._shared.tables.get(entry.table.name)
        reading = None if state is None else state.reading
        wanted = entry.settings.job.skip_if_unchanged and entry.settings.heartbeat_url is None and not self._shared.once
        return (reading.fingerprint, entry.settings) if wanted and reading is not None and reading.fingerprint else None

    def _is_unproductive(self, entry: tables.TableJob, state: tables.TableState) -> bool:
        """Whether the last run, less than 10 minutes ago, could not reduce this very backlog.

        Or, of a job that follows its debt, could do only a part of it: what it could not do is a debt still, and each
        run would write it again, so that the schedule decides.
        """
        schedule = entry.settings.schedule
        if entry.settings.follows_debt and schedule is not None and entry.outcome == "partial" and entry.finished:
            return self._shared.clock.now() - entry.finished < schedule.period(entry.finished)
        if not entry.unproductive_backlog or entry.finished is None:
            return False
        recent = self._shared.clock.now() - entry.finished < _UNPRODUCTIVE_FOR
        return recent and entry.unproductive_backlog.items() <= own_backlog(entry, state.figures).items()


def triggered_by(
    settings: JobSettings, figures: Mapping[str, float], objectives: Mapping[Objective, float]
) -> str | None:
    """Why backlog figures make a job due: its trigger, or an objective of its table that it restores; None: neither."""
    if settings.when is not None and settings.when.is_met(figures):
        return f"when: {settings.when.text}"
    missed = missed_objective(settings.job, figures, objectives) if settings.apply else None
    return None if missed is None or settings.has_nothing_to_do(figures) else str(missed)


def own_backlog(entry: tables.TableJob, figures: Mapping[str, float]) -> dict[str, float]:
    """Return those of the figures that are of a job's backlog: ages grow by themselves, and others flush the log."""
    metrics = entry.settings.job.backlog_metrics
    when = entry.settings.when
    names = metrics.keys() | (when.figures if when is not None else frozenset())
    left_out = {name for name, metric in metrics.items() if metric.unit == "seconds" or metric.role == "unflushed"}
    return {name: figures[name] for name in (names - left_out) & figures.keys()}
