"""Random lives that are killed at durable steps lose nothing, and each planted fault is found by them."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from memwal_ops.errors import MemwalOpsError
from tests.campaigns.lm_diskann.lives import Content, Life, live, prepare
from tests.campaigns.lm_diskann.planted import PLANTED
from tests.support.lm_diskann.fixtures import compile_kernels
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.campaign

LIVES = env_number("LM_DISKANN_LIVES", 40)
MOST = 40


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Content]:
    compile_kernels()
    folder = tmp_path_factory.mktemp("prepared") / "vectors.lmd"
    return folder, prepare(str(folder))


def _live(prepared: tuple[Path, Content], tmp_path: Path, seed: int) -> Life:
    folder = tmp_path / f"{seed}.lmd"
    shutil.copytree(prepared[0], folder)
    with pytest.MonkeyPatch.context() as patch:
        life = live(str(folder), prepared[1], seed, patch)
    shutil.rmtree(folder)
    return life


@pytest.mark.req("S2-003", "S2-011", "S2-035", "S2-049", "S2-067", "S2-078", "S2-090", "S2-091", "S2-093")
@pytest.mark.timeout(3600)
def test_random_lives(prepared: tuple[Path, Content], tmp_path: Path) -> None:
    lives = [_live(prepared, tmp_path, CAMPAIGN_SEED * 1000 + one) for one in range(LIVES)]
    assert sum(life.kills for life in lives) >= LIVES


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda one: one.__name__)
def test_a_planted_fault_is_found(
    prepared: tuple[Path, Content], tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(monkeypatch)
    for seed in range(MOST):
        try:
            _live(prepared, tmp_path, seed)
        except (AssertionError, MemwalOpsError) as error:
            assert re.search(PLANTED[plant], str(error)), error
            return
    pytest.fail(f"{MOST} lives, and nothing noticed")
