"""Bulk-load the rows of a DataFrame into the base table, as one version; and a table that a migration creates.

Values are cast to the table's types, and casts that would change a value are refused. Types are compared first, then
values, batch by batch. Arrow casts more than a load may do: timestamps without a zone to UTC, microseconds to numbers,
1e300 to infinity in float32; it drops the fields of a struct that the table does not have, and accepts bytes as text.
Each would silently change a value, so each is refused here.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.blob import BlobType
from lance.fragment import FragmentMetadata, write_fragments

from memwal_ops.core.context import Progress
from memwal_ops.core.spark.session import our_tasks, session
from memwal_ops.core.spark.stages import Counters, StageProgress, Stages, between_stages, release, reported
from memwal_ops.errors import DuplicateKeysError, InvalidUsageError
from memwal_ops.formats.lance.commit.commit import CommitNote, check_committable, check_takes_rows
from memwal_ops.formats.lance.engines.merge.collapse import MergePass
from memwal_ops.formats.lance.engines.merge.locate import key_code
from memwal_ops.formats.lance.engines.merge.passes import commit_files, open_generations
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, remove_files
from memwal_ops.formats.lance.engines.spark import tasks
from memwal_ops.formats.lance.engines.spark.running import log_files_if_kept, log_leftovers
from memwal_ops.formats.lance.engines.spark.tasks import spark_schema, spark_type
from memwal_ops.formats.lance.files.blobs import from_bytes, written_schema
from memwal_ops.formats.lance.files.datasets import lance_errors, lance_options, open_dataset
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.table import Table, open_lance_table
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

    from memwal_ops.core.row_sink import Task
    from memwal_ops.storage.locations import Location


_ROWS_PER_BATCH = 8192


class _Table(Protocol):
    @property
    def version(self) -> int: ...

    def load(self, rows: DataFrame) -> None: ...


@dataclass(frozen=True)
class SparkTable:
    """See :class:`memwal_ops.core.row_sink.SparkRows`."""

    spark: SparkSession
    table: _Table
    location: Location
    stages: Stages

    def stage(self, name: str, doing: str) -> AbstractContextManager[None]:
        """Report a stage, with its time; see the protocol."""
        return self.stages.stage(name, doing)

    def task(self, function: Task) -> Task:
        """Wrap a function so that its errors reach the driver; see the protocol."""

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with reported():
                yield from function(batches)

        return run

    def load(self, rows: DataFrame) -> None:
        """Load rows into the table; see the protocol."""
        self.table.load(rows)

    def map_rows(self, function: Task, schema: str) -> DataFrame:
        """Apply a function to the rows of each fragment, on executors; see the protocol."""
        location, version = self.location.refreshed(), self.table.version
        with lance_errors("open", location.uri):
            fragments = [fragment.fragment_id for fragment in open_dataset(location, version=version).get_fragments()]

        def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with lance_errors("read", location.uri):
                base = open_dataset(location, version=version)
                for batch in batches:
                    for place in batch.column(0).to_pylist():
                        fragment = base.get_fragment(fragments[place])
                        assert fragment is not None  # noqa: S101 - it was listed in the same version
                        yield from base.scanner(fragments=[fragment], batch_size=_ROWS_PER_BATCH).to_batches()

        return self.spark.range(0, len(fragments), 1, max(1, len(fragments))).mapInArrow(
            self.task(lambda batches: function(rows(batches))), schema
        )


@contextmanager
def running(
    table: _Table, location: Location, master: str | None, report: Callable[[Progress], None]
) -> Iterator[SparkTable]:
    """The table on Spark; see :meth:`memwal_ops.core.row_sink.RowSink.on_spark`."""

    def show(stage: StageProgress) -> None:
        report(Progress(f"migrating: {stage.stage}", "tasks", stage.tasks_done, stage.tasks or None))

    report(Progress("starting Spark", "tasks", 0))
    with session(master, app_name="memwal-ops migrate") as active, between_stages(), our_tasks(active):
        context = active.sparkContext
        counters = Counters.of(context)
        spark = active.newSession()  # the same application, with settings of its own
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(_ROWS_PER_BATCH))
        spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")
        yield SparkTable(spark, table, location, Stages(context, location.uri, counters, show))


def misfits(given: StructType, schema: pa.Schema) -> list[str]:
    """The columns that have to be cast before a load, one clause each; columns are matched by name."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    wanted = pa.schema([schema.field(name) for name in given.names])
    expected = from_arrow_schema(spark_schema(wanted), prefer_timestamp_ntz=True)
    return [
        clause
        for field, other in zip(given, expected, strict=True)
        for clause in _unlike(field.dataType, other.dataType, field.name)
    ]


