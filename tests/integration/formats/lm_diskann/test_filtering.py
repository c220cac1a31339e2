"""A search with a filter returns the nearest of the rows that match it, in the version that the index has."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import InvalidUsageError, StorageError, TableCorruptError, TableReplacedError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import library
from memwal_ops.formats.lm_diskann.source import Source, matching
from tests.support.run_cli import run_here

ROWS, DIMENSION = 3000, 16


def data(vectors: np.ndarray, shares: np.ndarray) -> pa.Table:
    flat = pa.array(vectors.astype(np.float32).ravel())
    vec = pa.FixedSizeListArray.from_arrays(flat, DIMENSION)
    return pa.table({"id": pa.array(np.arange(len(vectors)) + 7), "vec": vec, "share": pa.array(shares)})


@pytest.fixture
def table(tmp_path: Path, vectors: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
    uri = str(tmp_path / "rows.lance")
    shares = np.random.default_rng(4).random(ROWS)
    dataset = lance.write_dataset(data(vectors[:ROWS], shares), uri)
    dataset.create_scalar_index("share", "BTREE")
    return uri, vectors[:ROWS], shares


@pytest.fixture
def followed(folder: str, table: tuple[str, Any, Any], capfd: pytest.CaptureFixture[str]) -> str:
    made = run_here(
        capfd, "init", folder, "--format", "lm_diskann", "--table", table[0], "--column", "vec", "--key", "id",
        "--links", "16", "--json",
    )  # fmt: skip
    assert made.code == 0
    return folder


def recall(found: np.ndarray, vectors: np.ndarray, allowed: np.ndarray, queries: np.ndarray) -> float:
    """The share of the nearest ten of the allowed rows that was found."""
    rows = np.flatnonzero(allowed)
    far = ((queries[:, None] - vectors[rows][None]) ** 2).sum(2)
    nearest = rows[np.argsort(far, axis=1)[:, :10]] + 7
    return float(np.mean([len({*one} & {*other}) / 10 for one, other in zip(found, nearest, strict=True)]))


@pytest.mark.long
def test_recall_by_selectivity(
    followed: str, table: tuple[str, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job(followed, "catchup", apply=True)
    _, vectors, shares = table
    queries = vectors[:40] + np.float32(0.01)
    with lm_diskann.open(followed, read_only=True) as index:
        for graph in (False, True):  # few rows are compared, many are searched for in the graph
            monkeypatch.setattr(library, "_FEW", 0 if graph else ROWS)
            for share in (0.5, 0.1, 0.02):
                found, distances = index.search(queries, k=10, where=f"share < {share}")
                assert (shares[found - 7] < share).all(), (graph, share)
                assert (np.diff(distances) >= 0).all()
                assert recall(found, vectors, shares < share, queries) >= (0.95 if graph else 1), (graph, share)
        assert (index.search(queries, where="share < 0")[0] == -1).all()


@pytest.mark.long
def test_the_filter_sees_the_version_that_the_index_has(
    followed: str, table: tuple[str, np.ndarray, np.ndarray]
) -> None:
    run_job(followed, "catchup", apply=True)
    uri, vectors, _ = table
    lance.dataset(uri).update({"share": "share + 10"}, where="id < 1000")
    with lm_diskann.open(followed, read_only=True) as index:
        assert (index.search(vectors[:5], where="share > 9")[0] == -1).all()
        run_job(followed, "catchup", apply=True)
        found, _ = index.search(vectors[:5], where="share > 9")
        assert found[:, 0].tolist() == [7, 8, 9, 10, 11]
        lance.dataset(uri).delete("id = 7")
        lance.dataset(uri).cleanup_old_versions(timedelta(0))
        assert index.search(vectors[:1], where="share > 9")[0][0, 0] == 7, "the last filter's rows are kept"
        with pytest.raises(StorageError, match="cannot be read") as error:
            index.search(vectors[:1], where="share > 8")
        assert "catchup" in error.value.remedy


@pytest.mark.long
def test_what_cannot_be_filtered(followed: str, table: tuple[str, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    query = table[1][:1]
    with lm_diskann.open(followed, read_only=True) as index:
        with pytest.raises(InvalidUsageError, match="no complete version") as error:
            index.search(query, where="share < 1")
        assert "catchup" in error.value.remedy
        run_job(followed, "catchup", apply=True)
        for where in ("no_such_column < 1", "share <", "vec"):
            with pytest.raises(InvalidUsageError, match="is not valid for"):
                index.search(query, where=where)
        with pytest.raises(InvalidUsageError, match="together with allow or as_of"):
            index.search(query, allow=[1], where="share < 1")
    with (
        lm_diskann.create(tmp_path / "own.lmd", dimension=DIMENSION) as own,
        pytest.raises(InvalidUsageError, match="follows no table"),
    ):
        own.search(query, where="share < 1")


def test_an_index_that_cannot_be_read_is_no_mistake_in_the_filter(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(10)}), uri).create_scalar_index("id", "BTREE")
    for path in (tmp_path / "t.lance" / "_indices").rglob("*.lance"):
        path.write_bytes(b"damaged")
    source = Source(uri, "vec", "id")
    with pytest.raises(StorageError, match="cannot be read"):
        matching(lance.dataset(uri), source, "id = 7")
    with pytest.raises(InvalidUsageError, match="is not valid for"):
        matching(lance.dataset(uri), source, "nothing = 7")


def test_a_table_that_was_created_again_is_not_asked(followed: str, table: tuple[str, Any, Any]) -> None:
    """Its version has the same number, and other rows under the same ids."""
    uri, vectors, shares = table
    run_job(followed, "catchup")
    version = lance.dataset(uri).version
    with library.Index(followed, read_only=True) as reader:
        assert reader.search(vectors[:1], 5, where="share < 0.5")[0].min() >= 7
    shutil.rmtree(uri)
    other = lance.write_dataset(data(vectors, 1 - shares), uri)
    while other.version < version:
        other = lance.write_dataset(data(vectors, 1 - shares), uri, mode="overwrite")
    with (
        library.Index(followed, read_only=True) as reader,
        pytest.raises(TableReplacedError, match="replaced by another one"),
    ):
        reader.search(vectors[:1], 5, where="share < 0.5")


def test_a_damaged_deletion_file_of_the_table_is_named(followed: str, table: tuple[str, Any, Any]) -> None:
    """pylance may end the process on it."""
    uri, vectors, _ = table
    run_job(followed, "catchup")
    lance.dataset(uri).delete("id = 8")
    run_job(followed, "catchup")
    (path,) = Path(uri, "_deletions").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with library.Index(followed, read_only=True) as reader, pytest.raises(TableCorruptError, match=path.name):
        reader.search(vectors[:1], 5, where="share < 0.5")
    lance.write_dataset(data(vectors[:1], np.zeros(1)), uri, mode="append")
    with pytest.raises(TableCorruptError, match=path.name):
        run_job(followed, "catchup")
