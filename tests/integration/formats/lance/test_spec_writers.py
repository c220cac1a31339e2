"""The specification's text about manifests, claims, flushes and fencing, and its first two appendices, literally."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal_ops import WriterFenced, open_table, run_job
from memwal_ops.core.context import NullListener, RunContext, StopRequested
from memwal_ops.errors import StoreUnavailableError
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.log.region_columns import region_columns
from memwal_ops.formats.lance.log.region_files import entry_path, put_entry, read_entry
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionStatus
from memwal_ops.memwal import RegionWriter, read
from tests.integration.formats.lance.log.test_region_writer import REGION, NoAnswer, made, rows, seen, writer
from tests.support.counting_store import CountingStore
from tests.support.overtaken import Overtaken
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base

FOLDER = f"_mem_wal/{REGION}"
VERSION, SPEC, EPOCH, REPLAY_AFTER, LAST_SEEN, CURRENT, GENERATIONS, ID = 1, 10, 2, 3, 4, 6, 8, 11


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return made(tmp_path)


def manifests(uri: str) -> dict[int, list[wire.Field]]:
    """The fields of each manifest version, by the number in its file's name."""
    names = [path for path in Files(uri).listing(f"{FOLDER}/manifest") if path.endswith(".binpb")]
    return {wire.from_bit_reversed(Path(path).stem): wire.decode(Files(uri).get(path)) for path in names}


def numbers(fields: list[wire.Field]) -> dict[int, Any]:
    """The numbers among the fields; 0 is left out on the wire."""
    return {field.number: field.value for field in fields if field.wire == 0}


# -- region manifest


@pytest.mark.req("S0-040", "S0-041", "S0-042", "S0-044", "S0-045", "S0-046", "S0-047", "S0-048", "S0-056")
def test_the_fields_of_a_region_manifest(uri: str) -> None:
    with writer(uri) as one:
        one.put(rows(1))
        one.put(rows(2))
    found = manifests(uri)
    assert sorted(found) == [1, 2]
    for version, fields in found.items():
        assert numbers(fields)[VERSION] == version
        assert wire.uuid_of(fields, ID) == str(REGION)
        assert 7 not in {field.number for field in fields}, "merged_generation is removed"
    assert numbers(found[1]) == {VERSION: 1, EPOCH: 1, CURRENT: 1}
    assert numbers(found[2]) == {VERSION: 2, EPOCH: 1, REPLAY_AFTER: 2, LAST_SEEN: 2, CURRENT: 2}
    ((generation,),) = [[*wire.sub(found[2], GENERATIONS)]]
    assert wire.get(generation, 1) == 1
    assert re.fullmatch(rb"[0-9a-f]{8}_gen_1", bytes(wire.get(generation, 2)))  # type: ignore[arg-type]


@pytest.mark.req("S0-044", "S0-057", "S0-058", "S0-120")
def test_what_a_claim_and_a_flush_change(uri: str) -> None:
    with writer(uri) as one:
        one.put(rows(1))
    two = writer(uri)
    two.put(rows(2))
    two.flush()
    found = manifests(uri)
    assert sorted(found) == [1, 2, 3, 4]

    def changed(version: int) -> set[int]:
        before, after = found[version - 1], found[version]
        return {field.number for field in {*before} ^ {*after}} - {VERSION}

    assert changed(3) == {EPOCH}, "a claim"
    assert numbers(found[3])[EPOCH] == numbers(found[2])[EPOCH] + 1
    assert changed(4) == {REPLAY_AFTER, LAST_SEEN, CURRENT, GENERATIONS}, "a flush"
    assert numbers(found[4])[CURRENT] == numbers(found[3])[CURRENT] + 1
    assert [wire.get(one, 1) for one in wire.sub(found[4], GENERATIONS)] == [1, 2], "appended"


@pytest.mark.req("S0-054")
def test_the_newest_manifest_is_found_without_a_listing(uri: str) -> None:
    for _ in range(4):
        writer(uri)
    Files(uri).put(f"{FOLDER}/manifest/version_hint.json", b'{"version": 2}')
    table: Any = open_table(uri)
    store = CountingStore(table.store)
    assert replace(table, store=store).region(REGION).latest().version == 4
    assert store.calls == {"get": 2, "head": 4}, "the hint and the manifest; versions 2 to 5"


