"""Time, in one place, so that tests have their own."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """The machine's."""

    def now(self) -> datetime:
        """Wall clock, aware, UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that only rise."""
        return time.monotonic()
