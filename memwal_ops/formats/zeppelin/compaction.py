"""Compact fragments and segments into one new segment and one manifest (S4-025 to S4-036).

Memory: the rows of the pass, bounded by ``max_bytes``, one decoded fragment, and about six times the largest cluster
while it is written; a training also needs memory for a sample, and groups rows by cluster in local files if they
exceed the budget. The ids of the log are in memory, those of segments only where there are several.
"""

from __future__ import annotations

import json
import struct
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.zeppelin.backlog import BlockedPart, read_fragments
from memwal_ops.formats.zeppelin.segments import (
    SAMPLES_PER_CLUSTER,
    Rows,
    Sample,
    SegmentReader,
    SegmentWriter,
    Training,
    by_cluster,
    clusters_for,
    create_object,
    imbalance,
    joined,
    make_quantizer,
    nearest,
    outgrown,
    pack,
    read_training,
    too_imbalanced,
    train,
    training_bytes,
    training_path,
    unpack,
)
from memwal_ops.formats.zeppelin.wire import new_ulid
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI, Attributes, Fragment
from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef, SegmentRef, timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.spark.runner import TaskRunner
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.spark import SparkClusters
    from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions

    Matrix = NDArray[np.float32]


# Rows of the log that are copied at once, while all of them are in memory.
_SLICE = 8192


@dataclass
class Inputs:
    """The log of a pass or a query: the newest write of every id in it.

    Attributes:
        table: the manifest at which it was read, with our token in it.
        fragments: exactly the fragments that were read.
        rows: the newest upserts, of ids that are not hidden; ``contested``: those of hidden ids.
        deleted: ids whose newest write is a delete.
        hidden: ids that no query returns (wiki ``pending_deletes``).
        upserts: all upserts that were read.
        blocked: the first fragment that cannot be used.
    """

    table: Namespace
    fragments: tuple[FragmentRef, ...]
    rows: Rows
    contested: Rows
    deleted: frozenset[str]
    hidden: frozenset[str]
    upserts: int
    blocked: BlockedPart | None

    @property
    def kept_pending(self) -> frozenset[str]:
        """Entries of wiki ``pending_deletes`` that a compaction must not remove.

        The document defines no order between them and the log: a delete may have come after the log's upsert, or before
        it. So neither is dropped: the row stays in the log, and the id in the list, until a later write decides.
        """
        manifest = self.table.manifest
        if len(self.fragments) < len(manifest.fragments):
            return self.hidden  # a later fragment may write some of them
        return frozenset(self.contested.ids).union(manifest.pending_keys)

    @property
    def changes_nothing(self) -> bool:
        """Whether a compaction of these fragments would publish what there is already."""
        return not (self.rows.ids or self.deleted or self.hidden - self.kept_pending)

    @cached_property
    def superseded(self) -> frozenset[str]:
        """Ids whose rows in segments are replaced or deleted."""
        return frozenset(self.rows.ids) | self.deleted | self.hidden


@dataclass
class Built:
    """The objects that a pass wrote; no manifest lists them yet.

    Attributes:
        segment: None if no row is left.
        carried: a fragment with the rows that stay in the log (:attr:`Inputs.contested`).
        paths: of the segment's objects.
    """

    segment: SegmentRef | None
    carried: tuple[FragmentRef, ...] = ()
    paths: list[str] = field(default_factory=list)
    retrained: bool = False
    rows: int = 0


def dimensions_of(table: Namespace) -> int | None:
    """The dimensions of the namespace's vectors, from its settings or a segment; None: only its log has them."""
    if table.meta.dimensions is not None:
        return table.meta.dimensions
    if table.manifest.segments:
        return int(SegmentReader(table.store, table.manifest.segments[-1]).centroids().shape[1])
    return None


def metric_of(table: Namespace, metric: str | None) -> tuple[str, str | None]:
    """The metric of the namespace, and a warning if it is not recorded.

    Raises ``UnsupportedFeatureError``: another metric was given than its settings have.
    """
    recorded = table.meta.metric
    if recorded is not None and metric is not None and recorded != metric:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has the metric {recorded}, not {metric}.", remedy="Leave --metric out."
        )
    if recorded is not None or metric is not None:
        return recorded or metric or "", None
    segments = table.manifest.segments
    last = read_training(table.store, segments[-1].id) if segments else None
    if last is not None and last.metric is not None:
        return last.metric, None
    return "cosine", "This namespace does not record its metric; cosine was assumed. Give --metric."


