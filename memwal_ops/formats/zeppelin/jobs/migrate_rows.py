"""Find the rows that a migration has to write, write them, and compare all rows: on this machine.

An attribute has no type: its values may differ in type from row to row. Integers and floats together become float64 if
no integer loses digits; other mixtures become JSON text, and the report names them.

Rows are compared by 64-bit hashes of ids and of whole rows. Two ids with one hash, which happens once in 10**5 tables
of ten million rows, make a comparison fail, not succeed.

Memory: the log, one cluster, and 32 bytes for each row where rows are compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.formats.zeppelin.compaction import dimensions_of
from memwal_ops.formats.zeppelin.reader import live_rows, read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray
    from pyspark.sql import DataFrame

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.row_sink import RowSink, SparkRows
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.segments import Rows


ID, VECTOR = "id", "vector"
ATTRIBUTE = "memwal_ops.attribute"
_JSON = "memwal_ops.json"
_EXACT = 2**53
_INT64 = range(-(2**63), 2**63)
_TYPES: Mapping[frozenset[str], pa.DataType] = {
    frozenset({"bool"}): pa.bool_(),
    frozenset({"int"}): pa.int64(),
    frozenset({"int", "long"}): pa.int64(),
    frozenset({"long"}): pa.int64(),
    frozenset({"float"}): pa.float64(),
    frozenset({"int", "float"}): pa.float64(),
    frozenset({"str"}): pa.string(),
}


def kind_of(value: object) -> str:
    """``bool``, ``int``, ``long`` (no float64 has its digits), ``huge`` (no int64), ``float``, ``str`` or ``list``."""
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    if value not in _INT64:
        return "huge"
    return "int" if abs(value) <= _EXACT else "long"


@dataclass(frozen=True)
class AttributeKinds:
    """The kinds of values of each attribute: of the values themselves, and of the elements of its lists."""

    values: Mapping[str, set[str]]
    elements: Mapping[str, set[str]]

    @classmethod
    def empty(cls) -> AttributeKinds:
        """The kinds of no rows."""
        return cls(defaultdict(set), defaultdict(set))

    def add(self, rows: Rows) -> None:
        """Add the attributes of some rows."""
        for attributes in rows.attributes:
            for name, value in (attributes or {}).items():
                if value is None:
                    continue  # as an attribute that the row lacks
                self.values[name].add(kind_of(value))
                if isinstance(value, list):
                    self.elements[name].update(kind_of(item) for item in value if item is not None)

    def to_json(self) -> dict[str, dict[str, list[str]]]:
        """The kinds as lists."""
        return {
            what: {name: sorted(kinds) for name, kinds in kept.items()}
            for what, kept in (("values", self.values), ("elements", self.elements))
        }

    def add_json(self, document: Mapping[str, Mapping[str, list[str]]]) -> None:
        """Add the kinds from a result of :meth:`to_json`."""
        for what, kept in (("values", self.values), ("elements", self.elements)):
            for name, kinds in document[what].items():
                kept[name].update(kinds)

    def type_of(self, name: str) -> pa.DataType | None:
        """The type that holds every value; None: only JSON text does."""
        kinds, elements = frozenset(self.values[name]), frozenset(self.elements[name])
        if kinds != {"list"}:
            return _TYPES.get(kinds)
        inner = _TYPES.get(elements or frozenset({"str"}))
        return None if inner is None else pa.list_(inner)


@dataclass(frozen=True)
class Columns:
    """The columns of a migrated namespace: ``id``, ``vector``, and one per attribute, named in its metadata."""

    schema: pa.Schema

    @classmethod
    def of(cls, kinds: AttributeKinds, dimensions: int) -> Columns:
        """Columns for these attributes, by name."""
        fields = [pa.field(ID, pa.string(), nullable=False), pa.field(VECTOR, pa.list_(pa.float32(), dimensions))]
        return cls(pa.schema(fields)).with_added(kinds)

    def with_added(self, kinds: AttributeKinds) -> Columns:
        """The same columns, and new ones for attributes that have none.

        Raises ``InvalidUsageError``: an attribute has values that its column cannot store.
        """
        by_attribute = self.by_attribute
        fields = [*self.schema]
        for name in sorted(kinds.values):
            if name not in by_attribute:
                fields.append(_field(name, kinds.type_of(name), {field.name for field in fields}))
            elif not _fits(by_attribute[name], kinds, name):
                raise InvalidUsageError(
                    f"The attribute {name!r} has new values that its column {by_attribute[name].name} of type "
                    f"{by_attribute[name].type} cannot store.",
                    remedy="Migrate to a new target: its column types are chosen from all values.",
                )
        return Columns(pa.schema(fields))

    @property
    def by_attribute(self) -> dict[str, pa.Field]:
        """The field of each attribute."""
        return {
            field.metadata[ATTRIBUTE.encode()].decode(): field
            for field in self.schema
            if field.metadata and ATTRIBUTE.encode() in field.metadata
        }

    def convert(self, rows: Rows) -> pa.RecordBatch:
        """Rows as a batch; an attribute that a row lacks is null."""
        arrays: dict[str, pa.Array] = {
            ID: pa.array(rows.ids, pa.string()),
            VECTOR: pa.FixedSizeListArray.from_arrays(
                pa.array(np.ascontiguousarray(rows.vectors, np.float32).ravel()), self.dimensions
            ),
        }
        for name, field in self.by_attribute.items():
            values = [(attributes or {}).get(name) for attributes in rows.attributes]
            if is_json(field):
                values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
            arrays[field.name] = pa.array(values, field.type)
        return pa.record_batch([arrays[field.name] for field in self.schema], schema=self.schema)

    @property
    def dimensions(self) -> int:
        """Dimensions of the vectors."""
        return int(self.schema.field(VECTOR).type.list_size)


def is_json(field: pa.Field) -> bool:
    """Whether a column has each value as JSON text."""
    metadata: Mapping[bytes, bytes] = field.metadata or {}
    return _JSON.encode() in metadata


def _field(attribute: str, kind: pa.DataType | None, taken: set[str]) -> pa.Field:
    # Lance interprets a dot as the path into a struct.
    wanted = attribute.replace(".", "_") or "attribute"
    folded = {taken_name.casefold() for taken_name in taken}
    name, number = wanted, 1
    while name.casefold() in folded:
        name, number = f"{wanted}_{number}", number + 1
    metadata = {ATTRIBUTE: attribute} | ({_JSON: "true"} if kind is None else {})
    return pa.field(name, pa.string() if kind is None else kind, metadata=metadata)


def _fits(field: pa.Field, kinds: AttributeKinds, name: str) -> bool:
    kind, column, values = kinds.type_of(name), field.type, kinds.values[name]
    if is_json(field) or column == kind:
        return True
    if pa.types.is_list(column):
        if values != {"list"}:
            return False
        column, values = column.value_type, kinds.elements[name]
    return not values or (bool(column == pa.float64()) and values <= {"int", "float"})


def digests(batch: pa.RecordBatch) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Per row a 64-bit hash of its id, and one of all its values; equal rows of two tables have equal hashes."""
    width = batch.schema.field(VECTOR).type.list_size
    vectors = np.ascontiguousarray(batch.column(VECTOR).flatten().to_numpy(zero_copy_only=False)).reshape(-1, width)
    names = sorted({*batch.schema.names} - {ID, VECTOR})
    others: Iterable[dict[str, Any]] = batch.select(names).to_pylist() if names else ({} for _ in vectors)
    texts = (json.dumps({k: v for k, v in values.items() if v is not None}, sort_keys=True) for values in others)
    ids = batch.column(ID).to_pylist()
    rows = (
        xxhash.xxh3_64_intdigest(f"{name}\0{text}\0".encode("utf-8", "surrogatepass") + vector.tobytes())
        for name, text, vector in zip(ids, texts, vectors, strict=True)
    )
    return id_hashes(ids), np.fromiter(rows, np.uint64, len(ids))


