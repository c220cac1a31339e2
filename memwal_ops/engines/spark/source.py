"""``spark.read.format("memwal")``: base and unmerged generations as one DataFrame, last write wins.

The planning process reads the keys of the backlog and finds which rows stand, by the local engine's
own functions; tasks then read fragments and generations with Lance. A scan sees one base version and
the generations that were flushed when it was planned, whatever is merged meanwhile.

A filter of the read's own (``.option("filter", ...)``) is asked of rows that stand, never of the contest between
them: a row that it rejects still supersedes the older ones of its key. Base fragments are scanned with it, as
which of their rows stand is known apart from it; rows of generations are asked when they have won.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from memwal_ops.core.backlog import read_backlog
from memwal_ops.core.datasets import open_dataset
from memwal_ops.core.generations import ROW_ADDRESS
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.table import open_table
from memwal_ops.engines.api import MergePass
from memwal_ops.engines.collapse import collapse
from memwal_ops.engines.locate import locate
from memwal_ops.engines.passes import open_generations
from memwal_ops.engines.spark.conditions import condition, failing, is_failing
from memwal_ops.engines.spark.faults import reported
from memwal_ops.engines.spark.tasks import TASK_BYTES
from memwal_ops.engines.spark.types import spark_schema, to_spark
from memwal_ops.errors import InvalidUsageError, InvariantViolatedError, MemwalOpsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from uuid import UUID

    import numpy.typing as npt

    from memwal_ops.core.generations import SealedGeneration
    from memwal_ops.core.table import Table
    from memwal_ops.engines.collapse import Winners
    from memwal_ops.engines.spark.conditions import Condition
    from memwal_ops.storage.locations import Location

_FRAGMENT_SHIFT = np.uint64(32)
_PLANS = 12
_OPTIONS = frozenset({"path", "paths", "columns", "filter"})  # in small letters, as Spark hands them over
_OF_A_CATALOG = "provider"


@dataclass(frozen=True, slots=True)
class _FragmentPart:
    """One base fragment without the rows (ascending addresses) that a generation supersedes."""

    fragment_id: int
    superseded: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _GenerationPart:
    """The rows of one generation that are the newest of their keys: a mask over its live rows, packed to bits."""

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
                    use_scalar_index=False,  # the same answer as in memory, and no index to load for each fragment
                    fragments=[fragment],
                    with_row_address=True,
                    io_buffer_size=TASK_BYTES // 8,
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
                rows = generation.projection.apply(batch.filter(pa.array(here)))
                yield rows if self.condition is None else rows.filter(pa.array(self.condition.holds(rows)))
        if position != part.sealed.live_rows:
            raise InvariantViolatedError(
                f"{part.sealed.ref} had {part.sealed.live_rows} rows when it was planned and {position} after."
            )


class MemwalReader(DataSourceReader):  # type: ignore[misc]  # pyspark is an extra
    """Plans a scan where Spark plans, reads a part of it where Spark reads.

    Takes no filters (``pushFilters``): Spark keeps one plan for all scans of a DataFrame, the last that was
    made with filters. A later scan without any would get what is left by theirs, and so would its neighbours in a join.
    """

    def __init__(
        self, uri: str, storage_options: Mapping[str, str], columns: Sequence[str], condition: str | None
    ) -> None:
        self._uri = uri
        self._options = storage_options
        self._columns = list(columns)
        self._condition = condition

    def partitions(self) -> list[InputPartition]:
        """One for each base fragment and each generation that still has rows to give.

        Raises:
            BlockedRegionsError: a generation cannot be read: without it the answer would be wrong.
            InvalidUsageError: the filter is none.
        """
        with reported():
            table = open_table(self._uri, self._options)
            wanted = None if self._condition is None else condition(self._condition, table.dataset)
            table, parts = _planned(table, wanted)
            columns = spark_schema(pa.schema([table.dataset.schema.field(name) for name in self._columns]))
            # With each part, as Spark ships the reader as it was before it planned.
            scan = _Scan(table.location, table.version, columns, wanted)
            return [InputPartition((scan, part)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one part, as record batches."""
        scan, part = partition.value
        with reported():
            yield from scan.read(part)


class _MovedOnError(MemwalOpsError):
    """Others merged while a plan was made, so that a collector may have taken what it needs."""


