"""The clock of the supervisor, which tests replace."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the wall clock time: time zone aware, UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()
