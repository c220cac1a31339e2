"""Processes that work on one table until they are killed: ``python -m tests.crash.restless WHAT URI SEED``."""

from __future__ import annotations

import random
import sys
from datetime import timedelta

import lance

from memwal_ops import open_table
from memwal_ops.errors import CommitConflictError
from memwal_ops.jobs import merge as job


def merge(uri: str, rng: random.Random) -> None:
    """Merge in random slices."""
    options = job.MergeOptions(max_bytes=rng.choice([1, 20_000, 1 << 30]), max_generations=rng.choice([None, 1, 2, 5]))
    try:
        report = job.apply(open_table(uri), options)
    except CommitConflictError:
        return
    if report.blocked:
        sys.exit(f"blocked: {[one.to_json() for one in report.blocked]}")


def maintain(uri: str, rng: random.Random) -> None:
    """What a table's owner does beside the mergers, with pylance alone."""
    dataset = lance.dataset(uri)
    try:
        match rng.randrange(4):
            case 0:
                dataset.optimize.compact_files(target_rows_per_fragment=rng.choice([100, 1000]))
            case 1:
                dataset.optimize.optimize_indices()
            case 2:
                dataset.create_scalar_index("val", "BTREE", replace=True)
            case _:
                dataset.cleanup_old_versions(older_than=timedelta(seconds=2))
    except OSError as error:
        # Losing a race to a merger is what these do; anything else ends the process.
        if "onflict" not in str(error) and "concurrent" not in str(error) and "not found" not in str(error).lower():
            raise


def main() -> None:
    """Go on for ever; an error ends the process with its traceback."""
    what, uri, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    while True:
        {"merge": merge, "maintain": maintain}[what](uri, rng)


if __name__ == "__main__":
    main()
