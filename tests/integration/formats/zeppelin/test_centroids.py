"""Centroids: every row is with its nearest one, and they are trained again when they no longer fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin import segments
from tests.support.zeppelin import independent
from tests.support.zeppelin.merging import opened
from tests.support.zeppelin.namespace import NamespaceUnderTest


@pytest.mark.req("S4-030", "S4-031")
def test_every_row_is_with_its_nearest_centroid(tmp_path: Path) -> None:
    for metric in ("cosine", "euclidean"):
        uri = str(tmp_path / metric)
        zeppelin.create(uri, dimensions=4, metric=metric)
        random_ = np.random.default_rng(5)
        for _ in range(2):
            rows = random_.normal(size=(300, 4)).astype(np.float32)
            ids = [str(number) for number in random_.integers(0, 10_000, 300)]
            zeppelin.open_writer(uri).append(
                [{"id": name, "values": row} for name, row in dict(zip(ids, rows, strict=True)).items()]
            )
            run_job(uri, "merge", clusters=6, retrain_imbalance_threshold=1000.0)
            found: Any = open_table(uri)
            folder = Path(uri, found.manifest.segments[0].prefix)
            centroids = independent.centroids((folder / "centroids.bin").read_bytes())
            assert len(centroids) == 6
            for number in range(6):
                for _, values in independent.cluster((folder / f"cluster_{number}.bin").read_bytes()):
                    far = [_distance(values, one, metric) for one in centroids]
                    assert far[number] <= min(far) + 1e-4


def _distance(a: tuple[float, ...], b: tuple[float, ...], metric: str) -> float:
    if metric == "euclidean":
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return 1 - dot / (sum(x * x for x in a) ** 0.5 * sum(x * x for x in b) ** 0.5)


@pytest.mark.req("S4-038")
def test_imbalance_trains_again(tmp_path: Path) -> None:
    uri = str(tmp_path / "ns")
    zeppelin.create(uri, dimensions=2, metric="euclidean")
    corners = np.array([[10, 10], [-10, -10]], np.float32)

    def write(corner: int, count: int, prefix: str) -> None:
        near = corners[corner] + np.random.default_rng(1).normal(size=(count, 2)).astype(np.float32)
        zeppelin.open_writer(uri).append([{"id": f"{prefix}{at}", "values": row} for at, row in enumerate(near)])

    write(0, 50, "a")
    write(1, 50, "b")
    first: Any = run_job(uri, "merge", clusters=2)
    assert first.passes[0].retrained
    write(0, 40, "c")
    second: Any = run_job(uri, "merge", clusters=2, retrain_imbalance_threshold=3.0)
    assert not second.passes[0].retrained, "90 / 50"
    write(0, 80, "d")
    third: Any = run_job(uri, "merge", clusters=2, retrain_imbalance_threshold=3.0)
    assert third.passes[0].retrained, "170 / 50"
    write(0, 1, "e")
    fourth: Any = run_job(uri, "merge", clusters=2, retrain_imbalance_threshold=3.0)
    assert not fourth.passes[0].retrained or segments.imbalance([1, 1]) == 1, "as imbalanced as the data: once"
    assert len(zeppelin.query(uri, vector=[0, 0], k=999)) == 221


def test_growth_trains_again(made: NamespaceUnderTest) -> None:
    run_job(made.uri, "merge")
    rows = len(made.expected())
    made.put(*(f"n{number}" for number in range(rows)))
    assert not run_job(made.uri, "merge").passes[0].retrained  # type: ignore[attr-defined]
    made.put(*(f"m{number}" for number in range(5 * rows)))
    assert run_job(made.uri, "merge").passes[0].retrained  # type: ignore[attr-defined]
    assert made.read() == made.expected()


def test_a_record_of_training_that_cannot_be_read_is_no_record(made: NamespaceUnderTest) -> None:
    run_job(made.uri, "merge")
    path = Path(made.uri, segments.training_path(opened(made).manifest.segments[0].id))
    assert path.exists()
    path.write_bytes(b"[" * 200_000)
    made.write()
    assert run_job(made.uri, "merge").decision == "merged"
    assert made.read() == made.expected()
