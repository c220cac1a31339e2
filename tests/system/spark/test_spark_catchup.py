"""Indexes built on Spark: by parts of fragments, with the answers of those that one process builds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.indices import IndexConfig

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.engines.spark.indexing import SparkBuilder
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.codebook import read_codebook
from memwal_ops.formats.lance.options import CatchupOptions
from tests.support.tables import damage, indexed
from tests.support.tables.unreferenced import unreferenced

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("spark", "small_parts")]
SPARK = CatchupOptions(engine="spark")
SCALARS: dict[str, tuple[str, Any]] = {
    "btree": ("id", "BTREE"),
    "bitmap": ("kind", "BITMAP"),
    "labels": ("tags", "LABEL_LIST"),
    "inverted": ("text", "INVERTED"),
    "ngram": ("text", "NGRAM"),
    "zonemap": ("id", "ZONEMAP"),
    "bloom": ("id", "BLOOMFILTER"),
    "similar": ("text", IndexConfig("minhashlsh", {})),
}
ROWS, DIMENSION, FRAGMENTS = 150, 16, 3
VECTORS = {f"v_{kind.lower()}": kind for kind in indexed.VECTOR_KINDS}
# pylance trains these by the rows of each segment, and takes no bounds: one task builds them, and none updates them.
BOUNDED = {"IVF_SQ", "IVF_HNSW_SQ"}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide also tables as small as these."""
    monkeypatch.setattr(SparkBuilder, "least_bytes", 1)


def rows(at: int) -> pa.Table:
    """One fragment."""
    numbers = range(at * ROWS, (at + 1) * ROWS)
    vectors = pa.FixedSizeListArray.from_arrays(
        np.random.default_rng(at).random(ROWS * DIMENSION, dtype=np.float32), DIMENSION
    )
    return pa.table(
        {
            "id": numbers,
            "kind": [f"k{one % 7}" for one in numbers],
            "tags": [[f"t{one % 5}"] for one in numbers],
            "text": [f"word{one % 9} of row number {one}" for one in numbers],
            **dict.fromkeys(VECTORS, vectors),
        }
    )


def append(uri: str, first: int) -> None:
    for at in range(first, first + FRAGMENTS):
        lance.write_dataset(rows(at), uri, mode="append" if at else "create")


def create_vectors(uri: str) -> None:
    for column, kind in VECTORS.items():
        quantizer = {"num_sub_vectors": 4, "num_bits": 8} if kind.endswith("PQ") else {}
        lance.dataset(uri).create_index(column, kind, name=kind, num_partitions=4, **quantizer)


def entries(report: Any) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in report.to_json()["indexes"]}


def tasks(entry: dict[str, Any]) -> dict[str, int]:
    return {name: int(figures["tasks"]) for name, figures in entry["stages"].items()}


def check(uri: str) -> None:
    """Everything is covered, all answers are right, and no file is left."""
    table = open_table(uri)
    assert all(coverage(one.covered, table.manifest).complete for one in base_indexes(table).values())
    answers = run_job(uri, "verify", answers=True)
    assert answers.decision == "healthy", answers.describe()
    assert not unreferenced(uri)


def recalls(uri: str) -> dict[str, float]:
    """By type, the share of the ten nearest rows that a search of all partitions finds."""
    dataset = lance.dataset(uri)
    every = dataset.to_table()
    ids = every["id"].to_numpy()
    found = dict.fromkeys(VECTORS.values(), 0.0)
    asked = range(0, len(ids), 29)
    vectors = np.array(every[next(iter(VECTORS))].to_pylist(), np.float32)
    for at in asked:
        nearest = set(ids[np.argsort(((vectors - vectors[at]) ** 2).sum(1))[:10]].tolist())
        for column, kind in VECTORS.items():
            query = {"column": column, "q": vectors[at], "k": 10, "nprobes": 4}
            hits = dataset.to_table(columns=["id", "_distance"], nearest=query)["id"].to_pylist()
            found[kind] += len(nearest & set(hits)) / (10 * len(asked))
    return found


