"""Insert, delete, search: against brute force, at old epochs, filtered, rolled back."""

from __future__ import annotations

import os
import resource
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import (
    BusyError,
    InvalidUsageError,
    NotALanceTableError,
    StorageError,
    TableNotFoundError,
    UnsupportedFeatureError,
    VersionGoneError,
)
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import transaction
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.vectors import entry_points
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_rows, check_sound, nearest, recall

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    lm_diskann.create(template, dimension=16, R=16, L=60)
    with lm_diskann.open(template) as index:
        index.insert(np.arange(3000), vectors[:3000])
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


@pytest.mark.long
@pytest.mark.req("S2-009")
def test_rows_of_each_of_many_clusters_are_found(folder: str) -> None:
    """The nearest R_f nodes of a node are in its own cluster, so that no link leads to another one."""
    random = np.random.default_rng(4)
    far = (random.normal(size=(40, 16)) * 100).astype(np.float32)
    of = np.repeat(np.arange(40), 60)
    vectors = (far[of] + random.normal(size=(len(of), 16))).astype(np.float32)
    shuffled = random.permutation(len(of))
    lm_diskann.create(folder, dimension=16, R=16, L=40)
    with lm_diskann.open(folder) as index:
        index.insert(shuffled[:1600], vectors[shuffled[:1600]])
        index.insert(shuffled[1600:], vectors[shuffled[1600:]])
        assert (index.search(vectors, k=1, L=20)[0][:, 0] == np.arange(len(of))).all()
        index.delete(np.flatnonzero(np.arange(len(of)) % 60 >= 15))
        left = np.flatnonzero(np.arange(len(of)) % 60 < 15)
        assert (index.search(vectors[left], k=1, L=40)[0][:, 0] == left).all()
    check_sound(folder)


@pytest.mark.long
@pytest.mark.parametrize("quantizer", ["pq", "ternary"])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.req("S2-001", "S2-006", "S2-008", "S2-009", "S2-010")
def test_recall_of_a_build_and_of_inserts(folder: str, vectors: np.ndarray, metric: str, quantizer: str) -> None:
    lm_diskann.create(folder, dimension=16, metric=metric, R=16, L=60, quantizer=quantizer)
    queries = vectors[3900:]
    kept = vectors if metric == "l2" else vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(3000), vectors[:3000])
        for first in range(3000, 3600, 200):
            index.insert(np.arange(first, first + 200), vectors[first : first + 200])
        found, distances = index.search(queries, k=10, L=120)
        assert found.dtype == np.int64
        assert distances.dtype == np.float32
        assert (np.diff(distances, axis=1) >= 0).all()
        assert recall(found, nearest(np.arange(3600), kept[:3600], kept[3900:], 10)) >= 0.95
        itself, zero = index.search(vectors[:3600], k=1, L=60 if quantizer == "pq" else 240)
        assert (itself[:, 0] == np.arange(3600)).all()
        assert np.abs(zero).max() < 1e-5
        row = int(found[0, 0])
        exact = ((kept[row] - kept[3900]) ** 2).sum() * (1 if metric == "l2" else 0.5)
        assert distances[0, 0] == pytest.approx(exact, rel=1e-4)
    check_sound(folder)


@pytest.mark.long
@pytest.mark.req("S2-016", "S2-048", "S2-081")
def test_beam_width_and_cache_change_nothing_but_reads(made: str, vectors: np.ndarray) -> None:
    with lm_diskann.open(made, read_only=True) as index:
        plain = index.search(vectors[:50], k=5)
        reads = int(index.view.counts[4])
        again = index.search(vectors[:50], k=5)
        assert int(index.view.counts[4]) == reads, "everything is in the cache"
    with lm_diskann.open(made, read_only=True, cache_bytes=0) as index:
        small = index.search(vectors[:50], k=5, beam_width=4)
        assert int(index.view.counts[4]) > reads
    assert (plain[0] == again[0]).all()
    assert (plain[0] == small[0]).all()


