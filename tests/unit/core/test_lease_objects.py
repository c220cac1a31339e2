"""The objects of a lease, one by one: what each step writes, and what it makes of every answer of the store."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from memwal_ops.core import leases as module
from memwal_ops.core.leases import (
    BY_HAND,
    Holder,
    LastRun,
    Lease,
    acquire,
    break_lease,
    check,
    list_leases,
    read_lease,
    record_by_hand,
    release,
    renew,
)
from memwal_ops.errors import InvalidUsageError, LeaseLostError, StorageError
from tests.unit.core.memory import MINUTE, START, MemoryStore

A, B = Holder("instance-a", "a@one"), Holder("instance-b", "b@two")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = MemoryStore()
    monkeypatch.setattr(module, "store_clock", lambda one: one.now)
    return made


def path_of(number: int, job: str = "merge") -> str:
    return f"_mem_wal_ops/leases/{job}/{number:020d}.json"


def document(store: MemoryStore, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.data[path_of(number)])
    return found


def taken(store: Any, holder: Holder = A) -> Lease:
    lease, _ = acquire(store, "merge", holder)
    assert lease is not None
    return lease


def put(store: MemoryStore, number: int, **changed: Any) -> None:
    """An object as others write it."""
    content = {
        "token": number,
        "instance": "instance-b",
        "holder": "b@two",
        "acquired": None,
        "ttl_seconds": 300,
        "ended": None,
        "outcome": None,
        "finished": None,
        "finished_by": "instance-b",
        **changed,
    }
    store.write(path_of(number), json.dumps(content).encode())


def test_what_each_step_writes(store: Any) -> None:
    first = taken(store)
    assert first == Lease("merge", 1, 1, A, START + MINUTE, START + MINUTE, 5 * MINUTE)
    renewed = renew(store, first)
    assert renewed == replace(first, number=2, written=START + 2 * MINUTE)
    release(store, renewed, "succeeded")
    second, before = acquire(store, "merge", B, 7 * MINUTE)
    last = LastRun("succeeded", START + 3 * MINUTE, "instance-a")
    assert before == replace(renewed, number=3, written=START + 3 * MINUTE, ended="released", last=last)
    time = START + 4 * MINUTE
    assert second == Lease("merge", 4, 4, B, time, time, 7 * MINUTE, last=last)
    again = renew(store, second)
    release(store, again)
    started, nothing = (START + MINUTE).isoformat(), {"outcome": None, "finished": None}
    ours = {
        "format": 1,
        "instance": "instance-a",
        "holder": "a@one",
        "ttl_seconds": 300.0,
        "finished_by": "instance-a",
        "token": 1,
    }
    finished = {"outcome": "succeeded", "finished": last.finished.isoformat(), "finished_by": "instance-a"}
    theirs = {"format": 1, "instance": "instance-b", "holder": "b@two", "ttl_seconds": 420.0, "token": 4, **finished}
    assert [document(store, number) for number in range(1, 7)] == [
        {**ours, **nothing, "acquired": None, "ended": None},
        {**ours, **nothing, "acquired": started, "ended": None},
        {**ours, "acquired": started, "ended": "released", "outcome": "succeeded", "finished": None},
        {**theirs, "acquired": None, "ended": None},
        {**theirs, "acquired": time.isoformat(), "ended": None},
        {**theirs, "acquired": time.isoformat(), "ended": "released"},
    ]
    assert again.to_json() == {
        "job": "merge",
        "holder": "b@two",
        "instance": "instance-b",
        "token": 4,
        "acquired": "2026-11-21T12:04:00+00:00",
        "renewed": "2026-11-21T12:05:00+00:00",
        "expires": "2026-11-21T12:12:00+00:00",
        "ended": None,
        "last_run": {"outcome": "succeeded", "finished": "2026-11-21T12:03:00+00:00", "instance": "instance-a"},
    }
    assert first.to_json()["last_run"] is None


@pytest.mark.parametrize(("minutes", "free"), [(4, False), (5, True), (6, True)])
def test_a_lease_is_free_once_it_expires(store: Any, minutes: int, free: bool) -> None:
    first = taken(store)
    store.now = first.written + minutes * MINUTE
    assert first.in_force(store.now) is not free
    lease, before = acquire(store, "merge", B)
    assert before == first
    assert (lease is not None) is free
    assert (path_of(2) in store.data) is free


def test_the_clock_is_only_read_for_a_lease_that_another_holds(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "store_clock", lambda one: asked.append(one) or one.now)
    release(store, renew(store, taken(store)))
    taken(store, B)
    taken(store, B)
    assert asked == []
    assert acquire(store, "merge", A)[0] is None
    assert asked == [store]


def test_an_answer_that_was_lost(store: Any) -> None:
    first = taken(store)
    store.lose_answers = True
    renewed = renew(store, first)
    assert (renewed.number, renewed.token) == (2, 1)
    check(store, renewed)
    release(store, renewed)
    ended = read_lease(store, "merge")
    assert ended is not None
    assert (ended.number, ended.ended) == (3, "released")
    assert len(store.data) == 3


def test_a_lease_that_was_renewed_without_knowing_is_released_behind_it(store: Any) -> None:
    first = taken(store)
    renew(store, renew(store, first))
    release(store, first, "failed")
    ended = read_lease(store, "merge")
    assert ended is not None
    assert (ended.number, ended.ended, ended.last and ended.last.outcome) == (4, "released", "failed")


@pytest.mark.parametrize("changed", [{}, {"token": 1}, {"token": 1, "instance": "instance-a", "ended": "broken by c"}])
def test_a_lease_of_another_is_not_touched(store: Any, changed: dict[str, Any]) -> None:
    first = taken(store)
    put(store, 2, **changed)
    with pytest.raises(LeaseLostError):
        renew(store, first)
    with pytest.raises(LeaseLostError):
        check(store, first)
    release(store, first)
    assert [*store.data] == [path_of(1), path_of(2)]


def test_why_a_lease_was_lost(store: Any) -> None:
    first = taken(store)
    put(store, 5, ended="broken by c")
    with pytest.raises(LeaseLostError, match=r"^The lease of merge \(token 1\) was lost: broken by c\.$"):
        check(store, first)
    put(store, 6)
    with pytest.raises(LeaseLostError, match=r"was lost: held by b@two with token 6\.$"):
        renew(store, first)
    store.data.clear()
    with pytest.raises(LeaseLostError, match=r"^The lease of merge \(token 1\) is gone\.$"):
        check(store, first)


def test_nothing_of_a_table_that_was_removed_comes_back(store: Any) -> None:
    first = taken(store)
    store.data.clear()
    release(store, first)
    assert store.data == {}


def test_who_writes_into_a_gap_does_not_have_the_lease(store: Any) -> None:
    first = taken(store)
    put(store, 9)
    with pytest.raises(LeaseLostError, match="held by b@two with token 9"):
        renew(store, first)
    store.data.clear()
    put(store, 1, ended="released")
    store.before_put = lambda: put(store, 5)
    assert acquire(store, "merge", A)[0] is None


def test_of_two_that_wrote_the_same_number_one_has_it(store: Any) -> None:
    """The store took both writes; what is read back is the other's."""
    put(store, 1, ended="released")

    def overwritten(path: str) -> None:
        if path == path_of(2):
            put(store, 2)

    store.before_get = overwritten
    assert acquire(store, "merge", A)[0] is None
    store.before_get = lambda path: put(store, 3, instance="instance-a", token=2) if path == path_of(3) else None
    put(store, 2, ended="released")
    assert acquire(store, "merge", A)[0] is None


