"""The snapshot job: every region's state, in the table's layout, and nothing else changed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

import lance
import pytest
from lance.file import LanceFileReader

from memwal_ops import open_table
from memwal_ops.errors import CommitConflictError, InvalidUsageError, ObjectNotFoundError
from memwal_ops.formats.lance import table as tables
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot, snapshot_path
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.snapshot import SnapshotOptions
from memwal_ops.formats.lance.layouts import SHARD
from memwal_ops.memwal import RegionWriter, read
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.counting_store import CountingStore
from tests.support.stores import Beside, LyingStore
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.table import Table
    from tests.support.tables.lsm_table import LsmTable


@pytest.fixture(params=["shard", "region", "shard on s3", "region on s3"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> LsmTable:
    kind, *on = request.param.split(" on ")
    uri, options = str(tmp_path / "t.lance"), None
    if on:
        bucket, options = request.getfixturevalue("bucket")
        uri = f"{bucket}/t.lance"
    table = {"shard": Workload, "region": RegionLayout}[kind](1, regions=3, base_rows=60).create(uri, options)
    table.step(12)
    table.flush(table.regions[0])
    return table


def opened(made: LsmTable) -> Table:
    return open_table(made.uri, made.storage_options)


def wal_ends(made: LsmTable) -> dict[UUID, int]:
    """The last WAL entry of each region, from a listing."""
    files = Files(made.uri, made.storage_options)
    return {
        UUID(region): max(
            wire.from_bit_reversed(path.rsplit("/", 1)[-1]) for path in files.listing(f"_mem_wal/{region}/wal")
        )
        for region in made.regions
        if files.listing(f"_mem_wal/{region}/wal")
    }


@pytest.mark.long
@pytest.mark.req(
    *("S0-015", "S0-020", "S0-063", "S0-064", "S0-069", "S0-071", "S0-072", "S0-073", "S0-104"),
    *("S0-169", "S0-170", "S0-173", "S0-174"),
)
@pytest.mark.parametrize(("threshold", "stored"), [(100, "inline"), (3, "inline"), (2, "external"), (0, "external")])
def test_all_regions_and_where_they_stand(made: LsmTable, threshold: int, stored: str) -> None:
    before = opened(made)
    rows = read_base(made.uri, made.storage_options)
    report = snapshot.apply(before, SnapshotOptions(threshold))
    assert (report.decision, report.num_regions, report.stored) == ("built", 3, stored)
    table = opened(made)
    assert table.version == report.version == before.version + 1
    found = read_snapshot(table)
    assert found is not None
    assert (found.stored, table.index.num_regions) == (stored, 3)
    assert [str(row.region_id) for row in found.regions] == sorted(made.regions)
    for row in found.regions:
        manifest = table.region(row.region_id).latest()
        assert row.region_spec_id == manifest.region_spec_id
        if table.layout is SHARD:
            assert row.state is None
            continue
        assert row.state is not None
        assert row.state.version == manifest.version
        assert row.state.writer_epoch == manifest.writer_epoch
        assert row.state.replay_after_wal_id == manifest.replay_after_wal_id
        assert row.state.wal_id_last_seen == manifest.wal_id_last_seen
        assert row.state.current_generation == manifest.current_generation
        assert [(one.generation, one.path) for one in row.state.flushed_generations] == [
            (one.generation, one.path) for one in manifest.flushed_generations
        ]
    external = table.store.head(snapshot_path(table.index.uuid))
    assert (external is not None) == (stored == "external")
    assert read_base(made.uri, made.storage_options) == rows
    made.close()


@pytest.mark.long
@pytest.mark.req("S0-059", "S0-132", "S0-171", "S0-172", "S0-177")
def test_the_end_of_the_log_is_written_down(made: LsmTable) -> None:
    behind = {
        region: manifest
        for region, last in wal_ends(made).items()
        if (manifest := opened(made).region(region).latest()).wal_id_last_seen != last
    }
    assert behind
    report = snapshot.apply(opened(made), SnapshotOptions())
    assert report.wal_hints_updated == len(behind)
    for region, last in wal_ends(made).items():
        newest = opened(made).region(region).latest(checked=True)
        assert newest.wal_id_last_seen == last
        if region in behind:
            old = behind[region]
            assert newest == replace(old, version=old.version + 1, wal_id_last_seen=last)
    assert snapshot.apply(opened(made), SnapshotOptions()).wal_hints_updated == 0
    made.step(6)
    made.close()
    merge.apply(opened(made), merge.MergeOptions())
    assert_same(read_base(made.uri, made.storage_options), made.expected())


@pytest.mark.long
def test_nothing_is_committed_when_nothing_moved(made: LsmTable) -> None:
    made.close()
    snapshot.apply(opened(made), SnapshotOptions())
    before = opened(made)
    report = snapshot.apply(before, SnapshotOptions())
    assert (report.decision, report.version, report.wal_hints_updated) == ("unchanged", before.version, 0)
    assert opened(made).version == before.version
    assert snapshot.apply(before, SnapshotOptions(1)).decision == "built", "it is to stand elsewhere"
    assert not snapshot.plan(opened(made), SnapshotOptions()).is_current
    assert snapshot.plan(opened(made), SnapshotOptions(1)).is_current
    assert snapshot.apply(opened(made), SnapshotOptions(1)).decision == "unchanged"


@pytest.mark.sampled(1)
def test_a_dry_run_writes_nothing(made: LsmTable) -> None:
    files = Files(made.uri, made.storage_options)
    before = files.listing("")
    report = snapshot.plan(opened(made), SnapshotOptions(1))
    assert (report.decision, report.num_regions, report.stored) == ("dry_run", 3, "external")
    assert not report.is_current
    assert files.listing("") == before
    made.close()


@pytest.mark.req("S0-070")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("threshold", [100, 0])
def test_no_regions(tmp_path: Path, kind: type[LsmTable], threshold: int) -> None:
    uri = str(tmp_path / "t.lance")
    kind(1, regions=1, base_rows=5).create(uri)
    shutil.rmtree(f"{uri}/_mem_wal", ignore_errors=True)
    report = snapshot.apply(open_table(uri), SnapshotOptions(threshold))
    assert (report.decision, report.num_regions, report.stored) == ("built", 0, "inline")
    found = read_snapshot(open_table(uri))
    assert found is not None
    assert found.regions == ()
    assert found.rows.schema.names[0] in {"region_id", "shard_id"}
    assert snapshot.apply(open_table(uri), SnapshotOptions(threshold)).decision == "unchanged"


@pytest.mark.sampled(1)
def test_a_regions_query_lists_nothing(made: LsmTable) -> None:
    snapshot.apply(opened(made), SnapshotOptions(1))
    table = opened(made)
    store = CountingStore(table.store)
    found = read_snapshot(replace(table, store=store))
    assert found is not None
    assert len(found.regions) == 3
    assert store.calls == {"get": 1}
    made.close()


def test_region_fields(tmp_path: Path) -> None:
    """A table that is routed by bucket: the values stand in the manifests as pylance's own writer would put them."""
    made = Workload(1, regions=2, base_rows=10)
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(made.schema.empty_table(), uri).initialize_mem_wal(bucket_column="id", num_buckets=4)
    (spec,) = open_table(uri).index.region_specs
    (field,) = spec.fields
    files = Files(uri)
    for number, region in enumerate(made.regions):
        entry = wire.encode([(1, field.field_id.encode()), (2, number.to_bytes(4, "little"))])
        message = wire.encode([(1, 1), (2, 1), (6, 1), (10, spec.spec_id), wire.uuid_field(11, region), (14, entry)])
        files.put(f"_mem_wal/{region}/manifest/{wire.bit_reversed(1)}.binpb", message)
    snapshot.apply(open_table(uri), SnapshotOptions())
    found = read_snapshot(open_table(uri))
    assert found is not None
    values = {str(row.region_id): (row.region_spec_id, row.fields[field.field_id]) for row in found.regions}
    assert values == {region: (spec.spec_id, number) for number, region in enumerate(made.regions)}


