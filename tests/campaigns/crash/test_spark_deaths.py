"""A merge from the command line whose Spark loses its JVM, or every Python worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge as merge_job
from tests.campaigns.crash.spark_events import files_left
from tests.support.spark import SETTINGS, skip_without_spark, submit_args
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.unreferenced import unreferenced
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(1800)
PATIENCE = 1500.0


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    skip_without_spark()
    made = Workload(5, regions=2, base_rows=100).create(str(tmp_path / "t.lance")).step(6)
    made.close()
    return made


def merge(table: Workload, who: str, where: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.campaigns.crash.spark_deaths", who, where, "merge", table.uri, "--json"]
    environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": submit_args(SETTINGS)}
    return subprocess.run(
        [*command, "--engine", "spark", "--master", "local[2]"],
        capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("jvm", "check"),
        ("jvm", "delete"),
        ("jvm", "write"),
        ("jvm", "shuffle-keys"),
        ("jvm", "shuffle-delete"),
        ("jvm", "shuffle-write"),
        ("worker", "check"),
        ("worker", "write"),
        ("worker", "shuffle-write"),
    ],
)
def test_a_spark_that_dies_has_failed_and_nothing_is_published(table: Workload, who: str, where: str) -> None:
    version = lance.dataset(table.uri).version
    done = merge(table, who, where)
    assert done.returncode == 46, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["reason"] == "spark_job_failed"
    assert ("JVM of the driver ended" if who == "jvm" else "Python worker exited unexpectedly") in error["message"]
    assert "\tat " not in error["message"]
    assert "bug in memwal-ops" not in done.stderr
    assert lance.dataset(table.uri).version == version
    named = " ".join(str(one["files"]) for one in files_left(done.stderr))
    left = unreferenced(table.uri)
    assert bool(left) is where.endswith(("delete", "write")), "the premise: its tasks write files"
    assert {path for path in left if path not in named} == set()
    assert merge_job.apply(open_table(table.uri), merge_job.MergeOptions()).decision == "merged"
    assert_same(read_base(table.uri), table.model.expected(), seed=table.seed)


def test_a_pass_is_committed_without_the_jvm_if_only_the_commit_is_left(table: Workload) -> None:
    done = merge(table, "jvm", "commit")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decision"] == "merged"
    assert_same(read_base(table.uri), table.model.expected(), seed=table.seed)
    assert unreferenced(table.uri) == set()
