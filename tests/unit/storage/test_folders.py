"""Many folders from one listing: hardly more requests than a listing of each, and never an object too few."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from memwal_ops.storage import local as module
from memwal_ops.storage.api import ObjectMeta
from memwal_ops.storage.local import FolderListings

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITTEN = datetime(2026, 11, 23, tzinfo=UTC)
PAGE = 4


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", PAGE)


class Listed:
    """A store of objects of one byte; it counts the pages that are requested of it."""

    def __init__(self, paths: set[str], *, shuffled: bool = False, root: str = "s3://b") -> None:
        self.paths, self.root, self.shuffled = paths, root, shuffled
        self.pages = 0

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        found = sorted(path for path in self.paths if path.startswith(f"{prefix}/") and path > (after or ""))
        if self.shuffled:
            found = found[1::2] + found[::2]
        for start in range(0, max(len(found), 1), PAGE):
            self.pages += 1
            yield from (ObjectMeta(path, 1, WRITTEN, None) for path in found[start : start + PAGE])


def listings_of(store: Listed) -> FolderListings:
    return FolderListings(store, "r")  # type: ignore[arg-type] - nothing but its listings is used


def own(store: Any, folder: str) -> dict[str, int]:
    return {path: 1 for path in store.paths if path.startswith(f"{folder}/")}


def make(sizes: dict[str, int]) -> set[str]:
    return {f"r/{name}/{number}" for name, size in sizes.items() for number in range(size)}


def test_folders_share_pages() -> None:
    store = Listed(make({f"{number:02}": 2 for number in range(20)}))
    listings = listings_of(store)
    for number in range(20):
        assert listings.objects(f"r/{number:02}", 2) == own(store, f"r/{number:02}")
    assert store.pages == 20 * 2 // PAGE


def test_what_lies_between_is_skipped() -> None:
    store = Listed(make({"a": 2, "b": 100, "c": 2, "d": 100, "e": 2}))
    listings = listings_of(store)
    for name in "ace":
        assert listings.objects(f"r/{name}", 2) == own(store, f"r/{name}")
    assert store.pages == 3


@pytest.mark.parametrize("root", ["s3://b", "/b"])
def test_a_store_that_does_not_list_in_order(root: str) -> None:
    store = Listed(make({f"{number:02}": 3 for number in range(9)}), shuffled=True, root=root)
    listings = listings_of(store)
    for number in range(9):
        assert listings.objects(f"r/{number:02}", 3) == own(store, f"r/{number:02}")
    assert store.pages <= 9 + 4, "a few, until it is seen"


def test_a_folder_of_which_a_part_is_gone_is_listed_by_itself() -> None:
    store = Listed(make({"a": 3, "b": 3}) | {"r/a-b/0", "r/a.b"})
    listings = listings_of(store)
    assert listings.objects("r/a", 4) == own(store, "r/a")
    assert listings.objects("r/b", 3) == own(store, "r/b")
    assert listings.objects("r/a", 3) == own(store, "r/a"), "not in order"
    store.paths.clear()
    assert listings.objects("r/c", 1) == listings.objects("r/d", 0) == {}


NAMES = st.sampled_from(["a", "a-b", "a0", "aa", "b", "b!", "b0", "c", "manifest", "\u00e9", "\U0001f600"])


@given(sizes=st.dictionaries(NAMES, st.integers(1, 11)), wanted=st.sets(NAMES), shuffled=st.booleans())
def test_any_folders(sizes: dict[str, int], wanted: set[str], shuffled: bool) -> None:
    """The same objects as by a listing of each; on a store that lists in order in a request more for each at most."""
    store = Listed(make(sizes), shuffled=shuffled)
    listings = listings_of(store)
    alone, asked = Listed(store.paths), sorted(wanted & sizes.keys())
    for name in asked:
        assert listings.objects(f"r/{name}", sizes[name]) == own(store, f"r/{name}")
        list(alone.list(f"r/{name}"))
    if not shuffled:
        assert store.pages <= alone.pages + len(asked)
