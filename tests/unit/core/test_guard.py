"""Without its lease a run changes nothing but the files that it wrote itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest

from memwal_ops.core.anchors import GuardedStore, GuardedTable, LeaseGuard, Unguarded
from memwal_ops.errors import LeaseLostError, StorageError

WRITES: dict[str, Callable[[GuardedStore], Any]] = {
    "put": lambda store: store.put("a", b"x"),
    "put_if_absent": lambda store: store.put_if_absent("a", b"x"),
    "compare_and_swap": lambda store: store.compare_and_swap("a", b"x", "tag"),
    "delete_many": lambda store: store.delete_many(["a", "b"]),
}
READS: dict[str, tuple[Any, ...]] = {
    "get": ("a",),
    "get_with_tag": ("a",),
    "get_range": ("a", 3, 5),
    "head": ("a",),
    "list_level": ("a",),
}


def lost() -> None:
    raise LeaseLostError("another supervisor holds it")


@pytest.mark.parametrize("name", WRITES)
def test_without_a_lease_nothing_is_written(name: str) -> None:
    inner, heartbeat = Mock(), Mock()
    with pytest.raises(LeaseLostError):
        WRITES[name](GuardedStore(inner, LeaseGuard(lost, heartbeat)))
    assert inner.method_calls == []
    assert heartbeat.call_count == 1


@pytest.mark.parametrize("name", WRITES)
def test_with_a_lease_the_store_is_called(name: str) -> None:
    inner, check, heartbeat = Mock(), Mock(), Mock()
    answer = WRITES[name](GuardedStore(inner, LeaseGuard(check, heartbeat)))
    expected = Mock()
    WRITES[name](expected)
    assert inner.method_calls == expected.method_calls
    assert answer is (None if name == "put" else getattr(inner, name).return_value)
    assert (check.call_count, heartbeat.call_count) == (1, 1)


@pytest.mark.parametrize("name", READS)
def test_a_read_needs_no_lease(name: str) -> None:
    inner, heartbeat = Mock(), Mock()
    store = GuardedStore(inner, LeaseGuard(lost, heartbeat))
    assert getattr(store, name)(*READS[name]) is getattr(inner, name).return_value
    getattr(inner, name).assert_called_once_with(*READS[name])
    assert heartbeat.call_count == 1


def test_a_listing_is_a_sign_of_life_at_each_object() -> None:
    inner, heartbeat = Mock(), Mock()
    inner.list.return_value = iter("abc")
    store = GuardedStore(inner, LeaseGuard(lost, heartbeat))
    for at, meta in enumerate(store.list("folder", after="folder/a"), 1):
        assert (meta, heartbeat.call_count) == ("abc"[at - 1], at)
    inner.list.assert_called_once_with("folder", after="folder/a")
    inner.list.return_value = iter("")
    assert [*store.list()] == []
    store.list_level()
    inner.list_level.assert_called_once_with("")
    inner.list.assert_called_with("", after=None)


def test_what_a_run_wrote_itself_it_may_remove() -> None:
    inner, heartbeat = Mock(), Mock()
    guard = LeaseGuard(lost, heartbeat)
    store = GuardedStore(inner, guard)
    guard.register(iter(["a", "b"]))
    guard.register(["c"])
    assert store.delete_many(iter("abc")) is inner.delete_many.return_value
    inner.delete_many.assert_called_once_with(["a", "b", "c"])
    assert heartbeat.call_count == 1
    with pytest.raises(LeaseLostError):
        store.delete_many(["a", "other"])
    with pytest.raises(LeaseLostError):
        store.put("a", b"x")
    assert inner.delete_many.call_count == 1


def test_a_lost_lease_stays_lost() -> None:
    outcomes: list[Exception | None] = [None, StorageError("no answer"), LeaseLostError("lost"), None]
    check = Mock(side_effect=outcomes)
    guard = LeaseGuard(check)
    guard.check()
    with pytest.raises(StorageError, match="no answer"):
        guard.check()
    for _ in range(3):
        with pytest.raises(LeaseLostError) as raised:
            guard.check()
        assert raised.value is outcomes[2]
    assert check.call_count == 3


def test_a_run_without_leases_may_everything() -> None:
    inner = Mock()
    store = GuardedStore(inner, Unguarded())
    for write in WRITES.values():
        write(store)
    assert len(inner.method_calls) == len(WRITES)
    assert store.root is inner.root
    Unguarded().register(["a"])
    assert Unguarded().may_remove("b") is True


@dataclass(frozen=True)
class Table(GuardedTable):
    store: Any
    guard: Any


def test_a_table_discards_its_own_files_without_a_lease() -> None:
    inner, guard = Mock(), LeaseGuard(lost)
    before = Table(inner, Unguarded())
    table = before.with_guard(guard)
    assert (table.guard, before.store) == (guard, inner)
    assert table.discard(iter(["a", "b"])) is inner.delete_many.return_value
    inner.delete_many.assert_called_once_with(["a", "b"])
    with pytest.raises(LeaseLostError):
        table.store.delete_many(["c"])
    with pytest.raises(LeaseLostError):
        table.store.put("a", b"x")
