"""gc gives the slots of healed nodes back, cuts the end of the graph, and takes nothing that a reader may need."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta

import duckdb
import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.jobs import gc
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_rows, check_sound

GONE = np.arange(0, 1500, 5)
LIVE = np.setdiff1d(np.arange(1500), GONE)


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    lm_diskann.create(template, dimension=16, R=8, L=40)
    with lm_diskann.open(template) as index:
        index.insert(np.arange(1500), vectors[:1500])
        index.delete(GONE)
    run_job(template, "merge")
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


def kinds(folder: str, *, apply: bool = False) -> dict[str, int]:
    report = run_job(folder, "gc", apply=apply, limit=10_000).to_json()
    found: dict[str, int] = {}
    for one in report["delete"]:
        found[one["kind"]] = found.get(one["kind"], 0) + 1
    return found


def rows_of(folder: str) -> dict[str, int]:
    tables = ("lmd_lookup", "lmd_tombstoned_nodes", "lmd_sweep_list", "lmd_slots")
    with duckdb.connect(f"{folder}/diskann_store.duckdb", read_only=True) as store:
        return {name: store.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0] for name in tables}


def slots_of(folder: str, table: str) -> set[int]:
    with duckdb.connect(f"{folder}/diskann_store.duckdb", read_only=True) as store:
        return {slot for (slot,) in store.execute(f"SELECT slot FROM {table}").fetchall()}


@pytest.mark.long
@pytest.mark.req("S2-028", "S2-041", "S2-086", "S2-101")
def test_nodes_wait_until_they_are_healed_and_then_their_slots_are_free(made: str, vectors: np.ndarray) -> None:
    planned = run_job(made, "gc", limit=1000).to_json()
    held = [one for one in planned["held"] if one["kind"] == "node"]
    assert len(held) == 300
    assert all("catchup" in one["because"] for one in held)
    run_job(made, "catchup")
    assert run_job(made, "inspect").to_json()["backlog"]["healed_nodes"] == 300
    assert kinds(made)["node"] == 300
    assert rows_of(made)["lmd_tombstoned_nodes"] == 300, "a plan changes nothing"
    report = run_job(made, "gc", apply=True)
    assert report.decision == "deleted"
    assert rows_of(made) == {"lmd_lookup": 1200, "lmd_tombstoned_nodes": 0, "lmd_sweep_list": 0, "lmd_slots": 1200}
    check_rows(made, {int(row): vectors[row] for row in LIVE})
    check_sound(made)
    free = slots_of(made, "lmd_free_nodes")
    with lm_diskann.open(made) as index:
        index.insert(GONE, vectors[2000:2300])
        index.merge()
        found, _ = index.search(vectors[2000:2300], k=1, L=100)
        assert (found[:, 0] == GONE).mean() >= 0.99
        everything, _ = index.search(vectors[:5], k=1500, allow=np.arange(1500))
        assert (everything >= 0).all(), "an exact scan does not read a slot as the node that it was"
    assert free & slots_of(made, "lmd_slots"), "the slots are used again"
    check_sound(made)


@pytest.mark.long
@pytest.mark.req("S2-071")
def test_a_reader_and_a_hold_keep_what_they_need(made: str, vectors: np.ndarray) -> None:
    with lm_diskann.open(made, read_only=True) as reader:
        epoch = reader.epoch
        was = reader.search(vectors[:100], k=5)[0]
        run_job(made, "catchup")
        report = run_job(made, "gc", apply=True, limit=1000).to_json()
        kept = [one for one in report["held"] if one["kind"] == "node"]
        assert len(kept) == 300
        assert f"need epochs from {epoch} on" in kept[0]["because"]
        assert (reader.search(vectors[:100], k=5, as_of=epoch)[0] == was).all()
    take_hold(open_table(made), View(made).epoch, timedelta(hours=1))
    assert kinds(made)["node"] == 300
    why = run_job(made, "why", target=kept[0]["path"]).to_json()
    assert [gate["met"] for gate in why["reasons"][0]["gates"]] == [True] * 4
    with pytest.raises(ObjectNotFoundError):
        run_job(made, "why", target="nodes/1")


@pytest.mark.long
@pytest.mark.parametrize("jobs", [["catchup"], ["catchup", "merge", "gc"]])
def test_an_index_without_rows_gets_some_again(made: str, vectors: np.ndarray, jobs: list[str]) -> None:
    """Fewer than it takes for a codebook: they must not be linked to healed nodes, the entry points until then."""
    with lm_diskann.open(made) as index:
        index.delete(LIVE)
    for job in jobs:
        run_job(made, job, apply=True)
    with lm_diskann.open(made) as index:
        for first in range(2000, 2060, 20):
            index.insert(np.arange(first, first + 20), vectors[first : first + 20])
        found, _ = index.search(vectors[2000:2060], k=1)
        assert (found[:, 0] == np.arange(2000, 2060)).all()
    check_sound(made)
    for job in ("catchup", "merge", "gc", "gc"):
        run_job(made, job, apply=True)
    check_rows(made, {row: vectors[row] for row in range(2000, 2060)})
    assert len(View(made).versions) == 60, "no deleted node is kept"
    check_sound(made)


def test_the_only_reader_that_was_killed_takes_its_folder_along(made: str, vectors: np.ndarray) -> None:
    """The store deletes folders that become empty: readers and writers go on."""
    killed = f"{made}/readers/{'0' * 32}"
    with open(killed, "wb") as file:
        file.write(bytes(8))
    assert kinds(made, apply=True)["reader"] == 1
    assert not os.path.exists(f"{made}/readers")
    with lm_diskann.open(made) as index:
        index.insert([2000], vectors[2000:2001])
        with lm_diskann.open(made, read_only=True) as reader:
            assert reader.search(vectors[2000:2001], k=1)[0] == [[2000]]
            assert len(os.listdir(f"{made}/readers")) == 1
    check_sound(made)


@pytest.mark.long
@pytest.mark.req("S2-088", "S2-089")
def test_the_end_of_the_graph_is_cut(made: str, vectors: np.ndarray) -> None:
    size = View(made).folder.block_size
    with open(f"{made}/graph.lmd", "ab") as graph:
        graph.write(b"x" * 3 * size)  # as a merge leaves it that was killed
    assert kinds(made)["tail"] == 1
    run_job(made, "gc", apply=True)
    assert os.path.getsize(f"{made}/graph.lmd") == View(made).slots * size
    slots = 0
    for _ in range(3):
        slots = max(slots, View(made).slots)
        with lm_diskann.open(made) as index:  # builds the graph again, in the lowest slots that are free
            index.delete(LIVE[-900:])
            index.insert(LIVE[-900:], vectors[LIVE[-900:]])
        for job in ("merge", "catchup", "gc"):
            run_job(made, job, apply=True)
    assert View(made).slots < slots
    assert os.path.getsize(f"{made}/graph.lmd") == View(made).slots * size
    with duckdb.connect(f"{made}/diskann_store.duckdb", read_only=True) as store:
        [(last,)] = store.execute("SELECT max(slot) FROM lmd_slots").fetchall()
    assert last + 1 == View(made).slots, "a live block is at the end, and was not moved"
    check_rows(made, {int(row): vectors[row] for row in LIVE})
    check_sound(made)


def test_planted_a_slot_is_freed_while_a_link_leads_there(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with duckdb.connect(f"{made}/diskann_store.duckdb") as store:  # as if the sweep had not healed anything
        store.execute("UPDATE lmd_sweep_list SET reason = 'healed'")
        store.execute("UPDATE lmd_metadata SET healed = 300")
    report = run_job(made, "gc", apply=True, limit=1000).to_json()
    kept = [one for one in report["held"] if one["kind"] == "node"]
    assert len(kept) > 250
    assert "a node links to it" in kept[0]["because"]
    judged = gc.read_tombstones
    monkeypatch.setattr(
        gc,
        "read_tombstones",
        lambda *given: [gc.Tombstone(one.node, 1, False, False, False) for one in judged(*given)],
    )
    run_job(made, "gc", apply=True)
    found = {one["check"] for one in run_job(made, "verify").to_json()["findings"]}
    assert {"link_to_nothing", "backlink_to_nothing"} <= found
