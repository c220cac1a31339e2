"""verify --answers on tables of 200,000 rows: planted faults by 20 seeds, and 50 healthy tables of all types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from memwal_ops import run_job
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.tables.answering import (
    DIMENSION,
    VECTORS,
    folders,
    make_scalars,
    make_vectors,
    rebuilt_elsewhere,
    replace_files,
    rows,
    swap,
    vectors,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS, SEEDS, ENOUGH = 200_000, 20, 19
# Of how many parts of the tables one is run; which one, the seed tells.
PARTS = env_number("ANSWER_PARTS", 1)


def dot_product(uri: str, aside: str) -> None:
    random = np.random.default_rng(1)
    centers = 3 * random.normal(size=(50, DIMENSION))
    dataset = lance.write_dataset(
        pa.table({"v": vectors(random, ROWS, centers=centers)}), uri, max_rows_per_file=50_000
    )
    dataset.create_index("v", "IVF_PQ", name="x", metric="dot", num_partitions=64, num_sub_vectors=8)
    dataset.insert(pa.table({"v": vectors(random, 10_000, centers=centers)}))
    dataset.optimize.optimize_indices(num_indices_to_merge=0)


def foreign_centroids(uri: str, aside: str) -> None:
    random = np.random.default_rng(2)
    centers = 3 * random.normal(size=(200, DIMENSION))
    for place in (uri, aside):
        dataset = lance.write_dataset(pa.table({"v": vectors(random, ROWS, centers=centers)}), place)
        dataset.create_index("v", "IVF_FLAT", name="x", num_partitions=200)
    [own], [foreign] = folders(uri, "x"), folders(aside, "x")
    (own / "index.idx").write_bytes((foreign / "index.idx").read_bytes())


def lost_value(uri: str, aside: str) -> None:
    kinds = pa.table({"kind": [f"kind{n % 1000}" for n in range(ROWS)]})
    lance.write_dataset(kinds, uri, max_rows_per_file=50_000)

    def without(table: pa.Table) -> pa.Table:
        return pa.table({"kind": pc.if_else(pc.equal(table["kind"], "kind77"), None, table["kind"])})

    rebuilt_elsewhere(uri, aside, "x", "kind", "BITMAP", without)


def lost_document(uri: str, aside: str) -> None:
    table = rows(np.random.default_rng(3), 0, ROWS).select(["text"])
    lance.write_dataset(table, uri, max_rows_per_file=50_000)

    def without(table: pa.Table) -> pa.Table:
        texts = table["text"].to_pylist()
        texts[123_456] = None
        return pa.table({"text": texts})

    rebuilt_elsewhere(uri, aside, "x", "text", "INVERTED", without)


def another_index(uri: str, aside: str) -> None:
    random = np.random.default_rng(4)
    table = pa.table({"a": random.permutation(ROWS), "b": random.permutation(ROWS)})
    dataset = lance.write_dataset(table, uri, max_rows_per_file=50_000)
    for column in "ab":
        dataset.create_scalar_index(column, "BTREE", name=f"by_{column}")
    replace_files(folders(uri, "by_a")[0], folders(uri, "by_b")[0])


def two_segments(uri: str, kind: str) -> None:
    dataset = lance.write_dataset(pa.table({"n": range(ROWS)}), uri, max_rows_per_file=ROWS // 2)
    parts = [dataset.create_index_uncommitted("n", kind, name="x", fragment_ids=[one]) for one in (0, 1)]
    dataset.commit_existing_index_segments("x", "n", parts)


def swapped(uri: str, aside: str) -> None:
    two_segments(uri, "BTREE")
    swap(*folders(uri, "x"))


def not_held(uri: str, aside: str) -> None:
    two_segments(uri, "BTREE")
    first, second = folders(uri, "x")
    replace_files(second, first)


def zones_gone(uri: str, aside: str) -> None:
    two_segments(uri, "ZONEMAP")
    first, second = folders(uri, "x")
    replace_files(second, first)


PLANTS = [dot_product, foreign_centroids, lost_value, lost_document, another_index, swapped, not_held, zones_gone]


@pytest.mark.parametrize("plant", PLANTS[CAMPAIGN_SEED % PARTS :: PARTS])
def test_planted_faults_are_found(tmp_path: Path, plant: Callable[[str, str], None]) -> None:
    uri = str(tmp_path / "t.lance")
    plant(uri, str(tmp_path / "aside.lance"))
    missed = []
    for seed in range(SEEDS):
        report = run_job(uri, "verify", answers=True, seed=seed)
        if not any(one.check.startswith("index_") and one.page == "runbooks/wrong-answers.md" for one in report.listed):
            missed.append(seed)
    assert len(missed) <= SEEDS - ENOUGH, f"seeds that found nothing: {missed}"


SCALARS = [("scalars", version, stable) for version in ("2.0", "2.1", "2.2") for stable in (False, True)]
OTHERS = [(kind, metric, False) for kind in VECTORS for metric in ("l2", "cosine")]
HEALTHY = [(*one, seed) for seed in range(2) for one in (*SCALARS, *OTHERS)]
HEALTHY += [("IVF_FLAT", "dot", False, seed) for seed in range(5)] + [
    ("IVF_SQ", "dot", False, seed) for seed in range(5)
]


@pytest.mark.parametrize(("kind", "of", "stable", "seed"), HEALTHY[CAMPAIGN_SEED % PARTS :: PARTS])
def test_healthy_tables_have_no_finding(tmp_path: Path, kind: str, of: str, stable: bool, seed: int) -> None:
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng([seed, len(kind), len(of)])
    count = int(random.integers(5_000, 50_000)) * 4
    if kind == "scalars":
        make_scalars(uri, random, count, data_storage_version=of, enable_stable_row_ids=stable)
    else:
        make_vectors(uri, random, count, kind, of)
    if seed:
        lance.dataset(uri).optimize.compact_files()
    report = run_job(uri, "verify", answers=True, seed=seed)
    assert not report.findings.kept, f"{kind} {of} {stable} seed {seed}: {report.describe()}"


def test_there_are_fifty() -> None:
    assert len(HEALTHY) == 50
