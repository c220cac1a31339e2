"""``spark.read.format("memwal")``: base and unmerged generations as one DataFrame, last write wins.

The planning process reads the keys of the backlog and finds the newest row of each key, with the local engine's own
functions; tasks then read fragments and generations with Lance. A scan reads one base version and the generations that
were flushed when it was planned, whatever is merged meanwhile.

The filter of a read (``.option("filter", ...)``) is applied after last write wins: a row that it rejects still
supersedes the older ones of its key. Base fragments are scanned with it, since which of their rows are superseded is
known without it; of generations only the winning rows are filtered: they are written to a Lance dataset in memory and
filtered by the same scanner as a base fragment, so that nulls, casts and functions mean the same.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import lance
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from memwal_ops.core.spark.stages import reported
from memwal_ops.errors import InvalidUsageError, InvariantViolatedError, MemwalOpsError, UnsupportedFeatureError
from memwal_ops.formats.lance.engines.merge.collapse import MergePass, Winners, collapse
from memwal_ops.formats.lance.engines.merge.locate import locate
from memwal_ops.formats.lance.engines.merge.passes import open_generations
from memwal_ops.formats.lance.engines.spark.tasks import TASK_BYTES, spark_schema, to_spark
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, lance_errors, open_dataset
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.table import Table, open_lance_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    import numpy.typing as npt

    from memwal_ops.formats.lance.generations.generation import SealedGeneration
    from memwal_ops.storage.locations import Location


_ROW = "__memwal_ops_row"
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_FIELDS = re.compile(r"(?<=Valid fields are )[^.]*")
# Lance's own columns have another meaning in a generation, and none in memory.
_SYSTEM = re.compile(r"\b_row(?:id|addr|offset|_last_updated_at_version|_created_at_version)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled filter, and the base columns that it reads, in the base's order; see :func:`condition`.

    ``storage_version``: of the base's files; the meaning of a null inside a struct may depend on it.
    """

    sql: str
    columns: tuple[str, ...]
    storage_version: str

    def holds(self, rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.bool_]:
        """For each row whether the condition is true (null is not); ``rows`` has ``columns`` in the base's types.

        Raises ``InvalidUsageError``: the expression fails on a value.
        """
        matches = np.zeros(rows.num_rows, dtype=np.bool_)
        if rows.num_rows:
            chosen = pa.table({_ROW: np.arange(rows.num_rows)})
            for name in self.columns:
                chosen = chosen.append_column(rows.schema.field(name), _chunked(rows.column(name)))
            matches[_matching_rows(self.sql, chosen, self.storage_version)] = True
        return matches


def condition(text: str, base: lance.LanceDataset) -> Condition:
    """Compile ``text`` for the columns of ``base``.

    Raises ``InvalidUsageError``: it is not a boolean expression over these columns.
    """
    schema: pa.Schema = base.schema
    version = str(base.data_storage_version)
    names = {name.lower() for name in schema.names}
    system = {column.lower() for column in _SYSTEM.findall(_QUOTED.sub("''", text))} - names
    if system:
        raise InvalidUsageError(
            f"The filter {text!r} uses {', '.join(sorted(system))}, which is a property of a row's position.",
            remedy=_REMEDY,
        )
    # In parentheses: Lance's parser ignores text after a complete expression.
    sql = f"({text}\n)"
    _plan(sql, schema, version)
    return Condition(sql, tuple(_columns(sql, schema, version)), version)


def _columns(sql: str, schema: pa.Schema, version: str) -> Sequence[str]:
    """The columns without which it cannot be planned; all of them if that cannot be determined."""
    text = sql.lower()
    likely = [field for field in schema if field.name.lower() in text or "`" in field.name]
    if len({field.name.lower() for field in likely}) == len(likely) and _plans(sql, likely, version):
        return [
            field.name
            for field in likely
            if not _plans(sql, [other for other in likely if other is not field], version)
        ]
    return list(schema.names)


def _plans(sql: str, fields: Sequence[pa.Field], version: str) -> bool:
    try:
        _plan(sql, pa.schema(fields), version)
    except InvalidUsageError:
        return False
    return True


