"""Rows of a DataFrame into the base table: new keys only, in one version, or nothing."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from memwal_ops.core.backlog import read_backlog
from memwal_ops.core.commit import CommitLostError, CommitNote, check_committable, commit_strict
from memwal_ops.core.datasets import lance_options, open_dataset
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.table import open_table
from memwal_ops.engines.api import MergePass
from memwal_ops.engines.passes import open_generations
from memwal_ops.engines.rewrite import Rewrite
from memwal_ops.engines.spark import tasks
from memwal_ops.engines.spark.faults import reported
from memwal_ops.engines.spark.keys import key_code
from memwal_ops.engines.spark.session import check_executors, quiet
from memwal_ops.engines.spark.stages import Stages
from memwal_ops.engines.spark.types import spark_type
from memwal_ops.errors import DuplicateKeysError, InvalidUsageError
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame

    from memwal_ops.core.table import Table


def bulk_load(df: DataFrame, uri: str, *, storage_options: Mapping[str, str] | None = None) -> int:
    """Append the rows of ``df`` to the base table at ``uri`` as one new version.

    Columns go by name and are cast to the table's types: lists to its vectors, for one. Absent nullable
    columns are null. The rows are read twice, so they are kept between; a source that gives other rows
    the second time is refused by the check of the count.

    Returns:
        The new version; the present one where ``df`` has no rows.

    Raises:
        InvalidUsageError: columns that the table does not have, or lacks.
        DuplicateKeysError: a key twice in ``df``, or already in the table or an unmerged generation.
        CommitLostError: another writer was first; nothing was published, run it again.
    """
    table = open_table(uri, storage_options)
    check_committable(table)
    probe_conditional_writes(table.store)
    with quiet():
        spark = df.sparkSession
        check_executors(spark)
        stages = Stages(spark.sparkContext, table.location.uri)
        rows = df.select(*_columns(df, table)).persist()
        try:
            with stages.stage("check", "compare the keys that are to be loaded with those of the table"):
                count = _refuse_known_keys(rows, table)
            if not count:
                return table.version
            with stages.stage("load", "write base fragments"):
                fragments = _write(rows, table)
        finally:
            rows.unpersist()
    return _commit(table, fragments, count)


def _columns(df: DataFrame, table: Table) -> list[str]:
    schema: pa.Schema = table.dataset.schema
    unknown = sorted(set(df.columns) - set(schema.names))
    missing = sorted(field.name for field in schema if not field.nullable and field.name not in df.columns)
    if unknown or missing or len(set(df.columns)) != len(df.columns):
        raise InvalidUsageError(
            f"The columns of the DataFrame do not fit {table.location.uri}: not in the table {unknown}, "
            f"required and absent {missing}, or one twice."
        )
    return [f"`{name}`" for name in schema.names if name in df.columns]


def _refuse_known_keys(rows: DataFrame, table: Table) -> int:
    """The number of rows, where every key is new and stands once."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

    pending = read_backlog(table)
    if pending.blocked:
        raise pending.blocked[0].error
    generations = open_generations(table, MergePass(pending.pending, tasks.TASK_BYTES)) if pending.pending else []
    code = key_code(table.dataset.schema, table.primary_key)
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
    new = rows.select(*(f"`{name}`" for name in table.primary_key)).mapInArrow(
        _encoder(work, table.dataset.schema), keys
    )
    fragments = [fragment.fragment_id for fragment in table.dataset.get_fragments()]
    known = session.range(len(fragments)).mapInArrow(tasks.base_reader(work, fragments), f"{keys}, address bigint")
    known = known.select("key")
    if generations:
        flushed = session.range(len(generations)).mapInArrow(tasks.key_reader(work), f"{keys}, locator bigint")
        known = known.union(flushed.select("key"))
    counted = new.groupBy("key").agg(f.count("*").alias("rows"))
    marked = counted.join(known.distinct().withColumn("known", f.lit(1)).hint("shuffle_hash"), "key", "left")
    (total,) = marked.agg(
        f.sum("rows").alias("rows"), f.count_if(f.col("rows") > 1).alias("twice"), f.count("known").alias("known")
    ).collect()
    if total["twice"] or total["known"]:
        found = [
            f"{total[name]:,} {words}"
            for name, words in (
                ("twice", "stand several times in the DataFrame"),
                ("known", "are in the table already"),
            )
            if total[name]
        ]
        raise DuplicateKeysError(
            f"Of the keys, {' and '.join(found)}.",
            remedy="Load new keys only; updates go through a region's writer.",
        )
    return int(total["rows"] or 0)


def _encoder(work: tasks.Pass, schema: pa.Schema) -> Any:
    wanted = pa.schema([schema.field(name) for name in work.primary_key])

    def encode_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            for batch in batches:
                yield pa.RecordBatch.from_pydict(
                    {"key": work.code.encode(pa.Table.from_batches([_cast(batch, wanted)]))}
                )

    return encode_keys


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch in the table's types, in its order; absent columns null."""
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        plain = batch.column(field.name).cast(spark_type(field.type))
        columns.append(plain if plain.type.equals(field.type) else plain.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _write(rows: DataFrame, table: Table) -> tuple[FragmentMetadata, ...]:
    location, version, schema = table.location, table.version, table.dataset.schema

    def write_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported():
            incoming = (_cast(batch, schema) for batch in batches if batch.num_rows)
            first = next(incoming, None)
            if first is None:
                return
            with lance_errors("open", location.uri):
                base = open_dataset(location, version=version)

            def all_rows() -> Iterator[pa.RecordBatch]:
                yield first
                yield from incoming

            with lance_errors("write to", location.uri):
                written = write_fragments(
                    pa.RecordBatchReader.from_batches(schema, all_rows()),
                    base,
                    mode="append",
                    data_storage_version=base.data_storage_version,
                    storage_options=lance_options(location),
                )
            assert isinstance(written, list)  # noqa: S101 - narrows pylance's union
            yield pa.RecordBatch.from_pydict({"result": [json.dumps(fragment.to_json()) for fragment in written]})

    found = rows.mapInArrow(write_rows, "result string").collect()
    return tuple(FragmentMetadata.from_json(row["result"]) for row in found)


def _commit(table: Table, fragments: tuple[FragmentMetadata, ...], count: int) -> int:
    files = Rewrite(fragments, (), (), ()).written_files()
    written = sum(fragment.physical_rows for fragment in fragments)
    if written != count:
        table.store.delete_many(files)
        raise InvalidUsageError(
            f"The DataFrame gave {count} rows when its keys were read and {written} when they were written.",
            remedy="Its source gives other rows each time it is read: write it somewhere first.",
        )
    note = CommitNote(job="bulk_load", run_id=str(uuid.uuid4()), release=__version__)
    try:
        return commit_strict(table, lance.LanceOperation.Append(list(fragments)), {}, note)
    except CommitLostError as error:
        if error.files_are_ours:
            table.store.delete_many(files)
        raise
