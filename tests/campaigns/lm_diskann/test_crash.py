"""Killed by SIGKILL anywhere, torn, damaged, or without room: nothing is lost, and no answer is wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memwal_ops import run_job
from memwal_ops.errors import StorageError, TableCorruptError, VersionGoneError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import files, library
from tests.campaigns.lm_diskann.churn import vector
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_rows, check_sound

ROOT = Path(__file__).parents[3]


def follow(model: dict[int, int], line: str) -> dict[int, int]:
    """The model (row to stamp) after an operation."""
    verb, stamp, *rows = line.split()
    after = dict(model)
    for row in map(int, rows):
        if verb == "insert":
            after[row] = int(stamp) + row
        else:
            after.pop(row, None)
    return after


@pytest.mark.req("S2-003", "S2-011", "S2-024", "S2-035", "S2-049", "S2-078", "S2-091", "S2-093", "S2-094", "S2-095")
def test_killed_again_and_again_while_readers_search(folder: str) -> None:
    lm_diskann.create(folder, dimension=8, R=32, L=100)
    model = {row: row for row in range(1100)}
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1100), np.stack([vector(row) for row in range(1100)]))
    random = np.random.default_rng(11)
    stamp = 3000
    with lm_diskann.open(folder, read_only=True) as reader:
        for round_ in range(6):
            command = [sys.executable, "-m", "tests.campaigns.lm_diskann.churn", folder, str(round_), str(stamp)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
                assert child.stdout is not None
                first = child.stdout.readline()
                until = time.monotonic() + 1.5 + 2 * random.random()
                while time.monotonic() < until:
                    found, distances = reader.search(vector(int(random.integers(0, 1100)))[None], k=3)
                    assert (found >= 0).all()
                    assert (np.diff(distances) >= 0).all()
                child.send_signal(signal.SIGKILL)
                lines = [first, *child.stdout.readlines()]
            maybe = model
            for line in lines:
                if line == "done\n":
                    model = maybe
                elif line.endswith("\n"):
                    maybe = follow(model, line)
                    stamp = max(stamp, int(line.split()[1]) + 3000)
            report = run_job(folder, "merge")
            assert report.exit_code == 0, report.describe()
            live = View(folder).live_rows()
            told = [{row: tuple(vector(at).tolist()) for row, at in one.items()} for one in (model, maybe)]
            assert live in told, "what was done is there, and what was begun is there as a whole or not at all"
            model = model if live == told[0] else maybe
            check_sound(folder)
            sample = random.choice(sorted(model), 50, replace=False)
            found, distances = reader.search(np.stack([vector(model[int(row)]) for row in sample]), k=1, L=200)
            # Every row is there, as seen above; that a graph leads to each of them, nothing promises.
            reached = found[:, 0] == sample
            assert reached.mean() >= 0.9
            assert not distances[reached].any()


@pytest.fixture
def made(folder: str, vectors: np.ndarray) -> str:
    lm_diskann.create(folder, dimension=16, R=16, L=60)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1500), vectors[:1500])
        index.insert(np.arange(1500, 1520), vectors[1500:1520])
    return folder


@pytest.mark.req("S2-020")
def test_a_torn_block_is_never_an_answer(made: str, vectors: np.ndarray) -> None:
    run_job(made, "merge")
    size = View(made).folder.block_size
    with open(f"{made}/graph.lmd", "r+b") as graph:
        for slot in range(os.path.getsize(f"{made}/graph.lmd") // size):
            graph.seek(slot * size + size // 2)
            graph.write(b"torn")
    with lm_diskann.open(made, read_only=True) as index, pytest.raises(TableCorruptError, match=r"graph\.lmd"):
        index.search(vectors[:1])
    report = run_job(made, "verify")
    assert (report.decision, report.exit_code) == ("findings", 9)
    assert report.to_json()["counts"]["checksum"] > 1000


@pytest.mark.req("S2-038", "S2-087", "S2-090", "S2-102")
def test_merges_use_freed_slots_again(made: str, vectors: np.ndarray) -> None:
    lengths = []
    with lm_diskann.open(made) as index:
        for _ in range(8):
            index.insert(np.arange(40), vectors[2000:2040])
            before = index.view.state.merge_sequence_number
            assert index.merge()
            assert index.view.state.merge_sequence_number == before + 1
            assert index.view.delta_blocks == 0
            lengths.append(index.view.state.slot_count)
    assert lengths[-1] - lengths[3] < 8 * 40, "most versions go where older ones were"
    check_sound(made)


def test_a_damaged_delta_is_named_and_the_others_are_merged(made: str) -> None:
    import duckdb

    with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
        store.execute("UPDATE lmd_delta_blocks SET data = 'none'::BLOB WHERE node_id = 1505")
    report = run_job(made, "merge")
    assert (report.decision, report.exit_code) == ("blocked", 10)
    assert [one["node"] for one in report.to_json()["blocked"]] == [1505]
    assert report.to_json()["blocks"] > 10


def test_the_store_of_another_folder_is_refused(made: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    lm_diskann.create(other, dimension=16)
    shutil.copy(f"{other}/diskann_store.duckdb", f"{made}/diskann_store.duckdb")
    with pytest.raises(TableCorruptError, match="is the store of index"):
        lm_diskann.open(made)
    os.unlink(f"{made}/diskann_store.duckdb")
    with pytest.raises(TableCorruptError, match="is missing"):
        lm_diskann.open(made)
    assert not os.path.exists(f"{made}/diskann_store.duckdb")


@pytest.mark.parametrize("name", ["CURRENT", "base", "log"])
def test_a_damaged_view_is_published_again(made: str, vectors: np.ndarray, name: str) -> None:
    rows = View(made).live_rows()
    path = max(one for one in Path(made, "view").iterdir() if one.name.endswith(name))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    report = run_job(made, "merge") if name == "log" else None
    with lm_diskann.open(made) as index:
        assert report is not None or index.republished
        assert (index.search(vectors[:20], k=1)[0][:, 0] == np.arange(20)).all()
    assert View(made).live_rows() == rows
    check_sound(made)


@pytest.mark.parametrize("where", ["graph", "view", "base"])
def test_a_full_disk_changes_nothing(
    made: str, vectors: np.ndarray, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict(enumerate(vectors[:1520]))

    def full(*arguments: Any) -> Any:
        raise files.io_error(OSError(errno.ENOSPC, "No space left on device"))

    targets = {"graph": "transaction.write_all", "base": "files.replace_file"}
    with monkeypatch.context() as patch:
        if where in targets:
            patch.setattr(f"memwal_ops.formats.lm_diskann.{targets[where]}", full)
        with pytest.raises(StorageError, match="full"):
            if where == "view":
                with lm_diskann.open(made) as index:
                    patch.setattr("memwal_ops.formats.lm_diskann.files.write_all", full)
                    patch.setattr("memwal_ops.formats.lm_diskann.publishing.publish", full)
                    index.insert([5], vectors[3000:3001])
            else:
                run_job(made, "merge")
    if where == "view":
        rows[5] = vectors[3000]  # committed, and published by the next one who opens the store
    assert run_job(made, "merge").exit_code == 0
    check_rows(made, rows)
    check_sound(made)


def test_a_reader_that_slept_through_its_slots_finds_out(made: str, vectors: np.ndarray) -> None:
    """As one on another machine, whose registration is not visible."""
    with lm_diskann.open(made, read_only=True, cache_bytes=0) as sleeper:
        assert sleeper._reader is not None
        sleeper._reader.close()
        sleeper._reader = None
        for round_ in range(6):
            with lm_diskann.open(made) as index:
                index.insert(np.arange(60), vectors[2000 + 60 * round_ : 2060 + 60 * round_])
                index.merge()
        found, _ = sleeper.search(vectors[2300:2360], k=1)
        assert sleeper.epoch < index.epoch or (found[:, 0] == np.arange(60)).all()
        again, _ = sleeper.search(vectors[60:1500], k=1)
        assert (again[:, 0] == np.arange(60, 1500)).all()


def test_a_merge_syncs_what_it_wrote_before_it_commits(made: str, vectors: np.ndarray) -> None:
    steps: list[str] = []

    def step(name: str, act: Any) -> Any:
        steps.append(name)
        return act()

    with library.Index(made, step=step) as index:
        index.insert(np.arange(30), vectors[2000:2030])
        index.merge()
    order = [
        name
        for name in steps
        if name in {"write blocks into free slots", "sync the graph", "commit the merge to the store"}
    ]
    assert order == ["write blocks into free slots", "sync the graph", "commit the merge to the store"]


def test_a_merge_that_sees_no_reader_is_found_out(
    made: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: slots are used again under a registered reader. It is told so, and gets no wrong answer."""
    held = View(made).epoch
    with lm_diskann.open(made, read_only=True) as reader:
        monkeypatch.setattr("memwal_ops.formats.lm_diskann.merging.needed_from", lambda _, epoch: epoch)
        for round_ in range(4):
            with lm_diskann.open(made) as index:
                index.insert(np.arange(200), vectors[2000 + 200 * round_ : 2200 + 200 * round_])
                index.merge()
        with pytest.raises(VersionGoneError):
            reader.search(vectors[:1], as_of=held)
