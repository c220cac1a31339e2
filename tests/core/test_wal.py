"""The end of a region's log, by HEAD alone."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from memwal_ops.core.layout import Layout
from memwal_ops.core.wal import last_wal_entry, wal_entry_path
from memwal_ops.storage.counting import CountingStore
from memwal_ops.storage.locations import resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from pathlib import Path

REGION = UUID("00000000-0000-4000-8000-00000000000a")


@pytest.mark.req("S0-171")
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REGION])
@pytest.mark.parametrize("last", [*range(20), 63, 64, 65])
def test_the_last_entry_from_any_hint(tmp_path: Path, last: int, layout: Layout) -> None:
    store = open_store(resolve(tmp_path / "t.lance"))
    for number in range(1, last + 1):
        store.put(wal_entry_path(REGION, number, layout), b"x")
    for seen in {None, 0, 1, last // 2, last - 1, last} - {-1}:
        if seen is None or seen <= last:
            assert last_wal_entry(store, REGION, None, seen, layout) == last


def test_what_is_collected_is_not_looked_for(tmp_path: Path) -> None:
    store = open_store(resolve(tmp_path / "t.lance"))
    assert last_wal_entry(store, REGION, 7, None, Layout.SHARD) == 7
    store.put(wal_entry_path(REGION, 8, Layout.SHARD), b"x")
    assert last_wal_entry(store, REGION, 7, 3, Layout.SHARD) == 8


def test_requests_grow_with_the_logarithm(tmp_path: Path) -> None:
    inner = open_store(resolve(tmp_path / "t.lance"))
    for number in range(1, 1001):
        inner.put(wal_entry_path(REGION, number, Layout.SHARD), b"x")
    store = CountingStore(inner)
    assert last_wal_entry(store, REGION, 1000, 1000, Layout.SHARD) == 1000
    assert store.calls == {"head": 1}
    store.reset()
    assert last_wal_entry(store, REGION, None, None, Layout.SHARD) == 1000
    assert store.calls["head"] <= 20
