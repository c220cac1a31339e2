"""Processes that work on one table until they are killed: ``python -m tests.crash.restless WHAT URI SEED``."""

from __future__ import annotations

import random
import sys

from memwal_ops import open_table
from memwal_ops.errors import CommitConflictError, CommitStateUnknownError
from memwal_ops.jobs import catchup, snapshot
from memwal_ops.jobs import merge as job

_LOST_RACES = ("onflict", "concurrent", "not found", "stale")


def merge(uri: str, rng: random.Random) -> None:
    """Merge in random slices."""
    options = job.MergeOptions(max_bytes=rng.choice([1, 20_000, 1 << 30]), max_generations=rng.choice([None, 1, 2, 5]))
    try:
        report = job.apply(open_table(uri), options)
    except CommitConflictError:
        return
    if report.blocked:
        sys.exit(f"blocked: {[one.to_json() for one in report.blocked]}")


def index(uri: str, rng: random.Random) -> None:
    """Snapshots and catch-up, one after the other."""
    table = open_table(uri)
    try:
        if rng.random() < 0.5:
            snapshot.apply(table, snapshot.SnapshotOptions(rng.choice([0, 100])))
        else:
            catchup.apply(table, catchup.CatchupOptions(max_segments=rng.choice([1, 8])))
    except (CommitConflictError, CommitStateUnknownError):
        return


ACTIONS = {"merge": merge, "index": index}


def main() -> None:
    """Go on for ever; an error ends the process with its traceback."""
    what, uri, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    while True:
        try:
            ACTIONS[what](uri, rng)
        except (OSError, ValueError) as error:
            # Losing a race is what pylance's own commands do; anything else ends the process.
            if not any(text in str(error).lower() for text in _LOST_RACES):
                raise


if __name__ == "__main__":
    main()