def test_scalar_indexes_of_all_types(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    append(uri, 0)
    for name, (column, kind) in SCALARS.items():
        lance.dataset(uri).create_scalar_index(column, kind, name=name)
    append(uri, FRAGMENTS)
    lance.dataset(uri).delete("id % 10 = 3")
    report = run_job(uri, "catchup", SPARK)
    built = entries(report)
    assert {one["decision"] for one in built.values()} == {"updated"}, report.describe()
    assert {one["engine"] for one in built.values()} == {"spark"}, report.describe()
    assert all(tasks(one)["segments"] > 1 and tasks(one)["merge"] == 1 for one in built.values())
    check(uri)
    lance.write_dataset(rows(2 * FRAGMENTS), uri, mode="append")
    little = entries(run_job(uri, "catchup", SPARK))
    assert little["labels"]["engine"] == "local", "its one segment is read instead of rows"
    assert "in segments already" in little["labels"]["engine_reason"]
    check(uri)
    anew = entries(run_job(uri, "catchup", replace(SPARK, rebuild=True, indexes=tuple(SCALARS))))
    assert {(one["decision"], one["engine"], one["segments"]) for one in anew.values()} == {("updated", "spark", 1)}
    check(uri)


def codebooks(uri: str) -> dict[str, set[Any]]:
    table = open_table(uri)
    return {
        name: {read_codebook(table, entry) for entry in index.segments}
        for name, index in base_indexes(table).items()
        if index.is_vector
    }


def test_vector_indexes_of_all_types(tmp_path: Path) -> None:
    """An update keeps the codebook, whatever the engine; a rebuild trains one for all parts."""
    uri = str(tmp_path / "t.lance")
    append(uri, 0)
    create_vectors(uri)
    append(uri, FRAGMENTS)
    other = damage.copy_table(uri, str(tmp_path / "other.lance"))
    before = codebooks(uri)
    updated = entries(run_job(uri, "catchup", SPARK))
    assert {name for name, one in updated.items() if one["engine"] != "spark"} == BOUNDED, updated
    here = entries(run_job(other, "catchup"))
    assert {name: one["segments"] for name, one in updated.items()} == {n: one["segments"] for n, one in here.items()}
    assert codebooks(uri) == before
    local = recalls(other)
    assert recalls(uri) == pytest.approx(local, abs=0.02)
    anew = replace(SPARK, rebuild=True, indexes=tuple(VECTORS.values()))
    rebuilt = entries(run_job(uri, "catchup", anew))
    assert {one["engine"] for one in rebuilt.values()} == {"spark"}
    for kind, one in rebuilt.items():
        expected = {"segments": 1} if kind in BOUNDED else {"train": 1, "segments": 2, "merge": 1}
        assert tasks(one) == expected, kind
    found = recalls(uri)
    # Trained by chance, and codes of 8 bits for 4 numbers each: others find 0.74 to 0.80.
    assert {kind: found[kind] > 0.6 for kind in found} == dict.fromkeys(found, True), found
    assert {kind for kind in found if found[kind] > 0.9} == {kind for kind in found if "PQ" not in kind}, found
    check(uri)


def test_one_part_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that is merged with no other one answers as well, and is merged later."""
    monkeypatch.setattr(SparkBuilder, "least_bytes", 64 << 20)
    uri = str(tmp_path / "t.lance")
    append(uri, 0)
    for name, (column, kind) in SCALARS.items():
        lance.dataset(uri).create_scalar_index(column, kind, name=name)
    create_vectors(uri)
    append(uri, FRAGMENTS)
    other = damage.copy_table(uri, str(tmp_path / "other.lance"))
    before = codebooks(uri)
    built = entries(run_job(uri, "catchup", SPARK))
    assert {one["decision"] for one in built.values()} == {"updated"}, built
    on_spark = {name: tasks(one) for name, one in built.items() if one["engine"] == "spark"}
    assert on_spark.keys() == built.keys() - BOUNDED
    assert on_spark == {key: {"segments": 1} for key in on_spark}
    check(uri)
    assert codebooks(uri) == before
    run_job(other, "catchup")
    assert recalls(uri) == pytest.approx(recalls(other), abs=0.02)
    append(uri, 2 * FRAGMENTS)
    run_job(uri, "catchup")
    check(uri)
    anew = entries(run_job(uri, "catchup", replace(SPARK, rebuild=True, indexes=(*SCALARS, *VECTORS.values()))))
    assert {(one["decision"], one["engine"], one["segments"]) for one in anew.values()} == {("updated", "spark", 1)}
    check(uri)
