"""The maintenance processes: commands as an operator types them, and loops that never end.

``python -m tests.campaigns.soak.jobs WHAT FOLDER SEED`` runs one of the loops until it is killed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

from memwal_ops import open_table
from memwal_ops.errors import MemwalOpsError, SchemaProjectionError
from memwal_ops.formats.lance.jobs import expire, merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.campaigns.soak.account import note
from tests.campaigns.soak.place import OWNERS_REGION, Place
from tests.support.tables.reading import open_dataset

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

EXIT_VERSION_GONE = 26
OWNERS_FIRST_KEY = OWNERS_REGION << 44
_PYLANCE_LOST = ("onflict", "concurrent", "not found", "stale")
MAX_BYTES = 32 << 20


def command(place: Place, name: str, *arguments: str) -> list[str]:
    """A command line."""
    options = [text for key, value in place.options.items() for text in ("--storage-option", f"{key}={value}")]
    return [sys.executable, "-m", "memwal_ops", name, place.uri, *arguments, "--json", *options]


def careful(place: Place) -> list[str]:
    """The collector's options: as short as the soak's writers and readers can bear, which live for seconds."""
    grace = place.grace
    return [
        f"--reader-grace={grace}s", f"--orphan-min-age={3 * grace}s", f"--fence-retention={6 * grace}s",
        "--manifest-retention=3", f"--drain-after={grace}s", "--allow-unsafe",
    ]  # fmt: skip


def some_merge(place: Place, rng: random.Random) -> list[str]:
    """merge, in random slices."""
    few = rng.choice([[], [], ["--max-generations=1"], ["--max-generations=5"]])
    return command(place, "merge", f"--max-bytes={rng.choice([1 << 18, MAX_BYTES])}B", *few)


def some_build(place: Place, rng: random.Random) -> list[str]:
    """snapshot, catchup, compact, or a look."""
    match rng.randrange(6):
        case 0 | 1:
            return command(place, "snapshot", f"--inline-threshold={rng.choice([0, 100])}")
        case 2 | 3:
            return command(place, "catchup", f"--max-segments={rng.choice([1, 8])}")
        case 4:
            return command(place, "compact", f"--target-rows={rng.choice([20_000, 1 << 20])}")
        case _:
            return command(place, "inspect")


def some_collection(place: Place, rng: random.Random) -> list[str]:
    """expire, gc, or all jobs in a row."""
    grace = place.grace
    match rng.randrange(5):
        case 0 | 1:
            now = (f"--older-than={2 * grace}s", "--allow-unsafe")
            return command(place, "expire", *now, f"--keep={rng.choice([1, 3])}", "--apply")
        case 2 | 3:
            few = rng.choice([[], [f"--max-deletes={rng.randint(1, 200)}"]])
            return command(place, "gc", "--apply", *careful(place), *few)
        case _:
            return command(
                place, "maintain", "--apply", f"--older-than={2 * grace}s", *careful(place), f"--max-bytes={MAX_BYTES}B"
            )


COMMANDS = {"merge command": some_merge, "build command": some_build, "collect command": some_collection}


# -- loops


def merging(table: Table, place: Place, rng: random.Random) -> tuple[str, str, int]:
    """Merge in random slices."""
    report = merge.apply(
        table, merge.MergeOptions(max_bytes=rng.choice([1, 1 << 20, MAX_BYTES]), max_generations=rng.choice([None, 2]))
    )
    # Under load a flush may take longer than versions are kept here: then none shows its columns any more.
    assert all(isinstance(one.error, SchemaProjectionError) for one in report.blocked), [
        one.to_json() for one in report.blocked
    ]
    return "merge", report.decision, 0


def building(table: Table, place: Place, rng: random.Random) -> tuple[str, str, int]:
    """Snapshot, catch-up or compaction."""
    match rng.randrange(5):
        case 0 | 1:
            return "snapshot", snapshot.apply(table, snapshot.SnapshotOptions(rng.choice([0, 100]))).decision, 0
        case 2 | 3:
            return "catchup", catchup.apply(table, catchup.CatchupOptions(max_segments=rng.choice([1, 8]))).decision, 0
        case _:
            return "compact", compact.apply(table, compact.CompactOptions(rng.choice([20_000, 1 << 20]))).decision, 0


def collecting(table: Table, place: Place, rng: random.Random) -> tuple[str, str, int]:
    """Expire or collect."""
    grace = timedelta(seconds=place.grace)
    if rng.random() < 0.4:
        now = expire.ExpireOptions(2 * grace, rng.choice([1, 3]), allow_unsafe=True)
        return "expire", expire.apply(table, now).decision, 0
    options = gc.GcOptions(grace, 3 * grace, 3, 6 * grace, grace, max_deletes=rng.choice([None, 50]), allow_unsafe=True)
    report = gc.apply(table, options)
    assert not report.faults, report.faults
    if report.failed and "://" not in place.uri:
        raise AssertionError(report.failed)
    return "gc", report.decision, report.deleted_objects


def owning(_: Table, place: Place, rng: random.Random) -> tuple[str, str, int]:
    """What a table's owner does beside all that, with pylance alone."""
    dataset = place.dataset()
    match rng.randrange(6):
        case 0:
            dataset.optimize.compact_files(target_rows_per_fragment=rng.choice([20_000, 1 << 20]))
            return "owner", "compact_files", 0
        case 1:
            dataset.optimize.optimize_indices()
            return "owner", "optimize_indices", 0
        case 2:
            dataset.create_scalar_index("seq", "BTREE", replace=True)
            return "owner", "create_scalar_index", 0
        case _:
            raise_all(place, dataset, by_update=rng.random() < 0.5)
            return "owner", "update", 0


