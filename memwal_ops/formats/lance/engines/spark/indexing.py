"""Build indexes, execute compactions and count repeated values on Spark.

An index is built by tasks, each a segment of some fragments, and one more task that makes one segment of these:

* **train**: one task trains the centroids, and the codebook of a product quantizer, by a sample of the whole table.
* **segments**: each task indexes its fragments. All get the same centroids, codebook and rotation, as segments with
  different ones cannot be merged.
* **merge**: one task merges the segments into one, which the driver publishes.

Tasks return entries of the manifest; what they index passes neither the driver nor a shuffle.

Of a compaction, executors rewrite, and the driver commits. Tasks and results are pickled by pylance, in the form of its
release; ``check_executors`` refuses another one. No row passes through Spark.

Values that several rows of a table have are counted by a shuffle: neither the driver nor a task holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from lance.indices import IndicesBuilder
from lance.lance import indices as trained_models

from memwal_ops.core.spark.runner import Count, SparkStage
from memwal_ops.core.spark.stages import Counters, in_parts, part_numbers, reported
from memwal_ops.formats.lance.commit.index_build import IndexBuild, discard, from_pylance, to_pylance
from memwal_ops.formats.lance.engines.merge.locate import key_code
from memwal_ops.formats.lance.engines.spark.running import LoggingTaskRunner
from memwal_ops.formats.lance.files.datasets import lance_errors, lance_options, open_dataset
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import lance
    from lance.dataset import Index
    from lance.optimize import CompactionTask, RewriteResult

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.engines.merge.rewrite import Figures, IndexParts
    from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.locations import Location


# Rows that pylance samples for each centroid, and for each code.
_SAMPLE_RATE = 256


class SparkBuilder(LoggingTaskRunner):
    """Builds indexes by tasks. Arguments as of :class:`LoggingTaskRunner`.

    Attributes:
        least_bytes: data files of that size are one part, which one process indexes as fast as several.
        most_bytes: a part of several fragments is not larger, as its task may start again.
    """

    least_bytes = 64 << 20
    most_bytes = 16 << 30

    def __init__(self, master: str | None, context: RunContext) -> None:
        super().__init__(master, context, "memwal-ops catchup")

    def build(self, table: Table, name: str, parts: IndexParts, figures: Figures) -> IndexBuild:
        """The segment, not published, and what it replaces; ``figures`` get those of each stage.

        Raises ``SparkUnavailableError``: PySpark, pandas or Java is missing, here or on the executors;
        ``SparkJobFailedError``.
        """
        work = _Work(table.location.refreshed(), table.version, name, parts.arguments)
        groups = self._groups(parts)
        if parts.trained and len(groups) > 1:
            stage = SparkStage("train", f"train {name}", f"training {name}")
            [model], figures["train"] = self.run(table, stage, [None], work.train)
            if model is None:
                get_logger(__name__).info("index_not_divided", index=name, because="too few rows to train by a sample")
                groups = [[*parts.sizes]]
            else:
                work = replace(work, arguments=parts.arguments.with_options(model))
        stage = SparkStage("segments", f"index fragments for {name}", f"indexing {name}")
        task = work.segment if len(groups) > 1 else work.whole
        written, figures["segments"] = self.run(table, stage, groups, task)
        made = IndexBuild(tuple(map(table_pb2.IndexMetadata.FromString, written)), parts.replaced)
        if len(written) == 1:
            return made
        try:
            stage = SparkStage("merge", f"merge segments of {name}", f"merging segments of {name}")
            [merged], figures["merge"] = self.run(table, stage, [written], work.merge)
        finally:
            discard(table, made)
        return replace(made, added=(table_pb2.IndexMetadata.FromString(merged),))

    def _groups(self, parts: IndexParts) -> list[list[int]]:
        fragments, sizes = [*parts.sizes], [*parts.sizes.values()]
        if not parts.divisible:
            return [fragments]
        wanted = min(self.cores, -(-parts.bytes // self.least_bytes))
        return in_parts(fragments, part_numbers(sizes, wanted, self.most_bytes))


@dataclass(frozen=True, slots=True)
class _Work:
    """What the tasks of an index share. Sent to executors in the closure of Spark's tasks."""

    location: Location
    version: int
    name: str
    arguments: IndexArguments

    @property
    def train(self) -> Callable[[None, Count], Mapping[str, Any] | None]:
        """A task that trains a model: arguments of pylance's call; None: there are too few rows."""
        return lambda _, count: _trained(self, count)

    @property
    def segment(self) -> Callable[[Sequence[int], Count], bytes]:
        """A task that writes a segment of some fragments."""
        return lambda fragments, count: _written(self, self.arguments.segment, fragments, count)

    @property
    def whole(self) -> Callable[[Sequence[int], Count], bytes]:
        """A task that writes the one segment of all fragments, which is not merged with others."""
        return lambda fragments, count: _written(self, self.arguments.whole, fragments, count)

    @property
    def merge(self) -> Callable[[Sequence[bytes], Count], bytes]:
        return lambda entries, count: _merged(self, entries, count)

    def open(self) -> lance.LanceDataset:
        with lance_errors("open", self.location.uri):
            return open_dataset(self.location, version=self.version)


