"""Assign rows to centroids and write clusters by tasks of Spark; the driver trains, finishes and publishes.

* **assign**, of a training: each task reads some clusters of the old segment, or has rows of the log, and assigns them
  to the new centroids. A shuffle brings the rows of a cluster together, in the order in which one process reads them;
  each task behind it writes some clusters.
* **write**, with existing centroids: each task reads some clusters, adds new rows of the log, and writes them.

So the objects are those of a local run, byte by byte, and a second attempt of a task finds what the first wrote. No
manifest lists them before the driver publishes: if it does not, they are an orphan segment, which gc deletes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.core.anchors import Unguarded
from memwal_ops.core.spark.runner import Count, SparkStage, TaskRunner
from memwal_ops.core.spark.stages import in_parts, part_numbers, reported
from memwal_ops.formats.zeppelin import segments
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.wire.manifest import SegmentRef
    from memwal_ops.formats.zeppelin.wire.segment import Quantizer

    Matrix = NDArray[np.float32]
    # The new cluster and the place in the order of all rows; packed rows.
    Record = tuple[tuple[int, int], bytes]

_TASKS_PER_CORE = 3
_BYTES_PER_TASK = 256 << 20
_ASSIGN = SparkStage("assign", "assign rows to centroids, write clusters", "writing clusters")
_WRITE = SparkStage("write", "write clusters with the rows of the log", "writing clusters")


@dataclass(frozen=True)
class _Batch:
    """Rows that are read at once: ``rows`` of the log, or a cluster of the old segment, with all that is added to it.

    ``place`` is in the order in which one process reads them, ``size`` in bytes.
    """

    place: int
    size: int
    rows: segments.Rows
    cluster: int | None = None


@dataclass(frozen=True)
class SparkClusters:
    """What the tasks of one pass share.

    Attributes:
        table: the namespace, without what cannot be sent to an executor.
        old: the segment that is replaced, if there is one.
        superseded: ids whose rows in it are replaced or deleted.
    """

    table: Namespace
    old: SegmentRef | None
    superseded: frozenset[str]
    new: SegmentRef
    centroids: Matrix
    quantizer: Quantizer | None
    metric: str

    @classmethod
    def of(
        cls,
        table: Namespace,
        old: SegmentRef | None,
        superseded: frozenset[str],
        writer: segments.SegmentWriter,
        metric: str,
    ) -> SparkClusters:
        """For the segment of a writer."""
        sealed = replace(table, location=table.location.refreshed(), store=None, data=b"", guard=Unguarded())  # type: ignore[arg-type]
        return cls(sealed, old, superseded, writer.segment, writer.centroids, writer.quantizer, metric)

    def extend(
        self, runner: TaskRunner, reader: segments.SegmentReader, added: Mapping[int, segments.Rows]
    ) -> Iterator[segments.Written]:
        """Write the clusters of the old segment, each with the rows that are added to it."""
        batches = self._batches(reader, 0, added)
        results, _ = runner.run(self.table, _WRITE, _divided(batches, runner.cores), self._write)
        return iter(results)

    def train(
        self, runner: TaskRunner, log: Sequence[segments.Rows], reader: segments.SegmentReader | None, sample: Matrix
    ) -> Iterator[segments.Written]:
        """Assign all rows to the centroids, and write their clusters. ``sample`` is of all rows, for the division."""
        batches = [_Batch(place, rows.bytes, rows) for place, rows in enumerate(log)]
        if reader is not None:
            batches += self._batches(reader, len(batches), {})
        total = sum(batch.size for batch in batches)
        labels = segments.nearest(sample, self.centroids, self.metric)
        sizes = np.bincount(labels, minlength=len(self.centroids)) * (total / max(1, len(sample)))
        numbers = part_numbers(sizes.astype(int).tolist(), runner.cores * _TASKS_PER_CORE, _BYTES_PER_TASK)
        clusters = in_parts(range(len(self.centroids)), numbers)
        parts = _divided(batches, runner.cores)
        with runner.staged(self.table, _ASSIGN) as (spark, counters, _):
            rows = spark.sparkContext.parallelize(parts, max(1, len(parts)))
            assigned = rows.mapPartitions(self._assign)
            grouped = assigned.repartitionAndSortWithinPartitions(len(clusters), lambda key: numbers[key[0]])

            def write(part: int, records: Iterable[Record]) -> Iterator[segments.Written]:
                with reported():
                    written = self._write_sorted(clusters[part], records)
                    counters.add(sum(written[0]), sum(size for size, _ in written[1].values()))
                    yield written

            results = grouped.mapPartitionsWithIndex(write).collect()
        return iter(results)

    def _batches(self, reader: segments.SegmentReader, first: int, added: Mapping[int, segments.Rows]) -> list[_Batch]:
        none = segments.Rows([], np.zeros((0, self.centroids.shape[1]), np.float32), [])
        rows = [added.get(number, none) for number in range(reader.segment.clusters)]
        return [
            _Batch(first + number, reader.bytes_of(number, self.centroids.shape[1]) + more.bytes, more, number)
            for number, more in enumerate(rows)
        ]

    def _assign(self, parts: Iterable[Sequence[_Batch]]) -> Iterator[Record]:
        with reported():
            reader = self._reader()
            for batch in chain.from_iterable(parts):
                rows = batch.rows if batch.cluster is None else self._live(reader, batch.cluster)
                for cluster, members in segments.by_cluster(
                    rows, segments.nearest(rows.vectors, self.centroids, self.metric)
                ):
                    yield (cluster, batch.place), segments.pack(members)

    def _write_sorted(self, clusters: Sequence[int], records: Iterable[Record]) -> segments.Written:
        writer = self._writer(clusters[0])
        groups = groupby(records, key=lambda record: record[0][0])
        cluster, group = next(groups, (None, iter(())))
        for number in clusters:
            rows = []
            if number == cluster:
                rows = [segments.unpack(data) for _, data in group]
                cluster, group = next(groups, (None, iter(())))
            writer.add(segments.joined(rows, self.centroids.shape[1]))
        return writer.written()

    def _write(self, part: Sequence[_Batch], count: Count) -> segments.Written:
        writer, reader = self._writer(part[0].place), self._reader()
        for batch in part:
            rows = segments.joined([self._live(reader, batch.place), batch.rows], self.centroids.shape[1])
            writer.add(rows)
            count(len(rows.ids), batch.size)
        return writer.written()

    def _live(self, reader: segments.SegmentReader | None, cluster: int) -> segments.Rows:
        assert reader is not None  # noqa: S101 - without an old segment, no batch has a cluster
        return reader.cluster(cluster).without(self.superseded)

    def _reader(self) -> segments.SegmentReader | None:
        return None if self.old is None else segments.SegmentReader(open_store(self.table.location), self.old)

    def _writer(self, first: int) -> segments.SegmentWriter:
        return segments.SegmentWriter(open_store(self.table.location), self.new, self.centroids, self.quantizer, first)


def _divided(batches: Sequence[_Batch], cores: int) -> list[list[_Batch]]:
    return in_parts(batches, part_numbers([batch.size for batch in batches], cores * _TASKS_PER_CORE, _BYTES_PER_TASK))
