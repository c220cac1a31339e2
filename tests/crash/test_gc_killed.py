"""Kill gc and expire at each of their storage calls, and run them again: the same files are left, all reads right."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import StorageError, UnsupportedFeatureError
from memwal_ops.jobs import catchup, expire, gc, merge, snapshot
from memwal_ops.jobs.collectables import Kind, Verdict
from tests.crash.dying_store import DyingStore, Killed
from tests.crash.gc_history import IMMEDIATE, RegionTable, ShardTable, Witness
from tests.crash.test_races import Patient, Restless
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import _generation_rows, open_dataset, read_base, read_lsm, read_spec
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.core.table import Table
    from tests.tables.lsm_table import LsmTable
    from tests.tables.model import Rows

NOW = expire.ExpireOptions(timedelta(0), 1)
ENOUGH_RUNS = 4
# A run makes some 200 calls; each part dies at every fourth of them.
PARTS = 4
SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
PATIENCE = 60.0
# By this long the soak's collector outlives its readers; they need a small part of it.
GRACE = timedelta(seconds=3)


def fill(made: LsmTable) -> None:
    """Two generations and more per region."""
    for _ in range(2):
        for region in range(len(made.regions)):
            made.put([region, region + 2 * made.rng.randint(1, 20)])
            made.delete([region + 2])
        made.flush()


def litter(made: LsmTable) -> None:
    """Every kind of garbage, and of each something that is none, on a table that was just made."""
    uri, options = made.uri, made.storage_options

    def table() -> Table:
        return open_table(uri, options)

    fill(made)
    merge.apply(table(), merge.MergeOptions(max_generations=2))
    catchup.apply(table(), catchup.CatchupOptions())
    expire.apply(table(), NOW)
    assert gc.apply(table(), replace(IMMEDIATE, reader_grace=timedelta(hours=1))).drained  # and not deleted
    fill(made)
    merge.apply(table(), merge.MergeOptions())
    catchup.apply(table(), catchup.CatchupOptions())
    expire.apply(table(), NOW)  # these nobody needs, and the manifests list them still
    fill(made)
    snapshot.apply(table(), snapshot.SnapshotOptions(0))
    lance.dataset(uri, storage_options=options).tags.create("kept", table().version)
    fill(made)
    merge.apply(table(), merge.MergeOptions())
    catchup.apply(table(), catchup.CatchupOptions())
    leave_half_a_commit(made)
    merge.apply(table(), merge.MergeOptions())
    catchup.apply(table(), catchup.CatchupOptions())
    snapshot.apply(table(), snapshot.SnapshotOptions(0))
    files = Files(uri, options)
    (standing, *_) = [path for path in files.listing("_indices") if path.endswith("/index.lance")]
    files.put(f"_indices/{uuid.uuid4()}/index.lance", files.get(standing))
    made.put([0, 2])
    made.delete([4])


def leave_half_a_commit(made: LsmTable) -> None:
    """A merge that died between its detached manifest and its version."""
    files = Files(made.uri, made.storage_options)
    made.put([0, 2])
    made.flush()
    for at in range(1, 200):
        table = open_table(made.uri, made.storage_options)
        try:
            merge.apply(replace(table, store=DyingStore(table.store, at, after=True)), merge.MergeOptions())
        except (Killed, StorageError, UnsupportedFeatureError):
            if any(path.startswith("_versions/d") for path in files.listing("_versions")):
                return
    raise AssertionError("no call at which a merge leaves its detached manifest")


def to_the_end(uri: str, options: dict[str, str] | None = None) -> int:
    """Collect until nothing is left; how often something was."""
    for run in range(ENOUGH_RUNS):
        report = gc.apply(open_table(uri, options), IMMEDIATE)
        assert not report.failed
        if report.decision == "nothing_to_delete":
            return run
    raise AssertionError("gc does not come to an end")


def expire_to_the_end(uri: str) -> None:
    expire.apply(open_table(uri), NOW)
    assert expire.apply(open_table(uri), NOW).decision == "nothing_to_expire"


def files_of(files: Files) -> set[str]:
    """All but what jobs write for themselves: probes and announcements of the killed ones."""
    return {path for path in files.listing("") if not path.startswith("_mem_wal_ops/")}


@dataclass
class Littered:
    """A table, and a copy of its files to come back to: the region layout cannot be moved, its paths are absolute."""

    made: RegionTable | ShardTable
    backup: str
    witness: Witness

    def restore(self) -> None:
        shutil.rmtree(self.made.uri)
        shutil.copytree(self.backup, self.made.uri)


@pytest.fixture(params=[ShardTable, RegionTable])
def littered(request: pytest.FixtureRequest, tmp_path: Path) -> Littered:
    made = request.param(11, regions=1, base_rows=12).create(str(tmp_path / "t.lance"))
    litter(made)
    made.die_in_flush(made.regions[0])
    made.claim(made.regions[0])
    if isinstance(made, ShardTable):
        made.bury()
        for writer in made._writers.values():
            writer.close()
    backup = str(tmp_path / "backup")
    shutil.copytree(made.uri, backup)
    witness = Witness(made)
    witness.look(())
    return Littered(made, backup, witness)


def killed_everywhere(
    littered: Littered,
    kind: str,
    job: Callable[[Table], object],
    finish: Callable[[str], object],
    *,
    first: int = 1,
    step: int = 1,
    once: bool = False,
) -> int:
    """Die before and after every ``step``-th call, look, ``finish``, and compare; the number of calls."""
    uri = littered.made.uri
    finish(uri)
    wanted = files_of(Files(uri))
    number = first - step
    while True:
        number += step
        for after in (False, True):
            littered.restore()
            table = open_table(uri)
            dying = DyingStore(table.store, number, after=after, once=once)
            try:
                job(replace(table, store=dying))
            except (Killed, StorageError):
                pass
            else:
                if len(dying.calls) < number:
                    return number
            where = f"killed {'after' if after else 'before'} call {number}, {dying.calls[number - 1]}"
            try:
                witness = littered.witness.fork()
                witness.look({kind})
                finish(uri)
                witness.look({kind})
                assert files_of(Files(uri)) == wanted
            except AssertionError as error:
                error.add_note(where)
                raise


def test_there_is_every_kind_of_garbage(littered: Littered) -> None:
    """The other tests would prove little without it."""
    report = gc.plan(open_table(littered.made.uri), IMMEDIATE)
    there = {kind for kind, counter in report.counts.items() if counter[Verdict.DELETE]}
    assert there == set(Kind) - {Kind.UNKNOWN, Kind.BASE}
    held = {kind for kind, counter in report.counts.items() if counter[Verdict.HELD]}
    assert held >= {Kind.GENERATION, Kind.WAL_ENTRY, Kind.REGION_MANIFEST, Kind.SNAPSHOT}
    assert {item.drain for item in report.items[Verdict.DELETE] if item.kind is Kind.GENERATION} == {False, True}
    assert to_the_end(littered.made.uri) >= 1
    left = gc.plan(open_table(littered.made.uri), IMMEDIATE)
    assert left.counts[Kind.GENERATION][Verdict.HELD], "what the tag needs was collected"


@pytest.mark.req("S0-060", "S0-183", "S0-189", "S0-190")
@pytest.mark.parametrize("part", range(PARTS))
def test_gc(littered: Littered, part: int) -> None:
    calls = killed_everywhere(
        littered, "gc", lambda table: gc.apply(table, IMMEDIATE), to_the_end, first=part + 1, step=PARTS
    )
    assert calls > 50


def test_gc_that_is_told_to_end(littered: Littered) -> None:
    assert (
        killed_everywhere(littered, "gc", lambda table: gc.apply(table, IMMEDIATE), to_the_end, step=13, once=True) > 50
    )


def test_gc_that_may_delete_few(littered: Littered) -> None:
    """Directories that are half deleted are taken up again."""
    few = replace(IMMEDIATE, max_deletes=7)
    assert killed_everywhere(littered, "gc", lambda table: gc.apply(table, few), to_the_end, step=5) > 20


@pytest.mark.req("S0-189")
def test_expire(littered: Littered) -> None:
    hold = take_hold(
        open_table(littered.made.uri), int(lance.dataset(littered.made.uri).version) - 2, timedelta(hours=9)
    )
    shutil.rmtree(littered.backup)
    shutil.copytree(littered.made.uri, littered.backup)
    littered.witness.look(())
    calls = killed_everywhere(littered, "expire", lambda table: expire.apply(table, NOW), expire_to_the_end)
    assert calls > 15
    left = {version["version"] for version in lance.dataset(littered.made.uri).versions()}
    assert hold.versions[0] in left
    assert len(left) == 3  # the tag's, the hold's, the newest


@pytest.mark.s3
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_gc_on_s3(bucket: tuple[str, dict[str, str]], after: bool) -> None:
    """At some calls of each kind; a copy of the table for each."""
    uri, options = bucket
    made = Workload(11, regions=1, base_rows=12).create(f"{uri}/t.lance", options)
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
