"""Migrations between the layouts of today: what they keep, whom they fence, and what they refuse."""

from __future__ import annotations

import datetime
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import (
    InvalidUsageError,
    NoMemWalIndexError,
    StorageError,
    UnsupportedFeatureError,
    WriterFencedError,
)
from memwal_ops.formats.lance.generations.wal import unflushed_rows, wal_entry_path
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.migrate import job
from memwal_ops.formats.lance.layouts import REGION
from memwal_ops.formats.lance.log import region_files
from memwal_ops.formats.lance.log.region_seal import seal_region
from memwal_ops.formats.lance.options import MigrateOptions
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, RegionWriter, create_mem_wal
from tests.integration.contracts import small
from tests.support.gc_options import IMMEDIATE
from tests.support.layout_migrations import (
    OTHER,
    REFUSED,
    base_rows,
    empty,
    filled,
    keys,
    kill_and_repeat,
    migrate,
    rows,
    scanned,
    writer,
)
from tests.support.stores import Beside, LyingStore

LAYOUTS = [*OTHER]


def files(uri: str) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in Path(uri).rglob("*") if one.is_file()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(tmp_path: Path, layout: str) -> None:
    made, to = filled(str(tmp_path / "t.lance"), layout), OTHER[layout]
    before, progress = files(made.uri), open_table(made.uri).index.merged_generations
    planned = migrate(made.uri, to, apply=False).to_json()
    assert (planned["decision"], planned["from"], planned["to"], planned["rollback"]) == ("planned", layout, to, False)
    assert sorted(one["region_id"] for one in planned["regions"]) == sorted(made.regions)
    assert files(made.uri) == before
    done = migrate(made.uri, to)
    assert done.decision == "migrated"
    assert {one.region_id: one.rows for one in done.regions} == {
        uuid.UUID(one["region_id"]): one["rows"] for one in planned["regions"]
    }
    table = open_table(made.uri)
    assert (table.layout.name, table.version) == (to, done.version)
    assert base_rows(made.uri) == scanned(made.uri) == made.model
    for region in map(uuid.UUID, made.regions):
        manifest = table.region(region).latest()
        assert manifest.sealed
        assert unflushed_rows(table, manifest) == 0
        assert table.index.merged_generations[region] == manifest.current_generation - 1
        assert table.index.merged_generations[region] >= progress.get(region, 0)
    again = migrate(made.uri, to)
    assert (again.decision, again.version, again.regions) == ("nothing_to_migrate", done.version, ())
    with writer(made.uri, to) as one:
        made.put(one, {3: 9.0, 400: 9.5})
    logged = writer(made.uri, to)
    made.put(logged, {401: 9.75})
    assert migrate(made.uri, rollback=True, apply=False).decision == "planned"
    back = migrate(made.uri, rollback=True)
    assert (back.decision, back.to) == ("rolled_back", layout)
    assert base_rows(made.uri) == scanned(made.uri) == made.model
    assert open_table(made.uri).layout.name == layout
    assert migrate(made.uri, rollback=True).decision == "nothing_to_migrate"
    with writer(made.uri, layout) as one:
        made.put(one, {500: 1.0})
    assert scanned(made.uri) == made.model
    assert run_job(made.uri, "verify", deep=True).exit_code == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_version_changes_the_layout_and_nothing_else(tmp_path: Path, layout: str) -> None:
    made = filled(str(tmp_path / "t.lance"), layout)
    lance.dataset(made.uri).create_scalar_index("val", "BTREE")
    run_job(made.uri, "snapshot")
    done = migrate(made.uri, OTHER[layout])
    versions = [one["version"] for one in lance.dataset(made.uri).versions()]
    assert versions[-1] == done.version
    assert len(versions) == len({*versions}) == done.version - versions[0] + 1
    older, newer = (lance.dataset(made.uri, version=done.version - one) for one in (1, 0))
    assert older.to_table() == newer.to_table()
    assert [one.fragment_id for one in older.get_fragments()] == [one.fragment_id for one in newer.get_fragments()]
    names = [{one.name for one in each.describe_indices()} for each in (older, newer)]
    assert names[0] == names[1] >= {"val_idx"}
    at_newer = open_table(made.uri)
    assert at_newer.index.inline_snapshots is None
    assert at_newer.index.num_regions == 0
    assert run_job(made.uri, "snapshot").exit_code == 0
    assert scanned(made.uri, "snapshot") == scanned(made.uri) == made.model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_that_slept_acknowledges_nothing(tmp_path: Path, layout: str) -> None:
    """One that had written, one that had claimed alone, and one whose region had no row: none of them is told yes."""
    made = filled(str(tmp_path / "t.lance"), layout)
    idle = writer(made.uri, layout, made.region())
    migrate(made.uri, OTHER[layout])
    for number, one in enumerate([*made.open, idle]):
        with pytest.raises(REFUSED):
            one.put(rows({900 + number: 1.0}))
        with pytest.raises(REFUSED):
            one.delete(keys(1))
    for region in made.regions:
        with pytest.raises(REFUSED):
            writer(made.uri, layout, region)
    assert base_rows(made.uri) == scanned(made.uri) == made.model


