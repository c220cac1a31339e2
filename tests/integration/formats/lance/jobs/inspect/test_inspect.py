"""inspect of a region with very many generations: counts, the first ones, and the faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.inspect.job import inspect
from memwal_ops.formats.lance.wire.names import NamingScheme
from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from tests.integration.contracts import small
from tests.support.run_cli import run_here
from tests.support.tables import damage
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest


def listing(table: Workload, region: str, more: int) -> RegionManifest:
    """The region's manifest, with so many generations on top whose directories are not there."""
    store = open_table(table.uri).region(UUID(region))
    newest = store.latest()
    first = newest.current_generation
    added = tuple(FlushedGeneration(one, f"{one:08x}_gen_{one}", 1000, 10, 100) for one in range(first, first + more))
    grown = replace(
        newest.next(), current_generation=first + more, flushed_generations=newest.flushed_generations + added
    )
    assert store.commit(grown)
    return grown


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    """Two regions: three merged generations and two that wait in each."""
    made = Workload(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance"))
    for number in range(5):
        for at in range(2):
            made.put([at])
        made.flush()
        if number == 2:
            merge.apply(open_table(made.uri), merge.MergeOptions())
    made.close()
    return made


@pytest.mark.long
def test_the_first_of_a_long_list_and_counts_of_all(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    listing(table, table.regions[1], 5000)
    whole = inspect(open_table(table.uri), limit=10**6)
    by_id = {str(one.region_id): one for one in whole.regions}
    assert by_id[table.regions[1]].counts == {"merged": 3, "pending": 2, "missing": 5000}
    assert not any(one.truncated for one in whole.regions)

    document = run_here(capfd, "inspect", table.uri, "--json").document
    assert document["truncated"] is True
    regions = {one["region_id"]: one for one in document["regions"]}
    assert sum(len(one["generations"]) for one in regions.values()) == 1000
    long, short = regions[table.regions[1]], regions[table.regions[0]]
    assert long["generation_counts"] == {"missing": 5000, "damaged": 0, "pending": 2, "merged": 3}
    assert short["generation_counts"] == {"missing": 0, "damaged": 0, "pending": 2, "merged": 3}
    assert long["truncated"] is True
    assert long["error"]["generation"] == 6
    assert {one["state"] for one in long["generations"]} == {"missing"}
    assert [one["generation"] for one in long["generations"]] == list(range(6, 1006))
    assert document["backlog"]["generations"] == 5004
    assert len(json.dumps(document)) < 200_000
    # What a person reads has no list, and the same figures.
    assert "5002 (4 to 5005)" in " ".join(run_here(capfd, "inspect", table.uri).out.split())

    none = run_here(capfd, "inspect", table.uri, "--json", "--limit", "0").document
    assert all(one["generations"] == [] for one in none["regions"])
    fault = next(one["error"] for one in none["regions"] if one["region_id"] == table.regions[1])
    assert fault == long["error"]


def test_what_waits_comes_before_what_is_merged(table: Workload) -> None:
    damage.remove_generation(table.uri, table.regions[1], 5)
    found = {str(one.region_id): one for one in inspect(open_table(table.uri), limit=4).regions}
    assert [(one.flushed.generation, one.state) for one in found[table.regions[0]].generations] == [
        (4, "pending"), (5, "pending"),
    ]  # fmt: skip
    assert [(one.flushed.generation, one.state) for one in found[table.regions[1]].generations] == [
        (4, "pending"), (5, "missing"),
    ]  # fmt: skip


def test_the_release_of_the_tables_own_writers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also below our own commits. LanceDB, lance-context and pylance of one release of Lance write the same."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": [1]}), uri, enable_stable_row_ids=True)
    lance.write_dataset(pa.table({"id": [2]}), uri, mode="append")
    by = f"lance {lance.__version__}, stable row ids"
    assert run_job(uri, "inspect").to_json()["last_writer"] == by
    path = version_path(2, NamingScheme.V2)
    manifest = tmp_path / "t.lance" / path
    read = decode_version_manifest(manifest.read_bytes())
    read.manifest.writer_version.version = "13.0.0"
    manifest.write_bytes(encode_version_manifest(read))
    assert run_job(uri, "compact").decision == "compacted"
    assert open_table(uri).revision > 2
    for command in (("inspect", uri), ("scan", uri), ("scan", "--database", str(tmp_path))):
        shown = " ".join(run_here(capfd, *command).out.split())
        assert "ast written by lance 13.0.0, stable row ids" in shown, command
    document = run_here(capfd, "scan", uri, "--json").document
    assert document["tables"][0]["last_writer"] == "lance 13.0.0, stable row ids"


