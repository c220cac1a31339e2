"""Processes that work on one table until they are killed: ``python -m tests.crash.restless WHAT URI SEED``."""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

from memwal_ops import open_table
from memwal_ops.errors import CommitConflictError, CommitStateUnknownError
from memwal_ops.jobs import catchup, snapshot
from memwal_ops.jobs import merge as job

# From here on, keys belong to the table's owner: no region ever writes them.
OWNERS_FIRST_KEY = 10**12 * 5
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


def compact(uri: str, rng: random.Random) -> None:
    """What a table's owner does for its fragments."""
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=rng.choice([100, 1000]))


def maintain(uri: str, rng: random.Random) -> None:
    """What a table's owner does beside the mergers, with pylance alone."""
    dataset = lance.dataset(uri)
    match rng.randrange(4):
        case 0:
            dataset.optimize.compact_files(target_rows_per_fragment=rng.choice([100, 1000]))
        case 1:
            dataset.optimize.optimize_indices()
        case 2:
            dataset.create_scalar_index("val", "BTREE", replace=True)
        case _:
            dataset.cleanup_old_versions(older_than=timedelta(seconds=2))


def clean_up(uri: str, rng: random.Random) -> None:
    """Take every version away that is older than a commit takes, as fast as they come, and rewrite fragments.

    Not younger ones: pylance's own update and compaction, with nobody else there, then lose and double
    rows, because a commit that is rebased passes over versions that are gone.
    """
    if rng.random() < 0.3:
        lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=rng.choice([100, 1000]))
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(seconds=2))


def own(uri: str, rng: random.Random) -> None:
    """Raise ``val`` of all the owner's rows by one, in one commit: they are always all equal."""
    dataset = lance.dataset(uri)
    _note(uri, "tried")
    if rng.random() < 0.5:
        dataset.update({"val": "val + 1"}, where=f"id >= {OWNERS_FIRST_KEY}")
    else:
        rows = dataset.to_table(filter=f"id >= {OWNERS_FIRST_KEY}")
        raised = rows.set_column(1, "val", pa.array([value + 1 for value in rows["val"].to_pylist()], pa.float32()))
        # Rows that were read at this version: no retries on a newer one.
        dataset.merge_insert("id").when_matched_update_all().conflict_retries(0).execute(raised)
    _note(uri, "done")


def native(uri: str, rng: random.Random) -> None:
    """Merge one region's next generation with pylance alone; no deletes, no second try."""
    table = open_table(uri)
    region = rng.choice(table.regions.region_ids)
    generation = table.index.merged_generations.get(region, 0) + 1
    listed = {one.generation: one.path for one in table.region(region).latest().flushed_generations}
    if generation in listed:
        rows = lance.dataset(f"{uri}/_mem_wal/{region}/{listed[generation]}").to_table(
            columns=table.dataset.schema.names
        )
        upsert = table.dataset.merge_insert("id").when_matched_update_all()
        upsert.when_not_matched_insert_all()
        upsert.mark_sstables_as_compacted([CompactedSsTable(str(region), generation)])
        upsert.conflict_retries(0).use_index(False).execute(rows.cast(table.dataset.schema))


def _note(uri: str, what: str) -> None:
    with Path(f"{uri}.owner").open("a") as file:
        file.write(f"{what}\n")


ACTIONS = {
    "merge": merge,
    "index": index,
    "compact": compact,
    "maintain": maintain,
    "clean_up": clean_up,
    "own": own,
    "native": native,
}


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
