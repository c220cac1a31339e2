"""The demo's table: orders, written by pylance's own MemWAL writer, and the proof that a merge kept them.

Nothing in here is special to the demo but the data: the table is what any pylance program would
have made, and the merge that runs on it is the merge job.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot

from memwal_ops.core.backlog import read_backlog
from memwal_ops.errors import InvalidUsageError, InvariantViolatedError

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.core.table import Table

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
    """The table's folder, how many writes it took, and the last write of every key."""

    uri: str
    updates: int
    inserts: int
    deletes: int
    expected: dict[int, Order]

    @property
    def writes(self) -> int:
        """Rows that the writers took, deletions included."""
        return self.updates + self.inserts + self.deletes


def make_table(folder: Path, *, seed: int = 7) -> DemoTable:
    """Make ``orders.lance`` in ``folder``: a base, then several regions with several generations each.

    Raises:
        InvalidUsageError: the folder has an ``orders.lance`` already, which is left alone, or cannot be made.
    """
    path = folder / "orders.lance"
    if path.exists():
        raise InvalidUsageError(
            f"{path} exists already; it was left alone.", remedy="Give another --dir, or remove it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidUsageError(
            f"The folder {folder} cannot be made: {error.strerror}.", remedy="Give another --dir."
        ) from error
    random_ = random.Random(seed)  # noqa: S311 - data, not secrets
    expected = {key: _order(random_, key, "placed") for key in range(BASE_ORDERS)}
    dataset = lance.write_dataset(_rows(expected.values()), str(path))
    dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal()
    counts = {"updates": 0, "inserts": 0, "deletes": 0}
    region_ids = [uuid.UUID(int=random_.getrandbits(128), version=4) for _ in range(REGIONS)]
    for region, region_id in enumerate(region_ids):
        # Every key belongs to exactly one region (here: id modulo 3), so that "newest" has one answer.
        for generation in range(GENERATIONS):
            with lance.dataset(str(path)).mem_wal_writer(str(region_id)) as writer:
                mine = [key for key in expected if key % REGIONS == region]
                fresh = [BASE_ORDERS + (generation * _NEW + n) * REGIONS + region for n in range(_NEW)]
                touched = random_.sample(mine, _UPDATES)
                status = ("paid", "packed", "shipped", "delivered")[generation]
                orders = [_order(random_, key, status) for key in [*touched, *fresh]]
                writer.put(_rows(orders))
                gone = random_.sample(mine, _DELETED)
                writer.delete(pa.table({"id": pa.array(gone, pa.int64())}))
            expected.update({order["id"]: order for order in orders})
            for key in gone:
                del expected[key]
            counts["updates"] += len(touched)
            counts["inserts"] += len(fresh)
            counts["deletes"] += len(gone)
    return DemoTable(str(path), expected=expected, **counts)


def last_write_wins(table: Table) -> dict[int, Order]:
    """The table through pylance's own LSM scanner: base and unmerged generations, newest row of each key."""
    snapshots = []
    for region_id, region in read_backlog(table).regions.items():
        snapshot = ShardSnapshot(str(region_id)).with_current_generation(region.manifest.current_generation)
        for ref in region.pending:
            snapshot = snapshot.with_sstable(ref.generation, ref.path)
        snapshots.append(snapshot)
    columns = SCHEMA.names
    return _by_key(LsmScanner.from_snapshots(table.dataset, snapshots).project(columns).to_table())


def base_rows(table: Table) -> dict[int, Order]:
    """The base table alone, by key."""
    rows = table.dataset.to_table()
    found = _by_key(rows)
    if len(found) != rows.num_rows:
        raise InvariantViolatedError(f"{rows.num_rows - len(found)} keys stand twice in the base table.")
    return found


def _by_key(table: pa.Table) -> dict[int, Order]:
    return {row["id"]: row for row in table.to_pylist()}


def _order(random_: random.Random, key: int, status: str) -> Order:
    # Halves and quarters survive the way through float32 unchanged, so rows compare exactly.
    vector = [random_.randrange(1024) / 4 for _ in range(_VECTOR)]
    return {"id": key, "status": status, "amount": random_.randrange(100_000) / 100, "embedding": vector}


def _rows(orders: Any) -> pa.Table:
    return pa.Table.from_pylist(list(orders), schema=SCHEMA)
