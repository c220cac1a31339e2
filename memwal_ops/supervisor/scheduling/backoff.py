"""Exponential backoff of jobs that fail repeatedly."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from memwal_ops.supervisor.config.model import BackoffConfig

_JITTER = 0.2


def wait_after(failures: int, config: BackoffConfig, random_: random.Random) -> timedelta:
    """Return the wait after ``failures`` consecutive failures.

    Zero below ``config.failures``; then ``first``, doubling up to ``longest``, each up to a fifth longer (jitter).
    """
    over = failures - config.failures
    if over < 0:
        return timedelta(0)
    wait = min(config.first * 2 ** min(over, 40), config.longest) if over < 40 else config.longest  # noqa: PLR2004 - 2**40 of anything is longer
    return wait * (1 + _JITTER * random_.random())
