"""Wait for what another process or thread does: for that itself, and longer than any busy machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds. Only a test that fails waits so long; a machine that runs ten things at once must not fail it."""


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first value of the condition that is true.

    Asked less and less often: a condition that asks a service costs both processes more than what they wait for.

    Raises:
        AssertionError: there was none for so long.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        found = condition()
        if found:
            return found
        time.sleep(min(max(0.02, waited / 10), 0.25))
    raise AssertionError(f"not within {seconds} s")
