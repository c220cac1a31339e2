"""Handles: in forked processes, of folders that were replaced, closed; and what a call may be given."""

from __future__ import annotations

import os
import resource
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memwal_ops.errors import (
    BusyError,
    InvalidUsageError,
    NotALanceTableError,
    StorageError,
    TableCorruptError,
    TableReplacedError,
)
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import wire
from memwal_ops.formats.lm_diskann.kernels import inserting
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.wire import U8
from tests.support.lm_diskann.decoder import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STORE_LOG = "diskann_store.duckdb.wal"


def in_a_fork(act: Callable[[], bool]) -> bool:
    """Whether ``act`` returns True in a forked process."""
    with warnings.catch_warnings(action="ignore"):  # of forks in processes with threads
        child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if act() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def index(folder: str, vectors: np.ndarray) -> Index:
    made = lm_diskann.create(folder, dimension=16)
    made.insert(range(100), vectors[:100])
    return made


def test_a_forked_process_takes_nothing_of_what_its_parent_commits(
    index: Index, folder: str, vectors: np.ndarray, tmp_path: object
) -> None:
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if not child:
        os.read(reading, 1)
        index.close()
        os._exit(0)
    index.insert(range(100, 150), vectors[100:150])
    os.write(writing, b"1")
    assert os.waitpid(child, 0)[1] == 0
    left = shutil.copytree(folder, f"{tmp_path}/killed")  # what there is if the parent is killed now
    with lm_diskann.open(left) as found:
        assert len(found) == 150
        assert not found.republished
    index.insert([150], vectors[150:151])
    index.close()
    assert len(View(folder).live_rows()) == 151


def test_a_forked_process_may_read_and_not_write(index: Index, folder: str, vectors: np.ndarray) -> None:
    reader = lm_diskann.open(folder, read_only=True)

    def refused() -> bool:
        assert index.search(vectors[:1], k=1)[0] == [[0]]
        with pytest.raises(InvalidUsageError, match="forked"):
            index.insert([200], vectors[:1])
        with pytest.raises(BusyError):
            lm_diskann.open(folder, wait=0)
        return True

    def registered() -> bool:
        found = reader.search(vectors[:1], k=1, as_of=2)[0] == [[0]]
        both = len(os.listdir(f"{folder}/readers")) == 2
        reader.close()
        return bool(found and both and len(os.listdir(f"{folder}/readers")) == 1)

    assert in_a_fork(refused)
    assert in_a_fork(registered)
    index.insert([100], vectors[100:101])
    index.close()
    assert reader.search(vectors[100:101], k=1)[0] == [[100]]
    reader.close()
    assert os.listdir(f"{folder}/readers") == []


def test_a_forked_process_opens_no_store_that_it_inherited(index: Index, folder: str, vectors: np.ndarray) -> None:
    def refused() -> bool:
        os.read(reading, 1)
        with pytest.raises(BusyError, match="forked"):  # the lock is free, and DuckDB would go on with what it had read
            lm_diskann.open(folder, wait=0)
        return True

    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if not child:
        os._exit(0 if refused() else 1)
    index.insert([101], vectors[101:102])
    index.close()
    with lm_diskann.open(folder, wait=0) as found:
        os.write(writing, b"1")
        assert os.waitpid(child, 0)[1] == 0
        assert len(found) == 101


@pytest.mark.parametrize("moved", [True, False])
def test_a_writer_changes_nothing_in_a_folder_that_took_the_place_of_its_own(
    index: Index, folder: str, vectors: np.ndarray, tmp_path: object, moved: bool
) -> None:
    other = shutil.copytree(folder, f"{tmp_path}/other")
    assert os.path.getsize(f"{other}/{STORE_LOG}")  # not folded in: its rows are in this log only
    index.insert([100], vectors[100:101])
    os.rename(folder, f"{tmp_path}/away") if moved else shutil.rmtree(folder)
    os.rename(other, folder)
    with pytest.raises(TableReplacedError):
        index.insert([101], vectors[101:102])
    with pytest.raises(BusyError, match="moved or removed"):
        lm_diskann.open(folder)
    index.close()
    assert os.path.exists(f"{folder}/{STORE_LOG}")
    with lm_diskann.open(folder) as found:
        assert len(found) == 100
        assert not found.republished