def folder_of(uri: str, number: int) -> str:
    return f"{uri}/_mem_wal/00000000-0000-4000-8000-{number:012d}"


def test_what_cannot_be_read_is_named_and_the_others_are_stored(tmp_path: Path) -> None:
    made = Workload(1, regions=4, base_rows=60).create(str(tmp_path / "t.lance"))
    for region in made.regions:
        made.put([made.regions.index(region)])
    made.close()
    uri = made.uri
    damage.truncate_region_manifest(uri, made.regions[0])
    snapshot_gap = made.regions[1]
    made.put([1])
    made.flush(snapshot_gap)
    damage.remove_region_manifest_version(uri, snapshot_gap, 2)
    os.makedirs(folder_of(uri, 1))
    os.makedirs(f"{folder_of(uri, 2)}/wal")
    (tmp_path / "t.lance/_mem_wal/notes.txt").write_text("x")
    (tmp_path / "t.lance/_mem_wal/no-uuid").mkdir()
    (tmp_path / "t.lance/_mem_wal/no-uuid/file").write_text("x")
    (tmp_path / "t.lance/_mem_wal" / made.regions[2] / "lost.tmp").write_text("x")
    (tmp_path / "t.lance/_mem_wal" / made.regions[3] / "manifest/copy.binpb.bak").write_text("x")
    open(f"{folder_of(uri, 2)}/wal/{wire.bit_reversed(1)}.arrow", "w").close()
    report = snapshot.apply(open_table(uri), SnapshotOptions())
    assert report.decision == "built"
    found = read_snapshot(open_table(uri))
    assert found is not None
    assert [str(row.region_id) for row in found.regions] == sorted(made.regions[2:])
    named = {one.path.rsplit("/", 1)[-1]: (one.reason, one.is_fault) for one in report.skipped}
    assert named == {
        made.regions[0]: ("region_manifest_corrupt", True),
        snapshot_gap: ("region_manifest_gap", True),
        folder_of(uri, 2).rsplit("/", 1)[-1]: ("region_manifest_corrupt", True),
        "notes.txt": ("stray", False),
        "no-uuid": ("stray", False),
        folder_of(uri, 1).rsplit("/", 1)[-1]: ("unclaimed", False),
        "lost.tmp": ("stray", False),
        "copy.binpb.bak": ("stray", False),
    }
    assert report.exit_code == 10
    again = snapshot.apply(open_table(uri), SnapshotOptions())
    assert again.decision == "unchanged"
    assert again.skipped == report.skipped


