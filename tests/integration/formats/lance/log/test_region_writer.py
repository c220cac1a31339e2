"""The region layout's writer: acknowledged rows are stored, with any failures and any concurrent writers."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import (
    InvalidUsageError,
    NoPrimaryKeyError,
    StoreUnavailableError,
    WalCorruptError,
    WriterFencedError,
)
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.log.create import create_mem_wal
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.memwal import read
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.counting_store import CountingStore
from tests.support.dying_store import DyingStore, Killed
from tests.support.gc_options import IMMEDIATE
from tests.support.overtaken import Overtaken
from tests.support.stores import LyingStore, beside
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.schemas import PRIMARY_KEY

REGION = UUID("7c9e6679-7425-40de-944b-e07fc1f90ae7")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("s", pa.struct([("a", pa.string()), ("b", pa.list_(pa.int16()))])),
    ]
)


def rows(*numbers: int, stamp: int = 0, schema: pa.Schema = SCHEMA) -> pa.Table:
    whole = [{"id": i, "n": i * 10 + stamp, "s": {"a": f"{i}/{stamp}", "b": [i, stamp]}, "late": i} for i in numbers]
    return pa.Table.from_pylist(whole, schema=schema)


def keys(*numbers: int) -> pa.Table:
    return pa.table({"id": pa.array(numbers, pa.int64())})


def made(folder: Path) -> str:
    uri = str(folder / "t.lance")
    lance.write_dataset(rows(1, 2, 3), uri)
    location = resolve(uri)
    create_mem_wal(location, open_store(location))
    return uri


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return made(tmp_path)


def writer(uri: str, store: Any = None, **options: Any) -> RegionWriter:
    table: Any = open_table(uri)
    return RegionWriter(table if store is None else replace(table, store=store(table.store)), REGION, **options)


def seen(uri: str) -> dict[int, int]:
    """What all readers see once the region's next writer took it over: stamps by key."""
    with writer(uri):
        pass
    return {key: row["n"] - key * 10 for (key,), row in read_spec(uri).items()}


# -- what is written


@pytest.mark.req("S0-030", "S0-031", "S0-032", "S0-033", "S0-034", "S0-037", "S0-147", "S0-149", "S0-150")
def test_the_content_of_a_region(uri: str) -> None:
    with writer(uri) as one:
        assert one.put(rows(1, 4, 1, stamp=5)) == 1
        assert one.delete(keys(2)) == 1
        assert one.flush() == 1
        assert one.flush() is None
        assert one.put(rows(5)) == 2
    files, folder = Files(uri), f"_mem_wal/{REGION}"
    names = [wire.bit_reversed(number) for number in (1, 2, 3)]
    assert files.listing(f"{folder}/wal") == sorted(f"{folder}/wal/{name}.lance" for name in names)
    entry = lance.file.LanceFileReader(f"{uri}/{folder}/wal/{names[0]}.lance")
    assert entry.metadata().schema.metadata[b"writer_epoch"] == b"1"
    assert entry.read_all().to_table()["id"].to_pylist() == [1, 4, 1]
    found = wire.region_manifest(files, str(REGION))
    assert (found.version, found.epoch, found.replay_after, found.current_generation) == (3, 1, 3, 3)
    assert int(wire.get(found.fields, 4)) == 3
    assert files.get(f"{folder}/manifest/version_hint.json") == b'{"version": 3}'
    below = files.listing(f"{folder}/{found.generations[1]}")
    parts = [path.removeprefix(f"{folder}/{found.generations[1]}/") for path in below]
    assert f"_versions/{2**64 - 2:020d}.manifest" in parts
    assert not any(path.startswith("data/") for path in parts), "no row is copied"
    generation = lance.dataset(f"{uri}/{folder}/{found.generations[1]}")
    assert [one.physical_rows for one in generation.get_fragments()] == [3, 1]
    assert generation.to_table()["id"].to_pylist() == [4, 1, 2], "the older row of key 1 is hidden"
    assert generation.to_table()["_tombstone"].to_pylist() == [False] * 2 + [True]
    assert seen(uri) == {1: 5, 3: 0, 4: 5, 5: 0}
    assert open_table(uri).layout.name == "region"
    assert run_job(uri, "merge").decision == "merged"
    assert {key: row["n"] - key * 10 for (key,), row in read_base(uri).items()} == {1: 5, 3: 0, 4: 5, 5: 0}


