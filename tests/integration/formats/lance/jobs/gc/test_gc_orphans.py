"""What no region lists: orphans, snapshots, leftovers of killed runs, and what is unrecognized."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileWriter

from memwal_ops import run_job
from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.indexes.snapshots import snapshot_path
from memwal_ops.formats.lance.jobs import snapshot
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.jobs.gc.job import GcOptions
from memwal_ops.formats.lance.layouts import MixedLayoutsError
from memwal_ops.formats.lance.wire.names import bit_reversed
from tests.integration.formats.lance.retention.test_leftovers import killed_commit
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import contents
from tests.support.tables import damage
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    DAY,
    HOUR,
    ZERO,
    age,
    collect,
    entries,
    expired,
    free,
    generation_folders,
    grow,
    keep_by_branch,
    keep_by_tag,
    make,
    paths,
    planned,
    reasons,
    table_of,
    unlist,
    versions,
    write,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import open_dataset, read_base, read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable


def orphan(made: LsmTable, generation: int, *, old: bool) -> str:
    folder = f"_mem_wal/{made.regions[0]}/0badcafe_gen_{generation}"
    write(made, f"{folder}/data/x.lance", b"12345")
    write(made, f"{folder}/_versions/1.manifest", b"67")
    if old:
        age(made, f"{folder}/*/*", 4 * DAY)
    return folder


@pytest.mark.req("S0-187")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_orphans_are_deleted_when_no_flush_can_be_in_progress(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    listed, later, far = orphan(made, 2, old=True), orphan(made, 4, old=True), orphan(made, 9, old=True)
    young = orphan(made, 5, old=False)
    half = orphan(made, 6, old=True)
    write(made, f"{half}/data/y.lance")
    items = planned(made, GcOptions())
    assert paths(items, CandidateKind.ORPHAN, Verdict.DELETE) == {listed, later, far}
    assert {
        path: "a flush may be in progress" in why for path, why in reasons(items, CandidateKind.ORPHAN).items()
    } == {
        young: True,
        half: True,
    }
    (item,) = [one for one in items if one.path == listed]
    assert (item.generation, item.bytes, item.objects) == (2, 7, 2)
    assert "published from another directory" in item.why
    standing = generation_folders(made)
    report = collect(made, GcOptions())
    assert report.counts[CandidateKind.ORPHAN] == Counter({Verdict.DELETE: 3, Verdict.HELD: 2})
    assert generation_folders(made) == standing - {listed, later, far}
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)


@pytest.mark.req("S0-187", "S0-190")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("forget", [False, True])
def test_an_unmerged_generation_that_is_listed_nowhere_stays(
    tmp_path: Path, kind: type[LsmTable], forget: bool
) -> None:
    """It was removed from the list by mistake; its rows are only in its directory and in the log."""
    made = make(tmp_path, kind)
    lost = unlist(made, 2, forget=forget)
    log = entries(made, made.regions[0])
    age(made, f"{lost}/**/*", 4 * DAY)
    options = replace(IMMEDIATE, fence_retention=ZERO)
    items = planned(made, options)
    assert "not merged yet" in reasons(items, CandidateKind.ORPHAN if forget else CandidateKind.GENERATION)[lost]
    for path, why in reasons(items, CandidateKind.WAL_ENTRY).items():
        if made.regions[0] in path:
            assert "generation 2 is neither merged nor listed" in why
    collect(made, options)
    assert lost in generation_folders(made)
    assert entries(made, made.regions[0]) == log


def test_an_old_manifest_that_cannot_be_read_may_list_anything(tmp_path: Path) -> None:
    made = make(tmp_path)
    region = made.regions[0]
    held = orphan(made, 9, old=True)
    broken = versions(made, region)[-3]
    path = damage.region_manifest_path(made.uri, region, broken)
    path.write_bytes(path.read_bytes()[:3])
    options = GcOptions()
    assert (
        f"region manifest version {broken} cannot be read"
        in reasons(planned(made, options), CandidateKind.ORPHAN)[held]
    )
    collect(made, options)
    assert held in generation_folders(made)


# -- what belongs to no region


def test_external_snapshots(tmp_path: Path) -> None:
    made = make(tmp_path)
    snapshot.apply(table_of(made), snapshot.SnapshotOptions(0))
    named = snapshot_path(table_of(made).index.uuid)
    data = Files(made.uri).get(named)
    old, young, torn, other = (snapshot_path(uuid4()) for _ in range(4))
    for path in (old, young, other):
        write(made, path, data)
    write(made, torn, data[: len(data) // 2])
    with LanceFileWriter(f"{made.uri}/{other}", pa.schema([("n", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"n": pa.array([1])}))
    for path in (named, old, torn, other):
        age(made, path, 4 * DAY)
    items = planned(made, GcOptions())
    assert paths(items, CandidateKind.SNAPSHOT, Verdict.DELETE) == {old}
    why = reasons(items, CandidateKind.SNAPSHOT)
    assert set(why) == {named, young}
    assert "names it" in why[named]
    assert "a commit may be in progress" in why[young]
    assert set(reasons(items, CandidateKind.UNKNOWN)) == {torn}
    collect(made, GcOptions())
    standing = {path for path in (named, old, young, torn, other) if Path(made.uri, path).exists()}
    assert standing == {named, young, torn, other}
    assert snapshot.apply(table_of(made), snapshot.SnapshotOptions(0)).decision == "unchanged"


@pytest.mark.parametrize("keeper", ["tag", "branch"])
def test_a_snapshot_stays_while_a_kept_version_names_it(tmp_path: Path, keeper: str) -> None:
    made = make(tmp_path, RegionLayout)
    snapshot.apply(table_of(made), snapshot.SnapshotOptions(0))
    named = snapshot_path(table_of(made).index.uuid)
    (keep_by_tag if keeper == "tag" else keep_by_branch)(made, table_of(made).version)
    grow(made)
    snapshot.apply(table_of(made), snapshot.SnapshotOptions(0))
    assert snapshot_path(table_of(made).index.uuid) != named
    expired(made)
    collect(made)
    assert Path(made.uri, named).exists()


def test_leftovers_of_killed_commits(tmp_path: Path) -> None:
    made = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    grow(made)
    table = table_of(made)
    killed_commit(table, "put_if_absent", after=False)
    ours = {f"_versions/{path.name}" for path in Path(made.uri, "_versions").glob("d*")}
    transactions = {path.name for path in Path(made.uri, "_transactions").glob("*")}
    assert ours
    items = planned(made, GcOptions())
    assert ours <= set(reasons(items, CandidateKind.LEFTOVER))
    assert all("a commit may be in progress" in why for why in reasons(items, CandidateKind.LEFTOVER).values())
    assert collect(made, GcOptions()).deleted_objects == 0
    dataset = open_dataset(made.uri)
    transaction = lance.Transaction(
        read_version=dataset.version, operation=lance.LanceOperation.Append(dataset.get_fragments()[0:0])
    )
    lance.LanceDataset.commit(made.uri, transaction, detached=True)
    foreign = {f"_versions/{path.name}" for path in Path(made.uri, "_versions").glob("d*")} - ours
    age(made, "_versions/d*", 4 * DAY)
    report = collect(made, GcOptions())
    assert paths(report.items[Verdict.DELETE], CandidateKind.LEFTOVER, Verdict.DELETE) >= ours
    assert set(reasons(report.items[Verdict.UNKNOWN], CandidateKind.UNKNOWN)) == foreign
    standing = {f"_versions/{path.name}" for path in Path(made.uri, "_versions").glob("d*")}
    assert standing == foreign
    assert {path.name for path in Path(made.uri, "_transactions").glob("*")} >= {
        table.manifest.manifest.transaction_file
    } & transactions
    dataset.optimize.optimize_indices()
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_unrecognized_files_are_named_and_kept(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    region = f"_mem_wal/{made.regions[0]}"
    strange = {
        write(made, path): named
        for path, named in {
            "_mem_wal/readme.txt": "_mem_wal/readme.txt",
            "_mem_wal/no-region/x": "_mem_wal/no-region",
            f"_mem_wal/{made.regions[0].upper()}/manifest/x": f"_mem_wal/{made.regions[0].upper()}",
            f"{region}/note": f"{region}/note",
            f"{region}/wal/note.txt": f"{region}/wal/note.txt",
            f"{region}/wal/deep/{bit_reversed(1)}.lance": f"{region}/wal/deep/{bit_reversed(1)}.lance",
            f"{region}/manifest/{bit_reversed(1)}.binpb.tmp": f"{region}/manifest/{bit_reversed(1)}.binpb.tmp",
            f"{region}/manifest/{bit_reversed(0)}.binpb": f"{region}/manifest/{bit_reversed(0)}.binpb",
            f"{region}/abc_gen_1/data/x": f"{region}/abc_gen_1",
            f"{region}/0badcafe_gen_0/x": f"{region}/0badcafe_gen_0",
            f"{region}/0badcafe_gen_01/x": f"{region}/0badcafe_gen_01",
            f"{region}/backup/x": f"{region}/backup",
        }.items()
    }
    age(made, "_mem_wal/**/*", 4000 * DAY)
    for options in (IMMEDIATE, replace(IMMEDIATE, fence_retention=ZERO)):
        assert set(reasons(planned(made, options), CandidateKind.UNKNOWN)) == set(strange.values())
        report = collect(made, options)
        assert report.counts[CandidateKind.UNKNOWN] == Counter({Verdict.UNKNOWN: len(strange)})
    assert all(Path(made.uri, path).exists() for path in strange)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_entry_of_the_other_layout_stops_the_collection(tmp_path: Path, kind: type[LsmTable]) -> None:
    """Its writer counts entries as flushed that it cannot read: none of the log may go."""
    made = free(make(tmp_path, kind))
    other = {Workload: "lance", RegionLayout: "arrow"}[kind]
    write(made, f"_mem_wal/{made.regions[0]}/wal/{bit_reversed(1)}.{other}")
    age(made, "_mem_wal/**/*", 4000 * DAY)
    before = contents(made.uri)
    for run in (planned, collect):
        with pytest.raises(MixedLayoutsError, match="two kinds of writers"):
            run(made, replace(IMMEDIATE, fence_retention=ZERO))
    after = contents(made.uri)
    assert {path: after.get(path) for path in before if "_mem_wal_ops" not in path} == {
        path: kept for path, kept in before.items() if "_mem_wal_ops" not in path
    }


def test_a_folder_without_a_claim_is_no_region(tmp_path: Path) -> None:
    """A writer was killed between its folder and its first manifest: nothing to collect, and no fault."""
    made = free(make(tmp_path))
    write(made, f"_mem_wal/{uuid4()}/manifest/attempt.tmp")
    report = collect(made)
    assert report.faults == {}
    assert report.regions == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["gap", "ahead", "newest", "none"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_region_that_cannot_be_read_is_kept_as_a_whole(tmp_path: Path, kind: type[LsmTable], fault: str) -> None:
    made = free(make(tmp_path, kind))
    bad, good = made.regions
    match fault:
        case "gap":
            damage.remove_region_manifest_version(made.uri, bad, 2)
        case "ahead":  # the version that the hint names is not there, and may be the truth
            write(made, f"_mem_wal/{bad}/manifest/version_hint.json", b'{"version": 999}')
        case "newest":
            damage.truncate_region_manifest(made.uri, bad, keep=3)
        case _:
            shutil.rmtree(f"{made.uri}/_mem_wal/{bad}/manifest")
    age(made, "_mem_wal/**/*", 4000 * DAY)
    before = contents(f"{made.uri}/_mem_wal/{bad}")
    plan = gc.plan(table_of(made), IMMEDIATE)
    report = collect(made)
    assert set(plan.faults) == set(report.faults) == {UUID(bad)}
    assert "cannot be read" in reasons(report.items[Verdict.UNKNOWN], CandidateKind.UNKNOWN)[f"_mem_wal/{bad}"]
    assert contents(f"{made.uri}/_mem_wal/{bad}") == before
    assert {folder.split("/")[1] for folder in generation_folders(made)} == {bad}
    assert len(versions(made, good)) == 2


@pytest.mark.parametrize("folder", ["wal", "manifest"])
def test_what_a_killed_writer_had_not_given_its_name_yet(tmp_path: Path, folder: str) -> None:
    """On local files pylance writes an entry beside its place, and then links it there."""
    made = make(tmp_path, generations=1, regions=1)
    suffix = {"wal": "arrow", "manifest": "binpb"}[folder]
    name = f"{bit_reversed(77)}.{suffix}.tmp."
    stem = f"_mem_wal/{made.regions[0]}/{folder}/{name}"
    young, old, strange = f"{stem}{'a' * 32}", f"{stem}{'0123456789abcdef' * 2}", f"{stem}backup"
    files = Files(made.uri)
    for path in (young, old, strange):
        files.put(path, b"half of it")
    os.utime(f"{made.uri}/{old}", (time.time() - 2 * HOUR,) * 2)
    before = set(files.listing(""))
    options = GcOptions(orphan_min_age=timedelta(hours=1))
    planned = {item.path: item for verdict in Verdict for item in gc.plan(table_of(made), options).items[verdict]}
    assert [(planned[path].kind, planned[path].verdict) for path in (young, old, strange)] == [
        (CandidateKind.LEFTOVER, Verdict.HELD),
        (CandidateKind.LEFTOVER, Verdict.DELETE),
        (CandidateKind.UNKNOWN, Verdict.UNKNOWN),
    ]
    assert gc.apply(table_of(made), options).decision == "deleted"
    assert before - set(files.listing("")) == {old}


@pytest.mark.parametrize("folder", ["clock", "probe"])
def test_what_killed_jobs_had_tried_the_store_with(tmp_path: Path, folder: str) -> None:
    """At any options: if the probe's object is deleted during the probe, its job concludes that writes get lost."""
    made = make(tmp_path, generations=1, regions=1)
    young, old = (f"_mem_wal_ops/{folder}/{letter * 32}" for letter in "ab")
    files = Files(made.uri)
    for path in (young, old):
        files.put(path, b"")
    os.utime(f"{made.uri}/{old}", (time.time() - 2 * HOUR,) * 2)
    before = set(files.listing(""))
    items = {item.path: item for verdict in Verdict for item in gc.plan(table_of(made), IMMEDIATE).items[verdict]}
    assert [(items[path].kind, items[path].verdict) for path in (young, old)] == [
        (CandidateKind.LEFTOVER, Verdict.HELD),
        (CandidateKind.LEFTOVER, Verdict.DELETE),
    ]
    gc.apply(table_of(made), IMMEDIATE)
    assert before - set(files.listing("")) >= {old}
    assert young in files.listing("")


