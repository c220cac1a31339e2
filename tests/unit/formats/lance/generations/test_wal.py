"""The end of a region's log, by HEAD alone."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from lance.blob import BlobDescriptorArrayBuilder
from lance.file import LanceFileWriter

from memwal_ops import open_table
from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.generations.wal import last_wal_entry, read_writer_epoch, wal_entry_path
from memwal_ops.formats.lance.layouts import REGION as REGION_LAYOUT, SHARD as SHARD_LAYOUT, Layout
from memwal_ops.formats.lance.wire.arrow_schema import schema_metadata
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.counting_store import CountingStore

if TYPE_CHECKING:
    from pathlib import Path

REGION = UUID("00000000-0000-4000-8000-00000000000a")


@pytest.mark.req("S0-171")
@pytest.mark.parametrize("layout", [SHARD_LAYOUT, REGION_LAYOUT])
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
    assert last_wal_entry(store, REGION, 7, None, SHARD_LAYOUT) == 7
    store.put(wal_entry_path(REGION, 8, SHARD_LAYOUT), b"x")
    assert last_wal_entry(store, REGION, 7, 3, SHARD_LAYOUT) == 8


def test_requests_grow_with_the_logarithm(tmp_path: Path) -> None:
    inner = open_store(resolve(tmp_path / "t.lance"))
    for number in range(1, 1001):
        inner.put(wal_entry_path(REGION, number, SHARD_LAYOUT), b"x")
    store = CountingStore(inner)
    assert last_wal_entry(store, REGION, 1000, 1000, SHARD_LAYOUT) == 1000
    assert store.calls == {"head": 1}
    store.reset()
    assert last_wal_entry(store, REGION, None, None, SHARD_LAYOUT) == 1000
    assert store.calls["head"] <= 20


@pytest.mark.parametrize("kind", ["shard", "region"])
def test_the_epoch_of_an_entry_whose_types_pyarrow_does_not_build(tmp_path: Path, kind: str) -> None:
    """A blob's storage in a WAL entry is none that pylance's own extension type takes."""
    layout = SHARD_LAYOUT if kind == "shard" else REGION_LAYOUT
    uri = str(tmp_path / "t.lance")
    field = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    schema = pa.schema([field, lance.blob_field("x")])
    rows = pa.table({"id": [1, 2], "x": lance.blob_array([b"a", None])}, schema=schema)
    lance.write_dataset(rows, uri, data_storage_version="2.2").initialize_mem_wal()
    with lance.dataset(uri).mem_wal_writer(str(REGION)) as writer:
        writer.put(rows)
    if layout is REGION_LAYOUT:
        for entry in (tmp_path / "t.lance/_mem_wal" / str(REGION) / "wal").iterdir():
            entry.unlink()
        blobs = BlobDescriptorArrayBuilder("x")
        blobs.append_inline(b"a")
        blobs.append_null()
        prepared = pa.schema([field, blobs.field], metadata={"writer_epoch": "1"})
        with LanceFileWriter(f"{uri}/{wal_entry_path(REGION, 1, layout)}", prepared, version="2.2") as file:
            file.write_batch(pa.record_batch([pa.array([1, 2], pa.int64()), blobs.finish()], schema=prepared))
    table = open_table(uri)
    assert table.layout is layout
    assert read_writer_epoch(table, REGION, 1) == 1


def test_an_entry_whose_schema_is_larger_than_one_request(tmp_path: Path) -> None:
    store = open_store(resolve(tmp_path / "t.lance"))
    for wide in (1, 3000):
        schema = pa.schema([pa.field(f"column {at}", pa.string()) for at in range(wide)], {"writer_epoch": "7"})
        sink = pa.BufferOutputStream()
        pa.ipc.new_stream(sink, schema).close()
        data = sink.getvalue().to_pybytes()
        assert schema_metadata(data, b"writer_epoch") == b"7"
        assert schema_metadata(data, b"writer") is None
        store.put(wal_entry_path(REGION, wide, SHARD_LAYOUT), data)
        for cut in (0, 3, 7, 20, len(data) // 2):
            with pytest.raises(InvalidFormatError):
                schema_metadata(data[:cut], b"writer_epoch")
