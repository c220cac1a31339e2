"""``catchup --retrain auto``: a vector index is built anew by evidence, and by evidence alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.options import OptionError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.jobs.catchup import building
from memwal_ops.formats.lance.options import CatchupOptions
from tests.support.run_cli import run_here
from tests.support.tables import indexed

if TYPE_CHECKING:
    from pathlib import Path

DIMENSION, ROWS, ADDED, QUERIES = 16, 3_000, 1_000, 200
RNG = np.random.default_rng(3)
CENTERS = RNG.normal(size=(20, DIMENSION))
EVERY = (CENTERS[RNG.integers(0, 20, ROWS + ADDED)] + 0.5 * RNG.normal(size=(ROWS + ADDED, DIMENSION))).astype("f4")


def rows(vectors: np.ndarray) -> pa.Table:  # type: ignore[type-arg]
    return pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSION)})


def build(uri: str, vectors: np.ndarray, metric: str) -> None:  # type: ignore[type-arg]
    made = lance.write_dataset(rows(vectors), uri)
    made.create_index("vector", "IVF_PQ", metric=metric, num_partitions=2, num_sub_vectors=8, name="one")


def recall(uri: str, vectors: np.ndarray) -> float:  # type: ignore[type-arg]
    """By the metric dot: the share of the 10 true neighbours that searches find. The first fragment has ``ROWS``."""
    dataset, hits = lance.dataset(uri), 0
    for query in vectors[:QUERIES]:
        near = {"column": "vector", "q": query, "k": 10, "nprobes": 2}
        found = dataset.scanner(columns=["_distance"], nearest=near, with_row_address=True).to_table()["_rowaddr"]
        rows_found = {(one >> 32) * ROWS + (one & 0xFFFFFFFF) for one in found.to_pylist()}
        hits += len({*np.argsort(-(vectors @ query))[:10].tolist()} & rows_found)
    return hits / (10 * QUERIES)


@pytest.mark.long
def test_dot_products_get_the_recall_of_a_fresh_build(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    build(uri, EVERY[:ROWS], "dot")
    lance.write_dataset(rows(EVERY[ROWS:]), uri, mode="append")
    plan = run_job(uri, "catchup", apply=False, retrain="auto")
    assert [(one.decision, one.method) for one in plan.indexes] == [("would_update", "rebuild")]
    report = run_job(uri, "catchup", retrain="auto")
    assert [(one.decision, one.method) for one in report.indexes] == [("updated", "rebuild")]
    assert "ANEW: one: rows that pylance adds" in report.describe()
    table = open_table(uri)
    assert coverage(base_indexes(table)["one"].covered, table.manifest).complete
    fresh = []
    for number in range(3):  # how k-means begins makes a difference of 0.02 from build to build
        build(f"{tmp_path}/{number}.lance", EVERY, "dot")
        fresh.append(recall(f"{tmp_path}/{number}.lance", EVERY))
    assert recall(uri, EVERY) > min(fresh) - 0.02
    assert run_job(uri, "catchup", retrain="auto").decision == "unchanged"


@pytest.mark.long
def test_what_pylance_ruined_is_found_and_built_anew(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    build(uri, EVERY[:ROWS], "dot")
    lance.write_dataset(rows(EVERY[ROWS:]), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=0)
    ruined = recall(uri, EVERY)
    assert run_job(uri, "catchup").decision == "unchanged"
    report = run_job(uri, "catchup", retrain="auto")
    assert [(one.decision, one.method) for one in report.indexes] == [("updated", "rebuild")]
    assert recall(uri, EVERY) > ruined + 0.3


@pytest.mark.long
def test_a_healthy_index_is_updated(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    build(uri, EVERY[:ROWS], "l2")
    for at in range(2):
        lance.write_dataset(rows(EVERY[ROWS + at * 500 : ROWS + at * 500 + 500]), uri, mode="append")
        report = run_job(uri, "catchup", retrain="auto")
        assert [(one.decision, one.method, one.why) for one in report.indexes] == [("updated", "update", None)]
    assert len(base_indexes(open_table(uri))["one"].segments) == 3
    assert run_job(uri, "catchup", retrain="auto").decision == "unchanged"


@pytest.mark.long
def test_rows_that_its_centroids_do_not_fit_are_evidence(tmp_path: Path) -> None:
    """They are all in one partition, with codes that tell nothing."""
    uri = str(tmp_path / "t.lance")
    build(uri, EVERY[:ROWS], "l2")
    far = (EVERY[ROWS:] * 0.01 + 40).astype("f4")
    lance.write_dataset(rows(far), uri, mode="append")
    methods = []
    for _ in range(3):
        report = run_job(uri, "catchup", retrain="auto")
        methods += [one.method for one in report.indexes]
    assert methods[-1] is None, "an index that was trained by all rows is not trained again"
    assert "rebuild" in methods
    assert len(base_indexes(open_table(uri))["one"].segments) == 1


def test_what_the_guard_refuses_is_built_anew_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "t.lance")
    build(uri, EVERY[:ROWS], "dot")
    lance.write_dataset(rows(EVERY[ROWS:]), uri, mode="append")
    monkeypatch.setattr(building, "refusal", lambda *_, **__: None)
    monkeypatch.setattr("memwal_ops.formats.lance.jobs.catchup.tiers.dot_product_error", lambda *_: None)
    report = run_job(uri, "catchup", retrain="auto")
    assert [(one.decision, one.method) for one in report.indexes] == [("updated", "rebuild")]
    assert "would answer worse" in str(report.indexes[0].why)
    assert len([*(tmp_path / "t.lance" / "_indices").iterdir()]) == 2, "what was refused is deleted"


def test_beside_a_log_nothing_is_retrained(tmp_path: Path) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"))
    indexed.write(uri, 0)
    report = run_job(uri, "catchup", retrain="auto")
    assert {one.method for one in report.indexes} == {"update"}
    indexed.check_queries(uri, indexed.expected(1))


@pytest.mark.parametrize(
    ("given", "read"),
    [(True, "always"), (False, "never"), ("auto", "auto"), ("never", "never")],
)
def test_spellings(given: object, read: str) -> None:
    """True and false are those of configurations that were written before."""
    assert CatchupOptions.read({"retrain": given}).retrain == read
    if not isinstance(given, str):
        assert CatchupOptions(retrain=given).retrain == read  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["sometimes", "true", "false", 1])
def test_other_words_are_refused(word: object) -> None:
    with pytest.raises(OptionError, match="auto, never or always"):
        CatchupOptions.read({"retrain": word})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (["--retrain"], "retrain"),
        (["--retrain", "auto"], None),
        (["--retrain=never"], None),
        (["--retrain=always"], "retrain"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_the_value_may_be_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], method: str | None, first: bool
) -> None:
    """In front of the URI, too."""
    uri = str(tmp_path / "t.lance")
    build(uri, EVERY[:ROWS], "l2")
    placed = [*arguments, uri] if first else [uri, *arguments]
    ran = run_here(capfd, "catchup", *placed, "--json")
    assert ran.code == 0
    assert [one["method"] for one in ran.document["indexes"]] == [method]
