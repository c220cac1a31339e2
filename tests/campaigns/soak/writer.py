"""A region's writer, until it is killed: ``python -m tests.campaigns.soak.writer FOLDER REGION INCARNATION``.

It claims the region once, when it starts: so the numbers of incarnations rise with the log.

Exit codes: 0 it closed the region, which flushes it, or its parent is gone; 3 it was fenced by another
writer; 4 the store failed (a writer that is told of a failed write does not know what
stands, as one that was killed).
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from tests.campaigns.soak.ledger import choose, number, region_id
from tests.campaigns.soak.place import Place

if TYPE_CHECKING:
    from lance.mem_wal import ShardWriter

FENCED, FAILED = 3, 4
MEMTABLE_ROWS = 8000
_MOST_OPERATIONS = 1 << 15
# pylance opens the newest version and then its indexes; an expiry in between took the version.
_ATTEMPTS = 200
_NO_ROOM = "past what the memtable replaying it can hold"
_MOST_ROWS = 1 << 20
_ENDS = 0.04


def claim(place: Place, region: int) -> ShardWriter:
    """Open the region: a new epoch, and a replay of what was not flushed.

    A write whose answer was lost stands in the log twice (tests/integration/contracts/test_lost_answers.py), so that a
    replay may need more room than the writer had.
    """
    attempts, rows = 1, MEMTABLE_ROWS
    while True:
        try:
            return place.dataset().mem_wal_writer(
                region_id(region), max_memtable_rows=rows, max_wal_flush_interval_ms=1
            )
        except OSError as error:
            if _NO_ROOM in str(error) and rows < _MOST_ROWS:
                rows *= 2
            elif "not found" in str(error).lower() and attempts < _ATTEMPTS:
                attempts += 1
            else:
                raise


def write(place: Place, region: int, incarnation: int) -> None:
    """Put and delete at the place's pace; sometimes close the writer, which flushes, and end."""
    rng = np.random.default_rng([place.seed, region, incarnation])
    ledger = place.ledger(region)
    writer = claim(place, region)
    parent, started, written = os.getppid(), time.monotonic(), 0
    for count in range(1, _MOST_OPERATIONS):
        if os.getppid() != parent:
            break
        operation = choose(ledger, number(incarnation, count), rng, place.sizes, deletes=place.deletes)
        rows = operation.table(place.seed, region)
        ledger.begin(operation)
        if operation.kind == "delete":
            writer.delete(rows)
        else:
            writer.put(rows)
            written += operation.rows
        ledger.acknowledge(operation)
        if rng.random() < _ENDS:
            break
        due = started + written / (place.rows_per_second / place.regions)
        time.sleep(min(1.0, max(0.0, due - time.monotonic())))
    writer.close()


def main() -> None:
    """Write until killed, or fenced."""
    folder, region, incarnation = sys.argv[1:]
    try:
        write(Place.load(folder), int(region), int(incarnation))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        # The writer's own threads may wait for the store still.
        sys.stderr.flush()
        os._exit(FENCED if "fenced" in str(error).lower() else FAILED)


if __name__ == "__main__":
    main()