# -- flush


@pytest.mark.req("S0-133", "S0-144", "S0-145", "S0-146")
def test_a_generation_has_the_entries_behind_the_last_one(uri: str) -> None:
    """Also those that the hint says were seen: it is no mark of what was flushed."""
    one = writer(uri)
    for number in range(1, 4):
        one.put(rows(number))
    one.flush()
    for number in range(4, 8):
        one.put(rows(number))
    region = open_table(uri).region(REGION)
    assert region.commit(region.latest().next().with_wal_id_last_seen(6))
    two = writer(uri)
    assert [part["id"].to_pylist() for part in two.unflushed()] == [[4], [5], [6], [7]]
    two.flush()
    found = wire.region_manifest(Files(uri), str(REGION))
    assert found.replay_after == 7
    for number, entries in ((1, range(1, 4)), (2, range(4, 8))):
        generation = lance.dataset(f"{uri}/{FOLDER}/{found.generations[number]}")
        files = [fragment.metadata.files[0] for fragment in generation.get_fragments()]
        assert [file.path for file in files] == [f"{wire.bit_reversed(entry)}.lance" for entry in entries]
        assert {file.base_id for file in files} == {1}, "no row is copied"


@pytest.mark.req("S0-038", "S0-144", "S0-151")
def test_only_the_directory_that_is_listed_counts(uri: str) -> None:
    """A flush fails half-way; its directory stays, and the next one takes another name."""
    one = writer(uri, lambda store: NoAnswer(store, 4))
    one.put(rows(1, stamp=1))
    with pytest.raises(StoreUnavailableError):
        one.flush()
    (left,) = [path.name for path in Path(uri, FOLDER).glob("*_gen_*")]
    one.put(rows(1, stamp=2))
    one.flush()
    one.flush()
    listed = wire.region_manifest(Files(uri), str(REGION)).generations
    directories = {path.name for path in Path(uri, FOLDER).glob("*_gen_*")}
    assert left in directories - {*listed.values()}
    assert all(re.fullmatch(r"[0-9a-f]{8}_gen_[12]", name) for name in directories)
    assert seen(uri)[1] == 2
    run_job(uri, "merge")
    assert {key: row["n"] - key * 10 for (key,), row in read_base(uri).items()} == {1: 2, 2: 0, 3: 0}


@pytest.mark.req("S0-003", "S0-008", "S0-023", "S0-039")
def test_generations_are_merged_in_their_order(uri: str) -> None:
    """One by one, in the background of the writer that goes on: the base table has the last write."""
    one = writer(uri)
    for stamp in (1, 2, 3):
        one.put(rows(1, stamp=stamp))
        one.flush()
    for stamp in (1, 2, 3):
        merge_one(uri)
        assert read_base(uri)[(1,)]["n"] == 10 + stamp
        one.put(rows(4, stamp=stamp))
    one.close()
    assert seen(uri) == {1: 3, 2: 0, 3: 0, 4: 3}


class OnePass(NullListener):
    """Asks a merge to stop as soon as it has committed something."""

    def __init__(self, uri: str) -> None:
        self._uri, self._progress = uri, open_table(uri).index.merged_generations

    def checkpoint(self) -> None:
        if open_table(self._uri).index.merged_generations != self._progress:
            raise StopRequested


def merge_one(uri: str) -> None:
    """Merge the next generation, and no other."""
    with suppress(StopRequested):
        run_job(uri, "merge", max_generations=1, context=RunContext(OnePass(uri)))


# -- fencing


@pytest.mark.req("S0-006", "S0-062", "S0-153", "S0-210")
def test_an_epoch_is_looked_at_before_manifests_and_not_on_each_put(uri: str) -> None:
    stores: list[CountingStore] = []

    def counted(store: Any) -> CountingStore:
        stores.append(CountingStore(store))
        return stores[0]

    one = writer(uri, counted)
    stores[0].reset()
    for number in range(4):
        one.put(rows(number, stamp=1))
    assert stores[0].calls == {"put_if_absent": 4, "list": 2}, "the first one asks whether the table was migrated"
    two = writer(uri)
    one.put(rows(4, stamp=1))  # nothing was asked, and the place is free
    versions = len(manifests(uri))
    with pytest.raises(WriterFenced):
        one.flush()
    assert len(manifests(uri)) == versions, "the manifest was looked at before"
    assert not list(Path(uri, FOLDER).glob("*_gen_*"))
    two.close()
    assert seen(uri) == dict.fromkeys(range(5), 1)