def test_a_check_is_one_listing(store: Any) -> None:
    first = taken(store)
    renewed = renew(store, first)
    store.gets = 0
    check(store, renewed)
    assert store.gets == 0
    check(store, first)
    assert store.gets == 1


def test_broken(store: Any) -> None:
    lease = renew(store, taken(store))
    broken = break_lease(store, "merge", "c")
    assert broken == replace(lease, number=3, token=3, written=START + 3 * MINUTE, ended="broken by c", last=None)
    with pytest.raises(InvalidUsageError, match="The lease of merge is not held") as raised:
        break_lease(store, "merge", "c")
    assert raised.value.remedy == "memwal-ops lease list URI shows all leases."
    with pytest.raises(InvalidUsageError, match="The lease of gc is not held"):
        break_lease(store, "gc", "c")


def test_a_broken_lease_repeats_the_last_run(store: Any) -> None:
    release(store, taken(store), "succeeded")
    held = taken(store, B)
    assert held.last is not None
    assert break_lease(store, "merge", "c").last == held.last


@pytest.mark.parametrize(("others", "done"), [(19, True), (20, False)])
def test_broken_while_it_is_renewed(store: Any, others: int, done: bool) -> None:
    taken(store)
    numbers = iter(range(2, others + 2))
    store.before_put = lambda: put(store, number) if (number := next(numbers, None)) is not None else None
    if done:
        assert break_lease(store, "merge", "c").number == others + 2
    else:
        with pytest.raises(StorageError, match="Cannot write the lease of merge: 20 consecutive conflicts"):
            break_lease(store, "merge", "c")