def _plan(sql: str, schema: pa.Schema, version: str) -> None:
    nothing = pa.schema([pa.field(_ROW, pa.int64()), *schema]).empty_table()
    _matching_rows(sql, nothing, version)


def _matching_rows(sql: str, rows: pa.Table, version: str) -> npt.NDArray[np.int64]:
    with failing(sql):
        dataset = lance.write_dataset(rows, "memory://", data_storage_version=cast("Any", version))
        row_numbers: npt.NDArray[np.int64] = (
            dataset.scanner(columns=[_ROW], filter=sql).to_table().column(_ROW).to_numpy()
        )
    return row_numbers


@contextmanager
def failing(sql: str) -> Iterator[None]:
    """Report an error of pylance as one of the filter, ``InvalidUsageError``."""
    try:
        with lance_errors("use the filter", sql[1:-2]):
            yield
    except MemwalOpsError as error:
        message = _FIELDS.sub(_of_the_table, str(error)).rstrip(" .")
        raise InvalidUsageError(f"{message}.", remedy=_REMEDY) from error


def _of_the_table(fields: re.Match[str]) -> str:
    """Lance's list of the columns that a filter may use, without our own and those that are refused here."""
    return ", ".join(name for name in fields[0].split(", ") if name != _ROW and not _SYSTEM.fullmatch(name))


def is_failing(error: MemwalOpsError) -> bool:
    """Whether a scan failed because its filter failed on a value."""
    return "Error applying filter expression" in str(error)


