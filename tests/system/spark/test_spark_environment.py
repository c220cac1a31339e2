"""Where Spark cannot run, a sentence says what is missing; ``auto`` says why it chose."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from memwal_ops import open_table
from memwal_ops.core.options import EngineChoice, choose_engine
from memwal_ops.core.spark import session, session as spark_session
from memwal_ops.core.spark.stages import TaskFaultError, raised_again, reported
from memwal_ops.errors import ObjectNotFoundError, SparkJobFailedError, SparkUnavailableError
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions
from memwal_ops.spark import register
from memwal_ops.storage.options import remember
from tests.support.run_cli import run_here
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def uri(tmp_path: Path) -> str:
    table = Workload(3, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).step(4)
    table.close()
    return table.uri


def java_that_says(path: Path, text: str) -> str:
    """A JAVA_HOME whose java prints ``text`` where java prints its version."""
    program = path / "home" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    program.chmod(0o755)
    return str(program.parent.parent)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let the packages look as if they were installed in these versions (None: not at all)."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        if versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(versions[name])

    monkeypatch.setattr(importlib.metadata, "version", version)


GOOD = {"pyspark": "4.1.4", "pandas": "2.3.3"}


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"pyspark": None}, "PySpark is not installed"),
        ({"pyspark": "3.5.1"}, "PySpark is 3.5.1"),
        ({"pyspark": "5.0.0"}, "PySpark is 5.0.0"),
        ({"pandas": None}, "pandas is not installed"),
        ({"pandas": "2.1.4"}, "pandas is 2.1.4"),
    ],
)
def test_packages(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], says: str) -> None:
    installed(monkeypatch, **{**GOOD, **versions})
    with pytest.raises(SparkUnavailableError, match=says):
        session.check_environment()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11"),
        ('java version "1.8.0_392"', "is Java 8"),
        ("nothing of the kind", "prints no version"),
    ],
)
def test_old_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, says: str) -> None:
    installed(monkeypatch, **GOOD)
    monkeypatch.setenv("JAVA_HOME", java_that_says(tmp_path, said))
    with pytest.raises(SparkUnavailableError, match=says):
        session.check_environment()


def test_new_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, **GOOD)
    monkeypatch.setenv("JAVA_HOME", java_that_says(tmp_path, 'openjdk version "21.0.1" 2023-10-17'))
    assert session.why_not() is None


def test_a_dry_run_prints_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, **GOOD)
    home = java_that_says(tmp_path, 'openjdk version "21.0.1" 2023-10-17')
    monkeypatch.setenv("JAVA_HOME", home)
    found = f"found PySpark 4.1.4, pandas 2.3.3, Java 21 ({home}/bin/java)"
    outcome = run_here(capfd, "merge", uri, "--engine", "spark", "--dry-run", "--json")
    assert (outcome.code, outcome.document["decision"]) == (0, "dry_run")
    assert outcome.document["engine_reason"] == f"requested; {found}"
    shown = run_here(capfd, "merge", uri, "--engine", "auto", "--spark-above", "1B", "--dry-run").out
    assert "found PySpark 4.1.4" in " ".join(shown.split())
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    outcome = run_here(capfd, "merge", uri, "--engine", "spark", "--dry-run", "--json")
    assert outcome.code == 45
    assert "JAVA_HOME" in outcome.document["error"]["message"]


def test_a_dry_run_shows_what_a_budget_leaves_on_either_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, **GOOD)
    monkeypatch.setenv("JAVA_HOME", java_that_says(tmp_path, 'openjdk version "21.0.1" 2023-10-17'))
    made = PlainTable(str(tmp_path / "plain.lance")).create(fragments=4, rows=50)
    for column, kind in (("id", "BTREE"), ("text", "INVERTED")):
        made.dataset.create_scalar_index(column, kind, name=column)
    made.append(300)
    for engine in ("local", "spark"):
        planned = ["--engine", engine, "--max-bytes", "1B", "--dry-run", "--json"]
        indexes = run_here(capfd, "catchup", made.uri, *planned).document["indexes"]
        assert [(one["decision"], one["engine"]) for one in indexes] == [
            ("would_update", engine),
            ("over_budget", None),
        ]
        due = run_here(capfd, "compact", made.uri, *planned, "--target-rows", "100", "--tier-factor", "1").document
        assert due["engine"] == engine
        assert "Nothing that is due fits --max-bytes" in due["why"]


def test_the_command_without_java(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, **GOOD)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    outcome = run_here(capfd, "merge", uri, "--engine", "spark", "--json")
    assert outcome.code == 45
    assert outcome.document["error"]["reason"] == "spark_unavailable"
    assert "JAVA_HOME" in outcome.document["error"]["message"]
    fallen_back = run_here(capfd, "merge", uri, "--engine", "auto", "--spark-above", "1B", "--dry-run").out
    assert re.search(r"Engine: local \(a backlog of .* Spark cannot run here:\s.*JAVA_HOME", fallen_back, re.DOTALL)
    assert "Engine" not in run_here(capfd, "merge", uri, "--engine", "auto").out


def test_auto_reports_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str) -> None:
    backlog = read_backlog(open_table(uri))
    size = backlog.to_json()["bytes"]
    assert size > 0
    installed(monkeypatch, **GOOD)
    monkeypatch.setenv("JAVA_HOME", java_that_says(tmp_path, 'openjdk version "17.0.1"'))
    small = choose_engine(merge.MergeOptions(spark_above=size), "a backlog", size)
    assert small == EngineChoice("local", f"a backlog of {size:,} bytes is not above {size:,}")
    large = choose_engine(merge.MergeOptions(spark_above=size - 1), "a backlog", size)
    assert large == EngineChoice("spark", f"a backlog of {size:,} bytes is above {size - 1:,}")
    gib = 1 << 30
    assert choose_engine(CatchupOptions(engine="auto"), "data to index", 32 * gib).name == "local"
    assert choose_engine(CatchupOptions(engine="auto"), "data to index", 32 * gib + 1).name == "spark"
    assert choose_engine(CompactOptions(engine="auto"), "data to rewrite", 32 * gib + 1).name == "local"
    installed(monkeypatch, **{**GOOD, "pyspark": None})
    without = choose_engine(merge.MergeOptions(spark_above=size - 1), "a backlog", size)
    assert without.name == "local"
    assert without.reason.endswith("Spark cannot run here: PySpark is not installed.")
    report = merge.apply(open_table(uri), merge.MergeOptions(spark_above=size - 1))
    assert (report.decision, report.engine, report.engine_reason) == ("merged", "local", without.reason)


def test_java_that_starts_and_a_spark_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that does not answer: what Java raises is no error of PySpark's."""
    pyspark = pytest.importorskip("pyspark.sql")
    from py4j.protocol import Py4JError

    def unanswered(_: Any) -> None:
        raise Py4JError("An error occurred.\n: java.lang.IllegalStateException: Stopped.\n\tat a.b(c)")

    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    monkeypatch.setattr(pyspark.SparkSession.Builder, "getOrCreate", unanswered)
    says = r"^Spark does not start with master spark://nowhere:1: java\.lang\.IllegalStateException: Stopped\.$"
    with pytest.raises(SparkUnavailableError, match=says) as raised:
        spark_session._make("spark://nowhere:1", "memwal-ops merge")
    assert "See Spark's own lines above" in raised.value.remedy


