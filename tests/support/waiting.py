"""Wait for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """The first value of the condition that is true.

    Raises:
        AssertionError: there was none for so long.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")
