"""A program that writes runs a job inside its own process, as a library: docs/api.md."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import lance
import pytest

from tests.support.tables.workload import Workload, assert_same, read_base, read_lsm

if TYPE_CHECKING:
    from pathlib import Path

# What its process has after lance itself is not counted.
WRITER = """
import json, logging, os, signal, sys, threading
import lance

def state():
    handlers = {one.name: str(signal.getsignal(one)) for one in signal.Signals}
    loggers = [str(one) for one in logging.getLogger().handlers]
    return {"signals": handlers, "environment": dict(os.environ), "loggers": loggers, "excepthook": str(sys.excepthook)}

modules, before = {*sys.modules}, state()
import memwal_ops

reports, errors = [], []

def merge(uri):
    try:
        reports.append(memwal_ops.run_job(uri, "merge").to_json())
    except memwal_ops.MemwalOpsError as error:
        errors.append(error.reason)

threads = [threading.Thread(target=merge, args=(uri,)) for uri in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = {"modules": sorted({*sys.modules} - modules), "before": before, "after": state()}
found["threads"] = threading.active_count()
json.dump({**found, "decisions": [one["decision"] for one in reports], "errors": errors}, sys.stderr)
"""
# What the run of a merge does not use: some take longer to load than all of its own.
NEEDLESS = {
    "apscheduler", "asyncio", "attr", "boto3", "botocore", "click", "numba", "prometheus_client", "pygal", "pygments",
    "jsonschema", "lance_namespace", "msgpack", "pandas", "pydantic", "pyspark", "rich.console", "sqlglot", "structlog",
    "yaml",
    "memwal_ops.airflow", "memwal_ops.cli", "memwal_ops.pages", "memwal_ops.spark", "memwal_ops.supervisor",
    "memwal_ops.formats.zeppelin.specs", "memwal_ops.formats.lm_diskann.specs",
    "memwal_ops.core.spark", "memwal_ops.formats.lance.answers", "memwal_ops.formats.lance.indexes.codebook",
    "memwal_ops.formats.lance.indexes.snapshots", "memwal_ops.formats.lance.legacy", "memwal_ops.storage.catalogs",
    *(f"memwal_ops.core.{name}" for name in (
        "answers", "candidates", "collector", "erasure", "maintain", "outlook", "quarantine", "repair",
        "table_history", "verification",
    )),
}  # fmt: skip


def written(path: Path, seed: int) -> Workload:
    """A table with generations that wait."""
    made = Workload(seed, regions=2, base_rows=40).create(str(path)).step(8)
    made.close()
    return made


def run(*uris: str) -> dict[str, Any]:
    """Merge each in a thread of its own, in a process that imported lance alone."""
    done = subprocess.run([sys.executable, "-c", WRITER, *uris], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    found: dict[str, Any] = json.loads(done.stderr)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two threads on two tables left in the process."""
    tables = [written(tmp_path_factory.mktemp("inside") / f"{seed}.lance", seed) for seed in (1, 2)]
    expected = [read_lsm(made.uri) for made in tables]
    outcome = run(*(made.uri for made in tables))
    for made, rows in zip(tables, expected, strict=True):
        assert_same(read_base(made.uri), rows)
    return outcome


def test_two_threads_on_two_tables(found: dict[str, Any]) -> None:
    assert (found["decisions"], found["errors"]) == (["merged", "merged"], [])


def test_what_is_imported(found: dict[str, Any]) -> None:
    imported = {*found["modules"]}
    assert {one for one in NEEDLESS if any(name == one or name.startswith(f"{one}.") for name in imported)} == set()
    assert "memwal_ops.formats.lance.jobs.merge" in imported


def test_the_process_stays_as_it_was(found: dict[str, Any]) -> None:
    """No signal handler, variable of the environment, log handler or thread is left; stdout has nothing."""
    assert found["after"] == found["before"]
    assert found["threads"] == 1


def test_two_threads_on_one_table(tmp_path: Path) -> None:
    """Each row is merged once: the second thread finds nothing to do, or reports that the first was faster."""
    made = written(tmp_path / "t.lance", 3)
    expected = read_lsm(made.uri)
    outcome = run(made.uri, made.uri)
    assert outcome["errors"] == []
    assert "merged" in outcome["decisions"]
    assert {*outcome["decisions"]} <= {"merged", "nothing_to_merge", "superseded"}
    assert_same(read_base(made.uri), expected)
    assert lance.dataset(made.uri).count_rows() == len(expected)
