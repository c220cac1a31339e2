"""Find the rows that a migration has to write, write them, and compare all rows: on Spark.

Executors read fragments and clusters, each row with its place in the order of replay; per id the highest place of the
log wins, a delete as well as a row. The same tasks are evaluated again where rows are needed again: the objects of a
manifest do not change.

Memory: of an executor, one fragment or cluster, and Spark's own; of the driver, the manifest, ids to delete, and the
log where only that is applied. Ids of a log of at most ``_BROADCAST`` entries are sent to all executors, so that the
rows of segments need no shuffle.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from memwal_ops.core.anchors import Unguarded
from memwal_ops.errors import FragmentCorruptError
from memwal_ops.formats.zeppelin.backlog import read_fragment
from memwal_ops.formats.zeppelin.compaction import dimensions_of
from memwal_ops.formats.zeppelin.jobs import migrate_rows
from memwal_ops.formats.zeppelin.segments import Rows, SegmentReader
from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef, SegmentRef
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.row_sink import RowSink, SparkRows
    from memwal_ops.formats.zeppelin.namespace import Namespace

_ROWS_PER_TASK = 50_000
_TASKS_PER_PARTITION = 4
_BROADCAST = 200_000
_RAW = "id string, place bigint, vector binary, attributes string"
_DIGESTS = "id string, digest bigint"


class SparkMigration:
    """As :class:`memwal_ops.formats.zeppelin.jobs.migrate_rows.LocalMigration`, by executors."""

    def __init__(self, sink: RowSink, on_spark: SparkRows, context: RunContext) -> None:
        self._sink, self._on_spark, self._context = sink, on_spark, context
        self._kept: list[DataFrame] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):  # the session may be gone
            for frame in self._kept:
                frame.unpersist()

    def find(self, table: Namespace) -> migrate_rows.RowChanges | None:
        """See :class:`memwal_ops.formats.zeppelin.jobs.migrate_rows.LocalMigration`."""
        live = self._live(table)
        kinds, count, dimensions = self._kinds(table, live)
        fresh = self._sink.record is None
        if fresh and dimensions is None:
            return None
        columns = (
            migrate_rows.Columns.of(kinds, dimensions or 0)
            if fresh
            else migrate_rows.Columns(self._sink.schema).with_added(kinds)
        )
        if fresh or not any(row.num_rows for row in self._sink.rows([migrate_rows.ID])):
            loaded = migrate_rows.LoadedRows(self._on_spark, self._converted(live, columns), count)
            return migrate_rows.RowChanges(columns, count, count, [], loaded)
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        differing = self._both(live, columns).where("not same").persist()
        self._kept.append(differing)
        with self._on_spark.stage("compare", "compare the rows of the namespace with those of the table"):
            upserts = differing.where("wanted > 0").count()
            deletes = [
                row[migrate_rows.ID] for row in differing.where("wanted = 0").select(migrate_rows.ID).toLocalIterator()
            ]
        chosen = live.join(differing.where("wanted > 0").select(f.col(migrate_rows.ID)), migrate_rows.ID, "left_semi")
        return migrate_rows.RowChanges(
            columns, count, upserts, deletes, migrate_rows.StreamedRows(self._stream(chosen, columns), self._context)
        )

    def compare(self, table: Namespace, columns: migrate_rows.Columns) -> tuple[int, int, bool]:
        """See :class:`memwal_ops.formats.zeppelin.jobs.migrate_rows.LocalMigration`."""
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        both = self._both(self._live(table), columns)
        with self._on_spark.stage("prove", "compare all rows of the namespace with those of the table"):
            (total,) = both.agg(f.sum("wanted"), f.sum("found"), f.expr("count_if(not same)")).collect()
        return total[0] or 0, total[1] or 0, not total[2]

    def _live(self, table: Namespace) -> DataFrame:
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        work = _Work.of(table)
        session = self._on_spark.spark
        partitions = max(session.sparkContext.defaultParallelism, len(work.tasks) // _TASKS_PER_PARTITION)
        session.conf.set("spark.sql.shuffle.partitions", str(partitions))
        rows = self._mapped(work.tasks, work.rows, _RAW)
        over = [task for task in work.tasks if any(part.place > 0 for part in task)]
        newest = self._mapped(over, work.writes, "id string, place bigint")
        newest = newest.groupBy(migrate_rows.ID).agg(f.max("place").alias("newest"))
        if sum(part.entries for task in over for part in task if part.place) <= _BROADCAST:
            newest = f.broadcast(newest)
        return rows.join(newest, migrate_rows.ID, "left").where("newest is null or newest = place")

    def _mapped(
        self, tasks: Sequence[Sequence[_Part]], read: Callable[[_Part], Iterator[pa.RecordBatch]], schema: str
    ) -> DataFrame:
        def run(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in rows:
                for number in batch.column(0).to_pylist():
                    for part in tasks[number]:
                        yield from read(part)

        numbers = self._on_spark.spark.range(0, len(tasks), 1, max(1, len(tasks)))
        return numbers.mapInArrow(self._on_spark.task(run), schema)

    def _kinds(self, table: Namespace, live: DataFrame) -> tuple[migrate_rows.AttributeKinds, int, int | None]:

        def look(frames: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            kinds, count, widths = migrate_rows.AttributeKinds.empty(), 0, set()
            for batch in frames:
                rows = _rows(batch)
                kinds.add(rows)
                count += len(rows.ids)
                widths |= {rows.vectors.shape[1]} if rows.ids else set()
            text = json.dumps({"kinds": kinds.to_json(), "count": count, "widths": sorted(widths)})
            yield pa.RecordBatch.from_pydict({"found": [text]})

        with self._on_spark.stage("read", "read the types of all attributes"):
            results = live.mapInArrow(self._on_spark.task(look), "found string").collect()
        kinds, count, widths = migrate_rows.AttributeKinds.empty(), 0, set()
        for result in results:
            document = json.loads(result["found"])
            kinds.add_json(document["kinds"])
            count += document["count"]
            widths |= {*document["widths"]}
        if len(widths) > 1:
            raise FragmentCorruptError(f"Fragments have vectors of {sorted(widths)} dimensions.")
        return kinds, count, dimensions_of(table) or next(iter(widths), None)

    def _converted(self, live: DataFrame, columns: migrate_rows.Columns) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

        vector = pa.list_(pa.field("element", pa.float32()))  # Spark has no lists of a fixed size
        plain = pa.schema([
            pa.field(field.name, vector if field.name == migrate_rows.VECTOR else field.type, field.nullable)
            for field in columns.schema
        ])  # fmt: skip

        def convert(frames: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in frames:
                for converted in migrate_rows.batches(columns, _rows(batch)):
                    yield converted.cast(plain)

        return live.mapInArrow(self._on_spark.task(convert), from_arrow_schema(plain))

    def _both(self, live: DataFrame, columns: migrate_rows.Columns) -> DataFrame:
        """Per id how often it is ``wanted`` and ``found``, and whether both are the ``same`` one row."""
        from pyspark.sql import functions as f  # noqa: PLC0415 - an extra

        def wanted(frames: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return _digested(row for batch in frames for row in migrate_rows.batches(columns, _rows(batch)))

        ours = live.mapInArrow(self._on_spark.task(wanted), _DIGESTS).withColumnRenamed("digest", "w")
        theirs = self._on_spark.map_rows(_digested, _DIGESTS).withColumnRenamed("digest", "f")
        both = ours.unionByName(theirs, allowMissingColumns=True).groupBy(migrate_rows.ID)
        same = f.expr("count(w) = 1 and count(f) = 1 and max(w) = max(f)").alias("same")
        return both.agg(f.count("w").alias("wanted"), f.count("f").alias("found"), same)

    def _stream(self, live: DataFrame, columns: migrate_rows.Columns) -> Callable[[], Iterator[pa.RecordBatch]]:

        def read() -> Iterator[pa.RecordBatch]:
            with self._on_spark.stage("upsert", "read the rows that differ"):
                for row in live.mapInArrow(self._on_spark.task(_packed), "batch binary").toLocalIterator():
                    with pa.ipc.open_stream(bytes(row["batch"])) as reader:
                        for batch in reader:
                            yield from migrate_rows.batches(columns, _rows(batch))

        return read


@dataclass(frozen=True)
class _Part:
    """A unit that is read at once: a fragment, some clusters, or, with neither, the pending ids of the manifest.

    ``place`` is in the order of replay: segments, then fragments, then pending ids, which no query returns.
    """

    place: int
    entries: int
    of: FragmentRef | SegmentRef | None = None
    clusters: range = range(0)


@dataclass(frozen=True)
class _Work:
    """The input of tasks that read a namespace: ``table`` is without what cannot be sent to an executor."""

    table: Namespace
    dimensions: int | None
    tasks: list[list[_Part]]

    @classmethod
    def of(cls, table: Namespace) -> _Work:
        """All parts of one manifest."""
        manifest, parts = table.manifest, []
        for place, segment in enumerate(manifest.segments):
            SegmentReader(table.store, segment)  # refuses what cannot be read
            step = max(1, segment.clusters * _ROWS_PER_TASK // max(1, segment.vectors))
            for start in range(0, segment.clusters, step):
                clusters = range(start, min(start + step, segment.clusters))
                parts.append(_Part(place, segment.vectors * len(clusters) // segment.clusters, segment, clusters))
        place = len(manifest.segments)
        parts += [
            _Part(place + 1 + number, ref.vectors + ref.deletes, ref) for number, ref in enumerate(manifest.fragments)
        ]
        if manifest.hidden:
            parts.append(_Part(place + 1 + len(manifest.fragments), len(manifest.hidden)))
        tasks: list[list[_Part]] = []
        filled = _ROWS_PER_TASK
        for part in parts:
            if filled + part.entries > _ROWS_PER_TASK:
                tasks.append([])
                filled = 0
            tasks[-1].append(part)
            filled += part.entries
        location = table.location.refreshed()
        sealed = replace(table, location=location, store=None, data=b"", guard=Unguarded())  # type: ignore[arg-type]
        return cls(sealed, dimensions_of(table), tasks)

    def rows(self, part: _Part) -> Iterator[pa.RecordBatch]:
        """The rows of a part, in the schema ``_RAW``."""
        if isinstance(part.of, FragmentRef):
            fragment = read_fragment(self._open(), part.of, self.dimensions)
            # Of two rows of an id the later one counts.
            places = np.array([*{name: at for at, name in enumerate(fragment.ids)}.values()], np.intp)
            yield from _raw(Rows(fragment.ids, fragment.values, fragment.attributes).take(places), part.place)
        elif part.of is not None:
            reader = SegmentReader(self._open().store, part.of)
            for number in part.clusters:
                yield from _raw(reader.cluster(number), part.place)

    def writes(self, part: _Part) -> Iterator[pa.RecordBatch]:
        """The ids that a part writes or deletes, with its place; those of the first segment override nothing."""
        ids: Iterable[str] = ()
        if part.of is None:
            ids = self.table.manifest.hidden
        elif isinstance(part.of, FragmentRef):
            fragment = read_fragment(self._open(), part.of, self.dimensions)
            ids = {*fragment.ids, *fragment.deletes}
        elif part.place:
            reader = SegmentReader(self._open().store, part.of)
            ids = (name for number in part.clusters for name in reader.vectors(number)[0])
        names = pa.array(ids, pa.string())
        yield pa.RecordBatch.from_pydict({migrate_rows.ID: names, "place": np.full(len(names), part.place, np.int64)})

    def _open(self) -> Namespace:
        return replace(self.table, store=open_store(self.table.location))


def _raw(rows: Rows, place: int) -> Iterator[pa.RecordBatch]:
    if rows.ids:
        texts = [None if attributes is None else json.dumps(attributes) for attributes in rows.attributes]
        vectors = [row.tobytes() for row in np.ascontiguousarray(rows.vectors, np.float32)]
        yield pa.RecordBatch.from_pydict(
            {
                migrate_rows.ID: pa.array(rows.ids, pa.string()),
                "place": np.full(len(rows.ids), place, np.int64),
                "vector": pa.array(vectors, pa.binary()),
                "attributes": pa.array(texts, pa.string()),
            }
        )


def _rows(batch: pa.RecordBatch) -> Rows:
    if not batch.num_rows:
        return Rows([], np.zeros((0, 0), np.float32), [])
    vectors = [np.frombuffer(data, np.float32) for data in batch.column("vector").to_pylist()]
    widths = sorted({len(vector) for vector in vectors})
    if len(widths) > 1:
        raise FragmentCorruptError(f"Fragments have vectors of {widths} dimensions.")
    texts = batch.column("attributes").to_pylist()
    attributes = [None if text is None else json.loads(text) for text in texts]
    return Rows(batch.column(migrate_rows.ID).to_pylist(), np.stack(vectors), attributes)


def _digested(frames: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in frames:
        yield pa.RecordBatch.from_pydict(
            {migrate_rows.ID: batch.column(migrate_rows.ID), "digest": migrate_rows.digests(batch)[1].view(np.int64)}
        )


def _packed(frames: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in frames:
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"batch": pa.array([buffer.getvalue().to_pybytes()], pa.binary())})
