"""Scan a table with its unmerged rows: base, flushed generations and the rows in memory (S0-191, S0-192).

First the newest row of each unmerged key is found from keys and row addresses alone; memory holds these. Then rows
stream, one source after the other: the winners of each generation, selected by address inside its scan, and the rows of
the base whose key was not written since.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import lance
import numpy as np
import pyarrow as pa

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.merge.collapse import KeysOf, keys_of_all, newest_of
from memwal_ops.formats.lance.engines.merge.locate import batches_without_keys, in_chunks
from memwal_ops.formats.lance.engines.read.opened import Opened, scan_plan
from memwal_ops.formats.lance.engines.read.pruning import WantedRows
from memwal_ops.formats.lance.engines.read.unmerged import Consistency, RegionRead, Unmerged, at_newest, read_unmerged
from memwal_ops.formats.lance.files.blobs import holds_blobs
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, lance_errors
from memwal_ops.formats.lance.generations.generation import Generation, named
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, conformed
from memwal_ops.formats.lance.indexes.index_faults import base_scanner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.log.region_writer import RegionWriter
    from memwal_ops.formats.lance.table import Table

_MAX_BYTES = 1 << 30
# Of one source's batches, and of the base's rows that are compared with the unmerged keys at once.
_BATCH_BYTES = 64 << 20
_CHUNK_BYTES = 32 << 20
# If a larger share of the rows win, all are read: selecting by address would cost more than it saves.
_MAX_SELECTED_SHARE = 0.5


@dataclass(frozen=True)
class _Part:
    """The winning rows of a generation, or of the region's memory."""

    winners: NDArray[np.bool_]
    addresses: NDArray[np.uint64]
    generation: Generation | None
    region: RegionRead


