"""gc: unneeded objects are deleted after the grace period; all others are held, with the reason."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.wire.names import bit_reversed
from memwal_ops.formats.lance.wire.region_manifest import RegionStatus
from memwal_ops.text import counted, size_text
from tests.support.gc_options import IMMEDIATE, NONE_PINNED
from tests.support.run_cli import contents
from tests.support.stores import beside, refusing
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    DAY,
    ZERO,
    age,
    collect,
    entries,
    free,
    generation_folders,
    grow,
    make,
    merged,
    paths,
    planned,
    reasons,
    sound,
    table_of,
    versions,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_spec
from tests.support.tables.region_layout import RegionLayout

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable


# -- the whole way


@pytest.mark.req("S0-060", "S0-183", "S0-184", "S0-185", "S0-186")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_unneeded_objects_are_deleted(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    before = contents(made.uri)
    plan = gc.plan(table_of(made), replace(IMMEDIATE, limit=1000))
    assert contents(made.uri) == before, "a plan reads only"
    assert (plan.decision, plan.applied, plan.deleted_objects, plan.regions) == ("planned", False, 0, 2)
    assert paths(plan.items[Verdict.DELETE], CandidateKind.GENERATION, Verdict.DELETE) == generation_folders(made)
    assert plan.bytes_reclaimable == sum(item.bytes for item in plan.items[Verdict.DELETE]) > 0
    log = {region: entries(made, region) for region in made.regions}
    doomed_log = paths(plan.items[Verdict.DELETE], CandidateKind.WAL_ENTRY, Verdict.DELETE)
    report = collect(made)
    assert (report.decision, report.drained, report.failed) == ("deleted", 6, {})
    gone = {item.path for item in report.items[Verdict.DELETE]}
    assert report.deleted_objects == sum(item.objects for item in report.items[Verdict.DELETE])
    assert report.deleted_bytes == sum(item.bytes for item in report.items[Verdict.DELETE]) == report.bytes_reclaimable
    assert generation_folders(made) == set()
    assert not any((Path(made.uri) / path).exists() for path in gone)
    for region in made.regions:
        assert wire.region_manifest(Files(made.uri), region).generations == {}
        assert set(log[region].values()) - set(entries(made, region).values()) == {
            path for path in doomed_log if region in path
        }
        assert len(versions(made, region)) == 2
    sound(made)
    assert collect(made).decision == "nothing_to_delete"
    grow(made)
    merged(made)
    sound(made)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_unmerged_tables_lose_nothing(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    merged(made)
    grow(made)
    for options in (IMMEDIATE, replace(IMMEDIATE, fence_retention=ZERO)):
        collect(made, options)
        assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    free(made)
    collect(made)
    sound(made)


def test_a_sealed_region_is_collected_like_any_other(tmp_path: Path) -> None:
    made = free(make(tmp_path))
    manifests = table_of(made).region(UUID(made.regions[0]))
    assert manifests.commit(replace(manifests.latest().next(), status=RegionStatus.SEALED))
    assert gc.plan(table_of(made), IMMEDIATE).sealed == 1
    report = collect(made)
    assert (report.sealed, report.regions, generation_folders(made)) == (1, 2, set())
    assert manifests.latest().sealed
    sound(made)


# -- drain, wait, delete


@pytest.mark.req("S0-183")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_drained_first_deleted_when_readers_are_through(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    folders = generation_folders(made)
    options = NONE_PINNED
    plan = gc.plan(table_of(made), options)
    assert (plan.decision, plan.drainable, plan.bytes_reclaimable) == ("planned", 6, 0)
    assert all(
        "listed by region manifest version" in why
        for why in reasons(planned(made, options), CandidateKind.GENERATION).values()
    )
    report = collect(made, options)
    assert (report.decision, report.drained, report.deleted_objects) == ("drained", 6, 0)
    for region in made.regions:
        assert wire.region_manifest(Files(made.uri), region).generations == {}
    assert generation_folders(made) == folders
    assert collect(made, options).decision == "nothing_to_delete"
    age(made, "_mem_wal/*/manifest/*.binpb", 14 * 60)
    why = reasons(planned(made, options), CandidateKind.GENERATION)
    assert set(why) == folders
    assert all("removed from the list by region manifest version" in text for text in why.values())
    assert collect(made, options).decision == "nothing_to_delete"
    # Only the version that dropped them counts: here it is young, and all that stand before it are old.
    age(made, "_mem_wal/*/manifest/*.binpb", DAY)
    for region in made.regions:
        drained = f"_mem_wal/{region}/manifest/{bit_reversed(versions(made, region)[-1])}.binpb"
        age(made, drained, 14 * 60)
    assert collect(made, options).counts[CandidateKind.GENERATION] == Counter({Verdict.HELD: 6})
    age(made, "_mem_wal/*/manifest/*.binpb", 16 * 60)
    assert collect(made, options).decision == "deleted"
    assert generation_folders(made) == set()
    sound(made)


# -- failures, limits


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_could_not_be_deleted_is_done_by_the_next_run(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    folder = min(generation_folders(made))
    stuck = next(path for path in Files(made.uri).listing(f"{folder}/") if path.endswith(".manifest"))
    options = replace(IMMEDIATE, fence_retention=ZERO)
    referenced = entries(made, folder.split("/")[1])
    report = collect(made, options, refusing(lambda path: path == stuck))
    assert (report.decision, report.failed) == ("incomplete", {stuck: "locked"})
    assert "not deleted" in reasons(report.items[Verdict.HELD], CandidateKind.GENERATION)[folder]
    assert generation_folders(made) == {folder}
    if kind is RegionLayout:
        number = int(folder.rsplit("_", 1)[1])
        kept = set(entries(made, folder.split("/")[1]))
        assert set(range(3 * number - 2, 3 * number + 1)) <= kept
        assert kept < set(referenced)
    sound(made)
    assert collect(made, options).decision == "deleted"
    assert generation_folders(made) == set()
    again = collect(made, options)
    assert again.decision == "nothing_to_delete"
    sound(made)


def test_a_store_that_refuses_everything(tmp_path: Path) -> None:
    made = free(make(tmp_path))
    before = Files(made.uri).listing("_mem_wal/")
    report = collect(made, store=refusing(lambda path: path.startswith("_mem_wal/")))
    assert (report.decision, report.deleted_objects) == ("incomplete", 0)
    assert set(before) <= set(Files(made.uri).listing("_mem_wal/"))
    sound(made)
    assert collect(made).decision == "deleted"


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("most", [1, 7])
def test_no_more_is_deleted_than_allowed(tmp_path: Path, kind: type[LsmTable], most: int) -> None:
    whole = free(make(tmp_path / "whole", kind))
    collect(whole)
    made = free(make(tmp_path / "parts", kind))
    deleted = 0
    for _ in range(1000):
        before = set(Files(made.uri).listing("_mem_wal/"))
        report = collect(made, replace(IMMEDIATE, max_deletes=most))
        gone = before - set(Files(made.uri).listing("_mem_wal/"))
        assert len(gone) == report.deleted_objects <= most
        deleted += len(gone)
        sound(made)
        if not report.limited:
            break
        assert report.decision == "deleted"
    assert deleted > most
    assert generation_folders(made) == set()
    for region in made.regions:
        assert set(entries(made, region)) == set(entries(whole, region))
        assert len(versions(made, region)) == 2
    assert collect(made).decision == "nothing_to_delete"


def test_what_was_deleted_of_a_generation_counts_with_its_bytes(tmp_path: Path) -> None:
    """``max_deletes`` ends the run in the middle of one; what is kept then is reported kind by kind.

    In the region layout a generation may be one object, its manifest: its rows stay in the log.
    """
    made = free(make(tmp_path))
    folder = Path(made.uri, "_mem_wal")
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    generations, logs = len(generation_folders(made)), sum(len(entries(made, region)) for region in made.regions)
    most = min(len(Files(made.uri).listing(f"{one}/")) for one in generation_folders(made)) - 1
    report = collect(made, replace(IMMEDIATE, max_deletes=most))
    gone = [path for path in sizes if not path.exists()]
    assert (len(gone), report.deleted_objects, report.limited) == (most, most, True)
    assert len(generation_folders(made)) == generations
    assert report.deleted_bytes == sum(sizes[path] for path in gone) > 0
    assert report.describe().startswith(f"deleted: {counted(most, 'object')}, {size_text(report.deleted_bytes)}, in ")
    text = " ".join(report.describe().split())
    assert re.search(rf"_gen_\d+ and {generations - 1} more \([^)]*\): not deleted, or only in part", text)
    (kept,) = re.findall(r"(\d+) WAL entries \([^)]*\): not deleted, or only in part", text)
    assert 0 < int(kept) <= logs
    assert re.search(r"\d+ region manifest versions \([^)]*\): not deleted, or only in part", text)
    sound(made)


def test_lists_are_cut_and_counts_are_not(tmp_path: Path) -> None:
    made = free(make(tmp_path))
    every = gc.plan(table_of(made), replace(IMMEDIATE, limit=10_000))
    cut = gc.plan(table_of(made), replace(IMMEDIATE, limit=1))
    assert (every.truncated, cut.truncated) == (False, True)
    assert {verdict: len(items) for verdict, items in cut.items.items()} == {
        Verdict.DELETE: 1,
        Verdict.HELD: 1,
        Verdict.UNKNOWN: 0,
    }
    assert (cut.counts, cut.bytes_reclaimable) == (every.counts, every.bytes_reclaimable)


def test_a_writer_that_publishes_while_its_region_is_drained(tmp_path: Path) -> None:
    made = free(make(tmp_path, regions=1))
    before = wire.region_manifest(Files(made.uri), made.regions[0])
    collect(made, store=beside("put_if_absent", "/manifest/", lambda: grow(made)))
    after = wire.region_manifest(Files(made.uri), made.regions[0])
    assert set(after.generations) == {4}
    assert after.epoch > before.epoch
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    free(made)
    collect(made)
    sound(made)
