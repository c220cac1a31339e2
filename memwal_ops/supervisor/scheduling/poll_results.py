"""What a poll found: the figures of a table, and whether they changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.figures import Figures
from memwal_ops.log import get_logger
from memwal_ops.storage.locations import S3, scheme_of
from memwal_ops.supervisor.scheduling.due import own_backlog
from memwal_ops.supervisor.state.tables import QUEUED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.supervisor.scheduling.announcements import Announcements
    from memwal_ops.supervisor.scheduling.due import DueJobs
    from memwal_ops.supervisor.scheduling.shared_state import SharedState
    from memwal_ops.supervisor.state.tables import Reading, TableJob, TableState

# After a poll that failed the table waits as long as that took, and twice as long with each further one, up to ten
# times: a store that was away for a moment is read again soon, one that hangs takes a tenth of the worker's time.
_MAX_FACTOR, _MAX_PAUSE_SECONDS = 10.0, 300.0


class PollResults:
    """Takes the results of polls."""

    def __init__(self, shared: SharedState, announced: Announcements, due: DueJobs) -> None:
        self._shared, self._announced, self._due = shared, announced, due
        self._log = get_logger(__name__)

    def take(self, state: TableState, result: Mapping[str, Any], reading: Reading) -> None:
        """Take the result of a poll, and queue what is due by it."""
        state.polling = False
        if self._shared.tables.get(state.table.name) is not state:
            return
        unchanged, good = bool(result.get("unchanged")), result["outcome"] == "succeeded"
        if unchanged:
            result = {**result, "figures": self._aged(state), "version": state.version}
        else:
            reading = replace(reading, fingerprint=result.get("fingerprint") or "")
        state.result_at = self._shared.clock.monotonic()
        state.history = result.get("report") or state.history
        if result.get("applies") is not None:
            state.applies = frozenset(result["applies"])
        self._take_outcome(state, result, reading.began)
        idle = good and not state.blocked
        if good or result.get("figures"):
            # One job's figures may be missing; the poll counts if it has the backlog itself.
            first = state.polled is None
            same = self._take_figures(state, result)
            if not unchanged:
                state.reading = reading if good and (same or first) else None
            idle = idle and same and _is_idle(state)
            self._due.queue_triggered(state, reading.began)
            self._due.queue_asking(state)
        else:
            state.reading = None
        self._due.decide_scheduled(state, reading.began)
        self._shared.changed |= any(entry.state == QUEUED for entry in state.entries.values())
        state.unchanged = state.unchanged + 1 if idle else 0

    def _take_outcome(self, state: TableState, result: Mapping[str, Any], began: float) -> None:
        """Count a poll and keep its error; after a failure, the next one waits, see ``_MAX_FACTOR``."""
        good, before = result["outcome"] == "succeeded", state.error
        self._shared.metrics.polls.labels(state.table.name, result["outcome"]).inc()
        state.error, state.error_code = None if good else str(result["message"]), int(result["exit_code"])
        now = self._shared.clock.monotonic()
        state.failed_polls = 0 if good else state.failed_polls + 1
        factor = min(2.0 ** min(state.failed_polls - 1, 10), _MAX_FACTOR)
        state.poll_not_before = 0.0 if good else now + min((now - began) * factor, _MAX_PAUSE_SECONDS)
        if not good and state.error != before:
            self._log.warning("poll_failed", table=state.table.name, error=state.error)

    def _take_figures(self, state: TableState, result: Mapping[str, Any]) -> bool:
        """Keep the figures of a poll; return whether they are those of the one before."""
        version, figures, waited = state.version, state.figures, state.backlog.amount("backlog")
        state.figures, state.version = dict(result["figures"]), result["version"]
        waiting = state.backlog.amount("backlog")
        if self._announced.alive and scheme_of(state.table.uri) in S3:
            # What a writer flushes waits for a merge, and is not a version: a region's manifest announces it.
            flushed = None not in {waited, waiting} and (waiting or 0) > (waited or 0)
            committed = version is not None and (version != state.version or flushed)
            self._announced.polled(state.table.name, state.poll_began, committed=committed)
        if result["outcome"] == "succeeded" or waiting is not None:
            state.polled = self._shared.clock.now()
        # An operator may have fixed it: what is still blocked is counted as behind, or the poll finds it itself.
        behind = state.backlog.amount("behind")
        state.blocked = state.blocked if behind is None else min(state.blocked, behind)
        _raise_to(state.figures, state.table.settings.format, state.blocked)
        return _is_same(state, version, figures)

    def _aged(self, state: TableState) -> dict[str, float]:
        """The figures of a table that has not changed since the last poll: only ages grow."""
        passed, ages = self._shared.clock.monotonic() - state.result_at, ages_of(state)
        return {name: value + passed if value and name in ages else value for name, value in state.figures.items()}

    def record_run(self, entry: TableJob, figures: Mapping[str, float], remaining: Mapping[str, float] | None) -> None:
        """Record what blocked a run, which polls do not find: they only list objects. And the backlog that it left.

        Args:
            figures: the sums of the run.
            remaining: the backlog that it cannot reduce; empty: that of the last poll, as it published nothing; None:
                unknown.
        """
        kind = entry.table.settings.format
        state, blocked = self._shared.tables.get(entry.table.name), Figures(figures, kind, "run").amount("blocked")
        if state is None or entry.removed:
            return
        left = None if remaining is None else dict(remaining or state.figures)
        if blocked is not None:
            state.blocked = blocked
            _raise_to(state.figures, kind, blocked)
            _raise_to(left or {}, kind, blocked)
        entry.unproductive_backlog = None if left is None else own_backlog(entry, left)


def _is_same(state: TableState, version: int | None, figures: Mapping[str, float]) -> bool:
    """Whether a poll found the version and the figures of the one before, ages aside."""
    ages = ages_of(state)
    return version == state.version is not None and all(
        figures.get(name) == value for name, value in state.figures.items() if name not in ages
    )


def _is_idle(state: TableState) -> bool:
    """Whether a poll found nothing waiting, and no trigger that an age could fire."""
    return not state.backlog.amount("backlog") and not any(state.figures.get(name) for name in watched_ages(state))


def watched_ages(state: TableState) -> set[str]:
    """The figures that grow by themselves, and that a trigger reads."""
    whens = [entry.settings.when for entry in state.entries.values()]
    return ages_of(state) & {name for when in whens if when is not None for name in when.figures}


def ages_of(state: TableState) -> set[str]:
    """The figures that grow by themselves: backlog metrics in seconds."""
    metrics = (entry.settings.job.backlog_metrics for entry in state.entries.values())
    return {name for one in metrics for name, metric in one.items() if metric.unit == "seconds"}


def _raise_to(figures: dict[str, float], kind: str | None, blocked: float) -> None:
    name = Figures(figures, kind).name_of("blocked")
    if name is not None:
        figures[name] = max(figures[name], blocked)
