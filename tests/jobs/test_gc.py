"""The gc job: what nobody needs goes, after the wait; all else is held and says by what."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest
from lance.dataset import Index
from lance.file import LanceFileReader, LanceFileWriter
from pyarrow import ipc

from memwal_ops import open_table
from memwal_ops.core.commit import CommitNote, IndexChange, commit_indexes
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.core.snapshots import snapshot_path
from memwal_ops.format.memwal_index import with_catchup
from memwal_ops.format.names import bit_reversed
from memwal_ops.format.region_manifest import RegionStatus
from memwal_ops.jobs import catchup, expire, gc, merge, snapshot
from memwal_ops.jobs.collectables import Kind, Verdict
from memwal_ops.jobs.gc import GcOptions
from memwal_ops.storage.api import DeleteReport
from tests.cli.run import contents
from tests.core.test_leftovers import killed_commit
from tests.tables import damage, wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import open_dataset, read_base, read_spec
from tests.tables.region_layout import RegionLayout
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.core.table import Table
    from memwal_ops.jobs.collectables import Item
    from tests.tables.lsm_table import LsmTable

LAYOUTS: list[type[LsmTable]] = [Workload, RegionLayout]
ZERO = timedelta(0)
# No waiting; fence posts as usual.
NOW = GcOptions(ZERO, ZERO, 2, allow_unsafe=True)
HOUR, DAY = 3600, 86400
NOTE = CommitNote("test", "run", "0.0")


# -- tables


def make(path: Path, kind: type[LsmTable] = Workload, *, generations: int = 3, regions: int = 2) -> LsmTable:
    """Generations of three entries in each region, every one by another writer epoch; nothing merged."""
    made = kind(1, regions=regions, base_rows=30).create(str(path / "t.lance"))
    for _ in range(generations):
        grow(made)
    return made


def grow(made: LsmTable) -> None:
    """One more generation for each region."""
    for at, region in enumerate(made.regions):
        if isinstance(made, RegionLayout) and made._states[region].current_generation > 1:
            made._states[region].epoch += 1
        for _ in range(3):
            made.put([at, at + 2 * len(made.regions), made._fresh(at)])
        made.flush(region)


def table_of(made: LsmTable) -> Table:
    return open_table(made.uri, made.storage_options)


def merged(made: LsmTable) -> None:
    assert not merge.apply(table_of(made), merge.MergeOptions()).blocked


def caught_up(made: LsmTable) -> None:
    catchup.apply(table_of(made), catchup.CatchupOptions())


def expired(made: LsmTable) -> None:
    expire.apply(table_of(made), expire.ExpireOptions(ZERO))


def free(made: LsmTable) -> LsmTable:
    """Nobody needs any generation any more."""
    merged(made)
    caught_up(made)
    expired(made)
    return made


def sound(made: LsmTable) -> None:
    """Every reader sees the model's rows."""
    assert_same(read_base(made.uri, made.storage_options), made.expected(), seed=made.seed)
    assert_same(read_spec(made.uri, made.storage_options), made.expected(), seed=made.seed)


# -- looking


def planned(made: LsmTable, options: GcOptions = NOW) -> list[Item]:
    """Every item of a plan, which changes nothing."""
    items: list[Item] = []
    gc.plan(table_of(made), options, on_item=items.append)
    return items


def collect(made: LsmTable, options: GcOptions = NOW, store: Any = None) -> gc.GcReport:
    table = table_of(made)
    return gc.apply(table if store is None else replace(table, store=store(table.store)), options, limit=10_000)


def paths(items: Iterable[Item], kind: Kind, verdict: Verdict) -> set[str]:
    return {item.path for item in items if item.kind is kind and item.verdict is verdict}


def reasons(items: Iterable[Item], kind: Kind) -> dict[str, str]:
    """Why things of a kind are kept, by path."""
    return {item.path: item.why for item in items if item.kind is kind and item.verdict is not Verdict.DELETE}


