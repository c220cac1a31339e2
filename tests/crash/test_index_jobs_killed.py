"""Kill snapshot, catch-up and codebook migration at each of their storage calls; run them again; all is right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.snapshots import read_snapshot
from memwal_ops.errors import StorageError, UnsupportedFeatureError
from memwal_ops.jobs import catchup, merge, snapshot
from memwal_ops.jobs.catchup import CatchupOptions
from memwal_ops.jobs.codebook_migration import migrate
from memwal_ops.jobs.snapshot import SnapshotOptions
from tests.crash.dying_store import DyingStore, Killed
from tests.jobs.test_catchup import check_claims, check_queries, create, expected, write
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base, read_lsm, read_spec
from tests.tables.region_layout import RegionLayout
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.core.table import Table
    from tests.tables.lsm_table import LsmTable


def killed_everywhere(
    made: str, folder: Path, job: Callable[[Table], object], check: Callable[[str], None], *, once: bool = False
) -> int:
    """Run ``job`` on a copy of the table for each storage call, dying before or after it; the number of calls.

    With ``once`` it is told to end, and goes through its own handlers on its way out.
    """
    number = 0
    while True:
        number += 1
        for after in (False, True):
            uri = str(folder / f"{number}-{after}.lance")
            shutil.copytree(made, uri)
            table = open_table(uri)
            dying = DyingStore(table.store, number, after=after, once=once)
            try:
                job(replace(table, store=dying))
            except Killed:
                check(uri)
            except (StorageError, UnsupportedFeatureError):
                # It died while pylance was asking for the commit: pylance turns that into an error of its own.
                check(uri)
            else:
                if len(dying.calls) < number:
                    return number
                check(uri)  # told to end in a thread of the probe, which does not hear of it
            shutil.rmtree(uri)


def check_versions(uri: str) -> None:
    """Every version opens and reads, and progress only rises."""
    progress: dict[str, int] = {}
    names = wire.manifest_names(Files(uri))
    for one in lance.dataset(uri).versions():
        version = one["version"]
        lance.dataset(uri, version=version).to_table()
        manifest = wire.parse_manifest(Files(uri).get(names[version]))
        if wire.mem_wal_entry(manifest) is None:
            continue
        fields = wire.decode(wire.mem_wal_details(manifest))
        found = {wire.uuid_of(entry, 1): int(wire.get(entry, 2)) for entry in wire.sub(fields, 9)}
        assert all(found.get(region, 0) >= merged for region, merged in progress.items())
        progress = found


@pytest.mark.parametrize("threshold", [100, 0], ids=["inline", "external"])
@pytest.mark.parametrize("kind", [Workload, RegionLayout])
def test_snapshot(tmp_path: Path, kind: type[LsmTable], threshold: int) -> None:
    made = kind(3, regions=2, base_rows=60).create(str(tmp_path / "made.lance")).step(12)
    if isinstance(made, Workload):
        made.close()
        # Entries that no manifest knows of yet, as a live writer would leave them.
        for region in made.regions:
            last = wire.region_manifest(Files(made.uri), region)
            Files(made.uri).put(f"_mem_wal/{region}/wal/{wire.bit_reversed(100 + last.version)}.arrow", b"")
    expected_rows = made.expected()

    def check(uri: str) -> None:
        check_versions(uri)
        assert_same(read_lsm(uri) if isinstance(made, Workload) else read_spec(uri), expected_rows)
        report = snapshot.apply(open_table(uri), SnapshotOptions(threshold))
        assert report.decision in {"built", "unchanged"}
        found = read_snapshot(open_table(uri))
        assert found is not None
        assert {row.region_id for row in found.regions} == {UUID(region) for region in made.regions}
        merge.apply(open_table(uri), merge.MergeOptions())
        assert_same(read_base(uri), expected_rows)
        check_versions(uri)

    made.flush()
    calls = killed_everywhere(
        made.uri, tmp_path, lambda table: snapshot.apply(table, SnapshotOptions(threshold)), check
    )
    assert calls > 15


@pytest.mark.parametrize("once", [False, True], ids=["killed", "told to end"])
def test_catchup(tmp_path: Path, once: bool) -> None:
    made = create(str(tmp_path / "made.lance"))
    write(made, 0)

    def check(uri: str) -> None:
        check_versions(uri)
        check_queries(uri, expected(1))
        assert catchup.apply(open_table(uri), CatchupOptions()).decision in {"caught_up", "unchanged"}
        check_claims(open_table(uri))
        table = open_table(uri)
        assert all(coverage(index.covered, table.manifest).complete for index in base_indexes(table).values())
        check_queries(uri, expected(1))

    options = CatchupOptions(indexes=("kind_idx", "vector_idx"))
    assert killed_everywhere(made, tmp_path, lambda table: catchup.apply(table, options), check, once=once) > 15


def test_codebook_migration(tmp_path: Path) -> None:
    """All steps in one run, as a script might do."""
    made = create(str(tmp_path / "made.lance"))
    write(made, 0)

    def all_steps(table: Table) -> Any:
        for _ in range(8):
            report = migrate(table, "vector_idx", "fresh")
            if report.decision == "done":
                return report
        raise AssertionError(report)

    def check(uri: str) -> None:
        check_versions(uri)
        check_queries(uri, expected(1))
        assert all_steps(open_table(uri)).decision == "done"
        assert "vector_idx" not in base_indexes(open_table(uri))
        check_queries(uri, expected(1))

    assert killed_everywhere(made, tmp_path, all_steps, check) > 15