@dataclass(frozen=True)
class Winning:
    """The rows that a scan reads. These are ``parts`` of sources, and the base's rows except those of ``keys``."""

    unmerged: Unmerged
    keys: pa.Table
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class Scan:
    """One scan of a pinned version. Nothing is read before the first call.

    Attributes:
        table: the version.
        consistency: see :func:`memwal_ops.formats.lance.engines.read.unmerged.read_unmerged`.
        columns: None: all.
        filter: SQL, as in Lance.
        writers: of this process, whose rows in memory are read as well.
        opened: generations that the reader has opened before.
    """

    table: Table
    consistency: Consistency
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    writers: tuple[RegionWriter, ...] = ()
    opened: Opened = field(default_factory=Opened, repr=False, compare=False)

    def to_table(self) -> pa.Table:
        """The rows, in no order; each key once, as it was written last (S0-193).

        Raises:
            InvalidUsageError: a column that the table does not have.
            UnsupportedFeatureError: a log whose entries cannot be read here.
            MemwalOpsError: a generation or an entry is missing or damaged; no partial result is returned.
        """
        return self.to_batches().read_all()

    def to_batches(self) -> pa.RecordBatchReader:
        """The rows of :meth:`to_table` as a stream; memory holds the unmerged keys and some batches.

        Raises as :meth:`to_table`, and while it is read: StorageError, GenerationCorruptError.
        """
        unknown = sorted({*(self.columns or ())} - {*self.table.schema.names})
        if unknown:
            raise InvalidUsageError(f"{self.table.location.uri} has no column {', '.join(unknown)}.")
        return self.stream(at_newest(self.table, self.winning))

    def stream(self, found: Winning) -> pa.RecordBatchReader:
        """:meth:`to_batches` of what :meth:`winning` found, with or without a filter."""
        wanted = [*self.table.schema.names] if self.columns is None else [*self.columns]
        base = found.unmerged.table.dataset
        with lance_errors("scan", self.table.location.uri):
            out = base.scanner(
                columns=wanted, filter=self.filter, blob_handling=_blobs(base.schema, wanted)
            ).projected_schema
        return pa.RecordBatchReader.from_batches(out, self._batches(found, wanted, out))

    def explain(self) -> str:
        """The plan, with the specification's names of nodes (S0-203); reads manifests and logs, and no rows."""
        return scan_plan(at_newest(self.table, self.unmerged), self.filter)

    def unmerged(self, table: Table) -> Unmerged:
        """The unmerged rows of a version, in the regions that may have rows that meet the filter."""
        wanted = None if self.filter is None else WantedRows(table, self.filter)
        return read_unmerged(table, self.consistency, wanted=wanted, writers=self.writers)

    def winning(self, table: Table) -> Winning:
        """Find the newest row of each key among all unmerged rows of a version."""
        unmerged = self.unmerged(table)
        key = [*table.primary_key]
        kinds = pa.schema([pa.field(name, table.schema.field(name).type) for name in key])
        refs = [ref for region in unmerged.regions for ref in region.flushed]
        generations = self.opened.generations(table, refs)
        by_region = groupby(
            zip(generations, keys_of_all(generations, key), strict=True), lambda pair: pair[1].region_id
        )
        flushed = {region_id: [*pairs] for region_id, pairs in by_region}
        sources: list[tuple[KeysOf, Generation | None, RegionRead]] = []
        for region in unmerged.regions:
            sources += [(keys, generation, region) for generation, keys in flushed.get(region.region_id, [])]
            if region.memory is not None:
                sources.append((_in_memory(region, region.memory, key), None, region))
        if not sources:
            return Winning(unmerged, kinds.empty_table(), ())
        full = pa.schema([*kinds, pa.field(TOMBSTONE, pa.bool_()), pa.field(ROW_ADDRESS, pa.uint64())])
        parts = [KeysOf(keys.region_id, keys.keys.cast(full), keys.newest_row_first) for keys, _, _ in sources]
        winners = newest_of(parts, key)
        return Winning(
            unmerged,
            winners.keys,
            tuple(
                _Part(mask, keys.keys.column(ROW_ADDRESS).to_numpy()[mask], generation, region)
                for keys, mask, (_, generation, region) in zip(parts, winners.upserts, sources, strict=True)
                if mask.any()
            ),
        )

    def _batches(self, found: Winning, wanted: list[str], out: pa.Schema) -> Iterator[pa.RecordBatch]:
        table = found.unmerged.table
        for part in found.parts:
            for rows in self._rows(part, wanted, out):
                yield from conformed(rows.select(wanted), out).to_batches()
        key = [*table.primary_key]
        columns = [*dict.fromkeys([*wanted, *key])]
        with lance_errors("scan", table.location.uri):
            batches = base_scanner(
                table,
                columns=columns if found.keys.num_rows else wanted,
                filter=self.filter,
                io_buffer_size=_BATCH_BYTES,
                scan_in_order=False,
                blob_handling=_blobs(table.schema, columns),
            ).to_batches()
            if not found.keys.num_rows:
                yield from (conformed(batch, out) for batch in batches)
                return
            for rows in batches_without_keys(batches, found.keys, key, chunk_bytes=_CHUNK_BYTES):
                yield conformed(rows.select(wanted), out)

    def _rows(self, part: _Part, wanted: list[str], out: pa.Schema) -> Iterator[pa.Table]:
        if part.generation is None:
            assert part.region.memory is not None  # noqa: S101 - see winning
            rows = filtered(part.region.memory.filter(pa.array(part.winners)), wanted, self.filter)
            with named(part.region):
                yield conformed(rows, out)
            return
        if self.filter is None and part.winners.mean() > _MAX_SELECTED_SHARE:
            yield from winning_rows(part.generation.selected(wanted), part.winners, max_bytes=_BATCH_BYTES)
            return
        generation, plain = part.generation, part.generation.projection.is_plain
        if self.filter is None or plain:
            generation = generation.selected(wanted)
        batches = generation.read_rows(
            max_bytes=_BATCH_BYTES, condition=self.filter if plain else None, addresses=part.addresses
        )
        convert = partial(generation.projected, max_bytes=_BATCH_BYTES, references=False)
        whole = (converted for batch in batches for converted in convert(batch))
        if self.filter is None or plain:
            yield from (pa.Table.from_batches([batch]) for batch in whole)
        else:
            yield from (filtered(rows, wanted, self.filter) for rows in in_chunks(whole, _CHUNK_BYTES))


def _in_memory(region: RegionRead, rows: pa.Table, key: list[str]) -> KeysOf:
    numbered = rows.select([*key, TOMBSTONE]).append_column(ROW_ADDRESS, pa.array(np.arange(rows.num_rows, dtype="u8")))
    return KeysOf(region.region_id, numbered)


def _blobs(schema: pa.Schema, columns: list[str]) -> Literal["all_binary"] | None:
    """The ``blob_handling`` with which a scan of these columns returns blobs as bytes; None: it has no blobs."""
    return "all_binary" if any(holds_blobs(schema.field(name)) for name in columns) else None


def winning_rows(generation: Generation, mask: NDArray[np.bool_], *, max_bytes: int = _MAX_BYTES) -> Iterator[pa.Table]:
    """The rows of a generation that a mask over its live rows selects, in the base's columns."""
    start = 0
    for batch in generation.read_rows(max_bytes=max_bytes):
        part = batch.filter(pa.array(mask[start : start + batch.num_rows]))
        start += batch.num_rows
        for rows in generation.projected(part, max_bytes=max_bytes, references=False):
            yield pa.Table.from_batches([rows])


def filtered(rows: pa.Table, columns: list[str], condition: str | None) -> pa.Table:
    """The rows that meet a filter, evaluated by Lance, so that the same rules apply to all parts."""
    if condition is None or not rows.num_rows:
        return rows.select(columns)
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        return lance.write_dataset(rows, f"{folder}/rows").to_table(columns=columns, filter=condition)
