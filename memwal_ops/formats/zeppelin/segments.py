"""Read and write the objects of segments. Memory: one cluster, or one group of clusters, at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from memwal_ops.errors import (
    InvalidFormatError,
    InvariantViolatedError,
    ObjectNotFoundError,
    SegmentCorruptError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.training import read_training
from memwal_ops.formats.zeppelin.wire.fragment import UnstorableError
from memwal_ops.formats.zeppelin.wire.indexes import bitmap_name, encode_bitmaps, encode_text_index, text_name
from memwal_ops.formats.zeppelin.wire.segment import (
    CENTROIDS,
    attributes_name,
    cluster_name,
    decode_attributes,
    decode_centroids,
    decode_cluster,
    decode_grouped,
    encode_attributes,
    encode_centroids,
    encode_cluster,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any, TypeVar

    from numpy.typing import NDArray

    from memwal_ops.formats.zeppelin.wire.fragment import Attributes
    from memwal_ops.formats.zeppelin.wire.manifest import SegmentRef
    from memwal_ops.formats.zeppelin.wire.quantizers import Quantizer
    from memwal_ops.storage.api import Store

    Matrix = NDArray[np.float32]
    T = TypeVar("T")

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
        return self.vectors.nbytes + 128 * len(self.ids) + 256 * sum(one is not None for one in self.attributes)


def joined(parts: Sequence[Rows], dimensions: int) -> Rows:
    """Concatenate rows."""
    vectors = [part.vectors for part in parts if len(part.ids)]
    return Rows(
        [name for part in parts for name in part.ids],
        np.concatenate(vectors) if vectors else np.zeros((0, dimensions), np.float32),
        [one for part in parts for one in part.attributes],
    )


@dataclass(frozen=True)
class Needed:
    """An object that a segment needs.

    Attributes:
        path: its path.
        least: bytes that it has at least.
        size: bytes that it has; None: not recorded.
        has_rows: whether it has rows or centroids; if not, the next merge writes it again.
    """

    path: str
    least: int
    size: int | None = None
    has_rows: bool = True


class SegmentReader:
    """The clusters of one segment.

    Objects that memwal-ops wrote are compared with the sizes and checksums that it recorded.

    Raises:
        UnsupportedFeatureError: it is a tree of nodes, which this release does not read.
    """

    def __init__(self, store: Store, segment: SegmentRef) -> None:
        """Keep the arguments; nothing is read."""
        if segment.hierarchical:
            raise UnsupportedFeatureError(
                f"The segment {segment.id} is hierarchical, which is not supported.",
                remedy="Let its Zeppelin server maintain the namespace, or rebuild it there with a flat index.",
            )
        self.segment = segment
        self._store = store
        self._groups = {cluster: one for one in segment.objects for cluster in one["clusters"]}
        self._group: Callable[[str], bytes] = lru_cache(maxsize=1)(self.read)
        self._records: dict[str, Mapping[str, tuple[int, str]]] = {}

    def centroids(self) -> Matrix:
        """Shape (clusters, dimensions)."""
        path = self.segment.prefix + CENTROIDS
        found = _decoded(path, lambda: decode_centroids(self.read(path)))
        if len(found) != self.segment.clusters:
            raise SegmentCorruptError(f"{path} has {len(found)} centroids; the manifest has {self.segment.clusters}.")
        return found

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
        return sum(one or 0 for one in sizes) or share

    def needed(self, dimensions: int | None) -> list[Needed]:
        """All objects that it needs, those with rows first; ``dimensions`` of its vectors, if they are known.

        Requests: one for the record of each prefix. No object of the segment is read.
        """
        segment, numbers = self.segment, range(self.segment.clusters)
        least = {segment.prefix + CENTROIDS: _HEADER + 4 * segment.clusters * (dimensions or 1)}
        least |= {self._path(number): _HEADER for number in numbers}
        least |= {segment.prefix_of(number) + attributes_name(number): len("[]") for number in numbers}
        grouped = {str(one["key"]): one.get("size_bytes") or None for one in segment.objects}
        found = [Needed(path, one, grouped.get(path) or self._size(path)) for path, one in least.items()]
        rest = {path: size for path, size in segment.others if path not in least}
        for each, fields in ((bitmap_name, segment.bitmap_fields), (text_name, segment.fts_fields)):
            rest |= {segment.prefix_of(number) + each(number): None for number in numbers if fields}
        rest |= {segment.prefix + name: None for name in self._record(segment.prefix)}
        found += [
            Needed(path, 1, size or self._size(path), has_rows=False)
            for path, size in rest.items()
            if path not in least
        ]
        return found

    def _record(self, prefix: str) -> Mapping[str, tuple[int, str]]:
        """The recorded objects of a segment, by name; read once. Nothing of a segment of another program."""
        if prefix not in self._records:
            found = read_training(self._store, prefix.rstrip("/").rpartition("/")[2])
            self._records[prefix] = {} if found is None else found.objects
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
            else:
                ids, vectors = self.vectors(number)
                yield Rows(ids, vectors, [None] * len(ids))

    def read(self, path: str) -> bytes:
        """The bytes of an object of the segment.

        Raises:
            SegmentCorruptError: it is missing, or has other bytes than were recorded.
        """
        try:
            data = self._store.get(path)
        except ObjectNotFoundError as error:
            raise SegmentCorruptError(f"{path}, which the manifest needs, is missing.") from error
        recorded = self._recorded(path)
        if recorded is not None and recorded[0] != len(data):
            raise SegmentCorruptError(f"{path} has {len(data)} bytes; {recorded[0]} were written.")
        if recorded is not None and recorded != _signature(data):
            raise SegmentCorruptError(
                f"{path} has other bytes than were written: its checksum is not the recorded one."
            )
        return data


@dataclass(frozen=True)
class Written:
    """Clusters that were written: ``sizes`` is their rows, ``objects`` per name the size and checksum."""

    sizes: list[int]
    objects: dict[str, tuple[int, str]]


@dataclass
class SegmentWriter:
    """Write one segment, cluster by cluster. No manifest lists its objects until it is published.

    Attributes:
        store: for the objects.
        segment: the entry so far; ``vectors`` is updated.
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
        """Wait for the objects of all clusters that were added."""
        self._flush()
        return Written(self.sizes, self.objects)

    def expect(self) -> None:
        """Others write the clusters: a run that is stopped removes any that may exist."""
        self.paths += [self.segment.prefix + name for name in self.names]

    def take(self, written: Iterable[Written]) -> None:
        """Take what others wrote of the clusters, in the order of the centroids, as added."""
        for one in written:
            self.sizes += one.sizes
            self.objects |= one.objects

    def finish(self) -> SegmentRef:
        """Write the objects of the segment as a whole, and return its entry for the manifest."""
        objects = {CENTROIDS: encode_centroids(self.centroids)}
        if self.quantizer is not None:
            name, data = self.quantizer.artifact()
            objects[name] = data
        self._put(objects)
        self._flush()
        if len(self.sizes) != len(self.centroids):
            raise InvariantViolatedError(f"{len(self.sizes)} of {len(self.centroids)} clusters were written.")
        return self.segment

    def _put(self, objects: Mapping[str, bytes]) -> None:
        self.objects |= {name: _signature(data) for name, data in objects.items()}
        self._waiting += [(self.segment.prefix + name, data) for name, data in objects.items()]
        if len(self._waiting) >= _WAITING_OBJECTS or sum(len(data) for _, data in self._waiting) >= _WAITING_BYTES:
            self._flush()

    def _flush(self) -> None:
        # Recorded before they are written: a run that is stopped in between removes objects that may exist.
        self.paths += [path for path, _ in self._waiting]
        with ThreadPoolExecutor(_UPLOADS) as pool:
            for _ in pool.map(lambda one: create(self.store, *one), self._waiting):
                pass
        self._waiting.clear()


def create(store: Store, path: str, data: bytes) -> None:
    """Create an object with a name that is unique to this run.

    Raises:
        InvariantViolatedError: there is another object of that name.
    """
    # "Exists" may be this run's own put, after a lost response.
    if not store.put_if_absent(path, data) and store.get(path) != data:
        raise InvariantViolatedError(f"{path} exists with other content, although its name is random.")


def _signature(data: bytes) -> tuple[int, str]:
    return len(data), xxhash.xxh3_64_hexdigest(data)


def _decoded(path: str, decode: Callable[[], T]) -> T:
    try:
        return decode()
    except UnstorableError as error:
        raise UnsupportedFeatureError(f"{path} cannot be read: {error}", remedy=remedies.SERVER) from error
    except InvalidFormatError as error:
        raise SegmentCorruptError(f"{path} cannot be read: {error}") from error