@pytest.mark.req("S0-006", "S0-122", "S0-133", "S0-153", "S0-154", "S0-207", "S0-208", "S0-210")
def test_appendix_1(uri: str) -> None:
    """Writer Fencing Example, step by step. Entries 11 and 12 are those between the flush and the hint."""
    table: Any = open_table(uri)
    region, columns = table.region(REGION), region_columns(table)
    # Initial state: writer_epoch 5, replay_after_wal_id 10, wal_id_last_seen 12.
    initial = RegionManifest(REGION, 1, 0, 5, 10, 12, 1, (), RegionStatus.ACTIVE, ())
    assert region.commit(initial)
    for entry in (11, 12):
        assert put_entry(table.store, REGION, entry, columns.put_rows(rows(entry)), 5, columns) is not None

    def state() -> tuple[int, int]:
        newest = region.latest(checked=True)
        return newest.writer_epoch, newest.version

    assert state() == (5, 1)
    a = writer(uri)  # steps 1 and 2: loads epoch 5, writes epoch 6 as version 2
    assert (a.epoch, state()) == (6, (6, 2))
    for entry in (13, 14, 15):  # step 3
        a.put(rows(entry))
    b = writer(uri)  # steps 4 and 5
    assert (b.epoch, state()) == (7, (7, 3))
    for entry in (16, 17):  # step 6
        b.put(rows(entry))
    with pytest.raises(WriterFenced):  # steps 7 to 9
        a.flush()
    with pytest.raises(WriterFenced):
        a.put(rows(18))
    assert state() == (7, 3), "step 10"
    # What happens to writer A's entries?
    epochs = {}
    for entry in range(11, 19):
        found = read_entry(table.store, REGION, entry)
        epochs[entry] = None if found is None else found.writer_epoch
    assert epochs == {11: 5, 12: 5, 13: 6, 14: 6, 15: 6, 16: 7, 17: 7, 18: None}
    recovered = writer(uri)
    assert [part["id"].to_pylist() for part in recovered.unflushed()] == [[entry] for entry in range(11, 18)]
    assert recovered.flush() == 1
    newest = region.latest(checked=True)
    assert (newest.replay_after_wal_id, newest.current_generation) == (17, 2)
    recovered.close()
    assert {row["id"] for row in read(uri).scan().to_table().to_pylist()} == {1, 2, 3, *range(11, 18)}
    assert all(Path(uri, entry_path(REGION, entry)).exists() for entry in range(11, 18)), "orphans are safe"


# -- merging


def before_the_race(uri: str) -> None:
    """merged_generations 5; the region lists generations 6 and 7, and the next one is 8."""
    one = writer(uri)
    for number in range(1, 8):
        one.put(rows(1, number + 10, stamp=number))
        one.flush()
        if number == 5:
            run_job(uri, "merge")
    region = open_table(uri).region(REGION)
    assert region.commit(region.latest().next().without_generations(range(1, 6)))
    newest = open_table(uri).region(REGION).latest()
    assert ([one.generation for one in newest.flushed_generations], newest.current_generation) == ([6, 7], 8)
    assert open_table(uri).index.merged_generations == {REGION: 5}


def progress_of_versions(uri: str) -> list[int]:
    versions = [one["version"] for one in lance.dataset(uri).versions()]
    files = Files(uri)
    names = wire.manifest_names(files)
    found = []
    for version in versions:
        manifest = wire.parse_manifest(files.get(names[version]))
        if wire.mem_wal_entry(manifest) is not None:
            merged = wire.sub(wire.decode(wire.mem_wal_details(manifest)), 9)
            found.append(max((int(wire.get(one, 2)) for one in merged), default=0))
    return found


