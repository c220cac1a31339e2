"""Commits of indexes alone: from the newest manifest, exactly V+1 or nothing, and nothing else changed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import lance
import pytest
from lance.mem_wal import CompactedSsTable

from memwal_ops import open_table
from memwal_ops.errors import (
    CommitStateUnknownError,
    InvariantViolatedError,
    StoreUnavailableError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, IndexChange, commit_indexes
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.wire.memwal_index import with_catchup, with_progress, with_snapshot
from memwal_ops.formats.lance.wire.names import NamingScheme
from tests.support.stores import LyingStore
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base
from tests.support.tables.schemas import row_table
from tests.support.tables.templates import copy_of
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.formats.lance.table import Table

NOTE = CommitNote("snapshot", "a run", "0.0")


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    return copy_of(partly_merged, str(tmp_path / "t.lance"))


def partly_merged(uri: str) -> Workload:
    table = Workload(1, regions=2, base_rows=60).create(uri)
    for _ in range(3):
        table.step(5)
        table.flush()
    merge.apply(open_table(table.uri), merge.MergeOptions(max_generations=1, regions=(UUID(table.regions[0]),)))
    return table


def snapshot_of(table: Table, number: int = 7) -> IndexChange:
    details = with_snapshot(table.index.details, timestamp_millis=number, num_regions=number, inline=b"rows")
    return IndexChange(details)


def raw_details(uri: str) -> list[wire.Field]:
    return wire.decode(wire.mem_wal_details(wire.newest_manifest(Files(uri))[1]))


def transactions(uri: str) -> set[str]:
    return set(Files(uri).listing("_transactions"))


@pytest.mark.req("S0-012", "S0-013", "S0-016", "S0-077", "S0-175", "S0-176")
def test_only_what_was_asked_for_changes(made: Workload) -> None:
    """Unknown fields of the details, of the entry and of the section included."""
    name, manifest = wire.newest_manifest(Files(made.uri))
    details = wire.encode([*wire.decode(wire.mem_wal_details(manifest)), (1001, b"of a later release"), (1002, 5)])
    Files(made.uri).put(name, wire.build_manifest(wire.with_details(manifest, details)))
    before = open_table(made.uri)
    rows = read_base(made.uri)
    assert commit_indexes(before, snapshot_of(before), NOTE) == before.version + 1
    after = before.newest()
    assert after.version == before.version + 1
    assert after.index.merged_generations == before.index.merged_generations != {}
    assert (after.index.snapshot_ts_millis, after.index.num_regions, after.index.inline_snapshots) == (7, 7, b"rows")
    assert after.index.uuid != before.index.uuid
    fields = raw_details(made.uri)
    assert wire.get(fields, 1001) == b"of a later release"
    assert wire.get(fields, 1002) == 5
    for field in (7, 8, 9, 10, 11, 12):
        assert [one for one in fields if one.number == field] == [
            one for one in wire.decode(details) if one.number == field
        ]
    assert [entry.name for entry in after.manifest.indexes.indices if entry.name != "__lance_mem_wal"] == ["id_idx"]  # type: ignore[union-attr]
    assert read_base(made.uri) == rows
    assert after.manifest.manifest.fragments == before.manifest.manifest.fragments


def test_the_history_shows_who_did_it(made: Workload) -> None:
    table = open_table(made.uri)
    version = commit_indexes(table, snapshot_of(table), NOTE)
    read = lance.dataset(made.uri).read_transaction(version)
    assert read is not None
    assert read.read_version == table.version
    assert read.transaction_properties == {
        "memwal-ops.job": "snapshot",
        "memwal-ops.run_id": "a run",
        "memwal-ops.version": "0.0",
    }
    assert f"_transactions/{table.version}-{read.uuid}.txn" in transactions(made.uri), "for releases that look there"
    assert not [path for path in Files(made.uri).listing("_versions") if "/d" in path]


@pytest.mark.long
@pytest.mark.parametrize("on_s3", [False, True], ids=["local", "s3"])
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_pylance_continues_with_what_was_written(
    tmp_path: Path, bucket: tuple[str, dict[str, str]], on_s3: bool, stable: bool
) -> None:
    """Opens, scans, merges, indexes, updates, compacts, cleans up and time-travels."""
    uri, options = (f"{bucket[0]}/t.lance", bucket[1]) if on_s3 else (str(tmp_path / "t.lance"), None)
    made = Workload(1, regions=2, base_rows=60, stable_row_ids=stable).create(uri, options)
    made.step(10)
    made.flush()
    table = open_table(uri, options)
    before = read_base(uri, options)
    version = commit_indexes(table, snapshot_of(table), NOTE)
    assert read_base(uri, options) == before
    (region, generation), *_ = table.index.merged_generations.items() or [(table.regions.region_ids[0], 0)]
    rows = row_table(made.schema, made.key, [10**6], made.rng, 1)
    upsert = lance.dataset(uri, storage_options=options).merge_insert("id")
    upsert.when_matched_update_all().when_not_matched_insert_all()
    upsert.mark_sstables_as_compacted([CompactedSsTable(str(region), generation + 1)]).execute(rows)
    dataset = lance.dataset(uri, storage_options=options)
    dataset.create_scalar_index("val", "BTREE")
    dataset.update({"txt": "'x'"}, where="id < 5")
    dataset.optimize.optimize_indices()
    dataset.optimize.compact_files()
    assert read_base(uri, options, version=version) == before
    after = open_table(uri, options)
    assert after.index.merged_generations == {region: generation + 1}
    assert after.index.inline_snapshots == b"rows"
    dataset = lance.dataset(uri, storage_options=options)
    dataset.cleanup_old_versions(retain_versions=1)
    assert dataset.count_rows(f"id = {rows['id'][0].as_py()}") == 1
    made.close()


def interfere_append(uri: str) -> None:
    dataset = lance.dataset(uri)
    lance.write_dataset(dataset.to_table(limit=1), uri, mode="append")


def interfere_merge(uri: str) -> None:
    merge.apply(open_table(uri), merge.MergeOptions(max_generations=1))


def interfere_snapshot(uri: str) -> None:
    table = open_table(uri)
    commit_indexes(table, snapshot_of(table, 99), NOTE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("interfere", [interfere_append, interfere_merge, interfere_snapshot])
def test_the_first_commit_wins(made: Workload, interfere: Callable[[str], None]) -> None:
    """Where pylance's own commit would be rebased and take the merge's progress back (landmine 1)."""
    stale = open_table(made.uri)
    interfere(made.uri)
    standing = open_table(made.uri)
    left = transactions(made.uri)
    with pytest.raises(CommitLostError) as lost:
        commit_indexes(stale, snapshot_of(stale), NOTE)
    assert lost.value.files_unreferenced
    assert open_table(made.uri).version == standing.version
    assert open_table(made.uri).index.merged_generations == standing.index.merged_generations
    assert transactions(made.uri) == left, "no transaction file of a lost commit"


@pytest.mark.parametrize("moment", ["put", "refuse_if_not_newest"])
def test_taken_at_the_last_moment(made: Workload, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    table = open_table(made.uri)
    if moment == "put":

        def put_if_absent(path: str, data: bytes) -> bool:
            interfere_merge(made.uri)
            return table.store.put_if_absent(path, data)

        committing = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    else:
        committing = table
        real = commit.refuse_if_not_newest

        def late(*arguments: Any) -> None:
            monkeypatch.setattr(commit, "refuse_if_not_newest", real)
            real(*arguments)
            interfere_merge(made.uri)

        monkeypatch.setattr(commit, "refuse_if_not_newest", late)
    with pytest.raises(CommitLostError):
        commit_indexes(committing, snapshot_of(table), NOTE)
    newest = open_table(made.uri)
    assert sum(newest.index.merged_generations.values()) > sum(table.index.merged_generations.values())
    assert newest.index.num_regions == 0


def test_of_many_at_once_exactly_one_lands(made: Workload) -> None:
    table = open_table(made.uri)
    landed: list[int] = []

    def commit(number: int) -> None:
        try:
            commit_indexes(table, snapshot_of(table, number), NOTE)
        except CommitLostError:
            return
        landed.append(number)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(landed) == 1
    assert open_table(made.uri).version == table.version + 1
    assert open_table(made.uri).index.num_regions == landed[0]


def test_an_answer_that_was_lost_after_the_put(made: Workload) -> None:
    table = open_table(made.uri)

    def put_if_absent(path: str, data: bytes) -> bool:
        assert table.store.put_if_absent(path, data)
        raise StoreUnavailableError("no answer")

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    assert commit_indexes(lying, snapshot_of(table), NOTE) == table.version + 1
    assert table.newest().index.num_regions == 7


def test_an_answer_that_never_came_is_not_guessed(made: Workload) -> None:
    """The put may still arrive: the transaction file that it names stays."""
    table = open_table(made.uri)
    late: list[Callable[[], bool]] = []

    def put_if_absent(path: str, data: bytes) -> bool:
        late.append(lambda: table.store.put_if_absent(path, data))
        raise StoreUnavailableError("no answer")

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    with pytest.raises(CommitStateUnknownError):
        commit_indexes(lying, snapshot_of(table), NOTE)
    assert table.newest().version == table.version
    assert late[0]()
    assert table.newest().index.num_regions == 7
    assert lance.dataset(made.uri).read_transaction(table.version + 1) is not None


def test_a_put_that_arrives_when_others_went_on(made: Workload) -> None:
    """The number was used and freed again: no success is reported. All its files are there, so that it stays."""
    table = open_table(made.uri)

    def put_if_absent(path: str, data: bytes) -> bool:
        interfere_append(made.uri)
        interfere_merge(made.uri)
        table.store.delete_many([path])
        return table.store.put_if_absent(path, data)

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent))
    with pytest.raises(CommitLostError):
        commit_indexes(lying, snapshot_of(table), NOTE)
    newest = table.newest()
    assert newest.version > table.version + 1
    assert newest.index.num_regions == 0
    assert lance.dataset(made.uri, version=table.version + 1).count_rows() == table.dataset.count_rows()


def test_a_slow_clock_costs_no_version(made: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another builder went on from ours, on a machine whose clock is behind: ours is part of the history."""

    from memwal_ops.formats.lance.commit import commit

    table = open_table(made.uri)
    real = commit.verify_in_history

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(commit, "verify_in_history", real)
        interfere_snapshot(made.uri)
        newest = Files(made.uri).listing("_versions")[0]
        os.utime(f"{made.uri}/{newest}", (0, 0))
        real(*arguments)

    monkeypatch.setattr(commit, "verify_in_history", late)
    assert commit_indexes(table, snapshot_of(table), NOTE) == table.version + 1
    assert table.version + 1 in {one["version"] for one in lance.dataset(made.uri).versions()}


