"""Read and write the objects of segments, train their centroids by k-means, and assign rows to the nearest.

Memory: one cluster, or one group of clusters, at a time.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memwal_ops import errors
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.wire.fragment import Attributes, UnstorableError
from memwal_ops.formats.zeppelin.wire.segment import (
    CENTROIDS,
    CODES,
    ProductQuantizer,
    Quantizer,
    ScalarQuantizer,
    attributes_name,
    bitmap_name,
    cluster_name,
    decode_attributes,
    decode_centroids,
    decode_cluster,
    decode_grouped,
    encode_attributes,
    encode_bitmaps,
    encode_centroids,
    encode_cluster,
    encode_text_index,
    text_name,
)
from memwal_ops.storage.api import Store, results_of
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeVar

    from numpy.typing import NDArray

    from memwal_ops.formats.zeppelin.wire.manifest import SegmentRef

    Matrix = NDArray[np.float32]
    T = TypeVar("T")

# Rows per cluster, and per object its size and checksum.
Written = tuple[list[int], dict[str, tuple[int, str]]]
METRICS = ("cosine", "euclidean", "dot_product")
ITERATIONS = 25
ROWS_PER_CLUSTER = 3000
MAX_CLUSTERS = 4096
SAMPLES_PER_CLUSTER = 256
# If more rows were upserted since the last training than this many times the rows then, the centroids are outdated.
GROWTH = 5.0
# If a training ends as imbalanced as the data are, every compaction would repeat it: so another one is done only
# if the imbalance has grown by a quarter since.
_RETRAIN_GROWTH = 1.25
_FOLDER = "_mem_wal_ops/training"
# Rows that are compared with all centroids at once: at most that many, and that many bytes of products.
_CHUNK, _PRODUCTS = 4096, 16 << 20
# Among so few points, many may be equal, which leaves clusters empty.
_FEW = 16
_SQUARED = (1e-15, 1e15)
_SUBSPACE = 4


@dataclass(frozen=True)
class Training:
    """The record of a segment: the rows, imbalance and metric of its last training, and what was written since.

    Attributes:
        upserts: since.
        objects: per name below the segment's prefix its size in bytes and XXH3-64: the format has no checksums of them.
    """

    rows: int
    imbalance: float
    upserts: int = 0
    metric: str | None = None
    objects: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def clusters_for(rows: int) -> int:
    """The number of clusters of a segment with that many rows."""
    return max(1, min(MAX_CLUSTERS, round(rows / ROWS_PER_CLUSTER)))


def imbalance(sizes: Sequence[int]) -> float:
    """Largest cluster / smallest cluster; an empty one counts as one row (S4-038)."""
    return max(sizes, default=0) / max(1, min(sizes, default=0))


def too_imbalanced(sizes: Sequence[int], threshold: float, last: Training | None) -> bool:
    """Whether the clusters are so imbalanced that new centroids must be trained (S4-038)."""
    now = imbalance(sizes)
    return now > threshold and (last is None or now > _RETRAIN_GROWTH * last.imbalance)


def outgrown(upserts: int, last: Training | None, rows: int) -> bool:
    """Whether so many rows were upserted since the last training that the centroids are outdated."""
    base = rows if last is None else last.rows
    since = upserts + (0 if last is None else last.upserts)
    return since > GROWTH * max(1, base)


def train(sample: Matrix, clusters: int, metric: str) -> Matrix:
    """Centroids of a sample, shape (at most ``clusters``, dimensions)."""
    points = prepared(sample, metric)
    if len(points) <= _FEW * clusters:
        points = np.unique(points, axis=0)
    if len(points) <= clusters:
        return points
    from lance.util import KMeans  # noqa: PLC0415 - pylance: not for a namespace that needs no training

    kmeans = KMeans(clusters, max_iters=ITERATIONS)
    kmeans.fit(np.ascontiguousarray(points))
    trained: Any = kmeans.centroids
    centroids = np.asarray(trained.to_numpy_ndarray(), dtype=np.float32)
    centroids = centroids[np.isfinite(centroids).all(axis=1)]
    return centroids if len(centroids) else points[:clusters]


def prepared(vectors: Matrix, metric: str) -> Matrix:
    """Vectors as used for distances to centroids: normalized for cosine."""
    if metric != "cosine":
        return vectors
    directions = np.zeros_like(vectors)
    for begins in range(0, len(vectors), _CHUNK):
        # In double precision: in single, the squares of short vectors vanish, and those of long ones overflow.
        part = vectors[begins : begins + _CHUNK].astype(np.float64)
        lengths = np.sqrt(np.einsum("nd,nd->n", part, part))[:, None]
        directions[begins : begins + _CHUNK] = np.divide(part, lengths, out=np.zeros_like(part), where=lengths > 0)
    return directions


def nearest(vectors: Matrix, centroids: Matrix, metric: str) -> NDArray[np.intp]:
    """Per row the nearest centroid (S4-031)."""
    labels = np.empty(len(vectors), dtype=np.intp)
    to = prepared(centroids, metric)
    half, chunk = None, max(1, min(_CHUNK, _PRODUCTS // (4 * len(to))))
    for begins in range(0, len(vectors), chunk):
        points = prepared(vectors[begins : begins + chunk], metric)
        if to.dtype == np.float32 and not (_has_squares(points) and _has_squares(to)):
            half, to = None, to.astype(np.float64)
        if half is None:
            half = (to**2).sum(axis=1) / 2
        products = points.astype(to.dtype, copy=False) @ to.T
        labels[begins : begins + chunk] = np.subtract(half, products, out=products).argmin(axis=1)
    return labels


def _has_squares(values: Matrix) -> bool:
    """Whether sums of squares are single-precision numbers: neither infinite, nor all zero."""
    largest = float(np.abs(values).max(initial=0))
    return largest == 0 or _SQUARED[0] < largest < _SQUARED[1]


class Sample:
    """A uniform sample of at most ``max_rows`` rows of a stream."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max(1, max_rows)
        self._random = np.random.default_rng(0)
        self._rows: list[Matrix] = []
        self._keys: list[NDArray[np.float64]] = []
        self._held = 0
        self.seen = 0

    def add(self, vectors: Matrix) -> None:
        """Add rows of the stream."""
        if not len(vectors):
            return
        self.seen += len(vectors)
        self._held += len(vectors)
        self._rows.append(vectors)
        self._keys.append(self._random.random(len(vectors)))
        if self._held > 2 * self._max_rows:
            self._shrink()

    def rows(self) -> Matrix:
        """The sampled vectors."""
        self._shrink()
        return self._rows[0]

    def _shrink(self) -> None:
        rows, keys = np.concatenate(self._rows), np.concatenate(self._keys)
        if len(rows) > self._max_rows:
            kept = np.argpartition(keys, self._max_rows)[: self._max_rows]
            rows, keys = rows[kept], keys[kept]
        self._rows, self._keys, self._held = [rows], [keys], len(rows)