class Gone:
    """A session whose context cannot be asked: stopped by Python, or one of Spark Connect."""

    @property
    def sparkContext(self) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'sc'")


class StoppedByJava:
    """A session whose application ended without Python: its context still answers."""

    def __init__(self, *, stopped: bool) -> None:
        scala = SimpleNamespace(isStopped=lambda: stopped)
        java = SimpleNamespace(sc=lambda: scala)
        self.sparkContext = self._sc = SimpleNamespace(_jsc=java, applicationId="app-1", pythonExec="python3")


def test_a_session_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_session, "_checked", {("app-1", "python3")})
    spark_session.check_executors(cast("Any", StoppedByJava(stopped=False)))
    for gone in (Gone(), StoppedByJava(stopped=True)):
        with pytest.raises(SparkUnavailableError, match="session is stopped"):
            spark_session.check_executors(cast("Any", gone))
    for passes in (StoppedByJava(stopped=False), Gone()):  # Spark Connect has sources, too
        spark_session.refuse_stopped(cast("Any", passes))
    with pytest.raises(SparkUnavailableError, match="session is stopped"):
        register(cast("Any", StoppedByJava(stopped=True)))


@pytest.mark.parametrize(
    ("master", "chosen", "runs"),
    [("local[2]", None, sys.executable), ("local[2]", "python3", "python3"), ("yarn", None, "python3")],
)
def test_the_interpreter_of_workers(
    monkeypatch: pytest.MonkeyPatch, master: str, chosen: str | None, runs: str
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", chosen)
    session: Any = StoppedByJava(stopped=False)
    session.sparkContext.master = master
    with spark_session.drivers_python(session) as is_driver:
        assert is_driver
        assert session.sparkContext.pythonExec == runs
    assert session.sparkContext.pythonExec == "python3"
    with spark_session.drivers_python(cast("Any", Gone())) as is_driver:
        assert not is_driver


def test_an_error_of_a_task_is_the_same_error_on_the_driver() -> None:
    with pytest.raises(TaskFaultError) as raised, reported():
        raise ObjectNotFoundError("data/x is not there", remedy="Look again.")
    with pytest.raises(ObjectNotFoundError, match="data/x is not there") as again, raised_again("keys"):
        raise RuntimeError(f"Job aborted due to stage failure: {raised.value} at org.apache.spark")
    assert again.value.remedy == "Look again."


def test_an_error_that_is_none_of_ours_names_the_stage() -> None:
    with pytest.raises(SparkJobFailedError, match="'write': Job aborted"), raised_again("write"):
        raise RuntimeError("Job aborted: executor lost")


def test_no_error_of_a_task_carries_a_secret() -> None:
    secret = "wJalrXUtnFEMI/K7MDENG"
    remember([secret])
    for error in (ObjectNotFoundError(f"said {secret}"), ValueError(f"said {secret}")):
        with pytest.raises(TaskFaultError) as raised, reported():
            raise error
        assert secret not in json.dumps(str(raised.value))
        assert raised.value.__suppress_context__