@pytest.mark.long
def test_few_rows_are_searched_exactly_and_this_is_reported(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16)
    with lm_diskann.open(folder) as index:
        assert index.exact
        assert (index.search(vectors[:2], k=3)[0] == -1).all()
        index.insert(np.arange(700), vectors[:700])
        assert index.exact
        found, _ = index.search(vectors[:100], k=10)
        assert (found == nearest(np.arange(700), vectors[:700], vectors[:100], 10)).all()
        found, distances = index.search(vectors[:2], k=800)
        assert (found[:, 700:] == -1).all()
        assert np.isinf(distances[:, 700:]).all()
        index.insert(np.arange(700, 1400), vectors[700:1400])
        assert not index.exact
    assert run_job(folder, "inspect").to_json()["exact"] is False
    check_sound(folder)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
@pytest.mark.req("S2-005")
def test_allow(made: str, vectors: np.ndarray, share: float) -> None:
    random = np.random.default_rng(3)
    allowed = np.sort(random.choice(3000, int(3000 * share), replace=False))
    with lm_diskann.open(made, read_only=True) as index:
        for few in (3000, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("memwal_ops.formats.lm_diskann.library._FEW", few)
                found, _ = index.search(vectors[3000:3100], k=10, L=100, allow=random.permutation(allowed))
            assert np.isin(found, allowed).all()
            assert recall(found, nearest(allowed, vectors[allowed], vectors[3000:3100], 10)) >= 0.95
        assert (index.search(vectors[:3], allow=np.zeros(0, np.int64))[0] == -1).all()


@pytest.mark.parametrize("k", [10, 900])
def test_a_filter_that_allows_only_rows_far_from_the_query(made: str, vectors: np.ndarray, k: int) -> None:
    queries = vectors[3000:3020]
    with (
        lm_diskann.open(made, read_only=True) as index,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("memwal_ops.formats.lm_diskann.library._FEW", 0)
        index.search(queries)  # reads the entry points
        for query in queries:
            allowed = np.sort(np.argsort(((vectors[:3000] - query) ** 2).sum(1))[-900:])
            before = int(index.view.counts[3])
            found, distances = index.search(query, k=k, L=100, allow=allowed)
            assert {*found[0].tolist()} <= {*allowed.tolist()}
            assert len({*found[0].tolist()}) == k, "all that there are"
            assert (np.diff(distances[0]) >= 0).all()
            assert int(index.view.counts[3]) - before <= (600 if k == 10 else 6000), "not a search through all others"


@pytest.mark.long
@pytest.mark.req("S2-012", "S2-037", "S2-070", "S2-084", "S2-096", "S2-099", "S2-100")
def test_old_epochs_read_as_they_did(made: str, vectors: np.ndarray) -> None:
    with lm_diskann.open(made) as index:
        first = index.epoch
        index.delete(np.arange(100))
        deleted = index.epoch
        index.insert(np.arange(50), vectors[3000:3050])
        for merged in (False, True):
            if merged:
                assert index.merge()
            old, _ = index.search(vectors[:100], k=1, as_of=first)
            assert (old[:, 0] == np.arange(100)).all()
            gone, _ = index.search(vectors[:100], k=5, as_of=deleted)
            assert (gone >= 100).all()
            new, _ = index.search(vectors[3000:3050], k=1)
            assert (new[:, 0] == np.arange(50)).all()
        with pytest.raises(VersionGoneError):
            index.search(vectors[:1], as_of=index.epoch + 1)
    check_rows(made, dict(enumerate(vectors[:3000])), first)
    check_sound(made)


def spill_early(self: transaction.Transaction, rows: int) -> None:
    """As if there were room for 400 blocks."""
    if self.view.counts[1] > 400:
        self._spill()


@pytest.mark.long
@pytest.mark.req("S2-013", "S2-015", "S2-025", "S2-068", "S2-069", "S2-072", "S2-097")
def test_a_rollback_leaves_nothing(made: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    before = View(made).live_rows()
    with lm_diskann.open(made) as index:
        epoch = index.epoch
        for spilled in (False, True):
            if spilled:
                monkeypatch.setattr(index, "_delta_bytes", 0)
                monkeypatch.setattr(transaction.Transaction, "reserve", spill_early)
            with pytest.raises(ZeroDivisionError), index.transaction():
                index.insert(np.arange(5000, 5100), vectors[3000:3100])
                index.delete(np.arange(40))
                seen, _ = index.search(vectors[3000:3100], k=1)
                assert (seen < 3000).all(), "uncommitted rows are not visible"
                raise ZeroDivisionError
            assert index.epoch == epoch
            assert (index.search(vectors[:40], k=1)[0][:, 0] == np.arange(40)).all()
            assert (index.search(vectors[3000:3100], k=1)[0] < 3000).all()
        assert View(made).live_rows() == before
        index.insert([3500], vectors[3999:])
        assert index.search(vectors[3999:], k=1)[0].tolist() == [[3500]]
        assert not index.writable().columns("SELECT 1 FROM lmd_delta_blocks WHERE origin_txn IS NULL")[0].any()
    check_sound(made)


def test_a_transaction_is_seen_at_once(made: str, vectors: np.ndarray) -> None:
    with lm_diskann.open(made) as index, lm_diskann.open(made, read_only=True) as reader:
        epoch = index.epoch
        with index.transaction():
            index.insert([7000], vectors[3500:3501])
            index.delete([0, 1])
            index.insert([7001, 1], vectors[3501:3503])
            index.delete([7000])
            assert reader.search(vectors[:1], k=1)[0].tolist() == [[0]]
        assert index.epoch == epoch + 1
        found, _ = reader.search(vectors[[0, 3500, 3501, 3502]], k=1)
        assert found[2:, 0].tolist() == [7001, 1]
        assert 0 not in found
        assert 7000 not in found
        assert len(reader) == len(index) == 3000
    check_sound(made)


@pytest.mark.long
@pytest.mark.req("S2-019", "S2-036", "S2-053", "S2-101")
def test_a_row_that_comes_again_is_another_node(made: str, vectors: np.ndarray) -> None:
    with lm_diskann.open(made) as index:
        index.insert(np.arange(10), vectors[3000:3010])
        index.delete(np.arange(10))
        index.insert(np.arange(10), vectors[3100:3110])
        assert (index.search(vectors[3100:3110], k=1)[0][:, 0] == np.arange(10)).all()
        assert index.view.state.next_node_id == 3020
        assert len(index) == 3000
    nodes = [node for row, node in View(made).rows if row == 3]
    assert len({*nodes}) == 3
    check_sound(made)


@pytest.mark.long
def test_every_row_deleted_and_back(made: str, vectors: np.ndarray) -> None:
    with lm_diskann.open(made) as index:
        assert index.delete(np.arange(3000)) == 3000
        assert index.delete(np.arange(3000)) == 0
        assert (index.search(vectors[:20], k=3)[0] == -1).all()
        index.insert(np.arange(20), vectors[:20])
        assert (index.search(vectors[:20], k=1)[0][:, 0] == np.arange(20)).all()
        assert index.merge()
        index.insert(np.arange(100, 900), vectors[100:900])
        found, _ = index.search(vectors[100:900], k=1, L=200)  # the tombstones are in the way
        assert (found[:, 0] == np.arange(100, 900)).all()
    check_sound(made)


@pytest.mark.long
def test_a_deleted_entry_point_is_replaced_by_a_node_near_it(made: str, vectors: np.ndarray) -> None:
    """Where rows are in clusters, no path may lead into the one that has lost its entry point."""
    with lm_diskann.open(made) as index:
        entries = index.view.entries(index.epoch)
        view = View(made)
        near = {node for entry in entries.tolist() for node in view.block(entry, index.epoch)["links"]}
        index.delete([row for row, node in view.rows if node in entries])
        now = index.view.entries(index.epoch)
        assert 3 * entry_points(len(index)) <= 4 * len(now) <= 4 * entry_points(len(index))
        assert not {*now.tolist()} & {*entries.tolist()}
        assert {*now.tolist()} <= near
        assert (index.view.entries(index.epoch - 1) == entries).all()
        index.delete(sorted(row for row, node in view.rows if node in near))
        now = index.view.entries(index.epoch)
        assert len(now) == entry_points(len(index)), "random nodes, as none near is left"
    check_sound(made)


@pytest.mark.long
@pytest.mark.req("S2-065", "S2-073", "S2-074", "S2-075", "S2-076")
def test_backlinks_overflow_and_come_back(folder: str) -> None:
    """A hub: a point that many others have as their nearest neighbour."""
    random = np.random.default_rng(5)
    shell = random.normal(size=(2000, 64))
    shell = (shell / np.linalg.norm(shell, axis=1, keepdims=True)).astype(np.float32)
    lm_diskann.create(folder, dimension=64, R=4, L=40, alpha=1.0)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1, 1500), shell[1:1500])
        index.insert([0], np.zeros((1, 64), np.float32))
        for first in range(1500, 2000, 100):
            index.insert(np.arange(first, first + 100), shell[first : first + 100])
        [over] = index.writable().columns("SELECT DISTINCT target_node_id FROM lmd_backlink_overflow")
        assert len(over)
    check_sound(folder)
    view = View(folder)
    flagged = {node for node in view.versions if (view.block(node, view.epoch) or {})["overflowed"]}
    assert flagged == {*over.tolist()}
    block = view.block(next(iter(flagged)), view.epoch)
    assert block is not None
    assert block["overflow_reference"] == block["node_id"]
    assert not block["backlinks"]
    ever = {*over.tolist()}
    with lm_diskann.open(folder) as index:
        for first in range(2000, 3000, 100):  # nearer neighbours: the hub's referrers prune it away
            near = shell[first - 2000 : first - 1900] * np.float32(1.001)
            index.insert(np.arange(first, first + 100), near)
            [over] = index.writable().columns("SELECT DISTINCT target_node_id FROM lmd_backlink_overflow")
            ever |= {*over.tolist()}
        assert ever - {*over.tolist()}, "some came back"
    check_sound(folder)


@pytest.mark.long
def test_duplicates_are_all_found_when_one_of_them_is_deleted(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16, R=8, L=60)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(2000), vectors[:2000])
        index.insert(np.arange(5000, 5010), np.repeat(vectors[:1], 10, axis=0))
        for gone in range(5000, 5009):
            index.delete([gone])
            found, distances = index.search(vectors[:1], k=11 - (gone - 4999), L=100)
            assert {*found[0].tolist()} == {0, *range(gone + 1, 5010)}
            assert not distances.any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ([1, 1], np.zeros((2, 16))), ([1], np.zeros((2, 16))), ([1], np.zeros((1, 15))), ([-1], np.zeros((1, 16))),
        ([1], np.full((1, 16), np.nan)), ([1], np.full((1, 16), 1e18)), ([1.5], np.zeros((1, 16))),
        ([2**63], np.zeros((1, 16))), ([[1]], np.zeros((1, 16))),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(made: str, rows: list[int], given: np.ndarray) -> None:
    before = View(made).live_rows()
    with lm_diskann.open(made) as index:
        with pytest.raises(InvalidUsageError):
            index.insert(rows, given)
        with pytest.raises(InvalidUsageError):
            index.search(np.zeros((1, 15)))
    assert View(made).live_rows() == before


