"""What keeps a generation: versions, tags, branches, holds and indexes, also those that come after the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import lance
import pytest
from lance.dataset import Index

from memwal_ops.core.candidates import Verdict
from memwal_ops.core.holds import release_hold
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, commit_indexes
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.wire.memwal_index import with_catchup
from tests.support.gc_options import IMMEDIATE
from tests.support.stores import beside
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    ZERO,
    caught_up,
    collect,
    entries,
    expired,
    free,
    generation_folders,
    grow,
    keep_by_branch,
    keep_by_hold,
    keep_by_tag,
    make,
    merged,
    planned,
    reasons,
    sound,
    table_of,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import open_dataset, read_base, read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.tables.lsm_table import LsmTable

NOTE = CommitNote("test", "run", "0.0")


@dataclass(frozen=True)
class Holder:
    """Something that keeps a table's generations; ``take`` gives what the reason must name."""

    take: Callable[[LsmTable], str]
    release: Callable[[LsmTable], object]


def _claim(made: LsmTable, reached: Callable[[int], int]) -> None:
    table = table_of(made)
    merged_to = table.index.merged_generations
    claims = {"id_idx": {region: reached(generation) for region, generation in merged_to.items()}}
    commit_indexes(table, IndexChange(with_catchup(table.index.details, claims)), NOTE)


def _behind_by_fragments(made: LsmTable) -> str:
    merged(made)
    _claim(made, lambda merged_to: merged_to)
    expired(made)
    assert set(table_of(made).index.index_catchup["id_idx"].values()) == {3}
    return "index id_idx"


def _behind_by_claim(made: LsmTable) -> str:
    merged(made)
    caught_up(made)
    _claim(made, lambda _: 0)
    expired(made)
    return "index id_idx"


def _old_version(made: LsmTable) -> str:
    version = table_of(made).version
    merged(made)
    caught_up(made)
    expire.apply(
        table_of(made), expire.ExpireOptions(ZERO, keep=table_of(made).version - version + 1, allow_unsafe=True)
    )
    return f"version{'' if isinstance(made, Workload) else 's'} {version}"


def _kept(take: Callable[[LsmTable, int], str]) -> Callable[[LsmTable], str]:
    """Something on the version before the merge, which alone is left of all the old ones."""

    def keep(made: LsmTable) -> str:
        said = take(made, table_of(made).version)
        free(made)
        return said

    return keep


HOLDERS = {
    "not merged": Holder(lambda made: (expired(made), "not merged yet")[1], free),
    "an index, by its fragments": Holder(_behind_by_fragments, free),
    "an index, by its claim": Holder(_behind_by_claim, free),
    "an old version": Holder(_old_version, expired),
    "a tag": Holder(_kept(keep_by_tag), lambda made: (open_dataset(made.uri).tags.delete("audit"), expired(made))),
    "a branch": Holder(
        _kept(keep_by_branch), lambda made: (open_dataset(made.uri).branches.delete("side"), expired(made))
    ),
    "a hold": Holder(_kept(keep_by_hold), lambda made: (release_hold(table_of(made), 1), expired(made))),
}


@pytest.mark.sampled(3)
@pytest.mark.req("S0-079", "S0-184", "S0-188", "S0-189", "S0-190")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_generation_is_held_until_released(tmp_path: Path, name: str, kind: type[LsmTable]) -> None:
    made, holder = make(tmp_path, kind), HOLDERS[name]
    folders = generation_folders(made)
    said = holder.take(made)
    why = reasons(planned(made), CandidateKind.GENERATION)
    # Of several versions the one before all merges is below every generation, the others only below some.
    of_some = name == "an old version"
    newest = {path: text for path, text in why.items() if not of_some or path.endswith("_gen_3")}
    assert set(why) == folders
    assert all(said in text or (of_some and "needed by version" in text) for text in newest.values()), (said, why)
    report = collect(made)
    assert (report.drained, report.counts[CandidateKind.GENERATION][Verdict.DELETE]) == (0, 0)
    assert reasons(report.items[Verdict.HELD], CandidateKind.GENERATION) == why
    assert generation_folders(made) == folders
    for folder in folders:
        assert open_dataset(f"{made.uri}/{folder}").to_table().num_rows > 0
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    holder.release(made)
    assert collect(made).counts[CandidateKind.GENERATION] == Counter({Verdict.DELETE: len(folders)})
    assert generation_folders(made) == set()
    sound(made)


