"""``spark.read.format("memwal")``: base and unmerged generations as one DataFrame, last write wins.

The planning process reads the keys of the backlog and finds which rows stand, by the local engine's
own functions; tasks then read fragments and generations with Lance. A scan sees one base version and
the generations that were flushed when it was planned, whatever is merged meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from memwal_ops.engines.spark.faults import reported
from memwal_ops.engines.spark.tasks import TASK_BYTES
from memwal_ops.engines.spark.types import spark_schema, to_spark
from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from memwal_ops.core.generations import SealedGeneration
    from memwal_ops.core.table import Table
    from memwal_ops.storage.locations import Location

_FRAGMENT_SHIFT = np.uint64(32)


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

    def read(self, part: _FragmentPart | _GenerationPart) -> Iterator[pa.RecordBatch]:
        batches = self._fragment(part) if isinstance(part, _FragmentPart) else self._generation(part)
        for batch in batches:
            if batch.num_rows:
                yield to_spark(batch, self.columns)

    def _fragment(self, part: _FragmentPart) -> Iterator[pa.RecordBatch]:
        with lance_errors("read", self.location.uri):
            base = open_dataset(self.location, version=self.version)
            fragment = base.get_fragment(part.fragment_id)
            assert fragment is not None  # noqa: S101 - the plan saw it in the same version
            scanner = base.scanner(
                columns=self.columns.names,
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

    def _generation(self, part: _GenerationPart) -> Iterator[pa.RecordBatch]:
        generation = part.sealed.open(self.location)
        wins = np.unpackbits(part.wins, count=part.sealed.live_rows).astype(np.bool_)
        position = 0
        for batch in generation.read_rows(max_bytes=TASK_BYTES):
            here = wins[position : position + batch.num_rows]
            position += batch.num_rows
            if here.any():
                yield generation.projection.apply(batch.filter(pa.array(here)))


class MemwalReader(DataSourceReader):  # type: ignore[misc]  # pyspark is an extra
    """Plans a scan where Spark plans, reads a part of it where Spark reads.

    Takes no filters (``pushFilters``): Spark keeps one plan for all scans of a DataFrame, the last that was
    made with filters. A later scan without any would get what is left by theirs, and so would its neighbours in a join.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str], columns: Sequence[str]) -> None:
        self._uri = uri
        self._options = storage_options
        self._columns = list(columns)

    def partitions(self) -> list[InputPartition]:
        """One for each base fragment and each generation that still has rows to give.

        Raises:
            BlockedRegionsError: a generation cannot be read: without it the answer would be wrong.
        """
        with reported():
            table = open_table(self._uri, self._options)
            columns = spark_schema(pa.schema([table.dataset.schema.field(name) for name in self._columns]))
            # With each part, as Spark ships the reader as it was before it planned.
            scan = _Scan(table.location, table.version, columns)
            return [InputPartition((scan, part)) for part in _parts(table)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one part, as record batches."""
        scan, part = partition.value
        with reported():
            yield from scan.read(part)


def _parts(table: Table) -> list[_FragmentPart | _GenerationPart]:
    backlog = read_backlog(table)
    if backlog.blocked:
        raise backlog.blocked[0].error
    parts: list[_FragmentPart | _GenerationPart] = []
    none: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
    superseded = none
    if backlog.pending:
        generations = open_generations(table, MergePass(backlog.pending, TASK_BYTES))
        winners = collapse(generations, table.primary_key)
        superseded = locate(table, winners, max_bytes=TASK_BYTES).addresses
        parts += [
            _GenerationPart(generation.sealed(), np.packbits(mask))
            for generation, mask in zip(generations, winners.upserts, strict=True)
            if mask.any()
        ]
    of_fragment = superseded >> _FRAGMENT_SHIFT
    for fragment in table.dataset.get_fragments():
        start, end = np.searchsorted(of_fragment, [fragment.fragment_id, fragment.fragment_id + 1])
        parts.append(_FragmentPart(fragment.fragment_id, superseded[start:end] if end > start else none))
    return parts


def data_source(storage_options: Mapping[str, str]) -> type[DataSource]:
    """The class to register; the options travel inside it, and not among the options of a read."""

    class MemwalDataSource(DataSource):  # type: ignore[misc]  # pyspark is an extra
        """A MemWAL table as a source; ``.load(uri)``, ``.option("columns", "id,text")``."""

        @classmethod
        def name(cls) -> str:
            return "memwal"

        def schema(self) -> Any:
            with reported():
                table = open_table(self._uri(), storage_options)
                wanted = pa.schema([table.dataset.schema.field(name) for name in self._names()])
                return from_arrow_schema(spark_schema(wanted))

        def reader(self, schema: Any) -> MemwalReader:
            return MemwalReader(self._uri(), storage_options, schema.names)

        def _uri(self) -> str:
            uri = self.options.get("path")
            if not uri:
                raise InvalidUsageError('Say which table: spark.read.format("memwal").load("s3://bucket/table.lance").')
            return str(uri)

        def _names(self) -> list[str]:
            known = list(open_table(self._uri(), storage_options).dataset.schema.names)
            wanted = [name.strip() for name in self.options.get("columns", "").split(",") if name.strip()] or known
            unknown = sorted(set(wanted) - set(known))
            if unknown:
                raise InvalidUsageError(f"{self._uri()} has no column {', '.join(unknown)}.")
            return wanted

    return MemwalDataSource
