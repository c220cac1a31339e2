"""Mergers race, are killed with -9 and start again, beside live writers and the owner's own maintenance."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.snapshots import read_snapshot
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.format.names import parse_version_manifest_name
from memwal_ops.format.version_manifest import decode_version_manifest
from memwal_ops.jobs import catchup, snapshot
from memwal_ops.jobs import merge as job
from tests.crash.restless import OWNERS_FIRST_KEY
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base, read_lsm
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from uuid import UUID

    from lance.mem_wal import ShardWriter

    from tests.tables.model import Rows

OWNERS_ROWS = 40
PATIENCE = 60.0
SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))


class Restless:
    """One process of tests.crash.restless, started again each time it was killed."""

    def __init__(self, what: str, uri: str, rng: random.Random) -> None:
        self.what, self.uri, self.rng = what, uri, rng
        self.said = Path(f"{uri}.{what}-{rng.randrange(1 << 30)}.stderr")
        self.start()

    def start(self) -> None:
        seed = str(self.rng.randrange(1 << 30))
        with self.said.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.restless", self.what, self.uri, seed],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        # Long enough to get past the imports, short enough to die within every kind of step.
        self.dies_at = time.monotonic() + self.rng.uniform(1.0, 3.0)

    def tend(self) -> None:
        if self.process.poll() is not None:
            text = self.said.read_text()[-3000:]
            raise AssertionError(f"{self.what} ended by itself with {self.process.returncode}:\n{text}")
        if time.monotonic() > self.dies_at:
            self.kill()
            self.start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def progress_by_version(uri: str) -> list[dict[UUID, int]]:
    """The merge progress of every version that still stands, oldest first."""
    files = Files(uri, None)
    found = {}
    for path in files.listing("_versions"):
        name = parse_version_manifest_name(path.rsplit("/", 1)[-1])
        if name is not None and not name.detached:
            indexes = decode_version_manifest(files.get(path)).indexes
            entry = None if indexes is None else find_memwal_entry(indexes)
            found[name.version] = {} if entry is None else dict(decode_memwal_index(entry).merged_generations)
    return [found[version] for version in sorted(found)]


class Patient(Workload):
    """Opens its writers again where a clean-up took the version from under them; nothing is written by then."""

    def writer(self, region: str) -> ShardWriter:
        while True:
            try:
                return super().writer(region)
            except OSError as error:
                if "Not found" not in str(error):
                    raise


def add_owners_rows(table: Workload) -> None:
    """Rows that only the table's owner writes, in one fragment with rows that regions write."""
    keys = range(OWNERS_FIRST_KEY, OWNERS_FIRST_KEY + OWNERS_ROWS)
    rows = pa.Table.from_pylist([{"id": key, "val": 0.0, "txt": "owner"} for key in keys], schema=table.schema)
    lance.write_dataset(rows, table.uri, mode="append").optimize.compact_files()


def of_regions(rows: Rows) -> Rows:
    return {key: row for key, row in rows.items() if key[0] < OWNERS_FIRST_KEY}


def check_owners_rows(uri: str) -> None:
    """None lost, none twice, all equal, and no update of theirs undone."""
    values = [row["val"] for key, row in read_base(uri).items() if key[0] >= OWNERS_FIRST_KEY]
    said = Path(f"{uri}.owner").read_text().split() if os.path.exists(f"{uri}.owner") else []
    assert len(values) == OWNERS_ROWS
    assert len(set(values)) == 1
    assert said.count("done") <= values[0] <= said.count("tried")


def check_indexes(uri: str) -> None:
    """After one more run, every index covers all, and says so; the snapshot has every region."""
    catchup.apply(open_table(uri), catchup.CatchupOptions())
    snapshot.apply(open_table(uri), snapshot.SnapshotOptions())
    table = open_table(uri)
    for name, index in base_indexes(table).items():
        assert coverage(index.covered, table.manifest).complete
        assert table.index.index_catchup.get(name) == table.index.merged_generations
    found = read_snapshot(table)
    assert found is not None
    assert tuple(row.region_id for row in found.regions) == table.regions.region_ids
    dataset = lance.dataset(uri)
    for number in range(0, 60, 7):
        assert dataset.count_rows(f"id = {number}") == len(dataset.to_table(filter=f"id + 0 = {number}"))


def write(table: Workload, *, deletes: bool) -> None:
    if deletes:
        table.step(3)
        return
    at = table.rng.randrange(len(table.regions))
    table.put([*table._some(table._live[at], 20), table._fresh(at), table._fresh(at)])
    if table.rng.random() < 0.2:
        table.flush(table.regions[at])


@pytest.mark.req("S0-157", "S0-168", "S0-212")
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize(
    "beside",
    [("maintain",), ("own", "clean_up"), ("native", "maintain"), ("index", "index", "compact"), ("index", "maintain")],
    ids="+".join,
)
def test_soak(tmp_path: Path, beside: tuple[str, ...], stable: bool) -> None:
    seed = int(os.environ.get("SOAK_SEED", "1"))
    rng = random.Random(seed)
    table = Patient(seed, regions=3, base_rows=600, max_memtable_rows=80, stable_row_ids=stable)
    table.create(str(tmp_path / "t.lance"))
    add_owners_rows(table)
    actors = [Restless(what, table.uri, rng) for what in ("merge", "merge", *beside)]
    end = time.monotonic() + SECONDS
    try:
        # Where the machine is busy with other tests, the mergers may need longer to get to anything.
        while time.monotonic() < end or (
            time.monotonic() < end + PATIENCE and not wire.progress(Files(table.uri, None))
        ):
            # pylance's own mergers know no tombstones.
            write(table, deletes="native" not in beside)
            for actor in actors:
                actor.tend()
    finally:
        for actor in actors:
            actor.kill()
    table.close()
    merged = dict(wire.progress(Files(table.uri, None)))
    assert_same(of_regions(read_base(table.uri)), table.expected(merged), seed=seed)
    assert_same(of_regions(read_lsm(table.uri)), table.expected(), seed=seed)
    history = progress_by_version(table.uri)
    for earlier, later in pairwise(history):
        assert all(later.get(region, 0) >= generation for region, generation in earlier.items())
    job.apply(open_table(table.uri), job.MergeOptions())
    assert_same(of_regions(read_base(table.uri)), table.expected(), seed=seed)
    check_owners_rows(table.uri)
    check_indexes(table.uri)
    assert sum(merged.values()) > 0, "nothing was merged while they raced"
