"""What this project builds on in pylance. A failure after an upgrade breaks the project: mend it first."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import obstore.exceptions
import pyarrow as pa
import pytest
from lance import LanceOperation
from lance.fragment import FragmentMetadata, RowIdSequence, write_fragments

from tests.integration.contracts.small import (
    REGION,
    field_ids,
    flush,
    keys,
    make,
    progress,
    publish_detached,
    rows,
    upsert,
    values,
    writer,
)  # fmt: skip
from tests.support.tables import wire
from tests.support.tables.files import Files


def _update(
    dataset: lance.LanceDataset, gone: list[int], new: list[FragmentMetadata], removed: list[int] | None = None
) -> LanceOperation.Update:
    """An Update that deletes row offsets of fragment 0 and adds fragments."""
    return LanceOperation.Update(
        removed_fragment_ids=removed or [],
        updated_fragments=[dataset.get_fragment(0).delete_rows(np.array(gone))] if gone else [],
        new_fragments=new,
        fields_modified=[],
        fields_for_preserving_frag_bitmap=[],
        update_mode="rewrite_rows",
    )


def _build(uri: str, gone: list[int], source: pa.Table) -> tuple[int, lance.LanceDataset]:
    """(version that was read, detached version with the update)."""
    dataset = lance.dataset(uri)
    operation = _update(dataset, gone, write_fragments(source, dataset, mode="append"))
    return dataset.version, lance.LanceDataset.commit(uri, operation, read_version=dataset.version, detached=True)


def test_the_strict_commit(tmp_path: Path) -> None:
    """A detached commit, stamped with version and progress and published as exactly V+1, is a version like
    any other: pylance opens it, refuses a stale merger, indexes, keeps old versions."""
    uri = make(tmp_path)
    read, detached = _build(uri, [5, 6], rows(5, 7, 8))
    assert detached.version & 1 << 63, "detached versions have the highest bit"
    assert lance.dataset(uri).version == read, "not visible yet"
    publish_detached(uri, detached.version, read + 1, [(REGION, 4)])
    now = lance.dataset(uri)
    assert now.version == read + 1
    assert progress(uri) == {REGION: 4}
    assert values(uri)[5] == [8.0]
    assert len(values(uri)) == 100
    assert values(uri, read)[5] == [0.0]
    with pytest.raises(OSError, match="Stale SSTable compaction"):
        upsert(lance.dataset(uri, version=read), rows(50, 51, 1), 4)
    now.optimize.optimize_indices()
    assert lance.dataset(uri).scanner(filter="id = 6").to_table()["val"].to_pylist() == [8.0]
    upsert(lance.dataset(uri), rows(6, 7, 9), 5)
    assert values(uri)[6] == [9.0]
    assert not [n for n in Files(uri).listing("_versions/") if "/d" in n]


def test_the_strict_commit_is_a_compare_and_swap(tmp_path: Path) -> None:
    """If V+1 is taken meanwhile, the put is refused and nothing changed."""
    uri = make(tmp_path)
    read, detached = _build(uri, [5], rows(5, 6, 8))
    upsert(lance.dataset(uri), rows(5, 6, 9))
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        publish_detached(uri, detached.version, read + 1, [(REGION, 4)])
    assert values(uri)[5] == [9.0]
    assert progress(uri) == {}


def test_a_detached_commit_is_built_on_the_handle_not_on_read_version(tmp_path: Path) -> None:
    """With a handle pinned at V a detached commit builds on V's rows. With a URI it builds on the newest
    version, whatever `read_version` says. For us: the strict commit passes the pinned handle."""
    uri = make(tmp_path)
    dataset = lance.dataset(uri)
    operation = _update(dataset, [], write_fragments(rows(200, 201, 1), dataset, mode="append"))
    lance.dataset(uri).delete("id = 1")
    by_handle = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, detached=True)
    by_uri = lance.LanceDataset.commit(uri, operation, read_version=dataset.version, detached=True)
    assert by_handle.count_rows("id = 1") == 1
    assert by_uri.count_rows("id = 1") == 0


def test_delete_rows_unions_with_the_deletion_vector(tmp_path: Path) -> None:
    """`LanceFragment.delete_rows` takes physical offsets, adds to what is deleted already, and commits
    nothing by itself."""
    uri = make(tmp_path)
    lance.dataset(uri).delete("id IN (1, 2)")
    dataset = lance.dataset(uri)
    metadata = dataset.get_fragment(0).delete_rows(np.array([2, 50, 51]))
    assert metadata is not None
    assert metadata.deletion_file is not None
    assert metadata.deletion_file.num_deleted_rows == 4
    assert lance.dataset(uri).count_rows() == 98
    operation = LanceOperation.Update(updated_fragments=[metadata], update_mode="rewrite_rows")
    lance.LanceDataset.commit(uri, operation, read_version=dataset.version)
    assert sorted(set(range(100)) - set(values(uri))) == [1, 2, 50, 51]


def test_delete_rows_of_a_whole_fragment_gives_none(tmp_path: Path) -> None:
    """Nothing is left, so there is no metadata: the fragment goes to `removed_fragment_ids`."""
    uri = make(tmp_path)
    dataset = lance.dataset(uri)
    assert dataset.get_fragment(0).delete_rows(np.arange(100)) is None


def test_an_update_with_updated_new_and_removed_fragments(tmp_path: Path) -> None:
    """All three at once as a detached commit; indexes keep their entry, coverage loses the removed."""
    uri = f"{tmp_path}/t.lance"
    dataset = lance.write_dataset(rows(0, 20), uri, max_rows_per_file=10)
    dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal(unsharded=True)
    dataset = lance.dataset(uri)
    new = write_fragments(rows(0, 1, 7), dataset, mode="append")
    operation = _update(dataset, [0], new, removed=[1])
    detached = lance.LanceDataset.commit(uri, operation, read_version=dataset.version, detached=True)
    publish_detached(uri, detached.version, dataset.version + 1, [])
    assert sorted(values(uri)) == list(range(10))
    assert values(uri)[0] == [7.0]
    assert lance.dataset(uri).scanner(filter="id = 0").to_table()["val"].to_pylist() == [7.0]
    assert lance.dataset(uri).scanner(filter="id = 15").to_table().num_rows == 0


def test_transaction_properties_are_kept(tmp_path: Path) -> None:
    """A detached commit of a Transaction carries our properties into the table's history."""
    uri = make(tmp_path)
    dataset = lance.dataset(uri)
    operation = _update(dataset, [], write_fragments(rows(200, 201), dataset, mode="append"))
    transaction = lance.Transaction(dataset.version, operation, transaction_properties={"memwal-ops.job": "merge"})
    detached = lance.LanceDataset.commit(uri, transaction, detached=True)
    publish_detached(uri, detached.version, dataset.version + 1, [])
    read = lance.dataset(uri).read_transaction(dataset.version + 1)
    assert read is not None
    assert (read.transaction_properties or {})["memwal-ops.job"] == "merge"


