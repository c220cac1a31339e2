"""Processes beside a table that an index follows: ``... write URI REGION SEED``, which puts and deletes rows by MemWAL
until it is killed, and ``... search URI FOLDER SEED``, which judges each answer by the version that the index follows.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from functools import lru_cache

import lance
import numpy as np
import pyarrow as pa

from memwal_ops.formats import lm_diskann
from memwal_ops.memwal import RegionWriter, WriterLimits
from tests.support.tables.schemas import PRIMARY_KEY

DIMENSION, ROWS, K = 8, 1500, 5
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("vec", pa.list_(pa.float32(), DIMENSION)),
    ]
)


def rows(ids: np.ndarray, random: np.random.Generator) -> pa.Table:
    """Rows with new vectors."""
    flat = pa.array(random.normal(size=len(ids) * DIMENSION).astype(np.float32))
    return pa.table([pa.array(ids, pa.int64()), pa.FixedSizeListArray.from_arrays(flat, DIMENSION)], schema=SCHEMA)


def write(uri: str, region: str, seed: str) -> None:
    """Each row belongs to this writer's region alone: ids of one parity."""
    random = np.random.default_rng(int(seed))
    parity = int(region.replace("-", "")[-1], 16) % 2
    limits = WriterLimits(memtable_rows=60, wal_interval=timedelta(milliseconds=20))
    writer = RegionWriter(uri, region, limits=limits)
    while True:
        ids = np.unique(2 * random.integers(0, ROWS // 2, random.integers(1, 20)) + parity)
        if random.random() < 0.3:
            writer.delete(pa.table({"id": pa.array(ids, pa.int64())}))
        else:
            writer.put(rows(ids, random))
        time.sleep(0.05)


@lru_cache(16)
def version_of(uri: str, version: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and vectors of a version."""
    table = lance.dataset(uri, version=version).to_table(columns=["id", "vec"])
    vectors = np.stack(table["vec"].to_numpy()) if len(table) else np.zeros((0, DIMENSION), np.float32)
    return table["id"].to_numpy(), vectors


def search(uri: str, folder: str, seed: str) -> None:
    """Search for rows and for places between them, and print how often, and up to which version."""
    random, parent, searches = np.random.default_rng(int(seed)), os.getppid(), 0
    with lm_diskann.open(folder, read_only=True) as index:
        while os.getppid() == parent:
            _, known = version_of(uri, index.view.state.followed)
            queries = known[random.integers(0, len(known), 8)]
            queries[4:] += random.normal(size=(4, DIMENSION)).astype(np.float32) / 4
            found, distances = index.search(queries, k=K, L=200)
            followed = index.view.state.followed  # of the view that was searched
            ids, vectors = version_of(uri, followed)
            place = dict(zip(ids.tolist(), range(len(ids)), strict=True))
            for query, near, far in zip(queries, found.tolist(), distances.tolist(), strict=True):
                exact = ((vectors - query) ** 2).sum(1)
                for one, distance in zip(near, far, strict=True):
                    assert one in place, f"row {one} is not in version {followed}"
                    assert np.isclose(exact[place[one]], distance, atol=1e-4), f"row {one} of another version"
                assert far[0] <= exact.min() + 1e-4, f"the nearest row of version {followed} is missed"
            searches += len(queries)
            sys.stdout.write(f"{searches} {followed}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    {"write": write, "search": search}[sys.argv[1]](*sys.argv[2:])
