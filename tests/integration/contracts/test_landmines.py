"""What pylance does that would lose, double or resurrect rows: asserted AS IT IS.

The numbers are those of the project's list of landmines; those of columns, indexes and the clean-up are
in the two files beside this one. A failure after an upgrade says that a guard
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
from pathlib import Path

import lance
import obstore
import obstore.exceptions
import pyarrow as pa
import pytest
from lance import LanceOperation
from lance.file import LanceFileReader

from tests.integration.contracts.small import (
    REGION,
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
from tests.support.tables import damage, wire
from tests.support.tables.files import Files


def test_pylance_is_the_pinned_one() -> None:
    """All below was measured on 14.0.2, and holds on 14.0.0; when the pin changes, read every test of this folder."""
    assert lance.__version__ in ("14.0.0", "14.0.2")


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


@pytest.mark.long
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


@pytest.mark.long
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

    For us: a rewrite of a manifest must know every field that has a position, and refuse others.
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


def test_13_a_put_larger_than_the_memtable_is_refused(tmp_path: Path) -> None:
    """One put above `max_memtable_rows` is never split. For us: the builders of workloads cut puts."""
    uri = make(tmp_path)
    w = writer(uri, max_memtable_rows=10)
    with pytest.raises((OSError, ValueError), match=r"(?i)row|capacity|memtable"):
        w.put(rows(0, 11))
    w.close()


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


def test_replayed_rows_are_once_in_the_key_index(tmp_path: Path) -> None:
    """9.0 writes them twice (docs/upstream.md), and releases up to 12 cannot scan such a generation; this one can.

    For us: `verify --deep` warns of it, and a merge needs no key index.
    """
    uri = make(tmp_path)
    first = writer(uri)
    first.put(rows(200, 202, 1))  # durable, and not flushed
    with writer(uri) as second:
        second.put(rows(202, 203, 1))
    (path,) = Path(uri, "_mem_wal").glob("*/*_gen_*/_pk_index/page_data.lance")
    assert LanceFileReader(str(path)).read_all().to_table()["ids"].to_pylist() == [0, 1, 2]
