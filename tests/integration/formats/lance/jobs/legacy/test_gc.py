"""gc, why and verify of legacy tables: the trim rule, logs, what is kept, and kills."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.jobs.legacy import gc as legacy_gc
from memwal_ops.formats.lance.legacy.adoption import region_id_of
from memwal_ops.formats.lance.options import GcOptions
from memwal_ops.storage import probe
from tests.support.calm import calm
from tests.support.dying_store import DyingStore, Killed
from tests.support.tables.legacy_table import LegacyTable, base_rows, empty_by_state_commit, entries, states_of


@pytest.fixture
def table(tmp_path: Path) -> LegacyTable:
    """Two generations that are merged, and an open one; their versions before are gone."""
    made = LegacyTable(str(tmp_path / "t.lance")).create()
    made.logged("a", 0, {0: {1: 100.0}})
    made.logged("a", 1, {0: {2: 200.0}})
    made.logged("a", 2, {0: {3: 300.0}}, state="OPEN")
    return made.finish()


def gc(uri: str, *, apply: bool = True) -> dict[str, Any]:
    return run_job(uri, "gc", apply=apply).to_json()


def logs(uri: str) -> list[str]:
    return sorted(str(path.relative_to(uri)) for path in Path(uri, "wal").rglob("*.*"))


def expire(uri: str) -> None:
    """Let all versions go but the newest."""
    kept = f"{2**64 - 1 - lance.dataset(uri).version:020}.manifest"
    for path in Path(uri, "_versions").glob("*.manifest"):
        if path.name != kept:
            path.unlink()


def merged(table: LegacyTable) -> LegacyTable:
    run_job(table.uri, "merge")
    expire(table.uri)
    return table


@pytest.mark.req("S1-012", "S1-020")
def test_logs_go_after_the_trim(table: LegacyTable) -> None:
    run_job(table.uri, "merge")
    before = logs(table.uri)
    trimmed = gc(table.uri)
    assert trimmed["decision"] in {"drained", "deleted"}
    assert states_of(table.uri) == {("a", 2): "OPEN"}
    assert logs(table.uri) == before, "versions that may be opened replay them"
    assert any("lists it as unmerged" in one["because"] for one in trimmed["held"])
    expire(table.uri)
    planned = gc(table.uri, apply=False)
    assert {one["path"] for one in planned["delete"]} == {*before[:2]}
    assert logs(table.uri) == before
    assert "+ trimmed" in run_job(table.uri, "why", target="wal/a/0").describe()
    assert gc(table.uri)["decision"] == "deleted"
    assert logs(table.uri) == before[2:]
    assert gc(table.uri)["decision"] == "nothing_to_delete"
    assert not list(Path(table.uri, "_mem_wal_ops/legacy/trimmed").glob("*"))
    assert base_rows(table.uri) == table.merged
    assert run_job(table.uri, "migrate", apply=True).decision == "migrated"
    run_job(table.uri, "merge")
    assert base_rows(table.uri) == {**table.merged, 3: 300.0}


@pytest.mark.parametrize("content", [b"{", b"{}", b"[" * 100_000])
def test_records_that_cannot_be_read(table: LegacyTable, content: bytes) -> None:
    store = open_table(table.uri).store
    store.put("_mem_wal_ops/legacy/trimmed/one.json", content)
    with pytest.raises(InvalidFormatError, match="not a readable record of trimmed MemWALs"):
        gc(table.uri, apply=False)
    assert region_id_of(store, "a", record=True) == region_id_of(store, "a", record=False)
    (record,) = store.list("_mem_wal_ops/legacy/regions")
    store.put(record.path, content)
    with pytest.raises(InvalidFormatError, match="no readable id of a region"):
        region_id_of(store, "a", record=False)


@pytest.mark.req("S1-020", "S1-029")
def test_an_index_that_is_behind_holds_it(tmp_path: Path) -> None:
    """Built before the merge; by Lance's rule, the version of its newest delta counts."""
    made = LegacyTable(str(tmp_path / "t.lance")).create()
    lance.dataset(made.uri).create_scalar_index("id", "BTREE")
    made.logged("a", 0, {0: {1: 100.0}})
    made.other("a", 1, "OPEN")
    made.finish()
    run_job(made.uri, "merge")
    expire(made.uri)
    planned = gc(made.uri, apply=False)
    assert planned["decision"] == "nothing_to_delete"
    assert "an index of the table has seen version" in planned["held"][0]["because"]
    gc(made.uri)
    assert states_of(made.uri) == {("a", 0): "MERGED", ("a", 1): "OPEN"}
    assert logs(made.uri)


