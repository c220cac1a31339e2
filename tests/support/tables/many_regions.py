"""Tables with many regions, made quickly: manifests and a few WAL entries, put as they are."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import lance
import pyarrow as pa

from memwal_ops.formats.lance.generations.wal import wal_entry_path
from memwal_ops.formats.lance.layouts import Layout
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration, RegionManifest, RegionStatus
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

_KEY = pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY)
_CONCURRENT_PUTS = 16


def make_regions(uri: str, regions: int, layout: Layout, options: dict[str, str] | None = None) -> Table:
    """A table with that many regions, each with three manifest versions and two WAL entries."""
    lance.write_dataset(pa.table({"id": [1]}, schema=pa.schema([_KEY])), uri, storage_options=options)
    lance.dataset(uri, storage_options=options).initialize_mem_wal()
    table = open_lance_table(uri, options)

    def one(number: int) -> None:
        region_id = uuid.UUID(int=number + 1, version=4)
        manifests = RegionManifestStore(table.store, region_id)
        flushed: tuple[FlushedGeneration, ...] = ()
        for version in (1, 2, 3):
            status = RegionStatus.ACTIVE
            manifests.commit(RegionManifest(region_id, version, 0, 1, None, 2, version, flushed, status))
            flushed += (FlushedGeneration(version, f"{number:08x}_gen_{version}"),)
        for entry in (1, 2):
            table.store.put(wal_entry_path(region_id, entry, layout), b"entry")

    with ThreadPoolExecutor(_CONCURRENT_PUTS) as pool:
        list(pool.map(one, range(regions)))
    return open_lance_table(uri, options)