def _chunked(column: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


_REMEDY = (
    "Give an expression over the table's columns in the SQL of Lance's filters, such as "
    '"id > 5 AND txt IS NOT NULL"; names with capitals or spaces go between backticks.'
)

_FRAGMENT_SHIFT = np.uint64(32)
_PLANS = 12
_OPTIONS = frozenset({"path", "paths", "columns", "filter"})  # in lower case, as Spark passes them
_OF_A_CATALOG = "provider"


@dataclass(frozen=True, slots=True)
class _FragmentPart:
    """One base fragment. ``superseded``: ascending addresses of rows that a generation supersedes."""

    fragment_id: int
    superseded: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _GenerationPart:
    """The winning rows of one generation. ``wins`` is a mask over its live rows, one bit per row."""

    sealed: SealedGeneration
    wins: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Scan:
    location: Location
    version: int
    columns: pa.Schema
    condition: Condition | None

    def read(self, part: _FragmentPart | _GenerationPart) -> Iterator[pa.RecordBatch]:
        batches = self._fragment(part) if isinstance(part, _FragmentPart) else self._generation(part)
        for batch in batches:
            if batch.num_rows:
                yield to_spark(batch, self.columns)

    def _fragment(self, part: _FragmentPart) -> Iterator[pa.RecordBatch]:
        try:
            with lance_errors("read", self.location.uri):
                base = open_dataset(self.location, version=self.version)
                fragment = base.get_fragment(part.fragment_id)
                assert fragment is not None  # noqa: S101 - the plan saw it in the same version
                scanner = base.scanner(
                    columns=self.columns.names,
                    filter=None if self.condition is None else self.condition.sql,
                    use_scalar_index=False,  # the same result as in memory, and no index to load for each fragment
                    fragments=[fragment],
                    with_row_address=True,
                    io_buffer_size=TASK_BYTES // 8,
                    blob_handling="all_binary",
                )
                for batch in scanner.to_batches():
                    if part.superseded.size:
                        gone = np.isin(batch.column(ROW_ADDRESS).to_numpy(), part.superseded, assume_unique=True)
                        yield batch.filter(pa.array(~gone))
                    else:
                        yield batch
        except MemwalOpsError as error:
            if self.condition is not None and is_failing(error):
                with failing(self.condition.sql):
                    raise
            raise

    def _generation(self, part: _GenerationPart) -> Iterator[pa.RecordBatch]:
        generation = part.sealed.open(self.location)
        wins = np.unpackbits(part.wins, count=part.sealed.live_rows).astype(np.bool_)
        position = 0
        for batch in generation.read_rows(max_bytes=TASK_BYTES):
            here = wins[position : position + batch.num_rows]
            position += batch.num_rows
            if here.any():
                won = batch.filter(pa.array(here))
                for rows in generation.projected(won, max_bytes=TASK_BYTES, references=False):
                    yield rows if self.condition is None else rows.filter(pa.array(self.condition.holds(rows)))
        if position != part.sealed.live_rows:
            raise InvariantViolatedError(
                f"{part.sealed.ref} had {part.sealed.live_rows} rows when it was planned and {position} after."
            )


class MemwalReader(DataSourceReader):  # type: ignore[misc]  # pyspark is an extra
    """Plans a scan in Spark's planning process, and reads one part of it in a task.

    Does not implement ``pushFilters``: Spark keeps one plan for all scans of a DataFrame, the last that was
    made with filters. A later scan without filters would get filtered rows, and so would other scans in a join.
    """

    def __init__(
        self, uri: str, storage_options: Mapping[str, str], columns: Sequence[str], condition: str | None
    ) -> None:
        self._uri = uri
        self._options = storage_options
        self._columns = list(columns)
        self._condition = condition

    def partitions(self) -> list[InputPartition]:
        """One for each base fragment, and for each generation that has newest rows.

        Raises ``BlockedRegionsError``: a generation cannot be read: without it the result would be wrong;
        ``InvalidUsageError``: the filter is not valid.
        """
        with reported():
            table = open_lance_table(self._uri, self._options)
            wanted = None if self._condition is None else condition(self._condition, table.dataset)
            table, parts = _planned(table, wanted)
            columns = spark_schema(pa.schema([table.schema.field(name) for name in self._columns]))
            # With each part: Spark serializes the reader as it was before planning.
            scan = _Scan(table.location, table.version, columns, wanted)
            return [InputPartition((scan, part)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one part, as record batches."""
        scan, part = partition.value
        with reported():
            yield from scan.read(part)


class _MergedMeanwhileError(MemwalOpsError):
    """A merge was published during planning. Since then gc may have deleted generations that the plan needs."""


def _planned(table: Table, wanted: Condition | None) -> tuple[Table, list[_FragmentPart | _GenerationPart]]:
    """The newest version, and the parts of it and of the unmerged generations; planned again after a merge."""
    for _ in range(_PLANS):
        try:
            return table, _parts(table, wanted)
        except MemwalOpsError as error:
            fault = error
            newest = table.newest()
            if not isinstance(error, _MergedMeanwhileError) and _progress(newest) == _progress(table):
                raise
            table = newest
    raise fault


def _progress(table: Table) -> Mapping[UUID, int]:
    return table.index.merged_generations


def _parts(table: Table, wanted: Condition | None) -> list[_FragmentPart | _GenerationPart]:
    backlog = read_backlog(table)
    if backlog.blocked:
        raise backlog.blocked[0].error
    generations = open_generations(table, MergePass(backlog.pending, TASK_BYTES)) if backlog.pending else []
    if _progress(table.newest()) != _progress(table):
        # What was merged since is not in this version, and its generations may be off the list already.
        raise _MergedMeanwhileError(f"{table.location.uri} was merged repeatedly while a read of it was planned.")
    parts: list[_FragmentPart | _GenerationPart] = []
    no_addresses: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
    superseded = no_addresses
    if generations:
        winners = collapse(generations, table.primary_key)
        superseded = locate(table, winners, max_bytes=TASK_BYTES).addresses
        parts += [
            _GenerationPart(generation.sealed(), np.packbits(mask))
            for generation, mask in zip(generations, _prefiltered(winners, table, wanted), strict=True)
            if mask.any()
        ]
    of_fragment = superseded >> _FRAGMENT_SHIFT
    for fragment in table.dataset.get_fragments():
        start, end = np.searchsorted(of_fragment, [fragment.fragment_id, fragment.fragment_id + 1])
        parts.append(_FragmentPart(fragment.fragment_id, superseded[start:end] if end > start else no_addresses))
    return parts


def _prefiltered(winners: Winners, table: Table, wanted: Condition | None) -> tuple[npt.NDArray[np.bool_], ...]:
    """The masks of the winning rows; without those that a filter on key columns alone rejects."""
    if wanted is None or not set(wanted.columns) <= set(table.primary_key):
        return winners.upserts
    keys = winners.keys.select(list(wanted.columns)).cast(
        pa.schema([table.schema.field(name) for name in wanted.columns])
    )
    chosen = np.zeros(winners.rows_read, dtype=np.bool_)
    chosen[winners.rows[wanted.holds(keys)]] = True
    bounds = np.cumsum([0, *(len(mask) for mask in winners.upserts)])
    return tuple(mask & chosen[start:end] for mask, (start, end) in zip(winners.upserts, pairwise(bounds), strict=True))


def data_source(storage_options: Mapping[str, str]) -> type[DataSource]:
    """The class to register; it holds the storage options, so that they are not among the options of a read."""

    class MemwalDataSource(DataSource):  # type: ignore[misc]  # pyspark is an extra
        """A MemWAL table as a source. ``.load(uri)``; options ``columns`` ("id,text") and ``filter`` ("id > 5")."""

        @classmethod
        def name(cls) -> str:
            return "memwal"

        def schema(self) -> Any:
            with reported(marked=False):  # Spark shows this error to the caller of the read only
                base = open_lance_table(self._uri(), storage_options).dataset
                text = self._filter()
                if text is not None:
                    condition(text, base)
                return _schema(base.schema, self._names(base.schema))

        def reader(self, schema: Any) -> MemwalReader:
            with reported():
                base = open_lance_table(self._uri(), storage_options).schema
                # A schema that the user gave: Spark would interpret our data by it.
                if not set(schema.names) <= set(base.names) or schema != _schema(base, schema.names):
                    raise InvalidUsageError(
                        f"The schema of {self._uri()} is not {schema.simpleString()}.",
                        remedy='Leave .schema(...) out; .option("columns", "id,text") chooses columns.',
                    )
                return MemwalReader(self._uri(), storage_options, schema.names, self._filter())

        def writer(self, schema: Any, overwrite: bool) -> Any:  # noqa: ARG002, FBT001 - PySpark's
            with reported(marked=False):
                raise UnsupportedFeatureError(
                    "Writing a DataFrame with the format memwal is not supported.",
                    remedy="bulk_load(df, uri) of memwal_ops.spark appends rows with new keys; updates and "
                    "deletions go through a region's writer.",
                )

        def _uri(self) -> str:
            return _path(self.options)

        def _filter(self) -> str | None:
            return str(self.options.get("filter", "")).strip() or None

        def _names(self, base: pa.Schema) -> list[str]:
            wanted = [name.strip() for name in self.options.get("columns", "").split(",") if name.strip()]
            unknown = sorted(set(wanted) - set(base.names))
            if unknown:
                raise InvalidUsageError(
                    f"{self._uri()} has no column {', '.join(unknown)}.",
                    remedy=f"Its columns are {', '.join(base.names)}; their names are case-sensitive.",
                )
            if len(set(wanted)) != len(wanted):
                raise InvalidUsageError(
                    f"A column is named twice in {', '.join(wanted)}.", remedy='Name each column once in "columns".'
                )
            return wanted or list(base.names)

    return MemwalDataSource


def _path(options: Mapping[str, str]) -> str:
    """The URI of a read. Unknown options are refused: a misspelt "filter" must not return every row.

    Spark's catalog keeps the columns of the time when a table was created, and does not give a later read an
    option that names the table.
    """
    if _OF_A_CATALOG in options:
        raise UnsupportedFeatureError(
            "CREATE TABLE ... USING memwal is not supported.",
            remedy="CREATE TEMPORARY VIEW name USING memwal OPTIONS (path 's3://bucket/table.lance') gives it a name.",
        )
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise InvalidUsageError(
            f"A read of a MemWAL table has no option {', '.join(unknown)}.",
            remedy='Options are "columns" and "filter"; storage options go to register(spark, storage_options=...).',
        )
    path = options.get("path")
    if not path:
        raise InvalidUsageError(
            "The read has no path of a table; tables of Spark's catalog (CREATE TABLE ... USING memwal) "
            "are not supported.",
            remedy='Give one URI: spark.read.format("memwal").load("s3://bucket/table.lance").',
        )
    return str(path)


def _schema(base: pa.Schema, names: Sequence[str]) -> Any:
    wanted = pa.schema([base.field(name) for name in names])
    return from_arrow_schema(spark_schema(wanted), prefer_timestamp_ntz=True)
