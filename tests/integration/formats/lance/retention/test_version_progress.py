"""The merge progress of one version is read from a few ranges of its manifest, and is what the whole has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memwal_ops import open_table
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.retention.live_versions import VersionProgress, read_version_progress
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb
from memwal_ops.formats.lance.wire.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.formats.lance.wire.version_manifest import (
    VersionManifest,
    decode_version_manifest,
    encode_version_manifest,
    index_section_by_ends,
    index_section_length,
)
from memwal_ops.storage.api import ObjectMeta
from tests.support.counting_store import CountingStore
from tests.support.tables.gc_tables import free, make, table_of
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

VERSION = 1000
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def manifests(draw: st.DrawFn) -> VersionManifest:
    """Version files of every shape that Lance writes: with and without indexes, with and without a transaction."""
    manifest = pb.Manifest(version=draw(st.integers(1, 2**40)))
    for at in range(draw(st.integers(0, 4))):
        manifest.fragments.add(id=at, physical_rows=5)
    indexes = None
    if draw(st.booleans()):
        indexes = pb.IndexSection()
        for _ in range(draw(st.integers(0, 3))):
            entry = indexes.indices.add(
                name=draw(st.sampled_from(["", "id_idx", "__lance_mem_wal"])), dataset_version=draw(st.integers(0, 9))
            )
            entry.uuid.uuid = draw(st.binary(min_size=16, max_size=16))
    transaction = None
    if draw(st.booleans()):
        transaction = pb.Transaction(read_version=draw(st.integers(0, 3)), uuid=draw(st.sampled_from(["", "u" * 36])))
        transaction.transaction_properties.update(
            draw(st.dictionaries(st.sampled_from("ab"), st.sampled_from(["", "c"])))
        )
    return VersionManifest(manifest, indexes, transaction, 0, 2)


@UNHURRIED
@given(manifests(), st.data())
def test_the_ends_of_a_file_decode_like_the_whole(version: VersionManifest, data: st.DataObject) -> None:
    encoded = encode_version_manifest(version)
    whole = decode_version_manifest(encoded)
    cut = data.draw(st.integers(0, len(encoded)))
    for head in (encoded, encoded[:cut], encoded[: index_section_length(encoded)]):
        told, section = index_section_by_ends(head, encoded[-16:])
        if told:
            assert section == whole.indexes
        elif head is encoded:
            assert whole.indexes is None or not whole.indexes.indices, "what there is must be found"
    assert index_section_by_ends(encoded, encoded[-15:]) == (False, None)
    assert index_section_by_ends(encoded, encoded[-16:-4] + b"NACL") == (False, None)


def store_file(tmp_path: Path, data: bytes) -> tuple[CountingStore, ObjectMeta]:
    Workload(1, regions=1, base_rows=3).create(str(tmp_path / "t.lance"))
    table = open_table(tmp_path / "t.lance")
    path = version_path(VERSION, table.naming)
    table.store.put(path, data)
    meta = table.store.head(path)
    assert meta is not None
    return CountingStore(table.store), meta


def large(made: LsmTable, *, fragments: int, regions: int, transaction: bool = True) -> bytes:
    """The table's newest manifest with so many fragments, and with progress in so many regions."""
    version = decode_version_manifest(
        Path(made.uri, version_path(table_of(made).version, table_of(made).naming)).read_bytes()
    )
    version.manifest.version = VERSION
    for at in range(fragments):
        version.manifest.fragments.add().CopyFrom(version.manifest.fragments[0])
        version.manifest.fragments[-1].id = 1000 + at
    assert version.indexes is not None
    entry = find_memwal_entry(version.indexes)
    assert entry is not None
    details = type(table_of(made).index.details)()
    details.ParseFromString(entry.index_details.value)
    for at in range(regions):
        one = details.merged_generations.add(generation=at + 1)
        one.region_id.uuid = UUID(int=at + 1).bytes
    entry.index_details.value = details.SerializeToString()
    if not transaction:
        version = replace(version, transaction=None)
        for field in ("transaction_section", "transaction_section_old"):
            version.manifest.ClearField(field)
    return encode_version_manifest(version)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transaction", [True, False])