@pytest.mark.req("S0-161", "S0-166", "S0-167", "S0-211", "S0-213")
def test_appendix_2_racing_on_the_same_generation(tmp_path: Path) -> None:
    """Merger B read progress 5 and works on generation 6; A commits it first, at whatever moment; B goes on with 7."""
    raced = 0
    for at in range(1, 7):
        uri = made(tmp_path / str(at))
        before_the_race(uri)
        table: Any = open_table(uri)
        store = Overtaken(table.store, at, lambda uri=uri: merge_one(uri), writes=True)
        report = run_job(replace(table, store=store), "merge")
        raced += store._others is None
        assert report.decision == "merged"
        assert open_table(uri).index.merged_generations == {REGION: 7}
        steps = progress_of_versions(uri)
        assert steps == sorted(steps), "merge progress never falls"
        found = {key: row["n"] - key * 10 for (key,), row in read_base(uri).items()}
        assert found == {1: 7, 2: 0, 3: 0, **{number + 10: number for number in range(1, 8)}}
        assert run_job(uri, "merge").decision == "nothing_to_merge"
    assert raced >= 2


@pytest.mark.req("S0-161", "S0-212", "S0-213")
def test_appendix_2_a_crash_after_the_commit(uri: str) -> None:
    """Merger A commits generation 6 and dies; B reads progress 6, skips it and merges 7."""
    before_the_race(uri)
    merge_one(uri)
    assert open_table(uri).index.merged_generations == {REGION: 6}
    assert run_job(uri, "merge").decision == "merged"
    assert open_table(uri).index.merged_generations == {REGION: 7}
    assert read_base(uri)[(1,)]["n"] == 17


# -- index and snapshot


@pytest.mark.req("S0-063", "S0-064", "S0-069", "S0-071", "S0-072", "S0-073", "S0-104")
@pytest.mark.req("S0-169", "S0-170", "S0-173", "S0-174")
@pytest.mark.parametrize("threshold", [100, 1])
def test_the_index_and_its_snapshot(uri: str, threshold: int) -> None:
    """Inline up to the threshold, in a Lance file under the index's id above it; configuration and progress stay."""
    for region in (REGION, None):
        with RegionWriter(uri, region) as one:
            one.put(rows(1 if region else 2, stamp=1))
    run_job(uri, "merge")
    before: Any = open_table(uri).index
    assert run_job(uri, "snapshot", inline_threshold=threshold).decision == "built"
    files = Files(uri)
    manifest = wire.newest_manifest(files)[1]
    entry = wire.mem_wal_entry(manifest)
    assert entry is not None
    details = wire.decode(wire.mem_wal_details(manifest))
    assert int(wire.get(details, 1)) > 1_700_000_000_000, "milliseconds since 1970"
    assert wire.get(details, 2) == 2
    inline = wire.get(details, 3, b"")
    stored = files.listing(f"_indices/{wire.uuid_of(entry, 1)}")
    if threshold == 100:
        assert bytes(inline).endswith(b"LANC")  # type: ignore[arg-type]
        assert stored == []
    else:
        assert inline == b""
        assert [Path(path).name for path in stored] == ["index.lance"]
    after: Any = open_table(uri).index
    assert after.merged_generations == before.merged_generations
    assert after.details.region_specs == before.details.region_specs
    snapshot = {one.region_id: one for one in found_regions(uri)}
    assert len(snapshot) == 2
    for region_id, one in snapshot.items():
        newest = open_table(uri).region(region_id).latest()
        flushed = [(listed.generation, listed.path) for listed in newest.flushed_generations]
        assert [(listed.generation, listed.path) for listed in one.state.flushed_generations] == flushed
        assert one.state.version == newest.version


def found_regions(uri: str) -> Any:
    found = read_snapshot(open_table(uri))
    assert found is not None
    return found.regions


@pytest.mark.req("S0-015", "S0-017", "S0-194")
def test_the_manifests_are_newer_than_the_snapshot(uri: str) -> None:
    """A reader that takes the snapshot sees its time; one that reads the manifests, and the logs, sees all."""
    one = writer(uri)
    one.put(rows(1, stamp=1))
    one.flush()
    run_job(uri, "snapshot")
    one.put(rows(1, stamp=2))
    one.flush()
    one.put(rows(2, stamp=3))

    def stamps(consistency: Any) -> dict[int, int]:
        found = read(uri, consistency).scan().to_table().to_pylist()
        return {row["id"]: row["n"] - row["id"] * 10 for row in found}

    assert stamps("snapshot") == {1: 1, 2: 0, 3: 0}
    assert stamps("strong") == {1: 2, 2: 3, 3: 0}
