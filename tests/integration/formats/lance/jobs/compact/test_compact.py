"""compact: fewer fragments, the same rows, the same MemWAL index, with any concurrent commits."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.figures import poll_cache
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.errors import IndexesBehindError, InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.codebook import read_codebook
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job
from memwal_ops.formats.lance.jobs.compact.job import CompactOptions
from memwal_ops.formats.lance.table import Table
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry
from memwal_ops.formats.lance.wire.version_manifest import decode_fragment_bitmap
from tests.integration.contracts import small
from tests.integration.formats.lance.jobs.compact.compact_tables import check_kept, covered, fragments, make, merged
from tests.support.listeners import at_checkpoint
from tests.support.run_cli import contents
from tests.support.tables import damage, indexed
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

from tests.support.tables.lsm_table import LsmTable


def test_a_table_at_rest_gets_one_fragment_and_one_segment_once(tmp_path: Path) -> None:
    """What is due by rest is in the backlog that starts runs, stays due over the run's own commits, and then is not."""
    uri = str(tmp_path / "t.lance")
    rows = pa.table({"id": range(35_000), "text": [f"{number:0200}" for number in range(35_000)]})
    dataset = lance.write_dataset(rows.slice(0, 20_000), uri)
    dataset.create_scalar_index("id", "BTREE", name="by_id")
    for at in range(20_000, 35_000, 5_000):
        dataset = lance.write_dataset(rows.slice(at, 5_000), uri, mode="append")
        run_job(uri, "catchup", tier_factor=100)
    dataset.delete("id % 100 = 0")

    def due(after: str) -> dict[str, float]:
        table = open_table(uri)
        found: dict[str, float] = {}
        with poll_cache({job: {"rest_after": after} for job in ("catchup", "compact")}):
            for name in ("catchup", "compact"):
                found |= table.jobs[name].job.backlog(table)
        return {name: found[name] for name in ("indexes_due", "urgent_fragments")}

    assert due("1d") == {"indexes_due": 0, "urgent_fragments": 0}
    assert due("0s") == {"indexes_due": 1, "urgent_fragments": 0}, "fragments in different segments are not joined"
    assert run_job(uri, "catchup").decision == "unchanged"
    assert run_job(uri, "catchup", rest_after=timedelta(0)).decision == "caught_up"
    assert due("0s") == {"indexes_due": 0, "urgent_fragments": 4}
    assert run_job(uri, "compact").decision == "unchanged"
    assert run_job(uri, "compact", rest_after=timedelta(0)).decision == "compacted"
    assert due("0s") == {"indexes_due": 0, "urgent_fragments": 0}
    (fragment,) = lance.dataset(uri).get_fragments()
    assert fragment.metadata.deletion_file is None
    kept = [number for number in range(35_000) if number % 100]
    assert lance.dataset(uri).to_table().sort_by("id") == rows.take(kept)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("stored", ["none", "inline", "external"])
def test_rows_progress_and_all_else_stay(tmp_path: Path, kind: type[LsmTable], stable: bool, stored: str) -> None:
    made = make(tmp_path, kind, stable_row_ids=stable)
    if stored != "none":
        snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0 if stored == "external" else 100))
    before = open_table(made.uri)
    assert before.index.merged_generations
    assert before.index.index_catchup
    asked = []
    report = job.apply(before, CompactOptions(), at_checkpoint(lambda: asked.append(1)))
    after = open_table(made.uri)
    check_kept(before, after, made)
    assert (report.decision, report.why, len(asked)) == ("compacted", None, 2), "after the rewrite, and for the index"
    assert (report.fragments_before, report.fragments_after) == (fragments(before), 1)
    assert (report.fragments_removed, report.fragments_added) == (fragments(before), 1)
    assert report.rows_rewritten == len(made.expected())
    assert report.bytes_written == sum(
        file.file_size_bytes for fragment in after.manifest.manifest.fragments for file in fragment.files
    )
    assert (report.version, report.commit_conflicts, report.snapshot_lost) == (after.version, 0, False)
    assert covered(after) == {"id_idx": True}
    if stored != "none":
        found = read_snapshot(after)
        assert found is not None
        assert found.stored == stored
        assert snapshot.apply(after, snapshot.SnapshotOptions(0 if stored == "external" else 100)).decision in {
            "unchanged",
            "built",  # the layout's first snapshot may have written the logs' ends down
        }
    again = job.apply(after, CompactOptions())
    assert (again.decision, again.version) == ("unchanged", after.version)
    assert again.why is not None
    made.step(6)
    merged(made)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