def test_a_live_writer_survives_region_manifests_of_others(tmp_path: Path) -> None:
    """Another process writes the next region manifest version (as the collector does): the open writer
    reloads and goes on at the next free version, losing nothing."""
    uri = make(tmp_path)
    files = Files(uri)
    w = writer(uri)
    w.put(rows(1, 2, 1))
    before = wire.region_manifest(files, REGION)
    fields = [wire.Field(1, before.version + 1, 0) if f.number == 1 else f for f in before.fields]
    name = wire.bit_reversed(before.version + 1)
    files.put_new(f"_mem_wal/{REGION}/manifest/{name}.binpb", wire.encode(fields))
    w.put(rows(2, 3, 1))
    w.close()
    after = wire.region_manifest(files, REGION)
    assert after.version >= before.version + 2
    assert len(after.generations) == 1
    path = f"{uri}/_mem_wal/{REGION}/{after.generations[1]}"
    assert sorted(values(path)) == [1, 2]


def test_a_generation_is_the_base_and_a_tombstone(tmp_path: Path) -> None:
    """Columns of the base + `_tombstone: bool`; a tombstone has null payload; the newest row of a key has
    the highest row address, older ones are hidden by a deletion vector; a delete of an absent key stands."""
    uri = make(tmp_path)
    path = flush(uri, rows(1, 3, 1), rows(1, 2, 2), keys(2, 777), rows(5, 6, 3))
    generation = lance.dataset(path)
    assert generation.schema.names == ["id", "val", "txt", "_tombstone"]
    assert generation.schema.field("_tombstone").type == pa.bool_()
    found = generation.scanner(with_row_address=True).to_table().to_pylist()
    assert [(r["id"], r["val"], r["txt"], r["_tombstone"], r["_rowaddr"]) for r in found] == [
        (1, 2.0, "row 1", False, 2),
        (2, None, None, True, 3),
        (777, None, None, True, 4),
        (5, 3.0, "row 5", False, 5),
    ]
    (fragment,) = generation.get_fragments()
    assert fragment.physical_rows == 6
    (version,) = [f.value for f in wire.newest_manifest(Files(path))[1].fields if f.number == 13]
    assert isinstance(version, bytes)
    assert wire.get(wire.decode(version), 2) == lance.__version__.encode(), "who wrote it can be told"


