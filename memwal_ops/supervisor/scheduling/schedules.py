"""Schedules of jobs (intervals and cron lines), and maintenance windows (``Mon-Fri 20:00-24:00``).

The next due time counts from the last start (before the first run: from when the job was first seen), and not from
the start of this process: a service that is restarted every minute still runs what is due every hour. Only this module
uses APScheduler, which computes the times of cron lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.triggers.cron import CronTrigger

from memwal_ops.text import duration_text

_FIELDS = 5
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
# `run --once` from cron may start a little too early.
_EARLY_FRACTION = 0.1
_MAX_EARLY = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Schedule:
    """An interval (``every``) or a cron line (``cron``), with up to ``jitter`` of delay."""

    every: timedelta | None
    cron: str | None
    jitter: timedelta
    zone: ZoneInfo

    def after(self, when: datetime) -> datetime:
        """Return the time that follows one of its times."""
        return self.due_after(when, when)

    def due_after(self, last: datetime | None, first_seen: datetime) -> datetime:
        """Return when it is due next, given its last start; ``first_seen`` if an interval never ran."""
        if self.every is not None:
            return first_seen if last is None else last + self.every
        fires = cron_trigger(str(self.cron), self.zone).get_next_fire_time(None, (last or first_seen) + _TICK)
        return datetime.max.replace(tzinfo=UTC) if fires is None else fires

    def is_due(self, now: datetime, last: datetime | None, first_seen: datetime) -> bool:
        """Whether it is due; an interval up to a tenth (at most a minute) early, for callers with the same interval."""
        early = timedelta(0) if self.every is None else min(self.every * _EARLY_FRACTION, _MAX_EARLY)
        return self.due_after(last, first_seen) - early <= now

    def period(self, now: datetime) -> timedelta:
        """Return the time from one run to the next."""
        if self.every is not None:
            return self.every
        trigger = cron_trigger(str(self.cron), self.zone)
        first = trigger.get_next_fire_time(None, now)
        second = None if first is None else trigger.get_next_fire_time(first, first.astimezone(UTC) + _TICK)
        return timedelta(days=1) if first is None or second is None else second - first

    def literal(self) -> str:
        """Return it as a configuration file has it: ``{every: 1h, jitter: 6m}``."""
        what = f"every: {duration_text(self.every)}" if self.every is not None else f'cron: "{self.cron}"'
        return f"{{{what}, jitter: {duration_text(self.jitter)}}}" if self.jitter else f"{{{what}}}"

    def __str__(self) -> str:
        """Return a human-readable text."""
        what = f"every {duration_text(self.every)}" if self.every is not None else f"cron {self.cron}"
        return f"{what}, jitter {duration_text(self.jitter)}" if self.jitter else what


_TICK = timedelta(microseconds=1)


def cron_trigger(text: str, zone: ZoneInfo) -> Any:
    """Return the trigger of a cron line of five fields, with cron's weekdays: 0 and 7 are Sunday.

    APScheduler counts them from Monday. Raises ``ValueError``: the line is invalid; the message can be shown to the
    user.
    """
    fields = text.split()
    if len(fields) != _FIELDS:
        raise ValueError(f"{text!r} is not a cron line; it has five fields: minute hour day month weekday.")
    minute, hour, day, month, weekday = fields
    if not {day, weekday} & {"*", "?"}:
        # cron runs if either matches, APScheduler only if both do: the line would run at other times than in cron.
        raise ValueError(f"the cron line {text!r} gives a day of the month and a weekday; leave one of them '*'.")
    try:
        return _Cron(
            is_wildcard=hour.startswith("*"),
            minute=minute,
            hour=hour,
            day=day,
            month=month.lower(),
            day_of_week=",".join(_weekdays(weekday)),
            timezone=zone,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text!r} is not a cron line: {error}.") from None


class _Cron(CronTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A cron line that fires as cron does where clocks go back: at fixed hours once, at any hour (``*``) again."""

    def __init__(self, *, is_wildcard: bool, **fields: Any) -> None:
        super().__init__(**fields)
        self._is_wildcard = is_wildcard

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        """The next time, in UTC: an addition forgets which of two equal hours it is."""
        fires: datetime | None = super().get_next_fire_time(previous, now)
        while fires is not None and fires.fold and not self._is_wildcard:
            fires = super().get_next_fire_time(None, fires.astimezone(UTC) + _TICK)
        return None if fires is None else fires.astimezone(UTC)