def make_quantizer(kind: str | None, sample: Matrix) -> Quantizer | None:
    """A quantizer of a kind, calibrated or trained on a sample."""
    if kind == "scalar":
        return ScalarQuantizer(sample.min(axis=0), sample.max(axis=0))
    if kind != "product":
        return None
    dimensions = sample.shape[1]
    width = next(size for size in (_SUBSPACE, 2, 1) if dimensions % size == 0)
    books = []
    for begins in range(0, dimensions, width):
        book = train(sample[:, begins : begins + width], CODES, "euclidean")
        books.append(np.concatenate([book, np.repeat(book[-1:], CODES - len(book), axis=0)]))
    return ProductQuantizer(np.stack(books))


def read_training(store: Store, segment: str) -> Training | None:
    """Read the record of a segment's training; None for a segment of another program."""
    try:
        document: Any = decode_record(store.get(training_path(segment)), segment)
        metric = document.get("metric")
        known = metric if metric in METRICS else None
        # None in those of earlier releases. A damaged record must not make intact objects corrupt.
        objects = document.get("objects", {}) if document.get("checksum") == _checksum(document.get("objects")) else {}
        objects = {str(name): (int(size), str(digest)) for name, (size, digest) in objects.items()}
        return Training(int(document["rows"]), float(document["imbalance"]), int(document["upserts"]), known, objects)
    except (
        errors.ObjectNotFoundError, errors.UnsupportedFeatureError, ValueError, KeyError, TypeError, AttributeError,
        RecursionError,
    ):  # fmt: skip
        return None  # only a hint: without it, the next compaction trains again


def training_bytes(training: Training) -> bytes:
    """Encode the record."""
    document = {**vars(training), "objects": {name: [*item] for name, item in training.objects.items()}}
    return encode_record({**document, "checksum": _checksum(document["objects"])})


def _checksum(objects: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(objects).encode())


