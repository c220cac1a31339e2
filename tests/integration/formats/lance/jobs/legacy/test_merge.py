"""merge of legacy tables: order, atomicity, where rows are found, what is refused."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.maintain import scan_table
from memwal_ops.errors import (
    DuplicateKeysError,
    InvalidUsageError,
    MemwalOpsError,
    NoPrimaryKeyError,
    TableCorruptError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.jobs.legacy import merge as legacy_merge
from memwal_ops.formats.lance.options import MergeOptions
from memwal_ops.memwal import read
from memwal_ops.storage import probe
from tests.support.calm import calm
from tests.support.dying_store import DyingStore, Killed
from tests.support.tables.legacy_table import (
    MARKED,
    LegacyTable,
    base_rows,
    details_of,
    empty_by_state_commit,
    entries,
    mem_wal,
    put_details,
    rows,
    say_release,
    states_of,
)


@pytest.fixture
def table(tmp_path: Path) -> LegacyTable:
    return LegacyTable(str(tmp_path / "t.lance")).create()


def merge(uri: str, **options: Any) -> Any:
    return run_job(uri, "merge", **options)


@pytest.mark.req("S1-019", "S1-028")
@pytest.mark.parametrize("v2_names", [True, False])
@pytest.mark.parametrize("format_version", ["2.0", "2.1"])
def test_one_version_has_rows_deletions_and_states(tmp_path: Path, v2_names: bool, format_version: str) -> None:
    table = LegacyTable(str(tmp_path / "t.lance"), data_storage_version=format_version, v2_names=v2_names).create()
    table.flushed("a", 0, {1: 100.0, 50: 5.0})
    table.flushed("a", 1, {1: 101.0, 2: 102.0})
    table.logged("b", 0, {0: {3: 7.0, 60: 6.0}, 2: {3: 8.0}}, strangers=(1, 5))
    table.other("b", 1, "OPEN")
    table.finish()
    before = {version: base_rows(table.uri, version) for version in (1, 2)}
    found = read(table.uri).scan().to_table().to_pydict()
    assert dict(zip(found["id"], found["val"], strict=True)) == table.merged
    report = merge(table.uri)
    assert (report.decision, report.version) == ("merged", 3)
    assert base_rows(table.uri) == table.merged
    states = {("a", 0): "MERGED", ("a", 1): "MERGED", ("b", 0): "MERGED", ("b", 1): "OPEN"}
    assert states_of(table.uri) == states
    assert [one["last_updated_dataset_version"] for one in details_of(table.uri)] == [3, 3, 3, 2]
    assert [one["owner_id"] for one in details_of(table.uri)] == ["owner-1"] * 4
    assert {version: base_rows(table.uri, version) for version in (1, 2)} == before
    assert merge(table.uri).decision == "nothing_to_merge"
    assert lance.dataset(table.uri).version == 3
    assert lance.dataset(table.uri).scanner(filter="id = 1").to_table().to_pylist() == [{"id": 1, "val": 101.0}]


def test_the_oldest_age_counts_what_has_no_version(table: LegacyTable) -> None:
    """The manifest of the version that flushed it is gone: it is as old as the next version, at least."""
    table.flushed("a", 0, {1: 100.0})
    opened: Any = open_table(table.finish().uri)
    Path(table.uri, version_path(1, opened.naming)).unlink()
    assert legacy_merge._age(opened, 1) > 0


def test_the_sizes_of_what_waits_are_not_known(table: LegacyTable) -> None:
    table.flushed("a", 0, {1: 100.0})
    uri = table.finish().uri
    assert not {"rows", "bytes"} & legacy_merge.backlog(open_table(uri)).keys()
    assert ("merge", None) in [(need.job, need.rows) for need in scan_table(open_table(uri)).needs]
    merge(uri)
    assert legacy_merge.backlog(open_table(uri)).items() >= {"generations": 0, "rows": 0, "bytes": 0}.items()


def test_generation_by_generation_under_a_budget(table: LegacyTable) -> None:
    for generation in range(4):
        table.flushed("a", generation, {number: 100.0 * generation + number for number in range(generation, 8)})
    table.flushed("b", 0, {500: 5.0})
    table.finish()
    report = merge(table.uri, max_bytes=1)
    assert [entry.to_json()["regions"] for entry in report.passes] == [
        *({"a": [number, number]} for number in range(4)),
        {"b": [0, 0]},
    ]
    assert base_rows(table.uri) == table.merged
    assert [entry.version for entry in report.passes] == [3, 4, 5, 6, 7]


def test_a_dry_run_changes_nothing(table: LegacyTable) -> None:
    table.flushed("a", 0, {1: 100.0})
    table.finish()
    report = run_job(table.uri, "merge", apply=False)
    assert (report.decision, report.to_json()["backlog_after"]["generations"]) == ("dry_run", 1)
    assert lance.dataset(table.uri).version == 2


def test_indexes_stay(table: LegacyTable) -> None:
    lance.dataset(table.uri).create_scalar_index("id", "BTREE")
    table.flushed("a", 0, {1: 100.0, 70: 7.0})
    table.finish()
    merge(table.uri)
    for key in (1, 70, 3):
        found = lance.dataset(table.uri).scanner(filter=f"id = {key}").to_table().to_pylist()
        assert found == [{"id": key, "val": table.merged[key]}]
    assert {index.name for index in lance.dataset(table.uri).describe_indices()} == {"__lance_mem_wal", "id_idx"}


@pytest.mark.req("S1-009", "S1-028")
def test_nothing_is_merged_past_one_that_waits(table: LegacyTable) -> None:
    table.flushed("a", 0, {1: 100.0})
    table.other("a", 1, "SEALED", entries=entries([0]))
    table.flushed("a", 2, {1: 300.0})
    table.flushed("b", 0, {9: 9.5})
    table.finish()
    report = merge(table.uri)
    assert (report.decision, report.exit_code) == ("blocked", 10)
    assert [(one.region, one.generation, one.error.reason) for one in report.blocked] == [("a", 2, "mem_wal_order")]
    assert base_rows(table.uri) == {**table.model, 1: 100.0, 9: 9.5}
    assert states_of(table.uri)[("a", 2)] == "FLUSHED"


@pytest.mark.parametrize("above", ["MERGED", "trimmed"])
def test_a_late_generation_does_not_replace_newer_rows(table: LegacyTable, above: str) -> None:
    table.flushed("a", 0, {1: 100.0})
    table.other("a", 1 if above == "MERGED" else 2, "MERGED" if above == "MERGED" else "OPEN")
    table.finish()
    report = merge(table.uri)
    assert [one.error.reason for one in report.blocked] == ["mem_wal_order"]
    assert base_rows(table.uri) == table.model


def test_what_is_below_may_be_trimmed(table: LegacyTable) -> None:
    table.flushed("a", 5, {1: 100.0})
    table.finish()
    assert merge(table.uri).decision == "merged"
    assert base_rows(table.uri) == table.merged


@pytest.mark.req("S1-021")
@pytest.mark.parametrize(("release", "means"), [("0.31.1", "merged"), ("0.35.0", "merged"), ("0.36.0", "unmerged")])
def test_flushed_means_what_its_release_meant(table: LegacyTable, release: str, means: str) -> None:
    table.flushed("a", 0, {1: 100.0})
    table.finish()
    say_release(table.uri, release)
    (shown,) = run_job(table.uri, "inspect").to_json()["mem_wals"]
    assert (shown["flushed_means"], shown["writer_release"]) == (means, release)
    other = "unmerged" if means == "merged" else "merged"
    report = merge(table.uri, flushed_means=other)
    assert report.decision == "merged", "what is known is not overruled"
    assert base_rows(table.uri) == (table.model if means == "merged" else table.merged)
    assert states_of(table.uri) == {("a", 0): "MERGED"}
    assert [str(one) for one in report.marked] == (["generation 0 of region 'a'"] if means == "merged" else [])


@pytest.mark.parametrize("unknown", ["gone", "library"])
@pytest.mark.parametrize("means", ["merged", "unmerged"])
def test_flushed_of_unknown_meaning_is_blocked_until_a_person_says(
    table: LegacyTable, unknown: str, means: str
) -> None:
    table.flushed("a", 0, {1: 100.0})
    if unknown == "gone":
        table.listed[0]["last_updated_dataset_version"] = 99
    table.finish()
    if unknown == "library":
        say_release(table.uri, "1.0", library="other")
    report = merge(table.uri)
    assert [one.error.reason for one in report.blocked] == ["flushed_meaning_unknown"]
    assert base_rows(table.uri) == table.model
    assert merge(table.uri, flushed_means=means).decision == "merged"
    assert base_rows(table.uri) == (table.model if means == "merged" else table.merged)


@pytest.mark.req("S1-011")
def test_where_rows_are_found(table: LegacyTable, tmp_path: Path) -> None:
    """A template, and a log of our own hook; relative places are below the table."""
    lance.write_dataset(rows({1: 100.0}), str(tmp_path / "flushed/a-0"))
    lance.write_dataset(rows({2: 200.0}), f"{table.uri}/mem/b")
    table.other("a", 0, "FLUSHED", entries=entries([0]))
    table.other("b", 0, "FLUSHED", entries=entries([0]), mem_table="mem/b")
    table.other("c", 0, "FLUSHED", entries=entries([4]))
    table.finish()
    found = merge(table.uri)
    assert {one.region: one.error.reason for one in found.blocked} == {
        "a": "generation_missing",
        "c": "generation_missing",
    }
    assert base_rows(table.uri) == {**table.model, 2: 200.0}
    assert [
        one.region for one in merge(table.uri, mem_table=f"{tmp_path}/flushed/{{region}}-{{generation}}").blocked
    ] == ["c"]
    report = merge(table.uri, wal_reader=f"{__name__}:hook")
    assert report.decision == "merged"
    assert base_rows(table.uri) == {**table.model, 1: 100.0, 2: 200.0, 4: 400.0}
    with pytest.raises(InvalidUsageError, match="placeholder"):
        put_details(table.uri, [mem_wal("d", 0, "FLUSHED", version=lance.dataset(table.uri).version)])
        merge(table.uri, mem_table="{what}")


def hook(store: Any, numbers: Any) -> Any:
    assert store.root.endswith("wal/c/0")
    return (rows({number: 100.0 * number}) for number in numbers)


@pytest.mark.req("S1-013", "S1-014", "S1-016")
@pytest.mark.parametrize("suffix", ["arrow", "lance"])
def test_replay_reads_what_belongs_to_the_log(table: LegacyTable, suffix: str) -> None:
    table.logged("a", 0, {0: {1: 1.5}, 3: {1: 2.5, 90: 9.0}}, strangers=(1, 2, 4), suffix=suffix)
    table.finish()
    assert merge(table.uri).decision == "merged"
    assert base_rows(table.uri) == table.merged


def test_a_damaged_log_is_not_guessed(table: LegacyTable) -> None:
    table.logged("a", 0, {0: {1: 1.5}, 1: {1: 2.5}})
    table.finish()
    first, second = sorted(Path(table.uri, "wal/a/0").iterdir())
    kept = second.read_bytes()
    for damage, reason in (
        (lambda: second.write_bytes(kept[:20]), "generation_corrupt"),
        (second.unlink, "generation_missing"),
    ):
        damage()
        assert [one.error.reason for one in merge(table.uri).blocked] == [reason]
        with pytest.raises(MemwalOpsError):
            read(table.uri).scan().to_table()
    assert base_rows(table.uri) == table.model
    second.write_bytes(kept)
    shutil.copy(first, first.with_name("0.arrow"))
    assert [one.error.reason for one in merge(table.uri).blocked] == ["generation_corrupt"], "two files of one entry"
    first.with_name("0.arrow").unlink()
    assert merge(table.uri).decision == "merged"
    assert base_rows(table.uri) == table.merged


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"id": [1], "val": [1.0], "more": [1]}, "schema_projection"),
        ({"id": [1], "val": ["text"]}, "schema_projection"),
        ({"val": [1.0]}, "schema_projection"),
        ({"id": pa.array([None], pa.int64()), "val": [1.0]}, "generation_corrupt"),
    ],
)
def test_rows_that_do_not_fit(table: LegacyTable, columns: dict[str, Any], reason: str) -> None:
    lance.write_dataset(pa.table(columns), f"{table.uri}/mem/a")
    table.other("a", 0, "FLUSHED", mem_table="mem/a")
    table.finish()
    assert [one.error.reason for one in merge(table.uri).blocked] == [reason]
    assert base_rows(table.uri) == table.model


def test_a_column_that_was_added_since_is_null(table: LegacyTable) -> None:
    table.flushed("a", 0, {1: 100.0, 70: 7.0})
    lance.dataset(table.uri).add_columns(pa.field("more", pa.int64()))
    table.finish()
    merge(table.uri)
    found = lance.dataset(table.uri).to_table(filter="id IN (1, 2, 70)").to_pylist()
    assert sorted((row["id"], row["more"]) for row in found) == [(1, None), (2, None), (70, None)]


def test_the_key_has_to_be_told(tmp_path: Path) -> None:
    table = LegacyTable(str(tmp_path / "t.lance"), marked=False).create()
    table.flushed("a", 0, {1: 100.0})
    table.finish()
    with pytest.raises(NoPrimaryKeyError, match="marked as its primary key") as refused:
        merge(table.uri)
    assert refused.value.exit_code == 6
    assert "--primary-key COLUMN" in refused.value.remedy
    with pytest.raises(InvalidUsageError, match="no column nothing"):
        merge(table.uri, primary_key="nothing")
    assert merge(table.uri, primary_key="id").decision == "merged"
    assert base_rows(table.uri) == table.merged


def test_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    """Three rows would be replaced by one."""
    table = LegacyTable(str(tmp_path / "t.lance"), marked=False).create()
    lance.write_dataset(rows({100: 1.0, 101: 1.0}), table.uri, mode="append")
    table.flushed("a", 0, {1: 1.0})
    table.finish()
    with pytest.raises(DuplicateKeysError, match="several rows"):
        merge(table.uri, primary_key="val")
    assert lance.dataset(table.uri).count_rows() == 22
    assert lance.dataset(table.uri).version == 3


def test_a_key_in_two_regions_is_refused(table: LegacyTable) -> None:
    table.flushed("a", 0, {1: 100.0})
    table.flushed("b", 0, {1: 200.0})
    table.flushed("c", 0, {2: 300.0})
    table.finish()
    for options in ({}, {"max_bytes": 1}):
        report = merge(table.uri, **options)
        assert {one.region: one.error.reason for one in report.blocked} == dict.fromkeys("ab", "duplicate_keys")
        assert base_rows(table.uri) == {**table.model, 2: 300.0}
    assert merge(table.uri, regions=["a"]).decision == "merged"
    assert base_rows(table.uri)[1] == 100.0


@pytest.mark.parametrize("commits", [1, 3])
def test_a_version_that_a_state_commit_emptied(table: LegacyTable, commits: int) -> None:
    lance.dataset(table.uri).create_scalar_index("id", "BTREE")
    table.flushed("a", 0, {1: 100.0})
    table.finish()
    full = lance.dataset(table.uri).version
    for _ in range(commits):
        empty_by_state_commit(table.uri)
    assert lance.dataset(table.uri).count_rows() == 0
    assert run_job(table.uri, "inspect").to_json()["emptied"] == {
        "version": full + commits,
        "restore": full,
        "rows": 20,
    }
    for attempt in (
        lambda: merge(table.uri),
        lambda: run_job(table.uri, "merge", apply=False),
        lambda: run_job(table.uri, "migrate", apply=True),
        lambda: read(table.uri).scan().to_table(),
    ):
        with pytest.raises(TableCorruptError, match=f"version {full} has 20") as refused:
            attempt()
        assert "--restore" in refused.value.remedy
    report = merge(table.uri, restore=True)
    assert report.to_json()["restored_version"] == full
    assert base_rows(table.uri) == table.merged
    assert lance.dataset(table.uri).scanner(filter="id = 7").to_table().num_rows == 1
    assert states_of(table.uri) == {("a", 0): "MERGED"}


def test_an_emptied_version_without_predecessor(table: LegacyTable) -> None:
    table.other("a", 0, "OPEN")
    table.finish()
    empty_by_state_commit(table.uri)
    newest = max(Path(table.uri, "_versions").glob("*.manifest"), key=lambda path: path.stat().st_mtime_ns)
    for path in Path(table.uri, "_versions").glob("*.manifest"):
        if path != newest:
            path.unlink()
    for options in ({}, {"restore": True}):
        with pytest.raises(TableCorruptError, match="no longer exist"):
            merge(table.uri, **options)


def test_a_table_that_never_had_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(MARKED.empty_table(), uri)
    put_details(uri, [mem_wal("a", 0, "OPEN", version=2)])
    empty_by_state_commit(uri)
    assert merge(uri).decision == "nothing_to_merge"


def test_stable_row_ids_are_refused_and_named(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows({1: 1.0}, MARKED), uri, enable_stable_row_ids=True)
    lance.write_dataset(rows({1: 2.0}), f"{uri}/mem/a")
    put_details(uri, [mem_wal("a", 0, "FLUSHED", mem_table="mem/a", version=2)])
    with pytest.raises(UnsupportedFeatureError, match="stable row ids") as refused:
        merge(uri)
    assert "migrate" in refused.value.remedy
    assert run_job(uri, "migrate", apply=True).decision == "migrated"
    assert merge(uri).decision == "merged"
    assert base_rows(uri) == {1: 2.0}


def test_options_are_for_legacy_tables_only(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows({1: 1.0}, MARKED), uri).initialize_mem_wal()
    for options in ({"flushed_means": "merged"}, {"restore": True}, {"primary_key": ["id"]}):
        with pytest.raises(InvalidUsageError, match="only to tables with the legacy MemWAL index"):
            merge(uri, **options)
    made = LegacyTable(str(tmp_path / "o.lance")).create()
    made.other("a", 0, "OPEN")
    with pytest.raises(InvalidUsageError, match="local engine"):
        merge(made.finish().uri, engine="spark")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(12))
def test_random_histories(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    table = LegacyTable(str(tmp_path / "t.lance"), size=random_.choice([0, 1, 30])).create()
    for region in range(random_.randrange(1, 4)):
        for generation in range(random_.randrange(4)):
            # Keys of a region are its own.
            keys = [3 * random_.randrange(20) + region for _ in range(random_.randrange(1, 8))]
            values = {key: random_.random() for key in keys}
            if random_.random() < 0.5:
                table.flushed(f"r{region}", generation, values)
            else:
                table.logged(f"r{region}", generation, {0: values})
    table.finish()
    if not table.listed:
        return
    if not table.size:
        assert lance.dataset(table.uri).count_rows() == 0
    found = read(table.uri).scan().to_table().to_pydict()
    assert dict(zip(found["id"], found["val"], strict=True)) == table.merged
    assert merge(table.uri, max_bytes=random_.choice([1, 4000, 1 << 20])).decision == "merged"
    assert base_rows(table.uri) == table.merged
    assert {*states_of(table.uri).values()} == {"MERGED"}


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.long
def test_killed_at_each_step_and_repeated(tmp_path: Path, restore: bool) -> None:
    """Rows, deletions and states are there together or not at all; the next run ends it."""
    table = LegacyTable(str(tmp_path / "t.lance"), size=6).create()
    table.flushed("a", 0, {1: 100.0, 50: 5.0})
    table.logged("a", 1, {0: {1: 101.0}, 2: {2: 102.0}})
    table.finish()
    if restore:
        empty_by_state_commit(table.uri)
    options = MergeOptions(max_generations=1, restore=restore)
    backup = str(tmp_path / "backup")
    shutil.copytree(table.uri, backup)
    half = {**table.model, 1: 100.0, 50: 5.0}
    with calm():
        probe._proven.clear()
        opened = open_table(table.uri)
        counting = DyingStore(opened.store, 1 << 30, after=False)
        legacy_merge.apply(replace(opened, store=counting), options)
        calls = len(counting.calls)
        assert calls > 10
        for at in range(1, calls + 1):
            for after in (False, True):
                shutil.rmtree(table.uri)
                shutil.copytree(backup, table.uri)
                probe._proven.clear()
                opened = open_table(table.uri)
                with pytest.raises(Killed):
                    legacy_merge.apply(replace(opened, store=DyingStore(opened.store, at, after=after)), options)
                where = f"call {at} of {calls}, {'after' if after else 'before'}"
                states = states_of(table.uri)
                base = {"FLUSHED": table.model, "MERGED": half}[states[("a", 0)]]
                base = table.merged if states[("a", 1)] == "MERGED" else base
                found = base_rows(table.uri)
                assert found == base or (restore and not found and {*states.values()} == {"FLUSHED"}), where
                legacy_merge.apply(open_table(table.uri), options)
                assert base_rows(table.uri) == table.merged, where
                version = lance.dataset(table.uri).version
                assert legacy_merge.apply(open_table(table.uri), options).decision == "nothing_to_merge"
                assert lance.dataset(table.uri).version == version
