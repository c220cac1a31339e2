"""One contract for every store: what core relies on, whatever lies beneath."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from memwal_ops.errors import (
    ConditionalWriteUnsupportedError,
    InvalidUsageError,
    MemwalOpsError,
    ObjectNotFoundError,
)
from memwal_ops.storage.api import Listing
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_compare_and_swap, probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location
    from memwal_ops.storage.objects import ObjectStore


def satisfies_the_interface(store: Store) -> Store:
    return store


def test_what_was_written_is_read(store: ObjectStore) -> None:
    satisfies_the_interface(store).put("a/b/c.bin", b"0123456789")
    assert store.get("a/b/c.bin") == b"0123456789"
    meta = store.head("a/b/c.bin")
    assert meta is not None
    assert (meta.path, meta.size) == ("a/b/c.bin", 10)
    assert meta.last_modified.tzinfo is not None
    assert abs(meta.last_modified - datetime.now(UTC)) < timedelta(minutes=5)
    store.put("a/b/c.bin", b"")
    assert store.get("a/b/c.bin") == b""


def test_absent_objects(store: ObjectStore) -> None:
    assert store.head("no/such") is None
    for read in (store.get, lambda path: store.get_range(path, 0, 4), lambda path: store.get_range(path, 0, 0)):
        with pytest.raises(ObjectNotFoundError, match="no/such"):
            read("no/such")
    assert list(store.list("no")) == []
    assert store.list_level("no") == Listing((), ())


def test_a_folder_is_no_object(store: ObjectStore) -> None:
    store.put("folder/object", b"x")
    assert store.head("folder") is None
    assert store.head("folder/object/below") is None
    with pytest.raises(ObjectNotFoundError):
        store.get("folder")
    assert store.delete_many(["folder", "folder/object/below"]).deleted == 2
    assert store.get("folder/object") == b"x"


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(2, 4, b"2345"), (8, 40, b"89"), (10, 4, b""), (99, 1, b""), (3, 0, b""), (0, 10, b"0123456789")],
)
def test_ranges_give_what_is_there(store: ObjectStore, start: int, length: int, expected: bytes) -> None:
    store.put("object", b"0123456789")
    assert store.get_range("object", start, length) == expected


def test_range_of_an_empty_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.get_range("empty", 0, 16) == b""


@pytest.mark.req("S0-051", "S3-045")
def test_put_if_absent_wins_once(store: ObjectStore) -> None:
    assert store.put_if_absent("v/1", b"first") is True
    assert store.put_if_absent("v/1", b"second") is False
    assert store.put_if_absent("v/1", b"first") is False, "equal bytes are still a refusal"
    assert store.get("v/1") == b"first"


@pytest.mark.req("S0-051")
def test_of_many_writers_one_wins(store: ObjectStore) -> None:
    contents = [f"writer {number}".encode() for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda data: store.put_if_absent("v/1", data), contents))
    assert won.count(True) == 1
    assert store.get("v/1") == contents[won.index(True)]


@pytest.mark.req("S4-021")
def test_compare_and_swap(store: ObjectStore) -> None:
    store.put("object", b"old")
    meta = store.head("object")
    assert meta is not None
    assert meta.e_tag is not None
    if store.root.startswith("/"):
        with pytest.raises(ConditionalWriteUnsupportedError):
            store.compare_and_swap("object", b"new", meta.e_tag)
        assert store.get("object") == b"old"
        return
    assert store.compare_and_swap("object", b"new", meta.e_tag) is True
    assert store.compare_and_swap("object", b"late", meta.e_tag) is False
    assert store.get("object") == b"new"
    assert store.compare_and_swap("absent", b"x", meta.e_tag) is False
    assert store.head("absent") is None


def test_a_listing_sees_every_write_and_delete(store: ObjectStore) -> None:
    names = ["top", "a/1", "a/2", "a/b/3", "ab/4"]
    for name in names:
        store.put(name, name.encode())
    assert {meta.path: meta.size for meta in store.list()} == {name: len(name) for name in names}
    assert {meta.path for meta in store.list("a")} == {"a/1", "a/2", "a/b/3"}
    assert {meta.path for meta in store.list("a/")} == {"a/1", "a/2", "a/b/3"}
    assert list(store.list("top")) == []
    level = store.list_level("a")
    assert level.directories == ("a/b",)
    assert {meta.path for meta in level.objects} == {"a/1", "a/2"}
    assert store.list_level().directories == ("a", "ab")
    store.delete_many(["a/b/3"])
    assert store.list_level("a").directories == ()
    assert {meta.path for meta in store.list()} == set(names) - {"a/b/3"}


def test_deleting_what_is_absent(store: ObjectStore) -> None:
    store.put("there", b"x")
    report = store.delete_many(iter(["not/there", "there", "nor/there"]))
    assert (report.deleted, dict(report.failed)) == (3, {})
    assert store.head("there") is None
    assert store.delete_many([]).deleted == 0


@pytest.mark.long
def test_three_thousand_objects(store: ObjectStore, fill: Callable[[Iterable[str]], None]) -> None:
    # Azurite takes 15 ms for each; 600 are more than two of its batches.
    count = 600 if store.root.startswith("az://") else 3000
    names = {f"many/{number % 7}/{number:05d}" for number in range(count)}
    fill(names)
    listed = [meta.path for meta in store.list("many")]
    assert len(listed) == len(names)
    assert set(listed) == names
    report = store.delete_many(listed)
    assert (report.deleted, dict(report.failed)) == (count, {})
    assert list(store.list()) == []


ODD_NAMES = [
    "sp ace",
    " lead and trail ",
    "per%cent",
    "percent%20escape",
    "plus+plus",
    "q?uery=1&b",
    "ha#sh",
    "umlaut-ü",
    "decomposed-u\u0308",
    "emoji-😀",
    "semi;colon:comma,",
    "[brackets]{braces}",
    "<angle>&amp;",
    "quote'\"",
    "tilde~caret^pipe|.",
    "colon: pipe|dash",
    "back\\slash",
    "star*",
    "dots...",
    ".hidden",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_round_trip(store: ObjectStore, name: str) -> None:
    path = f"odd {name}/{name}"
    if "\\" in name and store.root.startswith("az://"):
        with pytest.raises(InvalidUsageError, match="backslash"):
            store.put_if_absent(path, name.encode())
        return
    assert store.put_if_absent(path, name.encode()) is True
    assert store.put_if_absent(path, b"other") is False
    assert store.get(path) == name.encode()
    assert [meta.path for meta in store.list()] == [path]
    assert store.list_level().directories == (f"odd {name}",)
    assert [meta.path for meta in store.list_level(f"odd {name}").objects] == [path]
    head = store.head(path)
    assert head is not None
    assert head.path == path
    assert store.delete_many([path]).deleted == 1
    assert list(store.list()) == []


@pytest.mark.sampled(21)
@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../up", "a/../../up", "a/./b", "a//b", "a/", "..", "a\0b", "a\nb"]
)
def test_paths_that_name_no_object(store: ObjectStore, path: str) -> None:
    for verb in (
        store.get,
        store.head,
        lambda name: store.put(name, b"x"),
        lambda name: store.put_if_absent(name, b"x"),
    ):
        with pytest.raises(InvalidUsageError):
            verb(path)
    report = store.delete_many([path, "absent"])
    assert report.deleted == 1
    assert list(report.failed) == [path]


@pytest.mark.req("S3-045")
def test_the_probe_leaves_nothing(store: ObjectStore) -> None:
    probe_conditional_writes(store)
    assert list(store.list()) == []
    if store.root.startswith("/"):
        with pytest.raises(ConditionalWriteUnsupportedError):
            probe_compare_and_swap(store)
    else:
        probe_compare_and_swap(store)
    assert list(store.list()) == []


def test_two_handles_see_one_store(location: Location) -> None:
    open_store(location).put("object", b"x")
    assert open_store(location).get("object") == b"x"
    assert open_store(location).root == location.uri


def test_a_listing_that_begins_after_a_path(store: ObjectStore) -> None:
    for name in ("a/1", "a/2", "a/d7", "b/1"):
        store.put(name, b"x")
    assert {meta.path for meta in store.list("a", after="a/1")} == {"a/2", "a/d7"}
    assert {meta.path for meta in store.list("a", after="a/d")} == {"a/d7"}
    assert list(store.list("a", after="a/e")) == []


LONG = "n" * 240


@pytest.mark.sampled(29)
@pytest.mark.parametrize(
    "path",
    [
        LONG,
        "/".join([LONG] * 3),  # S3 takes 1,024 bytes of a key, the root's prefix included
        "/".join("d" for _ in range(300)),
        "ü" * 120,
        "😀" * 60,
        "%2e%2e/%2F",
        "a+b/a b/a%20b",
        "#1/x",
        "\u200b\u202e",
        "\u00a0",
        "CON/aux.txt",
    ],
)
def test_names_near_the_limits_round_trip(store: ObjectStore, path: str) -> None:
    assert store.put_if_absent(path, b"1") is True
    assert store.put_if_absent(path, b"2") is False
    assert store.get_range(path, 0, 9) == b"1"
    assert [meta.path for meta in store.list()] == [path]
    assert [meta.path for meta in store.list("/".join(path.split("/")[:-1]))] == [path]
    assert (store.delete_many([path]).deleted, list(store.list())) == (1, [])


def test_names_that_differ_a_little_are_different_objects(store: ObjectStore) -> None:
    names = ["a b", "a+b", "a%20b", "a%2520b", "A b", "\u00fc", "u\u0308", "a", "a.", "a#", "a#x", "a?", "a\u00a0b"]
    for name in names:
        assert store.put_if_absent(f"d/{name}", name.encode()) is True
    assert {meta.path for meta in store.list("d")} == {f"d/{name}" for name in names}
    assert [store.get(f"d/{name}") for name in names] == [name.encode() for name in names]
    store.delete_many(["d/a+b", "d/a"])
    assert {meta.path for meta in store.list_level("d").objects} == {f"d/{name}" for name in names} - {"d/a+b", "d/a"}


def test_a_name_beyond_the_limits_is_an_error_and_nothing_is_written(store: ObjectStore) -> None:
    path = "x" * 1100
    if not store.root.startswith("/"):
        pytest.skip("memory has no limit, and the stand-in for S3 does not enforce the one that S3 has")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(MemwalOpsError):
            write(path, b"x")
    assert list(store.list()) == []


def test_folders_that_begin_alike_are_apart(store: ObjectStore) -> None:
    for path in ("a/x", "a b/x", "a-/x", "a.b/x", "aa/x", "a/y/z"):
        store.put(path, b"1")
    assert {meta.path for meta in store.list("a")} == {"a/x", "a/y/z"}
    assert store.list_level("a").directories == ("a/y",)
    assert set(store.list_level().directories) == {"a", "a b", "a-", "a.b", "aa"}


@pytest.mark.parametrize("size", [0, 1, 65_536, 6 << 20])
def test_sizes(store: ObjectStore, size: int) -> None:
    """Six MiB are above the size at which clients begin to write in parts, which no condition covers."""
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    assert store.put_if_absent("object", data) is True
    assert store.put_if_absent("object", b"other") is False
    assert store.get("object") == data
    meta = store.head("object")
    assert meta is not None
    assert (meta.size, [one.size for one in store.list()]) == (size, [size])
    for start, length in ((0, 0), (0, 1), (0, size), (size, 1), (max(0, size - 3), 100), (size + 1, 1), (2**40, 5)):
        assert store.get_range("object", start, length) == data[start : start + length]
    with pytest.raises(InvalidUsageError):
        store.get_range("object", -1, 4)
    with pytest.raises(InvalidUsageError):
        store.get_range("object", 0, -4)


def test_what_is_deleted_can_be_written_again(store: ObjectStore) -> None:
    for content in (b"1", b"2", b"3"):
        assert store.put_if_absent("v/1", content) is True
        assert store.put_if_absent("v/1", b"late") is False
        assert store.get("v/1") == content
        assert store.delete_many(["v/1", "v/1"]).failed == {}
        assert store.head("v/1") is None
        assert list(store.list("v")) == []


@pytest.mark.req("S4-021")
def test_of_many_swaps_one_wins(store: ObjectStore) -> None:
    if store.root.startswith("/"):
        pytest.skip("local files have no compare-and-swap")
    store.put("object", b"old")
    meta = store.head("object")
    assert meta is not None
    assert meta.e_tag is not None
    tag = meta.e_tag
    contents = [f"writer {number}".encode() for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda data: store.compare_and_swap("object", data, tag), contents))
    assert won.count(True) == 1
    assert store.get("object") == contents[won.index(True)]
    store.delete_many(["object"])
    assert store.compare_and_swap("object", b"back", tag) is False, "what was deleted is not brought back"
    assert store.head("object") is None


def test_all_views_agree(store: ObjectStore) -> None:
    """Times of a listing and of HEAD are the same, do not go back, and change when the object does."""
    store.put("d/object", b"1")
    first = store.head("d/object")
    (listed,) = store.list("d")
    (level,) = store.list_level("d").objects
    assert first is not None
    for other in (listed, level):
        assert (other.path, other.size, other.e_tag) == (first.path, first.size, first.e_tag)
        # S3 gives HEAD in whole seconds.
        assert abs(other.last_modified - first.last_modified) < timedelta(seconds=1)
        assert other.last_modified.utcoffset() == timedelta(0)
    time.sleep(1.1)
    store.put("d/object", b"22")
    second = store.head("d/object")
    assert second is not None
    assert second.last_modified > first.last_modified
    assert second.e_tag != first.e_tag


@pytest.mark.long
def test_pages_of_a_listing_after_a_path(store: ObjectStore, fill: Callable[[Iterable[str]], None]) -> None:
    names = [f"p/{number:04d} +%ü" for number in range(2100)]
    fill(names)
    assert {meta.path for meta in store.list("p", after=names[49])} == set(names[50:])
    assert {meta.path for meta in store.list("p", after="p/2099")} == {names[2099]}
    assert {meta.path for meta in store.list("p", after=names[-1])} == set()
    assert {meta.path for meta in store.list("p", after="o")} == set(names)
    level = store.list_level("p")
    assert ({meta.path for meta in level.objects}, level.directories) == (set(names), ())
    refused = ["p/../x", "", "/p"]
    report = store.delete_many([*names[:1500], *refused, *names[1500:], "p/absent"])
    assert (report.deleted, set(report.failed)) == (2101, set(refused))
    assert list(store.list()) == []
