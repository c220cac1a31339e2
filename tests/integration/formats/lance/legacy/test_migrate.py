"""migrate: what becomes of each MemWAL, what is refused, what works afterwards, the way back, kills at each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal_ops import legacy, open_table, run_job
from memwal_ops.errors import (
    DuplicateKeysError,
    InvalidUsageError,
    MemwalOpsError,
    NoPrimaryKeyError,
    TableCorruptError,
)
from memwal_ops.formats.lance.jobs.migrate import job
from memwal_ops.formats.lance.options import MigrateOptions
from memwal_ops.memwal import RegionWriter
from memwal_ops.storage import probe
from tests.support.legacy_migrations import filled, kill_and_repeat, migrate, migrate_random_lists, scanned
from tests.support.overtaken import Overtaken
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.legacy_table import (
    LegacyTable,
    base_rows,
    details_of,
    empty_by_state_commit,
    entries,
    rows,
)

LAYOUTS = ["shard", "region"]


def takes_writes(uri: str, expected: dict[int, float], layout: str, region: str) -> None:
    """An append, a merge_insert, an index build, and a MemWAL writer; each with the rows that it must give."""
    schema = lance.dataset(uri).schema
    lance.write_dataset(rows({900: 1.0}, schema), uri, mode="append")
    merge = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(rows({900: 2.0, 901: 3.0}, schema))
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    expected |= {900: 2.0, 901: 3.0, 902: 4.0}
    if layout == "shard":
        with lance.dataset(uri).mem_wal_writer(region) as writer:
            writer.put(rows({902: 4.0}, schema))
    else:
        with RegionWriter(uri, region) as writer:
            writer.put(rows({902: 4.0}, schema))
    assert run_job(uri, "merge").decision == "merged"
    assert base_rows(uri) == expected
    assert run_job(uri, "maintain", apply=True).exit_code == 0
    assert base_rows(uri) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_comes_over(tmp_path: Path, layout: str) -> None:
    """A table that pylance refuses to append to takes all kinds of writes after one command, with the same rows."""
    table = filled(str(tmp_path / "t.lance"), marked=False)
    with pytest.raises(OSError, match="snapshot_ts_millis: invalid wire type"):
        lance.write_dataset(rows({900: 1.0}), table.uri, mode="append")
    base = base_rows(table.uri)
    with pytest.raises(NoPrimaryKeyError, match="primary key"):
        migrate(table.uri, to=layout)
    planned = migrate(table.uri, to=layout, primary_key="id", apply=False)
    assert planned.decision == "planned"
    assert "takes them from 'owner-1'" in planned.describe()
    assert base_rows(table.uri) == base
    report = migrate(table.uri, to=layout, primary_key="id")
    assert (report.decision, report.exit_code) == ("migrated", 0)
    assert base_rows(table.uri) == base
    assert scanned(table.uri) == table.merged
    opened = open_table(table.uri)
    assert opened.layout.name == layout
    assert opened.primary_key == ("id",)
    found = {one["region"]: one for one in report.to_json()["regions"]}
    assert [(one["legacy_generation"], one["generation"]) for one in found["a"]["adopted"]] == [(1, 2), (2, 3)]
    assert [(one["legacy_generation"], one["generation"]) for one in found["b"]["adopted"]] == [(0, 1), (1, 2), (2, 3)]
    assert [found[name]["merged_generation"] for name in "abc"] == [1, 0, 4]
    assert [found[name]["current_generation"] for name in "abc"] == [4, 4, 5]
    files = Files(table.uri)
    for one in found.values():
        assert UUID(one["region_id"]).version == 4
        listed = wire.region_manifest(files, one["region_id"]).generations
        assert listed == {each["generation"]: each["path"] for each in one["adopted"]}
        assert all(path.endswith(f"_gen_{number}") for number, path in listed.items())
    assert wire.progress(files) == {found["a"]["region_id"]: 1, found["c"]["region_id"]: 4}
    assert migrate(table.uri, to=layout).decision == "nothing_to_migrate"
    assert run_job(table.uri, "merge").decision == "merged"
    assert base_rows(table.uri) == table.merged
    takes_writes(table.uri, dict(table.merged), layout, found["a"]["region_id"])
    assert base_rows(table.uri, 2) == base, "versions of before read as they did"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_goes_on_before_the_merge(tmp_path: Path, layout: str) -> None:
    table = filled(str(tmp_path / "t.lance"))
    report = migrate(table.uri, to=layout)
    takes_writes(table.uri, dict(table.merged), layout, str(report.regions[0].region_id))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(tmp_path: Path, layout: str) -> None:
    table = filled(str(tmp_path / "t.lance"))
    before = details_of(table.uri)
    migrate(table.uri, to=layout)
    assert migrate(table.uri, rollback=True, apply=False).decision == "planned"
    lance.write_dataset(rows({800: 1.0}, lance.dataset(table.uri).schema), table.uri, mode="append")
    assert migrate(table.uri, rollback=True).decision == "rolled_back"
    after = details_of(table.uri)
    for old, new in zip(before, after, strict=True):
        if old["state"] in {"OPEN", "SEALED"}:
            assert new.pop("owner_id") == "memwal-ops migrate"
            assert new.pop("last_updated_dataset_version") == 3
            old.pop("owner_id"), old.pop("last_updated_dataset_version")
    assert after == before
    assert base_rows(table.uri)[800] == 1.0
    with pytest.raises(OSError, match="snapshot_ts_millis"):
        lance.write_dataset(rows({901: 1.0}), table.uri, mode="append")
    assert migrate(table.uri, rollback=True).decision == "nothing_to_migrate"
    report = migrate(table.uri, to=layout)
    assert scanned(table.uri) == {**table.merged, 800: 1.0}
    assert run_job(table.uri, "merge").decision == "merged"
    takes_writes(table.uri, base_rows(table.uri), layout, str(report.regions[0].region_id))


@pytest.mark.long
def test_no_way_back_after_writes(tmp_path: Path) -> None:
    def written(uri: str, report: Any) -> None:
        with lance.dataset(uri).mem_wal_writer(str(report.regions[0].region_id)) as writer:
            writer.put(rows({902: 4.0}, lance.dataset(uri).schema))

    def merged(uri: str, _: Any) -> None:
        run_job(uri, "merge")

    def made(uri: str, _: Any) -> None:
        with lance.dataset(uri).mem_wal_writer(str(UUID(int=7, version=4))) as writer:
            writer.put(rows({902: 4.0}, lance.dataset(uri).schema))

    for at, (change, said) in enumerate([(written, "claimed"), (merged, "was merged up to"), (made, "was created")]):
        table = filled(str(tmp_path / f"{at}.lance"))
        change(table.uri, migrate(table.uri))
        version = lance.dataset(table.uri).version
        with pytest.raises(InvalidUsageError, match=said):
            migrate(table.uri, rollback=True)
        assert lance.dataset(table.uri).version == version
    plain = LegacyTable(str(tmp_path / "p.lance")).create()
    lance.dataset(plain.uri).initialize_mem_wal()
    with pytest.raises(InvalidUsageError, match="was not migrated"):
        migrate(plain.uri, rollback=True)
    with pytest.raises(InvalidUsageError, match="only to tables with the legacy MemWAL index"):
        migrate(plain.uri, primary_key="id")


def test_what_blocks_it_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    table = LegacyTable(str(tmp_path / "t.lance")).create()
    table.flushed("a", 0, {1: 100.0})
    table.other("b", 0, "SEALED", entries=entries([0, 1]))
    table.other("c", 0, "OPEN")
    table.other("c", 1, "OPEN")
    table.other("d", 0, "FLUSHED", version=99)
    table.flushed("e", 0, {2: 1.0})
    table.other("e", 1, "MERGED")
    table.finish()
    for apply in (False, True):
        report = migrate(table.uri, apply=apply)
        assert (report.decision, report.exit_code) == ("blocked", 10)
        assert {one.region: one.error.reason for one in report.blocked} == {
            "b": "generation_missing",
            "c": "mem_wal_order",
            "d": "flushed_meaning_unknown",
            "e": "mem_wal_order",
        }
        assert "Let its writer, 'owner-1', flush it" in " ".join(report.describe().split())
        assert lance.dataset(table.uri).version == 2
        assert not Path(table.uri, "_mem_wal").exists()


def test_a_claim_stops_the_old_writer(tmp_path: Path) -> None:
    """It is fenced at its next step, and what it recorded is in the table."""
    uri = str(tmp_path / "t.lance")
    table = LegacyTable(uri).create()
    table.other("x", 0, "OPEN", owner="other")
    table.finish()
    writer = legacy.MemWalWriter(uri, "r", "host")
    writer.append(rows({1: 100.0}))
    original = job._migrate

    def late(*arguments: Any) -> Any:
        """After the claim, before anything is published."""
        with pytest.raises(MemwalOpsError, match="another writer claimed it"):
            writer.append(rows({2: 200.0}))
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_migrate", late)
        assert migrate(uri).decision == "migrated"
    assert scanned(uri) == {**table.model, 1: 100.0}
    with pytest.raises(MemwalOpsError):
        writer.append(rows({3: 300.0}))


def test_a_key_that_is_none(tmp_path: Path) -> None:
    table = LegacyTable(str(tmp_path / "t.lance"), marked=False).create()
    table.other("a", 0, "OPEN")
    lance.write_dataset(rows({100: 1.0}), table.uri, mode="append")
    table.finish()
    with pytest.raises(DuplicateKeysError, match="twice or more"):
        migrate(table.uri, primary_key="val")
    nulls = pa.table({"id": pa.array([200], pa.int64()), "val": pa.array([None], pa.float64())})
    other = LegacyTable(str(tmp_path / "n.lance"), marked=False).create()
    lance.write_dataset(nulls.cast(lance.dataset(other.uri).schema), other.uri, mode="append")
    other.other("a", 0, "OPEN")
    other.finish()
    with pytest.raises(InvalidUsageError, match="is NULL in 1 rows"):
        migrate(other.uri, primary_key="val")
    for uri in (table.uri, other.uri):
        assert lance.dataset(uri).version == 3


def test_a_key_of_two_nullable_columns(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": [1, 1], "b": ["x", "y"], "val": [1.0, 2.0]}), uri)
    from tests.support.tables.legacy_table import mem_wal, put_details

    lance.write_dataset(pa.table({"a": [1], "b": ["y"], "val": [9.0]}), f"{uri}/mem/r")
    put_details(uri, [mem_wal("r", 0, "FLUSHED", mem_table="mem/r", version=2)])
    assert migrate(uri, primary_key=["a", "b"]).decision == "migrated"
    assert open_table(uri).primary_key == ("a", "b")
    assert run_job(uri, "merge").decision == "merged"
    found = lance.dataset(uri).to_table().to_pylist()
    assert sorted((row["a"], row["b"], row["val"]) for row in found) == [(1, "x", 1.0), (1, "y", 9.0)]
    lance.write_dataset(lance.dataset(uri).to_table(limit=1), uri, mode="append")


def test_an_emptied_table_is_restored_on_the_way(tmp_path: Path) -> None:
    table = filled(str(tmp_path / "t.lance"))
    empty_by_state_commit(table.uri)
    with pytest.raises(TableCorruptError, match="has no rows"):
        migrate(table.uri, apply=False)
    report = migrate(table.uri, restore=True)
    assert (report.decision, report.to_json()["restored_version"]) == ("migrated", 2)
    assert scanned(table.uri) == table.merged


def test_regions_of_another_table_are_not_taken_over(tmp_path: Path) -> None:
    table = filled(str(tmp_path / "t.lance"))
    Path(table.uri, "_mem_wal", str(UUID(int=3, version=4)), "wal").mkdir(parents=True)
    Path(table.uri, "_mem_wal", str(UUID(int=3, version=4)), "wal/x").write_bytes(b"x")
    with pytest.raises(InvalidUsageError, match="regions of another table"):
        migrate(table.uri)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_and_repeated(tmp_path: Path, layout: str) -> None:
    kill_and_repeat(tmp_path, layout, every=13)


@pytest.mark.long
@pytest.mark.parametrize("at", range(1, 14))
def test_overtaken_by_another_migration(tmp_path: Path, at: int) -> None:
    """Right before its n-th write another one does everything, and a writer and a merge follow."""
    from dataclasses import replace

    table = filled(str(tmp_path / "t.lance"))
    probe._proven.clear()
    opened = open_table(table.uri)

    def others() -> None:
        report = migrate(table.uri)
        assert report.decision == "migrated"
        schema = lance.dataset(table.uri).schema
        with lance.dataset(table.uri).mem_wal_writer(str(report.regions[0].region_id)) as writer:
            writer.put(rows({700: 7.0}, schema))
        run_job(table.uri, "merge")

    try:
        report = job.apply(replace(opened, store=Overtaken(opened.store, at, others, writes=True)), MigrateOptions())
        assert report.decision in {"migrated", "nothing_to_migrate"}
    except MemwalOpsError as error:
        assert error.reason in {"commit_conflict"}  # noqa: FURB171 - more may come
    if 700 in base_rows(table.uri):
        assert run_job(table.uri, "merge").exit_code == 0
        assert base_rows(table.uri) == {**table.merged, 700: 7.0}
    else:
        assert scanned(table.uri) == table.merged


@pytest.mark.long
def test_random_state_lists(tmp_path: Path) -> None:
    migrate_random_lists(tmp_path, range(20))
