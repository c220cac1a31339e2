"""The region manifest store: the newest version by hint and walk, never a gap, one winner for the next."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from memwal_ops.errors import InvariantViolatedError, RegionManifestCorruptError, RegionManifestGapError
from memwal_ops.formats.lance.layouts import (
    REGION as REGION_LAYOUT,
    SHARD as SHARD_LAYOUT,
    MixedLayoutsError,
    layout_of_regions,
)
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore, list_regions
from memwal_ops.formats.lance.wire.names import region_manifest_name, wal_entry_name
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionStatus
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.counting_store import CountingStore

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.storage.api import Store

REGION = UUID("00000000-0000-4000-8000-00000000000a")
FOLDER = f"_mem_wal/{REGION}/manifest"
HINT = f"{FOLDER}/version_hint.json"


def manifest(version: int) -> RegionManifest:
    return RegionManifest(REGION, version, 0, version, None, None, 1, (), RegionStatus.ACTIVE)


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(resolve(tmp_path / "t.lance"))
    if request.param == "memory":
        return open_store(resolve(f"memory://{uuid.uuid4().hex}"))
    bucket = request.getfixturevalue("s3_bucket")
    return open_store(resolve(f"s3://{bucket}/t.lance", request.getfixturevalue("s3_options")))


@pytest.fixture
def five(store: Store) -> RegionManifestStore:
    """Versions 1 to 5."""
    manifests = RegionManifestStore(store, REGION)
    for version in range(1, 6):
        assert manifests.commit(manifest(version))
    return manifests


def path(version: int) -> str:
    return f"{FOLDER}/{region_manifest_name(version)}"


@pytest.mark.sampled(11)
@pytest.mark.req("S0-050", "S0-052", "S0-053")
@pytest.mark.parametrize("hint", [b'{"version":5}', b'{"version":2}', b'{"version":1}', b"junk", b"", None])
def test_the_newest_whatever_the_hint(five: RegionManifestStore, store: Store, hint: bytes | None) -> None:
    store.delete_many([HINT])
    if hint is not None:
        store.put(HINT, hint)
    assert five.latest() == five.latest(checked=True) == manifest(5)


def test_a_hint_ahead_of_the_truth(five: RegionManifestStore, store: Store) -> None:
    """The version that it names was lost: there was one, so acting on version 5 would be a guess."""
    store.put(HINT, b'{"version":7}')
    for checked in (False, True):
        with pytest.raises(RegionManifestGapError, match="version_hint"):
            five.latest(checked=checked)


@pytest.mark.parametrize("missing", [2, 3, 4])
def test_a_gap_is_refused(five: RegionManifestStore, store: Store, missing: int) -> None:
    store.delete_many([path(missing)])
    with pytest.raises(RegionManifestGapError, match=f"version {missing} is missing"):
        five.latest(checked=True)


def test_collected_oldest_versions_are_no_gap(five: RegionManifestStore, store: Store) -> None:
    store.delete_many([path(1), path(2)])
    assert five.latest(checked=True).version == 5
    assert five.versions() == (3, 4, 5)


@pytest.mark.parametrize("ask", ["latest", "checked", "latest_from"])
def test_a_newest_that_is_collected_while_it_is_asked_for(
    five: RegionManifestStore, store: Store, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stalls between the listing and the read finds newer ones, and no damage."""

    def stalled(version: int) -> RegionManifest:
        monkeypatch.undo()
        for newer in range(6, 9):
            assert five.commit(manifest(newer))
        store.delete_many([path(version) for version in range(1, 7)])
        return five.read(version)

    monkeypatch.setattr(five, "read", stalled)
    found = five.latest_from(4) if ask == "latest_from" else five.latest(checked=ask == "checked")
    assert found == manifest(8)


def test_a_newest_that_is_known_is_not_read_again(five: RegionManifestStore, store: Store) -> None:
    known = five.read(5)
    assert five.latest_from(5, known) is known
    assert five.commit(manifest(6))
    assert five.latest_from(5, known) == manifest(6)
    store.delete_many([path(5), path(6)])
    assert five.latest_from(5, known) is known, "it is for the caller to verify that it still exists"


@pytest.mark.req("S0-051")
def test_of_many_writers_one_has_the_next_version(five: RegionManifestStore) -> None:
    outcomes: list[bool] = []
    start = threading.Barrier(8)

    def commit(number: int) -> None:
        start.wait()
        outcomes.append(five.commit(replace(manifest(6), writer_epoch=100 + number)))

    threads = [threading.Thread(target=commit, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]
    assert five.latest(checked=True).version == 6


def test_never_over_a_gap_and_never_over_another(five: RegionManifestStore) -> None:
    with pytest.raises(InvariantViolatedError):
        five.commit(manifest(7))
    assert not five.commit(replace(manifest(5), writer_epoch=99))
    assert five.commit(manifest(5)), "the same bytes are our own, written twice"
    assert five.latest(checked=True) == manifest(5)


def test_a_region_without_a_manifest(store: Store) -> None:
    for checked in (False, True):
        with pytest.raises(RegionManifestCorruptError, match="no manifest"):
            RegionManifestStore(store, REGION).latest(checked=checked)


def test_requests_do_not_grow_with_the_versions(store: Store) -> None:
    manifests = RegionManifestStore(store, REGION)
    for version in range(1, 30):
        manifests.commit(manifest(version))
    counting = CountingStore(store)
    assert RegionManifestStore(counting, REGION).latest().version == 29
    assert counting.calls.total() <= 5, counting.calls


def test_listing_names_what_is_no_region(store: Store) -> None:
    assert list_regions(store).region_ids == ()
    RegionManifestStore(store, REGION).commit(manifest(1))
    store.put("_mem_wal/readme", b"x")
    store.put("_mem_wal/not-a-region/x", b"x")
    store.put(f"_mem_wal/{str(REGION).upper()}/x", b"x")
    listing = list_regions(store)
    assert listing.region_ids == (REGION,)
    assert set(listing.strays) >= {"_mem_wal/readme", "_mem_wal/not-a-region"}


def test_the_layout_is_detected_from_the_bytes(store: Store) -> None:
    assert layout_of_regions(store, []) is SHARD_LAYOUT
    generation = f"_mem_wal/{REGION}/0a1b2c3d_gen_1"
    store.put(f"{generation}/_transactions/0.txn", b"x")
    assert layout_of_regions(store, [REGION]) is SHARD_LAYOUT, "a generation that is being moved says nothing"
    store.put(f"{generation}/_versions/1.manifest", b"x")
    assert layout_of_regions(store, [REGION]) is REGION_LAYOUT
    store.put(f"{generation}/data/x.lance", b"x")
    assert layout_of_regions(store, [REGION]) is SHARD_LAYOUT
    store.put(f"_mem_wal/{REGION}/wal/{wal_entry_name(1, 'lance')}", b"x")
    assert layout_of_regions(store, [REGION]) is REGION_LAYOUT
    store.put(f"_mem_wal/{REGION}/wal/{wal_entry_name(2, 'arrow')}", b"x")
    with pytest.raises(MixedLayoutsError, match="two kinds of writers"):
        layout_of_regions(store, [REGION])
    other = UUID(int=REGION.int + 1)
    store.put(f"_mem_wal/{other}/wal/{wal_entry_name(1, 'lance')}", b"x")
    assert layout_of_regions(store, [REGION, other]) is REGION_LAYOUT, "jobs go on with the other regions"
