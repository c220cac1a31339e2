"""The fingerprint of a table changes by everything that a backlog figure depends on, and costs few requests."""

from __future__ import annotations

import random
import shutil
import uuid
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops.core.registry import open_table
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
from memwal_ops.formats.lance.retention import recent_history as module
from memwal_ops.formats.lance.retention.recent_history import fingerprint, is_unchanged
from memwal_ops.formats.lance.table import Table
from memwal_ops.formats.lance.wire.names import (
    NamingScheme,
    bit_reversed,
    region_folder,
    region_manifest_name,
    version_manifest_name,
)
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.counting_store import CountingStore
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.storage.api import Store

ROWS = pa.table({"id": [1, 2], "x": [1.0, 2.0]})


def taken(uri: str) -> tuple[Store, str]:
    table = open_table(uri)
    assert isinstance(table, Table)
    found = fingerprint(table)
    assert found is not None
    assert is_unchanged(table.store, found)
    return table.store, found


def flush(made: Workload) -> None:
    made.put([2])
    made.flush()


def restore(made: Workload) -> None:
    lance.dataset(made.uri).restore()


def remove_region(made: Workload) -> None:
    shutil.rmtree(next((Path(made.uri) / "_mem_wal").iterdir()))


def append(made: Workload) -> None:
    lance.write_dataset(lance.dataset(made.uri).to_table().slice(0, 0), made.uri, mode="append")


def remove_all(made: Workload) -> None:
    shutil.rmtree(made.uri)


def copied_again(made: Workload) -> None:
    """The same names and sizes at the same place, as by a restored backup."""
    shutil.copytree(made.uri, made.uri + ".copy", copy_function=shutil.copyfile)
    shutil.rmtree(made.uri)
    shutil.copytree(made.uri + ".copy", made.uri, copy_function=shutil.copyfile)


@pytest.mark.parametrize("write", [flush, restore, remove_region, append, remove_all, copied_again])
def test_a_write_changes_it(tmp_path: Path, write: Callable[[Workload], None]) -> None:
    made = Workload(1, regions=2, base_rows=5).create(str(tmp_path / "t.lance"))
    made.put([1])
    made.flush()
    store, before = taken(made.uri)
    write(made)
    assert not is_unchanged(store, before)
    if write is not remove_all:
        assert taken(made.uri)[1] != before
    made.close()


def test_of_a_plain_table(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(ROWS, uri)
    store, before = taken(uri)
    counting = CountingStore(store)
    assert is_unchanged(counting, before)
    assert counting.calls == {"list": 1}
    lance.write_dataset(ROWS, uri, mode="append")
    store, second = taken(uri)
    assert not is_unchanged(store, before)
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    assert not is_unchanged(store, second)


def test_a_table_that_moved_on_since_it_was_opened_has_none(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(ROWS, uri)
    table = open_table(uri)
    assert isinstance(table, Table)
    lance.write_dataset(ROWS, uri, mode="append")
    assert fingerprint(table) is None, "its figures would be those of a version that is not the newest"


class Log:
    """The names of a table's log in a store that lists in order, as S3 does, or in another one."""

    def __init__(self, seed: int, folder: Path | None = None) -> None:
        self.random = random.Random(seed)
        self.inner = open_store(resolve(f"memory://{uuid.uuid4().hex}" if folder is None else str(folder)))
        self.store = CountingStore(self.inner)
        self.put(f"_versions/{version_manifest_name(1, NamingScheme.V2)}")
        self.regions = [self.add_region() for _ in range(self.random.randrange(1, 6))]

    def put(self, path: str) -> None:
        assert self.inner.put_if_absent(path, b"x")

    def add_region(self) -> uuid.UUID:
        region_id = uuid.UUID(int=self.random.getrandbits(128), version=4)
        for version in range(1, self.random.randrange(2, 7)):
            self.put(RegionManifestStore(self.inner, region_id).path(version))
        for number in range(self.random.randrange(12)):
            self.put(f"{region_folder(region_id)}/{number:08x}_gen_{number + 1}/data/1.lance")
        for entry in range(self.random.randrange(1, 12)):
            self.put(f"{region_folder(region_id)}/wal/{bit_reversed(entry)}.arrow")
        return region_id

    def known(self) -> str:
        """The fingerprint now, by the names alone."""
        return module._digest("log", self.store, module._newest_versions(self.store))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("page", [1, 2, 3, 5, 8, 1000])
def test_a_manifest_of_any_region_changes_it_however_many_pages_the_log_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int, ordered: bool
) -> None:
    monkeypatch.setattr(module.version_files, "PAGE", page)
    for seed in range(20):
        log = Log(seed, None if ordered else tmp_path / str(seed))
        for region_id in [*log.regions]:
            before = log.known()
            assert is_unchanged(log.store, before)
            log.put(f"{region_folder(region_id)}/manifest/{region_manifest_name(99)}")
            assert not is_unchanged(log.store, before), f"seed {seed}"
        before = log.known()
        log.add_region()
        assert not is_unchanged(log.store, before), f"a new region, seed {seed}"


@pytest.mark.parametrize("inside", ["0a_gen_1/x", "manifest", "manifest-1/x", "manifest.bak/x", "manifest/x", "wal/x"])
def test_a_listing_never_goes_back(inside: str) -> None:
    """A thousand files in a copy of the manifests were listed again and again, until the memory was full."""
    folder = region_folder(uuid.uuid4())
    last = f"{folder}/{inside}"
    assert last <= module._next_start(last)
    if inside < "manifest/":
        assert module._next_start(last) < f"{folder}/manifest/"


def test_a_region_with_a_long_log_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.version_files, "PAGE", 20)
    log = Log(1)
    for region_id in log.regions:
        for entry in range(100, 200):
            log.put(f"{region_folder(region_id)}/wal/{bit_reversed(entry)}.arrow")
    before = log.known()
    log.store.reset()
    assert is_unchanged(log.store, before)
    assert sum(log.store.calls.values()) <= 1 + len(log.regions) + 1, "the last page is full, too"


def test_regions_of_few_objects_share_a_page() -> None:
    log = Log(2)
    before = log.known()
    log.store.reset()
    assert is_unchanged(log.store, before)
    assert log.store.calls == {"list": 2}


@pytest.mark.parametrize("scheme", NamingScheme)
def test_of_many_versions_the_newest_is_always_seen(monkeypatch: pytest.MonkeyPatch, scheme: NamingScheme) -> None:
    monkeypatch.setattr(module.version_files, "PAGE", 7)
    log = Log(3)
    store = open_store(resolve(f"memory://{uuid.uuid4().hex}"))
    for version in range(1, 40):
        store.put(f"_versions/{version_manifest_name(version, scheme)}", b"x")
        before = module._digest("plain", store, module._newest_versions(store))
        store.put(f"_versions/{version_manifest_name(version + 1, scheme)}", b"x")
        assert not is_unchanged(store, before), version
    assert is_unchanged(log.store, log.known())
