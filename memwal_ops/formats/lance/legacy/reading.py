"""Read a legacy table like the specification's MemWAL-aware reader: the base, and unmerged rows (S1-030)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.merge.collapse import collapse
from memwal_ops.formats.lance.engines.merge.locate import without_keys
from memwal_ops.formats.lance.engines.read.scan import filtered, winning_rows
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.legacy.index import Meanings, find_emptied, mem_wals_of, unmerged
from memwal_ops.formats.lance.legacy.mem_tables import MemTables, with_key
from memwal_ops.formats.lance.wire.legacy_index import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.options import LegacyOptions
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True)
class LegacyScan:
    """One scan of a pinned version; nothing is read before :meth:`to_table`."""

    table: Table
    options: LegacyOptions
    columns: tuple[str, ...] | None = None
    filter: str | None = None

    def to_table(self) -> pa.Table:
        """The rows, in no order; each key once, as it was written last.

        Of a MemWAL that is FLUSHED and not merged, its MemTable; of one that is OPEN or SEALED, what its log had when
        its owner recorded it last in the index. What is MERGED, or merged by its writer's release, is in the base.

        Raises:
            InvalidUsageError: a column that the table does not have.
            NoPrimaryKeyError, FlushedMeaningUnknownError, TableCorruptError: as a merge of the table.
            MemwalOpsError: rows are missing or damaged; no partial result is returned.
        """
        if (emptied := find_emptied(self.table)) is not None:
            raise emptied.error("merge")
        table = with_key(self.table, self.options)
        schema = table.schema
        wanted = [*schema.names] if self.columns is None else [*self.columns]
        if unknown := sorted({*wanted} - {*schema.names}):
            raise InvalidUsageError(f"{table.location.uri} has no column {', '.join(unknown)}.")
        key = [*table.primary_key]
        keys, rows = schema.empty_table().select(key), schema.empty_table()
        with MemTables(table, self.options) as mem_tables:
            generations = [generation for generation in self._generations(mem_tables) if generation is not None]
            if generations:
                winners = collapse(generations, key)
                keys = winners.keys.cast(keys.schema)
                pairs = zip(generations, winners.upserts, strict=True)
                rows = pa.concat_tables(
                    [rows, *(part for generation, mask in pairs for part in winning_rows(generation, mask))]
                )
        with lance_errors("scan", table.location.uri):
            base = table.dataset.to_table(columns=[*dict.fromkeys([*wanted, *key])], filter=self.filter)
            parts = [without_keys(base, keys, key).select(wanted), filtered(rows, wanted, self.filter)]
        return pa.concat_tables([part.cast(base.select(wanted).schema) for part in parts])

    def _generations(self, mem_tables: MemTables) -> Iterator[Generation | None]:
        mem_wals = mem_wals_of(self.table)
        meanings = Meanings(self.table, self.options.flushed_means)
        for region in sorted({mem_wal.id.region for mem_wal in mem_wals}):
            pending = unmerged(mem_wals, region, meanings)
            if pending.fault is not None:
                raise pending.fault.error
            for mem_wal in pending.mem_wals:
                yield mem_tables.generation(mem_wal) if mem_wal.state is State.FLUSHED else mem_tables.drained(mem_wal)


@dataclass(frozen=True)
class LegacyReader:
    """A legacy table with its unmerged rows. ``options``: where rows are, what FLUSHED means."""

    table: Table
    options: LegacyOptions

    def scan(self, columns: Sequence[str] | None = None, filter: str | None = None) -> LegacyScan:  # noqa: A002 - Lance's word
        """A scan of all rows, or of those that meet a filter in SQL."""
        return LegacyScan(self.table, self.options, None if columns is None else tuple(columns), filter)
