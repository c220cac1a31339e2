"""Large work goes to Spark from a service and from Airflow, by the same options as on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.airflow.work import run_job
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions, VerifyOptions
from tests.support.service import configure, service
from tests.support.spark import SETTINGS, skip_without_spark, submit_args
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(900)


def logged(uri: str) -> Workload:
    made = Workload(3, regions=2, base_rows=30).create(uri).step(4)
    made.close()
    return made


@pytest.mark.campaign
def test_of_a_service(tmp_path: Path) -> None:
    """A worker process starts a session for its run."""
    skip_without_spark()
    made = logged(str(tmp_path / "tables" / "t.lance"))
    options = "{engine: auto, spark_above: 1B, master: 'local[1]'}"
    config = configure(tmp_path, f"merge: {{schedule: {{every: 1d}}, options: {options}}}")
    with service(config, {"PYSPARK_SUBMIT_ARGS": submit_args(SETTINGS)}) as running:
        [run] = until(lambda: [one for one in running.runs(job="merge") if one["outcome"] != "running"])
    assert (run["outcome"], run["report"]["decision"], run["report"]["engine"]) == ("succeeded", "merged", "spark")
    assert "is above 1" in run["report"]["engine_reason"]
    assert_same(read_base(made.uri), made.model.expected(), seed=made.seed)


@pytest.mark.usefixtures("spark")
def test_of_airflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its operators call."""

    def run(job: str, uri: str, **options: Any) -> dict[str, Any]:
        outcome = run_job(job, uri, {"engine": "auto", **options}, apply=None, storage={})
        assert outcome.failure is None
        assert outcome.document is not None
        return dict(outcome.document)

    merged = logged(str(tmp_path / "m.lance"))
    report = run("merge", merged.uri, spark_above="1B")
    assert (report["decision"], report["engine"]) == ("merged", "spark")
    assert_same(read_base(merged.uri), merged.model.expected(), seed=merged.seed)
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=2, rows=20)
    made.dataset.create_scalar_index("id", "BTREE")
    made.append(200)
    assert run("verify", made.uri, deep=True)["engine"] == "local"
    for kind in (CatchupOptions, CompactOptions, VerifyOptions):
        monkeypatch.setattr(kind, "spark_above", 1)
    assert [one["engine"] for one in run("catchup", made.uri)["indexes"]] == ["spark"]
    assert run("compact", made.uri)["engine"] == "spark"
    assert run("verify", made.uri, deep=True)["engine"] == "spark"
    assert made.read() == made.model
