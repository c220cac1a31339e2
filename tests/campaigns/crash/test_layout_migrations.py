"""Migrations between the layouts of today: killed at each call of the store, and killed processes beside writers."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from memwal_ops import run_job
from memwal_ops.errors import MemwalOpsError
from tests.support.layout_migrations import OTHER, base_rows, empty, kill_and_repeat, migrate, scanned
from tests.support.seeds import env_number

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 3


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [*OTHER])
def test_killed_at_each_call_and_repeated(tmp_path: Path, layout: str) -> None:
    kill_and_repeat(tmp_path, layout, every=env_number("FAULT_PARTS", 1))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [*OTHER])
def test_killed_beside_writers_that_are_killed(tmp_path: Path, layout: str) -> None:
    """Two migrations, two writers and merges: each row that was acknowledged is read, once, as it was written last."""
    uri, dice = str(tmp_path / "t.lance"), random.Random(7)
    made = empty(uri, layout)
    logs: list[Path] = []

    def start(act: str, number: int) -> subprocess.Popen[bytes]:
        logs.append(tmp_path / f"{act}-{number}.log")
        with logs[-1].open("wb") as out:
            command = [sys.executable, "-m", "tests.campaigns.crash.layout_process", act, uri, str(number)]
            return subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)

    def written() -> int:
        return sum(log.read_bytes().count(b"\n") for log in logs)

    number = 0
    for _ in range(ROUNDS):
        running = []
        for act in ("write", "write", "migrate", "migrate"):
            number += 1
            running.append(start(act, number * 1_000_000))
        try:
            before = written()
            while written() < before + 40:
                time.sleep(0.05)
            for process in dice.sample(running, len(running)):
                time.sleep(dice.random())
                process.kill()
        finally:
            for process in running:
                process.kill()
                process.wait()
        try:
            run_job(uri, "merge")
        except MemwalOpsError as error:
            assert error.reason == "commit_conflict"
    for to in (OTHER[layout], layout, OTHER[layout]):
        assert migrate(uri, to).decision in {"migrated", "nothing_to_migrate"}
    assert run_job(uri, "merge").exit_code == 0
    # Per key what may be read: what was acknowledged last, and what was tried since, without an answer.
    allowed: dict[int, list[float | None]] = {key: [value] for key, value in made.model.items()}
    for log in logs:
        for line in log.read_text().rpartition("\n")[0].splitlines():
            word, key, value = line.split()
            if word == "wrote":
                allowed[int(key)] = [float(value)]
            else:
                allowed.setdefault(int(key), [None]).append(float(value))
    found = base_rows(uri)
    assert found == scanned(uri)
    assert not {key: (found.get(key), values) for key, values in allowed.items() if found.get(key) not in values}
    assert found.keys() <= allowed.keys()
