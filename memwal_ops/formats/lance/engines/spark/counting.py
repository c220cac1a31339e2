"""Count values that several rows of a table have, by a shuffle: neither the driver nor a task holds all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.core.spark.division import in_parts, part_numbers
from memwal_ops.core.spark.faults import reported
from memwal_ops.formats.lance.engines.merge.encoded_keys import key_code
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memwal_ops.core.spark.counters import Counters
    from memwal_ops.core.spark.runner import Stage
    from memwal_ops.formats.lance.engines.spark.runner import TaskRunner
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.locations import Location

_ROWS_PER_PARTITION = 2_000_000
_MOST_ROWS = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadKeys:
    """What is read of each row.

    Attributes:
        scan: arguments of pylance's scanner.
        spark_type: of the values.
        values: from rows to a value of each that is equal where it should be.
        marks: from rows to a number of each that is counted, too.
    """

    scan: Mapping[str, Any]
    spark_type: str
    values: Callable[[pa.Table], pa.Array]
    marks: Callable[[pa.Table], pa.Array]


def keys_of(schema: pa.Schema, columns: Sequence[str]) -> ReadKeys:
    """The values of key columns; NULLs are counted."""
    code = key_code(schema, columns)

    def nulls(rows: pa.Table) -> pa.Array:
        return reduce(pc.add, (column.is_null().cast(pa.int32()) for column in rows.select([*columns]).columns))

    return ReadKeys({"columns": [*columns]}, code.spark_type, lambda rows: code.encode(rows.select([*columns])), nulls)


def row_ids_of(next_row_id: int) -> ReadKeys:
    """Stable row ids; those from the next one on are counted."""
    last = pa.scalar(next_row_id, pa.uint64())
    return ReadKeys(
        {"columns": [], "with_row_id": True},
        "bigint",
        lambda rows: rows["_rowid"].combine_chunks().view(pa.int64()),
        lambda rows: pc.greater_equal(rows["_rowid"], last).cast(pa.int32()),
    )


def count_repeated(
    runner: TaskRunner, table: Table, stage: Stage, read: ReadKeys
) -> tuple[tuple[int, int, int], Mapping[str, float]]:
    """Values of several rows, rows that have these, and the sum of marks; and figures of the stage.

    Raises:
        SparkUnavailableError: PySpark, pandas or Java is missing, here or on the executors.
        SparkJobFailedError: Spark failed.
    """
    fragments = table.manifest.manifest.fragments
    sizes = [int(one.physical_rows) or 1 for one in fragments]
    if not sizes:
        return (0, 0, 0), {}
    parts = in_parts([one.id for one in fragments], part_numbers(sizes, runner.cores, _MOST_ROWS))
    with runner.staged(table, stage) as (spark, counters, figures):
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        own = spark.newSession()  # the same application, with settings of its own
        own.conf.set("spark.sql.shuffle.partitions", str(max(runner.cores, -(-sum(sizes) // _ROWS_PER_PARTITION))))
        task = _task(table.location.refreshed(), table.version, parts, read, counters)
        rows = own.range(0, len(parts), 1, len(parts)).mapInArrow(task, f"value {read.spark_type}, mark int")
        counts = rows.groupBy("value").agg(f.count("*").alias("rows"), f.sum("mark").alias("marks"))
        several = f.col("rows") > 1
        [found] = counts.agg(
            f.count_if(several).alias("values"),
            f.sum(f.when(several, f.col("rows")).otherwise(0)).alias("rows"),
            f.sum("marks").alias("marks"),
        ).collect()
    return (int(found["values"] or 0), int(found["rows"] or 0), int(found["marks"] or 0)), figures


def _task(
    location: Location, version: int, parts: Sequence[Sequence[int]], read: ReadKeys, counters: Counters
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read_values(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported(), lance_errors("read the keys of", location.uri):
            dataset = open_dataset(location, version=version)
            for number in (one for batch in batches for one in batch.column(0).to_pylist()):
                fragments = [one for one in map(dataset.get_fragment, parts[number]) if one is not None]
                for batch in dataset.scanner(fragments=fragments, **read.scan).to_batches():
                    rows = pa.Table.from_batches([batch])
                    marks = read.marks(rows).combine_chunks()
                    counters.add(rows.num_rows, rows.nbytes)
                    yield pa.RecordBatch.from_pydict({"value": read.values(rows), "mark": marks})

    return read_values