def id_hashes(ids: Iterable[str]) -> NDArray[np.uint64]:
    """Per id its 64-bit hash."""
    return np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in ids], np.uint64)


@dataclass(frozen=True)
class Digests:
    """The hashes of a table's ids, ascending, and those of their rows: 16 bytes a row."""

    ids: NDArray[np.uint64]
    rows: NDArray[np.uint64]

    @classmethod
    def of(cls, batches: Iterator[pa.RecordBatch], context: RunContext) -> Digests:
        """The hashes of rows in any order."""
        parts = []
        for batch in batches:
            parts.append(digests(batch))
            context.advance("comparing", "rows", batch.num_rows)
        if not parts:
            return cls(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        ids, rows = (np.concatenate(both) for both in zip(*parts, strict=True))
        order = np.argsort(ids)
        return cls(ids[order], rows[order])

    def places(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Per id its position, and whether it exists."""
        at = np.minimum(np.searchsorted(self.ids, ids), max(0, len(self.ids) - 1))
        return at, (self.ids[at] == ids) if len(self.ids) else np.zeros(len(ids), np.bool_)

    def has(self, ids: NDArray[np.uint64], rows: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Per row whether an equal row exists."""
        at, known = self.places(ids)
        return known & (self.rows[at] == rows) if len(self.ids) else known

    def __eq__(self, other: object) -> bool:
        """Whether both have the same rows."""
        if not isinstance(other, Digests):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]


_BATCH_ROWS = 8192


@dataclass(frozen=True)
class LoadedRows:
    """Rows that Spark loads into an empty table."""

    on_spark: SparkRows
    rows: DataFrame
    count: int

    def create(self, sink: RowSink, schema: pa.Schema, record: Mapping[str, Any]) -> int:
        """An empty table first: a run after one that was killed before the rows finds it empty, and continues."""
        sink.create(pa.RecordBatchReader.from_batches(schema, []), ID, record)
        sink.set_record(record)
        return self.upsert(sink, schema)

    def upsert(self, sink: RowSink, schema: pa.Schema) -> int:
        """Load all rows: the table is empty."""
        del sink, schema
        self.on_spark.load(self.rows)
        return self.count


@dataclass
class RowChanges:
    """The changes of a round: rows to upsert, ids to delete; ``live`` is the namespace's number of rows, if known."""

    columns: Columns
    live: int | None
    upserts: int
    deletes: list[str]
    rows: StreamedRows | LoadedRows


@dataclass(frozen=True)
class LocalMigration:
    """Streams through this process."""

    sink: RowSink
    context: RunContext

    def find(self, table: Namespace) -> RowChanges | None:
        """Compare all rows with those of the table, if there is one; None: there is no row yet, and no table."""
        kinds, count, dimensions = AttributeKinds.empty(), 0, dimensions_of(table)
        for rows in live_rows(table):
            kinds.add(rows)
            count += len(rows.ids)
            dimensions = dimensions or (rows.vectors.shape[1] if rows.ids else None)
            self.context.advance("reading", "rows", len(rows.ids))
        if self.sink.record is None:
            if dimensions is None:
                return None
            columns = Columns.of(kinds, dimensions)
            return RowChanges(columns, count, count, [], StreamedRows(lambda: _all(table, columns), self.context))
        columns = Columns(self.sink.schema).with_added(kinds)
        existing = Digests.of(self.sink.rows(), self.context)
        upserts, hashes = 0, []
        for rows in live_rows(table):
            hashes.append(id_hashes(rows.ids))
            upserts += sum(int((~existing.has(*digests(batch))).sum()) for batch in batches(columns, rows))
        live = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
        every = Digests(live, live)
        deletes: list[str] = []
        if not every.places(existing.ids)[1].all():
            for batch in self.sink.rows([ID]):
                ids = batch.column(ID).to_pylist()
                deletes += [name for name, kept in zip(ids, every.places(id_hashes(ids))[1], strict=True) if not kept]

        def differing() -> Iterator[pa.RecordBatch]:
            for batch in _all(table, columns):
                differs = ~existing.has(*digests(batch))
                if differs.any():
                    yield batch.filter(pa.array(differs))

        return RowChanges(columns, count, upserts, deletes, StreamedRows(differing, self.context))

    def compare(self, table: Namespace, columns: Columns) -> tuple[int, int, bool]:
        """How many rows the namespace and the table have, and whether they are the same."""
        wanted = Digests.of(_all(table, columns), self.context)
        migrated = Digests.of(self.sink.rows(), self.context)
        return len(wanted.ids), len(migrated.ids), wanted == migrated

    def of_ids(self, table: Namespace, columns: Columns, ids: frozenset[str]) -> StreamedRows:
        """The rows of the log with these ids."""

        def chosen() -> Iterator[pa.RecordBatch]:
            rows = read_log(table).rows
            places = np.array([at for at, name in enumerate(rows.ids) if name in ids], np.intp)
            yield from batches(columns, rows.take(places))

        return StreamedRows(chosen, self.context)


def batches(columns: Columns, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Rows as batches of the table."""
    for start in range(0, len(rows.ids), _BATCH_ROWS):
        yield columns.convert(rows.take(np.arange(start, min(start + _BATCH_ROWS, len(rows.ids)))))


def _all(table: Namespace, columns: Columns) -> Iterator[pa.RecordBatch]:
    for rows in live_rows(table):
        yield from batches(columns, rows)


class StreamedRows:
    """Batches as a reader. Errors of this project that end it are raised unchanged, not as Arrow's."""

    def __init__(self, read: Callable[[], Iterator[pa.RecordBatch]], context: RunContext) -> None:
        """``read`` is called when the rows are written."""
        self._read, self._context = read, context
        self._error: MemwalOpsError | None = None
        self._count = 0

    def create(self, sink: RowSink, schema: pa.Schema, record: Mapping[str, Any]) -> int:
        """Create the table with the rows; returns how many there were."""
        return self._into(schema, lambda reader: sink.create(reader, ID, record))

    def upsert(self, sink: RowSink, schema: pa.Schema) -> int:
        """Upsert the rows into the table; returns how many there were."""
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
