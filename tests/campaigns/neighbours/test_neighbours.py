"""One of the other programs, which the seed selects, takes NEIGHBOUR_TURNS turns; ``make neighbours`` walks all."""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

import pytest

from tests.campaigns.clients.environments import NoEnvironmentError
from tests.campaigns.neighbours.oracle import differences
from tests.campaigns.neighbours.walk import NEIGHBOURS, walked
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from pathlib import Path

TURNS = env_number("NEIGHBOUR_TURNS", 4)
LARGE = {"lance-ray", "daft-lance"}  # packages of half a gigabyte, and a cluster: by make neighbours alone


def test_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, indexes and answers are right after each turn, for it and for pylance, and ours are healthy."""
    neighbour = random.Random(CAMPAIGN_SEED).choice([one for one in NEIGHBOURS if one.program not in LARGE])
    sys.stdout.write(f"CAMPAIGN_SEED={CAMPAIGN_SEED}: {neighbour.name}, {TURNS} turns\n")
    if not os.environ.get("CLIENT_ENVIRONMENTS"):
        monkeypatch.setenv("CLIENT_ENVIRONMENTS", str(tmp_path / "environments"))
    try:
        walk = walked(neighbour, tmp_path / "walk", TURNS)
    except NoEnvironmentError as error:
        pytest.skip(str(error))
    assert walk.faults == []


@pytest.mark.parametrize(
    ("read", "word"),
    [
        ([["a", "1"]], "b is lost"),
        ([["a", "1"], ["a", "1"], ["b", "2"]], "a twice"),
        ([["a", "1"], ["b", "1"]], "b has '1', not '2'"),
        ([["a", "1"], ["b", "2"], ["c", "3"]], "c is there"),
    ],
)
def test_the_oracle_finds(read: list[list[str]], word: str) -> None:
    (found,) = differences(read, {"a": "1", "b": "2"}, "a scan")
    assert word in found
    assert differences([["b", "2"], ["a", "1"]], {"a": "1", "b": "2"}, "a scan") == []
