"""Which WAL entries and region manifests gc keeps: fence posts, what a reader may follow, no gap."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from memwal_ops.core import collector
from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.jobs.gc.job import GcOptions
from memwal_ops.formats.lance.wire.names import bit_reversed
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.gc_options import IMMEDIATE
from tests.support.stores import refusing
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    DAY,
    HOUR,
    ZERO,
    age,
    collect,
    entries,
    epochs_of,
    expired,
    firsts,
    free,
    generation_folders,
    grow,
    make,
    merged,
    planned,
    reasons,
    sound,
    table_of,
    versions,
    write,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import open_dataset, read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload
from tests.support.tables.writers import closed_at_the_end

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.tables.lsm_table import LsmTable


@pytest.mark.req("S0-185")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_log_entries_wait_for_readers_of_older_manifests(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind, generations=2, regions=1)
    (region,) = made.regions
    settled = wire.region_manifest(Files(made.uri), region).replay_after
    age(made, "_mem_wal/*/manifest/*.binpb", HOUR)
    grow(made)
    newest = wire.region_manifest(Files(made.uri), region).replay_after
    assert newest > settled
    held = reasons(planned(made, GcOptions()), CandidateKind.WAL_ENTRY)
    log = entries(made, region)
    young = {path for number, path in log.items() if settled < number <= newest}
    assert young == {path for path, why in held.items() if "flushed less than --reader-grace (15m) ago" in why}
    made.put([0])
    unflushed = {path for number, path in entries(made, region).items() if number > newest}
    held = reasons(planned(made), CandidateKind.WAL_ENTRY)
    assert unflushed
    assert unflushed == {path for path, why in held.items() if "not flushed" in why}
    made.flush()


@pytest.mark.req("S0-190")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_log_stays_where_an_unmerged_generation_is_gone(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    damage.remove_generation(made.uri, made.regions[0], 2)
    log = entries(made, made.regions[0])
    options = replace(IMMEDIATE, fence_retention=ZERO)
    held = {
        path: why
        for path, why in reasons(planned(made, options), CandidateKind.WAL_ENTRY).items()
        if made.regions[0] in path
    }
    assert set(held) == set(log.values())
    assert all("generation 2 is missing" in why for why in held.values())
    collect(made, options)
    assert entries(made, made.regions[0]) == log


@pytest.mark.req("S0-190")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("harm", ["manifest cut short", "manifests gone", "rows cut short"])
def test_the_log_stays_where_an_unmerged_generation_cannot_be_read(
    tmp_path: Path, kind: type[LsmTable], harm: str
) -> None:
    """In the region layout the log's entries are its data files, whether its manifest tells or not.

    In the shard layout, repair makes it again from them.
    """
    made = make(tmp_path, kind)
    folder = damage.generation_path(made.uri, made.regions[0], 2)
    if harm == "manifest cut short":
        damage.truncate_generation_manifest(made.uri, made.regions[0], 2)
    elif harm == "manifests gone":
        shutil.rmtree(folder / "_versions")
    else:
        for path in folder.glob("data/*.lance"):
            path.write_bytes(path.read_bytes()[:-1])
    log = entries(made, made.regions[0])
    collect(made, replace(IMMEDIATE, fence_retention=ZERO))
    assert entries(made, made.regions[0]) == log


@pytest.mark.req("S0-185", "S0-209")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_first_entry_of_every_epoch_stays(tmp_path: Path, kind: type[LsmTable]) -> None:
    """So does the last of all, behind which the next writer goes on."""
    made = free(make(tmp_path, kind, generations=4, regions=1))
    (region,) = made.regions
    posts, last = firsts(epochs_of(made, region)), max(entries(made, region))
    assert len(posts) == 4
    collect(made)
    assert set(entries(made, region)) == {*posts.values(), last}
    age(made, "_mem_wal/*/wal/*", 29 * DAY)
    collect(made)
    assert set(entries(made, region)) == {*posts.values(), last}
    age(made, "_mem_wal/*/wal/*", 31 * DAY)
    collect(made)
    assert set(entries(made, region)) == {posts[3], posts[4], last}
    age(made, "_mem_wal/*/wal/*", 3000 * DAY)
    assert collect(made, replace(IMMEDIATE, fence_retention=ZERO)).decision == "nothing_to_delete"
    grow(made)
    merged(made)
    sound(made)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_fenced_writer_is_refused(tmp_path: Path, writes: int) -> None:
    """It wakes after all of its successors' entries that may go are gone (landmine 3)."""
    made = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    (region,) = made.regions
    stalled = closed_at_the_end(open_dataset(made.uri).mem_wal_writer(region, max_wal_flush_interval_ms=1))
    rows = open_dataset(made.uri).to_table(limit=1)
    for _ in range(writes):
        stalled.put(rows)
    for _ in range(3):
        grow(made)
    free(made)
    age(made, "_mem_wal/*/wal/*", 20 * DAY)
    report = collect(made)
    assert generation_folders(made) == set()
    assert writes < 2 or report.counts[CandidateKind.WAL_ENTRY][Verdict.DELETE] > 0
    with pytest.raises((OSError, ValueError, RuntimeError)):
        stalled.put(rows)