def test_unmerged_generations_stay_on_top(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind).step(10)
    made.close()
    before = open_table(made.uri)
    assert job.apply(before, CompactOptions()).decision == "compacted"
    assert open_table(made.uri).index.details == before.index.details
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    merged(made)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


@pytest.mark.long
def test_on_s3(bucket: tuple[str, dict[str, str]]) -> None:
    uri, options = f"{bucket[0]}/t.lance", bucket[1]
    made = Workload(1, regions=3, base_rows=60).create(uri, options).step(12)
    merged(made)
    snapshot.apply(open_table(uri, options), snapshot.SnapshotOptions(0))
    before = open_table(uri, options)
    assert job.apply(before, CompactOptions()).decision == "compacted"
    after = open_table(uri, options)
    check_kept(before, after, made)
    assert (after.index.uuid, covered(after)) == (before.index.uuid, {"id_idx": True})
    assert read_snapshot(after) is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_every_kind_of_index_answers_as_before(tmp_path: Path, stable: bool) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"), stable=stable)
    for at in range(2):
        indexed.write(uri, at)
    catchup.apply(open_table(uri), catchup.CatchupOptions())
    before = open_table(uri)
    codebooks = {read_codebook(before, entry) for entry in base_indexes(before)["vector_idx"].segments}
    assert job.apply(before, CompactOptions()).decision == "compacted"
    after = open_table(uri)
    assert after.index.details == before.index.details
    assert set(covered(after).values()) == {True}
    assert {read_codebook(after, entry) for entry in base_indexes(after)["vector_idx"].segments} == codebooks
    indexed.check_queries(uri, indexed.expected(2))
    indexed.write(uri, 2)
    assert catchup.apply(open_table(uri), catchup.CatchupOptions()).decision == "caught_up"
    assert job.apply(open_table(uri), CompactOptions(deleted_fraction=0.1)).decision == "compacted"
    indexed.check_queries(uri, indexed.expected(3))
    indexed.check_claims(open_table(uri))


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
def test_indexes_behind_keep_what_they_cover(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    made.step(6)
    merged(made, caught_up=False)
    before = open_table(made.uri)
    said = dict(before.index.index_catchup)
    behind = {fragment.id for fragment in before.manifest.manifest.fragments} - base_indexes(before)["id_idx"].covered
    assert behind
    assert job.apply(before, CompactOptions()).decision == "compacted"
    after = open_table(made.uri)
    check_kept(before, after, made)
    assert dict(after.index.index_catchup) == said
    assert covered(after) == {"id_idx": False}
    last = job.apply(after, CompactOptions())
    assert last.decision == "unchanged"
    assert last.why is not None
    assert last.why.endswith("To join more, run memwal-ops catchup first: not all is covered by id_idx.")


@pytest.mark.long
def test_segments_of_an_index_keep_fragments_apart(tmp_path: Path) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"))
    indexed.write(uri, 0)
    catchup.apply(open_table(uri), catchup.CatchupOptions())
    report = job.apply(open_table(uri), CompactOptions())
    assert report.decision == "unchanged"
    assert report.why is not None
    assert report.why.endswith("run memwal-ops catchup --max-segments 1: there are several segments of vector_idx.")
    catchup.apply(open_table(uri), catchup.CatchupOptions(max_segments=1))
    report = job.apply(open_table(uri), CompactOptions())
    assert (report.decision, report.fragments_after) == ("compacted", 1)
    indexed.check_queries(uri, indexed.expected(1))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_dry_run_writes_nothing(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    before = contents(made.uri)
    report = job.plan(open_table(made.uri), CompactOptions())
    assert contents(made.uri) == before
    table = open_table(made.uri)
    assert (report.decision, report.why, report.version) == ("dry_run", None, table.version)
    done = job.apply(table, CompactOptions())
    for name in ("fragments_before", "fragments_after", "fragments_removed", "fragments_added", "rows_rewritten"):
        assert getattr(report, name) == getattr(done, name), name
    assert job.plan(open_table(made.uri), CompactOptions()).why is not None


def test_deleted_rows_are_removed(tmp_path: Path) -> None:
    made = Workload(1, regions=1, base_rows=90).create(str(tmp_path / "t.lance"))
    made.delete(list(range(5, 30)))  # all of the first fragment's but five
    merged(made)
    before = open_table(made.uri)
    assert [one.deletion_file.num_deleted_rows for one in before.manifest.manifest.fragments] == [25, 0, 0]
    report = job.apply(before, CompactOptions(target_rows=30))
    assert (report.decision, report.fragments_removed, report.fragments_added) == ("compacted", 1, 1)
    after = open_table(made.uri)
    assert sorted(one.physical_rows for one in after.manifest.manifest.fragments) == [5, 30, 30]
    assert not any(one.HasField("deletion_file") for one in after.manifest.manifest.fragments)
    check_kept(before, after, made)


def test_all_rows_deleted(tmp_path: Path) -> None:
    made = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    made.delete(list(range(30)))
    merged(made)
    report = job.apply(open_table(made.uri), CompactOptions())
    assert report.decision == "unchanged"
    assert read_base(made.uri) == {}


def test_an_empty_table(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("val", pa.int32())])
    lance.write_dataset(schema.empty_table(), uri).initialize_mem_wal()
    before = contents(uri)
    for report in (job.plan(open_table(uri), CompactOptions()), job.apply(open_table(uri), CompactOptions())):
        assert report.why == "The base table has no fragments."
        assert (report.fragments_before, report.fragments_after, report.rows_rewritten) == (0, 0, 0)
    assert report.decision == "unchanged"
    assert contents(uri) == before


def test_a_table_that_must_not_be_written(tmp_path: Path) -> None:
    made = make(tmp_path)
    damage.set_feature_flag(made.uri, reader=False)
    before = contents(made.uri)
    for run in (job.apply, job.plan):
        with pytest.raises(UnsupportedFeatureError):
            run(open_table(made.uri), CompactOptions())
    assert contents(made.uri) == before


def test_usage() -> None:
    with pytest.raises(InvalidUsageError):
        CompactOptions(0)


@pytest.mark.parametrize("log", [False, True], ids=["plain", "with a log"])
def test_indexes_that_pylance_does_not_move_cover_all_again(tmp_path: Path, log: bool) -> None:
    """Those of zones and places have no entry for each row; the plan names them, and the run catches them up."""
    uri = str(tmp_path / "t.lance")
    numbers = pa.array(range(30))
    place = pa.StructArray.from_arrays([numbers.cast(pa.float64())] * 2, ["x", "y"])
    key = pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY)
    point = pa.field("place", place.type, metadata={"ARROW:extension:name": "geoarrow.point"})
    rows = pa.Table.from_arrays([numbers, place], schema=pa.schema([key, point]))
    dataset = lance.write_dataset(rows, uri, max_rows_per_file=10)
    dataset.create_scalar_index("id", "ZONEMAP", name="zones")
    dataset.create_scalar_index("place", "RTREE", name="places")
    dataset.create_scalar_index("id", "BTREE", name="keys")
    if log:
        lance.dataset(uri).initialize_mem_wal()
    lance.dataset(uri).delete("id % 3 = 0")
    small = run_job(uri, "compact", apply=False, max_bytes=1000)
    assert small.to_json()["indexes_behind"] == ["places", "zones"]
    assert "INDEXES BEHIND: places, zones" in small.describe()
    plan = run_job(uri, "compact", apply=False)
    assert (plan.to_json()["indexed_again"], plan.to_json()["indexes_behind"]) == (["places", "zones"], [])
    assert "INDEXED AGAIN: places, zones" in plan.describe()
    report = run_job(uri, "compact")
    assert (report.decision, report.exit_code) == ("compacted", 0)
    assert (report.to_json()["indexed_again"], report.to_json()["indexes_behind"]) == (["places", "zones"], [])
    table = open_table(uri)
    assert isinstance(table, Table)
    assert all(coverage(index.covered, table.manifest).complete for index in base_indexes(table).values())
    assert lance.dataset(uri).count_rows("id = 4") == 1
    assert run_job(uri, "compact").decision == "unchanged"


