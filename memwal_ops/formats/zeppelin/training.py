"""Train centroids by k-means, assign rows to the nearest, and decide when to train again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memwal_ops.errors import ObjectNotFoundError, UnsupportedFeatureError
from memwal_ops.formats.zeppelin.wire.quantizers import CODES, ProductQuantizer, ScalarQuantizer
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.zeppelin.wire.quantizers import Quantizer
    from memwal_ops.storage.api import Store

    Matrix = NDArray[np.float32]

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
    """The record of a segment: its last training, and the objects that were written.

    Attributes:
        rows: at the last training.
        imbalance: after it.
        upserts: since.
        metric: of its clusters.
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
    found = imbalance(sizes)
    return found > threshold and (last is None or found > _RETRAIN_GROWTH * last.imbalance)


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
    found = np.asarray(trained.to_numpy_ndarray(), dtype=np.float32)
    found = found[np.isfinite(found).all(axis=1)]
    return found if len(found) else points[:clusters]


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

    def __init__(self, max_rows: int, seed: int = 0) -> None:
        """An empty sample."""
        self._max_rows = max(1, max_rows)
        self._random = np.random.default_rng(seed)
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
    width = next(one for one in (_SUBSPACE, 2, 1) if dimensions % one == 0)
    books = []
    for begins in range(0, dimensions, width):
        book = train(sample[:, begins : begins + width], CODES, "euclidean")
        books.append(np.concatenate([book, np.repeat(book[-1:], CODES - len(book), axis=0)]))
    return ProductQuantizer(np.stack(books))


def read_training(store: Store, segment: str) -> Training | None:
    """Read the record of a segment's training; None for a segment of another program."""
    try:
        found: Any = decode_record(store.get(training_path(segment)), segment)
        metric = found.get("metric")
        known = metric if metric in METRICS else None
        # None in those of earlier releases. A damaged record must not make intact objects corrupt.
        objects = found.get("objects", {}) if found.get("checksum") == _checksum(found.get("objects")) else {}
        objects = {str(name): (int(size), str(digest)) for name, (size, digest) in objects.items()}
        return Training(int(found["rows"]), float(found["imbalance"]), int(found["upserts"]), known, objects)
    except ObjectNotFoundError:
        return None
    except (UnsupportedFeatureError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # only a hint: without it, the next compaction trains again


def training_bytes(training: Training) -> bytes:
    """Encode the record."""
    document = {**vars(training), "objects": {name: [*one] for name, one in training.objects.items()}}
    return encode_record({**document, "checksum": _checksum(document["objects"])})


def _checksum(objects: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(objects).encode())


def training_path(segment: str) -> str:
    """The path of the record: not below the segment's prefix, in which the format defines all names."""
    return f"{_FOLDER}/{segment}.json"
