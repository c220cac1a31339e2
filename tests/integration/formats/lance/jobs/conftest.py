"""Tables that the tests of repair share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memwal_ops import run_job
from tests.support.tables import damage
from tests.support.tables.layouts import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.tables.lsm_table import LsmTable


@pytest.fixture(scope="module", params=LAYOUTS)
def merged_table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LsmTable]:
    """Merged generations that only the newest version knows, waiting ones, an index, a snapshot."""
    table = request.param(3, regions=2, base_rows=40).create(str(tmp_path_factory.mktemp("whole") / "t.lance"))
    for _ in range(2):
        table.step(12)
        for at in range(2):
            table.put([at])
        table.flush()
    run_job(table.uri, "merge")
    run_job(table.uri, "catchup")
    run_job(table.uri, "snapshot")
    run_job(table.uri, "expire", apply=True, older_than="0s", allow_unsafe=True, keep=1)
    for _ in range(2):
        for at in range(2):
            table.put([at, at + 10])
        table.flush()
    yield table
    table.close()


@pytest.fixture
def merged_copy(merged_table: LsmTable, tmp_path: Path) -> tuple[str, str]:
    return damage.copy_table(merged_table.uri, str(tmp_path / "t.lance")), merged_table.regions[0]
