"""Histories of several region writers on a table hold every invariant, and bugs planted in the writer are found.

``SIM_WRITER_HISTORIES=500`` runs more, ``CAMPAIGN_SEED=3`` others; a failure names the command that runs it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.campaigns.sim.history import run_histories
from tests.campaigns.sim.planted import hunt
from tests.campaigns.sim.region_planted import FOUND, WRITER_BUGS
from tests.campaigns.sim.region_writer_steps import WRITER_WEIGHTS, WriterHistory
from tests.campaigns.sim.region_writers import ACKNOWLEDGED, FAILED, FENCED, KILLED
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from pathlib import Path

FEW, ENOUGH = 30, 200
HISTORIES = env_number("SIM_WRITER_HISTORIES", FEW)
FIRST = 1 + CAMPAIGN_SEED * 1000


@pytest.mark.timeout(0 if HISTORIES > FEW else 3600)
@pytest.mark.req("S0-116", "S0-122", "S0-126", "S0-152", "S0-153", "S0-154", "S0-161", "S0-207", "S0-208", "S0-210")
def test_every_acknowledged_row_is_read(tmp_path: Path) -> None:
    effects = run_histories(range(FIRST, FIRST + HISTORIES), str(tmp_path), WriterHistory)
    assert effects["histories"] == HISTORIES
    if HISTORIES >= FEW:
        assert all(effects[outcome] for outcome in (ACKNOWLEDGED, FAILED, FENCED, KILLED)), effects
    if HISTORIES >= ENOUGH:
        idle = sorted(kind for kind in WRITER_WEIGHTS if not effects[kind])
        assert not idle, f"{idle} never had an effect in {HISTORIES} histories"


@pytest.mark.parametrize("name", WRITER_BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """In the history that told it when all were hunted (``python -m tests.campaigns.sim.region_planted``), or others.

    Whatever changes the number of a job's calls changes what the histories come by.
    """
    assert hunt(WRITER_BUGS[name], [FOUND[name], *range(1, FEW + 1)], WriterHistory), "no history tells it"
