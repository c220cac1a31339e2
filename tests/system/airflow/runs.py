"""Run a DAG file in this process as Airflow runs it, and read back what Airflow then knows of its tasks."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ONE_TASK = Path(__file__).parent / "dag_files/one_task.py"


@dataclass(frozen=True)
class Task:
    """A task instance at its end; ``xcom`` is what it returned."""

    state: str
    tries: int
    xcom: Any


def load_dag(dags: Path, source: Path) -> Any:
    """The one DAG of a file, put into Airflow's folder."""
    path = dags / source.name
    shutil.copyfile(source, path)
    spec = importlib.util.spec_from_file_location(source.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from airflow.sdk import DAG

    found = [one for one in vars(module).values() if isinstance(one, DAG)]
    if not found:
        found = [getattr(module, source.stem)()]
    return found[0]


def run_dag(dag: Any) -> tuple[str, dict[tuple[str, int], Task]]:
    """Run it to its end: the state of the run, and every task by name and map index (-1: not mapped)."""
    done = dag.test()
    tasks = {}
    for one in done.get_task_instances():
        xcom = one.xcom_pull(task_ids=one.task_id, dag_id=one.dag_id, map_indexes=one.map_index)
        tasks[one.task_id, one.map_index] = Task(str(one.state), one.try_number, xcom)
    return str(done.state), tasks


def run_task(dags: Path, monkeypatch: pytest.MonkeyPatch, operator: str, **arguments: Any) -> Task:
    """Run one operator of ours in a DAG of its own."""
    monkeypatch.setenv("MEMWAL_TEST_TASK", json.dumps({"operator": operator, "arguments": arguments}))
    _, tasks = run_dag(load_dag(dags, ONE_TASK))
    return tasks["task", -1]