def test_an_index_that_cannot_be_opened_keeps_what_it_covers(tmp_path: Path) -> None:
    table = Workload(41, regions=1, base_rows=60).create(str(tmp_path / "t.lance")).step(8)
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    indices = tmp_path / "t.lance" / "_indices"
    indices.rename(tmp_path / "away")
    version = open_table(table.uri).version
    with pytest.raises(IndexesBehindError, match="id_idx"):
        job.apply(open_table(table.uri), CompactOptions())
    assert open_table(table.uri).version == version
    (tmp_path / "away").rename(indices)
    assert job.apply(open_table(table.uri), CompactOptions()).decision == "compacted"
    after = open_table(table.uri)
    assert coverage(base_indexes(after)["id_idx"].covered, after.manifest).complete


# -- pylance's clean-up in the middle of its own commit


def auto_cleaned(tmp_path: Path) -> LsmTable:
    """A table of which pylance keeps no old version at all, from its next own commit on."""
    made = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    for _ in range(2):
        made.step(2)
        made.flush()
        assert merge.apply(open_table(made.uri), merge.MergeOptions()).decision == "merged"
    lance.dataset(made.uri).update_config({"lance.auto_cleanup.interval": "1", "lance.auto_cleanup.older_than": "0s"})
    return made


def test_auto_cleanup_takes_no_version_that_is_held(tmp_path: Path) -> None:
    made = auto_cleaned(tmp_path)
    table = open_table(made.uri)
    hold = take_hold(table, table.version, timedelta(hours=1))
    made.step(2)
    made.flush()
    merge.apply(table, merge.MergeOptions())
    before = contents(made.uri)
    for act in (job.plan, job.apply):
        with pytest.raises(UnsupportedFeatureError, match=f"hold {hold.number} of"):
            act(open_table(made.uri), CompactOptions())
    assert contents(made.uri).keys() == before.keys()
    read_base(made.uri, version=hold.versions[0])
    release_hold(table, hold.number)
    assert job.apply(open_table(made.uri), CompactOptions()).decision == "compacted"
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


