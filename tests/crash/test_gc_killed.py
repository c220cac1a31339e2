"""Kill gc on S3, and collectors as processes beside all others: nothing that is needed goes, nothing else stays.

Every call of every job, on local files, is in tests/faults.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.jobs import catchup, expire, gc, merge
from tests.crash.dying_store import DyingStore, Killed
from tests.crash.gc_history import IMMEDIATE
from tests.crash.test_races import Patient, Restless
from tests.faults.tables import litter
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import _generation_rows, open_dataset, read_base, read_lsm, read_spec
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tables.model import Rows

NOW = expire.ExpireOptions(timedelta(0), 1)
ENOUGH_RUNS = 4
SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
PATIENCE = 60.0
# By this long the soak's collector outlives its readers; they need a small part of it.
GRACE = timedelta(seconds=3)


def to_the_end(uri: str, options: dict[str, str] | None = None) -> int:
    """Collect until nothing is left; how often something was."""
    for run in range(ENOUGH_RUNS):
        report = gc.apply(open_table(uri, options), IMMEDIATE)
        assert not report.failed
        if report.decision == "nothing_to_delete":
            return run
    raise AssertionError("gc does not come to an end")


def files_of(files: Files) -> set[str]:
    """All but what jobs write for themselves: probes and announcements of the killed ones."""
    return {path for path in files.listing("") if not path.startswith("_mem_wal_ops/")}


@pytest.mark.s3
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_gc_on_s3(bucket: tuple[str, dict[str, str]], after: bool) -> None:
    """At some calls of each kind; a copy of the table for each."""
    uri, options = bucket
    made = Workload(11, regions=1, base_rows=12, columns="vector").create(f"{uri}/t.lance", options)
    litter(made)
    made.close()
    source = Files(made.uri, options)
    original = {path: source.get(path) for path in source.listing("")}

    def copied(name: str) -> Files:
        files = Files(f"{uri}/{name}.lance", options)
        for path, data in original.items():
            files.put(path, data)
        return files

    unkilled = copied("unkilled")
    table = open_table(unkilled.uri, options)
    counting = DyingStore(table.store, 1 << 30, after=False)
    gc.apply(replace(table, store=counting), IMMEDIATE)
    to_the_end(unkilled.uri, options)
    wanted = files_of(unkilled)
    kinds = {
        name: [at for at, one in enumerate(counting.calls, 1) if one == name] for name in sorted(set(counting.calls))
    }
    rng = random.Random(5)
    for at in sorted({rng.choice(calls) for calls in kinds.values()} | {*kinds["delete_many"][-2:]}):
        files = copied(f"killed-{at}")
        table = open_table(files.uri, options)
        with pytest.raises(Killed):
            gc.apply(replace(table, store=DyingStore(table.store, at, after=after)), IMMEDIATE)
        assert_same(read_spec(files.uri, options), made.expected(), seed=f"call {at}")
        assert_same(read_lsm(files.uri, options), made.expected(), seed=f"call {at}")
        read_base(files.uri, options, version=lance.dataset(files.uri, version="kept", storage_options=options).version)
        to_the_end(files.uri, options)
        assert files_of(files) == wanted, f"call {at}"
        assert_same(read_spec(files.uri, options), made.expected(), seed=f"call {at}")


# -- processes


class Collector(Restless):
    """A process that expires and collects all the time, until it is killed; then it is started again."""

    def start(self) -> None:
        with self.said.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.gc_history", self.uri, str(GRACE.total_seconds())],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.dies_at = time.monotonic() + self.rng.uniform(1.0, 4.0)


def read_as_of_one_version(uri: str) -> tuple[Rows, dict[str, int]]:
    """A reader as they are: a version, the region manifests after it, then the generations above its progress.

    Returns:
        The rows, and up to which generation the regions were flushed.
    """
    files = Files(uri)
    while True:
        dataset = open_dataset(uri)
        try:
            rows = read_base(uri, version=dataset.version)
            manifest = wire.parse_manifest(files.get(wire.manifest_names(files)[dataset.version]))
        except (OSError, ValueError, KeyError):
            # A version that was superseded a moment ago may be expired; a newer one stands then.
            assert open_dataset(uri).version > dataset.version
            continue
        details = wire.decode(wire.mem_wal_details(manifest))
        progress = {wire.uuid_of(one, 1): int(wire.get(one, 2)) for one in wire.sub(details, 9)}
        names = {one.id(): one.name() for one in dataset.lance_schema.fields()}
        flushed = {}
        for region in wire.regions(files):
            state = wire.region_manifest(files, region)
            flushed[region] = state.current_generation - 1
            for number, path in sorted(state.generations.items()):
                if number > progress.get(region, 0):
                    for deleted, row in _generation_rows(f"{uri}/_mem_wal/{region}/{path}", None, names):
                        if deleted:
                            rows.pop((row["id"],), None)
                        else:
                            rows[row["id"],] = row
        return rows, flushed


@pytest.mark.req("S0-183", "S0-189", "S0-209")
def test_soak_of_collectors_beside_writers_mergers_and_readers(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED", "1"))
    rng = random.Random(seed)
    made = Patient(seed, regions=2, base_rows=60, max_memtable_rows=60)
    made.create(str(tmp_path / "t.lance"))
    actors = [Collector("gc", made.uri, rng), Collector("gc", made.uri, rng)]
    actors += [Restless(what, made.uri, rng) for what in ("merge", "index")]
    seen: set[str] = set()
    gone: set[str] = set()
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end or (time.monotonic() < end + PATIENCE and not gone):
            made.step()
            if rng.random() < 0.2:
                made.flush(rng.choice(made.regions))
            rows, flushed = read_as_of_one_version(made.uri)
            assert_same(rows, made.expected(flushed), seed=seed)
            standing = {path.rsplit("/", 1)[0] for path in Files(made.uri).listing("_mem_wal") if "_gen_" in path}
            gone |= seen - standing
            seen |= standing
            for actor in actors:
                actor.tend()
    finally:
        for actor in actors:
            actor.kill()
    assert gone, "nothing was collected while they raced"
    made.close()
    assert_same(read_lsm(made.uri), made.expected(), seed=seed)
    merge.apply(open_table(made.uri), merge.MergeOptions())
    catchup.apply(open_table(made.uri), catchup.CatchupOptions())
    expire.apply(open_table(made.uri), NOW)
    to_the_end(made.uri)
    assert_same(read_base(made.uri), made.expected(), seed=seed)
    assert not [path for path in Files(made.uri).listing("_mem_wal") if "_gen_" in path]
    made.step(3)
    made.close()
    merge.apply(open_table(made.uri), merge.MergeOptions())
    assert_same(read_base(made.uri), made.expected(), seed=seed)
