"""What the tests of the supervisor share: the names of two tables, one with generations that wait, and three."""

from __future__ import annotations

from pathlib import Path

import pytest

from memwal_ops.supervisor.http import connections
from memwal_ops.supervisor.scheduling import scheduler
from tests.support.tables.workload import Workload
from tests.support.waiting import PATIENCE

TABLES = "tables: [{uri: /a}, {uri: /b}]\n"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this process waits as long as its tests do: on a busy machine, a request may take half a minute."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", PATIENCE)
    monkeypatch.setattr(scheduler, "_ASK_SECONDS", PATIENCE)


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        made.put([1, 2, 50])
        made.flush()
    return made


@pytest.fixture
def tables(tmp_path: Path) -> list[Workload]:
    """Three small tables with two generations each."""
    made = []
    for number in range(3):
        table = Workload(number, regions=1, base_rows=20).create(str(tmp_path / f"tables/t{number}.lance"))
        for _ in range(2):
            table.put([1, 2, 30 + number])
            table.flush()
        made.append(table)
    return made
