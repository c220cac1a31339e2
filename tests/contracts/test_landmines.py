"""What pylance does that would lose, double or resurrect rows: asserted AS IT IS.

The numbers are those of the project's list of landmines. A failure after an upgrade says that a guard
of ours may be needed no longer, or has to change. Two cannot be asserted cheaply: 21, the memory of
`merge_insert` grows with the base table, not only with its source; 24, a commit that is rebased passes
over versions that are gone, so that pylance's own updates, beside its own compaction and a clean-up of
everything older than now, lose and double rows within minutes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import obstore
import obstore.exceptions
import pyarrow as pa
import pytest
from lance import LanceOperation
from lance.file import LanceFileReader
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, ShardSnapshot

from tests.contracts.small import (
    REGION,
    SCHEMA,
    field_ids,
    flush,
    index_entry,
    keys,
    make,
    mem_wal_index,
    progress,
    rows,
    upsert,
    values,
    writer,
)  # fmt: skip
from tests.tables import damage, wire
from tests.tables.files import Files
from tests.tables.region_layout import RegionLayout
from tests.tables.schemas import PRIMARY_KEY


def test_pylance_is_the_pinned_one() -> None:
    """All below was measured on 14.0.2; whoever moves the pin reads every test of this folder."""
    assert lance.__version__ == "14.0.2"


@pytest.mark.parametrize("retries", [0, 20])
def test_01_a_stale_index_commit_takes_progress_back(tmp_path: Path, retries: int) -> None:
    """A CreateIndex commit with details read before a merge rebases over the merge without a conflict.

    For us: MemWAL details never go through a plain commit, only through the strict one.
    """
    uri = make(tmp_path)
    upsert(lance.dataset(uri), rows(1, 2, 1), 1)
    stale = lance.dataset(uri)
    old, details = index_entry(uri)
    upsert(lance.dataset(uri), rows(2, 3, 2), 2)
    assert progress(uri) == {REGION: 2}
    new = mem_wal_index(str(uuid.uuid4()), stale.version, details)
    lance.LanceDataset.commit(
        uri, LanceOperation.CreateIndex([new], [old]), read_version=stale.version, max_retries=retries
    )
    assert progress(uri) == {REGION: 1}, "generation 2 is merged, and recorded as not merged"


def test_02_execute_uncommitted_drops_the_marker(tmp_path: Path) -> None:
    """The data of a marked merge_insert lands by `execute_uncommitted` + `commit`, the progress does not.

    For us: a distributed merge needs the strict commit, which stamps the progress.
    """
    uri = make(tmp_path)
    builder = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    builder.mark_sstables_as_compacted([lance.mem_wal.CompactedSsTable(REGION, 1)])
    lance.LanceDataset.commit(uri, builder.execute_uncommitted(rows(5, 6, 7))[0])
    assert values(uri)[5] == [7.0]
    assert progress(uri) == {}


def _stalled_writer_after_collection(tmp_path: Path, keep_fence_posts: bool) -> tuple[str, str]:
    """What a stalled, fenced writer hears, and whether its row is there; WAL entries were collected."""
    uri = make(tmp_path, rows(0, 1))
    stalled = writer(uri)
    for i in (10, 11, 12):
        stalled.put(rows(i, i + 1))
    newer = writer(uri, max_memtable_rows=3)
    for i in (20, 21, 22, 23):
        newer.put(rows(i, i + 1))
    newer.close()
    replay_after = wire.region_manifest(Files(uri), REGION).replay_after
    seen = set()
    for path in sorted(Path(uri, "_mem_wal", REGION, "wal").iterdir(), key=lambda p: wire.from_bit_reversed(p.name)):
        with pa.OSFile(str(path)) as f:
            epoch = pa.ipc.open_stream(f).schema.metadata[b"writer_epoch"]
        post = epoch not in seen
        seen.add(epoch)
        if wire.from_bit_reversed(path.name) <= replay_after and not (keep_fence_posts and post):
            path.unlink()
    try:
        stalled.put(rows(99, 100))
        said = "acknowledged"
    except (OSError, RuntimeError):
        said = "refused"
    with contextlib.suppress(OSError, RuntimeError):
        stalled.close()
    with writer(uri) as after:
        there = 99 in after.lsm_scanner().to_table()["id"].to_pylist()
    return said, "there" if there else "lost"


def test_03_collecting_the_wal_breaks_fencing(tmp_path: Path) -> None:
    """Without WAL entries in its way a fenced writer lands on an empty position: acknowledged, lost.

    For us: the collector keeps the first entry of every writer epoch (fence posts), and then the
    stalled writer is refused.
    """
    assert _stalled_writer_after_collection(tmp_path, keep_fence_posts=False) == ("acknowledged", "lost")
    assert _stalled_writer_after_collection(tmp_path, keep_fence_posts=True) == ("refused", "lost")


def test_04_progress_is_only_checked_to_rise(tmp_path: Path) -> None:
    """A jump over unmerged generations, an unknown region, a marker on a delete: all accepted.

    For us: order, existence and marking of the last pass are ours to enforce.
    """
    uri = make(tmp_path)
    flush(uri, rows(1, 2, 1))
    upsert(lance.dataset(uri), rows(2, 3, 1), 7)
    unknown = str(uuid.uuid4())
    upsert(lance.dataset(uri), rows(3, 4, 1), 9, region=unknown)
    builder = lance.dataset(uri).merge_insert("id").when_matched_delete()
    builder.mark_sstables_as_compacted([lance.mem_wal.CompactedSsTable(REGION, 8)])
    builder.execute(keys(4))
    assert progress(uri) == {REGION: 8, unknown: 9}


def _text_batches(n: int, size: int) -> Iterator[pa.RecordBatch]:
    """Keys 0 to n - 1 with `size` bytes of text each; every batch has buffers of its own."""
    for lo in range(0, n, 8192):
        ids = range(lo, min(n, lo + 8192))
        columns = [pa.array(ids, pa.int64()), pa.array([("x" * size) + str(i) for i in ids])]
        yield pa.RecordBatch.from_arrays(columns, names=["id", "txt"])


def test_05_an_indexed_merge_holds_its_source_in_a_fixed_pool(tmp_path: Path) -> None:
    """With `use_index(True)` the whole source must fit a pool of 300 MB, or merge_insert dies: "Resources
    exhausted ... HashJoinInput". A stream does not escape it, and slices of one buffer (a combined table
    of 60 MB cut into batches) count the whole buffer each time. Without the index it goes through.

    For us: batches own their buffers, an indexed merge only far below the pool, else `use_index(False)`.
    """
    uri = f"{tmp_path}/t.lance"
    n = 120_000
    base = lance.write_dataset(pa.table({"id": pa.array(range(n), pa.int64()), "txt": ["a"] * n}), uri)
    base.create_scalar_index("id", "BTREE")
    schema = base.schema

    def merge(source: pa.Table | pa.RecordBatchReader, use_index: bool) -> None:
        builder = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        builder.use_index(use_index).execute_uncommitted(source)

    def stream(size: int) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(schema, _text_batches(n, size))

    merge(stream(500), use_index=True)  # 60 MB
    one_buffer = stream(500).read_all().combine_chunks()
    for source in (one_buffer, pa.RecordBatchReader.from_batches(schema, one_buffer.to_batches(max_chunksize=8192))):
        with pytest.raises(OSError, match=r"(?s)Resources exhausted.*HashJoinInput.*300\.0 MB"):
            merge(source, use_index=True)
    with pytest.raises(OSError, match=r"(?s)Resources exhausted.*HashJoinInput.*300\.0 MB"):
        merge(stream(2_800), use_index=True)  # 336 MB
    merge(stream(2_800), use_index=False)


def test_06_errors_are_untyped(tmp_path: Path) -> None:
    """Stale progress and lost races are OSErrors that only their text tells apart.

    For us: classified in one place, by these words.
    """
    uri = make(tmp_path)
    upsert(lance.dataset(uri), rows(1, 2, 1), 3)
    with pytest.raises(OSError, match=r"Stale SSTable compaction for shard .* is not greater than the recorded"):
        upsert(lance.dataset(uri), rows(1, 2, 1), 3)
    stale = lance.dataset(uri)
    upsert(lance.dataset(uri), rows(5, 6, 1))
    with pytest.raises(OSError, match="Too many concurrent writers"):
        upsert(stale, rows(5, 6, 2), retries=0)


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

    For us: regions of the specification's layout (and of pylance 7 and 8) are read by our own reader.
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


def test_09_every_merge_logs_an_error(tmp_path: Path) -> None:
    """merge_insert on a MemWAL table logs "Index __lance_mem_wal has no fields" at ERROR; it is harmless.

    For us: kept off users' terminals, without hiding real errors.
    """
    uri = make(tmp_path)
    script = (
        f"import lance; d = lance.dataset({uri!r});"
        "d.merge_insert('id').when_matched_update_all().execute(d.to_table(filter='id = 1'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "has no fields" in line]
    assert lines
    assert all("ERROR" in line and wire.MEM_WAL_INDEX in line for line in lines)


def test_10_positions_in_the_manifest(tmp_path: Path) -> None:
    """The inline transaction's position is field 23 in 14.x (21 in older releases), the indexes' field 6.

    For us: whoever rewrites a manifest must know every field that holds a position, and refuse others.
    """
    uri = make(tmp_path)
    _, manifest = wire.newest_manifest(Files(uri))
    numbers = {f.number for f in manifest.fields}
    assert {6, 23} <= numbers
    assert 21 not in numbers
    # all fields that 14.0.2 writes on such a table; a new one may hold a position
    assert numbers <= {1, 2, 3, 6, 7, 9, 10, 11, 12, 13, 15, 23}, numbers


def test_11_detached_commits_are_refused_on_v1_names(tmp_path: Path) -> None:
    """For us: such a table needs `migrate_manifest_paths_v2()` before a data commit of the strict kind."""
    uri = f"{tmp_path}/v1.lance"
    dataset = damage.make_v1_named_table(uri, rows(0, 5))
    operation = LanceOperation.Delete([], [0], "true")
    with pytest.raises((OSError, NotImplementedError), match=r"(?i)detached commits cannot be used with v1"):
        lance.LanceDataset.commit(uri, operation, read_version=dataset.version, detached=True)


def test_12_cleanup_raises_over_tags(tmp_path: Path) -> None:
    """`cleanup_old_versions` raises where a tagged version would go, unless it is told not to.

    For us: expire passes `error_if_tagged_old_versions=False`, and the tagged version stays.
    """
    uri = make(tmp_path)
    lance.dataset(uri).tags.create("keep", 1)
    upsert(lance.dataset(uri), rows(1, 2, 1))
    with pytest.raises(OSError, match=r"(?i)tag"):
        lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0), error_if_tagged_old_versions=False)
    assert lance.dataset(uri, version=1).count_rows() == 100


def test_13_a_put_larger_than_the_memtable_is_refused(tmp_path: Path) -> None:
    """One put above `max_memtable_rows` is never split. For us: the builders of workloads cut puts."""
    uri = make(tmp_path)
    w = writer(uri, max_memtable_rows=10)
    with pytest.raises((OSError, ValueError), match=r"(?i)row|capacity|memtable"):
        w.put(rows(0, 11))
    w.close()


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


def test_15_compare_and_swap_is_not_everywhere(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    """obstore's local store has no compare-and-swap; put-if-absent works on local files and on S3.

    For us: what must work on every store uses numbered versions by put-if-absent.
    """
    local = Files(str(tmp_path))
    local.put_new("a", b"1")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        local.put_new("a", b"2")
    tag = obstore.head(local.store, "a")["e_tag"]
    with pytest.raises(NotImplementedError):
        obstore.put(local.store, "a", b"2", mode={"e_tag": tag})
    uri, options = bucket
    remote = Files(uri, options)
    remote.put_new("a", b"1")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        remote.put_new("a", b"2")
    tag = obstore.head(remote.store, "a")["e_tag"]
    obstore.put(remote.store, "a", b"2", mode={"e_tag": tag})
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(remote.store, "a", b"3", mode={"e_tag": tag})


def test_16_a_plain_update_doubles_new_keys(tmp_path: Path) -> None:
    """`commit(LanceOperation.Update)` is rebased over an insert of the same new key: the key stands twice.

    For us: the strict commit, at exactly the next version, for everything that writes fragments itself.
    """
    uri = make(tmp_path)
    version = lance.dataset(uri).version
    new = lance.fragment.write_fragments(rows(200, 201, 5), lance.dataset(uri, version=version), mode="append")
    upsert(lance.dataset(uri), rows(200, 201, 9))
    lance.LanceDataset.commit(uri, LanceOperation.Update(new_fragments=new), read_version=version)
    assert sorted(values(uri)[200]) == [5.0, 9.0]


def test_17_a_delete_pass_with_retries_deletes_newer_rows(tmp_path: Path) -> None:
    """With internal retries a delete pass re-runs on the newest version, over a row that it never saw.

    For us: the delete pass runs with `conflict_retries(0)`; refused, we plan again.
    """
    left = {}
    for retries in (0, 3):
        uri = make(tmp_path)
        stale = lance.dataset(uri)
        upsert(lance.dataset(uri), rows(5, 6, 9))
        with contextlib.ExitStack() as expect:
            if retries == 0:
                expect.enter_context(pytest.raises(OSError, match=r"Too many concurrent writers\. Attempted 0 retries"))
            stale.merge_insert("id").when_matched_delete().conflict_retries(retries).execute(keys(5))
        left[retries] = values(uri).get(5)
    assert left == {0: [9.0], 3: None}


@pytest.mark.parametrize("retries", [0, None])
def test_18_with_the_index_new_keys_are_doubled_between_mergers(tmp_path: Path, retries: int | None) -> None:
    """A marked merge from a stale handle, after another merger committed a LOWER generation with the same
    new keys: with `use_index(True)` it commits without a conflict and every such key stands TWICE.

    Without the index it conflicts (and is right after retries). For us: never an indexed merge beside
    another merger without a check that the version is still the planned one; verify, or commit strictly.
    """
    uri = make(tmp_path)
    stale = lance.dataset(uri)
    upsert(lance.dataset(uri), rows(200, 210, 1), 3, use_index=True)
    upsert(stale, rows(200, 210, 2), 5, use_index=True, retries=retries)
    assert progress(uri) == {REGION: 5}
    assert {tuple(sorted(v)) for k, v in values(uri).items() if k >= 200} == {(1.0, 2.0)}


def test_18_without_the_index_it_conflicts(tmp_path: Path) -> None:
    """The other half of 18: `use_index(False)` tracks inserted keys."""
    uri = make(tmp_path)
    stale = lance.dataset(uri)
    upsert(lance.dataset(uri), rows(200, 210, 1), 3, use_index=False)
    with pytest.raises(OSError, match="Too many concurrent writers"):
        upsert(stale, rows(200, 210, 2), 5, use_index=False, retries=0)
    upsert(stale, rows(200, 210, 2), 5, use_index=False)
    assert {tuple(v) for k, v in values(uri).items() if k >= 200} == {(2.0,)}


def test_19_a_jump_is_rebased_and_resurrects(tmp_path: Path) -> None:
    """Merger B takes generations 1 to 3 (a put of key 200 in 2); merger A, which planned 1 to 5 at progress
    0, collapses key 200 away by the tombstone in 4: nothing to delete in the base that A sees. A's commit
    of other rows, marked 5, is rebased over B's commit without a conflict, so that key 200 survives.

    For us: a merge may only land on the progress from which it was planned; the marker does not check it.
    """
    uri = make(tmp_path)
    stale = lance.dataset(uri)  # A plans: put 300, and key 200 needs nothing
    upsert(lance.dataset(uri), rows(200, 201, 1), 3)  # B
    upsert(stale, rows(300, 301, 2), 5)  # A
    assert progress(uri) == {REGION: 5}
    assert values(uri)[200] == [1.0], "deleted in generation 4, merged up to 5, and there"


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


@pytest.mark.parametrize(("kind", "merge"), [("IVF_FLAT", 0), ("IVF_FLAT", 1), ("IVF_HNSW_SQ", 1)])
def test_22_an_explicit_number_of_segments_keeps_the_centroids(tmp_path: Path, kind: str, merge: int) -> None:
    uri = f"{tmp_path}/t.lance"
    lance.write_dataset(_vectors(0, 1000, 0), uri).create_index("vector", kind, num_partitions=4)
    before = _centroids(uri)
    lance.write_dataset(_vectors(10**6, 10**6 + 12_000, 3), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=merge)
    assert set(_centroids(uri)) == set(before)


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

    For us: index_catchup is compared with the fragments, whoever wrote it.
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


def test_latest_version_hint_only_on_local_files(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    """`_versions/latest_version_hint.json` stands on local files, not on S3; readers probe onward from it.

    For us: a version that we publish ourselves is found without touching the hint.
    """
    local = make(tmp_path)
    assert os.path.exists(f"{local}/_versions/latest_version_hint.json")
    uri, options = bucket
    lance.write_dataset(rows(0, 3), f"{uri}/hint.lance", storage_options=options)
    names = Files(f"{uri}/hint.lance", options).listing("_versions/")
    assert not [n for n in names if "hint" in n]
