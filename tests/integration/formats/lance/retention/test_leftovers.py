"""What killed commits leave behind goes, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.commit.commit import CommitNote, commit_strict
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.retention.garbage import find_leftovers, sweep_leftovers
from memwal_ops.storage.clock import CLOCK_FOLDER
from tests.integration.formats.lance.commit.test_commit import append
from tests.support.counting_store import CountingStore
from tests.support.dying_store import DyingStore, Killed
from tests.support.stores import LyingStore
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

NOW = timedelta(0)


@pytest.fixture(params=["local", "s3"])
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workload:
    """A table whose versions pylance builds in its own folder: on S3, if there is no temporary folder for it."""
    uri, options = str(tmp_path / "t.lance"), None
    if request.param == "s3":
        monkeypatch.setattr(commit, "LOCAL", frozenset({"s3"}))
        bucket, options = request.getfixturevalue("bucket")
        uri = f"{bucket}/t.lance"
    table = Workload(1, regions=1, base_rows=30).create(uri, options)
    table.step(4)
    table.flush()
    return table


def killed_commit(table: Table, at: str, *, after: bool) -> None:
    """A merge commit that dies at its first storage call of that name."""
    region = table.regions.region_ids[0]
    operation = append(table)
    for number in range(1, 40):
        store = DyingStore(table.store, number, after=after)
        try:
            commit_strict(replace(table, store=store), operation, {region: 1}, CommitNote("merge", "killed", "0.0"))
        except Killed:
            if store.calls[number - 1] == at:
                return
        else:
            raise AssertionError(f"no call of {at}")


def leftovers(made: Workload) -> tuple[list[str], set[str]]:
    """Detached manifests, and all transaction files."""
    files = Files(made.uri, made.storage_options)
    detached = [path for path in files.listing("_versions") if "/d" in path]
    return detached, set(files.listing("_transactions"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", ["get", "put", "put_if_absent"])
def test_a_commit_that_died_before_it_was_published(made: Workload, at: str) -> None:
    table = open_table(made.uri, made.storage_options)
    _, before = leftovers(made)
    killed_commit(table, at, after=False)
    detached, transactions = leftovers(made)
    assert detached
    assert sweep_leftovers(table) == 0, "it may still be at work"
    # Another version, by which it is certain that nothing can come of it.
    lance.dataset(made.uri, storage_options=made.storage_options).update_metadata({"a": "b"})
    table = table.newest()
    assert sweep_leftovers(table, abandoned_after=NOW) >= 2
    detached, after = leftovers(made)
    assert detached == []
    assert after & transactions == before
    lance.dataset(made.uri, storage_options=made.storage_options).optimize.optimize_indices()


@pytest.mark.long
@pytest.mark.s3
def test_a_commit_that_died_beside_the_table(bucket: tuple[str, dict[str, str]]) -> None:
    """What pylance built in a temporary folder leaves only its transaction file, which expiries delete after a week."""
    made = Workload(1, regions=1, base_rows=30).create(f"{bucket[0]}/t.lance", bucket[1])
    made.step(4)
    made.flush()
    table = open_table(made.uri, made.storage_options)
    _, before = leftovers(made)
    killed_commit(table, "put_if_absent", after=False)
    detached, transactions = leftovers(made)
    assert (detached, len(transactions - before)) == ([], 3), "it was killed at three calls"
    assert sweep_leftovers(table.newest(), abandoned_after=NOW) == 0
    assert run_job(made.uri, "merge", storage_options=made.storage_options).decision == "merged"


@pytest.mark.sampled(1)
def test_a_commit_that_died_after_it_was_published(made: Workload) -> None:
    """Its version names the transaction file."""
    table = open_table(made.uri, made.storage_options)
    killed_commit(table, "put_if_absent", after=True)
    newest = table.newest()
    assert newest.version == table.version + 1
    assert leftovers(made)[0]
    assert sweep_leftovers(newest, abandoned_after=NOW) >= 1
    detached, after = leftovers(made)
    assert detached == []
    assert f"_transactions/{newest.manifest.manifest.transaction_file}" in after
    read = lance.dataset(made.uri, storage_options=made.storage_options).read_transaction(newest.version)
    assert read is not None


def test_others_detached_versions_stay(made: Workload) -> None:
    table = open_table(made.uri, made.storage_options)
    transaction = lance.Transaction(read_version=table.version, operation=append(table))
    options = made.storage_options
    foreign = lance.LanceDataset.commit(made.uri, transaction, detached=True, storage_options=options).version
    assert sweep_leftovers(table, abandoned_after=NOW) == 0
    assert lance.dataset(made.uri, version=foreign, storage_options=options).count_rows() == 31


@pytest.mark.sampled(1)
def test_our_clock_is_no_proof(made: Workload) -> None:
    """Ours is fast, or the store's is slow: a commit under way is not taken for one that was killed long ago."""
    table = open_table(made.uri, made.storage_options)
    killed_commit(table, "put_if_absent", after=False)
    before = leftovers(made)

    def head(path: str) -> ObjectMeta | None:
        meta = table.store.head(path)
        slow = path.startswith(CLOCK_FOLDER) and meta is not None
        return replace(meta, last_modified=meta.last_modified - timedelta(hours=2)) if slow else meta

    slow = replace(table, store=LyingStore(table.store, head=head))
    assert sweep_leftovers(slow, abandoned_after=timedelta(hours=1)) == 0
    assert sweep_leftovers(slow, abandoned_after=NOW) == 0
    assert leftovers(made) == before
    assert sweep_leftovers(table, abandoned_after=NOW) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keeper", ["tag", "branch"])
def test_a_detached_version_that_is_named_stays(made: Workload, keeper: str) -> None:
    table = open_table(made.uri, made.storage_options)
    killed_commit(table, "put_if_absent", after=False)
    named, *others = [left.version for left in find_leftovers(table)]
    assert others
    dataset = lance.dataset(made.uri, storage_options=made.storage_options)
    if keeper == "tag":
        dataset.tags.create("audit", named)
    else:
        dataset.create_branch("what-if", named)
    found = gc.candidates(table, gc.GcOptions(NOW, NOW, allow_unsafe=True))
    held = {
        item.path: item.why for item in found if item.kind is CandidateKind.LEFTOVER and item.verdict is Verdict.HELD
    }
    assert held.keys() == {f"_versions/d{named}.manifest"}
    assert keeper in held.popitem()[1]
    assert sweep_leftovers(table, abandoned_after=NOW) >= len(others)
    assert [left.version for left in find_leftovers(table)] == [named]


@pytest.mark.sampled(1)
def test_the_leftovers_of_another_table_in_the_same_place_stay(made: Workload) -> None:
    table = open_table(made.uri, made.storage_options)
    killed_commit(table, "put_if_absent", after=False)
    before = leftovers(made)
    files = Files(made.uri, made.storage_options)
    name, manifest = wire.newest_manifest(files)
    files.put(name, wire.build_manifest(manifest.replaced(f12=b"0-another.txn")))
    assert sweep_leftovers(table, abandoned_after=NOW) == 0
    assert leftovers(made) == before


def test_one_listing_where_nothing_is_left(made: Workload) -> None:
    table = open_table(made.uri, made.storage_options)
    store = CountingStore(table.store)
    sweep_leftovers(replace(table, store=store), abandoned_after=NOW)
    assert store.calls == {"list": 1}
    assert store.objects_listed <= 2
