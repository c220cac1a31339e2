"""Verification on Spark: the findings and figures of the local engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lance.indices import IndexConfig

from memwal_ops import open_table, run_job
from memwal_ops.core.context import RunContext
from memwal_ops.core.options import OptionError
from memwal_ops.errors import SparkJobFailedError
from memwal_ops.formats.lance.answers.asked_index import RowReader
from memwal_ops.formats.lance.answers.reading_on_spark import SparkReader
from memwal_ops.formats.lance.engines.spark.running import LoggingTaskRunner
from memwal_ops.formats.lance.options import VerifyOptions
from tests.support.tables.answering import DIMENSION, rebuilt_elsewhere, vectors

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("spark")]
KEY = {"lance-schema:unenforced-primary-key": "true"}


def both(uri: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a verification reports here and on Spark, without the rows that are examples."""
    reports = [
        run_job(uri, "verify", VerifyOptions(engine=engine, **options)).to_json() for engine in ("local", "spark")
    ]
    for report in reports:
        for one in (*report["findings"], *(found for answers in report["answers"] for found in answers["findings"])):
            one["evidence"] = one["evidence"].partition("for example")[0]
        for answers in report["answers"]:
            del answers["examples_missing"], answers["examples_extra"]
    return reports[0], reports[1]


def without_engine(report: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in report.items() if key not in {"engine", "engine_reason", "stages"}}


def test_answers_of_scalar_indexes(tmp_path: Path) -> None:
    """Of conditions, words and similar texts; one index has lost a value."""
    uri = str(tmp_path / "t.lance")
    rows = pa.table(
        {
            "n": range(2_000),
            "kind": [f"kind{n % 50}" for n in range(2_000)],
            "text": [f"a{n % 9} b{n}" for n in range(2_000)],
        }
    )
    dataset = lance.write_dataset(rows, uri, max_rows_per_file=500)
    for column, kind in (("n", "BTREE"), ("text", "INVERTED"), ("text", IndexConfig("minhashlsh", {}))):
        dataset.create_scalar_index(column, kind, name=f"{column}{kind if isinstance(kind, str) else 'LIKE'}")

    def without(table: pa.Table) -> pa.Table:
        return table.set_column(1, "kind", pc.if_else(pc.equal(table["kind"], "kind7"), None, table["kind"]))

    rebuilt_elsewhere(uri, str(tmp_path / "aside"), "b", "kind", "BITMAP", without)
    here, spark = both(uri, answers=True, seed=7)
    assert without_engine(spark) == without_engine(here)
    assert (here["engine"], spark["engine"], spark["engine_reason"]) == ("local", "spark", "requested")
    assert [one["check"] for one in spark["findings"]] == ["index_misses_rows", "index_returns_dead_rows"]
    assert {one["index"]: one["rows_compared"] for one in spark["answers"]} == dict.fromkeys(
        ("nBTREE", "textINVERTED", "textLIKE", "b"), 2_000
    )
    assert spark["stages"]["ask"]["tasks"] == 2 * len(spark["answers"])


def test_answers_of_vector_indexes(tmp_path: Path) -> None:
    """Of a healthy one, and of one whose rows hide each other."""
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(3)
    centers = 3 * random.normal(size=(30, DIMENSION))

    def rows(count: int) -> pa.Table:
        return pa.table({name: vectors(random, count, centers=centers) for name in ("near", "dot")})

    dataset = lance.write_dataset(rows(4_000), uri, max_rows_per_file=1000)
    dataset.create_index("near", "IVF_FLAT", name="near", num_partitions=8)
    dataset.create_index("dot", "IVF_PQ", name="dot", metric="dot", num_partitions=8, num_sub_vectors=8)
    dataset.insert(rows(400))
    dataset.optimize.optimize_indices()
    here, spark = both(uri, answers_only=True, seed=7)
    assert without_engine(spark) == without_engine(here)
    assert [one["check"] for one in spark["findings"]] == ["index_recall_low"]
    assert all(one["recall"] is not None and one["rows_compared"] == 4_400 for one in spark["answers"])


KEYS = {
    "int64": pa.array([1, 2, 2, 3, 3, 3]),
    "uint64": pa.array([1, 2**63, 2**63, 3, 3, 3], pa.uint64()),
    "string": pa.array(["a", "b", "b", "c", "c", "c"]),
    "null": pa.array([1, None, None, 3, 3, 3]),
    "float": pa.array([1.0, float("nan"), float("nan"), 3, 3, 3]),
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_that_are_there_twice(tmp_path: Path, kind: str) -> None:
    """Read by several tasks; a key of two columns is one of both."""
    uri = str(tmp_path / "t.lance")
    table = pa.table({"id": KEYS[kind], "part": ["x", "y", "z", "x", "x", "z"]})
    lance.write_dataset(table, uri, max_rows_per_file=1)
    opened = open_table(uri)
    with LoggingTaskRunner(None, RunContext(), "test") as runner:
        on_spark = SparkReader(opened, runner, lambda: None)
        for columns, expected in ((["id"], (2, 5)), (["id", "part"], (1, 2))):
            found = on_spark.repeated_keys(opened, columns)
            assert found == RowReader().repeated_keys(opened, columns)
            assert (found.values, found.rows, found.marked) == (*expected, 2 if kind == "null" else 0)
        assert on_spark.stages["keys"]["tasks"] > 4


def test_rows_of_a_deep_verification(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("n", pa.int64())])
    for first in (0, 50, 90):
        rows = pa.table({"id": range(first, first + 50), "n": range(50)}, schema=schema)
        lance.write_dataset(rows, uri, mode="append" if first else "create", enable_stable_row_ids=True)
    here, spark = both(uri, deep=True)
    assert without_engine(spark) == without_engine(here)
    assert [(one["check"], one["evidence"]) for one in spark["findings"]] == [
        ("duplicate_keys", "10 keys are in it more than once (20 rows).")
    ]
    assert {"keys", "row ids"} <= spark["stages"].keys()


def test_a_failure_of_spark_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"n": range(100)}), uri).create_scalar_index("n", "BTREE")

    def fails(*_: Any) -> None:
        raise SparkJobFailedError("It failed.")

    monkeypatch.setattr(LoggingTaskRunner, "run", fails)
    with pytest.raises(SparkJobFailedError):
        run_job(uri, "verify", VerifyOptions(engine="spark", answers=True))


def test_auto_is_by_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"n": range(100)}), uri).create_scalar_index("n", "BTREE")
    size = sum(one.stat().st_size for one in (tmp_path / "t.lance" / "data").iterdir())
    report = run_job(uri, "verify", VerifyOptions(engine="auto", deep=True))
    assert report.to_json()["engine"] == "local"
    monkeypatch.setattr(VerifyOptions, "spark_above", size - 1)
    report = run_job(uri, "verify", VerifyOptions(engine="auto", deep=True))
    assert report.to_json()["engine"] == "spark"
    assert f"data to check of {size:,} bytes is above" in report.describe().replace("\n  ", " ")
    monkeypatch.setattr(VerifyOptions, "spark_above", size)
    assert run_job(uri, "verify", VerifyOptions(engine="auto", deep=True)).to_json()["engine"] == "local"
    assert run_job(uri, "verify", VerifyOptions(engine="auto")).to_json()["engine"] is None, "no rows are read"
    with pytest.raises(OptionError, match="without"):
        VerifyOptions(engine="spark")