def read_inputs(table: Namespace, fragments: Sequence[FragmentRef], context: RunContext) -> Inputs:
    """Read fragments in order, up to one that cannot be used (S4-027); in each, deletes apply before upserts."""
    dimensions = dimensions_of(table)
    newest: dict[str, int | None] = {}
    read: list[FragmentRef] = []
    ids: list[str] = []
    attributes: list[Attributes | None] = []
    vectors = np.empty((0, dimensions or 0), np.float32)
    blocked = None
    for ref, fragment in read_fragments(table, fragments, dimensions):
        if not isinstance(fragment, Fragment):
            blocked = BlockedPart("fragment", ref.id, fragment)
            break
        ends = len(ids) + len(fragment.ids)
        newest.update(dict.fromkeys(fragment.deletes))
        newest.update(zip(fragment.ids, range(len(ids), ends), strict=True))
        if fragment.ids:
            # Grown in place, so that no vector is in memory twice; no views of the array exist.
            vectors.resize((ends, fragment.values.shape[1]), refcheck=False)
            vectors[len(ids) : ends] = fragment.values
        ids += fragment.ids
        attributes += fragment.attributes
        read.append(ref)
        context.advance("reading fragments", "fragments", total=len(fragments))
    hidden = table.manifest.hidden
    places = sorted(at for name, at in newest.items() if at is not None and name not in hidden)
    contested = [newest[name] for name in sorted(hidden) if newest.get(name) is not None]
    return Inputs(
        table=table,
        fragments=tuple(read),
        contested=Rows(ids, vectors, attributes).take(np.array(contested, np.intp)),
        rows=_kept(ids, vectors, attributes, np.array(places, np.intp)),
        deleted=frozenset(name for name, at in newest.items() if at is None),
        hidden=hidden,
        upserts=len(ids),
        blocked=blocked,
    )


def _kept(ids: list[str], vectors: Matrix, attributes: list[Attributes | None], places: NDArray[np.intp]) -> Rows:
    """The rows at these places, which ascend; vectors are moved within their array."""
    if len(places) < len(ids):
        for start in range(0, len(places), _SLICE):
            some = places[start : start + _SLICE]
            vectors[start : start + len(some)] = vectors[some]
        ids, attributes = [ids[at] for at in places], [attributes[at] for at in places]
    return Rows(ids, vectors[: len(ids)], attributes)


