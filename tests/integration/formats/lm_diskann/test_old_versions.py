"""Versions that only older epochs read: verify checks them, a copy has none, and a reader can hold them."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError, TableCorruptError, VersionGoneError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import files, merging
from memwal_ops.formats.lm_diskann.library import Index
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import Killed, check_rows, check_sound, killer, partly_merged

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = np.arange(340)


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    partly_merged(template, vectors)
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


def change(folder: str, vectors: np.ndarray, round_: int) -> None:
    """Another vector for each row, merged, and what is free is collected."""
    with Index(folder) as index:
        index.insert(ROWS, vectors[400 + 400 * round_ : 740 + 400 * round_])
        index.merge()
    run_job(folder, "catchup")
    run_job(folder, "gc", apply=True)


def own(index: Index, queries: np.ndarray, epoch: int | None = None) -> bool:
    """Whether each of 340 vectors is found as that of its row."""
    return bool((index.search(queries, k=1, as_of=epoch)[0][:, 0] == ROWS).all())


def flip(path: str, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("deep", [False, True])
def test_verify_reads_the_blocks_that_retained_epochs_need(made: str, vectors: np.ndarray, deep: bool) -> None:
    with lm_diskann.open(made, read_only=True) as reader:
        held = reader.epoch
        with Index(made) as index:
            index.delete([5])
            index.merge()
        with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
            [slot] = store.execute("SELECT slot FROM lmd_free_nodes WHERE node_id = 5").fetchone() or ()
        assert run_job(made, "verify", deep=deep).decision == "healthy"
        size = View(made).folder.block_size
        flip(f"{made}/graph.lmd", slot * size + 100)
        report = run_job(made, "verify", deep=deep)
        assert (report.exit_code, report.to_json()["counts"]) == (9, {"old_version_damaged": 1})
        assert "node 5 (epoch 2)" in report.describe()
        refused = run_job(made, "repair", apply=True)
        assert refused.exit_code == 9
        assert f"A reader or a hold needs epochs from {held} on" in " ".join(refused.describe().split())
        with pytest.raises(TableCorruptError, match="node 5"):
            reader.search(vectors[5:6], k=1, as_of=held)
        lm_diskann.snapshot(made, f"{made}.copy")
        check_sound(f"{made}.copy")
        with open(f"{made}.copy/graph.lmd", "rb") as graph:
            graph.seek(slot * size)
            assert not any(graph.read(size)), "what is not checked is not copied"
    assert run_job(made, "merge").decision == "nothing_to_merge"
    report = run_job(made, "verify", deep=deep)
    assert report.to_json()["counts"] == {"old_version_damaged": 1}, "a merge with nothing to do gives nothing up"
    assert "memwal-ops repair URI --apply gives these up" in " ".join(report.describe().split())
    repaired = run_job(made, "repair", apply=True)
    assert (repaired.decision, repaired.exit_code) == ("repaired", 0)
    check_sound(made)
    with lm_diskann.open(made, read_only=True) as reader, pytest.raises(VersionGoneError):
        reader.search(vectors[5:6], k=1, as_of=held)


def test_verify_reads_the_delta_blocks_that_retained_epochs_need(made: str, vectors: np.ndarray) -> None:
    before = View(made).live_rows()
    with Index(made) as index:
        index.delete([320])
        index.delete([321])
    with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
        versions = store.execute("SELECT version FROM lmd_delta_blocks WHERE node_id = 320 ORDER BY 1").fetchall()
        assert len(versions) == 2
        store.execute("UPDATE lmd_delta_blocks SET data = (SELECT data FROM lmd_delta_blocks WHERE node_id = 321 AND "
                      "version = 1) WHERE node_id = 320 AND version = 1")  # fmt: skip
    report = run_job(made, "verify")
    assert (report.exit_code, report.to_json()["counts"]) == (9, {"old_version_damaged": 1})
    lm_diskann.snapshot(made, f"{made}.copy")
    check_sound(f"{made}.copy")
    del before[320], before[321]
    check_rows(f"{made}.copy", {row: np.array(one, np.float32) for row, one in before.items()})
    with duckdb.connect(f"{made}.copy/diskann_store.duckdb") as store:
        assert store.execute("SELECT max(n) FROM (SELECT count(*) n FROM lmd_delta_blocks GROUP BY node_id)"
                             ).fetchall() == [(1,)]  # fmt: skip
    assert run_job(made, "merge").decision == "blocked", "it would move the damaged version, too"
    assert run_job(made, "repair", apply=True).decision == "repaired"
    assert run_job(made, "merge").decision == "merged"
    check_sound(made)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_held_epoch_stays_readable(made: str, vectors: np.ndarray, read_only: bool) -> None:
    with lm_diskann.open(made, read_only=read_only) as reader:
        with reader.hold() as held:
            assert held == reader.epoch
            for round_ in range(3):
                if read_only:
                    change(made, vectors, round_)
                else:
                    reader.insert(ROWS, vectors[400 + 400 * round_ : 740 + 400 * round_])
                    reader.merge()
                assert own(reader, vectors[400 + 400 * round_ : 740 + 400 * round_])
                assert own(reader, vectors[:340], held)
            with reader.hold(held) as again:
                assert again == held
        if read_only:
            for round_ in range(2):
                change(made, vectors, round_)
        else:
            reader.insert(ROWS, vectors[:340])
            reader.merge()
            reader.insert(ROWS, vectors[:340])
            reader.merge()
        with pytest.raises(VersionGoneError):
            reader.search(vectors[:1], as_of=held)
        with pytest.raises(VersionGoneError):
            reader.hold(held).__enter__()
    assert os.listdir(f"{made}/readers") == []
    check_sound(made)


@pytest.mark.long
def test_searches_of_one_epoch_keep_it(made: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    move = files.Reader.move
    with lm_diskann.open(made, read_only=True) as reader:
        held = reader.epoch
        monkeypatch.setattr(files.Reader, "move", lambda self, epoch: (moves.append(epoch), move(self, epoch))[1])
        for round_ in range(3):
            change(made, vectors, round_)
            assert own(reader, vectors[:340], held)
        assert moves == []
        reader.search(vectors[:1])
        assert moves == [reader.epoch]


def test_what_cannot_be_held(made: str, vectors: np.ndarray) -> None:
    reader = lm_diskann.open(made, read_only=True)
    for epoch in (0, -1, reader.epoch + 1, 1 << 80):
        with pytest.raises(VersionGoneError):
            reader.hold(epoch).__enter__()
    for epoch in ("2", 1.0, True):
        with pytest.raises(InvalidUsageError):
            reader.hold(epoch).__enter__()  # type: ignore[arg-type] - that is what is tested
    assert len(os.listdir(f"{made}/readers")) == 1
    with reader.hold():
        reader.close()
        assert os.listdir(f"{made}/readers") == []
    with pytest.raises(InvalidUsageError, match="closed"):
        reader.hold().__enter__()


@pytest.mark.long
def test_a_forked_process_holds_for_itself(made: str, vectors: np.ndarray) -> None:
    with lm_diskann.open(made, read_only=True) as reader, reader.hold() as held:
        with warnings.catch_warnings(action="ignore"):  # of forks in processes with threads
            child = os.fork()
        if not child:
            with reader.hold(held):
                found = own(reader, vectors[:340], held) and len(os.listdir(f"{made}/readers")) == 4
            reader.close()
            os._exit(0 if found else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(os.listdir(f"{made}/readers")) == 2
        change(made, vectors, 0)
        change(made, vectors, 1)
        assert own(reader, vectors[:340], held)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", [False, True])
def test_held_while_a_job_gives_epochs_up(
    made: str, vectors: np.ndarray, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader registers after a job has asked for readers, and reads the view before the job has published.

    Or after the next writer has asked, where that job was killed between its commit and its frame.
    """
    oldest = View(made).epoch
    with lm_diskann.open(made, read_only=True):
        change(made, vectors, 0)
    module: Any = files if killed else merging
    held: list[tuple[Index, Any]] = []
    ask: Callable[..., int] = module.needed_from

    def ask_and_hold(folder: str, epoch: int) -> int:
        found = ask(folder, epoch)
        if not held:
            reader = lm_diskann.open(made, read_only=True, cache_bytes=0)
            held.append((reader, reader.hold(oldest)))
            held[0][1].__enter__()
        return found

    if killed:
        table: Any = replace(open_table(made), steps=killer("append the commit to the view"))  # type: ignore[type-var]
        with pytest.raises(Killed):
            run_job(table, "gc", apply=True)
    monkeypatch.setattr(module, "needed_from", ask_and_hold)
    for round_ in (1, 2):
        change(made, vectors, round_)
    [(reader, context)] = held
    assert oldest < View(made).retained, "the job did not see it"
    assert own(reader, vectors[:340], oldest)
    assert own(reader, vectors[1200:1540])
    context.__exit__(None, None, None)
    reader.close()
    change(made, vectors, 3)
    check_sound(made)


