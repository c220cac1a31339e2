"""Segments of Zeppelin namespaces are written by tasks of Spark: byte by byte those of one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.spark.runner import TaskRunner
from memwal_ops.errors import SparkJobFailedError, StoreUnavailableError
from memwal_ops.formats.zeppelin import compaction, spark as on_spark
from memwal_ops.formats.zeppelin.jobs import merge
from tests.support.zeppelin.merging import expire, opened
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.namespace import Namespace

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("spark")]


@pytest.fixture(autouse=True)
def several_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows to a batch and few bytes to a task; k-means draws at random, so its result is given."""
    monkeypatch.setattr(compaction, "_SLICE", 3)
    monkeypatch.setattr(on_spark, "_BYTES_PER_TASK", 1000)
    monkeypatch.setattr(compaction, "train", lambda sample, clusters, _: sample[:clusters].copy())


def objects(uri: str) -> dict[str, bytes]:
    """The objects of the live segment, by name."""
    table: Any = open_table(uri)
    return {path.name: path.read_bytes() for path in Path(uri, table.manifest.segments[-1].prefix).iterdir()}


@pytest.mark.parametrize("dialect", ["wiki", "native"])
def test_the_same_objects_as_of_one_process(tmp_path: Path, dialect: str) -> None:
    """A first training, a merge that keeps the centroids, a training that reads a segment; with codes and indexes."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), dialect)
    made.write()
    made.put(*(f"n{at}" for at in range(20)))
    steps: list[tuple[dict[str, Any], bool]] = [
        ({"clusters": 5, "quantization": "scalar", "bitmap_field": ("color",)}, True),
        ({"retrain_imbalance_threshold": 1000.0}, False),
        ({"clusters": 4, "retrain": True}, True),
    ]
    for options, retrained in steps:
        other = shutil.copytree(made.uri, tmp_path / "local" / "ns")
        local = run_job(str(other), "merge", engine="local", **options).to_json()
        report = run_job(made.uri, "merge", engine="spark", **options).to_json()
        assert (report["engine"], local["engine"]) == ("spark", "local")
        assert report["decision"] == local["decision"] == "merged"
        assert [one["retrained"] for one in report["passes"]] == [retrained]
        assert objects(made.uri) == objects(str(other))
        assert made.read() == made.expected()
        assert run_job(made.uri, "verify", deep=True).exit_code == 0
        shutil.rmtree(other)
        made.put("n3", "new", "n4", deletes=("b", "n5"))


def test_a_stage_that_fails_leaves_the_namespace_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks have written clusters: they are removed, and the next run merges."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    run_job(made.uri, "merge", clusters=3)
    made.put("g", "h", deletes=("b",))
    segments = {path.name for path in Path(made.uri, "segments").iterdir()}
    run = TaskRunner.run

    def failing(self: TaskRunner, table: Any, stage: Any, tasks: Any, work: Any) -> Any:
        def last(task: Any, count: Any) -> Any:
            work(task, count)
            raise OSError("no memory is left")

        return run(self, table, stage, tasks, last)

    monkeypatch.setattr(TaskRunner, "run", failing)
    with pytest.raises(SparkJobFailedError, match="stage 'write'"):
        run_job(made.uri, "merge", engine="spark", retrain_imbalance_threshold=1000.0)
    assert {path.name for path in Path(made.uri, "segments").iterdir() if any(path.iterdir())} == segments
    assert made.read() == made.expected()
    monkeypatch.setattr(TaskRunner, "run", run)
    assert run_job(made.uri, "merge", engine="spark").decision == "merged"
    assert made.read() == made.expected()


def test_what_a_driver_leaves_that_ends_before_its_commit_is_an_orphan_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is published; gc names it, and another run merges."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "wiki")
    made.write()

    def unanswered(*_: Any, **__: Any) -> Namespace:
        raise StoreUnavailableError("no response")

    with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError):
        patch.setattr(merge, "retried", unanswered)
        run_job(made.uri, "merge", engine="spark", clusters=2)
    assert opened(made).manifest.segments == ()
    assert made.read() == made.expected()
    planned = run_job(made.uri, "gc").to_json()
    assert planned["counts"]["orphan_segment"]["held"] == 1, planned
    expire(made)
    assert run_job(made.uri, "merge", engine="spark", clusters=2).decision == "merged"
    assert made.read() == made.expected()