@pytest.mark.req("S0-189")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_time_travel_finds_its_generations(tmp_path: Path, kind: type[LsmTable]) -> None:
    """A tag in the middle of the history holds just what it has not merged."""
    made = make(tmp_path, kind, generations=2)
    merged(made)
    reached = wire.progress(Files(made.uri))
    open_dataset(made.uri).tags.create("middle", table_of(made).version)
    old = made.expected()
    grow(made)
    free(made)
    collect(made)
    assert {int(folder.rsplit("_", 1)[1]) for folder in generation_folders(made)} == {3}
    assert reached == dict.fromkeys(made.regions, 2)
    assert_same(read_base(made.uri, version=open_dataset(made.uri).tags.get_version("middle")), old, seed=made.seed)
    sound(made)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_base_files_below_mem_wal_hold_everything(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    path, manifest = wire.newest_manifest(Files(made.uri))
    region = f"{made.uri}/_mem_wal/{made.regions[0]}/wal"
    base = wire.Field(18, wire.encode([(1, 7), (4, region.encode())]))
    fields = sorted([*manifest.fields, base], key=lambda field: field.number)
    Path(made.uri, path).write_bytes(wire.build_manifest(replace(manifest, fields=fields)))
    before = generation_folders(made), [entries(made, one) for one in made.regions]
    report = collect(made, replace(IMMEDIATE, fence_retention=ZERO))
    assert report.drained == 0
    assert all("files below _mem_wal/" in why for why in reasons(planned(made), CandidateKind.GENERATION).values())
    assert (generation_folders(made), [entries(made, one) for one in made.regions]) == before


# -- what came after the plan


@pytest.mark.sampled(2)
@pytest.mark.req("S0-189")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("holder", [keep_by_tag, keep_by_branch, keep_by_hold])
def test_changes_between_plan_and_apply_are_respected(
    tmp_path: Path, kind: type[LsmTable], holder: Callable[[LsmTable, int], str]
) -> None:
    """The plan listed what expire and gc would delete; then a hold was placed on the old version."""
    made = make(tmp_path, kind)
    old, rows = table_of(made).version, made.expected()
    merged(made)
    caught_up(made)
    planned_expiry = expire.plan(table_of(made), expire.ExpireOptions(ZERO, allow_unsafe=True))
    assert old in planned_expiry.versions
    assert planned_expiry.frees[0] == 6
    said = holder(made, old)
    applied = expire.apply(table_of(made), expire.ExpireOptions(ZERO, allow_unsafe=True))
    assert old not in applied.versions
    folders = generation_folders(made)
    report = collect(made)
    assert report.drained == 0
    assert all(said in why for why in reasons(report.items[Verdict.HELD], CandidateKind.GENERATION).values())
    assert generation_folders(made) == folders
    open_dataset(made.uri).checkout_version(old).to_table()
    assert_same(read_spec(made.uri), rows, seed=made.seed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_claim_that_is_lowered_between_draining_and_deleting(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind, regions=1))
    folders = generation_folders(made)
    report = collect(made, store=beside("put_if_absent", "/manifest/", lambda: _claim(made, lambda _: 0)))
    assert report.drained == 3
    assert report.counts[CandidateKind.GENERATION] == Counter({Verdict.HELD: 3})
    assert all("index id_idx" in why for why in reasons(report.items[Verdict.HELD], CandidateKind.GENERATION).values())
    assert generation_folders(made) == folders
    if kind is RegionLayout:
        assert report.counts[CandidateKind.WAL_ENTRY][Verdict.DELETE] == 0
    free(made)
    collect(made)
    assert generation_folders(made) == set()
    sound(made)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_progress_that_is_taken_back_before_the_deletes(tmp_path: Path, kind: type[LsmTable]) -> None:
    """A stale commit of the MemWAL index (landmine 1) lands after the drain: the rows are in the generations alone."""
    made = make(tmp_path, kind, regions=1)
    stale = open_dataset(made.uri).version
    _, manifest = wire.newest_manifest(Files(made.uri))
    details = wire.mem_wal_details(manifest)
    entry = wire.mem_wal_entry(manifest)
    assert entry is not None
    old = Index(
        uuid=wire.uuid_of(entry, 1), name=wire.MEM_WAL_INDEX, fields=[], dataset_version=stale,
        fragment_ids=set(), index_version=0, index_details=(wire.DETAILS_URL, details),
    )  # fmt: skip
    free(made)
    folders = generation_folders(made)
    log = entries(made, made.regions[0])

    def take_back() -> None:
        now = open_dataset(made.uri)
        new = replace(old, uuid=str(uuid4()))
        _, manifest = wire.newest_manifest(Files(made.uri))
        standing = wire.mem_wal_entry(manifest)
        assert standing is not None
        removed = replace(old, uuid=wire.uuid_of(standing, 1))
        lance.LanceDataset.commit(
            made.uri, lance.LanceOperation.CreateIndex([new], [removed]), read_version=now.version
        )
        assert wire.progress(Files(made.uri)) == {}

    report = collect(made, replace(IMMEDIATE, fence_retention=ZERO), beside("put_if_absent", "/manifest/", take_back))
    assert report.counts[CandidateKind.GENERATION] == Counter({Verdict.HELD: 3})
    assert generation_folders(made) == folders
    if kind is RegionLayout:
        assert entries(made, made.regions[0]) == log
