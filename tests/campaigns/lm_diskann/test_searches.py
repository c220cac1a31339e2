"""Two processes search while a writer and jobs are killed again and again; LM_DISKANN_SECONDS=600 for ten minutes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memwal_ops import run_job
from memwal_ops.formats import lm_diskann
from tests.campaigns.lm_diskann.churn import vector
from tests.support.lm_diskann.folders import check_sound
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
ROWS, SEARCHERS = 1100, 2
JOBS = [("merge", "--max-bytes", "256KiB"), ("catchup",), ("compact", "--max-bytes", "4MiB"), ("gc", "--apply")]
SECONDS = env_number("LM_DISKANN_SECONDS", 20)


def start(log: Path, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=file, stderr=file, cwd=ROOT)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[Any]]]:
    processes: list[subprocess.Popen[Any]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(1800 + 3 * SECONDS)
@pytest.mark.req("S2-010", "S2-020", "S2-069")
def test_no_answer_is_wrong(folder: str, tmp_path: Path, ended: list[subprocess.Popen[Any]]) -> None:
    random = np.random.default_rng(1 + CAMPAIGN_SEED)
    lm_diskann.create(folder, dimension=8, R=32, L=100)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(ROWS), np.stack([vector(row) for row in range(ROWS)]))
    ledger = tmp_path / "ledger"
    ledger.touch()
    logs = [tmp_path / f"searcher-{one}" for one in range(SEARCHERS)]
    searchers = [
        start(log, "tests.campaigns.lm_diskann.searcher", folder, str(ledger), str(one), str(ROWS))
        for one, log in enumerate(logs)
    ]
    ended += searchers
    until, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < until or not all(log.stat().st_size for log in logs):
        stamp = 3000 * (1 + kills * 10_000)
        writer = start(ledger, "tests.campaigns.lm_diskann.churn", folder, str(random.integers(1 << 30)), str(stamp))
        ended.append(writer)
        time.sleep(random.uniform(2, 5))
        writer.kill()
        writer.wait()
        name, *options = JOBS[random.integers(len(JOBS))]
        job = start(tmp_path / "jobs", "memwal_ops", name, folder, *options)
        ended.append(job)
        time.sleep(random.uniform(0.5, 3))
        job.kill()
        job.wait()
        kills += 2
        for searcher, log in zip(searchers, logs, strict=True):
            assert searcher.poll() is None, log.read_text()
    for name, options in (("catchup", {}), ("merge", {}), ("compact", {}), ("gc", {"apply": True})):
        assert run_job(folder, name, **options).exit_code == 0
        check_sound(folder)
    print(f"{kills} kills, {[log.read_text().splitlines()[-1] for log in logs]} searches")  # noqa: T201 - for the note
