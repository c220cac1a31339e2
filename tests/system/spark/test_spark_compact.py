"""Compaction on Spark: what the local engine does, with other writers, deaths and refusals in between."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.spark import session
from memwal_ops.errors import SparkUnavailableError, TableCorruptError
from memwal_ops.formats.lance.engines.spark.indexing import SparkExecutor
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.jobs import snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.options import CompactOptions, ExpireOptions, SnapshotOptions
from tests.integration.formats.lance.jobs.compact.compact_tables import check_kept, covered, make
from tests.support.tables import damage, indexed
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.plain import PlainTable
from tests.support.tables.unreferenced import unreferenced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from memwal_ops.formats.lance.table import Table
    from tests.support.tables.lsm_table import LsmTable

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("spark")]
SPARK = CompactOptions(100, engine="spark")
LOCAL = replace(SPARK, engine="local")


@pytest.fixture
def made(tmp_path: Path) -> PlainTable:
    """12 small fragments under all indexes, a fifth of whose rows is deleted."""
    table = PlainTable(str(tmp_path / "t.lance")).create(fragments=12, rows=40).create_indexes()
    table.delete(*range(0, 480, 5))
    return table


def as_it_is(uri: str) -> dict[str, Any]:
    """Rows in their order, their addresses or ids, the fragments, and what each index covers."""
    table = open_table(uri)
    rows = table.dataset.to_table(with_row_id=True)
    indexes = base_indexes(table)
    return {
        "rows": rows,
        "fragments": [(one.fragment_id, one.physical_rows, one.num_deletions) for one in table.dataset.get_fragments()],
        "covered": {name: coverage(one.covered, table.manifest).complete for name, one in indexes.items()},
    }


def without(report: compact.CompactReport) -> dict[str, object]:
    return {key: one for key, one in report.to_json().items() if key not in {"engine", "seconds", "run_id", "answers"}}


def at_commit(monkeypatch: pytest.MonkeyPatch, write: Callable[[], object]) -> None:
    """Let ``write`` run once, after all tasks and before the commit."""
    refuse = compact.refuse_gaps

    def late(table: Table) -> None:
        refuse(table)
        monkeypatch.setattr(compact, "refuse_gaps", refuse)
        write()

    monkeypatch.setattr(compact, "refuse_gaps", late)


@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_the_result_is_that_of_the_local_engine(tmp_path: Path, stable: bool) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"), stable=stable)
    for at in range(3):
        indexed.write(uri, at)
        catchup.apply(open_table(uri), catchup.CatchupOptions(max_segments=1))
    other = damage.copy_table(uri, str(tmp_path / "other.lance"))
    reports = run_job(uri, "compact", SPARK), run_job(other, "compact", LOCAL)
    assert (reports[0].decision, reports[0].to_json()["engine"]) == ("compacted", "spark")
    assert without(reports[0]) == without(reports[1])
    assert as_it_is(uri) == as_it_is(other)
    assert set(as_it_is(uri)["covered"].values()) == {True}
    indexed.check_queries(uri, indexed.expected(3))
    indexed.check_claims(open_table(uri))
    assert run_job(uri, "compact", SPARK).decision == "unchanged"


@pytest.mark.parametrize("kind", LAYOUTS)
def test_progress_and_snapshot_stay(tmp_path: Path, kind: type[LsmTable]) -> None:
    table = make(tmp_path, kind)
    snapshot.apply(open_table(table.uri), SnapshotOptions(0))
    before = open_table(table.uri)
    assert before.index.merged_generations
    report = run_job(table.uri, "compact", SPARK)
    after = open_table(table.uri)
    assert (report.decision, report.to_json()["snapshot_lost"]) == ("compacted", False)
    check_kept(before, after, table)
    assert (after.index.uuid, covered(after)) == (before.index.uuid, {"id_idx": True})


def test_writers_between_plan_and_commit(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    at_commit(monkeypatch, lambda: made.append(5))
    report = run_job(made.uri, "compact", SPARK)
    assert (report.decision, report.to_json()["commit_conflicts"]) == ("compacted", 0)
    assert made.read() == made.model
    made.delete(*range(1, 400, 5))
    at_commit(monkeypatch, lambda: made.update(2, text="beside"))
    again = run_job(made.uri, "compact", SPARK)
    assert (again.decision, again.to_json()["commit_conflicts"]) == ("compacted", 1)
    assert made.read() == made.model
    assert run_job(made.uri, "verify", deep=True).decision == "healthy"


def test_a_run_ends_at_its_budget_and_goes_on(made: PlainTable) -> None:
    first = run_job(made.uri, "compact", replace(SPARK, max_bytes=1))
    assert first.decision == "compacted"
    assert "the next run continues" in str(first.to_json()["why"])
    assert len(made.dataset.get_fragments()) > 6
    run_job(made.uri, "compact", SPARK)
    assert len(made.dataset.get_fragments()) < 6
    assert made.read() == made.model


def test_commits_are_bounded(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkExecutor, "rows_per_commit", 1)
    version = open_table(made.uri).version
    report = run_job(made.uri, "compact", SPARK)
    fragments = [
        [fragment.fragment_id for fragment in made.dataset.checkout_version(number).get_fragments()]
        for number in range(version, open_table(made.uri).version + 1)
    ]
    commits = sum(before != after for before, after in pairwise(fragments))
    assert commits == report.to_json()["fragments_added"] > 1
    assert made.read() == made.model


_KILLED = """
import os, sys
from memwal_ops import run_job
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.options import CompactOptions
compact.refuse_gaps = lambda table: os._exit(9)
run_job(sys.argv[1], "compact", CompactOptions(100, engine="spark", master="local[2]"))
"""


def test_killed_before_the_commit_and_run_again(made: PlainTable) -> None:
    version = open_table(made.uri).version
    done = subprocess.run([sys.executable, "-c", _KILLED, made.uri], check=False, capture_output=True)
    assert done.returncode == 9, done.stderr
    left = unreferenced(made.uri)
    assert left, "the premise: executors had written"
    assert open_table(made.uri).version == version
    assert made.read() == made.model
    assert run_job(made.uri, "compact", SPARK).decision == "compacted"
    assert unreferenced(made.uri) == left
    week_ago = time.time() - timedelta(days=8).total_seconds()
    for path in left:
        os.utime(f"{made.uri}/{path}", (week_ago, week_ago))
    run_job(made.uri, "expire", ExpireOptions(), apply=True)
    assert unreferenced(made.uri) == set()
    assert made.read() == made.model


def test_a_file_that_is_missing_is_named(made: PlainTable, capfd: pytest.CaptureFixture[str]) -> None:
    fragment = made.dataset.get_fragments()[3]
    name = f"data/{fragment.metadata.files[0].path}"
    os.remove(f"{made.uri}/{name}")
    before = made.dataset.version
    with pytest.raises(TableCorruptError, match=name):
        run_job(made.uri, "compact", SPARK)
    assert made.dataset.version == before


@pytest.mark.s3
def test_on_s3_executors_get_the_credentials(s3_bucket: str, s3_options: dict[str, str], tmp_path: Path) -> None:
    table = PlainTable(str(tmp_path / "t.lance")).create(fragments=4, rows=10)
    uri = f"s3://{s3_bucket}/t.lance"
    for fragment in table.dataset.get_fragments():
        lance.write_dataset(fragment.to_table(), uri, mode="append", storage_options=s3_options)
    report = run_job(open_table(uri, s3_options), "compact", SPARK)
    assert report.to_json()["fragments_after"] == 1
    rows = lance.dataset(uri, storage_options=s3_options).to_table(columns=["id"])
    assert rows["id"].to_pylist() == [*table.model]


def test_where_spark_cannot_run(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a dry run says so; nothing is rewritten here instead."""

    def missing(*_: Any) -> None:
        raise SparkUnavailableError("PySpark is not installed.")

    monkeypatch.setattr(session, "_check_java", missing)
    before = made.files()
    for apply in (False, True):
        with pytest.raises(SparkUnavailableError):
            run_job(made.uri, "compact", SPARK, apply=apply)
    assert made.files() == before


def test_a_session_of_ones_own_stays(made: PlainTable, spark: SparkSession) -> None:
    version = open_table(made.uri).version
    report = run_job(made.uri, "compact", SPARK).to_json()
    assert report["version"] == version + 2 + len(report["indexed_again"]), "one commit, and one for each such index"
    assert spark.range(3).count() == 3
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