def test_a_writer_of_before_makes_no_region_afterwards(tmp_path: Path) -> None:
    """With the table as it was opened before, also where versions in between are gone."""
    made = filled(str(tmp_path / "t.lance"), "region")
    opened = open_table(made.uri)
    migrate(made.uri, "shard")
    with pytest.raises(InvalidUsageError, match="migrated to the layout shard"):
        RegionWriter(opened)
    with pytest.raises(InvalidUsageError, match="migrated to the layout shard"):
        RegionWriter(made.uri)
    lance.dataset(made.uri).delete("id = 4")
    for one in range(1, open_table(made.uri).version):
        Path(made.uri, "_versions", f"{(1 << 64) - 1 - one:020d}.manifest").unlink()
    with pytest.raises(InvalidUsageError, match="migrated to the layout shard"):
        RegionWriter(opened)


def test_a_writer_of_before_two_migrations_loses_no_row(tmp_path: Path) -> None:
    """Pylance's, which claimed its region as a writer of a table that has the region layout by then."""
    made = empty(str(tmp_path / "t.lance"), "shard")
    opened = lance.dataset(made.uri)
    migrate(made.uri, "region")
    claimed = opened.mem_wal_writer(made.region())
    assert not [*Path(made.uri, "_mem_wal").rglob("*.arrow")], "nothing shows the layout of its region"
    migrate(made.uri, "shard")
    made.put(claimed, {1: 1.5, 700: 7.0})
    claimed.close()
    assert scanned(made.uri) == made.model
    assert run_job(made.uri, "merge").exit_code == 0
    assert base_rows(made.uri) == made.model


@pytest.mark.parametrize("sealed", [True, False])
def test_what_a_killed_writer_was_putting_leaves_no_gap(tmp_path: Path, sealed: bool) -> None:
    """pylance takes a temporary file for an entry: opened and closed, its writer leaves its claim behind a gap."""
    made = empty(str(tmp_path / "t.lance"), "shard")
    made.open.append(writer(made.uri, "shard", made.region()))  # as one that was killed: nothing of it is flushed
    made.put(made.open[0], {100: 1.0})
    log = Path(made.uri, "_mem_wal", made.regions[0], "wal")
    following = f"{len([*log.iterdir()]) + 1:064b}"[::-1]
    (log / f"{following}.arrow.tmp.{uuid.uuid4().hex}").write_bytes(next(log.iterdir()).read_bytes())
    assert "under a temporary name" in run_job(made.uri, "verify").describe()
    if not sealed:
        lance.dataset(made.uri).mem_wal_writer(made.regions[0]).close()
        assert not (log / f"{following}.arrow").exists(), "pylance counts it no more: the guard may go"
        return
    migrate(made.uri, "region")
    with pytest.raises(FileExistsError):  # it was stalled: nothing that it puts is acknowledged
        (log / f"{following}.arrow").hardlink_to(next(log.glob("*.tmp.*")))
    assert scanned(made.uri) == base_rows(made.uri) == made.model
    assert run_job(made.uri, "verify", deep=True).exit_code == 0