def test_a_damaged_snapshot_is_replaced(tmp_path: Path) -> None:
    made = Workload(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance")).step(4)
    made.close()
    snapshot.apply(open_table(made.uri), SnapshotOptions(0))
    table = open_table(made.uri)
    for damaged in (b"junk", None):
        path = snapshot_path(table.index.uuid)
        table.store.delete_many([path])
        if damaged is not None:
            table.store.put(path, damaged)
        assert snapshot.apply(open_table(made.uri), SnapshotOptions(0)).decision == "built"
        table = open_table(made.uri)
        assert read_snapshot(table) is not None


def test_a_snapshot_that_pylance_lost_is_stored_again(tmp_path: Path) -> None:
    """Its own commits may give the MemWAL index another id, and with it the file's name (landmine 25)."""
    made = Workload(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance")).step(8)
    made.close()
    merge.apply(open_table(made.uri), merge.MergeOptions())
    snapshot.apply(open_table(made.uri), SnapshotOptions(0))
    lance.dataset(made.uri).optimize.optimize_indices()
    assert read_snapshot(open_table(made.uri)) is None
    assert snapshot.apply(open_table(made.uri), SnapshotOptions(0)).decision == "built"
    found = read_snapshot(open_table(made.uri))
    assert found is not None
    assert len(found.regions) == 2


def test_older_rows_never_replace_newer_ones(tmp_path: Path) -> None:
    """A builder that is stalled after it looked, while another one looks later and publishes first."""
    made = RegionLayout(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance")).step(4)
    table = open_table(made.uri)

    def other() -> None:
        made.step(6)
        made.flush()
        assert snapshot.apply(open_table(made.uri), SnapshotOptions()).decision == "built"

    slow = Beside(table.store, "put_if_absent", lambda path, _: path.startswith("_versions"), other)
    report = snapshot.apply(replace(table, store=slow), SnapshotOptions())
    assert report.commit_conflicts == 1
    assert report.decision == "unchanged", "what the other one said is what this one sees when it looks again"
    newest = open_table(made.uri)
    found = read_snapshot(newest)
    assert found is not None
    for row in found.regions:
        assert row.state is not None
        assert row.state.version == newest.region(row.region_id).latest().version


@pytest.mark.req("S0-105", "S0-178")
def test_what_each_form_costs_and_how_stale_it_is(tmp_path: Path) -> None:
    """Inline rows come with the table; a file is one request, and gives single columns. Both are as old as the job."""
    made = RegionLayout(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance")).step(6)
    for threshold, requests in ((100, 0), (0, 1)):
        assert snapshot.apply(open_table(made.uri), SnapshotOptions(threshold)).decision == "built"
        table = open_table(made.uri)
        store = CountingStore(table.store)
        found = read_snapshot(replace(table, store=store))
        assert found is not None
        assert sum(store.calls.values()) == requests
    path = f"{made.uri}/{snapshot_path(open_table(made.uri).index.uuid)}"
    (column,) = LanceFileReader(path, columns=["version"]).read_all().to_table().columns
    assert len(column) == 2

    made.put([1, 3])
    made.flush()
    stale, newest = read(made.uri, "snapshot").scan().to_table(), read(made.uri).scan().to_table()
    assert not stale.sort_by("id").equals(newest.sort_by("id")), "no snapshot was taken since"
    assert snapshot.apply(open_table(made.uri), SnapshotOptions(0)).decision == "built"
    assert read(made.uri, "snapshot").scan().to_table().sort_by("id").equals(newest.sort_by("id"))


def test_rows_of_a_layout_that_shows_meanwhile_are_read_again(tmp_path: Path) -> None:
    """Where no region has an entry yet, the layout is taken for pylance's; then the first entry shows it."""
    uri = RegionLayout(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).uri
    assert snapshot.apply(open_table(uri), SnapshotOptions()).decision == "built"
    table = open_table(uri)
    assert table.layout is SHARD
    region = str(table.regions.region_ids[0])

    def other() -> None:
        RegionWriter(uri, region).put(lance.dataset(uri).to_table(limit=1))
        lance.dataset(uri).update_config({"of": "the owner"})

    slow = Beside(table.store, "put_if_absent", lambda path, _: path.startswith("_versions"), other)
    assert snapshot.apply(replace(open_table(uri), store=slow), SnapshotOptions(0)).commit_conflicts == 1
    found = read_snapshot(open_table(uri))
    assert found is not None
    assert [str(row.region_id) for row in found.regions] == [region]


def test_a_hint_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    made.put([1])
    table = open_table(made.uri)

    class Unwritable(StoreWrapper):
        def put_if_absent(self, path: str, data: bytes) -> bool:
            if "/manifest/" in path:
                raise CommitConflictError("not now")
            return super().put_if_absent(path, data)

    report = snapshot.apply(replace(table, store=Unwritable(table.store)), SnapshotOptions())
    assert (report.decision, report.wal_hints_updated) == ("built", 0)
    made.close()


def test_a_store_where_others_always_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).step(2)
    made.close()
    monkeypatch.setattr("memwal_ops.core.commit_retry._BACKOFF_SECONDS", 0)
    monkeypatch.setattr("memwal_ops.formats.lance.commit.commit.refuse_if_not_newest", lambda *_: None)

    class Busy(StoreWrapper):
        def put_if_absent(self, path: str, data: bytes) -> bool:
            if path.startswith("_versions"):
                lance.dataset(made.uri).update_metadata({"a": str(os.urandom(4))})
            return super().put_if_absent(path, data)

    table = open_table(made.uri)
    real_load = tables.load
    busy = replace(table, store=Busy(table.store))
    monkeypatch.setattr(
        "memwal_ops.formats.lance.table.load", lambda at, _, *naming: real_load(at, busy.store, *naming)
    )
    with pytest.raises(CommitConflictError):
        snapshot.apply(busy, SnapshotOptions(0))
    assert not [path for path in Files(made.uri).listing("_indices") if path.endswith("/index.lance")]
    assert open_table(made.uri).index.num_regions == 0


def test_a_store_that_contradicts_itself_keeps_what_its_version_names(tmp_path: Path) -> None:
    """The put landed, the answer says that the name was taken, and a stale read says that nothing is there.

    Whether a version names the snapshot's file is not known then, so that it must stay.
    """
    made = Workload(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance")).step(4)
    made.close()
    table = open_table(made.uri)
    landed: list[str] = []
    hidden: list[str] = []

    def put_if_absent(path: str, data: bytes) -> bool:
        if not path.startswith("_versions/") or landed:
            return bool(table.store.put_if_absent(path, data))
        assert table.store.put_if_absent(path, data)
        landed.append(path)
        return False

    def get(path: str) -> bytes:
        if path in landed and path not in hidden:
            hidden.append(path)
            raise ObjectNotFoundError(path)
        return bytes(table.store.get(path))

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent, get=get))
    report = snapshot.apply(lying, SnapshotOptions(0))
    assert hidden == landed != []
    assert (report.commit_conflicts, report.decision) == (1, "unchanged"), "it landed, and the next look finds it"
    newest = open_table(made.uri)
    assert newest.version == table.version + 1
    assert Files(made.uri).size(snapshot_path(newest.index.uuid)) > 0
    found = read_snapshot(newest)
    assert found is not None
    assert found.rows.num_rows == len(made.regions)
    transaction = f"_transactions/{newest.manifest.manifest.transaction_file}"
    assert Files(made.uri).size(transaction) > 0


def test_usage() -> None:
    with pytest.raises(InvalidUsageError):
        SnapshotOptions(-1)
