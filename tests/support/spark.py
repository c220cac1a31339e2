"""One Spark session per test process, and the engines on which the same tests run.

A plugin: gives the fixtures ``spark`` and ``engine``. Both skip, and say why, where Spark cannot run.
"""

from __future__ import annotations

import shlex
import warnings
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine

# For a JVM that lives for minutes: what the second compiler and parallel collection cost never comes back.
CHEAP_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "Pacific/Kiritimati",  # no key may depend on it
    "spark.driver.extraJavaOptions": CHEAP_JAVA,
}


def submit_args(settings: Mapping[str, str]) -> str:
    """The value of PYSPARK_SUBMIT_ARGS for a session with these settings."""
    words = (word for key, value in settings.items() for word in ("--conf", f"{key}={value}"))
    return f"{shlex.join(words)} pyspark-shell"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep all tests of the one session in one process, as Java costs 15 processor seconds to start.

    By the names of tests: the marks that pytest-xdist 3.8 has for this do nothing under pytest 9.2.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Grouped(config, log)


def group_of(nodeid: str) -> str:
    """What has to run in one process; a test of no group is one of its own."""
    if "test_spark_crashes.py" in nodeid:
        return "spark cluster"
    if "tests/system/releases/" in nodeid:  # another release of pylance is installed once
        return "releases"
    names = ("tests/system/spark/", "/test_spark_", "[spark")
    return "spark" if any(name in nodeid for name in names) else nodeid


def skip_without_spark() -> None:
    """Skip the test where PySpark, pandas or Java is missing."""
    from memwal_ops.core.spark.session import why_not

    missing = why_not()
    if missing is not None:
        pytest.skip(f"Spark cannot run here: {missing}")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores of this machine."""
    from memwal_ops.core.spark.session import session

    skip_without_spark()
    with pytest.MonkeyPatch.context() as patch:
        warehouse = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
        patch.setenv("PYSPARK_SUBMIT_ARGS", submit_args(SETTINGS | warehouse))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PySpark's own, while it starts
            with session("local[2]") as made:
                yield made


@pytest.fixture(params=["local", "copies", "spark", "spark-shuffle"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MergeEngine | None:
    """Each engine in turn; None is the default of a merge, the local one. ``copies``: as of a table in a bucket."""
    from memwal_ops.formats.lance.engines.merge.passes import LocalMergeEngine
    from memwal_ops.formats.lance.engines.spark.engine import SparkMergeEngine
    from memwal_ops.formats.lance.generations import generation as generation_copies

    if request.param == "local":
        return None
    if request.param == "copies":
        monkeypatch.setattr(generation_copies, "LOCAL", frozenset())
        return LocalMergeEngine()
    # Few rows to a task, so that every stage of these small tables has several.
    spark = request.getfixturevalue("spark")
    if request.param == "spark":
        return SparkMergeEngine(spark, rows_per_task=200)
    return SparkMergeEngine(spark, rows_per_task=200, driver_key_bytes=0)