@pytest.mark.parametrize("where", ["data/sub", "_indices/a/b/sub"])
def test_auto_cleanup_takes_nothing_behind_links(tmp_path: Path, where: str) -> None:
    made = auto_cleaned(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.lance").write_bytes(b"another's")
    os.utime(elsewhere / "a.lance", (0, 0))
    link = tmp_path / "t.lance" / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(UnsupportedFeatureError, match=f"symbolic link {where}"):
        job.apply(open_table(made.uri), CompactOptions())
    assert (elsewhere / "a.lance").read_bytes() == b"another's"
    link.unlink()
    assert job.apply(open_table(made.uri), CompactOptions()).decision == "compacted"


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("healed_by", ["compact", "merge", "snapshot"])
def test_a_mem_wal_index_with_a_fragment_bitmap(tmp_path: Path, kind: type[LsmTable], healed_by: str) -> None:
    made = kind(1, regions=1, base_rows=40, stable_row_ids=True).create(str(tmp_path / "t.lance"))
    made.step(6)
    made.close()
    entry, _ = small.index_entry(made.uri)  # with an empty bitmap, as earlier releases created the index
    dataset = lance.dataset(made.uri)
    lance.LanceDataset.commit(
        made.uri, lance.LanceOperation.CreateIndex([entry], [entry]), read_version=dataset.version
    )
    rows = lance.dataset(made.uri).to_table().slice(0, 5)
    new = rows.set_column(0, rows.schema.field(0), pa.array(range(10_000, 10_005), rows.schema.field(0).type))
    lance.dataset(made.uri).merge_insert(rows.schema.names[0]).when_not_matched_insert_all().execute(new)
    assert _mem_wal_bitmap(made.uri) == {fragments(open_table(made.uri)) - 1}
    before = read_spec(made.uri)
    if healed_by == "merge":
        assert merge.apply(open_table(made.uri), merge.MergeOptions()).decision == "merged"
    elif healed_by == "snapshot":
        assert snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions()).decision == "built"
    if healed_by != "compact":
        assert not _mem_wal_bitmap(made.uri)
    assert job.apply(open_table(made.uri), CompactOptions()).decision == "compacted"
    assert not _mem_wal_bitmap(made.uri)
    assert_same(read_spec(made.uri), before, seed=made.seed)