@pytest.mark.req("S0-028", "S0-055", "S0-061", "S0-116")
def test_a_durable_write_is_one_put(uri: str) -> None:
    counting: list[CountingStore] = []

    def counted(store: Any) -> CountingStore:
        counting.append(CountingStore(store))
        return counting[0]

    one = writer(uri, counted)
    counting[0].reset()
    one.put(rows(7))
    assert counting[0].calls == {"put_if_absent": 1, "list": 2}, "the first one asks whether the table was migrated"
    counting[0].reset()
    one.flush()
    assert counting[0].calls["put_if_absent"] == 5, "the generation, its filter, two of its keys; the region's manifest"
    assert counting[0].calls["put"] == 1, "the hint"
    counting[0].reset()
    one.put(rows(7))
    assert counting[0].calls == {"put_if_absent": 1}


def test_generations_have_the_ids_of_the_base(uri: str) -> None:
    """A column is dropped and another added: the ids have a gap, and what was under the old id is not mixed up."""
    lance.dataset(uri).drop_columns(["n"])
    lance.dataset(uri).add_columns(pa.field("late", pa.int64()))
    schema = pa.schema([SCHEMA.field("id"), SCHEMA.field("s"), pa.field("late", pa.int64())])
    with writer(uri) as one:
        one.put(rows(8, schema=schema))
    folder = wire.region_manifest(Files(uri), str(REGION)).generations[1]
    base, flushed = (lance.dataset(at).lance_schema.fields() for at in (uri, f"{uri}/_mem_wal/{REGION}/{folder}"))
    ids = {one.name(): one.id() for one in flushed}
    assert {one.name(): one.id() for one in base}.items() <= ids.items()
    assert ids["_tombstone"] == 1 + max(number for name, number in ids.items() if name != "_tombstone")
    assert run_job(uri, "merge").decision == "merged"
    assert read_base(uri)[(8,)] == {"id": 8, "s": {"a": "8/0", "b": [8, 0]}, "late": 8}


@pytest.mark.req("S0-122", "S0-123", "S0-152")
def test_what_an_older_writer_left_in_other_columns(uri: str) -> None:
    """Its entries become a generation of their own, with the ids that their columns had."""
    writer(uri).put(rows(4, 5, stamp=1))  # and dies
    lance.dataset(uri).drop_columns(["n"])
    lance.dataset(uri).add_columns(pa.field("n", pa.int32()))  # the same name, and another column
    schema = pa.schema([SCHEMA.field("id"), SCHEMA.field("s"), pa.field("n", pa.int32())])
    two = writer(uri)
    assert two.put(rows(6, stamp=2, schema=schema)) == 2
    assert [one.num_rows for one in two.unflushed()] == [2, 1]
    assert two.flush() == 2
    two.close()
    assert wire.region_manifest(Files(uri), str(REGION)).replay_after == 2
    assert run_job(uri, "merge").decision == "merged"
    assert {key: (row["n"], row["s"]["a"]) for (key,), row in read_base(uri).items()} == {
        1: (None, "1/0"), 2: (None, "2/0"), 3: (None, "3/0"), 4: (None, "4/1"), 5: (None, "5/1"), 6: (62, "6/2"),
    }  # fmt: skip


def test_without_tombstones(uri: str) -> None:
    one = writer(uri, tombstones=False)
    one.put(rows(1, stamp=3))
    with pytest.raises(InvalidUsageError, match="no tombstones"):
        one.delete(keys(2))
    one.close()
    folder = wire.region_manifest(Files(uri), str(REGION)).generations[1]
    assert lance.dataset(f"{uri}/_mem_wal/{REGION}/{folder}").schema.names == SCHEMA.names
    assert seen(uri) == {1: 3, 2: 0, 3: 0}


# -- crashes, and answers that are lost


def play(uri: str, store: Any, acknowledged: dict[int, int | None], began: list[int]) -> None:
    """A writer's life; what it was told is durable, and which keys it was about to write."""
    began[:] = []
    one = writer(uri, store)
    for stamp, number in enumerate((1, 4, 1, 5), 1):
        began[:] = [number]
        one.put(rows(number, stamp=stamp))
        acknowledged[number] = stamp
        began[:] = []
        if number == 4:
            one.flush()
    began[:] = [3]
    one.delete(keys(3))
    acknowledged[3] = None
    began[:] = []
    one.close()


