"""Writes of many threads into one region: acknowledged in the order of the log, on stores that delay and lose puts."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import WriterFenced, open_table
from memwal_ops.errors import InvalidUsageError, StoreUnavailableError
from memwal_ops.memwal import RegionWriter, WriterLimits
from memwal_ops.storage.wrapper import StoreWrapper
from tests.integration.formats.lance.log.test_region_writer import REGION, made, rows, seen
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NEVER = WriterLimits(wal_interval=timedelta(hours=1))


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return made(tmp_path)


class Gate(StoreWrapper):
    """A store that lets puts of some paths through only while it is open, and counts those that are under way."""

    def __init__(self, store: Any, part: str) -> None:
        super().__init__(store)
        self._part = part
        self.opened = threading.Event()
        self.opened.set()
        self._lock = threading.Lock()
        self.under_way = self.most = 0

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if self._part not in path:
            return super().put_if_absent(path, data)
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        assert self.opened.wait(600)
        try:
            return super().put_if_absent(path, data)
        finally:
            with self._lock:
                self.under_way -= 1


class Lossy(StoreWrapper):
    """A store that takes its time for entries of the log, and loses some: not carried out, or without an answer."""

    def __init__(self, store: Any, seed: int) -> None:
        super().__init__(store)
        self._random = random.Random(seed)
        self.lost = 0

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if "/wal/" not in path:
            return super().put_if_absent(path, data)
        time.sleep(self._random.random() * 0.004)
        fate = self._random.random()
        if fate < 0.15:
            self.lost += 1
            raise StoreUnavailableError("not carried out")
        done = super().put_if_absent(path, data)
        if fate < 0.3:
            self.lost += 1
            raise StoreUnavailableError("no answer")
        return done


def opened(uri: str, store: Callable[[Any], Any], **options: Any) -> RegionWriter:
    table: Any = open_table(uri)
    return RegionWriter(replace(table, store=store(table.store)), REGION, **{"limits": NEVER, **options})


def gated(uri: str, part: str, **options: Any) -> tuple[RegionWriter, Gate]:
    gates: list[Gate] = []

    def gate(store: Any) -> Gate:
        gates.append(Gate(store, part))
        return gates[0]

    return opened(uri, gate, **options), gates[0]


def in_threads(actions: list[Callable[[], object]]) -> tuple[list[threading.Thread], dict[int, BaseException]]:
    failures: dict[int, BaseException] = {}

    def run(at: int, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            failures[at] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(actions)]
    for thread in threads:
        thread.start()
    return threads, failures


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()


def numbers(uri: str) -> list[int]:
    return sorted(int(Path(name).stem[::-1], 2) for name in Files(uri).listing(f"_mem_wal/{REGION}/wal"))


def parts(one: RegionWriter) -> Iterator[int]:
    yield from (len(part) for part in one._group._open.parts)


@pytest.mark.req("S0-028", "S0-116", "S0-131")
def test_writes_that_wait_for_the_log_become_one_entry(uri: str) -> None:
    """Five threads write while the first put is under way: two entries, and one put at a time."""
    one, gate = gated(uri, "/wal/")
    gate.opened.clear()
    first, failed = in_threads([lambda: one.put(rows(100, stamp=1))])
    until(lambda: gate.under_way)
    others, also_failed = in_threads([lambda key=key: one.put(rows(key, stamp=1)) for key in range(101, 105)])
    until(lambda: len([*parts(one)]) == 4)
    assert one.unflushed() == (), "nothing is acknowledged"
    gate.opened.set()
    joined(first + others)
    assert not failed
    assert not also_failed
    assert numbers(uri) == [1, 2]
    assert gate.most == 1, "a put behind one that is under way could be acknowledged, and the one before be lost"
    assert [place.position for place in one.fragment_mapping().values()] == [0, 0, 1, 2, 3]
    one.close()
    assert seen(uri) == {1: 0, 2: 0, 3: 0, **dict.fromkeys(range(100, 105), 1)}


@pytest.mark.sampled(1)
@pytest.mark.req("S0-122", "S0-116", "S0-129")
@pytest.mark.parametrize("seed", range(4))
def test_no_hole_in_front_of_what_was_acknowledged(uri: str, seed: int) -> None:
    """Threads write their own keys, again after each failure, until the process dies."""
    stores: list[Lossy] = []

    def lossy(store: Any) -> Lossy:
        stores.append(Lossy(store, seed))
        return stores[0]

    one = opened(uri, lossy)
    acknowledged: dict[int, int] = {}

    def write(key: int) -> None:
        for stamp in range(1, 10):
            while True:
                try:
                    one.put(rows(key, stamp=stamp))
                except StoreUnavailableError:
                    continue
                acknowledged[key] = stamp
                break

    threads, failures = in_threads([lambda key=key: write(key) for key in range(100, 106)])
    joined(threads)
    assert not failures
    assert stores[0].lost > 0
    assert numbers(uri) == [*range(1, len(numbers(uri)) + 1)]
    assert len(numbers(uri)) < 54, "some went together"
    assert seen(uri) == {1: 0, 2: 0, 3: 0, **acknowledged}
    assert set(acknowledged.values()) == {9}


@pytest.mark.req("S0-154")
def test_all_that_waits_fails_when_the_writer_is_fenced(uri: str) -> None:
    """One put is under way, four wait for the log; another writer claims the region and takes the entry's place."""
    one, gate = gated(uri, "/wal/")
    gate.opened.clear()
    first, failed = in_threads([lambda: one.put(rows(100, stamp=1))])
    until(lambda: gate.under_way)
    others, also_failed = in_threads([lambda key=key: one.put(rows(key, stamp=1)) for key in range(101, 105)])
    until(lambda: len([*parts(one)]) == 4)
    two = RegionWriter(open_table(uri), REGION)
    two.put(rows(1, stamp=7))
    gate.opened.set()
    joined(first + others)
    errors = [*failed.values(), *also_failed.values()]
    assert len(errors) == 5
    assert all(isinstance(error, WriterFenced) for error in errors)
    assert len({id(error) for error in errors}) == 5, "each thread has its own"
    with pytest.raises(WriterFenced):
        one.flush()
    two.close()
    assert seen(uri) == {1: 7, 2: 0, 3: 0}


