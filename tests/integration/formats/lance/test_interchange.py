"""One table, pylance and memwal-ops: what either writes the other reads, merges and goes on with, in both layouts."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable, LsmPointLookupPlanner

from memwal_ops import open_table, run_job
from memwal_ops.memwal import read
from tests.support.layout_migrations import OTHER, Made, base_rows, empty, filled, keys, migrate, rows, scanned, writer
from tests.support.tables.reading import read_lsm, read_spec, snapshots

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.parametrize("layout", [*OTHER])


def reads_alike(made: Made) -> None:
    """Of what is flushed: pylance's scan and point lookup, the specification by hand, and the product's reader."""
    wanted = {(key,): {"id": key, "val": value} for key, value in made.model.items()}
    assert read_lsm(made.uri) == read_spec(made.uri) == wanted
    assert scanned(made.uri, "manifests") == made.model
    planner = LsmPointLookupPlanner(lance.dataset(made.uri), snapshots(made.uri), ["id"])
    asked = [*made.model][:2] + [*made.model][-2:] + [999_999]
    for key in asked:
        plan = planner.plan_lookup(pa.array([key], pa.int64()))
        found = [row["val"] for row in plan.to_table().to_pylist()]
        assert found == ([made.model[key]] if key in made.model else [])
    got = read(made.uri, "manifests").get(keys(*asked)).to_pydict()
    assert dict(zip(got["id"], got["val"], strict=True)) == {key: made.model[key] for key in asked if key in made.model}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("migrated", [False, True], ids=["as made", "migrated"])
def test_what_either_writes_both_read_and_merge(tmp_path: Path, layout: str, migrated: bool) -> None:
    if migrated:
        made = filled(str(tmp_path / "t.lance"), OTHER[layout], idle=False)
        assert migrate(made.uri, layout).decision == "migrated"
    else:
        made = empty(str(tmp_path / "t.lance"), layout)
    assert open_table(made.uri).layout.name == (layout if migrated else "shard")
    region = made.region()
    for number in range(2):
        with writer(made.uri, layout, region) as one:
            made.put(one, {1: 10.0 + number, 700 + number: 1.0})
            made.delete(one, 8 + number)
    reads_alike(made)
    # pylance writes to the base beside, and merges the first generation; memwal-ops merges the second one.
    added = rows({800: 8.0, 7: 8.5})
    upsert = lance.dataset(made.uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    upsert.execute(added)
    made.model |= {800: 8.0, 7: 8.5}
    reads_alike(made)
    found = open_table(made.uri).region(uuid.UUID(region)).latest().flushed_generations[0]
    generation = lance.dataset(f"{made.uri}/_mem_wal/{region}/{found.path}").to_table()
    live = generation.filter(pa.compute.invert(generation["_tombstone"].combine_chunks())).drop_columns(["_tombstone"])
    dead = generation.filter(generation["_tombstone"].combine_chunks()).select(["id"])
    lance.dataset(made.uri).delete(f"id IN ({', '.join(map(str, dead['id'].to_pylist()))})")
    upsert = lance.dataset(made.uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    upsert.mark_sstables_as_compacted([CompactedSsTable(region, 1)]).execute(live)
    assert open_table(made.uri).index.merged_generations[uuid.UUID(region)] == 1
    reads_alike(made)
    assert run_job(made.uri, "merge").decision == "merged"
    assert base_rows(made.uri) == made.model
    reads_alike(made)
    lance.dataset(made.uri).optimize.compact_files()
    lance.dataset(made.uri).create_scalar_index("val", "BTREE")
    assert migrate(made.uri, OTHER[layout]).decision == "migrated"
    assert base_rows(made.uri) == scanned(made.uri) == made.model
    assert lance.dataset(made.uri).to_table(filter="val = 8.5")["id"].to_pylist() == [7]
