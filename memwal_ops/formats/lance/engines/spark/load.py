"""Bulk-load the rows of a DataFrame into the base table: new keys only, as one version, or nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from memwal_ops.core.spark.faults import between_stages, reported
from memwal_ops.core.spark.session import our_tasks
from memwal_ops.core.spark.stages import Stages, release
from memwal_ops.errors import DuplicateKeysError, InvalidUsageError
from memwal_ops.formats.lance.commit.commit import CommitNote, check_committable, check_takes_rows
from memwal_ops.formats.lance.engines.merge.api import MergePass
from memwal_ops.formats.lance.engines.merge.encoded_keys import key_code
from memwal_ops.formats.lance.engines.merge.passes import commit_files, open_generations
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, remove_files
from memwal_ops.formats.lance.engines.spark import tasks
from memwal_ops.formats.lance.engines.spark.fit import misfits, to_table
from memwal_ops.formats.lance.engines.spark.runner import log_files_if_kept, log_leftovers
from memwal_ops.formats.lance.files.blobs import written_schema
from memwal_ops.formats.lance.files.datasets import lance_options, open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame

    from memwal_ops.formats.lance.table import Table

_MARK = "__memwal_ops_mark"


@dataclass(frozen=True, slots=True)
class _Keys:
    """A checksum of a DataFrame's keys. ``mark`` is the XOR of their hashes: two evaluations must have the same."""

    count: int
    mark: int


def bulk_load(df: DataFrame, uri: str, *, storage_options: Mapping[str, str] | None = None) -> int:
    """Append the rows of ``df`` to the base table at ``uri`` as one new version.

    Columns are matched by name and cast to the table's types if that changes no value: lists to its
    vectors, doubles to its floats. Absent nullable columns are null. The rows are evaluated twice, so they are
    persisted in between; a source that gives other keys the second time is refused.

    Returns:
        The new version; the current one if ``df`` has no rows.

    Raises:
        InvalidUsageError: columns that the table does not have, or lacks; a type that has to be cast first; a
            value that the table's column cannot hold, such as NULL in a key.
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
    """Names of the DataFrame's columns in its order; refused if they are not the table's."""
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
    """The checksum of the rows' keys; refused unless every key is new and occurs once.

    Raises:
        DuplicateKeysError: keys that occur twice, or are in the table or an unmerged generation.
    """
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
        generations=tuple(one.sealed() for one in generations),
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
            f"{total[name]:,} {one if total[name] == 1 else many} {where}"
            for name, one, many, where in (
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
    fragments = tuple(FragmentMetadata.from_json(json.dumps(one)) for result in results for one in result["fragments"])
    mark = 0
    for result in results:
        mark ^= result["mark"]
    return fragments, _Keys(sum(fragment.physical_rows for fragment in fragments), mark)


def _indexed_vectors(table: Table) -> tuple[tuple[str, ...], ...]:
    """Paths of the columns that have a vector index."""
    indexed = {
        number
        for one in base_indexes(table).values()
        if one.is_vector
        for part in one.segments
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
    note = CommitNote.new("bulk_load")
    # Credentials may have expired while executors worked.
    table = replace(table, location=table.location.refreshed())
    with log_files_if_kept(table, files):
        return commit_files(table, lance.LanceOperation.Append(list(fragments)), files, {}, note)
