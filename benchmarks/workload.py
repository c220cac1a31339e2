"""The benchmark's table: base rows with a BTREE on the key, regions with generations of updates and inserts.

Written by pylance's own MemWAL writer. Half of a generation updates base rows, half inserts new
keys that later generations repeat, 3 % are tombstones.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import numpy.typing as npt

VECTOR = 64
TOMBSTONES = 0.03
_BASE_SLICE = 500_000


def schema(vector: int = VECTOR) -> pa.Schema:
    """The columns; ``vector`` is the width of the last one."""
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
            pa.field("number", pa.int32()),
            pa.field("text", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), vector)),
        ]
    )


SCHEMA = schema()


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a workload; ``rows`` is per generation."""

    base: int = 2_000_000
    regions: int = 4
    generations: int = 10
    rows: int = 20_000
    vector: int = VECTOR

    def __str__(self) -> str:
        return f"{self.base:,} base rows, {self.regions} x {self.generations} generations of {self.rows:,}"


def make(uri: str, shape: Shape, *, seed: int = 7, storage_options: dict[str, str] | None = None) -> None:
    """Write the table to ``uri``, which must not exist."""
    for start in range(0, shape.base, _BASE_SLICE):
        keys = np.arange(start, min(start + _BASE_SLICE, shape.base))
        lance.write_dataset(
            rows(keys, 0, shape.vector), uri, mode="append" if start else "create", storage_options=storage_options
        )
    dataset = lance.dataset(uri, storage_options=storage_options)
    dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal()
    random = np.random.default_rng(seed)
    deleted = int(shape.rows * TOMBSTONES)
    updated = (shape.rows - deleted) // 2
    inserted = shape.rows - deleted - updated
    own = shape.base // shape.regions
    for region in range(shape.regions):
        with dataset.mem_wal_writer(str(uuid.UUID(int=region + 1, version=4)), max_memtable_rows=shape.rows) as writer:
            for generation in range(shape.generations):
                old = random.choice(own, min(updated, own), replace=False)
                new = own + random.choice(shape.generations * inserted // 2, inserted)
                keys = np.concatenate([old, new]) * shape.regions + region
                writer.put(rows(keys, generation + 1, shape.vector))
                gone = random.choice(own, min(deleted, own), replace=False) * shape.regions + region
                writer.delete(pa.table({"id": pa.array(gone, pa.int64())}))


def rows(keys: npt.NDArray[np.int64], stamp: int, vector: int = VECTOR) -> pa.Table:
    """Rows for ``keys``; ``stamp`` tells writes of one key apart."""
    vectors = np.random.default_rng(stamp).random((len(keys), vector), dtype=np.float32)
    return pa.table(
        {
            "id": pa.array(keys, pa.int64()),
            "number": pa.array((keys % 1000 + stamp).astype(np.int32)),
            "text": pa.array([f"row {key} of {stamp}" for key in keys.tolist()]),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vector),
        },
        schema=schema(vector),
    )