def _trained(work: _Work, count: Count) -> Mapping[str, Any] | None:
    dataset, options = work.open(), work.arguments.options
    rows = int(dataset.count_rows())
    partitions, bits = options["num_partitions"], options.get("num_bits", 8)
    model: dict[str, Any] = {}
    try:
        with lance_errors("train index", work.name):
            builder = IndicesBuilder(dataset, work.arguments.column)
            rate = min(_SAMPLE_RATE, rows // partitions)
            centroids = builder.train_ivf(partitions, distance_type=options["metric"], sample_rate=rate)
            model["ivf_centroids"] = centroids.centroids
            if work.arguments.kind.endswith("PQ"):
                rate = min(_SAMPLE_RATE, rows >> bits)
                codes = builder.train_pq(centroids, options["num_sub_vectors"], sample_rate=rate, num_bits=bits)
                model["pq_codebook"] = codes.codebook
            elif work.arguments.kind.endswith("RQ"):
                model["rabitq_model"] = trained_models.build_rq_model(builder.dimension, bits)
    except (ValueError, RuntimeError) as error:
        get_logger(__name__).info("index_not_trained", index=work.name, error=str(error))
        return None
    count(rows, 0)
    return model


def _written(work: _Work, write: Callable[..., Index], fragments: Sequence[int], count: Count) -> bytes:
    dataset = work.open()
    with lance_errors("build index", work.name):
        index = write(dataset, work.name, fragments, lance_options(work.location))
    return _counted(from_pylance(index), dataset, fragments, count)


def _merged(work: _Work, entries: Sequence[bytes], count: Count) -> bytes:
    dataset = work.open()
    segments = [to_pylance(table_pb2.IndexMetadata.FromString(entry)) for entry in entries]
    with lance_errors("merge segments of index", work.name):
        index = dataset.merge_existing_index_segments(segments)
    return _counted(from_pylance(index), dataset, sorted(index.fragment_ids), count)


def _counted(
    entry: table_pb2.IndexMetadata, dataset: lance.LanceDataset, fragments: Sequence[int], count: Count
) -> bytes:
    opened = (dataset.get_fragment(fragment) for fragment in fragments)
    rows = sum(fragment.physical_rows for fragment in opened if fragment is not None)
    count(rows, sum(file.size_bytes for file in entry.files))
    return entry.SerializeToString()


_REWRITE = SparkStage("rewrite", "rewrite groups of fragments", "rewriting")


class SparkExecutor(LoggingTaskRunner):
    """One Spark task for each task of the compaction. Arguments as of :class:`LoggingTaskRunner`."""

    name = "spark"
    rows_per_commit = 64 << 20

    def __init__(self, master: str | None, context: RunContext) -> None:
        super().__init__(master, context, "memwal-ops compact")

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """See :class:`memwal_ops.formats.lance.jobs.compact.job.TaskExecutor`; raises as a build."""
        work = _rewriter(table.location.refreshed(), int(dataset.version))
        results, _ = self.run(table, _REWRITE, tasks, work)
        yield from results


def _rewriter(location: Location, version: int) -> Callable[[CompactionTask, Count], RewriteResult]:
    def rewrite(task: CompactionTask, count: Count) -> RewriteResult:
        with lance_errors("write compacted fragments of", location.uri):
            result = task.execute(open_dataset(location, version=version))
        files = [file for fragment in result.new_fragments for file in fragment.files]
        rows = sum(fragment.physical_rows for fragment in result.new_fragments)
        count(rows, sum(file.file_size_bytes or 0 for file in files))
        return result

    return rewrite


_ROWS_PER_PARTITION = 2_000_000
_MOST_ROWS = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadKeys:
    """What is read of each row.

    ``scan``: arguments of pylance's scanner. ``spark_type``: of the values. ``values``: from rows to a value of each
    that is equal where it should be. ``marks``: from rows to a number of each that is counted, too.
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
    runner: LoggingTaskRunner, table: Table, stage: SparkStage, read: ReadKeys
) -> tuple[tuple[int, int, int], Mapping[str, float]]:
    """Values of several rows, rows that have these, and the sum of marks; and figures of the stage.

    Raises as :meth:`SparkBuilder.build`.
    """
    fragments = table.manifest.manifest.fragments
    sizes = [int(fragment.physical_rows) or 1 for fragment in fragments]
    if not sizes:
        return (0, 0, 0), {}
    parts = in_parts([fragment.id for fragment in fragments], part_numbers(sizes, runner.cores, _MOST_ROWS))
    with runner.staged(table, stage) as (spark, counters, figures):
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        own = spark.newSession()  # the same application, with settings of its own
        own.conf.set("spark.sql.shuffle.partitions", str(max(runner.cores, -(-sum(sizes) // _ROWS_PER_PARTITION))))
        task = _task(table.location.refreshed(), table.version, parts, read, counters)
        rows = own.range(0, len(parts), 1, len(parts)).mapInArrow(task, f"value {read.spark_type}, mark int")
        counts = rows.groupBy("value").agg(f.count("*").alias("rows"), f.sum("mark").alias("marks"))
        several = f.col("rows") > 1
        [totals] = counts.agg(
            f.count_if(several).alias("values"),
            f.sum(f.when(several, f.col("rows")).otherwise(0)).alias("rows"),
            f.sum("marks").alias("marks"),
        ).collect()
    return (int(totals["values"] or 0), int(totals["rows"] or 0), int(totals["marks"] or 0)), figures


def _task(
    location: Location, version: int, parts: Sequence[Sequence[int]], read: ReadKeys, counters: Counters
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read_values(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported(), lance_errors("read the keys of", location.uri):
            dataset = open_dataset(location, version=version)
            for number in (value for batch in batches for value in batch.column(0).to_pylist()):
                fragments = [fragment for fragment in map(dataset.get_fragment, parts[number]) if fragment is not None]
                for batch in dataset.scanner(fragments=fragments, **read.scan).to_batches():
                    rows = pa.Table.from_batches([batch])
                    marks = read.marks(rows).combine_chunks()
                    counters.add(rows.num_rows, rows.nbytes)
                    yield pa.RecordBatch.from_pydict({"value": read.values(rows), "mark": marks})

    return read_values
