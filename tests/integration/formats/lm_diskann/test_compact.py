"""compact moves blocks to the front of the graph, so that gc can cut its end off; readers and holds keep slots."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import BusyError, StorageError, TableCorruptError
from memwal_ops.formats import lm_diskann
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_rows, check_sound
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from collections.abc import Callable

GONE = np.arange(0, 2000, 3)
LIVE = np.setdiff1d(np.arange(2000), GONE)


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    """A graph of 2,000 nodes, a third of which is deleted and healed, everywhere in the file."""
    with lm_diskann.create(template, dimension=16, R=8, L=40) as index:
        index.insert(np.arange(2000), vectors[:2000])
        index.delete(GONE)
    for job in ("merge", "catchup", "merge"):
        run_job(template, job)
    return template


@pytest.fixture
def expected(vectors: np.ndarray) -> dict[int, np.ndarray]:
    return {int(row): vectors[row] for row in LIVE}


def bytes_of(folder: str) -> int:
    return os.path.getsize(f"{folder}/graph.lmd")


def new_build(folder: str, vectors: np.ndarray) -> int:
    with lm_diskann.create(f"{folder}.new", dimension=16, R=8, L=40) as index:
        index.insert(LIVE, vectors[LIVE])
    return bytes_of(f"{folder}.new")


def test_the_graph_becomes_as_short_as_that_of_a_new_index(
    made: str, vectors: np.ndarray, expected: dict[int, np.ndarray]
) -> None:
    planned = run_job(made, "compact", apply=False).to_json()
    assert planned["decision"] == "dry_run"
    assert run_job(made, "compact", apply=False).to_json() == planned, "a plan changes nothing"
    assert run_job(made, "inspect").to_json()["backlog"]["free_percent"] >= 30
    done = run_job(made, "compact").to_json()
    assert done["decision"] == "compacted"
    assert done["blocks"] == pytest.approx(planned["blocks"], rel=0.1), "some are moved twice: out of the way, and back"
    assert done["blocks"] * View(made).folder.block_size == done["bytes"]
    check_rows(made, expected)
    check_sound(made)
    before = bytes_of(made)
    run_job(made, "gc", apply=True)
    assert before - bytes_of(made) >= done["bytes_reclaimable"] > 0
    assert bytes_of(made) <= 1.1 * new_build(made, vectors)
    check_rows(made, expected)
    check_sound(made)
    with lm_diskann.open(made, read_only=True) as index:
        assert (index.search(vectors[LIVE], k=1, L=100)[0][:, 0] == LIVE).mean() >= 0.99
    again = run_job(made, "compact").to_json()
    assert (again["decision"], again["blocks"]) == ("unchanged", 0)
    assert "can be spared" in again["why"]
    assert run_job(made, "inspect").to_json()["backlog"]["free_percent"] < 5


@pytest.mark.long
def test_a_run_moves_no_more_than_its_budget_and_the_next_one_continues(
    made: str, expected: dict[int, np.ndarray]
) -> None:
    size = View(made).folder.block_size
    left = run_job(made, "compact", apply=False).to_json()["blocks"]
    assert run_job(made, "compact", apply=False, max_bytes=100 * size).to_json()["blocks"] == 100
    while (done := run_job(made, "compact", max_bytes=100 * size).to_json())["decision"] == "compacted":
        assert done["blocks"] <= 100
        assert ("--max-bytes" in (done["why"] or "")) is (done["blocks"] == 100)
        left -= done["blocks"]
        check_rows(made, expected)
    assert left <= 0
    check_sound(made)


def test_a_reader_and_a_hold_read_on(made: str, vectors: np.ndarray, expected: dict[int, np.ndarray]) -> None:
    with lm_diskann.open(made, read_only=True, cache_bytes=0) as reader:
        epoch = reader.epoch
        take_hold(open_table(made), epoch, timedelta(hours=1))
        was = reader.search(vectors[:300], k=5, L=200)[0]  # above what deleted rows make of L
        run_job(made, "compact")
        length = bytes_of(made)
        run_job(made, "gc", apply=True)
        assert bytes_of(made) == length, "its view leads to slots at the end"
        with lm_diskann.open(made) as index:
            index.insert(np.arange(5000, 5300), vectors[2000:2300])
            index.merge()
        assert (reader.search(vectors[:300], k=5, L=200, as_of=epoch)[0] == was).all()
    with lm_diskann.open(made, read_only=True, cache_bytes=0) as later:
        assert (later.search(vectors[:300], k=5, L=200, as_of=epoch)[0] == was).all()
    check_rows(made, expected, epoch)
    check_sound(made)


@pytest.mark.long
def test_a_reader_keeps_the_old_slots_until_it_refreshes(made: str, vectors: np.ndarray) -> None:
    """Then its view leads to the new ones, and gc cuts the old ones off."""
    with lm_diskann.open(made, read_only=True, cache_bytes=0) as reader:
        was = reader.search(vectors[:300], k=5, L=200)[0]
        run_job(made, "compact")
        length = bytes_of(made)
        run_job(made, "gc", apply=True)
        assert bytes_of(made) == length
        assert (reader.search(vectors[:300], k=5, L=200)[0] == was).all(), "refreshed by the search"
        run_job(made, "gc", apply=True)
        assert bytes_of(made) < length
        assert (reader.search(vectors[:300], k=5, L=200)[0] == was).all()


def test_a_damaged_block_is_not_moved(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    size = View(made).folder.block_size
    with open(f"{made}/graph.lmd", "r+b") as graph:
        graph.seek(-size + 100, os.SEEK_END)
        graph.write(b"damaged")
    before = run_job(made, "inspect").to_json()["revision"]
    shown = run_here(capfd, "compact", made)
    assert shown.code == TableCorruptError.exit_code
    assert "memwal-ops verify" in shown.err
    assert run_job(made, "inspect").to_json()["revision"] <= before + 1, "nothing but the lowest epoch was committed"


def test_a_full_disk_changes_nothing(made: str, expected: dict[int, np.ndarray]) -> None:
    def full(name: str, act: Callable[[], Any]) -> Any:
        if name == "write blocks into free slots":
            raise StorageError("The disk is full.")
        return act()

    table: Any = replace(open_table(made), steps=full)  # type: ignore[type-var]
    with pytest.raises(StorageError):
        run_job(table, "compact")
    check_rows(made, expected)
    check_sound(made)
    assert run_job(made, "compact").to_json()["decision"] == "compacted"


def test_it_waits_for_a_writer(made: str) -> None:
    with lm_diskann.open(made):
        for apply in (True, False):
            with pytest.raises(BusyError):
                run_job(made, "compact", apply=apply, wait="0s")


def test_an_empty_index_and_an_exact_one_have_nothing_to_move(folder: str, vectors: np.ndarray) -> None:
    for count in (0, 20):
        if count:
            with lm_diskann.open(folder) as index:
                index.insert(np.arange(count), vectors[:count])
        else:
            lm_diskann.create(folder, dimension=16).close()
        assert run_job(folder, "compact").to_json()["decision"] == "unchanged"