def test_strays_are_bounded_too(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        Path(table.uri, "_mem_wal", f"stray{number:02}").write_bytes(b"x")
    document = run_here(capfd, "inspect", table.uri, "--json", "--limit", "5").document
    assert document["strays"] == [f"_mem_wal/stray{number:02}" for number in range(5)]
    assert document["truncated"] is True
    said = run_here(capfd, "inspect", table.uri, "--limit", "5").out
    assert said.count("Stray, not a region") == 5
    assert "15 more strays" in said


@pytest.mark.long
def test_memory_of_a_manifest_with_many_entries(table: Workload) -> None:
    """What one entry costs, at its peak: a list of a million takes half a gigabyte and not three and a half."""
    entries = 100_000
    measured = (
        "import resource, sys; from memwal_ops.cli import main\n"
        "try: main.main(['inspect', sys.argv[1], '--json'])\n"
        "except SystemExit: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )

    def peak() -> int:
        command = [sys.executable, "-c", measured, table.uri]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert len(done.stdout) < 300_000
        return int(done.stderr.splitlines()[-1]) << 10

    before = peak()
    listing(table, table.regions[0], entries)
    assert (peak() - before) / entries < 1000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("exported", [False, True])
def test_regions_of_a_table_that_was_overwritten(
    table: Workload, capfd: pytest.CaptureFixture[str], tmp_path: Path, *, exported: bool
) -> None:
    """They are shown, with the version to return to, or that there is none; every other job is refused."""
    version = lance.dataset(table.uri).version
    lance.write_dataset(pa.table({"id": [1, 2]}), table.uri, mode="overwrite")
    shutil.rmtree(Path(table.uri, "_mem_wal", table.regions[1], "manifest"))
    given = (table.uri,)
    if exported:
        assert run_here(capfd, "export-support", table.uri, "-o", str(tmp_path / "export.zip")).code == 0
        given = ("--from", str(tmp_path / "export.zip"))
    found = run_here(capfd, "inspect", *given, "--json")
    assert found.code == 0
    by_id = {one["region_id"]: one for one in found.document["regions"]}
    whole, without = by_id[table.regions[0]], by_id[table.regions[1]]
    assert (whole["current_generation"], whole["merged_generation"]) == (6, None)
    assert whole["error"]["reason"] == "no_memwal_index"
    assert without["error"]["reason"] == "region_manifest_corrupt"
    text = " ".join(run_here(capfd, "inspect", *given).out.split())
    assert f"Version {version} is the last one that has a MemWAL index" in text
    assert "unknown 5 (1 to 5)" in text
    assert run_here(capfd, "verify", *given).code == 5
    if not exported:
        assert run_job(table.uri, "inspect").exit_code == 0
        lance.dataset(table.uri).cleanup_old_versions(timedelta(0))
        text = " ".join(run_here(capfd, "inspect", table.uri).out.split())
        assert "No version that exists has a MemWAL index" in text


def test_a_new_index_of_pylance_has_no_snapshot(tmp_path: Path) -> None:
    """pylance notes a number of regions when it makes the index, and no time."""
    uri = small.make(tmp_path)
    assert open_table(uri).index.num_regions
    found = run_job(uri, "inspect")
    assert "No snapshot of the regions is stored" in found.describe()
    assert found.to_json()["snapshot"]["stored"] == "none"


def test_a_blocked_region_leaves_open_what_is_merged(table: Workload) -> None:
    """Its generations have numbers that count as merged, and they are not."""
    run_job(table.uri, "merge")
    shutil.rmtree(Path(table.uri, "_mem_wal", table.regions[0]))
    with lance.dataset(table.uri).mem_wal_writer(table.regions[0]) as writer:
        writer.put(lance.dataset(table.uri).to_table(limit=1))
    merged = run_job(table.uri, "merge")
    assert merged.decision == "blocked"
    assert "All generations are merged" not in merged.describe()


def test_an_overwrite_that_dropped_all_indexes_is_named(tmp_path: Path) -> None:
    uri, rows = str(tmp_path / "t.lance"), pa.table({"id": range(10), "v": range(10)})
    lance.write_dataset(rows, uri)
    for name in ("id", "v"):
        lance.dataset(uri).create_scalar_index(name, "BTREE")
    assert run_job(uri, "inspect").to_json()["indexes_dropped"] is None
    lance.write_dataset(rows, uri, mode="overwrite")
    lance.write_dataset(rows, uri, mode="append")
    report = run_job(uri, "inspect")
    assert report.to_json()["indexes_dropped"] == {"version": 4, "indexes": ["id_idx", "v_idx"]}
    assert "version 4 overwrote the table and dropped its indexes: id_idx, v_idx" in " ".join(report.describe().split())
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    assert run_job(uri, "inspect").to_json()["indexes_dropped"] is None
