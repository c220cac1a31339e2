"""What jobs need does not grow faster than the namespace: counted requests, and the memory of Python's objects."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops import open_table, run_job
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.roots import Cache
from memwal_ops.formats.zeppelin.segments import nearest
from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions
from memwal_ops.storage.local import LocalObjectStore

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_CLUSTERS, _ROWS = 12, 240
_NOW = ZeppelinGcOptions(reader_grace=timedelta(0), keep_revisions=1, allow_unsafe=True)


def made(path: Path) -> str:
    """A native namespace with a segment of some clusters."""
    uri, random = str(path / "ns"), np.random.default_rng(3)
    zeppelin.create(uri, dimensions=4, metric="euclidean", dialect="native")
    vectors = random.normal(size=(_ROWS, 4)).tolist()
    rows = [{"id": f"v{at}", "values": one, "attributes": {"n": at}} for at, one in enumerate(vectors)]
    zeppelin.open_writer(uri).append(rows)
    run_job(uri, "merge", clusters=_CLUSTERS)
    return uri


def counted(patch: pytest.MonkeyPatch, method: str) -> Counter[str]:
    """The paths that stores are asked for from now on."""
    paths: Counter[str] = Counter()
    original = getattr(LocalObjectStore, method)

    def count(self: LocalObjectStore, path: str, *more: Any) -> Any:
        paths[path] += 1
        return original(self, path, *more)

    patch.setattr(LocalObjectStore, method, count)
    return paths


def test_a_training_reads_attributes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sample is of vectors."""
    uri = made(tmp_path)
    read = counted(monkeypatch, "get")
    assert run_job(uri, "merge", retrain=True, clusters=_CLUSTERS).decision == "merged"
    attributes = [count for path, count in read.items() if "/attrs_" in path]
    clusters = [count for path, count in read.items() if "/cluster_" in path]
    assert (attributes, clusters) == ([1] * _CLUSTERS, [2] * _CLUSTERS)


def test_gc_asks_for_no_single_object_of_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit retires all objects of the old segment: they are found by one listing."""
    uri = made(tmp_path)
    run_job(uri, "merge", retrain=True, clusters=_CLUSTERS)
    retired = len(open_table(uri).manifest.pending)  # type: ignore[attr-defined]
    asked = counted(monkeypatch, "head")
    assert retired > 2 * _CLUSTERS
    assert run_job(uri, "gc", _NOW, apply=True).decision == "deleted"
    assert open_table(uri).manifest.pending == ()  # type: ignore[attr-defined]
    assert not [path for path in asked if path.startswith("segments/")]


def test_asking_indexes_reads_each_cluster_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw queries, for the distances of all rows, and once for all queries; the log once: not for each query."""
    uri = made(tmp_path)
    zeppelin.open_writer(uri).append([{"id": "v0", "values": [9.0] * 4}])
    checked = counted(monkeypatch, "get")
    run_job(uri, "verify")
    once = Counter(checked)
    checked.clear()
    report = run_job(uri, "verify", answers=True, samples=50).to_json()
    assert [one["queries"] for one in report["answers"]] == [50]
    more = {path: count - once[path] for path, count in checked.items()}
    clusters = [count for path, count in more.items() if "/cluster_" in path]
    assert max(clusters) <= 3, more
    assert [count for path, count in more.items() if path.startswith("wal/")] == [1]


def test_what_many_revisions_list_is_kept_by_number() -> None:
    """Each append of a native namespace is a revision that lists the whole log."""

    class Listing:
        prefixes = frozenset({"segments/seg_1/"})

        def __init__(self, count: int) -> None:
            # As decoded from each record: no two manifests share a key.
            self.fragment_keys = frozenset(f"wal/{at:026}.wal" for at in range(count))

    count = 300
    cache: Any = Cache()
    tracemalloc.start()
    try:
        for number in range(1, count + 1):
            cache.add(number, Listing(number))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    entries = count * (count + 1) // 2
    assert held < 8 * entries + 1000 * count, "the keys alone of manifests take 80 bytes for each entry"
    assert len([*cache.fragments(count)]) == len(cache.listed) - 1 == count
    assert {*cache.fragments(1)} == {f"wal/{0:026}.wal"}
    assert [*cache.fragments(count + 1)] == []


def test_products_with_many_centroids_are_bounded() -> None:
    random = np.random.default_rng(5)
    vectors, centroids = (random.normal(size=(count, 2)).astype(np.float32) for count in (8192, 4096))
    tracemalloc.start()
    try:
        found = nearest(vectors, centroids, "euclidean")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20, "two times 16 MiB; those of 4,096 rows would be two times 64 MiB"
    some = random.choice(len(vectors), 50, replace=False)
    far = ((vectors[some, None].astype(np.float64) - centroids) ** 2).sum(axis=2)
    assert np.allclose(far[np.arange(50), found[some]], far.min(axis=1), atol=1e-4)
