"""Wait until a table with MemWAL has enough to merge, then maintain it: one group of tasks for each table.

Copy this file into Airflow's dags folder. It is set by the environment of Airflow's processes:

    MEMWAL_TABLES    URIs, separated by blanks
    MEMWAL_CONN_ID   the Airflow connection with the store's secrets; without it, the workers' environment has them
    MEMWAL_WHEN      the backlog that starts a merge, by default generations >= 8 or bytes >= 256MiB
    MEMWAL_DELETE    yes: gc deletes; otherwise it only plans. It frees generations when old
                     versions of the table are gone: see MemWalExpireOperator in docs/airflow.md
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import dag, task, task_group

from memwal_ops.airflow import (
    MemWalBacklogSensor,
    MemWalCatchupOperator,
    MemWalGcOperator,
    MemWalMergeOperator,
    MemWalSnapshotOperator,
)

TABLES = os.environ.get("MEMWAL_TABLES", "s3://bucket/orders.lance s3://bucket/customers.lance").split()
STORE = {"storage_conn_id": os.environ.get("MEMWAL_CONN_ID") or None}
WHEN = os.environ.get("MEMWAL_WHEN") or "generations >= 8 or bytes >= 256MiB"
DELETE = os.environ.get("MEMWAL_DELETE") == "yes"


@dag(
    schedule=timedelta(minutes=15),
    start_date=datetime(2026, 1, 1),  # noqa: DTZ001 - Airflow reads it in its own time zone
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=1)},
    tags=["memwal"],
)
def memwal_maintenance() -> None:
    """One run: each table that has enough to merge within an hour is merged, indexed, stored for readers, planned."""

    @task_group
    def maintain(uri: str) -> Any:
        # Waits in the triggerer and takes no worker; a table without enough to do is skipped.
        backlog = MemWalBacklogSensor(
            task_id="backlog",
            uri=uri,
            when=WHEN,
            deferrable=True,
            soft_fail=True,
            timeout=3600,
            poke_interval=30,
            **STORE,
        )
        merge = MemWalMergeOperator(task_id="merge", uri=uri, options={"max_bytes": "256MiB"}, **STORE)
        catchup = MemWalCatchupOperator(task_id="catchup", uri=uri, **STORE)
        snapshot = MemWalSnapshotOperator(task_id="snapshot", uri=uri, **STORE)
        collect = MemWalGcOperator(task_id="gc", uri=uri, apply=DELETE, **STORE)
        backlog >> merge >> catchup >> snapshot >> collect
        return merge.output

    @task(trigger_rule="none_failed")
    def account(reports: Any) -> dict[str, int]:
        """What a merge did is its task's XCom: the document that memwal-ops merge --json prints."""
        # Of one table Airflow hands over its report alone; of a table that was skipped, none.
        several = [reports] if isinstance(reports, dict) else reports or []
        done = [one for report in several if report for one in report["passes"]]
        return {"passes": len(done), "rows": sum(one["rows_read"] or 0 for one in done)}

    account(maintain.expand(uri=TABLES))


memwal_maintenance()
