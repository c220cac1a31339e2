"""Requests made at once, by an iterator that may be dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from memwal_ops.storage import api
from memwal_ops.storage.api import concurrently, results_of


def test_results_come_in_order_with_their_items() -> None:
    found = list(concurrently(lambda one: one * 2, range(10), threads=3, chunk=4))
    assert found == [(one, one * 2) for one in range(10)]
    assert list(concurrently(str, [], threads=3)) == []


def test_no_more_is_taken_than_a_chunk() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for one in range(10):
            taken.append(one)
            yield one

    first = next(concurrently(str, items(), threads=2, chunk=3))
    assert (first, taken) == ((0, "0"), [0, 1, 2])


def test_no_thread_is_left_at_an_element() -> None:
    """Dropped here, and collected on a thread of its own pool, it would wait for itself."""
    threads: set[threading.Thread] = set()
    iterator = concurrently(lambda _: threads.add(threading.current_thread()), range(10), threads=2)
    next(iterator)
    assert threads
    assert not any(thread.is_alive() for thread in threads)


def test_an_error_ends_it() -> None:
    iterator = concurrently(lambda one: 1 // one, [1, 0, 1], threads=1)
    assert next(iterator) == (1, 1)
    with pytest.raises(ZeroDivisionError):
        next(iterator)


def test_after_an_error_no_other_one_is_begun() -> None:
    """On two threads, of which each fails at its first item."""
    begun: list[int] = []
    waits, failed = threading.Event(), threading.Event()

    def fail(number: int) -> None:
        begun.append(number)
        if number:
            waits.wait()
            failed.set()
            raise ValueError(number)
        waits.set()
        failed.wait()
        raise KeyError(number)

    with pytest.raises(KeyError):
        results_of(fail, range(100), threads=2)
    assert sorted(begun) == [0, 1]


def test_after_quick_items_no_threads_are_made_until_one_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a local disk a change of threads takes longer than a read; on a network file system it does not."""
    here, clock = threading.current_thread(), [0.0]
    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def run(number: int) -> bool:
        clock[0] += 0.004 if number == 5 else 0.0
        return threading.current_thread() is here

    found = [is_here for _, is_here in concurrently(run, range(10), threads=2)]
    assert found == [False, False, True, True, True, True, False, False, True, True]
