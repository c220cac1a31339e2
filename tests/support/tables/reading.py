"""Three independent readers: the base alone, pylance's LSM scan, and the specification by hand.

All give {key tuple: row dict} in the base table's present columns, and refuse a key that stands twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import lance
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot, ShardWriter

from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.model import Row, Rows
from tests.support.tables.schemas import TOMBSTONE, primary_key

Options = Mapping[str, str] | None


def rows_by_key(table: pa.Table, keys: list[str]) -> Rows:
    """Rows of a table by their key; AssertionError where one key stands twice."""
    out: Rows = {}
    twice = []
    for row in table.to_pylist():
        key = tuple(row[name] for name in keys)
        if key in out:
            twice.append(key)
        out[key] = row
    assert not twice, f"{len(twice)} keys stand twice, e.g. {twice[:5]!r}"
    return out


def open_dataset(uri: str, storage_options: Options = None, version: int | None = None) -> lance.LanceDataset:
    return lance.dataset(uri, version=version, storage_options=dict(storage_options) if storage_options else None)


def read_base(uri: str, storage_options: Options = None, version: int | None = None) -> Rows:
    """The base table alone, what a reader without MemWAL sees."""
    dataset = open_dataset(uri, storage_options, version)
    return rows_by_key(dataset.to_table(), primary_key(dataset.schema))


def snapshots(
    uri: str, storage_options: Options = None, *, unmerged_only: bool = True, merged: Mapping[str, int] | None = None
) -> list[ShardSnapshot]:
    """One snapshot for each region, out of the region manifests themselves; ``merged``: the reader's own progress."""
    files = Files(uri, storage_options)
    merged = merged if merged is not None else wire.progress(files) if unmerged_only else {}
    out = []
    for region in wire.regions(files):
        manifest = wire.region_manifest(files, region)
        snapshot = ShardSnapshot(region).with_current_generation(manifest.current_generation)
        for generation, path in sorted(manifest.generations.items()):
            if generation > merged.get(region, 0):
                snapshot = snapshot.with_sstable(generation, path)
        out.append(snapshot)
    return out


def read_lsm(uri: str, storage_options: Options = None, *, writer: ShardWriter | None = None) -> Rows:
    """pylance's own LSM scan (shard layout only: it needs `_pk_index/`, landmine 8).

    With an open writer its active MemTable is included; those of other writers never are.
    """
    dataset = open_dataset(uri, storage_options)
    states = snapshots(uri, storage_options)
    if writer is None:
        scanner = LsmScanner.from_snapshots(dataset, states)
    else:
        scanner = writer.lsm_scanner([s for s in states if s.shard_id != writer.shard_id])
    columns = dataset.schema.names
    return rows_by_key(scanner.project(columns).to_table().select(columns), primary_key(dataset.schema))


class PinnedReader:
    """Keeps the version that it opened, and reads region manifests anew, as lancedb's default handle does."""

    def __init__(self, uri: str) -> None:
        self._uri, self._dataset, self._merged = uri, open_dataset(uri), wire.progress(Files(uri))

    def rows(self) -> Rows:
        scanner = LsmScanner.from_snapshots(self._dataset, snapshots(self._uri, merged=self._merged))
        columns = self._dataset.schema.names
        return rows_by_key(scanner.project(columns).to_table().select(columns), primary_key(self._dataset.schema))


def _generation_rows(uri: str, storage_options: Options, names: dict[int, str]) -> list[tuple[bool, Row]]:
    """(deleted, row) in row address order, renamed to the base's columns by field id."""
    generation = open_dataset(uri, storage_options)
    present = {f.name(): names.get(f.id()) for f in generation.lance_schema.fields() if f.name() != TOMBSTONE}
    table = generation.scanner(with_row_address=True).to_table().sort_by("_rowaddr")
    out = []
    for raw in table.to_pylist():
        row = dict.fromkeys(names.values())
        row.update({new: raw[old] for old, new in present.items() if new is not None})
        out.append((bool(raw.get(TOMBSTONE)), row))
    return out


def read_spec(uri: str, storage_options: Options = None) -> Rows:
    """Base and unmerged generations by the specification's own rule, in either layout.

    Highest (generation, row address) wins (spec, "LSM Tree Merging Read"); WAL entries that no
    generation holds yet are left out. Field ids are taken as written by pylance 13 and later
    (old_pylance.md).
    """
    files = Files(uri, storage_options)
    dataset = open_dataset(uri, storage_options)
    keys = primary_key(dataset.schema)
    names = {f.id(): f.name() for f in dataset.lance_schema.fields()}
    rows = read_base(uri, storage_options)
    merged = wire.progress(files)
    for region in wire.regions(files):
        for generation, path in sorted(wire.region_manifest(files, region).generations.items()):
            if generation <= merged.get(region, 0):
                continue
            for deleted, row in _generation_rows(f"{files.uri}/_mem_wal/{region}/{path}", storage_options, names):
                key = tuple(row[name] for name in keys)
                if deleted:
                    rows.pop(key, None)
                else:
                    rows[key] = row
    return rows
