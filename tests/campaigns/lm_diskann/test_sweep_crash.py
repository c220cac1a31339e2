"""catchup, compact and gc, ended before and after each durable step: nothing is lost, and the next run completes it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats import lm_diskann
from tests.support.lm_diskann.folders import check_rows, check_sound

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.report import Report


class Killed(BaseException):
    """As if the process had ended here."""


class Steps:
    """Carries out durable steps until the one at which the run ends: before it, or right after it."""

    def __init__(self, last: int) -> None:
        self.last, self.count, self.names = last, 0, list[str]()

    def __call__(self, name: str, act: Callable[[], Any]) -> Any:
        self.names.append(name)
        for done in (False, True):
            if self.count == self.last:
                raise Killed
            self.count += 1
            result = act() if not done else result  # noqa: F821 - set by the first round
        return result


def run(folder: str, job: str, last: int = -1, **options: Any) -> tuple[Report | None, Steps]:
    steps = Steps(last)
    table: Any = replace(open_table(folder), steps=steps)  # type: ignore[type-var]
    try:
        return run_job(table, job, apply=True, **options), steps
    except Killed:
        return None, steps


@pytest.fixture
def made(folder: str, vectors: np.ndarray) -> str:
    lm_diskann.create(folder, dimension=16, R=8, L=40)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1200), vectors[:1200])
        index.insert(np.arange(1200, 1220), vectors[1200:1220])
        index.delete(np.arange(0, 1220, 20))
        index.merge()
    return folder


LIVE = np.setdiff1d(np.arange(1220), np.arange(0, 1220, 20))


@pytest.mark.req("S2-003", "S2-040")
def test_catchup_ended_at_each_step(made: str, vectors: np.ndarray) -> None:
    backup = f"{made}.backup"
    shutil.copytree(made, backup)
    report, steps = run(made, "catchup", batch=40)
    assert report is not None
    assert report.to_json()["healed"] == 61
    assert {"sync the graph", "commit to the store", "append the commit to the view"} & {*steps.names}
    for last in range(steps.count):
        shutil.rmtree(made)
        shutil.copytree(backup, made)
        assert run(made, "catchup", last, batch=40)[0] is None
        check_rows(made, {int(row): vectors[row] for row in LIVE})
        again, _ = run(made, "catchup", batch=40)
        assert again is not None
        check_rows(made, {int(row): vectors[row] for row in LIVE})
        check_sound(made)
        with lm_diskann.open(made) as index:
            assert index.view.state.healed == 61
            found, _ = index.search(vectors[LIVE], k=1, L=100)
            assert (found[:, 0] == LIVE).mean() >= 0.99


def test_compact_ended_at_each_step(made: str, vectors: np.ndarray) -> None:
    """Then gc cuts the end off, and nothing of what is read has changed; a reader from before reads on."""
    for job in ("catchup", "merge"):
        run(made, job)
    backup = f"{made}.backup"
    shutil.copytree(made, backup)
    report, steps = run(made, "compact")
    assert report is not None
    moved = report.to_json()["blocks"]
    assert moved > 100
    names = {"write blocks into free slots", "sync the graph", "commit to the store", "publish the view"}
    assert names <= {*steps.names}
    kills = 0
    for last in range(steps.count):
        shutil.rmtree(made)
        shutil.copytree(backup, made)
        with lm_diskann.open(made, read_only=True, cache_bytes=0) as reader:
            kills += run(made, "compact", last)[0] is None  # fewer steps than without a reader
            check_rows(made, {int(row): vectors[row] for row in LIVE})
            run(made, "gc")
            found, _ = reader.search(vectors[LIVE], k=1, L=100)
            assert (found[:, 0] == LIVE).mean() >= 0.99
        run(made, "compact")
        run(made, "gc")
        check_rows(made, {int(row): vectors[row] for row in LIVE})
        check_sound(made)
        assert os.path.getsize(f"{made}/graph.lmd") <= 1.1 * len(LIVE) * 4096
    assert kills > len(names)


@pytest.mark.req("S2-041", "S2-089", "S2-094")
def test_gc_ended_at_each_step(made: str, vectors: np.ndarray) -> None:
    run(made, "catchup")
    with open(f"{made}/graph.lmd", "ab") as graph:
        graph.write(bytes(8192))  # as a merge leaves it that was killed
    backup = f"{made}.backup"
    shutil.copytree(made, backup)
    report, steps = run(made, "gc")
    assert report is not None
    assert {"commit to the store", "append the commit to the view", "trim the graph"} <= {*steps.names}
    for last in range(steps.count):
        shutil.rmtree(made)
        shutil.copytree(backup, made)
        assert run(made, "gc", last)[0] is None
        check_rows(made, {int(row): vectors[row] for row in LIVE})
        run(made, "gc")
        check_sound(made)
        with lm_diskann.open(made) as index:
            assert (index.view.state.healed, len(index.view.dead)) == (0, 0)
            assert os.path.getsize(f"{made}/graph.lmd") == index.view.state.slot_count * 4096
            index.insert(np.arange(3000, 3040), vectors[3000:3040])
            found, _ = index.search(vectors[3000:3040], k=1, L=100)
            assert (found[:, 0] == np.arange(3000, 3040)).mean() >= 0.95
        check_sound(made)
