"""Seeds of the campaigns: CAMPAIGN_SEED=N runs others than the last time, and the same ones again for the same N."""

from __future__ import annotations

import os

CAMPAIGN_SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))


def env_number(name: str, default: int) -> int:
    """An environment variable that is a number; ``default`` where it is not set, or empty."""
    return int(os.environ.get(name) or default)
