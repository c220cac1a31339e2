"""The drills of tables with the legacy MemWAL index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pytest

from tests.support.tables.legacy_table import LegacyTable, base_rows, entries, states_of
from tests.system.drills.page import Page

if TYPE_CHECKING:
    from pathlib import Path

    from tests.system.drills.drill import Drill


@pytest.fixture
def table(tmp_path: Path) -> LegacyTable:
    return LegacyTable(str(tmp_path / "t.lance"), marked=False).create()


def test_07_legacy_layout(drill: Drill, table: LegacyTable) -> None:
    table.flushed("eu", 0, {1: 100.0, 70: 7.0})
    table.finish()
    drill.given(URI=table.uri, COLUMN="id")
    drill.refused('memwal-ops compact "$URI"')
    *_, inspected = drill.rest()
    assert "shard layout" in inspected.out
    assert base_rows(table.uri) == table.merged
    lance.write_dataset(lance.dataset(table.uri).to_table(filter="id = 70"), table.uri, mode="append")


def test_36_flushed_meaning_unknown(drill: Drill, tmp_path: Path) -> None:
    table = LegacyTable(str(tmp_path / "t.lance")).create()
    table.flushed("eu", 0, {1: 100.0})
    table.listed[0]["last_updated_dataset_version"] = 999
    table.finish()
    drill.given(URI=table.uri)
    blocked = drill.run('memwal-ops merge "$URI" --json')
    assert (blocked.code, blocked.document["blocked"][0]["reason"]) == (10, drill.reason)
    looked, merged = drill.rest()
    assert looked.out.split() == ["eu", "0", "FLUSHED", "unknown", "999"]
    assert merged.out.startswith("merged")
    assert base_rows(table.uri) == table.merged


def test_37_mem_wal_order(drill: Drill, tmp_path: Path) -> None:
    table = LegacyTable(str(tmp_path / "t.lance")).create()
    table.other("eu", 0, "SEALED", entries=entries([0]))
    table.flushed("eu", 1, {1: 100.0})
    table.finish()
    drill.given(URI=table.uri)
    blocked = drill.run('memwal-ops merge "$URI" --json')
    assert (blocked.code, blocked.document["blocked"][0]["reason"]) == (10, drill.reason)
    looked, _ = drill.rest()
    assert "mem_wal_order" in looked.out
    assert states_of(table.uri) == {("eu", 0): "SEALED", ("eu", 1): "FLUSHED"}


@pytest.mark.long
def test_legacy_table(tmp_path: Path) -> None:
    """The whole page, on a table with a flushed MemWAL and one that has a log alone."""
    table = LegacyTable(str(tmp_path / "t.lance"), marked=False).create()
    table.flushed("eu", 0, {1: 100.0, 70: 7.0})
    table.logged("eu", 1, {0: {2: 200.0}}, state="OPEN")
    table.finish()
    with Page("legacy-table.md", {"URI": table.uri, "COLUMN": "id"}) as page:
        shown, verified = page.run("Before")
        assert "OPEN" in shown
        assert verified.startswith("healthy")
        page.run("Merge what is flushed")
        planned, _ = page.run("Migrate")
        assert "takes them from 'owner-1'" in planned
        *_, counted = page.run("After")
    assert counted.split()[-1] == "21"
    assert base_rows(table.uri) == {**table.merged, 2: 200.0}
