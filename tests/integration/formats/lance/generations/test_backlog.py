"""What waits: in order, never over a hole, and never stopped by a region that does not exist yet."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.inspect import job as inspect
from memwal_ops.formats.lance.wire.region_manifest import (
    FlushedGeneration,
    decode_region_manifest,
    encode_region_manifest,
)
from tests.support.gc_options import IMMEDIATE
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    table = Workload(1, regions=2, base_rows=60).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        for number in range(2):
            table.put([number])
        table.flush()
    return table


@pytest.mark.req("S0-157", "S0-158")
def test_unmerged_generations_in_order(made: Workload) -> None:
    backlog = read_backlog(open_table(made.uri))
    assert [str(ref.region_id) for ref in backlog.pending] == sorted(made.regions * 3)
    assert [ref.generation for ref in backlog.pending] == [1, 2, 3] * 2
    assert backlog.blocked == ()
    merge.apply(open_table(made.uri), merge.MergeOptions(max_generations=1, regions=(uuid.UUID(made.regions[0]),)))
    assert read_backlog(open_table(made.uri)).to_json()["regions"] == 1


@pytest.mark.parametrize("left", ["nothing", "an attempt"])
def test_a_region_that_no_writer_has_claimed_yet(made: Workload, left: str) -> None:
    """A writer was killed between making the folder and writing its first manifest."""
    folder = Path(made.uri, "_mem_wal", str(uuid.uuid4()), "manifest")
    folder.mkdir(parents=True)
    if left == "an attempt":
        (folder / f"{'1' + '0' * 63}.binpb.tmp.9ff330344c2a4654").write_bytes(b"half")
    table = open_table(made.uri)
    assert len(inspect.inspect(table).regions) == 2
    assert merge.apply(table, merge.MergeOptions()).decision == "merged"
    assert read_base(made.uri) == made.expected()


def test_a_region_that_lost_its_manifests(made: Workload) -> None:
    lost = made.regions[0]
    shutil.rmtree(Path(made.uri, "_mem_wal", lost, "manifest"))
    report = merge.apply(open_table(made.uri), merge.MergeOptions())
    assert report.decision == "blocked"
    assert [(str(one.region_id), one.error.reason) for one in report.blocked] == [(lost, "region_manifest_corrupt")]
    assert read_base(made.uri) == made.expected(dict(wire.progress(Files(made.uri))))


@pytest.mark.parametrize("lost", ["generation", "manifest"])
def test_the_oldest_age_counts_what_is_lost(made: Workload, lost: str) -> None:
    """Manifests and directories are an hour old; then newer ones are written, and older manifests deleted."""
    region, hour_ago = made.regions[0], time.time() - 3600
    for path in Path(made.uri, "_mem_wal").rglob("*"):
        os.utime(path, (hour_ago, hour_ago))
    if lost == "generation":
        damage.remove_generation(made.uri, region, 1)
        made.put([0])
        made.flush()
    else:
        damage.truncate_region_manifest(made.uri, region)
    shutil.rmtree(Path(made.uri, "_mem_wal", made.regions[1]))
    assert merge.backlog(open_table(made.uri))["oldest_age"] >= 3600


def test_the_age_of_what_cannot_be_read_is_not_known(made: Workload) -> None:
    """Its manifest is damaged, and no directory says since when anything waits."""
    for region in made.regions:
        for folder in Path(made.uri, "_mem_wal", region).glob("*_gen_*"):
            shutil.rmtree(folder)
        damage.truncate_region_manifest(made.uri, region)
    figures = merge.backlog(open_table(made.uri))
    assert "oldest_age" not in figures
    assert figures["blocked_regions"] == len(made.regions)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_number_that_is_not_listed_stops_its_region(made: Workload, missing: int) -> None:
    region = uuid.UUID(made.regions[0])
    path = damage.region_manifest_path(made.uri, str(region))
    version = wire.region_manifest(Files(made.uri), str(region)).version
    manifest = decode_region_manifest(path.read_bytes(), region_id=region, version=version)
    kept = tuple(one for one in manifest.flushed_generations if one.generation != missing)
    object.__setattr__(manifest, "flushed_generations", kept)
    path.write_bytes(encode_region_manifest(manifest))
    report = merge.apply(open_table(made.uri), merge.MergeOptions())
    (fault,) = report.blocked
    reason, merged_to = ("drained_elsewhere", 0) if missing < 3 else ("generation_missing", 2)
    # An earlier version lists all but the newest; those before one would be put over what was merged.
    assert (fault.region_id, fault.generation, fault.error.reason) == (region, missing, reason)
    merged = dict(wire.progress(Files(made.uri)))
    assert merged.get(str(region), 0) == merged_to
    assert merged[made.regions[1]] == 3
    assert read_base(made.uri) == made.expected(merged)


def test_sizes_that_old_releases_did_not_record(made: Workload) -> None:
    """Unknown is not 0: they are read from the generations' files, and without these they stay unknown."""
    recorded = inspect.apply(open_table(made.uri)).backlog.to_json()
    for number in made.regions:
        region = uuid.UUID(number)
        path = damage.region_manifest_path(made.uri, number)
        version = wire.region_manifest(Files(made.uri), number).version
        manifest = decode_region_manifest(path.read_bytes(), region_id=region, version=version)
        bare = tuple(FlushedGeneration(one.generation, one.path) for one in manifest.flushed_generations)
        path.write_bytes(encode_region_manifest(replace(manifest, flushed_generations=bare)))
    table = open_table(made.uri)
    listed = read_backlog(table).to_json()
    assert (listed["generations"], listed["rows"], listed["bytes"]) == (6, None, None)
    inspection = inspect.apply(table)
    read = inspection.backlog.to_json()
    assert read["rows"] == recorded["rows"]
    assert read["bytes"]
    assert "unknown rows" not in inspection.describe()
    metrics = merge.backlog(table)
    assert (metrics["rows"], metrics["bytes"]) == (read["rows"], read["bytes"])
    assert len(merge.plan(table, merge.MergeOptions()).passes) == 1, "not a pass for each of unknown size"
    for folder in Path(made.uri, "_mem_wal", made.regions[0]).glob("*_gen_2/_versions"):
        shutil.rmtree(folder)
    without = inspect.apply(open_table(made.uri))
    assert without.backlog.to_json()["rows"] is None
    assert "unknown rows" in without.describe()
    assert not {"rows", "bytes"} & merge.backlog(open_table(made.uri)).keys()


def test_what_was_merged_and_collected_since_the_table_was_opened(made: Workload) -> None:
    """The pinned table's progress is old, the region's manifest is not: nothing is missing."""
    pinned = open_table(made.uri)
    merge.apply(pinned, merge.MergeOptions())
    catchup.apply(open_table(made.uri), catchup.CatchupOptions())
    expire.apply(open_table(made.uri), expire.ExpireOptions(older_than=timedelta(0), allow_unsafe=True))
    gc.apply(open_table(made.uri), IMMEDIATE)
    assert open_table(made.uri).region(uuid.UUID(made.regions[0])).latest().flushed_generations == ()
    backlog = read_backlog(pinned)
    assert (backlog.blocked, backlog.pending) == ((), ())
    assert merge.apply(pinned, merge.MergeOptions()).decision == "nothing_to_merge"