def test_what_a_killed_compaction_has_staged(tmp_path: Path) -> None:
    """A staged manifest of a rewrite goes once it is old; one of another commit, or of a later version, never does."""
    uri = str(tmp_path / "t.lance")
    for at in range(3):
        lance.write_dataset(pa.table({"id": [at]}), uri, mode="append" if at else "create")
    lance.dataset(uri).optimize.compact_files()
    newest = lance.dataset(uri).version
    folder = Path(uri, "_versions")
    names = {bit_reversed_version(path.name): path for path in folder.glob("*.manifest")}
    later = f"{2**64 - 1 - newest - 1}.manifest"
    staged = {
        "rewrite": shutil.copy(names[newest], folder / f"{names[newest].name}-{uuid4()}"),
        "append": shutil.copy(names[2], folder / f"{names[2].name}-{uuid4()}"),
        "later": shutil.copy(names[newest], folder / f"{later}-{uuid4()}"),
    }
    young = run_job(uri, "gc", apply=True)
    assert (young.decision, all(Path(path).exists() for path in staged.values())) == ("nothing_to_delete", True)
    for path in staged.values():
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    assert run_job(uri, "gc", apply=True).decision == "deleted"
    assert {name: Path(path).exists() for name, path in staged.items()} == {
        "rewrite": False,
        "append": True,
        "later": True,
    }
    assert lance.dataset(uri).to_table()["id"].to_pylist() == [0, 1, 2]


def bit_reversed_version(name: str) -> int:
    """The version of a manifest's name."""
    return 2**64 - 1 - int(name.partition(".")[0])