def _planned(table: Table, wanted: Condition | None) -> tuple[Table, list[_FragmentPart | _GenerationPart]]:
    """A version, and its parts together with the generations that it lacks."""
    for _ in range(_PLANS):
        try:
            return table, _parts(table, wanted)
        except MemwalOpsError as error:
            fault = error
            newest = table.newest()
            if not isinstance(error, _MovedOnError) and _progress(newest) == _progress(table):
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
        # What was merged since is not in this version, and need not be in the list of generations any more.
        raise _MovedOnError(f"{table.location.uri} was merged again and again while a read of it was planned.")
    parts: list[_FragmentPart | _GenerationPart] = []
    none: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
    superseded = none
    if generations:
        winners = collapse(generations, table.primary_key)
        superseded = locate(table, winners, max_bytes=TASK_BYTES).addresses
        parts += [
            _GenerationPart(generation.sealed(), np.packbits(mask))
            for generation, mask in zip(generations, _asked(winners, table, wanted), strict=True)
            if mask.any()
        ]
    of_fragment = superseded >> _FRAGMENT_SHIFT
    for fragment in table.dataset.get_fragments():
        start, end = np.searchsorted(of_fragment, [fragment.fragment_id, fragment.fragment_id + 1])
        parts.append(_FragmentPart(fragment.fragment_id, superseded[start:end] if end > start else none))
    return parts


def _asked(winners: Winners, table: Table, wanted: Condition | None) -> tuple[npt.NDArray[np.bool_], ...]:
    """The masks of the winning rows, without those whose key alone says that they are not wanted."""
    if wanted is None or not set(wanted.columns) <= set(table.primary_key):
        return winners.upserts
    keys = winners.keys.select(list(wanted.columns)).cast(
        pa.schema([table.dataset.schema.field(name) for name in wanted.columns])
    )
    chosen = np.zeros(winners.rows_read, dtype=np.bool_)
    chosen[winners.rows[wanted.holds(keys)]] = True
    bounds = np.cumsum([0, *(len(mask) for mask in winners.upserts)])
    return tuple(mask & chosen[start:end] for mask, (start, end) in zip(winners.upserts, pairwise(bounds), strict=True))


def data_source(storage_options: Mapping[str, str]) -> type[DataSource]:
    """The class to register; the options travel inside it, and not among the options of a read."""

    class MemwalDataSource(DataSource):  # type: ignore[misc]  # pyspark is an extra
        """A MemWAL table as a source: ``.load(uri)``; options ``columns`` ("id,text") and ``filter`` ("id > 5")."""

        @classmethod
        def name(cls) -> str:
            return "memwal"

        def schema(self) -> Any:
            with reported(marked=False):  # what this raises reaches nobody but who asked for the read
                base = open_table(self._uri(), storage_options).dataset
                text = self._filter()
                if text is not None:
                    condition(text, base)
                return _schema(base.schema, self._names(base.schema))

        def reader(self, schema: Any) -> MemwalReader:
            with reported():
                base = open_table(self._uri(), storage_options).dataset.schema
                # A schema that the user gave: Spark would read our bytes as whatever it says.
                if not set(schema.names) <= set(base.names) or schema != _schema(base, schema.names):
                    raise InvalidUsageError(
                        f"The schema of {self._uri()} is not {schema.simpleString()}.",
                        remedy='Leave .schema(...) out; .option("columns", "id,text") chooses columns.',
                    )
                return MemwalReader(self._uri(), storage_options, schema.names, self._filter())

        def _uri(self) -> str:
            _refuse_unknown(self.options)
            uri = self.options.get("path")
            if not uri:
                raise InvalidUsageError(
                    "The read does not say of which table.",
                    remedy='Give one URI: spark.read.format("memwal").load("s3://bucket/table.lance").',
                )
            return str(uri)

        def _filter(self) -> str | None:
            return str(self.options.get("filter", "")).strip() or None

        def _names(self, base: pa.Schema) -> list[str]:
            wanted = [name.strip() for name in self.options.get("columns", "").split(",") if name.strip()]
            unknown = sorted(set(wanted) - set(base.names))
            if unknown:
                raise InvalidUsageError(
                    f"{self._uri()} has no column {', '.join(unknown)}.",
                    remedy=f"Its columns are {', '.join(base.names)}; their names count to the letter.",
                )
            if len(set(wanted)) != len(wanted):
                raise InvalidUsageError(
                    f"A column stands twice in {', '.join(wanted)}.", remedy='Name each column once in "columns".'
                )
            return wanted or list(base.names)

    return MemwalDataSource


def _refuse_unknown(options: Collection[str]) -> None:
    """Whoever misspells "filter" must not be given every row. A catalog hands over all properties of its table."""
    unknown = sorted(set(options) - _OPTIONS)
    if unknown and _OF_A_CATALOG not in options:
        raise InvalidUsageError(
            f"A read of a MemWAL table has no option {', '.join(unknown)}.",
            remedy='Options are "columns" and "filter"; storage options go to register(spark, storage_options=...).',
        )


def _schema(base: pa.Schema, names: Sequence[str]) -> Any:
    wanted = pa.schema([base.field(name) for name in names])
    return from_arrow_schema(spark_schema(wanted), prefer_timestamp_ntz=True)