def test_progress_is_not_touched(made: Workload) -> None:
    table = open_table(made.uri)
    region = table.regions.region_ids[0]
    merged = table.index.merged_generations.get(region, 0)
    with pytest.raises(InvariantViolatedError, match="merge progress"):
        commit_indexes(table, IndexChange(with_progress(table.index.details, {region: merged + 1})), NOTE)
    with pytest.raises(InvariantViolatedError, match="must not be"):
        with_catchup(table.index.details, {"id_idx": {region: merged + 1}})
    with pytest.raises(InvariantViolatedError, match="lacks an index"):
        commit_indexes(table, IndexChange(table.index.details, removed=frozenset({uuid4()})), NOTE)
    assert table.newest().version == table.version


def test_v1_names(tmp_path: Path) -> None:
    """pylance makes no detached version there; a change of indexes alone needs none."""
    made = Workload(1, regions=1, base_rows=20)
    uri = str(tmp_path / "t.lance")
    damage.make_v1_named_table(uri, row_table(made.schema, made.key, range(20), made.rng, 0)).initialize_mem_wal()
    table = open_table(uri)
    assert table.naming is NamingScheme.V1
    version = commit_indexes(table, snapshot_of(table), NOTE)
    assert Files(uri).size(f"_versions/{version}.manifest") > 0
    assert lance.dataset(uri).version == version
    assert lance.dataset(uri).count_rows() == 20
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    assert table.newest().index.inline_snapshots == b"rows"


def test_what_must_not_be_rewritten_is_refused(made: Workload) -> None:
    damage.set_feature_flag(made.uri, reader=False)
    table = open_table(made.uri)
    with pytest.raises(UnsupportedFeatureError):
        commit_indexes(table, snapshot_of(table), NOTE)
    name, manifest = wire.newest_manifest(Files(made.uri))
    Files(made.uri).put(name, wire.build_manifest(manifest.replaced(f10=1, f77=3)))
    table = open_table(made.uri)
    with pytest.raises(UnsupportedFeatureError, match="77"):
        commit_indexes(table, snapshot_of(table), NOTE)
    assert table.newest().version == table.version