def test_an_idle_writer_finds_migrations_behind_a_tag(tmp_path: Path) -> None:
    """The version that it opened is kept, and those after it are expired."""
    made = empty(str(tmp_path / "t.lance"), "region")
    idle = [writer(made.uri, "region", made.region()) for _ in range(2)]
    lance.dataset(made.uri).tags.create("opened", open_table(made.uri).version)
    migrate(made.uri, "region")  # records the layout, which no entry shows
    for number, to in enumerate(("shard", "region")):
        migrate(made.uri, to)
        lance.dataset(made.uri).delete(f"id = {number}")
        del made.model[number]
        run_job(made.uri, "expire", apply=True, older_than="0s", allow_unsafe=True, keep=1)
        assert len(lance.dataset(made.uri).versions()) == 2
        with pytest.raises(REFUSED):
            idle[number].put(rows({9: 9.0}))
    assert run_job(made.uri, "merge").exit_code == 0
    assert base_rows(made.uri) == scanned(made.uri) == made.model


def test_an_idle_writer_of_a_table_without_index(tmp_path: Path) -> None:
    """It was removed since: the first write is refused, by that name."""
    made = filled(str(tmp_path / "t.lance"), "region", idle=False)
    idle = writer(made.uri, "region", made.region())
    lance.dataset(made.uri).drop_index("__lance_mem_wal")
    with pytest.raises(NoMemWalIndexError, match="removed after version"):
        idle.put(rows({1: 9.0}))


def test_a_log_that_is_a_link_blocks(tmp_path: Path) -> None:
    """Links are not followed: nothing shows that the region has rows."""
    made = filled(str(tmp_path / "t.lance"), "region", idle=False)
    log = Path(made.uri, "_mem_wal", made.regions[2], "wal")
    log.rename(tmp_path / "away")
    log.symlink_to(tmp_path / "away")
    assert migrate(made.uri, "shard").decision == "blocked"
    log.unlink()
    (tmp_path / "away").rename(log)
    assert migrate(made.uri, "shard").decision == "migrated"
    assert base_rows(made.uri) == made.model


def test_a_migration_right_before_the_first_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the writer's first look: the entry is there, so that it must not say that nothing was written."""
    made = filled(str(tmp_path / "t.lance"), "region", idle=False)
    idle, real = writer(made.uri, "region", made.region()), region_files.put_entry

    def migrated(*arguments: Any) -> Any:
        monkeypatch.setattr(region_files, "put_entry", real)
        migrate(made.uri, "shard")
        return real(*arguments)

    monkeypatch.setattr(region_files, "put_entry", migrated)
    with pytest.raises(StorageError, match="may be written"):
        idle.put(rows({1: 9.0}))
    with pytest.raises(WriterFencedError):
        idle.put(rows({1: 9.0}))