def test_entries_that_a_silent_epoch_may_meet_stay(tmp_path: Path) -> None:
    """Epoch 2 was claimed and stalled at once; epoch 1, which did not know of it, wrote entries 3 and 4."""
    made = RegionLayout(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    (region,) = made.regions
    state = made._states[region]
    for epoch, writes in ((1, 2), (1, 2), (3, 3)):
        state.epoch = epoch
        for _ in range(writes):
            made.put([0])
        made.flush()
        if epoch == 1 and writes == 2 and state.current_generation == 2:
            state.epoch = 2
            made._publish(region)
    free(made)
    keep_all = replace(IMMEDIATE, manifest_retention=100)
    why = reasons(planned(made, keep_all), CandidateKind.WAL_ENTRY)
    log = entries(made, region)
    assert {number for number, path in log.items() if path in why} == {1, 3, 4, 5, 6, 7}
    assert all("writer epoch 2 may write here" in why[log[number]] for number in (3, 4))
    collect(made, keep_all)
    assert set(entries(made, region)) == {1, 3, 4, 5, 6, 7}
    # Without the manifest of the claim its position is unknown: it may be any of the remaining entries.
    for _ in range(2):
        collect(made)
        assert set(entries(made, region)) == {1, 3, 4, 5, 6, 7}
    age(made, "_mem_wal/*/wal/*", 31 * DAY)
    collect(made)
    assert set(entries(made, region)) == {1, 5, 7}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_entry_that_cannot_be_read_stays(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind, generations=4, regions=1))
    (region,) = made.regions
    posts = firsts(epochs_of(made, region))
    epoch = sorted(posts)[1]
    path = entries(made, region)[posts[epoch]]
    write(made, path, b"nothing that can be read")
    age(made, "_mem_wal/*/wal/*", 400 * DAY)
    assert "an unknown epoch" in reasons(planned(made), CandidateKind.WAL_ENTRY)[path]
    collect(made)
    assert path in entries(made, region).values()


@pytest.mark.req("S0-190")
def test_entries_of_the_region_layout_are_deleted_with_their_last_generation(tmp_path: Path) -> None:
    made = make(tmp_path, RegionLayout, generations=2, regions=1)
    (region,) = made.regions
    merged(made)
    open_dataset(made.uri).tags.create("middle", table_of(made).version)
    first = wire.region_manifest(Files(made.uri), region).replay_after
    grow(made)
    free(made)
    options = replace(IMMEDIATE, fence_retention=ZERO)
    collect(made, options)
    left = entries(made, region)
    # All of generation 3 stays with it, and of the others the post of the newest epoch but one.
    assert {number for number in left if number > first} == set(range(first + 1, first + 4))
    assert {number for number in left if number <= first} == {first - 2}
    assert all(
        "_gen_3 has its rows in it" in why for number, path in left.items() if number > first
        for why in [reasons(planned(made, options), CandidateKind.WAL_ENTRY)[path]]
    )  # fmt: skip
    open_dataset(made.uri).tags.delete("middle")
    expired(made)
    report = collect(made, options)
    assert report.counts[CandidateKind.GENERATION][Verdict.DELETE] == 1
    assert set(entries(made, region)) == {first - 2, first + 1, first + 3}
    sound(made)


