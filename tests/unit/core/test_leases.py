"""Leases: one holder at a time, acquired by another within one ttl, by the store's clock only."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import open_table
from memwal_ops.core import leases
from memwal_ops.core.leases import (
    LEASES_FOLDER,
    Holder,
    Lease,
    acquire,
    break_lease,
    check,
    list_leases,
    read_lease,
    release,
    renew,
)
from memwal_ops.errors import InvalidUsageError, LeaseLostError, StorageError
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.storage import clock
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

A, B = Holder("instance-a", "a@one"), Holder("instance-b", "b@two")
TTL = timedelta(minutes=5)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    uri, options = str(tmp_path / "t.lance"), None
    if request.param == "s3":
        bucket, options = request.getfixturevalue("bucket")
        uri = f"{bucket}/t.lance"
    return open_store(resolve(uri, options))


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(resolve(str(tmp_path / "t.lance")))


def taken(store: Store, holder: Holder = A, ttl: timedelta = TTL) -> Lease:
    lease, _ = acquire(store, "merge", holder, ttl)
    assert lease is not None
    return lease


def age(store: Store, seconds: float) -> None:
    """Everything that was written was written that much earlier."""
    at = time.time() - seconds
    for path in Path(store.root, LEASES_FOLDER, "merge").iterdir():
        os.utime(path, (at, at))


def test_one_holder_at_a_time(store: Store) -> None:
    first = taken(store)
    assert (first.token, first.number, first.ended) == (1, 1, None)
    none, standing = acquire(store, "merge", B)
    assert none is None
    assert standing == first
    check(store, first)
    other, _ = acquire(store, "gc", B)
    assert other is not None, "another job is another lease"
    renewed = renew(store, first)
    assert (renewed.token, renewed.number, renewed.acquired) == (1, 2, first.acquired)
    check(store, first)
    check(store, renewed)
    release(store, renewed, "succeeded")
    with pytest.raises(LeaseLostError, match="released"):
        check(store, renewed)
    second, before = acquire(store, "merge", B)
    assert second is not None
    assert before is not None
    assert (before.ended, before.holder) == ("released", A)
    assert before.last is not None
    assert (before.last.outcome, before.last.finished, before.last.instance) == (
        "succeeded",
        before.written,
        "instance-a",
    )
    assert second.last == before.last
    assert renew(store, second).last == before.last, "every number carries it on"
    assert second.token > first.token
    assert [one.job for one in list_leases(store)] == ["gc", "merge"]


def test_many_at_once_and_one_has_it(store: Store) -> None:
    holders = [Holder(f"instance-{number}", str(number)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = [lease for lease, _ in pool.map(lambda holder: acquire(store, "merge", holder), holders)]
    won = [lease for lease in found if lease is not None]
    assert len(won) == 1
    check(store, won[0])


def test_a_killed_holder_is_taken_over_within_one_ttl(local: Store) -> None:
    first = taken(local)
    age(local, TTL.total_seconds() - 120)
    assert acquire(local, "merge", B)[0] is None
    age(local, TTL.total_seconds() + 1)
    second = taken(local, B)
    assert second.token > first.token
    with pytest.raises(LeaseLostError, match="b@two"):
        renew(local, first)
    with pytest.raises(LeaseLostError):
        check(local, first)
    release(local, first, "succeeded")
    check(local, second)


def test_its_own_after_a_restart_at_once(store: Store) -> None:
    first = taken(store)
    again = taken(store)
    assert again.token > first.token
    with pytest.raises(LeaseLostError):
        check(store, first)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_an_hour_off(local: Store, hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder's clock and the taker's: neither ends a lease, nor makes one last."""

    class Off(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(UTC) + timedelta(hours=hours)

    for module in (leases, clock):
        monkeypatch.setattr(module, "datetime", Off)
    first = taken(local)
    assert abs(first.acquired - datetime.now(UTC)) < timedelta(minutes=1)
    assert acquire(local, "merge", B)[0] is None
    age(local, TTL.total_seconds() + 1)
    assert taken(local, B).token > first.token


def test_broken(store: Store) -> None:
    first = taken(store)
    broken = break_lease(store, "merge", "somebody")
    assert broken.ended == "broken by somebody"
    assert broken.token > first.token
    with pytest.raises(LeaseLostError, match="broken by somebody"):
        renew(store, first)
    with pytest.raises(LeaseLostError, match="broken by somebody"):
        check(store, first)
    with pytest.raises(InvalidUsageError, match="is not held"):
        break_lease(store, "merge", "somebody")
    assert taken(store, B).token > broken.token


def test_old_numbers_are_deleted_and_the_newest_never(local: Store) -> None:
    lease = taken(local)
    numbers = []
    for _ in range(100):
        lease = renew(local, lease)
        numbers.append(lease.number)
    assert numbers == list(range(2, 102))
    standing = sorted(os.listdir(Path(local.root, LEASES_FOLDER, "merge")))
    assert len(standing) < 40
    assert standing[-1] == f"{lease.number:020d}.json"
    assert lease.token == 1
    check(local, lease)


def test_who_writes_into_a_pruned_number_has_nothing(local: Store) -> None:
    """A holder stalls; its next number is written by others, and pruned: the name is free again."""
    stalled = taken(local)
    age(local, TTL.total_seconds() + 1)
    lease = taken(local, B)
    for _ in range(40):
        lease = renew(local, lease)
    assert local.head(f"{LEASES_FOLDER}/merge/{stalled.number + 1:020d}.json") is None
    with pytest.raises(LeaseLostError):
        renew(local, stalled)
    check(local, lease)
    assert renew(local, lease).token == lease.token


def test_an_invalid_lease_is_reported(local: Store) -> None:
    path = f"{LEASES_FOLDER}/merge/{7:020d}.json"
    for content in (b"", b"[]", b"{}", json.dumps({"token": 99}).encode(), b"\xff"):
        local.put(path, content)
        with pytest.raises(StorageError, match="not a readable lease"):
            read_lease(local, "merge")
    with pytest.raises(InvalidUsageError):
        read_lease(local, "../merge")


def test_the_collector_keeps_them(tmp_path: Path) -> None:
    Workload(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    table = open_table(tmp_path / "t.lance")
    lease = taken(table.store)
    at = time.time() - 10**7
    for path in Path(table.location.uri, LEASES_FOLDER).rglob("*.json"):
        os.utime(path, (at, at))
    report = gc.apply(table, gc.GcOptions(timedelta(0), timedelta(0), 2, allow_unsafe=True))
    assert all(LEASES_FOLDER not in item.path for items in report.items.values() for item in items)
    standing = read_lease(table.store, "merge")
    assert standing is not None
    assert standing.token == lease.token
