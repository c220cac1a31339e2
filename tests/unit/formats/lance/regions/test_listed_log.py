"""The log of a small table is read from one listing, and from the store itself where that may be out of date."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from memwal_ops.formats.lance.generations.backlog import with_listed_log
from memwal_ops.formats.lance.regions.manifests import HINT, ListedLog, RegionManifestStore, list_regions, unlisted
from memwal_ops.formats.lance.wire.names import region_folder, region_manifest_name
from memwal_ops.formats.lance.wire.region_manifest import (
    RegionManifest,
    RegionStatus,
    encode_region_manifest,
    encode_version_hint,
)
from memwal_ops.storage.local import LocalObjectStore
from tests.support.counting_store import CountingStore
from tests.support.stores import LikeRemote

if TYPE_CHECKING:
    from pathlib import Path

REGION = UUID(int=7, version=4)
FOLDER = region_folder(REGION)


@dataclass(frozen=True)
class Fake:
    """A table of which only the store and the location are looked at."""

    store: Any
    location: Any


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    """A region with manifests 1 and 2, a generation and a log entry."""
    made = CountingStore(LikeRemote(LocalObjectStore(str(tmp_path))))
    for version in (1, 2):
        made.put(path_of(version), manifest(version))
    made.put(f"{FOLDER}/manifest/{HINT}", encode_version_hint(2))
    made.put(f"{FOLDER}/0a1b2c3d_gen_1/_versions/1.manifest", b"a version")
    made.put(f"{FOLDER}/0a1b2c3d_gen_1/data/x.lance", b"rows")
    made.put(f"{FOLDER}/wal/1.arrow", b"entry")
    made.reset()
    return made


def manifest(version: int) -> bytes:
    made = RegionManifest(REGION, version, 0, 1, None, None, 1, (), RegionStatus.ACTIVE)
    return encode_region_manifest(made)


def path_of(version: int) -> str:
    return f"{FOLDER}/manifest/{region_manifest_name(version)}"


def listed(store: Any, before: ListedLog | None = None) -> ListedLog:
    return ListedLog(store, store.list("_mem_wal"), before)


def test_what_the_first_listings_show(store: CountingStore) -> None:
    """As the store would, and without a request."""
    log = listed(store)
    store.reset()
    for look in (
        list_regions,
        lambda one: one.list_level(FOLDER),
        lambda one: sorted(meta.path for meta in one.list(f"{FOLDER}/manifest")),
        lambda one: sorted(meta.path for meta in one.list(f"{FOLDER}/0a1b2c3d_gen_1")),
        lambda one: sorted(meta.path for meta in one.list(f"{FOLDER}/0a1b2c3d_gen_1/_versions")),
    ):
        before = store.calls.total()
        found = look(log)
        assert store.calls.total() == before
        assert found == look(store)


def test_the_second_listing_comes_from_the_store(store: CountingStore) -> None:
    """A caller that lists again found a contradiction: all of that region is listed again."""
    log = listed(store)
    region = RegionManifestStore(log, REGION)
    assert region.latest(checked=True).version == 2
    store.put(path_of(3), manifest(3))
    store.put(f"{FOLDER}/manifest/{HINT}", encode_version_hint(3))
    assert region.latest(checked=True).version == 3
    store.put(f"{FOLDER}/4e5f6071_gen_2/data/x.lance", b"rows")
    assert f"{FOLDER}/4e5f6071_gen_2" in log.list_level(FOLDER).directories


def test_a_newer_manifest_that_the_hint_names(store: CountingStore) -> None:
    """It was published after the page was listed."""
    log = listed(store)
    store.put(path_of(3), manifest(3))
    store.put(f"{FOLDER}/manifest/{HINT}", encode_version_hint(3))
    assert RegionManifestStore(log, REGION).latest(checked=True).version == 3


def test_a_folder_that_the_page_lacks_is_listed(store: CountingStore) -> None:
    log = listed(store)
    store.put(f"{FOLDER}/4e5f6071_gen_2/data/x.lance", b"rows")
    assert [meta.path for meta in log.list(f"{FOLDER}/4e5f6071_gen_2")] == [f"{FOLDER}/4e5f6071_gen_2/data/x.lance"]
    assert log.list_level("_versions").objects == ()


def test_a_manifest_is_read_again_only_if_it_is_another_file(store: CountingStore) -> None:
    log = listed(store)
    region = RegionManifestStore(log, REGION)
    assert region.latest(checked=True) == region.read(2)
    again = listed(store, log)
    store.reset()
    assert RegionManifestStore(again, REGION).read(2).version == 2
    assert store.calls["get"] == 0
    store.put(path_of(2), manifest(2))
    third = listed(store, again)
    store.reset()
    RegionManifestStore(third, REGION).read(2)
    assert store.calls["get"] == 1


@pytest.mark.parametrize("data", [b'{"version":2}', encode_version_hint(2)])
@pytest.mark.parametrize("same", [True, False])
def test_a_hint_is_known_by_its_tag(store: CountingStore, data: bytes, same: bool) -> None:
    """Where an entity tag is the MD5 sum, the listing shows that the hint names the newest manifest."""
    page = []
    for meta in store.list("_mem_wal"):
        content = data if meta.path.endswith(HINT) and same else b"other"
        page.append(
            SimpleNamespace(path=meta.path, size=1, e_tag=hashlib.md5(content, usedforsecurity=False).hexdigest())
        )
    log = ListedLog(store, page)  # type: ignore[arg-type]
    store.reset()
    assert RegionManifestStore(log, REGION).hint() == 2
    assert store.calls["get"] == (0 if same else 1)


@pytest.mark.parametrize(
    ("scheme", "more", "wrapped"), [("s3", 0, True), ("file", 0, False), ("s3", 1_000, False)], ids=str
)
def test_which_tables_are_listed_at_once(store: CountingStore, scheme: str, more: int, wrapped: bool) -> None:
    """Not those on local files, where links and empty folders are listed as they are; nor those with a large log."""
    asked = Counter[str]()

    def list_(prefix: str) -> Any:
        asked[prefix] += 1
        yield from store.list(prefix)
        yield from [SimpleNamespace(path=f"_mem_wal/{REGION}/wal/{at}", e_tag=None) for at in range(more)]

    table: Any = Fake(SimpleNamespace(list=list_), SimpleNamespace(scheme=scheme))
    found = with_listed_log(table)
    assert isinstance(found.store, ListedLog) == wrapped
    assert unlisted(found.store) is table.store
    again = with_listed_log(found)
    assert unlisted(again.store) is table.store
    assert asked["_mem_wal"] == (0 if scheme == "file" else 2)