@pytest.mark.parametrize(("others", "read"), [(19, True), (20, False)])
def test_pruned_between_the_listing_and_the_read(store: Any, others: int, read: bool) -> None:
    taken(store)
    numbers = iter(range(2, others + 2))

    def pruned(path: str) -> None:
        if (number := next(numbers, None)) is not None:
            del store.data[path]
            put(store, number)

    store.before_get = pruned
    if read:
        found = read_lease(store, "merge")
        assert found is not None
        assert found.number == others + 1
    else:
        with pytest.raises(StorageError, match="The lease of merge changes faster than it can be read"):
            read_lease(store, "merge")


def test_old_numbers_are_pruned_at_every_sixteenth(store: Any) -> None:
    store.write("_mem_wal_ops/leases/merge/note.txt", b"")
    lease = taken(store)
    for number in range(2, 33):
        assert store.deleted == [path_of(old) for old in range(1, 17) if number > 32]
        lease = renew(store, lease)
    assert store.deleted == [path_of(old) for old in range(1, 17)]
    check(store, lease)
    store.data[path_of(47)] = store.data.pop(path_of(32))
    store.times[path_of(47)] = store.now - 9 * MINUTE
    store.deleted.clear()
    assert taken(store, B).number == 48
    assert store.deleted == [path_of(old) for old in range(17, 32)]


def test_the_leases_of_all_jobs(store: Any) -> None:
    for job in ("merge", "gc"):
        acquire(store, job, A)
    for path in ("leases/Other/1.json", "leases/stray.json", "leases/empty/note.txt"):
        store.write(f"_mem_wal_ops/{path}", b"")
    assert [lease.job for lease in list_leases(store)] == ["gc", "merge"]


def test_the_numbers_are_used_up(store: Any) -> None:
    put(store, 10**20 - 1, ended="released")
    with pytest.raises(StorageError, match="No number is left for another lease in"):
        acquire(store, "merge", A)


@pytest.mark.parametrize(
    "changed",
    [
        {"token": 0},
        {"token": 8},
        {"token": True},
        {"token": "7"},
        {"instance": None},
        {"holder": 3},
        {"acquired": 5},
        {"acquired": "yesterday"},
        {"ttl_seconds": "long"},
        {"ttl_seconds": 1e300},
        {"ended": 1},
        {"outcome": 1},
        {"outcome": "failed", "finished_by": None},
    ],
)
def test_what_is_no_lease_is_refused(store: Any, changed: dict[str, Any]) -> None:
    put(store, 7, **changed)
    with pytest.raises(StorageError, match=rf"^{path_of(7)} is not a readable lease \(.+\)\.") as raised:
        read_lease(store, "merge")
    assert (
        raised.value.remedy == "Inspect the file; if memwal-ops did not write it, delete it while no supervisor runs."
    )
    put(store, 7, token=7)
    assert read_lease(store, "merge") is not None


def test_times_are_utc_and_texts_can_be_printed(store: Any) -> None:
    put(store, 7, token=3, acquired="2026-11-21T13:00:00+02:00", holder="\ud800x", outcome="failed")
    found = read_lease(store, "merge")
    assert found is not None
    assert found.acquired == START - 60 * MINUTE
    assert found.acquired.utcoffset() == timedelta()
    assert found.holder == Holder("instance-b", "?x")
    assert found.last == LastRun("failed", found.written, "instance-b")


@pytest.mark.parametrize("job", ["", "Merge", "1merge", "../merge", "a" * 41])
def test_a_job_has_a_plain_name(store: Any, job: str) -> None:
    with pytest.raises(InvalidUsageError, match="is not a valid job name"):
        acquire(store, job, A)
    assert acquire(store, "a" * 40, A)[0] is not None


def test_a_run_by_hand_is_recorded_where_a_supervisor_has_been(store: Any) -> None:
    record_by_hand(store, "merge", "succeeded")
    assert store.data == {}, "no lease was ever taken"
    lease, _ = acquire(store, "merge", A)
    assert lease is not None
    record_by_hand(store, "merge", "succeeded")
    check(store, lease)  # it is held: not touched
    release(store, lease, "failed")
    record_by_hand(store, "merge", "partial")
    newest = read_lease(store, "merge")
    assert newest is not None
    assert (newest.last, newest.ended) == (LastRun("partial", newest.written, BY_HAND), "released")
    again, before = acquire(store, "merge", B)
    assert again is not None
    assert before == newest
    assert again.last == newest.last
