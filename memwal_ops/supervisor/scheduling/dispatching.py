"""What runs next: give the free workers of each pool the jobs whose turn it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.job import POOLS
from memwal_ops.supervisor.scheduling.priority import may_start, must_run_before
from memwal_ops.supervisor.state.tables import LEASING, QUEUED, TableJob

if TYPE_CHECKING:
    from datetime import datetime

    from memwal_ops.core.job import Pool
    from memwal_ops.supervisor.scheduling.ranking import Ranking
    from memwal_ops.supervisor.scheduling.shared_state import SharedState
    from memwal_ops.supervisor.scheduling.starting import Starter

# What queued jobs wait for, which the status shows, depends on the time, too: it is evaluated this often.
_EVALUATE_SECONDS = 1.0


class Dispatcher:
    """Chooses which of the due jobs start."""

    def __init__(self, shared: SharedState, ranking: Ranking, starter: Starter) -> None:
        self._shared, self._ranking, self._starter = shared, ranking, starter
        self._evaluate_at = float("-inf")

    def dispatch(self) -> None:
        """Start as many jobs as there are free workers; does nothing where no job can have become able to start."""
        shared = self._shared
        now, mono = shared.clock.now(), shared.clock.monotonic()
        if not shared.changed and mono < self._evaluate_at:
            return
        shared.changed, self._evaluate_at = False, mono + _EVALUATE_SECONDS
        waiting = [entry for entry in shared.entries() if entry.state in {QUEUED, LEASING}]
        for pool in POOLS:
            candidates = [entry for entry in waiting if entry.settings.job.pool == pool]
            reserved = sum(entry.state == LEASING for entry in candidates)
            while (entry := self._next(pool, candidates, now)) is not None and shared.pools.free(pool) > reserved:
                self._starter.begin(entry)
                reserved += entry.state == LEASING

    def _next(self, pool: Pool, entries: list[TableJob], now: datetime) -> TableJob | None:
        shared = self._shared
        ready = may_start(entries, now, shared.recorder.is_over_budget, self._must_wait, shared.is_paused)
        return self._ranking.choose(pool, ready, shared.begun(), now)

    def _must_wait(self, entry: TableJob) -> bool:
        """Whether another job on its table must run before."""
        once = self._shared.once
        if entry.started is not None and not once:
            return False
        state = self._shared.tables[entry.table.name]
        return any(
            must_run_before(other, entry, always=once, undecided=name in state.scheduled)
            for name, other in state.entries.items()
        )