def _weekdays(text: str) -> Iterator[str]:
    for part in text.lower().split(","):
        span, slash, step = part.partition("/")
        if span in {"*", "?"}:
            if not slash:
                yield "*"
                return
            span = "0-6"
        first, dash, last = span.partition("-")
        begin = _weekday(first)
        end = _weekday(last) if dash else 6 if slash else begin
        end += 7 if end < begin else 0
        for number in range(begin, end + 1, _step(step) if slash else 1):
            yield _WEEKDAYS[number % 7]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _weekday(text: str) -> int:
    if _is_number(text) and int(text) <= 7:  # noqa: PLR2004 - days of a week
        return int(text)
    if text in _WEEKDAYS:
        return _WEEKDAYS.index(text)
    raise ValueError(f"{text!r} is not a weekday")


def _step(text: str) -> int:
    if not _is_number(text) or not int(text):
        raise ValueError(f"{text!r} is not a step")
    return int(text)


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TEXT = re.compile(r"(?:(?P<days>[A-Za-z,\s-]+?)\s+)?(?P<from>\d{1,2}:\d{2})\s*-\s*(?P<to>\d{1,2}:\d{2})", re.ASCII)
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Window:
    """A time range on some days of the week.

    ``days`` are those on which it begins (0 is Monday); ``start`` and ``end`` are minutes of the day. It may pass
    midnight.
    """

    text: str
    days: frozenset[int]
    start: int
    end: int

    def contains(self, when: datetime) -> bool:
        """Whether a local time is inside the window."""
        minute = when.hour * 60 + when.minute
        if self.start < self.end:
            return when.weekday() in self.days and self.start <= minute < self.end
        yesterday = (when.weekday() - 1) % 7
        return (when.weekday() in self.days and minute >= self.start) or (yesterday in self.days and minute < self.end)


def parse_window(text: str) -> Window:
    """Parse one window. Raises ``ValueError``: the text is invalid; the message can be shown to the user."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a window; write for example 22:00-06:00 or Mon-Fri 20:00-24:00.")
    start, end = _minute(match["from"], text), _minute(match["to"], text)
    if start in {end, _DAY_MINUTES}:
        raise ValueError(f"{text!r} is an empty window; for a whole day write 00:00-24:00.")
    return Window(text.strip(), _days(match["days"], text), start, end)


def in_window(windows: Iterable[Window], when: datetime, zone: ZoneInfo) -> bool:
    """Whether any window contains the time; without windows it is always open."""
    windows = tuple(windows)
    local = when.astimezone(zone)
    return not windows or any(window.contains(local) for window in windows)


def _minute(text: str, whole: str) -> int:
    hour, minute = (int(part) for part in text.split(":"))
    if minute > 59 or hour * 60 + minute > _DAY_MINUTES:  # noqa: PLR2004 - minutes of an hour
        raise ValueError(f"{text} in {whole!r} is not a time of day.")
    return hour * 60 + minute


def _days(text: str | None, whole: str) -> frozenset[int]:
    if text is None:
        return frozenset(range(7))
    days: set[int] = set()
    for part in text.split(","):
        first, _, last = (day.strip().lower() for day in part.partition("-"))
        last = last or first
        if first[:3] not in DAYS or last[:3] not in DAYS or min(len(first), len(last)) < 3:  # noqa: PLR2004 - "mon"
            raise ValueError(f"{part.strip()!r} in {whole!r} is not a day; write Mon, Tue, Wed, Thu, Fri, Sat or Sun.")
        begin, end = DAYS.index(first[:3]), DAYS.index(last[:3])
        days.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(days)