def test_answers_at_an_epoch_do_not_change(folder: str, vectors: np.ndarray) -> None:
    """Whatever is deleted, inserted, healed, merged and collected later, and whoever asks; also with a filter."""
    lm_diskann.create(folder, dimension=16, R=16, L=20)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1300), vectors[:1300])
        index.delete(np.arange(0, 1300, 13))
        index.insert(np.arange(2000, 2100), vectors[1300:1400])
    queries = vectors[2000:2020]
    allowed = {"none": None, "half": np.arange(0, 3000, 2), "few": np.arange(0, 1300, 40)}

    def answers(index: Index, epoch: int) -> dict[str, Any]:
        found = {name: index.search(queries, k=10, as_of=epoch, allow=allow) for name, allow in allowed.items()}
        return {name: [part.tolist() for part in parts] for name, parts in found.items()}

    with lm_diskann.open(folder, read_only=True) as reader, reader.hold() as epoch:
        before = answers(reader, epoch)
        assert before == {name: [part.tolist() for part in reader.search(queries, k=10, allow=allow)]
                          for name, allow in allowed.items()}  # fmt: skip

        def check(after: str) -> None:
            assert answers(reader, epoch) == before, after
            with lm_diskann.open(folder, read_only=True) as other:
                assert answers(other, epoch) == before, after

        with Index(folder) as index:
            index.delete(np.arange(0, 600))
            assert answers(index, epoch) == before
        check("deletes")
        with Index(folder) as index:
            index.insert(np.arange(1000, 1400), vectors[2100:2500])
        check("inserts")
        for job in ("catchup", "merge", "gc", "compact"):
            run_job(folder, job, **({"apply": True} if job == "gc" else {}))
            check(job)
    check_sound(folder)