@pytest.mark.long
@pytest.mark.req("S0-122", "S0-152", "S0-208")
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call(tmp_path: Path, after: bool) -> None:
    counting: list[DyingStore] = []

    def counted(store: Any) -> DyingStore:
        counting.append(DyingStore(store, 10**9, after=False))
        return counting[0]

    play(made(tmp_path / "whole"), counted, {}, [])
    calls = len(counting[0].calls)
    assert calls > 20
    for at in range(1, calls + 1):
        uri = made(tmp_path / str(at))
        acknowledged: dict[int, int | None] = {1: 0, 2: 0, 3: 0}
        began: list[int] = []
        with pytest.raises(Killed):
            play(uri, lambda store, at=at: DyingStore(store, at, after=after), acknowledged, began)
        found = seen(uri)
        for number, stamp in acknowledged.items():
            if number not in began:  # that one may be there or not
                assert found.get(number) == stamp, f"call {at} of {calls}"
        assert found.keys() - {*began} == {number for number, stamp in acknowledged.items() if stamp is not None} - {
            *began
        }


class NoAnswer:
    """The n-th conditional put is carried out or not, and its answer is lost."""

    def __init__(self, store: Any, at: int, *, carried_out: bool = True) -> None:
        self._store, self._left, self._carried_out = store, at, carried_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._left -= path.startswith("_mem_wal/")
        if self._left:
            return bool(self._store.put_if_absent(path, data))
        self._left = -1
        if self._carried_out:
            self._store.put_if_absent(path, data)
        raise StoreUnavailableError("no answer")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("at", range(2, 10))
