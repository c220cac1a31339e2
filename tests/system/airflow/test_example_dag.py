"""configs/airflow/memwal_maintenance.py, run by a real Airflow on tables that pylance's own writer made."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("airflow.sdk", reason="needs Airflow, which has an environment of its own: make test-airflow")

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs.demo.table import base_rows, make_table
from tests.system.airflow.runs import load_dag, run_dag

EXAMPLE = Path(__file__).parents[3] / "configs/airflow/memwal_maintenance.py"


def test_two_tables_from_backlog_to_report(dags: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make_table(str(tmp_path / name), seed=seed) for seed, name in enumerate(("a", "b"))]
    monkeypatch.setenv("MEMWAL_TABLES", " ".join(one.uri for one in made))
    monkeypatch.setenv("MEMWAL_WHEN", "generations >= 12")
    state, tasks = run_dag(load_dag(dags, EXAMPLE))
    assert state == "success"
    for at, one in enumerate(made):
        decisions = {
            name: tasks[f"maintain.{name}", at].xcom["decision"] for name in ("merge", "catchup", "snapshot", "gc")
        }
        assert decisions["merge"] == "merged"
        assert decisions["catchup"] == "caught_up"
        assert decisions["snapshot"] == "built"
        assert decisions["gc"] in {"planned", "nothing_to_delete"}
        assert tasks["maintain.backlog", at].xcom["generations"] == 12
        assert tasks["maintain.merge", at].xcom["backlog_after"]["generations"] == 0
        assert base_rows(open_table(one.uri)) == one.expected
    reports = [tasks["maintain.merge", at].xcom for at in range(2)]
    rows = sum(one["rows_read"] for report in reports for one in report["passes"])
    assert tasks["account", -1].xcom == {"passes": sum(len(report["passes"]) for report in reports), "rows": rows}
    assert rows > 0