def test_generations_keep_field_ids(tmp_path: Path) -> None:
    """After a drop, an add and a rename a new generation has the base's ids (since pylance 13; releases
    before number a generation's fields from 0: old_pylance.md)."""
    uri = make(tmp_path)
    lance.dataset(uri).drop_columns(["val"])
    lance.dataset(uri).add_columns(pa.field("extra", pa.struct([pa.field("a", pa.int32())])))
    lance.dataset(uri).alter_columns({"path": "txt", "name": "text"})
    base = field_ids(uri)
    assert base == {"id": 0, "text": 2, "extra": 3}
    row = pa.Table.from_pylist([{"id": 1, "text": "t", "extra": {"a": 1}}], schema=lance.dataset(uri).schema)
    assert field_ids(flush(uri, row)) == {**base, "_tombstone": 5}


def _stable(tmp_path: Path, ids: list[int] | None) -> tuple[dict[int, int], int]:
    """Keys 5 to 7 rewritten and 30 to 32 inserted in one fragment, with these row ids in `row_id_meta`:
    ({key: row id}, next row id of the manifest). The base has keys = row ids = 0 to 9."""
    uri = make(tmp_path, rows(0, 10), stable_row_ids=True)
    dataset = lance.dataset(uri)
    (new,) = write_fragments(pa.concat_tables([rows(5, 8, 1), rows(30, 33, 1)]), dataset, mode="append")
    if ids is not None:
        new.row_id_meta = RowIdSequence(ids).to_inline_metadata()
    operation = _update(dataset, [5, 6, 7], [new])
    built = lance.LanceDataset.commit(uri, operation, read_version=dataset.version, detached=True)
    publish_detached(uri, built.version, dataset.version + 1, [])
    table = lance.dataset(uri).scanner(columns=["id"], with_row_id=True).to_table()
    assert lance.dataset(uri).scanner(filter="id = 6").to_table()["val"].to_pylist() == [1.0], "the index finds it"
    next_id = int(wire.get(wire.newest_manifest(Files(uri))[1].fields, 14))
    return dict(zip(table["id"].to_pylist(), table["_rowid"].to_pylist(), strict=True)), next_id


def test_row_ids_of_rewritten_rows_first_then_new_ones(tmp_path: Path) -> None:
    """A sequence that covers only the fragment's FIRST rows is completed by pylance with fresh ids, and the
    manifest's next id rises: rewritten rows keep their ids, inserted rows get new ones. This is the way."""
    ids, next_id = _stable(tmp_path, [5, 6, 7])
    assert [ids[k] for k in (5, 6, 7, 30, 31, 32)] == [5, 6, 7, 10, 11, 12]
    assert next_id == 13


def test_row_ids_without_a_sequence_are_all_fresh(tmp_path: Path) -> None:
    """`row_id_meta` None: rewritten rows lose their ids; nothing breaks, the ids are just not stable."""
    ids, next_id = _stable(tmp_path, None)
    assert min(ids[k] for k in (5, 6, 7, 30, 31, 32)) >= 10
    assert next_id > max(ids.values())


