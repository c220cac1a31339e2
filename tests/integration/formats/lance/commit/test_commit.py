"""The strict commit: exactly V+1 or nothing, with any concurrent commits and any answers of the store."""

from __future__ import annotations

import contextlib
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable

from memwal_ops import open_table
from memwal_ops.core.anchors import LeaseGuard
from memwal_ops.errors import (
    CommitStateUnknownError,
    InvariantViolatedError,
    LeaseLostError,
    StoreUnavailableError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.commit.commit import (
    CommitLostError,
    CommitNote,
    IndexChange,
    commit_indexes,
    commit_strict,
)
from memwal_ops.formats.lance.files.datasets import lance_options
from memwal_ops.formats.lance.files.version_files import index_key, missing_files, references, version_path
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup, publishing as index_publishing
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions, SnapshotOptions
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest
from tests.support.stores import LyingStore
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base
from tests.support.tables.templates import copy_of
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table

NOTE = CommitNote("merge", "a run", "0.0")


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    return copy_of(flushed, str(tmp_path / "t.lance"))


def flushed(uri: str) -> Workload:
    table = Workload(1, regions=2, base_rows=60).create(uri)
    for _ in range(3):
        table.step(5)
        table.flush()
    return table


def append(table: Table) -> lance.LanceOperation.Update:
    """An operation that adds one row; its files are written."""
    schema = table.dataset.schema
    rows = pa.Table.from_pylist([{"id": 10**6, "val": 1.0, "txt": "new"}], schema=schema)
    options = lance_options(table.location)
    fragments = lance.fragment.write_fragments(rows, table.dataset, mode="append", storage_options=options)
    return lance.LanceOperation.Update(new_fragments=fragments, fields_modified=[])


def detached(uri: str) -> list[str]:
    return [path for path in Files(uri).listing("_versions") if "/d" in path]


def region_and_next(table: Table) -> tuple[UUID, int]:
    region = table.regions.region_ids[0]
    return region, table.index.merged_generations.get(region, 0) + 1


@pytest.mark.req("S0-164")
def test_data_and_progress_are_one_version(made: Workload) -> None:
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    version = commit_strict(table, append(table), {region: generation}, NOTE)
    assert version == table.version + 1 == lance.dataset(made.uri).version
    newest = table.newest()
    assert newest.index.merged_generations == {region: generation}
    assert newest.dataset.count_rows() == table.dataset.count_rows() + 1
    assert table.index.merged_generations == {}, "the pinned version stays what it was"
    assert detached(made.uri) == []
    properties = dict(newest.manifest.transaction.transaction_properties) if newest.manifest.transaction else {}
    assert properties == {"memwal-ops.job": "merge", "memwal-ops.run_id": "a run", "memwal-ops.version": "0.0"}


def suspended(table: Table) -> Table:
    """The same version, as a run has it that was suspended for days."""
    return replace(table, listed=replace(table.listed, at=table.listed.at - 8 * 86400))


def test_a_run_that_was_suspended_publishes_no_files_that_were_deleted(made: Workload) -> None:
    table = suspended(open_table(made.uri))
    region, generation = region_and_next(table)
    operation = append(table)
    assert commit_strict(table, operation, {region: generation}, NOTE) == table.version + 1, "they are all there"
    table = suspended(table.newest())
    operation = append(table)
    (path,) = {file.path for fragment in operation.new_fragments for file in fragment.files}
    (Path(made.uri, "data") / path).unlink()
    with pytest.raises(CommitLostError, match=path):
        commit_strict(table, operation, {region: generation + 1}, NOTE)
    assert table.newest().version == table.version
    assert detached(made.uri) == []


def test_an_index_that_was_deleted_before_its_commit_is_built_again(
    made: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    lance.dataset(made.uri).create_scalar_index("val", "BTREE")
    interfere_append(made.uri)
    interfere_merge(made.uri)
    removed: list[object] = []
    real = index_publishing.commit_indexes

    def deleted_once(table: Table, change: IndexChange, note: CommitNote) -> int:
        for entry in change.added[: not removed]:
            removed.append(entry)
            shutil.rmtree(Path(made.uri, index_key(entry)))
        return real(table, change, note)

    monkeypatch.setattr(index_publishing, "commit_indexes", deleted_once)
    catchup.apply(open_table(made.uri), CatchupOptions())
    assert removed
    newest = open_table(made.uri)
    assert coverage(base_indexes(newest)["val_idx"].covered, newest.manifest).complete
    assert not missing_files(newest.store, references(newest.manifest).own)


def interfere_append(uri: str) -> None:
    lance.write_dataset(lance.dataset(uri).to_table(limit=0), uri, mode="append")


def interfere_index(uri: str) -> None:
    lance.dataset(uri).create_scalar_index("val", "BTREE")


def interfere_compact(uri: str) -> None:
    lance.dataset(uri).optimize.compact_files()


def interfere_merge(uri: str) -> None:
    assert merge.apply(open_table(uri), merge.MergeOptions(max_generations=1)).decision == "merged"


def interfere_native(uri: str) -> None:
    """Another merger, written with pylance alone."""
    table = open_table(uri)
    region, generation = region_and_next(table)
    upsert = table.dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    upsert.mark_sstables_as_compacted([CompactedSsTable(str(region), generation)])
    upsert.execute(table.dataset.to_table(limit=1))


def test_the_transaction_file_that_the_version_names_stays(made: Workload) -> None:
    """Releases that find no transaction inside the manifest look for this file when they rebase."""
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    before = set(Files(made.uri).listing("_transactions"))
    version = commit_strict(table, append(table), {region: generation}, NOTE)
    named = open_table(made.uri).manifest.manifest.transaction_file
    assert set(Files(made.uri).listing("_transactions")) == {*before, f"_transactions/{named}"}
    made_by = lance.dataset(made.uri).read_transaction(version)
    assert made_by is not None
    assert made_by.transaction_properties["memwal-ops.job"] == "merge"
    assert detached(made.uri) == []


@pytest.mark.sampled(2)
@pytest.mark.req("S0-160", "S3-044", "S3-048", "S3-050", "S3-051")
@pytest.mark.parametrize(
    "interfere", [interfere_append, interfere_index, interfere_compact, interfere_merge, interfere_native]
)
def test_the_first_commit_wins(made: Workload, interfere: Callable[[str], None]) -> None:
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    operation = append(table)
    interfere(made.uri)
    after = table.newest()
    assert after.version > table.version
    transactions = Files(made.uri).listing("_transactions")
    with pytest.raises(CommitLostError) as lost:
        commit_strict(table, operation, {region: generation}, NOTE)
    assert lost.value.files_unreferenced
    newest = table.newest()
    assert newest.version == after.version
    assert newest.index.merged_generations == after.index.merged_generations
    assert detached(made.uri) == []
    assert Files(made.uri).listing("_transactions") == transactions, "nothing of the lost commit is left"


@pytest.mark.req("S0-165")
def test_a_native_merger_that_is_late_is_refused(made: Workload) -> None:
    """Our progress stands where pylance's own conflict check looks."""
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    stale = lance.dataset(made.uri)
    merge.apply(table, merge.MergeOptions())
    upsert = stale.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    upsert.mark_sstables_as_compacted([CompactedSsTable(str(region), generation)])
    with pytest.raises(OSError, match="Stale"):
        upsert.execute(stale.to_table(limit=1))
    assert read_base(made.uri) == made.expected(dict(wire.progress(Files(made.uri))))


def test_another_table_in_the_same_place(made: Workload, tmp_path: Path) -> None:
    other = Workload(2, regions=2, base_rows=40).create(str(tmp_path / "other.lance"))
    table = open_table(made.uri)
    operation, (region, generation) = append(table), region_and_next(table)
    assert lance.dataset(other.uri).version == table.version
    shutil.rmtree(made.uri)
    shutil.copytree(other.uri, made.uri)
    with pytest.raises(CommitLostError):
        commit_strict(table, operation, {region: generation}, NOTE)
    with pytest.raises(CommitLostError):
        commit_indexes(table, IndexChange(table.index.details), NOTE)
    assert lance.dataset(made.uri).version == table.version
    assert read_base(made.uri) == read_base(other.uri)
    assert detached(made.uri) == []


@pytest.mark.req("S0-163")
def test_of_many_at_once_exactly_one_lands(made: Workload) -> None:
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    operations = [append(table) for _ in range(6)]
    landed: list[int] = []
    lost: list[CommitLostError] = []
    start = threading.Barrier(len(operations))

    def commit(operation: lance.LanceOperation.Update) -> None:
        start.wait()
        try:
            landed.append(commit_strict(table, operation, {region: generation}, NOTE))
        except CommitLostError as error:
            lost.append(error)

    threads = [threading.Thread(target=commit, args=[operation]) for operation in operations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert landed == [table.version + 1]
    assert len(lost) == 5
    assert lance.dataset(made.uri).count_rows() == table.dataset.count_rows() + 1
    assert detached(made.uri) == []


def test_an_answer_that_was_lost_after_the_put(made: Workload) -> None:
    table = open_table(made.uri)
    region, generation = region_and_next(table)

    def put_if_absent(path: str, data: bytes) -> bool:
        assert table.store.put_if_absent(path, data)
        raise StoreUnavailableError("no answer")

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    assert commit_strict(lying, append(table), {region: generation}, NOTE) == table.version + 1
    assert table.newest().index.merged_generations == {region: generation}


def test_a_repeated_put_that_gets_exists(made: Workload) -> None:
    """The client sent it twice; the second answer says "exists", and what exists is ours."""
    table = open_table(made.uri)
    region, generation = region_and_next(table)

    def put_if_absent(path: str, data: bytes) -> bool:
        assert table.store.put_if_absent(path, data)
        return table.store.put_if_absent(path, data)

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    assert commit_strict(lying, append(table), {region: generation}, NOTE) == table.version + 1


def test_an_answer_that_never_came_is_not_guessed(made: Workload) -> None:
    table = open_table(made.uri)
    region, generation = region_and_next(table)

    def put_if_absent(_: str, __: bytes) -> bool:
        raise StoreUnavailableError("no answer")

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    operation = append(table)
    with pytest.raises(CommitStateUnknownError):
        commit_strict(lying, operation, {region: generation}, NOTE)
    for fragment in operation.new_fragments:
        for file in fragment.files:
            assert table.store.head(f"data/{file.path}") is not None, "the put may still arrive"
    assert table.newest().version == table.version


def test_a_put_that_arrives_when_others_went_on(made: Workload) -> None:
    """Published late, after others took the number and a clean-up removed theirs: not a success."""
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    operation = append(table)

    def put_if_absent(path: str, data: bytes) -> bool:
        interfere_append(made.uri)
        interfere_append(made.uri)
        table.store.delete_many([path])
        return table.store.put_if_absent(path, data)

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    with pytest.raises(CommitLostError):
        commit_strict(lying, operation, {region: generation}, NOTE)
    newest = table.newest()
    assert newest.version == table.version + 2
    assert newest.index.merged_generations == {}


def test_progress_never_falls(made: Workload) -> None:
    merge.apply(open_table(made.uri), merge.MergeOptions())
    table = open_table(made.uri)
    region = table.regions.region_ids[0]
    for generation in (table.index.merged_generations[region], 1, 0):
        with pytest.raises(InvariantViolatedError):
            commit_strict(table, append(table), {region: generation}, NOTE)
    assert table.newest().version == table.version
    assert detached(made.uri) == []


def test_coverage_is_determined_where_the_files_of_an_index_are(
    made: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version by an unknown release, pylance reads the indexes again; a local build of it has none of their files.

    Each merge was refused: pylance could not describe the indexes of the version that was built.
    """
    table: Any = open_table(made.uri)
    table.manifest.manifest.ClearField("writer_version")
    table.store.put(version_path(table.version, table.naming), encode_version_manifest(table.manifest))
    monkeypatch.setattr(commit, "LOCAL", frozenset())
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    commit_strict(table, append(table), {region: generation}, NOTE)
    assert "id_idx" in {index.name for index in lance.dataset(made.uri).describe_indices()}
    assert lance.dataset(made.uri).to_table(filter="id = 1000000").num_rows == 1
    assert detached(made.uri) == []


@pytest.mark.req("S3-013")
def test_what_it_must_not_write_is_refused_before_any_work(made: Workload) -> None:
    damage.set_feature_flag(made.uri, reader=False)
    table = open_table(made.uri)
    region, generation = region_and_next(table)
    before = Files(made.uri).listing("")
    with pytest.raises(UnsupportedFeatureError):
        commit_strict(table, lance.LanceOperation.Update(new_fragments=[]), {region: generation}, NOTE)
    assert Files(made.uri).listing("") == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["merge", "catchup", "snapshot", "compact"])
def test_a_lease_that_is_lost_once_the_version_exists(made: Workload, kind: str) -> None:
    """What the version names stays, although the run is denied everything else, and may remove what it wrote."""
    if kind != "merge":
        merge.apply(open_table(made.uri), merge.MergeOptions())
    table = open_table(made.uri)

    def check() -> None:
        if lance.dataset(made.uri).version > table.version:
            raise LeaseLostError("Another supervisor has the lease.")

    guarded = table.with_guard(LeaseGuard(check))
    jobs: dict[str, Callable[[], object]] = {
        "merge": lambda: merge.apply(guarded, merge.MergeOptions(max_generations=2)),
        "catchup": lambda: catchup.apply(guarded, CatchupOptions()),
        "snapshot": lambda: snapshot.apply(guarded, SnapshotOptions(inline_threshold=0)),
        "compact": lambda: compact.apply(guarded, CompactOptions()),
    }
    with contextlib.suppress(LeaseLostError):
        jobs[kind]()
    after = open_table(made.uri)
    assert after.version > table.version
    assert read_base(made.uri) == made.expected(dict(wire.progress(Files(made.uri))))
    key = next(iter(made.expected()))[0]
    assert lance.dataset(made.uri).to_table(filter=f"id = {key}").num_rows <= 1
    if kind == "snapshot":
        assert read_snapshot(after) is not None
    merge.apply(after, merge.MergeOptions())
    assert read_base(made.uri) == made.expected()
