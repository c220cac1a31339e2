"""Jobs on main and on branches side by side, under writers of both, hold every invariant.

``SIM_BRANCH_HISTORIES=500`` runs more, ``CAMPAIGN_SEED=3`` others; a failure names the command that runs it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from tests.campaigns.sim.branch_steps import BRANCH_STEPS, BranchHistory
from tests.campaigns.sim.history import run_histories
from tests.campaigns.sim.planted import Bug, Patch, hunt
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FEW = 30
# The history that told the bug when it was hunted; another one may, once a job makes other calls.
FOUND = 6
HISTORIES = env_number("SIM_BRANCH_HISTORIES", FEW)
FIRST = 1 + CAMPAIGN_SEED * 1000


@pytest.mark.timeout(0 if HISTORIES > FEW else 3600)
def test_no_job_on_a_branch_harms_main_and_none_on_main_a_branch(tmp_path: Path) -> None:
    effects = run_histories(range(FIRST, FIRST + HISTORIES), str(tmp_path), BranchHistory)
    assert effects["histories"] == HISTORIES
    if HISTORIES >= FEW:
        idle = sorted(kind for kind in BRANCH_STEPS if not effects[kind])
        assert not idle, f"{idle} never had an effect in {HISTORIES} histories"


def _tags_of_main() -> Iterable[Patch]:
    def named(self: Any) -> frozenset[int]:
        return frozenset(self._branched) | {version for branch, version in self.tags.values() if branch is None}

    yield Patch(LiveVersions, "named", named)


def test_an_expiry_that_takes_all_tags_for_those_of_main_is_found() -> None:
    bug = Bug("tags of main", "A job on a branch keeps the versions that tags of main name.", _tags_of_main)
    assert hunt(bug, [FOUND, *range(1, FEW + 1)], BranchHistory), "no history tells it"
