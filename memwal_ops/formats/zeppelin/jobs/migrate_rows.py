"""Find the rows that a migration has to write, write them, and compare all rows: on this machine.

Memory: the log, one cluster, and 32 bytes for each row where rows are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.zeppelin.attribute_columns import ID, Columns, Kinds
from memwal_ops.formats.zeppelin.compaction import dimensions_of
from memwal_ops.formats.zeppelin.reader import live_rows, read_log
from memwal_ops.formats.zeppelin.row_digests import Digests, digests, id_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.row_sink import RowSink
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.segments import Rows

_BATCH_ROWS = 8192


class Upserts(Protocol):
    """Rows to write; they are read only when they are written."""

    def create(self, sink: RowSink, schema: pa.Schema, record: Mapping[str, Any]) -> int:
        """Create the table with them. Returns how many there were."""

    def upsert(self, sink: RowSink, schema: pa.Schema) -> int:
        """Upsert them into the table. Returns how many there were."""


@dataclass
class Found:
    """The changes of a round: rows to upsert, ids to delete; ``live`` is the namespace's number of rows, if known."""

    columns: Columns
    live: int | None
    upserts: int
    deletes: list[str]
    rows: Upserts


@dataclass(frozen=True)
class Comparison:
    """A comparison of all rows: how many the namespace and the table have, and whether they are the same."""

    wanted: int
    found: int
    same: bool


class Engine(Protocol):
    """Where rows are read and compared."""

    def find(self, table: Namespace) -> Found | None:
        """Compare all rows with those of the table, if there is one; None: there is no row yet, and no table."""

    def compare(self, table: Namespace, columns: Columns) -> Comparison:
        """Compare all rows with those of the table."""


@dataclass(frozen=True)
class LocalEngine:
    """Streams through this process."""

    sink: RowSink
    context: RunContext

    def find(self, table: Namespace) -> Found | None:
        """See the protocol."""
        kinds, count, dimensions = Kinds.empty(), 0, dimensions_of(table)
        for rows in live_rows(table):
            kinds.add(rows)
            count += len(rows.ids)
            dimensions = dimensions or (rows.vectors.shape[1] if rows.ids else None)
            self.context.advance("reading", "rows", len(rows.ids))
        if self.sink.record is None:
            if dimensions is None:
                return None
            columns = Columns.of(kinds, dimensions)
            return Found(columns, count, count, [], StreamedUpserts(lambda: _all(table, columns), self.context))
        columns = Columns(self.sink.schema).with_added(kinds)
        existing = Digests.of(self.sink.rows(), self.context)
        upserts, hashes = 0, []
        for rows in live_rows(table):
            hashes.append(id_hashes(rows.ids))
            upserts += sum(int((~existing.has(*digests(one))).sum()) for one in batches(columns, rows))
        live = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
        every = Digests(live, live)
        deletes: list[str] = []
        if not every.places(existing.ids)[1].all():
            for batch in self.sink.rows([ID]):
                ids = batch.column(ID).to_pylist()
                deletes += [name for name, kept in zip(ids, every.places(id_hashes(ids))[1], strict=True) if not kept]
        written = StreamedUpserts(lambda: _differing(table, columns, existing), self.context)
        return Found(columns, count, upserts, deletes, written)

    def compare(self, table: Namespace, columns: Columns) -> Comparison:
        """See the protocol."""
        wanted = Digests.of(_all(table, columns), self.context)
        found = Digests.of(self.sink.rows(), self.context)
        return Comparison(len(wanted.ids), len(found.ids), wanted == found)

    def of_ids(self, table: Namespace, columns: Columns, ids: frozenset[str]) -> Upserts:
        """The rows of the log with these ids."""

        def chosen() -> Iterator[pa.RecordBatch]:
            rows = read_log(table).rows
            places = np.array([at for at, name in enumerate(rows.ids) if name in ids], np.intp)
            yield from batches(columns, rows.take(places))

        return StreamedUpserts(chosen, self.context)


def batches(columns: Columns, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Rows as batches of the table."""
    for start in range(0, len(rows.ids), _BATCH_ROWS):
        yield columns.convert(rows.take(np.arange(start, min(start + _BATCH_ROWS, len(rows.ids)))))


def _all(table: Namespace, columns: Columns) -> Iterator[pa.RecordBatch]:
    for rows in live_rows(table):
        yield from batches(columns, rows)


def _differing(table: Namespace, columns: Columns, existing: Digests) -> Iterator[pa.RecordBatch]:
    for batch in _all(table, columns):
        differs = ~existing.has(*digests(batch))
        if differs.any():
            yield batch.filter(pa.array(differs))


class StreamedUpserts:
    """Batches as a reader. Errors of this project that end it are raised unchanged, not as Arrow's."""

    def __init__(self, read: Callable[[], Iterator[pa.RecordBatch]], context: RunContext) -> None:
        """``read`` is called when the rows are written."""
        self._read, self._context = read, context
        self._error: MemwalOpsError | None = None
        self._count = 0

    def create(self, sink: RowSink, schema: pa.Schema, record: Mapping[str, Any]) -> int:
        """See the protocol."""
        return self._into(schema, lambda reader: sink.create(reader, ID, record))

    def upsert(self, sink: RowSink, schema: pa.Schema) -> int:
        """See the protocol."""
        return self._into(schema, lambda reader: sink.upsert(reader, ID))

    def _into(self, schema: pa.Schema, write: Callable[[pa.RecordBatchReader], None]) -> int:
        try:
            write(pa.RecordBatchReader.from_batches(schema, self._counted()))
        except Exception as error:
            if self._error is not None:
                raise self._error from error
            raise
        return self._count

    def _counted(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._read():
                self._count += batch.num_rows
                self._context.advance("migrating", "rows", batch.num_rows)
                yield batch
        except MemwalOpsError as error:
            self._error = error
            raise