class Compaction:
    """Builds the segment of a pass: the live rows of old segments, and those of the log.

    Attributes:
        built: the objects written so far; a run that is stopped removes them.
    """

    def __init__(
        self,
        inputs: Inputs,
        options: ZeppelinMergeOptions,
        metric: str,
        context: RunContext,
        spark: TaskRunner | None = None,
    ) -> None:
        self.built = Built(None)
        self._spark = spark
        self._inputs, self._options, self._metric, self._context = inputs, options, metric, context
        self._store = inputs.table.store
        self._segments = inputs.table.manifest.segments
        self._superseded = inputs.superseded

    def build(self) -> Built:
        """Write the segment, with the existing centroids or new ones (S4-030, S4-031, S4-038)."""
        last = read_training(self._store, self._segments[-1].id) if len(self._segments) == 1 else None
        old = self._inputs.table.manifest.segment_rows
        trains = len(self._segments) != 1 or self._options.retrain or outgrown(self._inputs.upserts, last, old)
        sizes: list[int] | None = None if trains else self._extend(last)
        if sizes is not None and any(sizes) and too_imbalanced(sizes, self._options.retrain_imbalance_threshold, last):
            unused, self.built = self.built.paths, Built(None)
            self._inputs.table.discard(unused)
            sizes = None
        if sizes is None:
            self._train()
        return self.built

    def _extend(self, last: Training | None) -> list[int]:
        """Keep the centroids: each new row is assigned to the nearest. Returns the resulting cluster sizes."""
        (segment,) = self._segments
        reader = SegmentReader(self._store, segment)
        centroids = reader.centroids()
        new = self._inputs.rows
        with self._context.phase("assign"):
            labels = nearest(new.vectors, centroids, self._metric) if new.ids else np.zeros(0, np.intp)
        added = dict(by_cluster(new, labels))
        kept: Sample | None = None
        if self._kind in {"scalar", "product"}:
            kept = self._sampled()
        with self._writing(centroids, None if kept is None else kept.rows()) as writer:
            if self._spark is not None:
                writer.expect()
                writer.take(self._tasks(writer).extend(self._spark, reader, added))
            else:
                for number, live in enumerate(reader.clusters()):
                    rows = [live.without(self._superseded), *([added.pop(number)] if number in added else [])]
                    writer.add(joined(rows, centroids.shape[1]))
                    del live, rows  # before the next cluster is read
                    self._context.advance("writing clusters", "clusters", total=len(centroids))
            sizes = [*writer.sizes]
            if any(sizes):
                upserts = self._inputs.upserts + (0 if last is None else last.upserts)
                base = segment.vectors if last is None else last.rows
                # A segment that another program trained: its imbalance before this pass counts as that of its training.
                left = imbalance(sizes) if last is None else last.imbalance
                self._finish(writer, Training(base, min(left, imbalance(sizes)) if last is None else left, upserts))
        return sizes

    def _tasks(self, writer: SegmentWriter) -> SparkClusters:
        from memwal_ops.formats.zeppelin.spark import SparkClusters  # noqa: PLC0415 - Spark only

        old = self._segments[0] if self._segments else None
        return SparkClusters.of(self._inputs.table, old, self._superseded, writer, self._metric)

    def _train(self) -> None:
        """Train new centroids from a sample of all rows; then assign every row to the nearest."""
        with self._context.phase("sample"):
            sample = self._sampled()
        if not sample.seen:
            return  # every row is deleted: no segment
        with self._context.phase("k-means"):
            clusters = self._options.clusters or clusters_for(sample.seen)
            centroids = train(sample.rows(), clusters, self._metric)
        self._context.heartbeat()
        with self._writing(centroids, sample.rows()) as writer:
            if self._spark is not None and len(self._segments) <= 1:
                writer.expect()
                reader = SegmentReader(self._store, self._segments[0]) if self._segments else None
                tasks = self._tasks(writer)
                writer.take(tasks.train(self._spark, [*self._log_rows()], reader, sample.rows()))
            else:
                self._write_assigned(writer)
            self.built.retrained = True
            self._finish(writer, Training(sample.seen, imbalance(writer.sizes)))

    def _write_assigned(self, writer: SegmentWriter) -> None:
        centroids = writer.centroids
        with Spill(self._options.max_bytes // 2, len(centroids), centroids.shape[1]) as spill:
            for rows in self._all_rows():
                with self._context.phase("assign"):
                    spill.add(rows, nearest(rows.vectors, centroids, self._metric))
                self._context.heartbeat()
            for rows in spill.clusters():
                writer.add(rows)
                self._context.advance("writing clusters", "clusters", total=len(centroids))

    @property
    def _kind(self) -> str | None:
        """The quantization: as given in the options, else that of the previous segment."""
        if self._options.quantization is not None:
            return None if self._options.quantization == "none" else self._options.quantization
        before = self._segments[-1].quantization if self._segments else None
        # Two-bit codes need a rotation that only the server has; full precision is valid for every reader.
        return before if before in {"scalar", "product"} else None

    def _sampled(self) -> Sample:
        max_rows = max(1, self._options.max_bytes // 4 // max(4, 4 * self._inputs.rows.vectors.shape[1]))
        expected = self._inputs.table.manifest.segment_rows + len(self._inputs.rows.ids)
        wanted = SAMPLES_PER_CLUSTER * max(CODES_SAMPLED, self._options.clusters or clusters_for(expected))
        sample = Sample(min(max_rows, wanted))
        for rows in self._all_rows(attributes=False):
            sample.add(rows.vectors)
            self._context.heartbeat()
        return sample

    def _all_rows(self, *, attributes: bool = True) -> Iterator[Rows]:
        """Every current row: a later segment overrides an earlier one, the log overrides both."""
        seen: set[str] = set()
        several = len(self._segments) > 1
        yield from self._log_rows()
        for segment in reversed(self._segments):
            own: set[str] = set()
            for rows in SegmentReader(self._store, segment).clusters(attributes=attributes):
                live = rows.without(self._superseded)
                if several:
                    own.update(live.ids)
                    live = live.without(seen)
                yield live
            seen |= own

    def _log_rows(self) -> Iterator[Rows]:
        rows = self._inputs.rows
        for start in range(0, len(rows.ids), _SLICE):
            end = start + _SLICE
            yield Rows(rows.ids[start:end], rows.vectors[start:end], rows.attributes[start:end])

    @contextmanager
    def _writing(self, centroids: Matrix, sample: Matrix | None) -> Iterator[SegmentWriter]:
        table, dialect = self._inputs.table, self._inputs.table.manifest.dialect
        name = f"seg{'-' if dialect == WIKI else '_'}{new_ulid()}"
        bitmaps = {*self._options.bitmap_field}.union(*(segment.bitmap_fields for segment in self._segments))
        texts = {*self._options.fts_field}.union(*(segment.fts_fields for segment in self._segments))
        fields, created = (tuple(sorted(bitmaps)), tuple(sorted(texts))), timestamp(datetime.now(UTC))
        segment = SegmentRef(name, f"segments/{name}/", 0, len(centroids), self._kind, *fields, created_at=created)
        quantizer = None if sample is None else make_quantizer(self._kind, sample)
        writer = SegmentWriter(table.store, segment, centroids, quantizer)
        self.built.paths = writer.paths
        if dialect == NATIVE:
            self._stage(writer)
        yield writer

    def _stage(self, writer: SegmentWriter) -> None:
        """Publish the names of the objects being written: a server's gc keeps them while this run's lease is valid.

        All of them: otherwise, in a pass longer than the server's horizon, the manifest would list deleted ones.
        """
        namespace, token = self._inputs.table.manifest.namespace, self._inputs.table.manifest.token
        keys = [f"{namespace}/{writer.segment.prefix}{name}" for name in writer.names]
        document = {"fencing_token": token, "keys": keys}
        self._store.put(staging_path(token), json.dumps(document, indent=2).encode())

    def _finish(self, writer: SegmentWriter, training: Training) -> None:
        segment = writer.finish()
        self.built.rows = sum(writer.sizes)
        self.built.segment = replace(segment, vectors=self.built.rows)
        path = training_path(segment.id)
        self.built.paths.append(path)
        create_object(self._store, path, training_bytes(replace(training, metric=self._metric, objects=writer.objects)))


def staging_path(token: int) -> str:
    """The path at which a native compaction publishes the names of the objects that it is writing."""
    return f"_staging/{token}.json"


# Product quantization trains 256 codes for each part of a vector.
CODES_SAMPLED = 16


class Spill:
    """Rows by cluster: in memory up to ``max_bytes``, then in local files, deleted at the end of the run."""

    def __init__(self, max_bytes: int, clusters: int, dimensions: int) -> None:
        self._max_bytes, self._dimensions = max_bytes, dimensions
        self._held: list[list[Rows]] = [[] for _ in range(clusters)]
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, rows: Rows, labels: NDArray[np.intp]) -> None:
        """Add rows, each with its cluster."""
        for cluster, part in by_cluster(rows, labels):
            self._held[cluster].append(part)
            self._bytes += part.bytes
        if self._bytes > self._max_bytes:
            self._flush()

    def clusters(self) -> Iterator[Rows]:
        """The rows of each cluster in turn."""
        for number in range(len(self._held)):
            rows = joined([*self._read(number), *self._held[number]], self._dimensions)
            self._held[number] = []
            yield rows

    def _flush(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="memwal-ops-")
        for number, parts in enumerate(self._held):
            if parts:
                with self._file(number).open("ab") as file:
                    file.writelines(map(pack, parts))
                parts.clear()
        self._bytes = 0

    def _read(self, number: int) -> Iterator[Rows]:
        if self._folder is None or not self._file(number).exists():
            return
        with self._file(number).open("rb") as file:
            while header := file.read(16):
                yield unpack(header + file.read(sum(struct.unpack("<QQ", header))))

    def _file(self, number: int) -> Path:
        assert self._folder is not None  # noqa: S101 - the callers check
        return Path(self._folder.name, str(number))