def test_a_folder_that_is_replaced_during_a_transaction(
    index: Index, folder: str, vectors: np.ndarray, tmp_path: object
) -> None:
    other = shutil.copytree(folder, f"{tmp_path}/other")
    with pytest.raises(TableReplacedError), index.transaction():
        index.insert([100], vectors[100:101])
        os.rename(folder, f"{tmp_path}/away")
        os.rename(other, folder)
    index.close()
    with lm_diskann.open(folder) as found:
        assert len(found) == 100
        assert not found.republished


def test_a_closed_index(index: Index, folder: str, vectors: np.ndarray) -> None:
    index.insert([100], vectors[100:101])
    with pytest.raises(InvalidUsageError, match="closed"), index.transaction():
        index.delete([5])
        index.close()
    index.close()
    for call in (
        lambda: index.search(vectors[:1]), lambda: index.insert([1], vectors[:1]), lambda: index.delete([1]),
        index.merge, lambda: index.transaction().__enter__(),
    ):  # fmt: skip
        with pytest.raises(InvalidUsageError, match="closed"):
            call()
    assert set(View(folder).live_rows()) == {*range(101)}


def test_a_change_that_failed_takes_its_transaction_along(
    index: Index, folder: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("The disk is full.")

    with index, pytest.raises(InvalidUsageError, match="failed"), index.transaction():
        index.insert([100], vectors[100:101])
        with monkeypatch.context() as patch, pytest.raises(StorageError):
            patch.setattr(inserting, "write_nodes", full)
            index.insert([0, 101], vectors[:2])
    assert set(View(folder).live_rows()) == {*range(100)}


def test_what_searches_may_be_given(index: Index, vectors: np.ndarray) -> None:
    with index:
        assert index.search(vectors[0], 2)[0].shape == (1, 2)
        keys = {1: 0, 3: 0}.keys()
        for few in ([3, 1, 1, 9999], (1, 3), {1, 3}, range(1, 4, 2), np.array([3, 1], np.uint64), iter([1, 3]), keys):
            found, _ = index.search(vectors[:1], 3, 50, few, index.epoch)
            assert {*found[0].tolist()} == {1, 3, -1}
        for none in ([], set(), np.zeros(0, np.int64), [-7, 9999]):
            assert (index.search(vectors[:1], k=2, allow=none)[0] == -1).all()
        for wrong in (
            {"allow": np.ones(100, bool)}, {"allow": [1.5]}, {"allow": 1}, {"k": 0}, {"k": 2.0}, {"k": "2"}, {"L": 0},
            {"L": 1.5}, {"as_of": 1.0}, {"as_of": "2"},
        ):  # fmt: skip
            with pytest.raises(InvalidUsageError):
                index.search(vectors[:1], **wrong)  # type: ignore[arg-type] - that is what is tested
        assert index.delete({1, 2, 9999}) == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "given",
    [
        None, [["a"] * 16], [["1"] * 16], [[1], [2, 3]], np.full((1, 16), 1e300), np.ones((1, 16), np.complex64),
        [[1j] * 16], [[1 + 0j] * 16], np.ones((1, 16), "timedelta64[s]"), np.full((1, 16), "1", object) + "j",
    ],
)  # fmt: skip
def test_vectors_that_are_none(index: Index, given: object) -> None:
    with index:
        with pytest.raises(InvalidUsageError):
            index.insert([1], given)  # type: ignore[arg-type] - that is what is tested
        with pytest.raises(InvalidUsageError):
            index.search(given)  # type: ignore[arg-type] - that is what is tested


@pytest.mark.parametrize(
    "given",
    [
        {"dimension": 4.0}, {"dimension": "4"}, {"dimension": True}, {"dimension": None}, {"alpha": "x"},
        {"alpha": True}, {"alpha": None}, {"alpha": 1j}, {"alpha": float("nan")}, {"R": 8.0}, {"L": "40"}, {"R": True},
        {"metric": None}, {"metric": ["l2"]}, {"quantizer": 1},
    ],
)  # fmt: skip
def test_parameters_of_another_type_leave_nothing_behind(folder: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsageError, match=next(iter(given))):
        lm_diskann.create(folder, **given)
    assert os.listdir(os.path.dirname(folder)) == []


