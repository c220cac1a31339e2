"""What fires by the clock: schedules of jobs, looks at backlogs, and the service's own chores.

APScheduler in one process: a memory store, for the history knows when each job ran last; an explicit
misfire grace; what was missed several times fires once. What fires is only posted to the conductor.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.supervisor.conductor import Conductor

_UTC = ZoneInfo("UTC")
_SPREAD = 5.0
_BACK_SECONDS = 5.0


class Clockwork:
    """Schedules of one conductor."""

    def __init__(self, conductor: Conductor, misfire_grace: timedelta) -> None:
        """Nothing fires before :meth:`start`."""
        self._conductor = conductor
        self._random = random.Random()  # noqa: S311 - jitter
        self._log = get_logger(__name__)
        self._known: dict[str, Any] = {}
        self._ahead = self._offset()
        self._scheduler = BackgroundScheduler(
            jobstores={"default": MemoryJobStore()},
            executors={"default": ThreadPoolExecutor(2)},
            job_defaults={
                "coalesce": True,
                "max_instances": 1,
                "misfire_grace_time": int(misfire_grace.total_seconds()),
            },
            timezone=_UTC,
        )

    def start(self) -> None:
        """From now on things fire."""
        self._scheduler.start()

    def next_run(self, table: str, job: str) -> datetime | None:
        """When a schedule fires next, jitter and all; None where nobody knows."""
        found = self._scheduler.get_job(f"run {table} {job}")
        fires: datetime | None = getattr(found, "next_run_time", None)
        return None if fires is None else fires.astimezone(UTC)

    def check_clock(self) -> None:
        """Where the clock was put back, what was to fire by it would wait for that long: begin anew from now."""
        offset = self._offset()
        back = self._ahead - offset
        if back < _BACK_SECONDS:
            self._ahead = max(self._ahead, offset)
            return
        self._ahead = offset
        self._log.warning("clock_was_put_back", seconds=round(back, 1))
        self._conductor.put_back(timedelta(seconds=back))
        chores = {name: what for name, what in self._known.items() if name.startswith("chore ")}
        self._known = dict.fromkeys(self._known)
        for name, interval in chores.items():
            self._known[name] = interval
            self._scheduler.reschedule_job(
                name, trigger=IntervalTrigger(seconds=interval.total_seconds(), timezone=_UTC)
            )
        self.sync()

    def _offset(self) -> float:
        return self._conductor.clock.now().timestamp() - self._conductor.clock.monotonic()

    def stop(self) -> None:
        """Nothing fires any more."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    @property
    def running(self) -> bool:
        """Whether things fire."""
        return bool(self._scheduler.running)

    def every(self, name: str, interval: timedelta, chore: Callable[[], None]) -> None:
        """A chore of the service, on the conductor's thread."""
        trigger = IntervalTrigger(seconds=interval.total_seconds(), timezone=_UTC)
        self._add(f"chore {name}", interval, trigger, None, lambda: self._conductor.post(chore))

    def sync(self) -> None:
        """Make it fire for the tables and jobs that there are now."""
        now = self._conductor.clock.now()
        wanted: set[str] = set()
        for state in self._conductor.tables.values():
            name = state.table.name
            poll = state.table.settings.poll
            wanted.add(f"look {name}")
            trigger = IntervalTrigger(seconds=poll.total_seconds(), timezone=_UTC, jitter=poll.total_seconds() * 0.2)
            self._add(f"look {name}", poll, trigger, self._soon(now, poll), self._looker(name))
            for job, entry in state.entries.items():
                schedule = entry.settings.schedule
                if schedule is None:
                    continue
                wanted.add(f"run {name} {job}")
                if self._known.get(f"run {name} {job}") == schedule:
                    continue
                due = schedule.due_after(entry.started, entry.first_seen)
                if entry.started is None and due <= now:
                    # All first runs of a table are known to be due before the first of them begins: they have an order.
                    self._conductor.due(name, job, "schedule")
                    due = schedule.due_after(now, now)
                due = max(due, self._soon(now, schedule.jitter))
                self._add(f"run {name} {job}", schedule, schedule.trigger(due), due, self._runner(name, job))
        for known in [one for one in self._known if not one.startswith("chore ") and one not in wanted]:
            self._scheduler.remove_job(known)
            del self._known[known]

    def _add(self, name: str, what: object, trigger: Any, first: datetime | None, fire: Callable[[], None]) -> None:
        """Add it, or put it in the place of what stood there for something else."""
        if self._known.get(name) == what:
            return
        self._known[name] = what
        extra = {} if first is None else {"next_run_time": first}
        self._scheduler.add_job(fire, trigger, id=name, replace_existing=True, **extra)

    def _looker(self, table: str) -> Callable[[], None]:
        return lambda: self._conductor.post(lambda: self._conductor.look(table))

    def _runner(self, table: str, job: str) -> Callable[[], None]:
        return lambda: self._conductor.post(lambda: self._conductor.due(table, job, "schedule"))

    def _soon(self, now: datetime, within: timedelta) -> datetime:
        """A moment from now, so that not all fire at once."""
        return now + timedelta(seconds=self._random.uniform(0, min(within.total_seconds(), _SPREAD)))
