"""A region's writer, until it is killed: ``python -m tests.soak.writer FOLDER REGION INCARNATION``.

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

from tests.soak.ledger import choose, number, region_id
from tests.soak.place import Place

if TYPE_CHECKING:
    from lance.mem_wal import ShardWriter

FENCED, FAILED = 3, 4
MEMTABLE_ROWS = 8000
_MOST_OPERATIONS = 1 << 15
# pylance opens the newest version and then its indexes; an expiry in between took the version.
_ATTEMPTS = 5
_ENDS = 0.04


def claim(place: Place, region: int) -> ShardWriter:
    """Open the region: a new epoch, and a replay of what was not flushed."""
    for attempt in range(_ATTEMPTS):
        try:
            return place.dataset().mem_wal_writer(
                region_id(region), max_memtable_rows=MEMTABLE_ROWS, max_wal_flush_interval_ms=1
            )
        except OSError as error:
            if "not found" not in str(error).lower() or attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError


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