@pytest.mark.parametrize(("fragments", "regions"), [(0, 0), (2000, 0), (2000, 3), (10, 3000), (2000, 3000)])
def test_large_manifests_are_read_in_part_and_right(
    tmp_path: Path, fragments: int, regions: int, transaction: bool
) -> None:
    made = make(tmp_path / "made", generations=1, regions=1)
    free(made)
    data = large(made, fragments=fragments, regions=regions, transaction=transaction)
    store, meta = store_file(tmp_path, data)
    whole = decode_version_manifest(data).indexes
    assert whole is not None
    entry = find_memwal_entry(whole)
    assert entry is not None
    expected = decode_memwal_index(entry)
    found = read_version_progress(store, meta)
    assert found == VersionProgress(expected.merged_generations, expected.uuid)
    assert len(found.merged_generations) == regions + 1
    if len(data) <= 64 << 10:
        assert store.calls == {"get": 1}
    else:
        assert store.calls["get"] == 0
        assert store.calls["get_range"] <= 3
        assert store.bytes_read <= len(data)


@pytest.mark.parametrize("others", [False, True])
def test_a_large_manifest_without_mem_wal_needs_nothing(tmp_path: Path, others: bool) -> None:
    made = make(tmp_path / "made", generations=1, regions=1)
    version = decode_version_manifest(large(made, fragments=2000, regions=0))
    assert version.indexes is not None
    for entry in version.indexes.indices:
        entry.name = "id_idx"
    store, meta = store_file(tmp_path, encode_version_manifest(version if others else replace(version, indexes=None)))
    assert meta.size > 64 << 10
    assert read_version_progress(store, meta) == VersionProgress({}, None)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("metadata", [0, 7_000, 8_000, *range(8_040, 8_100, 5), 8_200, 50_000])
@pytest.mark.parametrize("path", ["/t.lance/_mem_wal/r/wal", "/t.lance/_mem_wal", "/t.lance/_mem_wal_ops", "/other"])
def test_base_paths_of_a_large_manifest(tmp_path: Path, path: str, metadata: int) -> None:
    """The table's metadata follows them, and may be all that the end of the file has."""
    made = make(tmp_path / "made", generations=1, regions=1)
    version = decode_version_manifest(large(made, fragments=2000, regions=0))
    version.manifest.base_paths.add(id=1, path=path)
    version.manifest.base_paths.add(id=2, path="/another")
    version.manifest.table_metadata["notes"] = "n" * metadata
    store, meta = store_file(tmp_path, encode_version_manifest(version))
    assert meta.size > 64 << 10
    assert read_version_progress(store, meta).points_into_mem_wal == ("_mem_wal" in path.split("/"))
    if metadata < 8_000:
        assert store.calls["get"] == 0


def test_a_manifest_that_is_cut_short(tmp_path: Path) -> None:
    made = make(tmp_path / "made", generations=1, regions=1)
    data = large(made, fragments=2000, regions=3)
    for size in (0, 3, 15, 100, 70_000, len(data) - 1):
        store, meta = store_file(tmp_path / str(size), data[:size])
        with pytest.raises((InvalidFormatError, TableCorruptError)):
            read_version_progress(store, meta)


def test_versions_before_mem_wal_are_no_evidence(tmp_path: Path) -> None:
    made = make(tmp_path, generations=1)
    table = table_of(made)
    path = version_path(1, table.naming)
    meta = table.store.head(path)
    assert meta is not None
    assert read_version_progress(table.store, meta).index_uuid is None
    table.store.delete_many([path])
    with pytest.raises(ObjectNotFoundError):
        read_version_progress(table.store, meta)
