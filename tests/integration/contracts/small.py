"""The small tables on which the contracts are shown: id, val, txt; one region."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from lance.dataset import Index
from lance.mem_wal import CompactedSsTable, ShardWriter

from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.writers import closed_at_the_end

REGION = "5e0c1b0a-6a52-4b6e-9d3e-0f7d3a1b2c4d"
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("val", pa.float32()),
        pa.field("txt", pa.string()),
    ]
)


def rows(lo: int, hi: int, val: float = 0.0) -> pa.Table:
    """Keys lo to hi - 1, all with one value."""
    n = hi - lo
    columns = [
        pa.array(range(lo, hi), pa.int64()),
        pa.array(np.full(n, val), pa.float32()),
        pa.array([f"row {i}" for i in range(lo, hi)]),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def keys(*ids: int) -> pa.Table:
    """Key column alone, as deletes take it."""
    return pa.table({"id": pa.array(ids, pa.int64())}, schema=pa.schema([SCHEMA.field("id")]))


def make(folder: Path, base: pa.Table | None = None, *, btree: bool = True, stable_row_ids: bool = False) -> str:
    """A base table (keys 0 to 99 with value 0) with a MemWAL index; its URI."""
    uri = f"{folder}/{uuid.uuid4().hex[:6]}.lance"
    dataset = lance.write_dataset(rows(0, 100) if base is None else base, uri, enable_stable_row_ids=stable_row_ids)
    if btree:
        dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal(unsharded=True)
    return uri


def writer(uri: str, region: str = REGION, **options: object) -> ShardWriter:
    options = {"max_wal_flush_interval_ms": 1, **options}
    return closed_at_the_end(lance.dataset(uri).mem_wal_writer(region, **options))  # type: ignore[arg-type]


def flush(uri: str, *writes: pa.Table, region: str = REGION) -> str:
    """One generation: tables with only `id` are deletes, all others puts. Its path."""
    with writer(uri, region) as w:
        for table in writes:
            (w.delete if table.schema.names == ["id"] else w.put)(table)
    generations = wire.region_manifest(Files(uri), region).generations
    return f"{uri}/_mem_wal/{region}/{generations[max(generations)]}"


def upsert(
    dataset: lance.LanceDataset,
    source: pa.Table | pa.RecordBatchReader,
    generation: int | None = None,
    *,
    region: str = REGION,
    use_index: bool | None = None,
    retries: int | None = None,
) -> dict:
    """One merge_insert at the version of the given handle, with the marker if a generation is given."""
    builder = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    if generation is not None:
        builder.mark_sstables_as_compacted([CompactedSsTable(region, generation)])
    if use_index is not None:
        builder = builder.use_index(use_index)
    if retries is not None:
        builder = builder.conflict_retries(retries)
    return builder.execute(source)


def progress(uri: str) -> dict[str, int]:
    return wire.progress(Files(uri))


def values(uri: str, version: int | None = None) -> dict[int, list[float]]:
    """{key: its values}: a list, for a key may stand more than once."""
    out: dict[int, list[float]] = {}
    for row in lance.dataset(uri, version=version).to_table().to_pylist():
        out.setdefault(row["id"], []).append(row["val"])
    return out


def field_ids(uri: str) -> dict[str, int]:
    return {f.name(): f.id() for f in lance.dataset(uri).lance_schema.fields()}


def index_entry(uri: str) -> tuple[Index, bytes]:
    """The MemWAL index entry as CreateIndex's `removed_indices` wants it, and its details."""
    entry = wire.mem_wal_entry(wire.newest_manifest(Files(uri))[1])
    assert entry is not None
    details = wire.mem_wal_details(wire.newest_manifest(Files(uri))[1])
    return mem_wal_index(wire.uuid_of(entry, 1), int(wire.get(entry, 4)), details), details


def mem_wal_index(index_uuid: str, version: int, details: bytes) -> Index:
    return Index(
        uuid=index_uuid, name=wire.MEM_WAL_INDEX, fields=[], dataset_version=version,
        fragment_ids=set(), index_version=0, index_details=(wire.DETAILS_URL, details),
    )  # fmt: skip


def publish_detached(uri: str, detached: int, version: int, marks: Sequence[tuple[str, int]]) -> None:
    """The strict commit by hand: stamp version and progress into a detached manifest, publish it as
    exactly `version` by put-if-absent, remove the detached file."""
    files = Files(uri)
    path = f"_versions/d{detached}.manifest"
    manifest = wire.parse_manifest(files.get(path)).replaced(f3=version)
    kept = [f for f in wire.decode(wire.mem_wal_details(manifest)) if f.number != 9]
    added = [wire.Field(9, wire.encode([wire.uuid_field(1, region), (2, g)])) for region, g in marks]
    stamped = wire.with_details(manifest, wire.encode([*kept, *added]))
    files.put_new(f"_versions/{2**64 - 1 - version:020d}.manifest", wire.build_manifest(stamped))
    files.delete(path)