# -- region manifests


@pytest.mark.req("S0-186")
@pytest.mark.parametrize("hint", [None, b"", b'{"version": 1}'], ids=["none", "torn", "old"])
def test_the_newest_manifests_stay_and_the_hint_leads_to_them(tmp_path: Path, hint: bytes | None) -> None:
    made = make(tmp_path, regions=1)
    (region,) = made.regions
    path = f"_mem_wal/{region}/manifest/version_hint.json"
    if hint is None:
        Path(made.uri, path).unlink()
    else:
        write(made, path, hint)
    before = versions(made, region)
    done: list[tuple[str, str]] = []

    class Recording(StoreWrapper):
        def put(self, where: str, data: bytes) -> None:
            done.append(("put", where))
            super().put(where, data)

        def delete_many(self, doomed: Iterable[str]) -> Any:
            doomed = list(doomed)
            done.extend(("delete", one) for one in doomed)
            return super().delete_many(doomed)

    collect(made, replace(IMMEDIATE, manifest_retention=4), Recording)
    assert versions(made, region) == before[-4:]
    of_manifests = [(verb, wire.from_bit_reversed(one.rsplit("/", 1)[-1]) if verb == "delete" else one)
                    for verb, one in done if "/manifest/" in one]  # fmt: skip
    assert of_manifests == [("put", path), *(("delete", version) for version in before[:-4])]
    assert wire.get(wire.region_manifest(Files(made.uri), region).fields, 1) == before[-1]
    assert table_of(made).region(UUID(region)).hint() == before[-1]
    made.put([0])
    made.flush()
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)


def test_manifests_that_a_reader_may_follow_stay(tmp_path: Path) -> None:
    made = make(tmp_path, regions=1, generations=4)
    (region,) = made.regions
    before = versions(made, region)
    for version in before[:5]:
        age(made, f"_mem_wal/{region}/manifest/{bit_reversed(version)}.binpb", HOUR)
    collect(made, GcOptions(manifest_retention=2))
    assert versions(made, region) == before[4:], "the newest of the old ones is what a reader may have read"


@pytest.mark.parametrize("batch", [1000, 2])
def test_no_gap_where_a_manifest_cannot_be_deleted(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "BATCH_OBJECTS", batch)
    made = make(tmp_path, regions=1, generations=4)
    (region,) = made.regions
    before = versions(made, region)
    stuck = before[2]
    report = collect(made, store=refusing(lambda path: path.endswith(f"{bit_reversed(stuck)}.binpb")))
    assert report.decision == "incomplete"
    assert list(report.failed.values()) == ["locked"]
    assert versions(made, region) == before[2:]
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    assert collect(made).decision == "deleted"
    assert versions(made, region) == before[-2:]


def test_one_object_that_stays_does_not_stop_the_others(tmp_path: Path) -> None:
    """Somebody locked one old manifest for good: all other regions are collected nevertheless."""
    made = free(make(tmp_path, regions=3))
    locked = min(made.regions)
    stuck = f"{locked}/manifest/{bit_reversed(1)}.binpb"
    for _ in range(2):
        report = collect(made, store=refusing(lambda path: path.endswith(stuck)))
        assert list(report.failed) == [f"_mem_wal/{stuck}"]
    assert generation_folders(made) == set()
    for region in made.regions:
        assert region == locked or len(versions(made, region)) == 2
