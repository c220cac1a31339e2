"""A DAG of one task, which the environment describes; the tests copy this file into Airflow's folder."""

from __future__ import annotations

import json
import os

from airflow.sdk import DAG

import memwal_ops.airflow

_SPEC = json.loads(os.environ["MEMWAL_TEST_TASK"])

with DAG("one_task", schedule=None, catchup=False) as dag:
    getattr(memwal_ops.airflow, _SPEC["operator"])(task_id="task", **_SPEC["arguments"])
