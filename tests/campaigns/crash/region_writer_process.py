"""A writer of one region that tells of each operation before and after.

``python -m tests.campaigns.crash.region_writer_process URI REGION INCARNATION FIRST_KEY LEDGER``

Lines of the ledger: ``try STAMP KEY``, ``gone STAMP KEY`` (a delete) and ``ack STAMP``. A key is written by one process
at a time: its own, or those of two incarnations before, which are dead by then. Stamps of a key rise.
"""

from __future__ import annotations

import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import pyarrow as pa

from memwal_ops.errors import WriterFencedError
from memwal_ops.memwal import RegionWriter, WriterLimits
from tests.support.tables.schemas import PRIMARY_KEY

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("stamp", pa.int64()),
        pa.field("text", pa.string()),
    ]
)
MANY = 100_000
GRACE_SECONDS = 5
"""What gc leaves to a reader of a region's state; an error within that time is one."""


def rows(stamps: dict[int, int]) -> pa.Table:
    """What a stamp of a key makes of its row."""
    whole = [{"id": key, "stamp": stamp, "text": f"{key}/{stamp}"} for key, stamp in stamps.items()]
    return pa.Table.from_pylist(whole, schema=SCHEMA)


def main() -> None:
    """Write until the process is killed, or fenced."""
    uri, region, number, first_key, path = sys.argv[1:]
    incarnation = int(number)
    rng = random.Random(f"{region}/{incarnation}")
    limits = WriterLimits(
        memtable_rows=rng.choice([40, 400]), wal_interval=timedelta(milliseconds=rng.choice([5, 200]))
    )
    mine, dead = (int(first_key) + one * MANY for one in (incarnation, incarnation - 2))
    with Path(path).open("a", buffering=1) as ledger:
        durable, began = rng.random() < 0.7, time.monotonic()
        try:
            writer = RegionWriter(uri, region, durable=durable, indexed=True, limits=limits)
        except Exception:
            if time.monotonic() - began < GRACE_SECONDS:
                raise
            return  # it was overtaken, and gc took what it was about to read
        try:
            for at in range(1, MANY):
                stamp = incarnation * MANY + at
                first = dead if incarnation > 2 and rng.random() < 0.2 else mine
                stamps = {first + rng.randrange(1 + min(at, 300)): stamp for _ in range(rng.randint(1, 6))}
                what = "gone" if rng.random() < 0.15 else "try"
                ledger.writelines(f"{what} {stamp} {key} {stamp}\n" for key in stamps)
                if what == "gone":
                    writer.delete(pa.table({"id": pa.array([*stamps], pa.int64())}))
                else:
                    writer.put(rows(stamps))
                if not writer._durable:
                    writer.flush_log()
                ledger.write(f"ack {stamp}\n")
                if rng.random() < 0.02:
                    writer.flush()
        except WriterFencedError:
            return


if __name__ == "__main__":
    main()