def test_opening_what_is_none(tmp_path: object, folder: str) -> None:
    with pytest.raises(TableNotFoundError):
        lm_diskann.open(folder)
    os.mkdir(folder)
    with open(f"{folder}/other", "w") as file:
        file.write("x")
    with pytest.raises(NotALanceTableError):
        lm_diskann.open(folder)
    with pytest.raises(InvalidUsageError, match="exists already"):
        lm_diskann.create(folder)


@pytest.mark.req("S2-031")
def test_an_object_store_is_refused_by_name(tmp_path: object) -> None:
    with pytest.raises(UnsupportedFeatureError, match="pages of one file"):
        lm_diskann.create("s3://bucket/index")
    with pytest.raises(UnsupportedFeatureError, match="pages of one file"):
        lm_diskann.open("s3://bucket/index")


@pytest.mark.long
@pytest.mark.req("S2-071")
def test_a_hold_keeps_its_epoch_through_merges(made: str, vectors: np.ndarray) -> None:
    from datetime import timedelta

    held = open_table(made).revision
    take_hold(open_table(made), held, timedelta(hours=1))
    for round_ in range(3):
        with lm_diskann.open(made) as index:
            index.delete(np.arange(round_ * 50, round_ * 50 + 50))
            index.insert(np.arange(4000, 4050), vectors[3000:3050])
            index.merge()
    check_rows(made, dict(enumerate(vectors[:3000])), held)
    with lm_diskann.open(made, read_only=True) as index:
        assert (index.search(vectors[:150], k=1, as_of=held)[0][:, 0] == np.arange(150)).all()
    check_sound(made)