def generation_folders(made: LsmTable) -> set[str]:
    files = Files(made.uri, made.storage_options)
    return {path.rsplit("/", path.count("/") - 2)[0] for path in files.listing("_mem_wal/") if "_gen_" in path}


def entries(made: LsmTable, region: str) -> dict[int, str]:
    files = Files(made.uri, made.storage_options)
    return {
        wire.from_bit_reversed(path.rsplit("/", 1)[-1]): path
        for path in files.listing(f"_mem_wal/{region}/wal/")
        if path.endswith((".arrow", ".lance"))
    }


def versions(made: LsmTable, region: str) -> list[int]:
    files = Files(made.uri, made.storage_options)
    stem = f"_mem_wal/{region}/manifest/"
    return sorted(wire.from_bit_reversed(p.rsplit("/", 1)[-1]) for p in files.listing(stem) if p.endswith(".binpb"))


def age(made: LsmTable, pattern: str, seconds: float) -> None:
    """Let files be so old."""
    found = [path for path in Path(made.uri).glob(pattern) if path.is_file()]
    assert found, pattern
    at = time.time() - seconds
    for path in found:
        os.utime(path, (at, at))


def write(made: LsmTable, path: str, data: bytes = b"x") -> str:
    Files(made.uri, made.storage_options).put(path, data)
    return path


