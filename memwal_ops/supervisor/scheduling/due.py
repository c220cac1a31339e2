"""When is a job due: by its schedule, by the figures of a poll, or by what indexes answered."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.bad_answers import bad_answers
from memwal_ops.core.worth import missed_objective
from memwal_ops.supervisor.scheduling.backoff import found_damage, is_schedule_met, leave_backoff
from memwal_ops.supervisor.scheduling.breaker import is_open
from memwal_ops.supervisor.state.tables import IDLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.job import Objective
    from memwal_ops.core.leases import LastRun
    from memwal_ops.supervisor.config.effective import JobSettings
    from memwal_ops.supervisor.scheduling.shared_state import SharedState
    from memwal_ops.supervisor.state.tables import TableJob, TableState

_ASK_AGAIN_AFTER = timedelta(hours=1)
_UNPRODUCTIVE_FOR = timedelta(minutes=10)
# A verification, which is daily, looks at an unchanged table once a week.
_SKIPS_OF_READERS = 6


class DueJobs:
    """Queues the jobs that are due."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def queue_triggered(self, state: TableState, began: float) -> None:
        """Queue the jobs whose trigger the figures meet, and those that restore an objective."""
        for entry in state.entries.values():
            why = triggered_by(entry.settings, state.figures, entry.table.settings.objectives)
            if why is None or self._is_unproductive(entry, state) or self._is_stopped(entry):
                continue
            if began < entry.ended:
                # Read before its last run ended: the backlog may be gone by now.
                state.poll_again = True
            else:
                self._shared.enqueue(*entry.key, why)

    def ran_elsewhere(self, entry: TableJob, last: LastRun) -> None:
        """Take the last run of a job by its lease, which may be of another process."""
        shared = self._shared
        again = found_damage(entry, last, shared.instance)
        leave_backoff(entry, last, shared.instance, timedelta(seconds=shared.skews.get(entry.table.name, 0.0)))
        if again:
            shared.enqueue(*entry.key, "schedule")

    def queue_asking(self, state: TableState) -> None:
        """Queue a verification that found indexes to answer badly, if the table was written since, for example fixed.

        At most once an hour: on a table to which much is written, only a rebuild changes the answers.
        """
        now = self._shared.clock.now()
        for entry in state.entries.values():
            bad = bad_answers(entry.answers)
            asked = {one.get("asked_version") for one in entry.answers}
            due = entry.finished is None or now - entry.finished >= _ASK_AGAIN_AFTER
            if bad and due and entry.settings.schedule is not None and state.version not in asked:
                self._shared.enqueue(*entry.key, "answers")

    def decide_scheduled(self, state: TableState, began: float) -> None:
        """Skip scheduled runs that would find nothing to do, and queue the others."""
        now = self._shared.clock.now()
        for name, due in [*state.scheduled.items()]:
            entry = state.entries.get(name)
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
                self._shared.metrics.skipped.labels(*entry.key, why).inc()
                entry.started = entry.finished = entry.succeeded = now
            elif entry is not None:
                self._shared.enqueue(*entry.key, "schedule")

    def _why_skip(self, entry: TableJob, state: TableState, began: float) -> str | None:
        """Why a scheduled run would find nothing to do; None: it may find something."""
        if self.is_unchanged(entry):
            return "unchanged"
        if state.error is not None or not entry.settings.skips_if_not_due:
            return None
        # What a job before it writes may make it due: after the poll began, or, with `once`, where no poll follows.
        for name in entry.settings.job.after & state.entries.keys():
            if began < state.entries[name].ended or (self._shared.once and state.entries[name].state != IDLE):
                return None
        return "not_due" if entry.settings.has_nothing_to_do(state.figures) else None

    def _is_stopped(self, entry: TableJob) -> bool:
        return is_open(entry, self._shared.settings.config.backoff.longest, self._shared.clock.now())

    def _is_done_elsewhere(self, entry: TableJob, last: LastRun) -> bool:
        """Whether a scheduled run is not necessary, given the last run of the job by its lease."""
        shared = self._shared
        if shared.instance is None or not is_schedule_met(entry, last, shared.instance, shared.clock.now()):
            return False
        shared.metrics.skipped.labels(*entry.key, "shared").inc()
        return True

    def asks_lease(self, state: TableState, entry: TableJob) -> bool:
        """Whether the next poll reads a job's last run from its lease: another member of the fleet may have run it.

        What that verified counts more than an older run that found the table sound.
        """
        unknown = state.recorded is None and (entry.started is None or entry.settings.job.reads_only)
        return unknown and not self._shared.once and self._shared.settings.config.fleet is not None

    def is_unchanged(self, entry: TableJob) -> bool:
        """Whether nothing was written to the table, and no setting changed, since before the job's last run.

        Files may be lost without a write: a job that only reads looks again after some skipped runs.
        """
        if entry.settings.job.reads_only and entry.skips >= _SKIPS_OF_READERS:
            return False
        return entry.unchanged_since is not None and entry.unchanged_since == self.fingerprint_and_settings(entry)

    def fingerprint_and_settings(self, entry: TableJob) -> tuple[str, JobSettings] | None:
        """The fingerprint of an entry's table as far as it is known, with the entry's settings; else None."""
        state = self._shared.tables.get(entry.table.name)
        reading = None if state is None else state.reading
        wanted = entry.settings.job.skip_if_unchanged and entry.settings.heartbeat_url is None and not self._shared.once
        return (reading.fingerprint, entry.settings) if wanted and reading is not None and reading.fingerprint else None

    def _is_unproductive(self, entry: TableJob, state: TableState) -> bool:
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


def own_backlog(entry: TableJob, figures: Mapping[str, float]) -> dict[str, float]:
    """Return those of the figures that are of a job's backlog: ages grow by themselves, and others flush the log."""
    metrics = entry.settings.job.backlog_metrics
    when = entry.settings.when
    names = metrics.keys() | (when.figures if when is not None else frozenset())
    left_out = {name for name, metric in metrics.items() if metric.unit == "seconds" or metric.role == "unflushed"}
    return {name: figures[name] for name in (names - left_out) & figures.keys()}
