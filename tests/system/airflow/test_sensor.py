"""The backlog sensor and its trigger, in Airflow's own loops."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("airflow.sdk", reason="needs Airflow, which has an environment of its own: make test-airflow")

from airflow.sdk._shared.module_loading import import_string
from airflow.sdk.serde import deserialize, serialize

from memwal_ops.airflow import MemWalBacklogSensor, MemWalBacklogTrigger
from tests.support.tables.workload import Workload
from tests.system.airflow.refusing_store import RefusingStore
from tests.system.airflow.runs import run_task

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    return Workload(3, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))


async def until(holds: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def flush(table: Workload, times: int = 1) -> None:
    for _ in range(times):
        table.put([0, 1])
        table.flush()


def test_a_trigger_is_made_again_from_what_it_says(table: Workload) -> None:
    trigger = MemWalBacklogTrigger(
        uri=table.uri,
        when="generations >= 2",
        poke_interval=0.01,
        storage_conn_id="store",
        storage_options={"aws_region": "eu-west-1"},
    )
    path, arguments = trigger.serialize()
    again = import_string(path)(**deserialize(serialize(arguments)))
    assert type(again) is MemWalBacklogTrigger
    assert again.serialize() == (path, arguments)


def test_the_trigger_waits_for_the_backlog_and_blocks_no_loop(table: Workload) -> None:
    flush(table)
    trigger = MemWalBacklogTrigger(uri=table.uri, when="generations >= 2", poke_interval=0.01)

    async def wait() -> Any:
        fired = asyncio.ensure_future(anext(trigger.run()))
        ticks = 0
        for _ in range(30):
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks == 30
        assert not fired.done()
        await asyncio.to_thread(flush, table)
        return await asyncio.wait_for(fired, 600)

    event = asyncio.run(wait())
    assert event.payload["figures"]["generations"] == 2


@pytest.mark.parametrize(
    ("uri", "when", "conn_id", "said"),
    [
        ("/no/such/table.lance", None, None, "table_not_found (exit code 3)"),
        (None, "generatons > 1", None, "did you mean generations?"),
    ],
)
def test_the_trigger_gives_up_where_looking_again_cannot_help(
    table: Workload, uri: str | None, when: str | None, conn_id: str | None, said: str
) -> None:
    trigger = MemWalBacklogTrigger(uri=uri or table.uri, when=when, storage_conn_id=conn_id, poke_interval=0.01)

    async def first() -> Any:
        return await asyncio.wait_for(anext(trigger.run()), 600)

    payload = asyncio.run(first()).payload
    assert said in payload["error"]
    assert payload["retry"] is False


def test_the_trigger_polls_again_after_a_failure_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused credentials may be replaced in the connection while it waits: it is read again each time."""
    with RefusingStore("nobody") as store:
        connection = {"conn_type": "aws", "login": "first-key", "password": "first-secret"}
        monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps(connection))
        public = {"aws_endpoint": store.endpoint, "aws_region": "eu-west-1", "allow_http": "true"}
        trigger = MemWalBacklogTrigger(
            uri="s3://bucket/t.lance", poke_interval=0.01, storage_conn_id="store", storage_options=public
        )

        def asked_with(key: str) -> bool:
            return any(f"Credential={key}/" in one for one in store.authorizations)

        async def wait() -> None:
            fired = asyncio.ensure_future(anext(trigger.run()))
            await until(lambda: asked_with("first-key"))
            monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps({**connection, "login": "second-key"}))
            await until(lambda: asked_with("second-key"))
            assert not fired.done()
            fired.cancel()
            await asyncio.wait([fired])

        asyncio.run(wait())


def test_enough_at_the_first_poll_needs_no_triggerer(
    dags: Path, table: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush(table, 2)
    task = run_task(
        dags,
        monkeypatch,
        "MemWalBacklogSensor",
        uri=table.uri,
        when="generations >= 2 or bytes >= 1TiB",
        deferrable=True,
    )
    assert task.state == "success"
    assert task.xcom["generations"] == 2


def test_deferred_and_resumed_when_enough_was_flushed(
    dags: Path, table: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow stores the trigger of a task that waits; only then is the second generation flushed."""
    flush(table)
    database = os.environ["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].removeprefix("sqlite:///")
    before = deferrals(database)
    seen: list[str] = []

    def write() -> None:
        deadline = time.monotonic() + 600
        while deferrals(database) == before and time.monotonic() < deadline:
            time.sleep(0.05)
        seen.extend(deferrals(database) - before)
        flush(table)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        task = run_task(
            dags,
            monkeypatch,
            "MemWalBacklogSensor",
            uri=table.uri,
            when="generations >= 2",
            deferrable=True,
            poke_interval=0.05,
        )
    finally:
        writer.join()
    assert [path.partition("#")[0] for path in seen] == ["memwal_ops.airflow.triggers.MemWalBacklogTrigger"]
    assert task.state == "success"
    assert task.xcom["generations"] == 2


def deferrals(database: str) -> set[str]:
    with closing(sqlite3.connect(database)) as connection:
        return {f"{path}#{number}" for path, number in connection.execute("SELECT classpath, id FROM trigger")}


def test_an_error_in_the_triggerer_ends_the_task_with_its_reason() -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    sensor = MemWalBacklogSensor(task_id="task", uri="s3://bucket/t.lance")
    with pytest.raises(AirflowFailException, match="table_not_found"):
        sensor.execute_complete({}, {"error": "table_not_found (exit code 3): gone", "retry": False})
    with pytest.raises(AirflowException, match="error") as again:
        sensor.execute_complete({}, {"error": "error (exit code 1): odd", "retry": True})
    assert not isinstance(again.value, AirflowFailException)
    assert sensor.execute_complete({}, {"figures": {"generations": 3}}) == {"generations": 3}


def test_not_deferrable_it_waits_as_other_sensors_do(
    dags: Path, table: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush(table)
    arguments = {"uri": table.uri, "poke_interval": 0.01, "deferrable": False}
    enough = run_task(dags, monkeypatch, "MemWalBacklogSensor", when="generations >= 1", **arguments)
    assert (enough.state, enough.xcom["generations"]) == ("success", 1)
    late = run_task(
        dags, monkeypatch, "MemWalBacklogSensor", when="generations >= 9", timeout=0, soft_fail=True, **arguments
    )
    assert late.state == "skipped"