def test_create_opens_the_index(folder: str, vectors: np.ndarray) -> None:
    with lm_diskann.create(folder, dimension=16, R=8, L=40) as index:
        index.insert(np.arange(10), vectors[:10])
        assert index.search(vectors[:10], k=1)[0][:, 0].tolist() == list(range(10))
    with lm_diskann.open(folder) as index:
        assert len(index) == 10


@pytest.mark.long
def test_a_large_insert_leaves_a_view_with_a_base(folder: str, vectors: np.ndarray) -> None:
    """Readers map the base; of what is in the log, they keep several times as much in memory for each node."""
    with lm_diskann.create(folder, dimension=16, R=8, L=40) as index:
        index.insert(np.arange(3000), vectors[:3000])
        assert not index.exact
        number, log = index.view.number, os.fstat(index.view.files[1]).st_size
        index.insert(np.arange(3000, 3010), vectors[3000:3010])
        assert (log, index.view.number) == (0, number), "a small one is appended to the log"
    check_rows(folder, dict(enumerate(vectors[:3010])))


@pytest.mark.long
def test_a_large_insert_without_space_for_a_base_is_committed(folder: str, vectors: np.ndarray) -> None:
    def full(what: str, action: Callable[[], object]) -> None:
        if what == "write the base of a view":
            raise StorageError("The disk is full.")
        action()

    lm_diskann.create(folder, dimension=16, R=8, L=40)
    with Index(folder, step=full) as index:
        index.insert(np.arange(3000), vectors[:3000])
        assert len(index) == 3000
    check_rows(folder, dict(enumerate(vectors[:3000])))
    check_sound(folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [("append",), ("append", "write the base")])
