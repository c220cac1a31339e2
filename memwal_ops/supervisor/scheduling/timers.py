"""Timers: fire the schedules of jobs, the polls of backlogs, and the service's own periodic tasks.

They go by the scheduler's clock, and only post events to it: a forecast has the same ones.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from datetime import MAXYEAR, datetime, timedelta
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any

from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.supervisor.scheduling.scheduler import Scheduler

    Key = tuple[str, ...]

_SPREAD_SECONDS, _POLL_JITTER = 5.0, 0.2
_SET_BACK_SECONDS = 5.0


@dataclass(slots=True)
class _Timer:
    """One timer.

    Attributes:
        setting: what it was made of; another one replaces it.
        after: returns the time that follows another one.
        jitter: it fires up to so many seconds later.
        base: its next time; ``due``: with its jitter.
    """

    setting: object
    after: Callable[[datetime], datetime]
    jitter: float
    base: datetime
    due: datetime


class Timers:
    """The timers of one scheduler."""

    def __init__(self, scheduler: Scheduler, misfire_grace: timedelta, random_: random.Random | None = None) -> None:
        """Make the timers; none fires before :meth:`start`."""
        self._scheduler, self._grace = scheduler, misfire_grace
        self._random = random_ or random.Random()  # noqa: S311 - jitter
        self._log = get_logger(__name__)
        self._timers: dict[Key, _Timer] = {}
        self._tasks: dict[Key, Callable[[], None]] = {}
        self._queue: list[tuple[datetime, Key]] = []
        self._ahead = self._offset()
        self.running = False

    def start(self) -> None:
        """Let them fire."""
        self.running = True

    def stop(self) -> None:
        """Let none fire any more."""
        self.running = False
        self._timers.clear()

    def next_run(self, table: str, job: str) -> datetime | None:
        """Return when a schedule fires next, with its jitter; None if it has no timer."""
        timer = self._timers.get(("run", table, job))
        return None if timer is None else timer.due

    def next_poll(self, table: str) -> datetime | None:
        """Return when a poll of a table is due next; None if it has no timer."""
        timer = self._timers.get(("poll", table))
        return None if timer is None else timer.due

    def next_time(self) -> datetime | None:
        """Return when the next one fires; None: there is none."""
        while self._queue and not self._is_current(*self._queue[0]):
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def fire(self) -> None:
        """Fire what is due. Several times that were missed are one; one that is later than the grace is skipped."""
        now = self._scheduler.clock.now()
        while self._scheduler.awake:
            key: Key = ("poll", self._scheduler.awake.pop())
            if (timer := self._timers.get(key)) is not None and timer.due > (soon := timer.after(now)):
                self.move(key, soon)
        while self.running and (due := self.next_time()) is not None and due <= now:
            _, key = heapq.heappop(self._queue)
            timer = self._timers[key]
            late = now - self._advance(key, timer, now)
            if late > self._grace:
                self._log.warning("timer_missed", timer=" ".join(key), seconds=round(late.total_seconds(), 1))
            elif key[0] == "poll" and (skips := self._scheduler.polls_to_skip(key[1])):
                self.move(key, timer.due + (skips - 1) * (timer.after(now) - now))
            else:
                self._fire(key)

    def has(self, key: Key) -> bool:
        """Whether there is such a timer."""
        return key in self._timers

    def move(self, key: Key, due: datetime) -> None:
        """Let a timer fire at another time next."""
        timer = self._timers[key]
        timer.base = timer.due = due
        heapq.heappush(self._queue, (due, key))

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
        now = self._scheduler.clock.now()
        for key in self._tasks:
            self.move(key, self._timers[key].after(now))
        self._timers = {key: self._timers[key] for key in self._tasks}
        self.sync()

    def every(self, name: str, interval: timedelta, task: Callable[[], None]) -> None:
        """Run a task of the service at an interval, on the scheduler's thread."""
        self._tasks["task", name] = task
        self._add(("task", name), interval, partial(add, interval), 0.0, self._scheduler.clock.now() + interval)

    def sync(self) -> None:
        """Make the timers match the scheduler's tables and jobs."""
        now = self._scheduler.clock.now()
        wanted: set[Key] = {*self._tasks}
        for name, state in self._scheduler.tables.items():
            poll = state.table.settings.poll
            wanted.add(("poll", name))
            jitter = poll.total_seconds() * _POLL_JITTER
            self._add(("poll", name), poll, partial(add, poll), jitter, self._soon(now, poll))
            for job, entry in state.entries.items():
                schedule = entry.settings.schedule
                if schedule is None:
                    continue
                key: Key = ("run", name, job)
                wanted.add(key)
                setting = (schedule, state.table.uri)  # another table may have the name by now
                if key in self._timers and self._timers[key].setting == setting:
                    continue
                due = schedule.due_after(entry.started, entry.first_seen)
                if entry.started is None and due <= now:
                    # All first runs of a table are queued before any of them starts, because they have an order.
                    self._scheduler.on_schedule(name, job)
                    due = schedule.due_after(now, now)
                due = max(due, self._soon(now, schedule.jitter))
                self._add(key, setting, schedule.after, schedule.jitter.total_seconds(), due)
        for key in self._timers.keys() - wanted:
            del self._timers[key]

    def _offset(self) -> float:
        return self._scheduler.clock.now().timestamp() - self._scheduler.clock.monotonic()

    def _is_current(self, due: datetime, key: Key) -> bool:
        timer = self._timers.get(key)
        return timer is not None and timer.due == due

    def _add(self, key: Key, setting: object, after: Any, jitter: float, first: datetime) -> None:
        known = self._timers.get(key)
        if known is None or known.setting != setting:
            self._timers[key] = _Timer(setting, after, jitter, first, first)
            heapq.heappush(self._queue, (first, key))

    def _advance(self, key: Key, timer: _Timer, now: datetime) -> datetime:
        passed = timer.base
        while (following := timer.after(passed)) <= now:
            passed = following
        never = following.year == MAXYEAR
        late = timedelta(seconds=0 if never else self._random.uniform(0, timer.jitter))
        timer.base, timer.due = following, following + late
        heapq.heappush(self._queue, (timer.due, key))
        return passed

    def _fire(self, key: Key) -> None:
        scheduler, (kind, name, *job) = self._scheduler, key
        if kind == "task":
            scheduler.post(self._tasks[key])
        elif kind == "poll":
            scheduler.post(lambda: scheduler.poll(name, timed=True))
        else:
            scheduler.post(lambda: scheduler.on_schedule(name, *job))

    def _soon(self, now: datetime, within: timedelta) -> datetime:
        """Return a random time within 5 seconds from now, so that not all timers fire at once."""
        return now + timedelta(seconds=self._random.uniform(0, min(within.total_seconds(), _SPREAD_SECONDS)))
