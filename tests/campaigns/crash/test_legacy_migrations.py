"""Migrations of legacy tables: killed at each call of the store, and 300 random state lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.legacy_migrations import kill_and_repeat, migrate_random_lists
from tests.support.seeds import env_number

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
@pytest.mark.parametrize("layout", ["shard", "region"])
def test_killed_at_each_call_and_repeated(tmp_path: Path, layout: str) -> None:
    kill_and_repeat(tmp_path, layout, every=env_number("FAULT_PARTS", 1))


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_300_random_state_lists(tmp_path: Path, part: int) -> None:
    migrate_random_lists(tmp_path, range(50 * part, 50 * part + 50))
