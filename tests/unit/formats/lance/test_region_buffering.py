"""The region writer's MemTable: what is not durable yet, what threads do to it, and what flushes on its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.errors import InvalidUsageError, StoreUnavailableError, WriterFencedError
from memwal_ops.memwal import RegionWriter, WriterLimits
from tests.integration.formats.lance.log.test_region_writer import REGION, NoAnswer, keys, made, rows, seen
from tests.support.counting_store import CountingStore
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.waiting import until

NEVER = WriterLimits(wal_interval=timedelta(hours=1))


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return made(tmp_path)


def writer(uri: str, store: Any = None, **options: Any) -> RegionWriter:
    table: Any = open_table(uri)
    given = {"durable": False, "limits": NEVER, **options}
    return RegionWriter(table if store is None else replace(table, store=store(table.store)), REGION, **given)


def entries(uri: str) -> list[str]:
    return Files(uri).listing(f"_mem_wal/{REGION}/wal")


@pytest.mark.req(
    "S0-021", "S0-024", "S0-027", "S0-118", "S0-124", "S0-126", "S0-127", "S0-131", "S0-134", "S0-142", "S0-143"
)
def test_writes_wait_and_become_one_entry(uri: str) -> None:
    counting: list[CountingStore] = []

    def counted(store: Any) -> CountingStore:
        counting.append(CountingStore(store))
        return counting[0]

    one = writer(uri, counted)
    counting[0].reset()
    one.put(rows(1, 2, stamp=1))
    one.delete(keys(2))
    one.put(rows(3, stamp=2))
    assert counting[0].calls == {}, "nothing is durable yet"
    assert [part["id"].to_pylist() for part in one.unflushed()] == [[1, 2], [2], [3]], "and everything can be read"
    assert one.fragment_mapping() == {}
    one.flush_log()
    assert counting[0].calls == {"put_if_absent": 1, "list": 2}, "one entry, no manifest; was the table migrated?"
    assert len(entries(uri)) == 1
    one.put(rows(4))
    one.flush_log()
    places = {number: (place.entry, place.position) for number, place in one.fragment_mapping().items()}
    assert places == {0: (1, 0), 1: (1, 1), 2: (1, 2), 3: (2, 0)}
    assert [part["id"].to_pylist() for part in one.unflushed()] == [[1, 2], [2], [3], [4]]
    two = writer(uri)
    places = {number: (place.entry, place.position) for number, place in two.fragment_mapping().items()}
    assert places == {0: (1, 0), 1: (2, 0)}, "a replayed entry is one fragment"
    assert two.flush() == 1
    assert two.fragment_mapping() == {}
    two.put(rows(5))
    two.flush_log()
    assert {number: place.entry for number, place in two.fragment_mapping().items()} == {0: 1}, "counted from the flush"
    two.close()
    assert seen(uri) == {1: 1, 3: 2, 4: 0, 5: 0}


@pytest.mark.req("S0-118", "S0-129")
def test_what_a_crash_takes(uri: str) -> None:
    one = writer(uri)
    one.put(rows(1, stamp=1))
    one.flush_log()
    one.put(rows(1, stamp=2))  # and the process dies
    assert seen(uri)[1] == 1
    durable = writer(uri, durable=True)
    durable.put(rows(1, stamp=3))
    assert seen(uri)[1] == 3


@pytest.mark.req("S0-128")
@pytest.mark.parametrize(
    "limits",
    [
        WriterLimits(wal_interval=timedelta(milliseconds=20)),
        replace(NEVER, wal_puts=3),
        replace(NEVER, wal_bytes=60),
    ],
    ids=["time", "count", "size"],
)
def test_what_waits_comes_to_the_log_by_itself(uri: str, limits: WriterLimits) -> None:
    one = writer(uri, limits=limits)
    for number in (1, 4, 5):
        one.put(rows(number, stamp=7))
    until(lambda: sum(place is not None for place in one.fragment_mapping().values()) == 3)
    assert seen(uri) == {1: 7, 2: 0, 3: 0, 4: 7, 5: 7}


@pytest.mark.req("S0-022", "S0-119")
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("limits", [replace(NEVER, memtable_rows=4), replace(NEVER, memtable_bytes=100)])
def test_generations_in_the_background(uri: str, limits: WriterLimits, durable: bool) -> None:
    one = writer(uri, durable=durable, limits=replace(limits, wal_puts=2))
    for number in range(4, 12):
        one.put(rows(number, stamp=1))
    until(lambda: len(wire.region_manifest(Files(uri), str(REGION)).generations) > 0)
    one.close()
    assert seen(uri) == {1: 0, 2: 0, 3: 0, **dict.fromkeys(range(4, 12), 1)}


def test_memory_is_bounded(uri: str) -> None:
    """A writer that is faster than the store writes to the log itself: back-pressure."""
    big = rows(*range(100, 200))
    one = writer(uri, limits=replace(NEVER, wal_bytes=big.nbytes * 2))
    one._wake = lambda: None  # type: ignore[method-assign]  # the thread in the background gets no turn
    for _ in range(20):
        one.put(big)
        assert sum(part.nbytes for part in one._memtable.waiting) <= 4 * big.nbytes
    assert len(entries(uri)) >= 4
    one.close()


@pytest.mark.req("S0-154")
def test_fenced_with_rows_that_wait(uri: str) -> None:
    one = writer(uri)
    one.put(rows(1, stamp=1))
    two = writer(uri, durable=True)
    two.put(rows(2, stamp=2))
    with pytest.raises(WriterFencedError):
        one.flush()
    for action in (one.close, one.flush, one.flush_log, lambda: one.put(rows(4))):
        with pytest.raises(WriterFencedError):  # also close: what waited is lost, and that is said
            action()
    two.close()
    assert seen(uri) == {1: 0, 2: 2, 3: 0}


@pytest.mark.req("S0-154")
def test_the_background_notices_that_it_is_fenced(uri: str) -> None:
    one = writer(uri, limits=WriterLimits(wal_interval=timedelta(milliseconds=10)))
    two = writer(uri, durable=True)
    two.put(rows(2, stamp=2))
    one.put(rows(1, stamp=1))
    until(lambda: one._fenced)
    with pytest.raises(WriterFencedError):
        one.put(rows(1, stamp=1))
    worker = one._background.thread
    assert worker is not None
    until(lambda: not worker.is_alive())


@pytest.mark.parametrize("carried_out", [True, False])
def test_an_entry_without_answer_and_again(uri: str, carried_out: bool) -> None:
    one = writer(uri, lambda store: NoAnswer(store, 2, carried_out=carried_out))
    one.put(rows(1, stamp=1))
    with pytest.raises(StoreUnavailableError):
        one.flush_log()
    one.put(rows(1, stamp=2))
    one.close()
    assert seen(uri) == {1: 2, 2: 0, 3: 0}


def test_an_error_of_the_program_keeps_what_was_put(uri: str) -> None:
    with pytest.raises(ZeroDivisionError), writer(uri) as one:
        one.put(rows(1, stamp=1))
        _ = 1 // 0
    assert len(entries(uri)) == 1
    with pytest.raises(InvalidUsageError, match="closed"):
        one.put(rows(1))
    assert seen(uri)[1] == 1


@pytest.mark.req("S0-115")
@pytest.mark.parametrize("durable", [True, False])
def test_many_threads(uri: str, durable: bool) -> None:
    """Each writes its own keys, one after the other; entries have no hole, and every key has its last value."""
    one = writer(uri, durable=durable, limits=WriterLimits(wal_interval=timedelta(milliseconds=5), memtable_rows=25))
    failures: list[BaseException] = []

    def write(thread: int) -> None:
        try:
            for stamp in range(1, 13):
                one.put(rows(100 + thread, stamp=stamp))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.close()
    assert not failures
    numbers = sorted(int(Path(name).stem[::-1], 2) for name in entries(uri))
    assert numbers == [*range(1, len(numbers) + 1)]
    assert seen(uri) == {1: 0, 2: 0, 3: 0, **dict.fromkeys(range(100, 104), 12)}


@pytest.mark.req("S0-122", "S0-123")
def test_a_long_log_is_replayed_to_its_end(uri: str) -> None:
    one = writer(uri, durable=True)
    for number in range(90):
        one.put(rows(number, stamp=1))
    two = writer(uri, durable=True)
    assert [part["id"].to_pylist() for part in two.unflushed()] == [[number] for number in range(90)]
    assert two.flush() == 1
    folder = wire.region_manifest(Files(uri), str(REGION)).generations[1]
    assert lance.dataset(f"{uri}/_mem_wal/{REGION}/{folder}").to_table()["id"].to_pylist() == [*range(90)]


def test_by_uri(uri: str) -> None:
    with RegionWriter(uri, str(REGION)) as one:
        one.put(rows(1, stamp=1))
        assert one.region_id == REGION
    with pytest.raises(InvalidUsageError, match="not a region id"):
        RegionWriter(uri, "seven")
    assert open_table(uri).region(REGION).latest().writer_epoch == 1, "it was not claimed"