def training_path(segment: str) -> str:
    """The path of the record: not below the segment's prefix, in which the format defines all names."""
    return f"{_FOLDER}/{segment}.json"


_UPLOADS = 8
# Objects waiting for upload: at most that many bytes, or that many objects.
_WAITING_BYTES = 16 << 20
_WAITING_OBJECTS = 32
# Of centroids and of a cluster: the numbers of entries and of dimensions.
_HEADER = 8
# Of a row beside its vector, at least: the length of its id, and an id of one byte.
LEAST_ROW = 5


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows: ``vectors`` has shape (len(ids), dimensions), float32."""

    ids: Sequence[str]
    vectors: Matrix
    attributes: Sequence[Attributes | None]

    def take(self, places: NDArray[np.intp]) -> Rows:
        """The rows at these indexes."""
        return Rows([self.ids[at] for at in places], self.vectors[places], [self.attributes[at] for at in places])

    def without(self, ids: frozenset[str] | set[str] | Mapping[str, Any]) -> Rows:
        """All rows except those of ``ids``."""
        kept = [at for at, name in enumerate(self.ids) if name not in ids]
        return self if len(kept) == len(self.ids) else self.take(np.array(kept, dtype=np.intp))

    @property
    def bytes(self) -> int:
        """Approximate size in memory: an attribute has some hundred bytes."""
        with_attributes = sum(attributes is not None for attributes in self.attributes)
        return self.vectors.nbytes + 128 * len(self.ids) + 256 * with_attributes


def joined(parts: Sequence[Rows], dimensions: int) -> Rows:
    """Concatenate rows."""
    vectors = [part.vectors for part in parts if len(part.ids)]
    return Rows(
        [name for part in parts for name in part.ids],
        np.concatenate(vectors) if vectors else np.zeros((0, dimensions), np.float32),
        [attributes for part in parts for attributes in part.attributes],
    )


@dataclass(frozen=True)
class SegmentObject:
    """An object that a segment needs, with the bytes that it has at least, and exactly, if they are recorded.

    ``has_rows``: it has rows or centroids; others the next merge writes again.
    """

    path: str
    least: int
    size: int | None = None
    has_rows: bool = True


class SegmentReader:
    """The clusters of one segment.

    Objects that memwal-ops wrote are compared with the sizes and checksums that it recorded.

    Raises ``UnsupportedFeatureError``: it is a tree of nodes, which this release does not read.
    """

    def __init__(self, store: Store, segment: SegmentRef) -> None:
        if segment.hierarchical:
            raise errors.UnsupportedFeatureError(
                f"The segment {segment.id} is hierarchical, which is not supported.",
                remedy="Let its Zeppelin server maintain the namespace, or rebuild it there with a flat index.",
            )
        self.segment = segment
        self._store = store
        self._groups = {cluster: item for item in segment.objects for cluster in item["clusters"]}
        self._group: Callable[[str], bytes] = lru_cache(maxsize=1)(self.read)
        self._records: dict[str, Mapping[str, tuple[int, str]]] = {}

    def centroids(self) -> Matrix:
        """Shape (clusters, dimensions)."""
        path = self.segment.prefix + CENTROIDS
        centroids = _decoded(path, lambda: decode_centroids(self.read(path)))
        if len(centroids) != self.segment.clusters:
            raise errors.SegmentCorruptError(
                f"{path} has {len(centroids)} centroids; the manifest has {self.segment.clusters}."
            )
        return centroids

    def cluster(self, number: int) -> Rows:
        """The rows of a cluster."""
        ids, vectors = self.vectors(number)
        path = self.segment.prefix_of(number) + attributes_name(number)
        attributes = _decoded(path, lambda: decode_attributes(self.read(path), len(ids)))
        return Rows(ids, vectors, attributes)

    def vectors(self, number: int) -> tuple[list[str], Matrix]:
        """Ids and vectors of a cluster, without attributes."""
        group, path = self._groups.get(number), self._path(number)
        if group is not None:
            return _decoded(path, lambda: decode_grouped(self._group(path), number, group))
        return _decoded(path, lambda: decode_cluster(self.read(path)))

    def bytes_of(self, number: int, dimensions: int) -> int:
        """About how many bytes a cluster has: as recorded, else an even share of the rows. At most one request."""
        names = (self._path(number), self.segment.prefix_of(number) + attributes_name(number))
        sizes = [self._size(path) for path in names if number not in self._groups]
        share = self.segment.vectors * (4 * dimensions + LEAST_ROW) // max(1, self.segment.clusters)
        return sum(size or 0 for size in sizes) or share

    def needed(self, dimensions: int | None) -> list[SegmentObject]:
        """All objects that it needs, those with rows first; ``dimensions`` of its vectors, if they are known.

        Requests: one for the record of each prefix. No object of the segment is read.
        """
        segment, numbers = self.segment, range(self.segment.clusters)
        least = {segment.prefix + CENTROIDS: _HEADER + 4 * segment.clusters * (dimensions or 1)}
        least |= {self._path(number): _HEADER for number in numbers}
        least |= {segment.prefix_of(number) + attributes_name(number): len("[]") for number in numbers}
        grouped = {str(item["key"]): item.get("size_bytes") or None for item in segment.objects}
        objects = [SegmentObject(path, size, grouped.get(path) or self._size(path)) for path, size in least.items()]
        rest = dict(segment.others)
        for each, fields in ((bitmap_name, segment.bitmap_fields), (text_name, segment.fts_fields)):
            rest |= {segment.prefix_of(number) + each(number): None for number in numbers if fields}
        rest |= {segment.prefix + name: None for name in self._record(segment.prefix)}
        others = ((path, size) for path, size in rest.items() if path not in least)
        return objects + [SegmentObject(path, 1, size or self._size(path), has_rows=False) for path, size in others]

    def _record(self, prefix: str) -> Mapping[str, tuple[int, str]]:
        """The recorded objects of a segment, by name; read once. Nothing of a segment of another program."""
        if prefix not in self._records:
            training = read_training(self._store, prefix.rstrip("/").rpartition("/")[2])
            self._records[prefix] = {} if training is None else training.objects
        return self._records[prefix]

    def _recorded(self, path: str) -> tuple[int, str] | None:
        prefix, _, name = path.rpartition("/")
        return self._record(f"{prefix}/").get(name)

    def _size(self, path: str) -> int | None:
        recorded = self._recorded(path)
        return None if recorded is None else recorded[0]

    def _path(self, number: int) -> str:
        group = self._groups.get(number)
        return str(group["key"]) if group is not None else self.segment.prefix_of(number) + cluster_name(number)

    def clusters(self, *, attributes: bool = True) -> Iterator[Rows]:
        """All of them, one after the other; without ``attributes``, one object less is read of each."""
        for number in range(self.segment.clusters):
            if attributes:
                yield self.cluster(number)
                continue
            ids, vectors = self.vectors(number)
            yield Rows(ids, vectors, [None] * len(ids))

    def read(self, path: str) -> bytes:
        """The bytes of an object of the segment.

        Raises ``SegmentCorruptError``: it is missing, or has other bytes than were recorded.
        """
        try:
            data = self._store.get(path)
        except errors.ObjectNotFoundError as error:
            raise errors.SegmentCorruptError(f"{path}, which the manifest needs, is missing.") from error
        recorded = self._recorded(path)
        if recorded is not None and recorded[0] != len(data):
            raise errors.SegmentCorruptError(f"{path} has {len(data)} bytes; {recorded[0]} were written.")
        if recorded is not None and recorded != _signature(data):
            raise errors.SegmentCorruptError(
                f"{path} has other bytes than were written: its checksum is not the recorded one."
            )
        return data


@dataclass
class SegmentWriter:
    """Write one segment, cluster by cluster. No manifest lists its objects until it is published.

    Attributes:
        centroids: shape (clusters, dimensions).
        quantizer: makes codes in addition to the full-precision rows.
        first: the number of the first cluster to write.
        sizes: rows per cluster.
        paths: all objects that were written.
        objects: per name its size and checksum.
    """

    store: Store
    segment: SegmentRef
    centroids: Matrix
    quantizer: Quantizer | None = None
    first: int = 0
    sizes: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    objects: dict[str, tuple[int, str]] = field(default_factory=dict)
    _waiting: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of all objects that it writes, below the segment's prefix."""
        each: list[Callable[[int], str]] = [cluster_name, attributes_name]
        each += [bitmap_name] if self.segment.bitmap_fields else []
        each += [text_name] if self.segment.fts_fields else []
        whole = [CENTROIDS]
        if self.quantizer is not None:
            each.append(self.quantizer.cluster_name)
            whole.append(self.quantizer.artifact()[0])
        return [*whole, *(name(number) for name in each for number in range(len(self.centroids)))]

    def add(self, rows: Rows) -> None:
        """Write the next cluster, in the order of the centroids."""
        number, dimensions = self.first + len(self.sizes), self.centroids.shape[1]
        self.sizes.append(len(rows.ids))
        objects = {
            cluster_name(number): encode_cluster(rows.ids, rows.vectors, dimensions),
            attributes_name(number): encode_attributes(rows.attributes),
        }
        if self.segment.bitmap_fields:
            objects[bitmap_name(number)] = encode_bitmaps(rows.attributes, self.segment.bitmap_fields)
        if self.segment.fts_fields:
            objects[text_name(number)] = encode_text_index(rows.attributes, self.segment.fts_fields)
        if self.quantizer is not None:
            name, data = self.quantizer.cluster(number, rows.ids, rows.vectors)
            objects[name] = data
        self._put(objects)

    def written(self) -> Written:
        """What was written of the clusters that were added, after waiting for all of it."""
        self._flush()
        return self.sizes, self.objects

    def expect(self) -> None:
        """Others write the clusters: a run that is stopped removes any that may exist."""
        self.paths += [self.segment.prefix + name for name in self.names]

    def take(self, written: Iterable[Written]) -> None:
        """Take what others wrote of the clusters, in the order of the centroids, as added."""
        for sizes, objects in written:
            self.sizes += sizes
            self.objects |= objects

    def finish(self) -> SegmentRef:
        """Write the objects of the segment as a whole, and return its entry for the manifest."""
        objects = {CENTROIDS: encode_centroids(self.centroids)}
        if self.quantizer is not None:
            name, data = self.quantizer.artifact()
            objects[name] = data
        self._put(objects)
        self._flush()
        if len(self.sizes) != len(self.centroids):
            raise errors.InvariantViolatedError(f"{len(self.sizes)} of {len(self.centroids)} clusters were written.")
        return self.segment

    def _put(self, objects: Mapping[str, bytes]) -> None:
        self.objects |= {name: _signature(data) for name, data in objects.items()}
        self._waiting += [(self.segment.prefix + name, data) for name, data in objects.items()]
        if len(self._waiting) >= _WAITING_OBJECTS or sum(len(data) for _, data in self._waiting) >= _WAITING_BYTES:
            self._flush()

    def _flush(self) -> None:
        # Recorded before they are written: a run that is stopped in between removes objects that may exist.
        self.paths += [path for path, _ in self._waiting]
        results_of(lambda item: create_object(self.store, *item), self._waiting, threads=_UPLOADS)
        self._waiting.clear()


