"""One of the other programs, which the seed selects, takes NEIGHBOUR_TURNS turns; ``make neighbours`` walks all."""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

import pytest

from memwal_ops import run_job
from tests.campaigns.clients.environments import NoEnvironmentError, python_of
from tests.campaigns.neighbours.oracle import differences
from tests.campaigns.neighbours.walk import NEIGHBOURS, Process, ProgramError, walked
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from pathlib import Path

TURNS = env_number("NEIGHBOUR_TURNS", 4)
LARGE = {
    "lance-ray",
    "daft-lance",
    "lancedb-ray",
}  # packages of half a gigabyte, and a cluster: by make neighbours alone


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


def test_lancedb_036_fails_by_segments_until_ours_builds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lance 9's update trains one of two segments anew; from then on neither it nor pylance's merges them."""
    if not os.environ.get("CLIENT_ENVIRONMENTS"):
        monkeypatch.setenv("CLIENT_ENVIRONMENTS", str(tmp_path / "environments"))
    try:
        python = python_of("lancedb 0.36.0")
    except NoEnvironmentError as error:
        pytest.skip(str(error))
    program, uri = Process(python, "lancedb", tmp_path), str(tmp_path / "t.lance")
    rows = {f"k{key:05d}": "first" for key in range(400)}

    def turn(number: int) -> None:
        changed = {f"k{key:05d}": f"turn {number}" for key in (*range(20 * number, 20 * number + 8), *_new(number))}
        gone = [f"k{key:05d}" for key in range(20 * number + 10, 20 * number + 14)]
        program.call("put", changed)
        program.call("delete", gone)
        rows.update(changed)
        for key in gone:
            del rows[key]

    try:
        program.call("create", rows)
        turn(0)
        assert run_job(uri, "catchup").decision == "caught_up"
        program.call("maintain")
        turn(1)
        with pytest.raises(ProgramError, match="do not share"):
            program.call("maintain")
        assert run_job(uri, "catchup", max_segments=1).exit_code == 0
        assert [index.segments for index in run_job(uri, "catchup").indexes] == [1, 1]
        for number in (2, 3):
            turn(number)
            program.call("maintain")
        keys = sorted(rows)[::37]
        assert [program.call("nearest", key) for key in keys] == keys
        assert differences(program.call("read"), rows, "its own scan") == []
    finally:
        program.close()
    assert run_job(uri, "verify", answers=True).exit_code == 0


def _new(number: int) -> range:
    return range(400 + 10 * number, 410 + 10 * number)