class Wrapped:
    """A store with some verbs replaced."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def refusing(wanted: Callable[[str], bool]) -> Callable[[Any], Any]:
    """A store that does not delete some objects."""

    class Refusing(Wrapped):
        def delete_many(self, doomed: Iterable[str]) -> DeleteReport:
            doomed = list(doomed)
            locked = {path: "locked" for path in doomed if wanted(path)}
            report = self._store.delete_many([path for path in doomed if path not in locked])
            return DeleteReport(report.deleted, {**report.failed, **locked})

    return Refusing


def beside(verb: str, part: str, others: Callable[[], object]) -> Callable[[Any], Any]:
    """A store that lets others work once, right before its first call of ``verb`` on such a path."""

    class Beside(Wrapped):
        done = False

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._store, name)
            if name != verb:
                return found

            def call(path: Any, *arguments: Any) -> Any:
                path = path if isinstance(path, str) else list(path)
                if not Beside.done and part in str(path):
                    Beside.done = True
                    others()
                return found(path, *arguments)

            return call

    return Beside


# -- the whole way


@pytest.mark.req("S0-060", "S0-183", "S0-184", "S0-185", "S0-186")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_nobody_needs_goes(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    before = contents(made.uri)
    plan = gc.plan(table_of(made), NOW, limit=1000)
    assert contents(made.uri) == before, "a plan reads only"
    assert (plan.decision, plan.applied, plan.deleted_objects, plan.regions) == ("planned", False, 0, 2)
    assert paths(plan.items[Verdict.DELETE], Kind.GENERATION, Verdict.DELETE) == generation_folders(made)
    assert plan.bytes_reclaimable == sum(item.bytes for item in plan.items[Verdict.DELETE]) > 0
    log = {region: entries(made, region) for region in made.regions}
    doomed_log = paths(plan.items[Verdict.DELETE], Kind.WAL_ENTRY, Verdict.DELETE)
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
    for options in (NOW, replace(NOW, fence_retention=ZERO)):
        collect(made, options)
        assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    free(made)
    collect(made)
    sound(made)


# -- who holds a generation


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
    expire.apply(table_of(made), expire.ExpireOptions(ZERO, keep=table_of(made).version - version + 1))
    return f"version{'' if isinstance(made, Workload) else 's'} {version}"


def _kept(take: Callable[[LsmTable, int], str]) -> Callable[[LsmTable], str]:
    """Something on the version before the merge, which alone is left of all the old ones."""

    def keep(made: LsmTable) -> str:
        said = take(made, table_of(made).version)
        free(made)
        return said

    return keep


def _tag(made: LsmTable, version: int) -> str:
    open_dataset(made.uri).tags.create("audit", version)
    return f"tag audit at version {version}"


def _branch(made: LsmTable, version: int) -> str:
    open_dataset(made.uri).create_branch("side", version)
    return "branch side"


def _hold(made: LsmTable, version: int) -> str:
    hold = take_hold(table_of(made), version, timedelta(hours=1))
    return f"hold {hold.number} of {hold.by} on version {version}"


HOLDERS = {
    "not merged": Holder(lambda made: (expired(made), "not merged yet")[1], free),
    "an index, by its fragments": Holder(_behind_by_fragments, free),
    "an index, by its claim": Holder(_behind_by_claim, free),
    "an old version": Holder(_old_version, expired),
    "a tag": Holder(_kept(_tag), lambda made: (open_dataset(made.uri).tags.delete("audit"), expired(made))),
    "a branch": Holder(_kept(_branch), lambda made: (open_dataset(made.uri).branches.delete("side"), expired(made))),
    "a hold": Holder(_kept(_hold), lambda made: (release_hold(table_of(made), 1), expired(made))),
}


@pytest.mark.req("S0-079", "S0-184", "S0-188", "S0-189", "S0-190")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_generation_is_held_until_released(tmp_path: Path, name: str, kind: type[LsmTable]) -> None:
    made, holder = make(tmp_path, kind), HOLDERS[name]
    folders = generation_folders(made)
    said = holder.take(made)
    why = reasons(planned(made), Kind.GENERATION)
    # Of several versions the one before all merges is below every generation, the others only below some.
    of_some = name == "an old version"
    newest = {path: text for path, text in why.items() if not of_some or path.endswith("_gen_3")}
    assert set(why) == folders
    assert all(said in text or (of_some and "needed by version" in text) for text in newest.values()), (said, why)
    report = collect(made)
    assert (report.drained, report.counts[Kind.GENERATION][Verdict.DELETE]) == (0, 0)
    assert reasons(report.items[Verdict.HELD], Kind.GENERATION) == why
    assert generation_folders(made) == folders
    for folder in folders:
        assert open_dataset(f"{made.uri}/{folder}").to_table().num_rows > 0
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    holder.release(made)
    assert collect(made).counts[Kind.GENERATION] == Counter({Verdict.DELETE: len(folders)})
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
    report = collect(made, replace(NOW, fence_retention=ZERO))
    assert report.drained == 0
    assert all("files below _mem_wal/" in why for why in reasons(planned(made), Kind.GENERATION).values())
    assert (generation_folders(made), [entries(made, one) for one in made.regions]) == before


def test_a_sealed_region_is_collected_like_any_other(tmp_path: Path) -> None:
    made = free(make(tmp_path))
    manifests = table_of(made).region(UUID(made.regions[0]))
    assert manifests.commit(replace(manifests.latest().next(), status=RegionStatus.SEALED))
    assert gc.plan(table_of(made), NOW).sealed == 1
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
    options = GcOptions()
    plan = gc.plan(table_of(made), options)
    assert (plan.decision, plan.drainable, plan.bytes_reclaimable) == ("planned", 6, 0)
    assert all(
        "listed by region manifest version" in why for why in reasons(planned(made, options), Kind.GENERATION).values()
    )
    report = collect(made, options)
    assert (report.decision, report.drained, report.deleted_objects) == ("drained", 6, 0)
    for region in made.regions:
        assert wire.region_manifest(Files(made.uri), region).generations == {}
    assert generation_folders(made) == folders
    assert collect(made, options).decision == "nothing_to_delete"
    age(made, "_mem_wal/*/manifest/*.binpb", 14 * 60)
    why = reasons(planned(made, options), Kind.GENERATION)
    assert set(why) == folders
    assert all("taken off the list by region manifest version" in text for text in why.values())
    assert collect(made, options).decision == "nothing_to_delete"
    # Only the version that dropped them counts: here it is young, and all that stand before it are old.
    age(made, "_mem_wal/*/manifest/*.binpb", DAY)
    for region in made.regions:
        drained = f"_mem_wal/{region}/manifest/{bit_reversed(versions(made, region)[-1])}.binpb"
        age(made, drained, 14 * 60)
    assert collect(made, options).counts[Kind.GENERATION] == Counter({Verdict.HELD: 6})
    age(made, "_mem_wal/*/manifest/*.binpb", 16 * 60)
    assert collect(made, options).decision == "deleted"
    assert generation_folders(made) == set()
    sound(made)


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
    held = reasons(planned(made, GcOptions()), Kind.WAL_ENTRY)
    log = entries(made, region)
    young = {path for number, path in log.items() if settled < number <= newest}
    assert young == {path for path, why in held.items() if "flushed less than --reader-grace (15m) ago" in why}
    made.put([0])
    unflushed = {path for number, path in entries(made, region).items() if number > newest}
    held = reasons(planned(made), Kind.WAL_ENTRY)
    assert unflushed
    assert unflushed == {path for path, why in held.items() if "not flushed" in why}
    made.flush()


# -- orphans


def orphan(made: LsmTable, generation: int, *, old: bool) -> str:
    folder = f"_mem_wal/{made.regions[0]}/0badcafe_gen_{generation}"
    write(made, f"{folder}/data/x.lance", b"12345")
    write(made, f"{folder}/_versions/1.manifest", b"67")
    if old:
        age(made, f"{folder}/*/*", 4 * DAY)
    return folder


@pytest.mark.req("S0-187")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_orphans_go_when_no_flush_can_be_under_way(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    listed, later, far = orphan(made, 2, old=True), orphan(made, 4, old=True), orphan(made, 9, old=True)
    young = orphan(made, 5, old=False)
    half = orphan(made, 6, old=True)
    write(made, f"{half}/data/y.lance")
    items = planned(made, GcOptions())
    assert paths(items, Kind.ORPHAN, Verdict.DELETE) == {listed, later, far}
    assert {path: "a flush may be under way" in why for path, why in reasons(items, Kind.ORPHAN).items()} == {
        young: True,
        half: True,
    }
    (item,) = [one for one in items if one.path == listed]
    assert (item.generation, item.bytes, item.objects) == (2, 7, 2)
    assert "published from another directory" in item.why
    standing = generation_folders(made)
    report = collect(made, GcOptions())
    assert report.counts[Kind.ORPHAN] == Counter({Verdict.DELETE: 3, Verdict.HELD: 2})
    assert generation_folders(made) == standing - {listed, later, far}
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)


def unlist(made: LsmTable, generation: int, *, forget: bool) -> str:
    """Take a generation off the first region's list; with ``forget``, no version that stands had it."""
    region = made.regions[0]
    manifests = table_of(made).region(UUID(region))
    newest = manifests.latest()
    (folder,) = [one.path for one in newest.flushed_generations if one.generation == generation]
    assert manifests.commit(newest.next().without_generations({generation}))
    if forget:
        for version in versions(made, region)[:-1]:
            damage.remove_region_manifest_version(made.uri, region, version)
    return f"_mem_wal/{region}/{folder}"


