"""What came back: record how a run ended, and when the job's next one may begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.figures import Figures
from memwal_ops.core.next_run import MAX_RATES, rates_of
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.prices import money_of
from memwal_ops.log import get_logger
from memwal_ops.supervisor.scheduling.backoff import queue_retry, wait_after
from memwal_ops.supervisor.scheduling.breaker import count_run
from memwal_ops.supervisor.state.history import COMPLETED, FAILURES
from memwal_ops.supervisor.state.outcomes import LEVELS, answers_of, error_fields, log_fields, repeated
from memwal_ops.supervisor.state.tables import IDLE, RunState, TableJob

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.supervisor.scheduling.backlogs import BacklogPolling
    from memwal_ops.supervisor.scheduling.ranking import Ranking
    from memwal_ops.supervisor.scheduling.shared_state import SharedState


class RunEnds:
    """Takes the ends of runs."""

    def __init__(self, shared: SharedState, ranking: Ranking, polling: BacklogPolling) -> None:
        self._shared, self._ranking, self._polling = shared, ranking, polling
        self._log = get_logger(__name__)

    def finish(
        self, entry: TableJob, outcome: str, details: dict[str, Any], remaining: Mapping[str, float] | None = None
    ) -> None:
        """Record the end of a run, whatever its outcome; ``remaining``: see :class:`Result`."""
        shared = self._shared
        now, mono = shared.clock.now(), shared.clock.monotonic()
        run, entry.run = entry.run, None
        assert run is not None  # noqa: S101 - it is in flight
        shared.runs = {number: running for number, running in shared.runs.items() if running is not entry}
        debt = entry.settings.job.debts(run.plan.get("backlog") or {})
        if details.get("used") and debt:
            details = {**details, "used": {**details["used"], "debt": debt}}
        shared.recorder.finish(entry, run.number, now, outcome, {**details, "log": [*run.log]})
        if entry.lease is not None:
            lease, entry.lease = entry.lease, None
            if outcome != "lost":
                shared.release(entry, lease, outcome if outcome in {*COMPLETED, *FAILURES} else None)
        ran, published = mono - run.began, bool(details.get("versions"))
        self._count(entry, run, outcome, details, ran)
        count_run(entry, outcome, details.get("achieved"), now, published=published)
        if outcome in {*COMPLETED, *FAILURES}:
            self._polling.results.record_run(entry, details.get("figures") or {}, remaining if published else {})
        self._update(entry, outcome, now, run.started, details.get("exit_code") or 0)
        entry.unchanged_since = run.before if outcome == "succeeded" and not published else None
        entry.skips = 0
        self._log_end(entry, outcome, round(ran, 3), log_fields(details))
        if outcome == "succeeded" and entry.settings.heartbeat_url is not None:
            timeout = shared.settings.config.heartbeat.timeout.total_seconds()
            shared.heartbeat.beat(entry.settings.heartbeat_url, *entry.key, timeout)
        if outcome in COMPLETED and published and not shared.once:
            self._polling.request(entry.table.name)

    def not_started(self, entry: TableJob, error: MemwalOpsError | None) -> None:
        """Record a run that could not start as a failed one."""
        shared, now = self._shared, self._shared.clock.now()
        plan = {"apply": entry.settings.apply, "options": dict(entry.settings.options)}
        entry.attempted = now
        number = shared.recorder.begin(entry, plan, now)
        details = {"reason": None, "error": None, "remedy": None} if error is None else error_fields(error)
        shared.recorder.finish(entry, number, now, "failed", details)
        shared.metrics.runs.labels(*entry.key, "failed").inc()
        self._log.warning("run_not_started", table=entry.table.name, job=entry.settings.name, **log_fields(details))
        self._update(entry, "failed", now, now, details.get("exit_code") or 1)

    def _count(self, entry: TableJob, run: RunState, outcome: str, details: Mapping[str, Any], ran: float) -> None:
        """Count what a run used and achieved: in the metrics, for the next estimates, and in the budget."""
        shared, now, name = self._shared, self._shared.clock.now(), entry.settings.name
        report, metrics = details.get("report"), shared.metrics
        if entry.settings.job.reads_only:
            answers = answers_of(report, now.isoformat(timespec="milliseconds"))
            entry.answers = entry.answers if answers is None else answers
        if entry.settings.job.debt is not None and outcome == "succeeded":
            entry.rates = (*rates_of(name, [PastRun(ran, report or {})]), *entry.rates)[:MAX_RATES]
        if not entry.removed:
            metrics.runs.labels(*entry.key, outcome).inc()
            metrics.count_figures(*entry.key, Figures(details.get("figures") or {}, entry.table.settings.format, "run"))
        used = details.get("used")
        self._ranking.end(used, run.plan, now)
        if used is not None:
            metrics.count_usage(entry.table.name, used, money_of(used, shared.settings.config.prices.by_store()))
            if outcome == "succeeded":
                shared.recorder.add_spent(entry, ran, used, details.get("achieved"))
        metrics.run_seconds.labels(name).observe(ran)
        metrics.observe_phases(name, details.get("phases") or {})

    def _log_end(self, entry: TableJob, outcome: str, seconds: float, fields: dict[str, Any]) -> None:
        """Log the end of a run. What blocks a part of the table is logged once, and again when it changes."""
        level, same = LEVELS.get(outcome, 20), fields == entry.logged
        entry.logged = fields if "blocked" in fields else None
        if same:
            level, fields = 20, repeated(fields)
        about = {"table": entry.table.name, "job": entry.settings.name, "outcome": outcome, "seconds": seconds}
        self._log.log(level, "run_finished", **about, **fields)

    def _update(self, entry: TableJob, outcome: str, now: datetime, started: datetime, code: int) -> None:
        """Update a job after a run: its outcome, its failures, and when the next run may begin."""
        shared = self._shared
        entry.outcome, entry.finished, entry.ended = outcome, now, shared.clock.monotonic()
        entry.state, entry.due, entry.waiting, shared.changed = IDLE, None, None, True
        entry.asked_by, entry.at_once = None, False
        if shared.once:
            shared.codes.append(code)
        if outcome in {*COMPLETED, *FAILURES}:
            entry.started = started
        if outcome in COMPLETED:
            entry.failures, entry.not_before = 0, None
            if outcome == "succeeded":
                entry.succeeded = now
        elif outcome in FAILURES:
            entry.failures += 1
            entry.not_before = now + wait_after(entry.failures, shared.settings.config.backoff, shared.random)
            if not shared.once and not entry.removed:
                queue_retry(entry, now, entry.not_before)
