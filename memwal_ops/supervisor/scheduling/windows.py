"""Parse and evaluate maintenance windows: ``22:00-06:00``, ``Mon-Fri 20:00-24:00``, ``Sat,Sun 00:00-24:00``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from zoneinfo import ZoneInfo

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
    """Parse one window.

    Raises:
        ValueError: the text is invalid; the message can be shown to the user.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a window; write for example 22:00-06:00 or Mon-Fri 20:00-24:00.")
    start, end = _minute(match["from"], text), _minute(match["to"], text)
    if start in {end, _DAY_MINUTES}:
        raise ValueError(f"{text!r} is an empty window; for a whole day write 00:00-24:00.")
    return Window(text.strip(), _days(match["days"], text), start, end)


def is_open(windows: Iterable[Window], when: datetime, zone: ZoneInfo) -> bool:
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
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = (one.strip().lower() for one in part.partition("-"))
        last = last or first
        if first[:3] not in DAYS or last[:3] not in DAYS or min(len(first), len(last)) < 3:  # noqa: PLR2004 - "mon"
            raise ValueError(f"{part.strip()!r} in {whole!r} is not a day; write Mon, Tue, Wed, Thu, Fri, Sat or Sun.")
        begin, end = DAYS.index(first[:3]), DAYS.index(last[:3])
        found.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(found)
