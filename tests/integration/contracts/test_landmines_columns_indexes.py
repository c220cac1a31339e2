"""What pylance does with columns and indexes beside a MemWAL: asserted AS IT IS, as in test_landmines.py."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileReader
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, ShardSnapshot

from tests.integration.contracts.small import (
    REGION,
    SCHEMA,
    field_ids,
    flush,
    index_entry,
    make,
    progress,
    rows,
    upsert,
)  # fmt: skip
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import PRIMARY_KEY


def test_07_index_details_are_not_to_be_had(tmp_path: Path) -> None:
    """`mem_wal_index_details()` shows neither progress nor catch-up nor snapshots.

    For us: the protobufs are decoded by ourselves.
    """
    uri = make(tmp_path)
    upsert(lance.dataset(uri), rows(1, 2, 1), 3)
    shown = lance.dataset(uri).mem_wal_index_details()
    assert set(shown or {}) == {
        "num_shards", "maintained_indexes", "maintain_all_indexes", "writer_config_defaults", "sharding_specs",
    }  # fmt: skip
    assert progress(uri) == {REGION: 3}
    assert not [n for n in dir(lance.mem_wal) if "manifest" in n.lower()]


def test_08_the_scanner_needs_a_pk_index(tmp_path: Path) -> None:
    """`LsmScanner.from_snapshots` and the point lookup refuse a generation without `_pk_index/`.

    For us: our region writer writes one; generations of other writers (and of pylance 7 and 8) have none, and are
    read by our own reader.
    """
    table = RegionLayout(1, base_rows=10, regions=1).create(f"{tmp_path}/t.lance")
    table.put([1, 1])
    table.flush()
    (region,) = table.regions
    name = wire.region_manifest(Files(table.uri), region).generations[1]
    snapshot = ShardSnapshot(region).with_current_generation(2).with_sstable(1, name)
    with pytest.raises(OSError, match="_pk_index"):
        LsmScanner.from_snapshots(lance.dataset(table.uri), [snapshot]).to_table()


def test_08_the_point_lookup_gives_an_older_row_of_one_generation(tmp_path: Path) -> None:
    """Where no deletion vector hides the older row of a key, the point lookup does not give the newest.

    For us: the newest row of a key is found by (generation, row address), never by this planner.
    """
    uri = make(tmp_path, rows(0, 1))
    path = Path(flush(uri, rows(1, 2, 1), rows(1, 2, 2)))
    manifest_path = path / wire.newest_manifest(Files(str(path)))[0]
    manifest = wire.parse_manifest(manifest_path.read_bytes())
    bare = []
    for f in manifest.fields:  # fragments (2) without their deletion file (3)
        if f.number == 2 and isinstance(f.value, bytes):
            f = wire.Field(2, wire.encode(x for x in wire.decode(f.value) if x.number != 3))
        bare.append(f)
    parts = wire.ManifestFile(bare, manifest.index, manifest.transaction, manifest.tail)
    manifest_path.write_bytes(wire.build_manifest(parts))
    snapshot = ShardSnapshot(REGION).with_current_generation(2).with_sstable(1, path.name)
    planner = LsmPointLookupPlanner(lance.dataset(uri), [snapshot])
    assert planner.plan_lookup(pa.array([1], pa.int64())).to_table()["val"].to_pylist() == [1.0]


def test_14_schema_changes_with_a_mem_wal(tmp_path: Path) -> None:
    """Expressions and type changes are refused; null columns, renames and drops go through, also over
    unmerged generations, which keep the field ids of their time.

    For us: project by field id; `_tombstone` may have the id of a later column: known by its name.
    """
    uri = make(tmp_path)
    first = flush(uri, rows(1, 2, 1))
    with pytest.raises((OSError, ValueError, NotImplementedError)):
        lance.dataset(uri).add_columns({"twice": "val * 2"})
    with pytest.raises((OSError, ValueError, NotImplementedError)):
        lance.dataset(uri).alter_columns({"path": "val", "data_type": pa.float64()})
    lance.dataset(uri).alter_columns({"path": "txt", "name": "text"})
    lance.dataset(uri).drop_columns(["val"])
    lance.dataset(uri).add_columns(pa.field("later", pa.int32()))
    assert field_ids(uri) == {"id": 0, "text": 2, "later": 3}
    assert field_ids(first) == {"id": 0, "val": 1, "txt": 2, "_tombstone": 3}, "3 is `later` in the base"


def test_20_field_ids_are_reused(tmp_path: Path) -> None:
    """The last column dropped and another one added: the new one has the old id, if no data file is left
    that holds the id (an empty base, or all files rewritten).

    For us: a generation's column with that id is NOT the base's column: compare name and type as well.
    """
    plain = pa.schema([SCHEMA.field("id"), pa.field("a", pa.string()), pa.field("b", pa.string())])
    empty = f"{tmp_path}/empty.lance"
    lance.write_dataset(plain.empty_table(), empty)
    full = f"{tmp_path}/full.lance"
    lance.write_dataset(pa.Table.from_pylist([{"id": 1, "a": "a", "b": "b"}], schema=plain), full)
    for uri in (empty, full):
        lance.dataset(uri).drop_columns(["b"])
        lance.dataset(uri).add_columns(pa.field("other", pa.string()))
    assert field_ids(empty)["other"] == 2
    assert field_ids(full)["other"] == 3, "a data file with field 2 still stands"


def test_20_with_a_mem_wal_a_generation_is_misread(tmp_path: Path) -> None:
    """What 20 does over an unmerged generation: its dropped column has the new column's id."""
    plain = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("b", pa.string())])
    uri = f"{tmp_path}/t.lance"
    lance.write_dataset(plain.empty_table(), uri).initialize_mem_wal()
    path = flush(uri, pa.Table.from_pylist([{"id": 1, "b": "old"}], schema=plain))
    lance.dataset(uri).drop_columns(["b"])
    lance.dataset(uri).add_columns(pa.field("other", pa.string()))
    assert field_ids(uri)["other"] == field_ids(path)["b"] == 1


