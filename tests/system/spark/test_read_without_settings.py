"""Every function that takes a session, in a program that sets nothing for Python workers, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spark import CHEAP_JAVA, skip_without_spark, submit_args
from tests.support.tables import damage
from tests.support.tables.workload import Workload

pytestmark = pytest.mark.timeout(1800)
PATIENCE = 1500.0
PROGRAM = """
import sys
from pyspark.sql import SparkSession
from memwal_ops import run_job
from memwal_ops.errors import SparkUnavailableError
from memwal_ops.spark import bulk_load, bulk_merge, register
spark = SparkSession.builder.master("local[1]").getOrCreate()
uri, copy = sys.argv[1], sys.argv[3]
try:
    print(run_job(copy, "merge", engine="spark").decision, bulk_merge(spark, uri, max_generations=1).decision)
    register(spark)
    rows = spark.read.format("memwal").load(uri)
    print("loaded", bulk_load(rows.where("id < 0"), uri) > 0, "rows", rows.count())
except SparkUnavailableError as error:
    print("refused", error.reason, error.remedy)
assert spark.sparkContext.pythonExec == sys.argv[2], spark.sparkContext.pythonExec
spark.stop()
"""


def run(uri: str, other_python: Path, **environment: str) -> str:
    """Run the program where the first python3 of the PATH has no packages."""
    skip_without_spark()
    other_python.parent.mkdir()
    other_python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    other_python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    settings = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": CHEAP_JAVA}
    kept |= {"PATH": f"{other_python.parent}:{kept['PATH']}", "PYSPARK_SUBMIT_ARGS": submit_args(settings)}
    copied = damage.copy_table(uri, str(other_python.parent / "copy.lance"))
    command = [sys.executable, "-c", PROGRAM, uri, environment.get("PYSPARK_PYTHON", "python3"), copied]
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(4, regions=1, base_rows=30).create(str(tmp_path / "t.lance")).step(6)
    made.close()
    return made


def test_workers_run_the_drivers_interpreter(table: Workload, tmp_path: Path) -> None:
    """Later Python functions of the session still run where PySpark would run them."""
    assert f"merged merged\nloaded True rows {len(table.expected())}" in run(table.uri, tmp_path / "bin/python3")


def test_a_chosen_interpreter_without_our_packages_is_refused(table: Workload, tmp_path: Path) -> None:
    said = run(table.uri, tmp_path / "bin/python3", PYSPARK_PYTHON="python3")
    assert "refused spark_unavailable Executors need the driver's memwal-ops" in said