def test_a_commit_that_could_not_be_published_is_there_and_comes_first(
    made: str, vectors: np.ndarray, steps: tuple[str, ...]
) -> None:
    """The next change of the same index begins where that one ended, and not at the view."""
    full = True

    def step(name: str, act: Callable[[], object]) -> object:
        if full and name.startswith(steps):
            raise StorageError("The disk is full.")
        return act()

    with Index(made, step=step) as index:
        if len(steps) == 1:
            index.insert(np.arange(3000, 3040), vectors[3000:3040])
        else:
            with pytest.raises(StorageError, match=r"but not visible yet\. The disk is full"):
                index.insert(np.arange(3000, 3040), vectors[3000:3040])
        full = False
        index.insert(np.arange(3030, 3080), vectors[3030:3080])
        assert len(index) == 3080
    check_rows(made, dict(enumerate(vectors[:3080])))
    check_sound(made)


def test_a_store_without_space_is_not_taken_for_damaged(made: str, vectors: np.ndarray) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with lm_diskann.open(made) as index:
        index.delete([1])
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            with pytest.raises(StorageError, match="Failed to commit"):
                index.delete([2])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(index) == 2999
        index.delete([3])
    check_rows(made, {row: vectors[row] for row in range(3000) if row not in (1, 3)})
    check_sound(made)