def test_numbers_of_numpy_are_numbers(folder: str) -> None:
    lm_diskann.create(folder, np.int32(16), R=np.uint8(8), alpha=np.float32(1.25), L=np.int64(40)).close()  # type: ignore[arg-type] - that is what is tested
    with lm_diskann.open(folder, wait=np.float64(1), cache_bytes=np.int64(1 << 20)) as index:  # type: ignore[arg-type] - that is what is tested
        assert index.parameters.alpha == 1.25


@pytest.mark.parametrize("given", [{"wait": "1"}, {"wait": None, "cache_bytes": 1.5}, {"cache_bytes": "1"}])
def test_what_an_index_is_not_opened_with(index: Index, folder: str, given: dict[str, Any]) -> None:
    index.close()
    with pytest.raises(InvalidUsageError):
        lm_diskann.open(folder, **given)
    assert lm_diskann.open(folder, wait=0)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file grows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk(index: Index, folder: str, tmp_path: Path) -> None:
    index.close()
    with full_disk(), pytest.raises(StorageError):
        lm_diskann.open(folder, read_only=True)
    assert os.listdir(f"{folder}/readers") == []
    with full_disk(), pytest.raises(StorageError):
        lm_diskann.create(tmp_path / "other")
    assert [one for one in os.listdir(tmp_path) if one.startswith("other")] == []
    os.truncate(f"{folder}/writer.lock", 0)
    with full_disk(), lm_diskann.open(folder) as opened:  # a job may free space
        assert len(opened) == 100


def test_a_file_is_no_index(tmp_path: object) -> None:
    with open(f"{tmp_path}/file", "wb"), pytest.raises(NotALanceTableError):
        lm_diskann.open(f"{tmp_path}/file")


@pytest.mark.parametrize("place", [0, 4096])
def test_readers_do_not_end_in_silence_at_a_damaged_commit(
    index: Index, folder: str, vectors: np.ndarray, place: int
) -> None:
    index.insert([100], vectors[100:101])
    index.close()
    with open(f"{folder}/view/{1:016d}.log", "r+b") as log:
        log.seek(place)
        byte = log.read(1)[0]
        log.seek(place)
        log.write(bytes([byte ^ 1]))
    with pytest.raises(TableCorruptError, match="log"):
        lm_diskann.open(folder, read_only=True)
    with lm_diskann.open(folder) as found:
        assert found.republished
        assert len(found) == 101


@pytest.mark.timeout(60)
def test_readers_of_an_index_whose_folder_of_readers_is_a_link_to_nothing(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16)
    os.rmdir(f"{folder}/readers")
    os.symlink(f"{folder}.readers", f"{folder}/readers")
    with pytest.raises(TableCorruptError, match="symbolic link"):
        lm_diskann.open(folder, read_only=True)
    os.mkdir(f"{folder}.readers")
    with lm_diskann.open(folder, read_only=True) as index:
        assert (index.search(vectors[:1])[0] == -1).all()


@pytest.mark.parametrize("kind", [wire.BASE, wire.COMMIT])
def test_a_view_with_more_node_ids_than_nodes(index: Index, folder: str, vectors: np.ndarray, kind: int) -> None:
    if kind == wire.BASE:
        index.merge()
    else:
        index.insert([100], vectors[100:101])
    number = index.view.number
    index.close()
    path = Path(folder, "view", f"{number:016d}.{'base' if kind == wire.BASE else 'log'}")
    frame = wire.decode_frame(np.frombuffer(path.read_bytes(), np.uint8))
    assert frame is not None
    state = frame.array("state", U8).copy()
    state[2] += 1
    path.write_bytes(wire.encode_frame(kind, frame.number, frame.epoch, frame.uuid, {**frame.sections, "state": state}))
    with pytest.raises(TableCorruptError, match=path.name):
        lm_diskann.open(folder, read_only=True)
    with lm_diskann.open(folder) as found:
        assert found.republished