@pytest.mark.req("S0-119", "S0-022")
def test_writes_continue_while_a_generation_is_made(uri: str) -> None:
    """Until twice the limit is in the log; then they wait for the flush: memory is bounded."""
    one, gate = gated(uri, "_versions/", limits=replace(NEVER, memtable_rows=4))
    gate.opened.clear()
    for key in range(100, 104):
        assert one.put(rows(key, stamp=1)) == 1
    until(lambda: gate.under_way)
    for key in range(104, 108):
        assert one.put(rows(key, stamp=1)) == 2, "what is flushed takes no more"
    waiting, failed = in_threads([lambda: one.put(rows(108, stamp=1))])
    time.sleep(0.05)
    assert waiting[0].is_alive()
    assert len(numbers(uri)) == 8
    assert wire.region_manifest(Files(uri), str(REGION)).generations == {}
    gate.opened.set()
    joined(waiting)
    assert not failed
    one.close()
    assert sorted(wire.region_manifest(Files(uri), str(REGION)).generations) == [1, 2, 3]
    assert seen(uri) == {1: 0, 2: 0, 3: 0, **dict.fromkeys(range(100, 109), 1)}


@pytest.mark.parametrize("durable", [True, False])
def test_nothing_comes_behind_a_close(uri: str, durable: bool) -> None:
    """Threads write until they are refused, one closes: what was acknowledged before is in a generation."""
    one = RegionWriter(open_table(uri), REGION, durable=durable)
    acknowledged: dict[int, int] = {}

    def write(key: int) -> None:
        for stamp in range(1, 10_000):
            try:
                one.put(rows(key, stamp=stamp % 10))
            except InvalidUsageError:
                return
            acknowledged[key] = stamp % 10

    threads, failures = in_threads([lambda key=key: write(key) for key in range(100, 104)])
    until(lambda: len(acknowledged) == 4)
    one.close()
    joined(threads)
    assert not failures
    assert one.unflushed() == ()
    assert seen(uri) == {1: 0, 2: 0, 3: 0, **acknowledged}


def test_a_put_that_waits_behind_another_is_refused_once_close_begins(uri: str) -> None:
    """It would be put after the entries that close flushes: ``seal`` would leave it in a log that no writer replays."""
    one, gate = gated(uri, "/wal/")
    gate.opened.clear()
    first, failed = in_threads([lambda: one.put(rows(100, stamp=1))])
    until(lambda: gate.under_way)
    later, refused = in_threads([lambda: one.put(rows(101, stamp=1))])
    until(lambda: one._group._open.parts)
    closing, unclosed = in_threads([one.close])
    until(lambda: one._closing)
    gate.opened.set()
    joined([*first, *later, *closing])
    assert not failed and not unclosed
    assert isinstance(refused[0], InvalidUsageError)
    assert one.unflushed() == ()
    assert seen(uri) == {1: 0, 2: 0, 3: 0, 100: 1}