def test_row_ids_given_in_full_are_not_checked(tmp_path: Path) -> None:
    """Ids above the manifest's next id are taken as they are and next id does NOT rise: the next insert
    would give them out again. Ids of other live rows are taken as well. For us: never number new rows."""
    ids, next_id = _stable(tmp_path, [5, 6, 7, 10, 11, 12])
    assert next_id == 10 < max(ids.values())
    doubled, _ = _stable(tmp_path, [5, 6, 7, 2, 3, 4])
    assert doubled[30] == doubled[2]


def test_the_marker_works_with_stable_row_ids(tmp_path: Path) -> None:
    """merge_insert with the marker keeps the row ids of updated rows."""
    uri = make(tmp_path, rows(0, 10), stable_row_ids=True)
    upsert(lance.dataset(uri), rows(5, 12, 1), 1)
    table = lance.dataset(uri).scanner(columns=["id"], with_row_id=True).to_table()
    ids = dict(zip(table["id"].to_pylist(), table["_rowid"].to_pylist(), strict=True))
    assert [ids[k] for k in range(10)] == list(range(10))
    assert progress(uri) == {REGION: 1}


def test_an_empty_source_carries_the_marker(tmp_path: Path) -> None:
    """A marked merge_insert of no rows commits and moves the progress: a pass of only tombstones or an
    empty generation can be recorded by it."""
    uri = make(tmp_path)
    empty = pa.RecordBatchReader.from_batches(rows(0, 0).schema, [])
    upsert(lance.dataset(uri), empty, 6)
    assert progress(uri) == {REGION: 6}
    assert len(values(uri)) == 100


@pytest.mark.parametrize("on_s3", [False, True], ids=["local", "s3"])
def test_a_commit_lock_shows_the_transaction_and_stops_the_commit(
    tmp_path: Path, bucket: tuple[str, dict[str, str]], on_s3: bool
) -> None:
    """pylance writes index files and the transaction, then asks for the lock. If that raises, nothing is
    published, the transaction file goes, and the index files stay: an index can be built and looked at."""
    uri, options = (f"{bucket[0]}/t.lance", bucket[1]) if on_s3 else (f"{tmp_path}/t.lance", None)
    dataset = lance.write_dataset(rows(0, 50), uri, storage_options=options)
    dataset.create_scalar_index("id", "BTREE")
    version = lance.write_dataset(rows(50, 60), uri, mode="append", storage_options=options).version
    files = Files(uri, options)
    before = set(files.listing("_transactions"))
    seen = []

    def lock(next_version: int) -> None:
        assert next_version == version + 1
        (path,) = set(files.listing("_transactions")) - before
        seen.append((path, wire.decode(files.get(path))))
        raise RuntimeError("stop here")

    locked = lance.dataset(uri, storage_options=options, commit_lock=lock)
    with pytest.raises(OSError, match="Error from commit handler: RuntimeError: stop here"):
        locked.optimize.optimize_indices(index_names=["id_idx"])
    assert lance.dataset(uri, storage_options=options).version == version
    assert set(files.listing("_transactions")) == before
    ((path, transaction),) = seen
    assert path.startswith(f"_transactions/{version}-")
    (operation,) = wire.sub(transaction, 103)
    (added,), (removed,) = wire.sub(operation, 1), wire.sub(operation, 2)
    assert wire.get(added, 3) == wire.get(removed, 3) == b"id_idx"
    assert files.listing(f"_indices/{wire.uuid_of(added, 1)}")


def test_clean_up_removes_transactions_and_indexes_that_no_version_names(tmp_path: Path) -> None:
    """What a killed build leaves behind is pylance's own to remove: after seven days."""
    uri = make(tmp_path)
    files = Files(uri)
    stray = f"{uuid.uuid4()}"
    long_ago = time.time() - 8 * 86400
    for path in (f"_transactions/1-{stray}.txn", f"_indices/{stray}/page_data.lance"):
        files.put(path, b"x")
        os.utime(f"{uri}/{path}", (long_ago, long_ago))
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    assert not [path for path in files.listing("") if stray in path]