def _vectors(lo: int, hi: int, center: float) -> pa.Table:
    data = np.random.default_rng(lo).normal(center, 0.5, ((hi - lo), 8)).astype(np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(data.ravel()), 8)
    return pa.table({"id": pa.array(range(lo, hi), pa.int64()), "vector": vectors})


def _centroids(uri: str) -> list[bytes]:
    """The buffer with the IVF model's centroids, of each segment."""
    found = []
    for segment in lance.dataset(uri).describe_indices()[0].segments:
        reader = LanceFileReader(f"{uri}/_indices/{segment.uuid}/index.idx")
        position = int(reader.metadata().schema.metadata[b"lance:ivf"])
        fields = wire.decode(bytes(reader.read_global_buffer(position)))
        found.append(bytes(wire.get(fields, 4)))  # type: ignore[arg-type]
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "merge"), [("IVF_FLAT", 0), ("IVF_FLAT", 1), ("IVF_HNSW_SQ", 1)])
def test_22_an_explicit_number_of_segments_keeps_the_centroids(tmp_path: Path, kind: str, merge: int) -> None:
    uri = f"{tmp_path}/t.lance"
    lance.write_dataset(_vectors(0, 1000, 0), uri).create_index("vector", kind, num_partitions=4)
    before = _centroids(uri)
    lance.write_dataset(_vectors(10**6, 10**6 + 12_000, 3), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=merge)
    assert set(_centroids(uri)) == set(before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["IVF_FLAT", "IVF_HNSW_SQ"])