def test_no_answer_and_again(uri: str, at: int, carried_out: bool) -> None:
    """Puts 1: claim, 2 and 3: entries, 4: generation, 5 to 7: what it has of its keys, 8: manifest, 9: an entry."""
    one = writer(uri, lambda store: NoAnswer(store, at, carried_out=carried_out))

    def again(action: Any) -> Any:
        try:
            return action()
        except StoreUnavailableError:
            return action()

    again(lambda: one.put(rows(1, stamp=1)))
    again(lambda: one.put(rows(2, stamp=2)))
    assert again(one.flush) == 1
    again(lambda: one.put(rows(3, stamp=3)))
    one.close()
    found = wire.region_manifest(Files(uri), str(REGION))
    assert sorted(found.generations) == [1, 2]
    assert found.replay_after == 3, "nothing was put twice"
    assert seen(uri) == {1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("at", [3, 5, 7])
def test_a_flush_without_answer_does_not_take_what_came_since(uri: str, at: int, carried_out: bool) -> None:
    """The put of the generation (3), its files (5) or the manifest (7) is lost; then one more row is put."""
    one = writer(uri, lambda store: NoAnswer(store, at, carried_out=carried_out))
    one.put(rows(1, stamp=1))
    with pytest.raises(StoreUnavailableError):
        one.flush()
    one.put(rows(2, stamp=2))
    one.close()
    assert wire.region_manifest(Files(uri), str(REGION)).replay_after == 2
    assert seen(uri) == {1: 1, 2: 2, 3: 0}


def no_manifests(store: Any) -> Any:
    """No manifest can be published until ``fails`` is empty."""

    def put_if_absent(path: str, data: bytes) -> bool:
        if store_.fails and f"{REGION}/manifest/" in path:
            raise StoreUnavailableError("no answer")
        return bool(store.put_if_absent(path, data))

    store_ = LyingStore(store, put_if_absent=put_if_absent)
    store_.fails = []  # type: ignore[attr-defined]
    return store_


def generations(uri: str) -> set[str]:
    return {path.name for path in Path(uri, "_mem_wal", str(REGION)).glob("*_gen_*")}


@pytest.mark.parametrize("collected", [True, False])
def test_a_flush_that_failed_publishes_nothing_that_gc_deleted(uri: str, collected: bool) -> None:
    one = writer(uri, no_manifests)
    one.put(rows(1, stamp=1))
    one._table.store.fails.append(1)  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            one.flush()
    (first,) = generations(uri)
    one._table.store.fails.clear()  # type: ignore[attr-defined]
    if collected:
        assert gc.apply(open_table(uri), IMMEDIATE).deleted_objects
        assert not generations(uri)
    one.put(rows(2, stamp=2))
    one.close()
    assert (first in generations(uri)) is not collected, "written again only if it may be gone"
    assert seen(uri) == {1: 1, 2: 2, 3: 0}
    assert run_job(uri, "merge").decision == "merged"
    assert {key: row["n"] - key * 10 for (key,), row in read_base(uri).items()} == {1: 1, 2: 2, 3: 0}


def test_gc_fences_a_flush_that_stalls_before_its_commit(uri: str) -> None:
    """It is suspended between the generation's last file and the manifest; gc deletes what no manifest lists."""
    one = writer(uri)
    one.put(rows(1, stamp=1))
    others = beside("put_if_absent", f"{REGION}/manifest/", lambda: gc.apply(open_table(uri), IMMEDIATE))
    one._table = replace(one._table, store=(store := others(one._table.store)))
    one._manifests = one._table.region(REGION)
    one.close()
    assert store.happened
    assert len(generations(uri)) == 1
    assert seen(uri) == {1: 1, 2: 0, 3: 0}


# -- several writers


@pytest.mark.req("S0-007", "S0-153", "S0-154", "S0-207", "S0-208")
def test_a_fenced_writer_stops(uri: str) -> None:
    first = writer(uri)
    first.put(rows(1, stamp=1))
    second = writer(uri)
    assert (first.epoch, second.epoch) == (1, 2)
    second.put(rows(1, stamp=2))
    with pytest.raises(WriterFencedError, match="epoch 1"):
        first.put(rows(1, stamp=3))
    for action in (first.flush, lambda: first.put(rows(4)), lambda: first.delete(keys(1))):
        with pytest.raises(WriterFencedError):
            action()
    first.close()  # says nothing any more, and flushes nothing
    second.close()
    assert seen(uri) == {1: 2, 2: 0, 3: 0}


@pytest.mark.req("S0-153", "S0-208")
def test_a_fenced_writer_that_does_not_know_it_yet_is_accepted(uri: str) -> None:
    """Its entry is acknowledged where the newer writer did not write yet, and then the newer one takes it over."""
    first, second = writer(uri), writer(uri)
    first.put(rows(1, stamp=1))
    second.put(rows(2, stamp=2))
    with pytest.raises(WriterFencedError):
        first.flush()
    second.close()
    found = wire.region_manifest(Files(uri), str(REGION))
    assert (found.replay_after, found.current_generation) == (2, 2)
    assert seen(uri) == {1: 1, 2: 2, 3: 0}


@pytest.mark.req("S0-005", "S0-051", "S0-121")
@pytest.mark.parametrize("claims", [0, 2])
def test_two_claims_of_one_epoch(uri: str, claims: int) -> None:
    """Both read the same manifest and publish equal bytes: one of them has to notice."""
    for _ in range(claims):
        writer(uri)
    others: list[RegionWriter] = []
    count = 2 if claims else 1  # the store's probe may write first
    for at in range(1, 5):
        others.clear()
        mine = writer(uri, lambda store, at=at: Overtaken(store, at, lambda: others.append(writer(uri)), writes=True))
        if others:
            assert mine.epoch != others[0].epoch
            count += 1
    assert count > 1


@pytest.mark.req("S0-029")
def test_the_log_is_what_is_durable(uri: str) -> None:
    """With all gone but log and manifests every acknowledged row is there; with an entry gone nothing is guessed."""
    writer(uri).put(rows(7))
    one = writer(uri, lambda store: DyingStore(store, 10_000, after=False))
    one.put(rows(1, stamp=1))
    one.delete(keys(2))
    one._table.store._dies_at = len(one._table.store.calls) + 6
    with pytest.raises(Killed):
        one.flush()
    region = Path(uri, "_mem_wal", str(REGION))
    others = [folder for folder in region.iterdir() if folder.name not in {"wal", "manifest"}]
    assert others, "the flush that was killed had begun a generation"
    for folder in others:
        shutil.rmtree(folder)
    assert {row["id"]: row["n"] for row in read(uri).scan().to_table().to_pylist()} == {1: 11, 3: 30, 7: 70}
    copy = f"{uri}.copy"
    shutil.copytree(uri, copy)
    assert seen(uri) == {1: 1, 3: 0, 7: 0}
    Path(copy, "_mem_wal", str(REGION), "wal", f"{wire.bit_reversed(1)}.lance").unlink()
    with pytest.raises(WalCorruptError):
        writer(copy)
    with pytest.raises(WalCorruptError):
        read(copy).scan().to_table()


@pytest.mark.req("S0-155")
def test_jobs_need_no_writer_and_stop_none(uri: str) -> None:
    """Every job runs while a writer has rows in memory and in the log; the writer goes on in its epoch."""
    one = writer(uri, durable=False)
    for number in range(1, 4):
        one.put(rows(number, 10 + number, stamp=number))
        one.flush()
        one.put(rows(20 + number, stamp=number))  # waits
        for job in ("merge", "snapshot", "catchup", "compact", "gc"):
            options: dict[str, Any] = {"apply": True} if job == "gc" else {}
            assert run_job(uri, job, **options).exit_code == 0
        assert (number + 10,) in read_base(uri), "merged without the writer"
    epoch = one.epoch
    one.close()
    assert wire.region_manifest(Files(uri), str(REGION)).epoch == epoch
    assert seen(uri) == {1: 1, 2: 2, 3: 3, 11: 1, 12: 2, 13: 3, 21: 1, 22: 2, 23: 3}


@pytest.mark.long
@pytest.mark.req("S0-120")
def test_a_region_that_another_writer_creates_in_between(uri: str) -> None:
    """At any call of a claim another writer creates the region: the claim is repeated; one of both is fenced."""
    writer(uri).close()
    table: Any = open_table(uri)
    created = 0
    for at in range(1, 12):
        region, others = UUID(int=at, version=4), []

        def create(region: UUID = region, others: list[RegionWriter] = others) -> None:
            others.append(RegionWriter(uri, region))
            others[0].put(rows(100 + region.int % 100))

        store = Overtaken(table.store, at, create)
        both: list[RegionWriter] = []
        with suppress(WriterFencedError):  # it may have claimed first, and finds the other one's entry
            both.append(RegionWriter(replace(table, store=store), region))
        store._others = None
        both += others
        created += bool(others)
        *fenced, last = sorted(both, key=lambda one: one.epoch)
        for one in fenced:
            assert one.epoch < last.epoch
            with pytest.raises(WriterFencedError):
                one.flush()
        last.flush()
        assert not others or (100 + region.int % 100,) in read_spec(uri)
    assert created > 4


def test_an_overtaken_flush_keeps_what_others_published(uri: str) -> None:
    """A snapshot builder notes the end of the log right before the region's manifest is put."""
    table: Any = open_table(uri)

    def hint() -> None:
        newest = table.region(REGION).latest()
        assert table.region(REGION).commit(newest.next().with_wal_id_last_seen(1))

    for at in (2, 3, 4):  # the entry is 1
        one = writer(uri)
        one.put(rows(1, stamp=at))
        one._table = replace(one._table, store=(store := Overtaken(one._table.store, at - 1, hint, writes=True)))
        one._manifests = one._table.region(REGION)
        one.close()
        assert store._others is None or at == 4
        assert seen(uri)[1] == at


# -- the index


@pytest.mark.req("S0-002", "S0-011")
def test_what_gets_no_index(tmp_path: Path, uri: str) -> None:
    def create(at: str, **options: Any) -> None:
        create_mem_wal(resolve(at), open_store(resolve(at)), **options)

    with pytest.raises(InvalidUsageError, match="already"):
        create(uri)
    bare = str(tmp_path / "bare.lance")
    lance.write_dataset(pa.table({"a": [1]}), bare)
    with pytest.raises(NoPrimaryKeyError):
        create(bare)
    keyed = str(tmp_path / "keyed.lance")
    lance.write_dataset(rows(1), keyed)
    with pytest.raises(InvalidUsageError, match="no index gone"):
        create(keyed, maintained_indexes=["gone"])
    lance.dataset(keyed).create_scalar_index("n", "BTREE")
    create(keyed, maintained_indexes=["n_idx"])
    assert open_table(keyed).index.maintained_indexes == ("n_idx",)
    Files(bare).put(f"_mem_wal/{REGION}/manifest/x", b"")
    with pytest.raises(InvalidUsageError, match="it has region folders"):
        create(bare)


def test_a_new_region(uri: str) -> None:
    with RegionWriter(open_table(uri)) as one, RegionWriter(open_table(uri)) as two:
        assert one.region_id != two.region_id
        assert one.region_id.version == 4
        one.put(rows(1, stamp=1))
        two.put(rows(2, stamp=2))
    assert {key: row["n"] - key * 10 for (key,), row in read_spec(uri).items()} == {1: 1, 2: 2, 3: 0}