@pytest.mark.req("S0-187", "S0-190")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("forget", [False, True])
def test_an_unmerged_generation_that_is_listed_nowhere_stays(
    tmp_path: Path, kind: type[LsmTable], forget: bool
) -> None:
    """Whoever took it off the list made a mistake; its rows are in its directory and in the log alone."""
    made = make(tmp_path, kind)
    lost = unlist(made, 2, forget=forget)
    log = entries(made, made.regions[0])
    age(made, f"{lost}/**/*", 4 * DAY)
    options = replace(NOW, fence_retention=ZERO)
    items = planned(made, options)
    assert "not merged yet" in reasons(items, Kind.ORPHAN if forget else Kind.GENERATION)[lost]
    for path, why in reasons(items, Kind.WAL_ENTRY).items():
        if made.regions[0] in path:
            assert "generation 2 is neither merged nor listed" in why
    collect(made, options)
    assert lost in generation_folders(made)
    assert entries(made, made.regions[0]) == log


@pytest.mark.req("S0-190")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_log_stays_where_an_unmerged_generation_is_gone(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    damage.remove_generation(made.uri, made.regions[0], 2)
    log = entries(made, made.regions[0])
    options = replace(NOW, fence_retention=ZERO)
    held = {
        path: why for path, why in reasons(planned(made, options), Kind.WAL_ENTRY).items() if made.regions[0] in path
    }
    assert set(held) == set(log.values())
    assert all("generation 2 is not there" in why for why in held.values())
    collect(made, options)
    assert entries(made, made.regions[0]) == log


@pytest.mark.req("S0-190")
@pytest.mark.parametrize("whole", [True, False], ids=["cut short", "gone"])
def test_the_log_stays_where_an_unmerged_generation_cannot_be_read(tmp_path: Path, whole: bool) -> None:
    """In the region layout the log's entries are the generation's data files, whether its manifest tells or not."""
    made = make(tmp_path, RegionLayout)
    if whole:
        damage.truncate_generation_manifest(made.uri, made.regions[0], 2)
    else:
        shutil.rmtree(damage.generation_path(made.uri, made.regions[0], 2) / "_versions")
    log = entries(made, made.regions[0])
    collect(made, replace(NOW, fence_retention=ZERO))
    assert entries(made, made.regions[0]) == log


def test_an_old_manifest_that_cannot_be_read_may_list_anything(tmp_path: Path) -> None:
    made = make(tmp_path)
    region = made.regions[0]
    held = orphan(made, 9, old=True)
    broken = versions(made, region)[-3]
    path = damage.region_manifest_path(made.uri, region, broken)
    path.write_bytes(path.read_bytes()[:3])
    options = GcOptions()
    assert f"region manifest version {broken} cannot be read" in reasons(planned(made, options), Kind.ORPHAN)[held]
    collect(made, options)
    assert held in generation_folders(made)


# -- the log


def epochs_of(made: LsmTable, region: str) -> dict[int, int]:
    """Which epoch wrote each entry, read without the project."""
    files = Files(made.uri, made.storage_options)
    found = {}
    for number, path in entries(made, region).items():
        if path.endswith(".arrow"):
            metadata = ipc.open_stream(files.get(path)).schema.metadata
        else:
            reader = LanceFileReader(f"{made.uri}/{path}", storage_options=made.storage_options)
            metadata = reader.metadata().schema.metadata
        found[number] = int(metadata[b"writer_epoch"])
    return found


def firsts(epochs: dict[int, int]) -> dict[int, int]:
    """Per epoch its first entry."""
    return {epoch: min(n for n, of in epochs.items() if of == epoch) for epoch in set(epochs.values())}


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
    assert collect(made, replace(NOW, fence_retention=ZERO)).decision == "nothing_to_delete"
    grow(made)
    merged(made)
    sound(made)


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_writer_that_was_fenced_is_not_believed(tmp_path: Path, writes: int) -> None:
    """It wakes after all of its successors' entries that may go are gone (landmine 3)."""
    made = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    (region,) = made.regions
    stalled = open_dataset(made.uri).mem_wal_writer(region, max_wal_flush_interval_ms=1)
    rows = open_dataset(made.uri).to_table(limit=1)
    for _ in range(writes):
        stalled.put(rows)
    for _ in range(3):
        grow(made)
    free(made)
    age(made, "_mem_wal/*/wal/*", 20 * DAY)
    report = collect(made)
    assert generation_folders(made) == set()
    assert writes < 2 or report.counts[Kind.WAL_ENTRY][Verdict.DELETE] > 0
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
    keep_all = replace(NOW, manifest_retention=100)
    why = reasons(planned(made, keep_all), Kind.WAL_ENTRY)
    log = entries(made, region)
    assert {number for number, path in log.items() if path in why} == {1, 3, 4, 5, 6, 7}
    assert all("writer epoch 2 may go on here" in why[log[number]] for number in (3, 4))
    collect(made, keep_all)
    assert set(entries(made, region)) == {1, 3, 4, 5, 6, 7}
    # Without the manifest of the claim nobody knows where it stood: all that is left may be it.
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
    assert "an unknown epoch" in reasons(planned(made), Kind.WAL_ENTRY)[path]
    collect(made)
    assert path in entries(made, region).values()


@pytest.mark.req("S0-190")
def test_entries_of_the_region_layout_go_with_their_last_generation(tmp_path: Path) -> None:
    made = make(tmp_path, RegionLayout, generations=2, regions=1)
    (region,) = made.regions
    merged(made)
    open_dataset(made.uri).tags.create("middle", table_of(made).version)
    first = wire.region_manifest(Files(made.uri), region).replay_after
    grow(made)
    free(made)
    options = replace(NOW, fence_retention=ZERO)
    collect(made, options)
    left = entries(made, region)
    # All of generation 3 stays with it, and of the others the post of the newest epoch but one.
    assert {number for number in left if number > first} == set(range(first + 1, first + 4))
    assert {number for number in left if number <= first} == {first - 2}
    assert all(
        "_gen_3 has its rows in it" in why for number, path in left.items() if number > first
        for why in [reasons(planned(made, options), Kind.WAL_ENTRY)[path]]
    )  # fmt: skip
    open_dataset(made.uri).tags.delete("middle")
    expired(made)
    report = collect(made, options)
    assert report.counts[Kind.GENERATION][Verdict.DELETE] == 1
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

    class Recording(Wrapped):
        def put(self, where: str, data: bytes) -> None:
            done.append(("put", where))
            self._store.put(where, data)

        def delete_many(self, doomed: Iterable[str]) -> Any:
            doomed = list(doomed)
            done.extend(("delete", one) for one in doomed)
            return self._store.delete_many(doomed)

    collect(made, replace(NOW, manifest_retention=4), Recording)
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


def test_no_gap_where_a_manifest_cannot_be_deleted(tmp_path: Path) -> None:
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
    assert paths(items, Kind.SNAPSHOT, Verdict.DELETE) == {old}
    why = reasons(items, Kind.SNAPSHOT)
    assert set(why) == {named, young}
    assert "names it" in why[named]
    assert "a commit may be under way" in why[young]
    assert set(reasons(items, Kind.UNKNOWN)) == {torn}
    collect(made, GcOptions())
    standing = {path for path in (named, old, young, torn, other) if Path(made.uri, path).exists()}
    assert standing == {named, young, torn, other}
    assert snapshot.apply(table_of(made), snapshot.SnapshotOptions(0)).decision == "unchanged"


@pytest.mark.parametrize("keeper", ["tag", "branch"])
def test_a_snapshot_stays_while_a_kept_version_names_it(tmp_path: Path, keeper: str) -> None:
    made = make(tmp_path, RegionLayout)
    snapshot.apply(table_of(made), snapshot.SnapshotOptions(0))
    named = snapshot_path(table_of(made).index.uuid)
    (_tag if keeper == "tag" else _branch)(made, table_of(made).version)
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
    assert ours <= set(reasons(items, Kind.LEFTOVER))
    assert all("a commit may be under way" in why for why in reasons(items, Kind.LEFTOVER).values())
    assert collect(made, GcOptions()).deleted_objects == 0
    dataset = open_dataset(made.uri)
    transaction = lance.Transaction(
        read_version=dataset.version, operation=lance.LanceOperation.Append(dataset.get_fragments()[0:0])
    )
    lance.LanceDataset.commit(made.uri, transaction, detached=True)
    foreign = {f"_versions/{path.name}" for path in Path(made.uri, "_versions").glob("d*")} - ours
    age(made, "_versions/d*", 4 * DAY)
    report = collect(made, GcOptions())
    assert paths(report.items[Verdict.DELETE], Kind.LEFTOVER, Verdict.DELETE) >= ours
    assert set(reasons(report.items[Verdict.UNKNOWN], Kind.UNKNOWN)) == foreign
    standing = {f"_versions/{path.name}" for path in Path(made.uri, "_versions").glob("d*")}
    assert standing == foreign
    assert {path.name for path in Path(made.uri, "_transactions").glob("*")} >= {
        table.manifest.manifest.transaction_file
    } & transactions
    dataset.optimize.optimize_indices()
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_nobody_knows_is_named_and_kept(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    region = f"_mem_wal/{made.regions[0]}"
    other = {Workload: "lance", RegionLayout: "arrow"}[kind]
    strange = {
        write(made, path): named
        for path, named in {
            "_mem_wal/readme.txt": "_mem_wal/readme.txt",
            "_mem_wal/no-region/x": "_mem_wal/no-region",
            f"_mem_wal/{made.regions[0].upper()}/manifest/x": f"_mem_wal/{made.regions[0].upper()}",
            f"{region}/note": f"{region}/note",
            f"{region}/wal/note.txt": f"{region}/wal/note.txt",
            f"{region}/wal/{bit_reversed(1)}.{other}": f"{region}/wal/{bit_reversed(1)}.{other}",
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
    for options in (NOW, replace(NOW, fence_retention=ZERO)):
        assert set(reasons(planned(made, options), Kind.UNKNOWN)) == set(strange.values())
        report = collect(made, options)
        assert report.counts[Kind.UNKNOWN] == Counter({Verdict.UNKNOWN: len(strange)})
    assert all(Path(made.uri, path).exists() for path in strange)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_a_folder_without_a_claim_is_no_region(tmp_path: Path) -> None:
    """A writer was killed between its folder and its first manifest: nothing to collect, and no fault."""
    made = free(make(tmp_path))
    write(made, f"_mem_wal/{uuid4()}/manifest/attempt.tmp")
    report = collect(made)
    assert report.faults == {}
    assert report.regions == 2


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
    plan = gc.plan(table_of(made), NOW)
    report = collect(made)
    assert set(plan.faults) == set(report.faults) == {UUID(bad)}
    assert "cannot be read" in reasons(report.items[Verdict.UNKNOWN], Kind.UNKNOWN)[f"_mem_wal/{bad}"]
    assert contents(f"{made.uri}/_mem_wal/{bad}") == before
    assert {folder.split("/")[1] for folder in generation_folders(made)} == {bad}
    assert len(versions(made, good)) == 2


# -- failures, limits


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_could_not_be_deleted_is_done_by_the_next_run(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind))
    folder = min(generation_folders(made))
    stuck = next(path for path in Files(made.uri).listing(f"{folder}/") if path.endswith(".manifest"))
    options = replace(NOW, fence_retention=ZERO)
    referenced = entries(made, folder.split("/")[1])
    report = collect(made, options, refusing(lambda path: path == stuck))
    assert (report.decision, report.failed) == ("incomplete", {stuck: "locked"})
    assert "not deleted" in reasons(report.items[Verdict.HELD], Kind.GENERATION)[folder]
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


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("most", [1, 7])
def test_no_more_is_deleted_than_allowed(tmp_path: Path, kind: type[LsmTable], most: int) -> None:
    whole = free(make(tmp_path / "whole", kind))
    collect(whole)
    made = free(make(tmp_path / "parts", kind))
    deleted = 0
    for _ in range(1000):
        before = set(Files(made.uri).listing("_mem_wal/"))
        report = collect(made, replace(NOW, max_deletes=most))
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


def test_lists_are_cut_and_counts_are_not(tmp_path: Path) -> None:
    made = free(make(tmp_path))
    every = gc.plan(table_of(made), NOW, limit=10_000)
    cut = gc.plan(table_of(made), NOW, limit=1)
    assert (every.truncated, cut.truncated) == (False, True)
    assert {verdict: len(items) for verdict, items in cut.items.items()} == {
        Verdict.DELETE: 1,
        Verdict.HELD: 1,
        Verdict.UNKNOWN: 0,
    }
    assert (cut.counts, cut.bytes_reclaimable) == (every.counts, every.bytes_reclaimable)


# -- what came after the plan


@pytest.mark.req("S0-189")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("holder", [_tag, _branch, _hold])
def test_whoever_comes_between_plan_and_apply_is_respected(
    tmp_path: Path, kind: type[LsmTable], holder: Callable[[LsmTable, int], str]
) -> None:
    """The plan said what expire and gc would free; then somebody wanted the old version."""
    made = make(tmp_path, kind)
    old, rows = table_of(made).version, made.expected()
    merged(made)
    caught_up(made)
    planned_expiry = expire.plan(table_of(made), expire.ExpireOptions(ZERO))
    assert old in planned_expiry.versions
    assert planned_expiry.frees[0] == 6
    said = holder(made, old)
    applied = expire.apply(table_of(made), expire.ExpireOptions(ZERO))
    assert old not in applied.versions
    folders = generation_folders(made)
    report = collect(made)
    assert report.drained == 0
    assert all(said in why for why in reasons(report.items[Verdict.HELD], Kind.GENERATION).values())
    assert generation_folders(made) == folders
    open_dataset(made.uri).checkout_version(old).to_table()
    assert_same(read_spec(made.uri), rows, seed=made.seed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_claim_that_is_lowered_between_draining_and_deleting(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = free(make(tmp_path, kind, regions=1))
    folders = generation_folders(made)
    report = collect(made, store=beside("put_if_absent", "/manifest/", lambda: _claim(made, lambda _: 0)))
    assert report.drained == 3
    assert report.counts[Kind.GENERATION] == Counter({Verdict.HELD: 3})
    assert all("index id_idx" in why for why in reasons(report.items[Verdict.HELD], Kind.GENERATION).values())
    assert generation_folders(made) == folders
    if kind is RegionLayout:
        assert report.counts[Kind.WAL_ENTRY][Verdict.DELETE] == 0
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

    report = collect(made, replace(NOW, fence_retention=ZERO), beside("put_if_absent", "/manifest/", take_back))
    assert report.counts[Kind.GENERATION] == Counter({Verdict.HELD: 3})
    assert generation_folders(made) == folders
    if kind is RegionLayout:
        assert entries(made, made.regions[0]) == log


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
        (Kind.LEFTOVER, Verdict.HELD), (Kind.LEFTOVER, Verdict.DELETE), (Kind.UNKNOWN, Verdict.UNKNOWN),
    ]  # fmt: skip
    assert gc.apply(table_of(made), options).decision == "deleted"
    assert before - set(files.listing("")) == {old}


@pytest.mark.parametrize("folder", ["clock", "probe"])
def test_what_killed_jobs_had_tried_the_store_with(tmp_path: Path, folder: str) -> None:
    """At any options: a trial that is taken away while it lasts makes its job believe that the store forgets."""
    made = make(tmp_path, generations=1, regions=1)
    young, old = (f"_mem_wal_ops/{folder}/{letter * 32}" for letter in "ab")
    files = Files(made.uri)
    for path in (young, old):
        files.put(path, b"")
    os.utime(f"{made.uri}/{old}", (time.time() - 2 * HOUR,) * 2)
    before = set(files.listing(""))
    items = {item.path: item for verdict in Verdict for item in gc.plan(table_of(made), NOW).items[verdict]}
    assert [(items[path].kind, items[path].verdict) for path in (young, old)] == [
        (Kind.LEFTOVER, Verdict.HELD),
        (Kind.LEFTOVER, Verdict.DELETE),
    ]
    gc.apply(table_of(made), NOW)
    assert before - set(files.listing("")) >= {old}
    assert young in files.listing("")