def test_22_optimize_indices_by_default_changes_the_centroids(tmp_path: Path, kind: str) -> None:
    """Left to itself it splits partitions that have grown (here 4 become more), or joins them (HNSW: 1 is left).

    For us: vector indexes are brought up to date with a number, and compared before they are published.
    """
    uri = f"{tmp_path}/t.lance"
    lance.write_dataset(_vectors(0, 1000, 0), uri).create_index("vector", kind, num_partitions=4)
    before = _centroids(uri)
    for at in (1, 2):
        lance.write_dataset(_vectors(at * 10**6, at * 10**6 + 12_000, 3 * at), uri, mode="append")
        lance.dataset(uri).optimize.optimize_indices()
    assert not set(_centroids(uri)) <= set(before)


def test_23_an_update_leaves_index_catchup_as_it_was(tmp_path: Path) -> None:
    """Rows that an owner's update moves out of an index stay claimed as covered.

    For us: index_catchup is compared with the fragments, whichever program wrote it.
    """
    uri = make(tmp_path)
    upsert(lance.dataset(uri), rows(1, 2, 1), 1)
    lance.dataset(uri).optimize.optimize_indices()
    lance.dataset(uri).update({"val": "val + 1"}, where="id < 50")
    index = next(one for one in lance.dataset(uri).describe_indices() if one.name == "id_idx")
    covered = {number for segment in index.segments for number in segment.fragment_ids}
    assert {fragment.fragment_id for fragment in lance.dataset(uri).get_fragments()} - covered
    manifest = wire.newest_manifest(Files(uri))[1]
    (claim,) = wire.sub(wire.decode(wire.mem_wal_details(manifest)), 10)
    assert bytes(wire.get(claim, 1)) == b"id_idx"  # type: ignore[arg-type]


def test_25_commits_of_pylance_rename_the_mem_wal_index(tmp_path: Path) -> None:
    """A marked merge, an optimised index: the MemWAL entry gets a new id, under which no file stands.

    For us: a snapshot in `_indices/{id}/index.lance` is gone then, and the next run has to store it again.
    """
    uri = make(tmp_path)

    def entry_id() -> str:
        entry = wire.mem_wal_entry(wire.newest_manifest(Files(uri))[1])
        assert entry is not None
        return wire.uuid_of(entry, 1)

    ids = [entry_id()]
    upsert(lance.dataset(uri), rows(1, 2, 1), 1)
    ids.append(entry_id())
    lance.dataset(uri).optimize.optimize_indices()
    ids.append(entry_id())
    assert len(set(ids)) == 3
    lance.write_dataset(rows(200, 201), uri, mode="append")
    assert entry_id() == ids[-1], "a commit that does not touch it keeps it"


@pytest.mark.parametrize("bitmap", ["absent", "empty"])
def test_an_empty_bitmap_of_the_mem_wal_index_takes_inserted_fragments(tmp_path: Path, bitmap: str) -> None:
    """An insert by ``merge_insert`` enters its fragment into a MemWAL index with an empty fragment bitmap, if row ids
    are stable, and from then on each compaction is refused. pylance's own index has no bitmap.

    For us: no entry of ours has one; where it has, `compact` and every other commit of the MemWAL index remove it.
    """
    uri = make(tmp_path, btree=False, stable_row_ids=True)
    if bitmap == "empty":
        entry, _ = index_entry(uri)
        lance.LanceDataset.commit(uri, lance.LanceOperation.CreateIndex([entry], [entry]), read_version=2)
    lance.dataset(uri).merge_insert("id").when_not_matched_insert_all().execute(rows(100, 110))
    found = wire.mem_wal_entry(wire.newest_manifest(Files(uri))[1])
    assert found is not None
    assert bool(wire.get(found, 5, b"")) == (bitmap == "empty")
    if bitmap == "absent":
        assert lance.dataset(uri).optimize.compact_files().fragments_added == 1
    else:
        with pytest.raises(OSError, match="split of indexed and non-indexed data"):
            lance.dataset(uri).optimize.compact_files()
