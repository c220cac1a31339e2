"""A copy of an index folder that is made while it is written to has the rows of one epoch, wherever it goes."""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import (
    InvalidUsageError,
    StorageError,
    TableCorruptError,
    TableReplacedError,
    UnsupportedFeatureError,
)
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import copies
from memwal_ops.formats.lm_diskann.errors import IndexBusyError
from memwal_ops.formats.lm_diskann.jobs import snapshot
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_rows, check_sound
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DELETED = 60


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    lm_diskann.create(template, dimension=16, R=8, L=40)
    with lm_diskann.open(template) as index:
        index.insert(np.arange(1200), vectors[:1200])
        index.delete(np.arange(DELETED))
        index.insert(np.arange(2000, 2030), vectors[2000:2030])
    return template


@pytest.fixture
def rows(vectors: np.ndarray) -> dict[int, np.ndarray]:
    return {row: vectors[row] for row in [*range(DELETED, 1200), *range(2000, 2030)]}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot.copies, "PART_BYTES", 300 << 10)
    monkeypatch.setattr(copies, "PART_BYTES", 300 << 10)


def before_the_graph(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[bool]:
    """Let others work between the copy of the store and that of the graph."""
    plain, done = snapshot._graph, list[bool]()

    def beside(*arguments: Any) -> Iterator[bytes]:
        act()
        done.append(True)
        return plain(*arguments)

    monkeypatch.setattr(snapshot, "_graph", beside)
    return done


def steps_of(act: Callable[[Any], object], last: int) -> tuple[list[str], bool]:
    """Carry out durable steps, up to the one before or after which the process is killed; whether it was."""
    names: list[str] = []
    count = 0

    def step(name: str, do: Callable[[], Any]) -> Any:
        nonlocal count
        names.append(name)
        if count == last:
            raise Killed
        result = do()
        if count + 1 == last:
            raise Killed
        count += 2
        return result

    try:
        act(step)
    except Killed:
        return names, True
    return names, False


def stepped(folder: str, destination: str, last: int) -> tuple[list[str], bool]:
    table: Any = open_table(folder)
    return steps_of(lambda step: run_job(replace(table, steps=step), "snapshot", destination=destination), last)


def objects(uri: str) -> list[str]:
    return [meta.path for meta in open_store(resolve(uri)).list("")]


@pytest.mark.long
@pytest.mark.usefixtures("small_parts")
def test_a_copy_beside_writers_and_jobs(
    made: str, vectors: np.ndarray, rows: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def others() -> None:
        for _ in range(3):
            with lm_diskann.open(made, wait=5) as index:  # the lock is released
                index.delete(np.arange(100, 140))
                index.insert(np.arange(200, 260), vectors[3000:3060])
                index.merge()
            for job in ("catchup", "merge", "gc"):
                run_job(made, job, apply=True)

    done = before_the_graph(monkeypatch, others)
    copy = f"{made}.copy"
    epoch = lm_diskann.snapshot(made, copy)
    assert done
    assert View(copy).epoch == epoch
    check_rows(copy, rows)
    check_sound(copy)
    with lm_diskann.open(copy) as index:
        index.insert([1], vectors[:1])
        assert index.search(vectors[:1], k=1)[0].tolist() == [[1]]
    check_sound(made)
    with pytest.raises(InvalidUsageError, match="exists already"):
        snapshot.snapshot(made, copy)


def test_a_copy_that_fails_leaves_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_diskann.create(folder, dimension=16)

    def full(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(snapshot, "_copy_file", full)
    for copy in (f"{folder}.copy", f"memory://{uuid.uuid4().hex}"):
        with pytest.raises(ZeroDivisionError):
            snapshot.snapshot(folder, copy)
    assert [name for name in os.listdir(os.path.dirname(folder)) if "copy" in name] == []
    assert objects(copy) == []


@pytest.mark.long
def test_what_a_killed_writer_committed_is_in_the_copy(
    made: str, vectors: np.ndarray, rows: dict[int, np.ndarray]
) -> None:
    killed, copy = f"{made}.killed", f"{made}.copy"
    with lm_diskann.open(made) as index:
        index.insert([5000], vectors[3000:3001])
        shutil.copytree(made, killed)  # with DuckDB's log, as the writer would leave it
        assert os.path.getsize(f"{killed}/diskann_store.duckdb.wal")
    for log in Path(killed, "view").glob("*.log"):
        log.write_bytes(b"")
    lm_diskann.snapshot(killed, copy)
    check_rows(copy, {**rows, 5000: vectors[3000]})
    check_sound(copy)


@pytest.mark.long
@pytest.mark.usefixtures("small_parts")
def test_killed_at_each_step_onto_a_folder(
    made: str, rows: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, _ = stepped(made, f"{made}.whole", -1)
    assert names == ["publish the copy"]
    for last in range(2 * len(names)):
        copy = f"{made}.copy{last}"
        with monkeypatch.context() as dead:
            dead.setattr(copies.shutil, "rmtree", lambda *_, **__: None)  # a killed process removes nothing
            _, killed = stepped(made, copy, last)
        assert killed
        assert os.path.exists(copy if last else f"{copy}.snapshot.new/graph.lmd")
        if last:
            check_rows(copy, rows)
        again = run_job(made, "snapshot", destination=copy).to_json()
        assert again["decision"] == ("unchanged" if last else "copied")
        check_rows(copy, rows)
        check_sound(copy)
        assert not os.path.exists(f"{copy}.snapshot.new")


@pytest.mark.long
@pytest.mark.usefixtures("small_parts")
def test_killed_at_each_step_onto_a_store(made: str, rows: dict[int, np.ndarray]) -> None:
    names, _ = stepped(made, f"memory://{uuid.uuid4().hex}", -1)
    assert names.count("upload a part") > 12
    assert names[-1] == "publish the copy"
    outcomes = set()
    for last in [*range(0, 2 * len(names), 5), *range(2 * len(names) - 3, 2 * len(names))]:
        copy, back = f"memory://{uuid.uuid4().hex}", f"{made}.back"
        _, killed = stepped(made, copy, last)
        assert killed
        complete = "snapshot.lmd" in objects(copy)
        again = run_job(made, "snapshot", destination=copy).decision
        assert again == ("unchanged" if complete else "copied")
        outcomes.add(complete)
        runs = {path.split("/")[1] for path in objects(copy) if path.startswith("parts/")}
        assert len(runs) == 1, "what the killed run left is gone"
        assert run_job(copy, "snapshot", destination=back).decision == "copied"
        check_rows(back, rows)
        shutil.rmtree(back)
    assert outcomes == {True, False}


@pytest.mark.usefixtures("small_parts")
def test_of_two_snapshots_to_one_place_one_wins(
    made: str, rows: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, back = f"memory://{uuid.uuid4().hex}", f"{made}.back"
    plain = snapshot._graph

    def other() -> None:
        monkeypatch.setattr(snapshot, "_graph", plain)
        lm_diskann.snapshot(made, copy)

    before_the_graph(monkeypatch, other)
    with pytest.raises(InvalidUsageError, match="completed meanwhile"):
        lm_diskann.snapshot(made, copy)
    run_job(copy, "snapshot", destination=back)
    check_rows(back, rows)

    def same_folder() -> None:
        with pytest.raises(IndexBusyError, match="Another snapshot"):
            lm_diskann.snapshot(made, f"{made}.folder")

    before_the_graph(monkeypatch, same_folder)
    lm_diskann.snapshot(made, f"{made}.folder")
    check_rows(f"{made}.folder", rows)


def test_made_again_while_parts_of_killed_runs_are_removed(made: str, rows: dict[int, np.ndarray]) -> None:
    copy = f"memory://{uuid.uuid4().hex}"
    table: Any = open_table(made)
    lm_diskann.snapshot(made, copy)
    store = open_store(resolve(copy))
    store.put_if_absent(f"parts/{uuid.uuid4().hex}/graph.lmd/00000000", b"of a killed run")

    def step(name: str, do: Callable[[], Any]) -> Any:
        if name == "remove the parts of killed runs":
            store.delete_many(objects(copy))
            lm_diskann.snapshot(made, copy)
        return do()

    with pytest.raises(TableReplacedError):
        run_job(replace(table, steps=step), "snapshot", destination=copy)
    run_job(copy, "snapshot", destination=f"{made}.back")
    check_rows(f"{made}.back", rows)


def test_onto_a_store_and_back(
    made: str,
    vectors: np.ndarray,
    rows: dict[int, np.ndarray],
    s3_bucket: str,
    s3_options: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    copy, back = f"s3://{s3_bucket}/monday", f"{made}.back"
    storage = [part for key, value in s3_options.items() for part in ("--storage-option", f"{key}={value}")]
    epoch = View(made).epoch
    planned = run_here(capfd, "snapshot", made, copy, "--dry-run", "--json", *storage)
    assert planned.document.get("decision") == "dry_run", planned.err
    done = run_here(capfd, "snapshot", made, copy, "--json", *storage)
    assert (done.code, done.document.get("decision")) == (0, "copied"), done.err
    assert (done.document["rows"], done.document["epoch"]) == (len(rows), epoch + 1)
    assert 0.5 < planned.document["bytes"] / done.document["bytes"] < 2
    assert "unchanged: " in run_here(capfd, "snapshot", made, copy, *storage).out
    refused = run_here(capfd, "verify", copy, *storage)
    assert refused.code == UnsupportedFeatureError.exit_code
    assert f"memwal-ops snapshot {copy} FOLDER" in refused.err
    assert run_here(capfd, "snapshot", copy, f"s3://{s3_bucket}/other", *storage).code == 2
    assert run_here(capfd, "snapshot", copy, back, "--dry-run", *storage).out.startswith("dry_run: would copy")
    assert not os.path.exists(back)
    brought = run_here(capfd, "snapshot", copy, back, "--json", *storage)
    assert brought.document["bytes"] == done.document["bytes"]
    check_rows(back, rows)
    check_sound(back)
    with lm_diskann.open(made, read_only=True) as one, lm_diskann.open(back, read_only=True) as other:
        assert one.search(vectors[:50])[0].tolist() == other.search(vectors[:50])[0].tolist()
    assert "unchanged: " in run_here(capfd, "snapshot", copy, back, *storage).out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["graph", "delta", "short", "slots", "node ids", "store"])
def test_a_damaged_source_is_not_copied(made: str, place: str) -> None:
    graph = Path(made, "graph.lmd")
    if place == "graph":
        with graph.open("r+b") as file:
            file.seek(4096 * 700 + 1000)
            file.write(b"torn")
    elif place == "short":
        os.truncate(graph, os.path.getsize(graph) - 4096)
    elif place in {"slots", "node ids"}:
        change = "slot_count = slot_count + 2" if place == "slots" else "next_node_id = next_node_id + 1"
        with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
            store.execute(f"UPDATE lmd_metadata SET {change}")
    elif place == "delta":
        with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
            store.execute("UPDATE lmd_delta_blocks SET data = data[:100]::BLOB || repeat('x', 3996)::BLOB")
    else:
        with Path(made, "diskann_store.duckdb").open("r+b") as file:
            file.seek(0)
            file.write(bytes(12288))
    remote = f"memory://{uuid.uuid4().hex}"
    for copy in (f"{made}.copy", remote):
        with pytest.raises((TableCorruptError, StorageError)):
            lm_diskann.snapshot(made, copy)
    assert objects(remote) == []
    assert not any("copy" in name for name in os.listdir(os.path.dirname(made)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("harm", ["part", "gone", "manifest", "name", "nested"])
def test_a_damaged_copy_is_not_brought_back(made: str, harm: str) -> None:
    copy, back = f"memory://{uuid.uuid4().hex}", f"{made}.back"
    lm_diskann.snapshot(made, copy)
    store = open_store(resolve(copy))
    part = next(path for path in objects(copy) if "graph.lmd" in path)
    if harm == "part":
        store.put(part, store.get(part)[:-1] + b"x")
    elif harm == "gone":
        store.delete_many([part])
    elif harm == "manifest":
        store.put("snapshot.lmd", store.get("snapshot.lmd").replace(b'"rows": 1', b'"rows": 2'))
    elif harm == "nested":
        from memwal_ops.formats.lm_diskann.copies import digest

        line = b"[" * 200_000
        store.put("snapshot.lmd", line + b"\n" + digest(line).encode() + b"\n")
    else:
        from memwal_ops.formats.lm_diskann.copies import read_manifest

        found = read_manifest(store)
        assert found is not None
        store.put("snapshot.lmd", replace(found, files=(replace(found.files[0], path="../x"),)).encode())
    with pytest.raises(TableCorruptError):
        run_job(copy, "snapshot", destination=back)
    assert not os.path.exists(back)
    assert not os.path.exists(f"{back}.snapshot.new")


def test_a_destination_with_something_else_is_refused(made: str, tmp_path: Path) -> None:
    other = Path(tmp_path, "other")
    other.mkdir()
    other.joinpath("notes.txt").write_text("mine")
    another = str(tmp_path / "another.lmd")
    lm_diskann.create(another, dimension=16)
    remote = f"memory://{uuid.uuid4().hex}"
    open_store(resolve(remote)).put("notes.txt", b"mine")
    staging = Path(tmp_path, "copy.snapshot.new")
    staging.mkdir()
    staging.joinpath("notes.txt").write_text("mine")
    inside = f"{made}/copy"
    for copy in (str(other), str(other / "notes.txt"), another, remote, str(tmp_path / "copy"), inside, made):
        for plan in (True, False):
            if plan and copy == str(tmp_path / "copy"):
                continue
            with pytest.raises(InvalidUsageError):
                run_job(made, "snapshot", destination=copy, apply=not plan)
    with pytest.raises(InvalidUsageError, match="needs a destination"):
        run_job(made, "snapshot")
    assert objects(remote) == ["notes.txt"]
    assert other.joinpath("notes.txt").read_text() == staging.joinpath("notes.txt").read_text() == "mine"
    check_sound(made)