def test_an_idle_writer_finds_each_migration(tmp_path: Path) -> None:
    """The region of one that put nothing is not sealed; it is told no, however often the layout changed since."""
    made = filled(str(tmp_path / "t.lance"), "region", idle=False)
    idle = [writer(made.uri, "region", made.region()) for _ in range(2)]
    migrate(made.uri, "shard")
    with pytest.raises(REFUSED):
        idle[0].put(rows({1: 9.0}))
    with pytest.raises(REFUSED):
        idle[0].put(rows({2: 9.0}))
    migrate(made.uri, "region")
    with pytest.raises(REFUSED):
        idle[1].put(rows({3: 9.0}))
    assert run_job(made.uri, "merge").exit_code == 0
    assert base_rows(made.uri) == scanned(made.uri) == made.model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_region_that_is_made_meanwhile(tmp_path: Path, layout: str) -> None:
    """Right before the version is published: it is found, sealed and merged after it."""
    made = filled(str(tmp_path / "t.lance"), layout)
    opened, late = open_table(made.uri), made.region()

    def others() -> None:
        with writer(made.uri, layout, late) as one:
            made.put(one, {600: 6.0, 1: 6.5})
        made.open.append(writer(made.uri, layout, late))
        made.put(made.open[-1], {601: 6.25})

    store = Beside(opened.store, "put_if_absent", _publishes, others)
    report = job.apply(replace(opened, store=store), MigrateOptions(to=OTHER[layout]))
    assert store.happened
    assert report.decision == "migrated"
    assert uuid.UUID(late) in {one.region_id for one in report.regions}
    with pytest.raises(REFUSED):
        made.open[-1].put(rows({602: 1.0}))
    assert base_rows(made.uri) == scanned(made.uri) == made.model
    assert migrate(made.uri, OTHER[layout]).decision == "nothing_to_migrate"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_a_merge_and_another_migration(tmp_path: Path, layout: str) -> None:
    made = filled(str(tmp_path / "t.lance"), layout)
    for number, act in enumerate((lambda: run_job(made.uri, "merge"), lambda: migrate(made.uri, OTHER[layout]))):
        opened = open_table(made.uri)
        store = Beside(opened.store, "put", lambda path, *_: "_versions" in path, act)
        to = OTHER[layout] if number == 0 else opened.layout.name
        report = job.apply(replace(opened, store=store), MigrateOptions(to=to))
        assert report.decision in {"migrated", "nothing_to_migrate"}
        assert base_rows(made.uri) == scanned(made.uri) == made.model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lost_answers(tmp_path: Path, layout: str) -> None:
    """Each write is carried out, its answer is lost, and the client that repeats it is told that it exists."""
    made = filled(str(tmp_path / "t.lance"), layout)
    run_job(made.uri, "merge")
    opened, lost = open_table(made.uri), set[str]()

    def put_if_absent(path: str, data: bytes) -> bool:
        done, kind = opened.store.put_if_absent(path, data), re.sub("[^/]*$|_mem_wal/[^/]*|[0-9a-f]*_gen_.", "", path)
        if kind in lost:
            return done
        lost.add(kind)
        return False

    store = LyingStore(opened.store, put_if_absent=put_if_absent)
    report = job.apply(replace(opened, store=store), MigrateOptions(to=OTHER[layout]))
    assert report.decision == "migrated"
    assert lost >= ({"/manifest/", "/wal/", "_versions/"} if layout == "region" else {"/manifest/", "_versions/"})
    assert base_rows(made.uri) == scanned(made.uri) == made.model
    assert migrate(made.uri, OTHER[layout]).decision == "nothing_to_migrate"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nobody_is_fenced_where_a_generation_cannot_be_merged(tmp_path: Path, layout: str) -> None:
    made = filled(str(tmp_path / "t.lance"), layout)
    damaged = next(iter(Path(made.uri, "_mem_wal", made.regions[1]).glob("*_gen_1/_versions/*.manifest")))
    content = damaged.read_bytes()
    damaged.write_bytes(b"no manifest")
    report = migrate(made.uri, OTHER[layout])
    assert (report.decision, report.exit_code) == ("blocked", 10)
    assert [str(one.region_id) for one in report.blocked] == [made.regions[1]]
    assert open_table(made.uri).layout.name == layout
    made.put(made.open[0], {700: 7.0})
    damaged.write_bytes(content)
    assert migrate(made.uri, OTHER[layout]).decision == "migrated"
    assert base_rows(made.uri) == scanned(made.uri) == made.model


def test_rows_behind_a_sealed_log_block(tmp_path: Path) -> None:
    """A writer that follows no rule put an entry into a sealed region: nothing merges it, so nothing is published."""
    made = filled(str(tmp_path / "t.lance"), "region")
    table, region = open_table(made.uri), uuid.UUID(made.regions[2])
    last = seal_region(table, region).replay_after_wal_id or 0
    behind = Path(made.uri, wal_entry_path(region, last + 1, REGION))
    behind.write_bytes(Path(made.uri, wal_entry_path(region, 1, REGION)).read_bytes())
    report = migrate(made.uri, "shard")
    assert report.decision == "blocked"
    assert "is sealed, and its log has rows" in report.describe().replace("\n", " ")
    assert open_table(made.uri).layout is REGION
    behind.unlink()
    assert migrate(made.uri, "shard").decision == "migrated"
    assert base_rows(made.uri) == made.model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gc_afterwards(tmp_path: Path, layout: str) -> None:
    """Regions of both layouts are collected, each by its own; nothing is unrecognized."""
    made = filled(str(tmp_path / "t.lance"), layout)
    migrate(made.uri, OTHER[layout])
    with writer(made.uri, OTHER[layout]) as one:
        made.put(one, {800: 8.0})
    run_job(made.uri, "merge")
    run_job(made.uri, "expire", apply=True, older_than="0s", allow_unsafe=True, keep=1)
    report = gc.apply(open_table(made.uri), IMMEDIATE)
    assert report.deleted_objects > 0
    assert not any(one["unknown"] for one in report.to_json()["counts"].values())
    assert base_rows(made.uri) == scanned(made.uri) == made.model
    for region in made.regions:
        assert not [*Path(made.uri, "_mem_wal", region).glob("*_gen_*")]
    assert run_job(made.uri, "verify", deep=True).exit_code == 0
    assert migrate(made.uri, rollback=True).decision == "rolled_back"
    assert base_rows(made.uri) == scanned(made.uri) == made.model
    for one in made.open:
        with pytest.raises(REFUSED):
            one.put(rows({900: 1.0}))


