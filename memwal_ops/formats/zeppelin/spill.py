"""Group rows by cluster: in memory up to a budget, then in local files."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from memwal_ops.formats.zeppelin.segments import Rows, joined
from memwal_ops.formats.zeppelin.wire.segment import (
    decode_attributes,
    decode_cluster,
    encode_attributes,
    encode_cluster,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


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


class Spill:
    """Rows by cluster: in memory up to ``max_bytes``, then in local files, deleted at the end of the run."""

    def __init__(self, max_bytes: int, clusters: int, dimensions: int) -> None:
        self._max_bytes, self._dimensions = max_bytes, dimensions
        self._held: list[list[Rows]] = [[] for _ in range(clusters)]
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the files."""
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
            found = joined([*self._read(number), *self._held[number]], self._dimensions)
            self._held[number] = []
            yield found

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