def create_object(store: Store, path: str, data: bytes) -> None:
    """Create an object with a name that is unique to this run.

    Raises ``InvariantViolatedError``: there is another object of that name.
    """
    # "Exists" may be this run's own put, after a lost response.
    if not store.put_if_absent(path, data) and store.get(path) != data:
        raise errors.InvariantViolatedError(f"{path} exists with other content, although its name is random.")


def _signature(data: bytes) -> tuple[int, str]:
    return len(data), xxhash.xxh3_64_hexdigest(data)


def _decoded(path: str, decode: Callable[[], T]) -> T:
    try:
        return decode()
    except UnstorableError as error:
        raise errors.UnsupportedFeatureError(f"{path} cannot be read: {error}", remedy=remedies.SERVER) from error
    except errors.InvalidFormatError as error:
        raise errors.SegmentCorruptError(f"{path} cannot be read: {error}") from error


def by_cluster(rows: Rows, labels: NDArray[np.intp]) -> Iterator[tuple[int, Rows]]:
    """The rows of each cluster that a label names, in their order."""
    if not len(labels):
        return
    order = np.argsort(labels, kind="stable")
    numbers, starts = np.unique(labels[order], return_index=True)
    for number, places in zip(numbers, np.split(order, starts[1:]), strict=True):
        yield int(number), rows.take(places)


def pack(rows: Rows) -> bytes:
    """Some rows as bytes, with their length."""
    cluster = encode_cluster(rows.ids, rows.vectors, rows.vectors.shape[1])
    attributes = encode_attributes(rows.attributes)
    return struct.pack("<QQ", len(cluster), len(attributes)) + cluster + attributes


def unpack(data: bytes) -> Rows:
    """The reverse of :func:`pack`."""
    clusters, _ = struct.unpack_from("<QQ", data)
    ids, vectors = decode_cluster(data[16 : 16 + clusters])
    return Rows(ids, vectors, decode_attributes(data[16 + clusters :], len(ids)))