def test_what_the_other_layout_cannot_route(tmp_path: Path) -> None:
    made = empty(str(tmp_path / "t.lance"), "region")
    for number, how in enumerate(({"unsharded": True}, {"bucket_column": "val", "num_buckets": 3})):
        uri = str(tmp_path / f"{number}.lance")
        lance.write_dataset(rows(made.model), uri).initialize_mem_wal(**how)
        before = files(uri)
        with pytest.raises(UnsupportedFeatureError, match="region spec 1"):
            migrate(uri, "region")
        assert files(uri) == before


def test_keys_that_the_other_layout_cannot_hash(tmp_path: Path) -> None:
    """pylance's writer acknowledges rows with such keys, and fails when it flushes them: they would stay in its log."""
    uri, day = str(tmp_path / "t.lance"), datetime.date(2020, 1, 1)
    marks = {"lance-schema:unenforced-primary-key": "true"}
    schema = pa.schema([pa.field("day", pa.date32(), nullable=False, metadata=marks), pa.field("v", pa.int64())])
    written = [pa.table({"day": [day, day.replace(day=at)], "v": [0, at]}, schema=schema) for at in (2, 3)]
    lance.write_dataset(written[0], uri)
    create_mem_wal(uri)
    with RegionWriter(uri) as writer:
        writer.put(written[1])
    before = files(uri)
    with pytest.raises(UnsupportedFeatureError, match=r"day \(date32"):
        migrate(uri, "shard")
    assert files(uri) == before
    run_job(uri, "merge")
    assert lance.dataset(uri).count_rows() == 3


def test_specs_stay(tmp_path: Path) -> None:
    """A router goes on in new regions after its table went to shard and came back."""
    uri, model = str(tmp_path / "t.lance"), dict.fromkeys(range(20), 0.5)
    lance.write_dataset(rows(model), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 4)"),))])
    with RegionRouter(uri) as router:
        router.put(rows({1: 7.0, 2: 7.0, 3: 7.0, 30: 7.0}))
    assert migrate(uri, "shard").decision == "migrated"
    assert [one["transform"] for one in lance.dataset(uri).mem_wal_index_details()["sharding_specs"][0]["fields"]] == [
        "bucket"
    ]
    assert migrate(uri, rollback=True).decision == "rolled_back"
    with RegionRouter(uri) as router:
        router.put(rows({2: 8.0, 31: 8.0}))
    run_job(uri, "merge")
    assert base_rows(uri) == model | {1: 7.0, 2: 8.0, 3: 7.0, 30: 7.0, 31: 8.0}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_and_repeated(tmp_path: Path, layout: str) -> None:
    kill_and_repeat(tmp_path, layout, every=113)


def test_a_log_beyond_the_default_limits_of_the_writer(tmp_path: Path) -> None:
    """pylance replays no more rows than its writer may hold: the one that wrote this log had a higher limit."""
    uri, count = small.make(tmp_path, small.rows(0, 1), btree=False), 60_000
    one = small.writer(uri, max_memtable_rows=400_000)
    for number in range(2):
        one.put(small.rows(number * count, (number + 1) * count))
    assert seal_region(open_table(uri), uuid.UUID(small.REGION)).sealed
    assert run_job(uri, "merge").exit_code == 0
    assert lance.dataset(uri).count_rows() == 2 * count


def test_without_the_option_nothing_is_asked(tmp_path: Path) -> None:
    made = filled(str(tmp_path / "t.lance"), "region")
    before = files(made.uri)
    assert migrate(made.uri).decision == "nothing_to_migrate"
    with pytest.raises(InvalidUsageError, match="nothing to roll back"):
        migrate(made.uri, rollback=True)
    assert files(made.uri) == before


def _publishes(path: str, data: bytes = b"") -> bool:
    """Whether a call publishes the version that records the layout."""
    return path.startswith("_versions/") and b"memwal-ops.layout" in data
