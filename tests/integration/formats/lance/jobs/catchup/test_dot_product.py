"""catchup and vector indexes with product quantization and the metric dot, which pylance ruins when it updates them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.maintain import scan_table
from memwal_ops.errors import IndexesBehindError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.codebook import CodebookParameters, read_codebook
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from pathlib import Path

DIMENSION, ROWS, ADDED, QUERIES = 16, 2_000, 400, 40
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)
RNG = np.random.default_rng(3)
CENTERS = RNG.normal(size=(20, DIMENSION))
EVERY = (CENTERS[RNG.integers(0, 20, ROWS + 2 * ADDED)] + 0.5 * RNG.normal(size=(ROWS + 2 * ADDED, DIMENSION))).astype(
    "f4"
)
KINDS = ["IVF_PQ", "IVF_HNSW_PQ"]


def rows(start: int, end: int) -> pa.Table:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(EVERY[start:end].reshape(-1)), DIMENSION)
    return pa.table({"id": range(start, end), "vector": vectors}, schema=SCHEMA)


def create_index(uri: str, kind: str, name: str) -> None:
    lance.dataset(uri).create_index(
        "vector", kind, metric="dot", num_partitions=2, num_sub_vectors=4, name=name, replace=True
    )


def make(folder: Path, kind: str) -> str:
    uri = str(folder / "t.lance")
    lance.write_dataset(rows(0, ROWS), uri)
    create_index(uri, kind, "by_vector")
    return uri


def recall(uri: str) -> float:
    """The share of the 10 true neighbours that searches find."""
    dataset, hits = lance.dataset(uri), 0
    count = dataset.count_rows()
    for query in EVERY[:QUERIES]:
        near = {"column": "vector", "q": query, "k": 10, "nprobes": 2}
        found = dataset.to_table(columns=["id", "_distance"], nearest=near)["id"].to_pylist()
        hits += len({*np.argsort(-(EVERY[:count] @ query))[:10].tolist()} & {*found})
    return hits / (10 * QUERIES)


def of_a_fresh_build(folder: Path, kind: str, count: int) -> float:
    uri = str(folder / "fresh.lance")
    lance.write_dataset(rows(0, count), uri)
    create_index(uri, kind, "by_vector")
    return recall(uri)


def codebooks(uri: str, name: str) -> set[CodebookParameters]:
    table = open_table(uri)
    return {read_codebook(table, one) for one in base_indexes(table)[name].segments}


def is_complete(uri: str, name: str) -> bool:
    table = open_table(uri)
    return coverage(base_indexes(table)[name].covered, table.manifest).complete


@pytest.mark.sampled(1)
@pytest.mark.parametrize("anew", ["retrain", "rebuild"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_refused_and_training_anew_helps(tmp_path: Path, kind: str, anew: str) -> None:
    uri = make(tmp_path, kind)
    assert run_job(uri, "catchup").decision == "unchanged"
    lance.write_dataset(rows(ROWS, ROWS + ADDED), uri, mode="append")
    before, version = recall(uri), lance.dataset(uri).version
    for apply in (False, True):
        report = run_job(uri, "catchup", apply=apply)
        assert report.exit_code == IndexesBehindError.exit_code
        assert report.decision == ("incomplete" if apply else "dry_run")
        [index] = report.to_json()["indexes"]
        assert (index["decision"], index["error"]["reason"]) == ("failed", "dot_product_index")
        assert "catchup URI --index by_vector --rebuild" in index["error"]["detail"]
    [need] = [one.what for one in scan_table(open_table(uri)).needs if one.job == "catchup"]
    assert need == "refuse to update by_vector: dot_product_index"
    assert (lance.dataset(uri).version, recall(uri)) == (version, before)
    assert run_job(uri, "catchup", indexes=["by_vector"], **{anew: True}).decision == "caught_up"
    assert is_complete(uri, "by_vector")
    assert recall(uri) > of_a_fresh_build(tmp_path, kind, ROWS + ADDED) - 0.1
    assert run_job(uri, "catchup").decision == "unchanged"


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_verify_finds_an_index_that_pylance_updated(tmp_path: Path, metric: str) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, ROWS), uri)
    arguments = {"metric": metric, "num_partitions": 2, "num_sub_vectors": 4, "name": "by_vector"}
    lance.dataset(uri).create_index("vector", "IVF_PQ", **arguments)
    assert run_job(uri, "verify").findings.counts["index_distances"] == 0
    lance.write_dataset(rows(ROWS, ROWS + ADDED), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=0)
    report = run_job(uri, "verify")
    assert report.findings.counts["index_distances"] == (metric == "dot")
    if metric == "dot":
        [finding] = report.findings.kept
        assert "--index by_vector --rebuild" in finding.remedy
        assert run_job(uri, "catchup", indexes=["by_vector"], rebuild=True).decision == "caught_up"
        assert run_job(uri, "verify").decision == "healthy"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_log_it_is_replaced_by_a_new_one(tmp_path: Path, kind: str) -> None:
    """Rows that are merged while the new one is built get into it with its own codebook."""
    uri = make(tmp_path, kind)
    lance.dataset(uri).initialize_mem_wal()
    merge(uri, ROWS, ROWS + ADDED)
    [index] = run_job(uri, "catchup").to_json()["indexes"]
    assert index["error"]["reason"] == "dot_product_index"
    assert "catchup URI --index by_vector --rebuild" in index["error"]["detail"]
    migrate = {"migrate_codebook": ["by_vector", "other"]}
    assert run_job(uri, "catchup", **migrate).decision == "created"
    trained = codebooks(uri, "other")
    merge(uri, ROWS + ADDED, ROWS + 2 * ADDED)
    assert not is_complete(uri, "other")
    assert run_job(uri, "catchup", **migrate).decision == "caught_up"
    assert run_job(uri, "catchup", **migrate).decision == "dropped"
    assert [*base_indexes(open_table(uri))] == ["other"]
    assert codebooks(uri, "other") == trained
    assert recall(uri) > of_a_fresh_build(tmp_path, kind, ROWS + 2 * ADDED) - 0.1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_log_it_is_built_anew_with_its_codebook(tmp_path: Path, kind: str) -> None:
    uri = make(tmp_path, kind)
    lance.dataset(uri).initialize_mem_wal()
    merge(uri, ROWS, ROWS + ADDED)
    trained = codebooks(uri, "by_vector")
    assert run_job(uri, "catchup", indexes=["by_vector"], rebuild=True).decision == "caught_up"
    assert is_complete(uri, "by_vector")
    assert codebooks(uri, "by_vector") == trained
    assert recall(uri) > of_a_fresh_build(tmp_path, kind, ROWS + ADDED) - 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_whose_rows_are_all_gone_is_not_refused(tmp_path: Path, kind: str) -> None:
    """All of its rows get the new codes."""
    uri = make(tmp_path, kind)
    lance.write_dataset(rows(ROWS, ROWS + 2 * ADDED), uri, mode="append")
    lance.dataset(uri).delete(f"id < {ROWS}")
    assert run_job(uri, "catchup").decision == "caught_up"


def merge(uri: str, start: int, end: int) -> None:
    with lance.dataset(uri).mem_wal_writer(str(uuid.UUID(int=7, version=4))) as writer:
        writer.put(rows(start, end))
    assert run_job(uri, "merge").decision == "merged"
