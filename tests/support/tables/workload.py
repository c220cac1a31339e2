"""Random workloads in the shard layout, written by pylance's own writer."""

from __future__ import annotations

from typing import Any

import lance
import pyarrow as pa
from lance.mem_wal import ShardWriter

from tests.support.tables.lsm_table import LsmTable
from tests.support.tables.model import Model, Rows, assert_same
from tests.support.tables.reading import open_dataset, read_base, read_lsm, read_spec
from tests.support.tables.schemas import WRITER_KEYS
from tests.support.tables.writers import closed_at_the_end

__all__ = ["Model", "Workload", "assert_same", "read_base", "read_lsm", "read_spec"]


class Workload(LsmTable):
    """A base table with MemWAL, one `mem_wal_writer` for each region.

    A MemTable becomes a generation when its writer is closed (`flush`; an empty one makes none), or
    in the background when the next put would pass `max_memtable_rows`. One put larger than that is
    refused by pylance (landmine 13), so that puts are cut here.
    """

    def __init__(self, seed: int, *, max_memtable_rows: int = 400, **options: Any) -> None:
        super().__init__(seed, **options)
        if self.key not in WRITER_KEYS:
            raise ValueError(f"pylance's MemWAL writer refuses {self.key} keys: use RegionLayout")
        self.max_memtable_rows = max_memtable_rows
        self._writers: dict[str, ShardWriter] = {}

    def _initialize(self, dataset: lance.LanceDataset) -> None:
        dataset.initialize_mem_wal()

    def writer(self, region: str) -> ShardWriter:
        """The open writer of a region; opened (a new epoch) if there is none."""
        if region not in self._writers:
            opened = open_dataset(self.uri, self.storage_options).mem_wal_writer(
                region,
                max_memtable_rows=self.max_memtable_rows,
                max_wal_flush_interval_ms=1,  # a durable put waits for this tick; 100 ms by default
            )
            self._writers[region] = closed_at_the_end(opened)
        return self._writers[region]

    def put(self, numbers: Any) -> None:
        for at in range(0, len(numbers), self.max_memtable_rows):
            super().put(numbers[at : at + self.max_memtable_rows])

    def _put(self, region: str, rows: pa.Table) -> int:
        writer = self.writer(region)
        writer.put(rows)
        return _written_to(writer)

    def _delete(self, region: str, keys: pa.Table) -> int:
        writer = self.writer(region)
        writer.delete(keys)
        return _written_to(writer)

    def _flush(self, region: str) -> None:
        writer = self._writers.pop(region, None)
        if writer is not None:
            writer.close()

    def read_lsm(self) -> Rows:
        """What pylance's scan says of all flushed generations."""
        return read_lsm(self.uri, self.storage_options)

    def read_open(self, region: str) -> Rows:
        """What an open writer's scan says: all of its own region, what is flushed of the others."""
        return read_lsm(self.uri, self.storage_options, writer=self.writer(region))


def _written_to(writer: ShardWriter) -> int:
    """The generation of the last write: one that fills the MemTable to its last row is in the one before."""
    stats = writer.memtable_stats()
    return int(stats["generation"]) - (stats["row_count"] == 0)