def _unlike(given: DataType, wanted: DataType, place: str) -> Iterator[str]:
    """Clauses about two types between which a value cannot be converted without a change of its meaning."""
    from pyspark.sql import types as t  # noqa: PLC0415 - an extra

    if isinstance(given, t.ArrayType) and isinstance(wanted, t.ArrayType):
        yield from _unlike(given.elementType, wanted.elementType, f"{place}[]")
    elif isinstance(given, t.MapType) and isinstance(wanted, t.MapType):
        yield from _unlike(given.keyType, wanted.keyType, f"{place}[key]")
        yield from _unlike(given.valueType, wanted.valueType, f"{place}[]")
    elif isinstance(given, t.StructType) and isinstance(wanted, t.StructType):
        yield from _unlike_struct(given, wanted, place)
    elif not (isinstance(given, t.NullType) or isinstance(wanted, _carried_by(given))):
        yield f"{place} is {given.simpleString()} and would have to be {wanted.simpleString()}"


def _unlike_struct(given: StructType, wanted: StructType, place: str) -> Iterator[str]:
    unknown = sorted(set(given.names) - set(wanted.names))
    lacking = sorted(field.name for field in wanted if not field.nullable and field.name not in given.names)
    if unknown or lacking or len(set(given.names)) != len(given.names):
        yield f"{place} has fields not in the table {unknown}, lacks {lacking}, or has duplicates"
        return
    for field in given:
        yield from _unlike(field.dataType, wanted[field.name].dataType, f"{place}.{field.name}")


def _carried_by(given: DataType) -> tuple[type[DataType], ...]:
    """Spark's types to which values of ``given`` are cast without loss, or with an error."""
    from pyspark.sql import types as t  # noqa: PLC0415 - an extra

    for whole in (t.ByteType, t.ShortType, t.IntegerType, t.LongType):
        if isinstance(given, whole):
            return (t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.DecimalType, t.FloatType, t.DoubleType)
    if isinstance(given, t.DecimalType):
        return (t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.DecimalType)
    if isinstance(given, (t.FloatType, t.DoubleType)):
        return (t.FloatType, t.DoubleType)
    if isinstance(given, t.StringType):
        return (t.StringType,)
    return (type(given),)


def to_table(
    batch: pa.RecordBatch, schema: pa.Schema, primary_key: Collection[str], vectors: Collection[Sequence[str]] = ()
) -> pa.RecordBatch:
    """The batch in the table's types and column order; absent columns are null.

    ``vectors``: paths of columns with a vector index, which must not have NaN or infinity.

    Raises ``InvalidUsageError``: a value that the table's column or its index cannot hold unchanged.
    """
    columns = [
        _column(batch, field, required=not field.nullable or field.name in primary_key)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    for path in vectors:
        _refuse_non_finite(rows, path)
    return rows


def _refuse_non_finite(rows: pa.RecordBatch, path: Sequence[str]) -> None:
    """Distances to such a vector are NaN: its row would never be found, or corrupt the centroid of its partition."""
    column = rows.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, name)
    if any(pc.all(pc.is_finite(leaf)).as_py() is False for leaf in _floats(column)):
        raise InvalidUsageError(
            f"Column {'.'.join(path)!r} has NaN or infinity in a vector, which its vector index cannot hold.",
            remedy=_REMEDY,
        )


