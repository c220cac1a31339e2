"""What a snapshot asks of the store, and that it notices what moved without asking for more."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.generations.wal import wal_entry_path
from memwal_ops.formats.lance.indexes.snapshots import known_regions, read_snapshot
from memwal_ops.formats.lance.jobs import snapshot
from memwal_ops.formats.lance.jobs.snapshot import SnapshotOptions
from memwal_ops.formats.lance.layouts import REGION, SHARD, Layout
from memwal_ops.formats.lance.wire.names import region_folder
from memwal_ops.memwal import RegionWriter
from tests.support.counting_store import CountingStore
from tests.support.tables.many_regions import make_regions
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload

REGIONS = 40


def calls(uri: str) -> tuple[str, int]:
    """What a run decided and how many calls it made."""
    table = open_table(uri)
    store = CountingStore(table.store)
    report = snapshot.apply(replace(table, store=store), SnapshotOptions(10))
    return report.decision, store.calls.total()


@pytest.mark.parametrize("layout", [SHARD, REGION])
def test_requests_per_region(tmp_path: Path, layout: Layout) -> None:
    uri = str(tmp_path / "t.lance")
    make_regions(uri, REGIONS, layout)
    decision, first = calls(uri)
    assert decision == "built"
    assert first <= 4 * REGIONS + 30
    decision, again = calls(uri)
    assert decision == "unchanged"
    assert again <= 3 * REGIONS + 5, "two, and on local files a third that is none"


@pytest.mark.long
@pytest.mark.parametrize("layout", [SHARD, REGION])
def test_requests_per_region_on_s3(bucket: tuple[str, dict[str, str]], layout: Layout) -> None:
    uri = f"{bucket[0]}/t.lance"
    make_regions(uri, REGIONS, layout, bucket[1])
    snapshot.apply(open_table(uri, bucket[1]), SnapshotOptions(10))
    table = open_table(uri, bucket[1])
    store = CountingStore(table.store)
    assert snapshot.apply(replace(table, store=store), SnapshotOptions(10)).decision == "unchanged"
    assert store.calls.total() <= 2 * REGIONS + 5


@pytest.mark.parametrize("layout", [SHARD, REGION])
def test_what_moved_is_seen(tmp_path: Path, layout: Layout) -> None:
    """A region whose row is taken from the last snapshot must not have moved."""
    uri = str(tmp_path / "t.lance")
    table = make_regions(uri, 4, layout)
    snapshot.apply(table, SnapshotOptions())
    ids = table.regions.region_ids
    flushed = table.region(ids[0])
    old = flushed.latest()
    assert flushed.commit(replace(old, version=old.version + 1, current_generation=9, writer_epoch=7))
    for entry in (3, 4):
        table.store.put(wal_entry_path(ids[1], entry, layout), b"entry")
    report = snapshot.apply(open_table(uri), SnapshotOptions())
    assert report.wal_hints_updated == 1
    assert open_table(uri).region(ids[1]).latest().wal_id_last_seen == 4
    found = read_snapshot(open_table(uri))
    assert found is not None
    if layout is REGION:
        assert report.decision == "built"
        states = {row.region_id: row.state for row in found.regions}
        assert states[ids[0]] is not None
        assert (states[ids[0]].current_generation, states[ids[0]].writer_epoch) == (9, 7)  # type: ignore[union-attr]
        assert states[ids[1]].wal_id_last_seen == 4  # type: ignore[union-attr]
    else:
        assert report.decision == "unchanged", "these rows say who the regions are, and that did not change"
    again = snapshot.apply(open_table(uri), SnapshotOptions())
    assert (again.decision, again.wal_hints_updated) == ("unchanged", 0)


def test_collected_manifest_versions_are_no_trap(tmp_path: Path) -> None:
    """Versions between the snapshot's and the newest are gone: nothing follows the one it knows."""
    uri = str(tmp_path / "t.lance")
    table = make_regions(uri, 1, REGION)
    snapshot.apply(table, SnapshotOptions())
    region = table.region(table.regions.region_ids[0])
    for _ in range(5):
        assert region.commit(replace(region.latest().next(), writer_epoch=region.latest().writer_epoch + 1))
    table.store.delete_many([region.path(version) for version in range(1, 8)])
    assert snapshot.apply(open_table(uri), SnapshotOptions()).decision == "built"
    found = read_snapshot(open_table(uri))
    assert found is not None
    assert found.regions[0].state is not None
    assert found.regions[0].state.version == 8


def test_a_region_that_was_created_again_is_read(tmp_path: Path) -> None:
    """Its folder was removed, and it has as many manifests as before: the row is not that of the old region."""
    made = RegionLayout(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    region = UUID(made.regions[0])
    rows = lance.dataset(made.uri).to_table().slice(0, 1)
    for _ in range(2):
        shutil.rmtree(Path(made.uri, region_folder(region)), ignore_errors=True)
        with RegionWriter(made.uri, region) as writer:
            writer.put(rows)
        if read_snapshot(open_table(made.uri)) is None:
            snapshot.apply(open_table(made.uri), SnapshotOptions())
    table = open_table(made.uri)
    newest = table.region(region).latest()
    before = read_snapshot(table)
    assert before is not None and before.regions[0].state is not None
    assert before.regions[0].state.version == newest.version
    assert snapshot.apply(table, SnapshotOptions()).decision == "built"
    found = read_snapshot(open_table(made.uri))
    assert found is not None and found.regions[0].state is not None
    assert [one.path for one in found.regions[0].state.flushed_generations] == [newest.flushed_generations[0].path]
    assert snapshot.apply(open_table(made.uri), SnapshotOptions()).decision == "unchanged"


def test_a_snapshot_by_another_release(tmp_path: Path) -> None:
    """Without our note of the manifests' versions nothing is taken from it."""
    made = Workload(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance")).step(6)
    made.close()
    snapshot.apply(open_table(made.uri), SnapshotOptions())
    table = open_table(made.uri)
    found = read_snapshot(table)
    assert found is not None
    assert found.rows.column_names == ["shard_id", "shard_spec_id"]
    assert {row.region_id for row in found.regions} == {UUID(region) for region in made.regions}
    bare = replace(found, rows=found.rows.replace_schema_metadata(None))
    assert known_regions(bare) == {}
    assert set(known_regions(found)) == {UUID(region) for region in made.regions}
