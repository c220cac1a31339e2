"""Timers: fire the schedules of jobs, the polls of backlogs, and the service's own periodic tasks.

A timer only posts an event to the scheduler.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.log import get_logger
from memwal_ops.supervisor.scheduling.schedules import background_scheduler, interval_trigger

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.supervisor.scheduling.scheduler import Scheduler

_SPREAD_SECONDS = 5.0
_SET_BACK_SECONDS = 5.0


class Timers:
    """The timers of one scheduler."""

    def __init__(self, scheduler: Scheduler, misfire_grace: timedelta) -> None:
        """Make the timers; none fires before :meth:`start`."""
        self._scheduler = scheduler
        self._random = random.Random()  # noqa: S311 - jitter
        self._log = get_logger(__name__)
        self._known: dict[str, Any] = {}
        self._ahead = self._offset()
        self._apscheduler = background_scheduler(misfire_grace)

    def start(self) -> None:
        """Start the timers."""
        self._apscheduler.start()

    def next_run(self, table: str, job: str) -> datetime | None:
        """Return when a schedule fires next, with its jitter; None if it has no timer."""
        timer = self._apscheduler.get_job(f"run {table} {job}")
        fires: datetime | None = getattr(timer, "next_run_time", None)
        return None if fires is None else fires.astimezone(UTC)

    def check_clock(self) -> None:
        """Reset all timers if the wall clock was set back: they would fire late by as much."""
        offset = self._offset()
        back = self._ahead - offset
        if back < _SET_BACK_SECONDS:
            self._ahead = max(self._ahead, offset)
            return
        self._ahead = offset
        self._log.warning("clock_stepped_back", seconds=round(back, 1))
        self._scheduler.clock_set_back(timedelta(seconds=back))
        periodic = {name: interval for name, interval in self._known.items() if name.startswith("task ")}
        self._known = dict.fromkeys(self._known)
        for name, interval in periodic.items():
            self._known[name] = interval
            self._apscheduler.reschedule_job(name, trigger=interval_trigger(interval))
        self.sync()

    def _offset(self) -> float:
        return self._scheduler.clock.now().timestamp() - self._scheduler.clock.monotonic()

    def stop(self) -> None:
        """Stop the timers."""
        if self._apscheduler.running:
            self._apscheduler.shutdown(wait=False)

    @property
    def running(self) -> bool:
        """Whether the timers are started."""
        return bool(self._apscheduler.running)

    def every(self, name: str, interval: timedelta, task: Callable[[], None]) -> None:
        """Run a task of the service at an interval, on the scheduler's thread."""
        self._add(f"task {name}", interval, interval_trigger(interval), None, lambda: self._scheduler.post(task))

    def sync(self) -> None:
        """Make the timers match the scheduler's tables and jobs."""
        now = self._scheduler.clock.now()
        wanted: set[str] = set()
        for state in self._scheduler.tables.values():
            name = state.table.name
            poll = state.table.settings.poll
            wanted.add(f"poll {name}")
            trigger = interval_trigger(poll, jitter=poll.total_seconds() * 0.2)
            self._add(f"poll {name}", poll, trigger, self._soon(now, poll), self._poller(name))
            for job, entry in state.entries.items():
                schedule = entry.settings.schedule
                if schedule is None:
                    continue
                wanted.add(f"run {name} {job}")
                setting = (schedule, state.table.uri)  # another table may have the name by now
                if self._known.get(f"run {name} {job}") == setting:
                    continue
                due = schedule.due_after(entry.started, entry.first_seen)
                if entry.started is None and due <= now:
                    # All first runs of a table are queued before any of them starts, because they have an order.
                    self._scheduler.on_schedule(name, job)
                    due = schedule.due_after(now, now)
                due = max(due, self._soon(now, schedule.jitter))
                self._add(f"run {name} {job}", setting, schedule.trigger(due), due, self._runner(name, job))
        for removed in [name for name in self._known if not name.startswith("task ") and name not in wanted]:
            self._apscheduler.remove_job(removed)
            del self._known[removed]

    def _add(self, name: str, setting: object, trigger: Any, first: datetime | None, fire: Callable[[], None]) -> None:
        """Add a timer, or replace it if its ``setting`` has changed."""
        if self._known.get(name) == setting:
            return
        self._known[name] = setting
        extra = {} if first is None else {"next_run_time": first}
        self._apscheduler.add_job(fire, trigger, id=name, replace_existing=True, **extra)

    def _poller(self, table: str) -> Callable[[], None]:
        return lambda: self._scheduler.post(lambda: self._scheduler.poll(table, timed=True))

    def _runner(self, table: str, job: str) -> Callable[[], None]:
        return lambda: self._scheduler.post(lambda: self._scheduler.on_schedule(table, job))

    def _soon(self, now: datetime, within: timedelta) -> datetime:
        """Return a random time within 5 seconds from now, so that not all timers fire at once."""
        return now + timedelta(seconds=self._random.uniform(0, min(within.total_seconds(), _SPREAD_SECONDS)))
