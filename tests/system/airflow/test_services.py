"""The example DAG in a whole Airflow: scheduler, triggerer, DAG processor and API server as processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("airflow.sdk", reason="needs Airflow, which has an environment of its own: make test-airflow")

from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload, assert_same

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[3] / "configs/airflow/memwal_maintenance.py"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"

pytestmark = [
    pytest.mark.skipif(
        "AIRFLOW_SERVICES" not in os.environ, reason="takes a minute: make test-airflow without SHORT=1"
    ),
    pytest.mark.timeout(3600),
]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Services:
    """``airflow standalone`` in a home of its own; everything it starts is in its process group."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.database = home / "airflow.db"
        port, log_port, trigger_port = (str(free_port()) for _ in range(3))
        (home / "dags").mkdir(parents=True)
        shutil.copy(EXAMPLE, home / "dags")
        self.environment = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": port,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{port}",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
            "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
            "AIRFLOW__CORE__PARALLELISM": "2",
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "120",  # a busy machine needs more than 5 s for the first answer
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.database}",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": log_port,
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": trigger_port,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **environment,
        }
        self._log = (home / "standalone.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "airflow", "standalone"],
            env=self.environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End the group that was started here, by its id."""
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, signal_)
            except ProcessLookupError:
                break
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                continue
        self._log.close()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What the metadata database says."""
        try:
            with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as connection:
                return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # not made yet
            return []

    def states(self) -> dict[str, str]:
        """Of the first run: a busy machine may have begun the next one meanwhile."""
        first = "SELECT run_id FROM dag_run ORDER BY id LIMIT 1"
        found = self.rows(f"SELECT task_id, map_index, state FROM task_instance WHERE run_id = ({first})")
        return {f"{name}[{at}]": state for name, at, state in found}

    def until(self, task: str, state: str, seconds: float = 1500) -> None:
        """Wait until a task is in a state."""
        deadline = time.monotonic() + seconds
        while self.states().get(task) != state:
            assert self._process.poll() is None, self.tail()
            assert time.monotonic() < deadline, f"{task} is not {state}: {self.states()}\n{self.tail()}"
            time.sleep(0.2)

    def tail(self) -> str:
        return (self.home / "standalone.log").read_text()[-4000:]


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(3, regions=2, base_rows=30).create(str(tmp_path / "t.lance"))
    made.put([0, 2])
    made.put([1, 3])
    made.flush()
    return made


@pytest.fixture
def services(tmp_path: Path, table: Workload) -> Iterator[Services]:
    connection = {"conn_type": "generic", "extra": {"aws_secret_access_key": SECRET}}
    made = Services(
        tmp_path / "airflow",
        MEMWAL_TABLES=table.uri,
        MEMWAL_WHEN="generations >= 4",
        MEMWAL_CONN_ID="store",
        AIRFLOW_CONN_STORE=json.dumps(connection),
        AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION="False",
    )
    yield made
    made.stop()


def test_deferred_in_the_triggerer_then_maintained(services: Services, table: Workload) -> None:
    services.until("maintain.backlog[0]", "deferred")
    assert [one for one, state in services.states().items() if state == "success"] == []
    table.put([4, 6])
    table.put([5, 7])
    table.flush()
    services.until("maintain.gc[0]", "success")
    services.until("account[-1]", "success")
    states = {name: state for name, state in services.states().items() if name.endswith("[0]")}
    assert states == {f"maintain.{name}[0]": "success" for name in ("backlog", "merge", "catchup", "snapshot", "gc")}
    assert_same(read_base(table.uri), table.expected())
    stored = b"".join(path.read_bytes() for path in services.home.rglob("*") if path.is_file())
    assert table.uri.encode() in stored
    assert SECRET.encode() not in stored
    assert SECRET.replace("/", "\\/").encode() not in stored
