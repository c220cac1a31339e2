"""The drill of an error of Spark itself, on the session that all tests of a process share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memwal_ops.formats.lance.engines.spark import engine
from tests.campaigns.crash.spark_driver import faulty
from tests.support.run_cli import contents
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.system.drills.drill import Drill


def test_46_spark_job_failed(
    spark: SparkSession, drill: Drill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt of a writing task fails after it has written its files."""
    table = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    table.put([1, 2, 50])
    table.flush()
    drill.given(URI=table.uri)
    real = engine.group_writer
    monkeypatch.setattr(engine, "group_writer", faulty(real, "stage-fails", table.uri))
    before = contents(table.uri)
    drill.told(drill.run('memwal-ops merge "$URI" --engine spark --json'))
    after = contents(table.uri)
    assert before.items() <= after.items()
    assert {path.split("/")[0] for path in after.keys() - before.keys()} == {"data"}, "in no version"
    drill.follow(2)
    assert read_base(table.uri) == table.expected({})
    monkeypatch.setattr(engine, "group_writer", real)
    drill.rest()
    assert_same(read_base(table.uri), table.expected())
