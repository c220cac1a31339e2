"""Renew the leases of running jobs, and end runs that hang, exceed their timeout or their memory limit.

Only the scheduler's thread calls this. ``ended_by`` of a run has the reason why it was ended; its outcome follows
from its worker's result or exit.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from memwal_ops.errors import LeaseLostError
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.core.leases import Lease
    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.supervisor.scheduling.clock import Clock
    from memwal_ops.supervisor.state.tables import TableJob
    from memwal_ops.supervisor.workers.leasing import LeaseClient
    from memwal_ops.supervisor.workers.pools import Pools, WorkerProcess

_KILL_SECONDS = 5.0
CANCEL_SECONDS = 60.0
"""How long a run that was cancelled may finish its current step."""
_GENTLY = ("stop", "cancel")
_START_SECONDS = 120.0
# A store that hangs must not prevent the polls of all other tables.
_POLL_SECONDS = 300.0
_CPU_SECONDS = 0.5
_RENEW_AGAIN_SECONDS = 1.0


class Watchdog:
    """Checks all runs and polls in flight. It writes this clock minus the store's into ``skews``, by table."""

    def __init__(self, pools: Pools, leases: LeaseClient | None, clock: Clock, skews: dict[str, float]) -> None:
        """Check nothing yet."""
        self._pools, self._leases, self._clock, self._skews = pools, leases, clock, skews
        self._log = get_logger(__name__)

    def check(self, runs: Iterable[TableJob], polls: Iterable[tuple[WorkerProcess, float]]) -> None:
        """Renew what must be renewed, end what must be ended; ``polls``: workers of polls and errands, since when."""
        mono = self._clock.monotonic()
        for worker, began in polls:
            limit = self._pools.limit(worker.pool).memory
            heavy = limit is not None and (worker.resident_bytes() or 0) > limit
            if heavy or mono - began > _POLL_SECONDS:
                worker.signal(signal.SIGKILL)
        for entry in runs:
            run = entry.run
            assert run is not None  # noqa: S101 - it is in flight
            self._renew(entry, mono)
            if run.signalled is not None:
                if run.ended_by == "cancel" and mono - run.signalled > CANCEL_SECONDS:
                    self.end(entry, "abort")
                elif run.ended_by not in _GENTLY and mono - run.signalled > _KILL_SECONDS and not run.killed:
                    run.killed = True
                    run.worker.signal(signal.SIGKILL)
                continue
            cpu = run.worker.cpu_seconds()
            if cpu is not None and cpu - run.cpu >= _CPU_SECONDS:
                run.cpu, run.progress = cpu, mono
            limit = self._pools.limit(run.worker.pool).memory
            resident = run.worker.resident_bytes() if limit is not None else None
            if limit is not None and resident is not None and resident > limit:
                run.ended_by, run.signalled, run.killed = "memory", mono, True
                run.worker.signal(signal.SIGKILL)
            elif mono - run.progress > entry.settings.hung_after.total_seconds() + (
                0 if run.working else _START_SECONDS
            ):
                self.end(entry, "hung")
            elif (
                entry.settings.timeout is not None
                and run.working
                and mono - run.began > entry.settings.timeout.total_seconds()
            ):
                self.end(entry, "timeout")

    def _renew(self, entry: TableJob, mono: float) -> None:
        lease, client = entry.lease, self._leases
        lost = entry.run is not None and entry.run.ended_by == "lost"
        if lease is None or client is None or lost or entry.renewing or mono < entry.renew_at:
            return
        entry.renewing = True

        def on_result(renewed: Lease | None, error: MemwalOpsError | None) -> None:
            entry.renewing = False
            if entry.lease is None or entry.lease.token != lease.token:
                return
            if renewed is not None:
                entry.lease, entry.renewed = renewed, mono
                entry.renew_at = mono + lease.ttl.total_seconds() / 3
                self._skews[entry.table.name] = (self._clock.now() - renewed.written).total_seconds()
                return
            late = self._clock.monotonic() - entry.renewed > lease.ttl.total_seconds()
            if isinstance(error, LeaseLostError) or late:
                self._log.warning("lease_lost", table=entry.table.name, job=entry.settings.name, error=str(error))
                self.end(entry, "lost")
            else:
                entry.renew_at = self._clock.monotonic() + _RENEW_AGAIN_SECONDS

        client.renew(entry.table, lease, on_result)

    def ask_to_stop(self, entry: TableJob, why: str) -> None:
        """Ask a run to stop after its current step."""
        run = entry.run
        if run is not None and run.ended_by is None:
            run.ended_by = why
            run.signalled = self._clock.monotonic()
            run.worker.send({"do": "stop", "id": run.worker.request})

    def end(self, entry: TableJob, why: str) -> None:
        """End a run: SIGTERM now, SIGKILL 5 seconds later."""
        run = entry.run
        if run is not None and run.ended_by in {None, *_GENTLY}:
            run.ended_by = why
            run.signalled = self._clock.monotonic()
            run.worker.quitting = True
            run.worker.signal(signal.SIGTERM)