def test_a_reader_notices_that_the_folder_was_restored(made: str, vectors: np.ndarray) -> None:
    """The older copy goes on from a view of the same number."""
    backup = shutil.copytree(made, f"{made}.backup")
    with lm_diskann.open(made) as index:
        index.insert([3500], vectors[3500:3501])
    with lm_diskann.open(made, read_only=True) as reader:
        assert reader.search(vectors[3500:3501], k=1)[0] == [[3500]]
        shutil.rmtree(made)
        shutil.copytree(backup, made)
        assert reader.search(vectors[3500:3501], k=1)[0] != [[3500]]
        with lm_diskann.open(made) as index:
            index.delete([5])
            index.insert([3501], vectors[3501:3502])
        assert reader.search(vectors[5:6], k=1)[0] != [[5]]
        assert reader.search(vectors[3501:3502], k=1)[0] == [[3501]]


def test_an_index_that_nobody_closed_keeps_neither_its_lock_nor_old_epochs(folder: str) -> None:
    lm_diskann.create(folder, dimension=16)
    lm_diskann.open(folder, wait=0)
    lm_diskann.open(folder, read_only=True)
    assert os.listdir(f"{folder}/readers") == []


def test_a_forked_process_does_not_close_a_reader_of_its_parent(folder: str) -> None:
    lm_diskann.create(folder, dimension=16)
    readers = [lm_diskann.open(folder, read_only=True)]
    with warnings.catch_warnings(action="ignore"):  # of forks in processes with threads
        child = os.fork()
    if not child:
        readers.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir(f"{folder}/readers")) == 1
    readers[0].close()


def test_a_second_writer_waits_and_then_fails_as_busy(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16)
    with lm_diskann.open(folder) as writer:
        with pytest.raises(BusyError, match=str(os.getpid())):
            lm_diskann.open(folder, wait=0.2)
        with pytest.raises(BusyError):
            run_job(folder, "merge", wait="0s")
        with lm_diskann.open(folder, read_only=True) as reader:
            writer.insert([1], vectors[:1])
            assert reader.search(vectors[:1], k=1)[0].tolist() == [[1]]
            with pytest.raises(InvalidUsageError, match="read-only"):
                reader.insert([2], vectors[:1])
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(lm_diskann.open, folder, wait=20)
            writer.close()
            second.result().close()


def test_small_commits_straight_into_the_graph(made: str, vectors: np.ndarray) -> None:
    """With ``delta_bytes`` 0 no block waits for a merge, and the handle reads what it wrote, also after a rollback."""
    rows = dict(enumerate(vectors[:3000]))
    with lm_diskann.open(made, delta_bytes=0) as index, lm_diskann.open(made, read_only=True) as reader:
        for first in range(3000, 3040, 10):
            with pytest.raises(ZeroDivisionError), index.transaction():
                index.insert(np.arange(9000, 9010), vectors[first : first + 10])
                raise ZeroDivisionError
            index.insert(np.arange(first, first + 10), vectors[first : first + 10])
            index.delete([first - 3000])
            rows.update(zip(range(first, first + 10), vectors[first : first + 10], strict=True))
            del rows[first - 3000]
            for one in (index, reader):
                assert (one.search(vectors[first : first + 10], k=1)[0][:, 0] == np.arange(first, first + 10)).all()
                assert one.search(vectors[first - 3000], k=1)[0][0, 0] != first - 3000
        [waiting] = index.writable().columns("SELECT count(*) FROM lmd_delta_blocks")
        assert (int(waiting[0]), index.merge()) == (0, 0)
    for job in ("catchup", "compact", "gc"):
        run_job(made, job, apply=True)
    check_rows(made, rows)
    check_sound(made)
