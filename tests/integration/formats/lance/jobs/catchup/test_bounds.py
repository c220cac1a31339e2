"""New rows beyond the bounds of scalar quantization: the index is built anew, and finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.jobs.catchup import tiers as bounds
from memwal_ops.formats.lance.jobs.catchup.tiers import Misfit
from tests.support.tables import indexed

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

DIMENSION, ROWS, QUERIES = 16, 1_000, 25
RNG = np.random.default_rng(7)
OLD: Vectors = np.abs(RNG.normal(size=(ROWS, DIMENSION))).astype("f4")
FAR: dict[str, Vectors] = {
    "l2": (RNG.normal(size=(ROWS, DIMENSION)) * 3 + 30).astype("f4"),
    "cosine": -np.abs(RNG.normal(size=(ROWS, DIMENSION))).astype("f4"),
}


def rows(vectors: Vectors) -> pa.Table:
    return pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSION)})


def build(uri: str, kind: str, metric: str) -> None:
    made = lance.write_dataset(rows(OLD), uri)
    made.create_index("vector", kind, metric=metric, num_partitions=2, name="one")


def append(uri: str, vectors: Vectors) -> None:
    lance.write_dataset(rows(vectors), uri, mode="append")


def recall(uri: str, every: Vectors, asked: range, metric: str) -> float:
    """The share of the 10 true neighbours that searches of all partitions find. All fragments have ``ROWS`` rows."""
    dataset, hits = lance.dataset(uri), 0
    for query in every[asked]:
        distances = ((every - query) ** 2).sum(axis=1)
        if metric == "cosine":
            distances = -(every @ query) / np.linalg.norm(every, axis=1)
        near = {"column": "vector", "q": query, "k": 10, "nprobes": 2}
        found = dataset.scanner(columns=["_distance"], nearest=near, with_row_address=True).to_table()["_rowaddr"]
        numbers = {(one >> 32) * ROWS + (one & 0xFFFFFFFF) for one in found.to_pylist()}
        hits += len({*np.argsort(distances)[:10].tolist()} & numbers)
    return hits / (10 * len(asked))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", FAR)
@pytest.mark.parametrize("kind", ["IVF_SQ", "IVF_HNSW_SQ"])
def test_rows_beyond_the_bounds_are_found_after_a_catch_up(tmp_path: Path, kind: str, metric: str) -> None:
    uri, ignored = str(tmp_path / "t.lance"), str(tmp_path / "ignored.lance")
    new, every = range(ROWS, ROWS + QUERIES), np.concatenate([OLD, FAR[metric]])
    for one in (uri, ignored):
        build(one, kind, metric)
        append(one, FAR[metric])
    lance.dataset(ignored).optimize.optimize_indices(num_indices_to_merge=0)
    assert recall(ignored, every, new, metric) < 0.3, "the premise: pylance's update loses them"

    [planned] = run_job(uri, "catchup", apply=False).to_json()["indexes"]
    assert (planned["decision"], planned["method"]) == ("would_update", "rebuild")
    assert planned["why"].startswith("1,000 of 1,000 new rows are beyond the bounds of its codes")
    report = run_job(uri, "catchup")
    [made] = report.to_json()["indexes"]
    assert (made["decision"], made["method"], made["why"]) == ("updated", "rebuild", planned["why"])
    assert "ANEW: one: 1,000 of 1,000 new rows" in report.describe()
    assert recall(uri, every, new, metric) > 0.7
    assert recall(uri, every, range(QUERIES), metric) > 0.7

    append(uri, FAR[metric])
    assert [one.method for one in run_job(uri, "catchup").indexes] == ["update"], "they are within the new bounds"


@pytest.mark.parametrize("metric", FAR)
def test_rows_of_the_same_kind_update_the_index(tmp_path: Path, metric: str) -> None:
    """Tails reach a little beyond the bounds that a sample had; with cosine, lengths do not matter."""
    uri = str(tmp_path / "t.lance")
    build(uri, "IVF_SQ", metric)
    more = np.abs(RNG.normal(size=(ROWS, DIMENSION))).astype("f4") * (100 if metric == "cosine" else 1)
    more[0], more[1] = np.nan, 0
    append(uri, more)
    [made] = run_job(uri, "catchup").indexes
    assert (made.decision, made.method, made.why) == ("updated", "update", None)


def test_few_rows_that_a_training_may_miss_update_the_index(tmp_path: Path) -> None:
    """Else each run would build it anew."""
    uri = str(tmp_path / "t.lance")
    build(uri, "IVF_SQ", "l2")
    append(uri, FAR["l2"][:5])
    report = run_job(uri, "catchup")
    [made] = report.indexes
    assert (made.decision, made.method) == ("updated", "update")
    assert "too few for a training" in str(made.why)
    assert "NOTE: one: 5 of 5 new rows" in report.describe()


def test_bounds_that_cannot_be_read_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "t.lance")
    build(uri, "IVF_SQ", "l2")
    append(uri, FAR["l2"])

    def unreadable(*_: object) -> None:
        raise UnsupportedFeatureError("no bounds")

    monkeypatch.setattr(bounds, "scalar_bounds", unreadable)
    [made] = run_job(uri, "catchup").indexes
    assert (made.decision, made.method) == ("updated", "update")
    assert str(made.why).endswith("is not known: no bounds")


def test_what_would_answer_worse_built_anew_is_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of another scale take all codes of the others away."""
    uri = str(tmp_path / "t.lance")
    build(uri, "IVF_SQ", "l2")
    append(uri, FAR["l2"] * np.float32(1e6))
    [made] = run_job(uri, "catchup").indexes
    assert (made.decision, made.method) == ("updated", "update")
    assert "; but built anew: " in str(made.why)


def test_beside_a_log_bounds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"), vector="IVF_SQ")
    indexed.write(uri, 0)
    monkeypatch.setattr(bounds, "_MARGIN", -1)  # all are beyond them
    by_name = {one.name: one for one in run_job(uri, "catchup").indexes}
    assert by_name["vector_idx"].method == "update"
    assert "--migrate-codebook vector_idx NEW" in str(by_name["vector_idx"].why)
    assert {one.why for name, one in by_name.items() if name != "vector_idx"} == {None}


def test_what_the_budget_leaves_counts_a_build_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "t.lance")
    build(uri, "IVF_SQ", "l2")
    lance.dataset(uri).create_index("vector", "IVF_FLAT", metric="l2", num_partitions=2, name="a")
    again = {"index_type": "IVF_SQ", "metric": "l2", "num_partitions": 2, "name": "one", "replace": True}
    lance.dataset(uri).create_index("vector", **again)  # built last, so that its turn is last
    append(uri, FAR["l2"])
    asked: list[str] = []
    real = bounds.misfit

    def misfit(table: object, index: object, context: object) -> Misfit | None:
        asked.append(index.name)  # type: ignore[attr-defined]  # of any type
        return real(table, index, context)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(bounds, "misfit", misfit)
    report = run_job(uri, "catchup", max_bytes=1)
    assert {one.name: one.decision for one in report.indexes} == {"a": "updated", "one": "over_budget"}
    assert "one" in asked
    assert "NOTE: one: The run has used its --max-bytes" in report.describe()