def test_the_last_mem_wal_stays(tmp_path: Path) -> None:
    made = LegacyTable(str(tmp_path / "t.lance"), marked=False).create()
    made.other("a", 0, "MERGED")
    made.other("a", 1, "MERGED")
    made.finish()
    gc(made.uri)
    assert states_of(made.uri) == {("a", 1): "MERGED"}
    assert open_table(made.uri).layout.name == "legacy"


@pytest.mark.parametrize("place", ["data", "", ".", "../other", "/absolute", "_versions", "wal"])
def test_no_log_is_where_lance_keeps_its_files(tmp_path: Path, place: str) -> None:
    """Or where another MemWAL has its log."""
    made = LegacyTable(str(tmp_path / "t.lance")).create()
    made.other("a", 0, "MERGED", wal=place)
    made.logged("a", 1, {0: {1: 1.5}}, state="OPEN")
    made.finish()
    expire(made.uri)
    before = {path for path in Path(made.uri).rglob("*") if path.is_file() and "_mem_wal_ops" not in str(path)}
    for _ in range(2):
        assert not gc(made.uri)["deleted"]["objects"]
    after = {path for path in Path(made.uri).rglob("*") if path.is_file() and "_mem_wal_ops" not in str(path)}
    assert before <= after
    assert base_rows(made.uri) == made.model


def test_an_emptied_table_loses_nothing(table: LegacyTable) -> None:
    run_job(table.uri, "merge")
    gc(table.uri)
    empty_by_state_commit(table.uri)
    expire(table.uri)
    before = logs(table.uri)
    gc(table.uri)
    assert logs(table.uri) == before


@pytest.mark.long
def test_killed_at_each_step(table: LegacyTable, tmp_path: Path) -> None:
    merged(table)
    backup = str(tmp_path / "backup")
    shutil.copytree(table.uri, backup)
    with calm():
        opened = open_table(table.uri)
        counting = DyingStore(opened.store, 1 << 30, after=False)
        probe._proven.clear()
        legacy_gc.apply(replace(opened, store=counting), GcOptions())
        for at in range(1, len(counting.calls) + 1, 5):
            for after in (False, True):
                shutil.rmtree(table.uri)
                shutil.copytree(backup, table.uri)
                probe._proven.clear()
                opened = open_table(table.uri)
                with pytest.raises(Killed):
                    legacy_gc.apply(replace(opened, store=DyingStore(opened.store, at, after=after)), GcOptions())
                assert base_rows(table.uri) == table.merged
                gc(table.uri)
                expire(table.uri)
                gc(table.uri)
                assert states_of(table.uri) == {("a", 2): "OPEN"}
                assert logs(table.uri) == ["wal/a/2/00000000000000000000.arrow"]
                assert gc(table.uri)["decision"] == "nothing_to_delete"


def test_a_healthy_table_verifies_clean(table: LegacyTable) -> None:
    report = run_job(table.uri, "verify", deep=True)
    assert report.decision == "healthy", report.describe()
    run_job(table.uri, "merge")
    assert run_job(table.uri, "verify", deep=True).decision == "healthy"


def test_what_verify_finds(tmp_path: Path) -> None:
    made = LegacyTable(str(tmp_path / "t.lance")).create()
    made.other("a", 0, "OPEN")
    made.other("a", 1, "OPEN")
    made.other("b", 0, "SEALED", entries=entries([0]))
    made.other("b", 1, "FLUSHED", entries=entries([0]), wal="wal/b/0", owner="")
    made.other("c", 0, "FLUSHED", version=99)
    made.finish()
    report = run_job(made.uri, "verify", deep=True).to_json()
    found = {one["check"] for one in report["findings"]}
    assert found >= {
        "mem_wal_order", "flushed_meaning_unknown", "wal_shared", "mem_wal_owner", "mem_wal_version",
        "mem_wal_states", "generation_missing",
    }  # fmt: skip
    assert run_job(made.uri, "verify").exit_code == 9
    empty_by_state_commit(made.uri)
    assert "emptied" in {one["check"] for one in run_job(made.uri, "verify").to_json()["findings"]}