def _mem_wal_bitmap(uri: str) -> frozenset[int]:
    indexes = open_table(uri).manifest.indexes
    assert indexes is not None
    entry = find_memwal_entry(indexes)
    assert entry is not None
    return decode_fragment_bitmap(entry.fragment_bitmap)


def test_an_error_after_a_commit_names_the_version(tmp_path: Path) -> None:
    """The bitmap is removed in one version; then an index turns out not to open."""
    made = make(tmp_path, Workload, stable_row_ids=True)
    entry, _ = small.index_entry(made.uri)
    version = lance.dataset(made.uri).version
    lance.LanceDataset.commit(made.uri, lance.LanceOperation.CreateIndex([entry], [entry]), read_version=version)
    (tmp_path / "t.lance" / "_indices").rename(tmp_path / "away")
    with pytest.raises(IndexesBehindError) as failed:
        run_job(made.uri, "compact")
    assert lance.dataset(made.uri).version == version + 2
    assert failed.value.remedy.startswith(f"What this run published before stays: revision {version + 2}.")


def test_bytes_of_dropped_columns_are_known_and_left_out(tmp_path: Path) -> None:
    """Columns of an old and a new data file are dropped; another fragment has none of them."""
    uri, width = str(tmp_path / "t.lance"), 64
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(range(1000 * width), pa.float32()), width)
    lance.write_dataset(pa.table({"id": range(1000), "old": vectors}), uri)
    dataset = lance.dataset(uri)
    dataset.add_columns({"kept": "id + 1", "gone": "id * 2"})
    dataset.drop_columns(["old", "gone"])
    dataset.create_scalar_index("id", "BTREE")
    rows = dataset.to_table()
    size = sum(one.file_size_bytes or 0 for part in dataset.get_fragments() for one in part.data_files())
    found = run_job(uri, "inspect").to_json()
    assert 1000 * width * 4 < found["dropped_column_bytes"] < size
    plan = run_job(uri, "compact", apply=False)
    [need] = plan.needs()
    assert (plan.fragments_removed, plan.dropped_column_bytes) == (1, found["dropped_column_bytes"])
    assert "of dropped columns" in need.what
    assert run_job(uri, "compact").bytes_written < size - plan.dropped_column_bytes + 4096
    assert lance.dataset(uri).to_table() == rows
    assert lance.dataset(uri).scanner(filter="id = 7").to_table().num_rows == 1
    after = run_job(uri, "inspect")
    assert (after.dropped_column_bytes, after.most_data_files) == (0, 1)
    assert run_job(uri, "compact").decision == "unchanged"


def test_many_small_files_of_columns_are_joined(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(100)}), uri)
    for number in range(9):
        assert run_job(uri, "compact", apply=False).fragments_removed == (number == 8)
        lance.dataset(uri).add_columns({f"c{number}": f"id * {number}"})
    rows = lance.dataset(uri).to_table()
    assert "up to 10 data files" in run_job(uri, "inspect").describe()
    assert run_job(uri, "compact").decision == "compacted"
    [part] = lance.dataset(uri).get_fragments()
    assert len(part.data_files()) == 1
    assert lance.dataset(uri).to_table() == rows
