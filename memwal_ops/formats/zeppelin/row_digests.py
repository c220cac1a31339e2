"""Compare the rows of two tables by 64-bit hashes of ids and of whole rows.

Two ids with one hash, which happens once in 10**5 tables of ten million rows, make a comparison fail, not succeed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memwal_ops.formats.zeppelin.attribute_columns import ID, VECTOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext


def digests(batch: pa.RecordBatch) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Per row a 64-bit hash of its id, and one of all its values; equal rows of two tables have equal hashes."""
    width = batch.schema.field(VECTOR).type.list_size
    vectors = np.ascontiguousarray(batch.column(VECTOR).flatten().to_numpy(zero_copy_only=False)).reshape(-1, width)
    names = sorted({*batch.schema.names} - {ID, VECTOR})
    others: Iterable[dict[str, Any]] = batch.select(names).to_pylist() if names else ({} for _ in vectors)
    texts = (json.dumps({k: v for k, v in one.items() if v is not None}, sort_keys=True) for one in others)
    ids = batch.column(ID).to_pylist()
    rows = (
        xxhash.xxh3_64_intdigest(f"{name}\0{text}\0".encode("utf-8", "surrogatepass") + vector.tobytes())
        for name, text, vector in zip(ids, texts, vectors, strict=True)
    )
    return id_hashes(ids), np.fromiter(rows, np.uint64, len(ids))


def id_hashes(ids: Iterable[str]) -> NDArray[np.uint64]:
    """Per id its 64-bit hash."""
    return np.array([xxhash.xxh3_64_intdigest(one.encode()) for one in ids], np.uint64)


@dataclass(frozen=True)
class Digests:
    """The hashes of a table's ids, ascending, and those of their rows: 16 bytes a row."""

    ids: NDArray[np.uint64]
    rows: NDArray[np.uint64]

    @classmethod
    def of(cls, batches: Iterator[pa.RecordBatch], context: RunContext) -> Digests:
        """The hashes of rows in any order."""
        parts = []
        for batch in batches:
            parts.append(digests(batch))
            context.advance("comparing", "rows", batch.num_rows)
        if not parts:
            return cls(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        ids, rows = (np.concatenate(both) for both in zip(*parts, strict=True))
        order = np.argsort(ids)
        return cls(ids[order], rows[order])

    def places(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Per id its position, and whether it exists."""
        at = np.minimum(np.searchsorted(self.ids, ids), max(0, len(self.ids) - 1))
        return at, (self.ids[at] == ids) if len(self.ids) else np.zeros(len(ids), np.bool_)

    def has(self, ids: NDArray[np.uint64], rows: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Per row whether an equal row exists."""
        at, known = self.places(ids)
        return known & (self.rows[at] == rows) if len(self.ids) else known

    def __eq__(self, other: object) -> bool:
        """Whether both have the same rows."""
        if not isinstance(other, Digests):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]
