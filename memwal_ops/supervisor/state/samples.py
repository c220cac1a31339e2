"""Keep the amounts of a backlog over the last day, in bounded memory, for the charts of the pages."""

from __future__ import annotations

from itertools import dropwhile

_MAX_SAMPLES = 120
_KEPT_SECONDS = 24 * 3600.0


class Samples:
    """Amounts with their times, the oldest first: at most 120, the older ones farther apart."""

    def __init__(self) -> None:
        """Start empty."""
        self._taken: tuple[tuple[float, float], ...] = ()

    def add(self, when: float, amount: float) -> None:
        """Add the amount at a time, in seconds since 1970.

        What is kept with a later time is dropped: the clock was set back.
        """
        kept = dropwhile(lambda one: one[0] < when - _KEPT_SECONDS, self._taken)
        taken = (*(one for one in kept if one[0] < when), (when, amount))
        # Of the older half, every second sample is dropped: the recent hours stay exact.
        half = _MAX_SAMPLES // 2
        self._taken = taken if len(taken) <= _MAX_SAMPLES else (*taken[:half:2], *taken[half:])

    def all(self) -> tuple[tuple[float, float], ...]:
        """Return what is kept; safe on any thread."""
        return self._taken