def _column(batch: pa.RecordBatch, field: pa.Field, *, required: bool) -> pa.Array:
    given = batch.column(field.name)
    try:
        given.validate(full=True)  # Spark accepts bytes as text, and readers of the page would fail
        plain = _aligned(given).cast(spark_type(field.type))
        cast = _cast(plain, field.type)
    except pa.ArrowException as error:
        raise InvalidUsageError(
            f"Column {field.name!r} has a value that is not a valid {field.type}: {error}", remedy=_REMEDY
        ) from error
    if required and cast.null_count:
        raise InvalidUsageError(
            f"Column {field.name!r} has NULL in {cast.null_count} of {batch.num_rows} rows of a batch, "
            "and needs a value in every row.",
            remedy=_REMEDY,
        )
    if _infinities(cast) != _infinities(given):
        raise InvalidUsageError(
            f"Column {field.name!r} has a number that is too large for {field.type}.", remedy=_REMEDY
        )
    return cast


def _cast(plain: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(kind, BlobType):
        return from_bytes(plain)
    return plain if plain.type.equals(kind) else plain.cast(kind)


def _aligned(array: pa.Array) -> pa.Array:
    """The same values, copied if Java aligned them otherwise than pyarrow and Lance require.

    A list of nulls alone has values at address 0, on which pyarrow's cast to a vector crashes the process;
    decimals are aligned to 8 bytes, and Lance accepts multiples of 16 only.
    """
    wide = "decimal" in str(array.type)
    if any(
        buffer is not None and (buffer.address == 0 or (wide and buffer.address % 16)) for buffer in array.buffers()
    ):
        return array.take(pa.array(np.arange(len(array))))
    return array


def _infinities(array: pa.Array) -> int:
    """The number of infinite values in an array, nested ones included."""
    return sum(int(pc.sum(pc.is_inf(leaf)).as_py() or 0) for leaf in _floats(array))


def _floats(array: pa.Array) -> Iterator[pa.Array]:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _floats(array.storage)
    elif pa.types.is_floating(kind):
        yield array.cast(pa.float32()) if pa.types.is_float16(kind) else array
    elif pa.types.is_struct(kind):
        yield from chain.from_iterable(_floats(child) for child in array.flatten())
    elif pa.types.is_map(kind):
        yield from chain(_floats(array.keys), _floats(array.items))
    elif pa.types.is_nested(kind):
        yield from _floats(array.flatten())


_REMEDY = "Nothing was loaded. Fix or drop these rows, or cast the column in Spark, and run it again."

_MARK = "__memwal_ops_mark"


@dataclass(frozen=True, slots=True)
class _Keys:
    """A checksum of a DataFrame's keys. ``mark`` is the XOR of their hashes: two evaluations must have the same."""

    count: int
    mark: int


def bulk_load(df: DataFrame, uri: str, *, storage_options: Mapping[str, str] | None = None) -> int:
    """Append the rows of ``df`` to the base table at ``uri`` as one new version, and return its number.

    Columns are matched by name and cast to the table's types if that changes no value: lists to its vectors, doubles to
    its floats. Absent nullable columns are null. The rows are evaluated twice, so they are persisted in between; a
    source that gives other keys the second time is refused.

    Raises:
        InvalidUsageError: columns that the table does not have, or lacks; a type that has to be cast first; a value
            that the table's column cannot hold, such as NULL in a key.
        DuplicateKeysError: a key twice in ``df``, or already in the table or an unmerged generation.
        CommitLostError: another writer published the next version first; nothing was published, run it again.
        SparkUnavailableError: the session is stopped, or its executors cannot run our tasks.
        SparkJobFailedError: a stage failed in Spark; nothing was published.
    """
    table = open_lance_table(uri, storage_options)
    check_committable(table)
    check_takes_rows(table)
    probe_conditional_writes(table.store)
    with between_stages(), our_tasks(df.sparkSession):
        stages = Stages(df.sparkSession.sparkContext, table.location.uri)
        columns = _columns(df, table)
        rows = _marked(df, table).persist()
        began = datetime.now(UTC)
        try:
            with stages.stage("check", "compare the keys that are to be loaded with those of the table"):
                keys = _refuse_known_keys(rows, columns, table)
            if not keys.count:
                return table.version
            with stages.stage("load", "write base fragments"):
                fragments, written = _write(rows, columns, table)
        except BaseException:
            if "load" in stages.seconds:  # before that, no stage writes files
                stages.settle()
                log_leftovers(table, began)
            raise
        finally:
            release(rows)
        version = _commit(table, fragments, keys, written)
        if stages.metrics["lost_attempts"] or "incomplete" in stages.metrics:
            log_leftovers(table, began)
    return version


def _columns(df: DataFrame, table: Table) -> list[str]:
    schema: pa.Schema = table.schema
    unknown = sorted(set(df.columns) - set(schema.names))
    missing = sorted(
        field.name
        for field in schema
        if (not field.nullable or field.name in table.primary_key) and field.name not in df.columns
    )
    twice = sorted(name for name in set(df.columns) if df.columns.count(name) > 1)
    if unknown or missing or twice:
        faults = (("the table has no", unknown), ("the table needs", missing), ("twice there is", twice))
        problems = "; ".join(f"{words} {', '.join(map(repr, names))}" for words, names in faults if names)
        raise InvalidUsageError(
            f"The columns of the DataFrame do not fit {table.location.uri}: {problems}.",
            remedy="Rename, drop or add columns in Spark; their names are case-sensitive.",
        )
    unlike = misfits(df.schema, schema)
    if unlike:
        raise InvalidUsageError(
            f"The columns of the DataFrame do not fit {table.location.uri}: {'; '.join(unlike)}.",
            remedy="Cast them in Spark, where their meaning is known (a time zone, for example).",
        )
    return list(df.columns)


def _marked(df: DataFrame, table: Table) -> DataFrame:
    """The rows with a hash of the key; columns are named by position, since any name may have a meaning in Spark."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    placed = df.toDF(*(_place(at) for at in range(len(df.columns))))
    return placed.withColumn(_MARK, f.xxhash64(*(_place(df.columns.index(name)) for name in table.primary_key)))


def _place(at: int) -> str:
    return f"c{at}"


def _refuse_known_keys(rows: DataFrame, columns: list[str], table: Table) -> _Keys:
    """The checksum of the rows' keys; raises ``DuplicateKeysError`` unless every key is new and occurs once."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    pending = read_backlog(table)
    if pending.blocked:
        raise pending.blocked[0].error
    generations = open_generations(table, MergePass(pending.pending, tasks.TASK_BYTES)) if pending.pending else []
    code = key_code(table.schema, table.primary_key)
    work = tasks.Pass(
        table.location,
        table.version,
        table.primary_key,
        code,
        stable=False,
        generations=tuple(generation.sealed() for generation in generations),
    )
    session = rows.sparkSession
    keys = f"key {code.spark_type}"
    new = rows.select(*(_place(columns.index(name)) for name in table.primary_key), _MARK).mapInArrow(
        _encoder(work, table.schema), f"{keys}, mark bigint"
    )
    fragments = [fragment.fragment_id for fragment in table.dataset.get_fragments()]
    known = session.range(len(fragments)).mapInArrow(tasks.base_reader(work, fragments), f"{keys}, address bigint")
    known = known.select("key")
    if generations:
        flushed = session.range(len(generations)).mapInArrow(tasks.key_reader(work), f"{keys}, locator bigint")
        known = known.union(flushed.select("key"))
    counted = new.groupBy("key").agg(f.count("*").alias("rows"), f.bit_xor("mark").alias("mark"))
    compared = counted.join(known.distinct().withColumn("known", f.lit(1)).hint("shuffle_hash"), "key", "left")
    (total,) = compared.agg(
        f.sum("rows").alias("rows"),
        f.bit_xor("mark").alias("mark"),
        f.count_if(f.col("rows") > 1).alias("twice"),
        f.count("known").alias("known"),
    ).collect()
    if total["twice"] or total["known"]:
        problems = [
            f"{total[name]:,} {singular if total[name] == 1 else many} {where}"
            for name, singular, many, where in (
                ("twice", "occurs", "occur", "several times in the DataFrame"),
                ("known", "is", "are", "in the table or its generations already"),
            )
            if total[name]
        ]
        raise DuplicateKeysError(
            f"Of the keys, {' and '.join(problems)}.",
            remedy="Nothing was loaded. Load new keys only, each once; updates go through a region's writer.",
        )
    return _Keys(int(total["rows"] or 0), int(total["mark"] or 0))


def _encoder(work: tasks.Pass, schema: pa.Schema) -> Any:
    wanted = pa.schema([schema.field(name) for name in work.primary_key])

    def encode_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            for batch in batches:
                keys = to_table(_named(batch, wanted.names), wanted, work.primary_key)
                yield pa.RecordBatch.from_pydict(
                    {"key": work.code.encode(pa.Table.from_batches([keys])), "mark": batch.column(_MARK)}
                )

    return encode_keys


def _named(batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    """The columns under their own names, without the mark, which is the last."""
    return pa.RecordBatch.from_arrays(batch.columns[: len(columns)], names=columns)


def _write(rows: DataFrame, columns: list[str], table: Table) -> tuple[tuple[FragmentMetadata, ...], _Keys]:
    """New fragments, and the keys of the rows that were written to them."""
    location, version, primary_key = table.location, table.version, table.primary_key
    schema = written_schema(table.schema)
    vectors = _indexed_vectors(table)

    def write_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            failure: list[BaseException] = []
            marks = [0]

            def incoming() -> Iterator[pa.RecordBatch]:
                # An error inside the stream would come back as text through two language boundaries.
                try:
                    for batch in batches:
                        if batch.num_rows:
                            marks[0] ^= int(np.bitwise_xor.reduce(batch.column(_MARK).to_numpy()))
                            yield to_table(_named(batch, columns), schema, primary_key, vectors)
                except BaseException as error:
                    failure.append(error)
                    raise

            stream = incoming()
            first = next(stream, None)
            if first is None:
                return
            with lance_errors("open", location.uri):
                base = open_dataset(location, version=version)

            def all_rows() -> Iterator[pa.RecordBatch]:
                yield first
                yield from stream

            try:
                with lance_errors("write to", location.uri):
                    written = write_fragments(
                        pa.RecordBatchReader.from_batches(schema, all_rows()),
                        base,
                        mode="append",
                        data_storage_version=base.data_storage_version,
                        storage_options=lance_options(location),
                    )
            except Exception as error:
                if failure:
                    raise failure[0] from error
                raise
            assert isinstance(written, list)  # noqa: S101 - narrows pylance's union
            result = json.dumps({"mark": marks[0], "fragments": [fragment.to_json() for fragment in written]})
            yield pa.RecordBatch.from_pydict({"result": [result]})

    results = [json.loads(row["result"]) for row in rows.mapInArrow(write_rows, "result string").collect()]
    fragments = tuple(
        FragmentMetadata.from_json(json.dumps(fragment)) for result in results for fragment in result["fragments"]
    )
    mark = 0
    for result in results:
        mark ^= result["mark"]
    return fragments, _Keys(sum(fragment.physical_rows for fragment in fragments), mark)


def _indexed_vectors(table: Table) -> tuple[tuple[str, ...], ...]:
    indexed = {
        number
        for base_index in base_indexes(table).values()
        if base_index.is_vector
        for part in base_index.segments
        for number in part.fields
    }

    def below(fields: Iterable[Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for field in fields:
            here = (*path, field.name())
            if field.id() in indexed:
                yield here
            yield from below(field.children(), here)

    return tuple(below(table.dataset.lance_schema.fields(), ()))


def _commit(table: Table, fragments: tuple[FragmentMetadata, ...], keys: _Keys, written: _Keys) -> int:
    files = Rewrite(fragments, (), (), ()).written_files()
    if written != keys:
        remove_files(table, files)
        difference = f"{keys.count} rows when its keys were read and {written.count} when they were written"
        if written.count == keys.count:
            difference = "other keys when its rows were written than when its keys were read"
        raise InvalidUsageError(
            f"The DataFrame gave {difference}.",
            remedy="Its source gives other rows each time it is evaluated: write it to files first, and load those.",
        )
    note = CommitNote("bulk_load")
    # Credentials may have expired while executors worked.
    table = replace(table, location=table.location.refreshed())
    with log_files_if_kept(table, files):
        return commit_files(table, lance.LanceOperation.Append(list(fragments)), files, {}, note)
