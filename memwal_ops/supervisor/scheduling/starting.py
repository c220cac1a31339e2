"""How a run begins: acquire the job's lease, unless another supervisor holds it or has just done what is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.registry import package_of
from memwal_ops.log import get_logger
from memwal_ops.storage.disk_full import DiskFullError
from memwal_ops.supervisor.scheduling.backoff import is_done_elsewhere
from memwal_ops.supervisor.state.outcomes import error_fields, log_fields
from memwal_ops.supervisor.state.tables import IDLE, LEASING, QUEUED, RUNNING, RunState, TableJob
from memwal_ops.supervisor.workers.protocol import RunRequest, lease_document

if TYPE_CHECKING:
    from datetime import datetime

    from memwal_ops.core.leases import Lease
    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.supervisor.scheduling.backlogs import BacklogPolling
    from memwal_ops.supervisor.scheduling.finishing import RunEnds
    from memwal_ops.supervisor.scheduling.ranking import Ranking
    from memwal_ops.supervisor.scheduling.shared_state import SharedState


class Starter:
    """Starts the jobs whose turn it is."""

    def __init__(self, shared: SharedState, ranking: Ranking, polling: BacklogPolling, ends: RunEnds) -> None:
        self._shared, self._ranking, self._polling, self._ends = shared, ranking, polling, ends
        self._log = get_logger(__name__)

    def begin(self, entry: TableJob) -> None:
        """Start a job, once its lease is acquired."""
        entry.not_before = None
        leases = self._shared.leases
        if leases is None or not entry.settings.apply:
            # A plan only reads: it needs no lease, and may lack the permission to write one.
            self._start(entry, None)
            return
        entry.state = LEASING
        leases.acquire(
            entry.table, entry.settings.name, lambda result, error: self._on_lease_result(entry, result, error)
        )

    def _on_lease_result(
        self, entry: TableJob, result: tuple[Lease | None, Lease | None] | None, error: MemwalOpsError | None
    ) -> None:
        """Start the run, or request the lease again later.

        ``result``: the lease that this supervisor acquired, if any, and the newest one before it.
        """
        shared = self._shared
        shared.changed = True
        lease, before = (None, None) if result is None else result
        gone = entry.removed or shared.stopping
        if gone or shared.is_paused(entry):
            # Paused while the lease was requested: the user was told that nothing runs.
            entry.state, entry.waiting = (IDLE, entry.waiting) if gone else (QUEUED, "paused")
            if lease is not None:
                shared.release(entry, lease, None)
        elif result is None and isinstance(error, DiskFullError) and entry.settings.job.deletes:
            # It frees the space that its lease would need. Leases save work; no proof depends on one.
            self._log.warning("lease_not_taken", table=entry.table.name, **log_fields(error_fields(error)))
            self._start(entry, None)
        elif result is None:
            self._ends.not_started(entry, error)
        elif lease is None:
            self._held(entry, before)
        else:
            self._acquired(entry, lease)

    def _acquired(self, entry: TableJob, lease: Lease) -> None:
        shared, now = self._shared, self._shared.clock.now()
        shared.skews[entry.table.name] = (now - lease.written).total_seconds()
        entry.other, entry.other_since = None, None
        if entry.at_once or not is_done_elsewhere(entry, lease, shared.tables[entry.table.name].polled, now):
            self._start(entry, lease)
            return
        if entry.why != "schedule":
            self._polling.request(entry.table.name)
        shared.release(entry, lease, None)
        shared.metrics.skipped.labels(*entry.key, "shared").inc()
        entry.state, entry.due = IDLE, None

    def _held(self, entry: TableJob, other: Lease | None) -> None:
        """Another supervisor holds the lease: request it again later, as long as the job is due."""
        shared, now = self._shared, self._shared.clock.now()
        if entry.other is None:
            entry.other_since = now
            shared.metrics.skipped.labels(*entry.key, "held").inc()
        entry.other = other
        if shared.once:
            entry.state, entry.due = IDLE, None
            shared.leased_elsewhere.append(_leased(entry, other))
            return
        assert shared.leases is not None  # noqa: S101 - the lease was requested from it
        entry.state = QUEUED
        entry.not_before = now + shared.leases.ttl / 10 * (1 + shared.random.random())

    def _start(self, entry: TableJob, lease: Lease | None) -> None:
        shared, settings = self._shared, entry.settings
        now, mono, state = shared.clock.now(), shared.clock.monotonic(), shared.tables[entry.table.name]
        plan = {
            "apply": settings.apply,
            "options": dict(settings.options),
            "backlog": state.figures,
            "version": state.version,
            "token": None if lease is None else lease.token,
            "waited_seconds": 0.0 if entry.due is None else round((now - entry.due).total_seconds(), 3),
            **({} if entry.asked_by is None else {"asked_by": entry.asked_by}),
            **self._ranking.begin(entry),
        }
        number = shared.recorder.begin(entry, plan, now)
        request = RunRequest(
            id=shared.next_number(),
            uri=entry.table.uri,
            storage_options=dict(entry.table.settings.storage_options),
            job=settings.name,
            options=dict(settings.options),
            apply=settings.apply,
            lease=None if lease is None else lease_document(lease),
            named=settings.named,
            foreign=package_of(settings.job) is not None,
        )
        worker = shared.assign(settings.job.pool, request)
        entry.lease, entry.renewed, entry.renewing = lease, mono, False
        entry.renew_at = mono + (0.0 if lease is None else lease.ttl.total_seconds() / 3)
        before = self._polling.due.fingerprint_and_settings(entry)
        entry.run = RunState(number, worker, mono, now, mono, before=before, plan=plan)
        entry.state, entry.waiting, entry.attempted = RUNNING, None, now
        shared.runs[request.id] = entry
        self._log.info("run_started", table=entry.table.name, job=settings.name, why=entry.why, pid=worker.pid)


def _leased(entry: TableJob, other: Lease | None) -> dict[str, Any]:
    """The entry of ``leased_elsewhere``."""
    expires: datetime | None = None if other is None else other.expires
    return {
        "table": entry.table.name,
        "job": entry.settings.name,
        "holder": None if other is None else other.holder.name,
        "expires": None if expires is None else expires.isoformat(timespec="seconds"),
    }