def raise_all(place: Place, dataset: lance.LanceDataset, *, by_update: bool) -> None:
    """Raise ``seq`` of all the owner's rows by one, in one commit: they are always all equal."""
    _tell(place, "tried")
    if by_update:
        dataset.update({"seq": "seq + 1"}, where=f"id >= {OWNERS_FIRST_KEY}")
    else:
        rows = dataset.to_table(filter=f"id >= {OWNERS_FIRST_KEY}")
        raised = rows.set_column(1, "seq", pa.array([value + 1 for value in rows["seq"].to_pylist()], pa.int64()))
        # Rows that were read at this version: no retries on a newer one.
        dataset.merge_insert("id").when_matched_update_all().conflict_retries(0).execute(raised)
    _tell(place, "done")


def merging_natively(table: Table, place: Place, rng: random.Random) -> tuple[str, str, int]:
    """Merge one region's next generation with pylance alone, which knows no tombstones; no second try."""
    region = rng.choice(table.regions.region_ids)
    generation = table.index.merged_generations.get(region, 0) + 1
    listed = {one.generation: one.path for one in table.region(region).latest().flushed_generations}
    if generation not in listed:
        return "native", "nothing to merge", 0
    names = table.dataset.schema.names
    rows = open_dataset(f"{place.uri}/_mem_wal/{region}/{listed[generation]}", place.options).to_table(columns=names)
    upsert = table.dataset.merge_insert("id").when_matched_update_all()
    upsert.when_not_matched_insert_all()
    upsert.mark_sstables_as_compacted([CompactedSsTable(str(region), generation)])
    upsert.conflict_retries(0).use_index(False).execute(rows.cast(table.dataset.schema))
    return "native", "merged", 0


def _tell(place: Place, what: str) -> None:
    with (Path(place.folder) / "owner").open("a") as file:
        file.write(f"{what}\n")


LOOPS = {
    "merge loop": merging,
    "build loop": building,
    "collect loop": collecting,
    "owner loop": owning,
    "native loop": merging_natively,
}
_PYLANCE = {"owner loop", "native loop"}


def main() -> None:
    """Run until killed, or until the parent process has ended; an unexpected error ends it with its traceback."""
    what, folder, seed = sys.argv[1:]
    place, rng = Place.load(folder), random.Random(int(seed))
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            job, outcome, deleted = LOOPS[what](open_table(place.uri, place.options), place, rng)
            note(folder, job, outcome, deleted=deleted)
        except MemwalOpsError as error:
            if error.exit_code not in place.lost_races:
                raise
            note(folder, what.split()[0], error.reason)
        except (OSError, ValueError) as error:
            if what not in _PYLANCE or not any(text in str(error).lower() for text in _PYLANCE_LOST):
                raise
            note(folder, what.removesuffix(" loop"), "lost a race")
        # The table's owner commits often, but leaves mergers a chance.
        time.sleep(rng.uniform(0.5, 2.0) if what in _PYLANCE else 0.1)


if __name__ == "__main__":
    main()
