"""The demo's table: orders, written by pylance's own MemWAL writer, and the check that a merge kept them.

Only the data are specific to the demo: any pylance program writes such a table, and the demo runs the real merge job on
it.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot

from memwal_ops.errors import InvariantViolatedError
from memwal_ops.formats.lance.generations.backlog import read_backlog

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

BASE_ORDERS = 3_000
REGIONS = 3
GENERATIONS = 4
_UPDATES, _NEW, _DELETED = 200, 100, 20
_VECTOR = 8

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("status", pa.string()),
        pa.field("amount", pa.float64()),
        pa.field("embedding", pa.list_(pa.float32(), _VECTOR)),
    ]
)

Order = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DemoTable:
    """The table's folder, the numbers of its writes, and the last write of every key."""

    uri: str
    updates: int
    inserts: int
    deletes: int
    expected: dict[int, Order]

    @property
    def writes(self) -> int:
        """Number of rows written, deletions included."""
        return self.updates + self.inserts + self.deletes


def make_table(path: str, *, seed: int = 7) -> DemoTable:
    """Create a table at an empty path: a base, then several regions with several generations each."""
    random_ = random.Random(seed)  # noqa: S311 - data, not secrets
    expected = {key: order(random_, key, "placed") for key in range(BASE_ORDERS)}
    dataset = lance.write_dataset(rows(expected.values()), path)
    dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal()
    counts = {"updates": 0, "inserts": 0, "deletes": 0}
    region_ids = [uuid.UUID(int=random_.getrandbits(128), version=4) for _ in range(REGIONS)]
    for region, region_id in enumerate(region_ids):
        # Every key belongs to exactly one region (here: id modulo 3), so that "newest" is unambiguous.
        for generation in range(GENERATIONS):
            with lance.dataset(path).mem_wal_writer(str(region_id)) as writer:
                own_keys = [key for key in expected if key % REGIONS == region]
                fresh = [BASE_ORDERS + (generation * _NEW + n) * REGIONS + region for n in range(_NEW)]
                touched = random_.sample(own_keys, _UPDATES)
                status = ("paid", "packed", "shipped", "delivered")[generation]
                orders = [order(random_, key, status) for key in [*touched, *fresh]]
                writer.put(rows(orders))
                deleted = random_.sample(own_keys, _DELETED)
                writer.delete(pa.table({"id": pa.array(deleted, pa.int64())}))
            expected.update({record["id"]: record for record in orders})
            for key in deleted:
                del expected[key]
            counts["updates"] += len(touched)
            counts["inserts"] += len(fresh)
            counts["deletes"] += len(deleted)
    return DemoTable(path, expected=expected, **counts)


def last_write_wins(table: Table) -> dict[int, Order]:
    """The rows that pylance's own LSM scanner returns: base and unmerged generations, newest row of each key."""
    snapshots = []
    for region_id, region in read_backlog(table).regions.items():
        snapshot = ShardSnapshot(str(region_id)).with_current_generation(region.manifest.current_generation)
        for ref in region.pending:
            snapshot = snapshot.with_sstable(ref.generation, ref.path)
        snapshots.append(snapshot)
    columns = SCHEMA.names
    return by_key(LsmScanner.from_snapshots(table.dataset, snapshots).project(columns).to_table())


def base_rows(table: Table) -> dict[int, Order]:
    """The base table alone, by key."""
    stored = table.dataset.to_table()
    rows = by_key(stored)
    if len(rows) != stored.num_rows:
        raise InvariantViolatedError(f"{stored.num_rows - len(rows)} keys are in the base table twice.")
    return rows


def by_key(table: pa.Table) -> dict[int, Order]:
    """The rows by key."""
    return {row["id"]: row for row in table.to_pylist()}


def order(random_: random.Random, key: int, status: str) -> Order:
    """An order with random values."""
    # Quarters are exact in float32, so rows compare exactly.
    vector = [random_.randrange(1024) / 4 for _ in range(_VECTOR)]
    return {"id": key, "status": status, "amount": random_.randrange(100_000) / 100, "embedding": vector}


def rows(orders: Any) -> pa.Table:
    """Orders as the table has them."""
    return pa.Table.from_pylist(list(orders), schema=SCHEMA)
