"""Where a merge assigns rows and writes clusters, and what its tasks do, which need no Spark."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memwal_ops import run_job
from memwal_ops.core.options import OptionError
from memwal_ops.core.spark import session
from memwal_ops.formats.zeppelin.segments import SegmentReader, SegmentWriter, Written
from memwal_ops.formats.zeppelin.spark import SparkClusters
from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions
from tests.support.zeppelin.merging import opened

if TYPE_CHECKING:
    from tests.support.zeppelin.namespace import NamespaceUnderTest


def test_auto_is_local_below_the_threshold_and_where_spark_cannot_run(
    made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "check_environment", lambda: pytest.fail("is not asked for"))
    report = run_job(made.uri, "merge")
    size = 4 * 4 * sum(one.vectors for one in opened(made).manifest.segments)
    assert report.to_json()["engine"] == "local"
    assert "is not above 17,179,869,184" in report.to_json()["engine_reason"]
    made.put("more")
    monkeypatch.setattr(session, "why_not", lambda: "PySpark is not installed")
    monkeypatch.setattr(ZeppelinMergeOptions, "spark_above", size)
    report = run_job(made.uri, "merge")
    assert report.to_json()["engine"] == "local"
    assert "Spark cannot run here: PySpark is not installed" in " ".join(report.describe().split())
    assert made.read() == made.expected()


def test_a_master_is_for_spark_only() -> None:
    with pytest.raises(OptionError, match="applies to Spark only"):
        ZeppelinMergeOptions(engine="local", master="yarn")


def test_a_second_attempt_of_a_task_finds_what_the_first_wrote(made: NamespaceUnderTest) -> None:
    """The first was killed behind some of its objects: the second writes the rest, and returns the same."""
    run_job(made.uri, "merge", clusters=3)
    table = opened(made)
    (segment,) = table.manifest.segments
    reader = SegmentReader(table.store, segment)
    new = SegmentWriter(table.store, opened(made).manifest.segments[0], reader.centroids())
    shared = SparkClusters.of(table, segment, frozenset({"b"}), new, "cosine")
    assert shared.table.store is None
    sent: Any = pickle.loads(pickle.dumps(shared))
    target = {**vars(sent.new), "id": "seg-new", "prefix": "segments/seg-new/"}
    sent = type(sent)(**{**vars(sent), "new": type(sent.new)(**target)})
    part = sent._batches(reader, 0, {})[1:]
    folder = Path(made.uri, "segments/seg-new")
    first: Written = sent._write(part, lambda *_: None)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (
        {*kept}
        == {*first[1]}
        == {f"{kind}_{at}.{end}" for at in (1, 2) for kind, end in (("cluster", "bin"), ("attrs", "bin"))}
    )
    (folder / "attrs_2.bin").unlink()
    assert sent._write(part, lambda *_: None) == first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
    shutil.rmtree(folder)
    assert np.array_equal(reader.centroids(), new.centroids)
