"""What a proof of the collector rests on, where an obvious reading of it would lose something."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.candidates import Verdict
from memwal_ops.errors import RegionManifestCorruptError
from memwal_ops.formats.lance.indexes.snapshots import covered_generations, stale_entries
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.memwal import RegionWriter, create_mem_wal
from tests.support.gc_options import IMMEDIATE
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.tables.lsm_table import LsmTable


@pytest.mark.req("S0-184", "S0-188")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("way", ["ours", "pylance"])
def test_a_compaction_gives_old_rows_a_new_fragment_and_no_index(
    tmp_path: Path, kind: type[LsmTable], way: str
) -> None:
    """What is not covered stays so under another id: the version before that id had the same rows uncovered."""
    table = kind(3, regions=1, base_rows=40).create(str(tmp_path / "t.lance"))
    for number in (100, 101):
        table.put([number])
        table.flush()
        merge.apply(open_table(table.uri), merge.MergeOptions())
    region_id = open_table(table.uri).regions.region_ids[0]
    assert covered_generations(open_table(table.uri))["id_idx"][region_id] == 0
    if way == "ours":
        assert compact.apply(open_table(table.uri), compact.CompactOptions()).decision == "compacted"
    else:
        lance.dataset(table.uri).optimize.compact_files()
    after = open_table(table.uri)
    assert covered_generations(after)["id_idx"][region_id] == 0
    assert all(not any(claim.values()) for claim in stale_entries(after, ["id_idx"]).values())
    lance.dataset(table.uri).cleanup_old_versions(versions=list(range(1, after.version)))
    held = gc.apply(open_table(table.uri), IMMEDIATE).items[Verdict.HELD]
    assert {item.generation for item in held if item.generation} == {1, 2}
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    assert covered_generations(open_table(table.uri))["id_idx"][region_id] == 2


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_history_with_holes_proves_no_entry_wrong(tmp_path: Path, kind: type[LsmTable]) -> None:
    """A tag keeps a version from before the first merge; those with its rows, which the index covered, are expired."""
    table = kind(3, regions=1, base_rows=40).create(str(tmp_path / "t.lance"))
    lance.dataset(table.uri).tags.create("kept", open_table(table.uri).version)
    table.put([100])
    table.flush()
    merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    table.put([101])
    table.flush()
    merge.apply(open_table(table.uri), merge.MergeOptions())
    run_job(table.uri, "expire", apply=True, older_than="0s", keep=1, allow_unsafe=True)
    after = open_table(table.uri)
    assert [*after.index.index_catchup["id_idx"].values()] == [1]
    assert stale_entries(after, ["id_idx"]) == {}
    # What deletes takes what is proven: the tagged version has none of generation 1.
    assert [*covered_generations(after)["id_idx"].values()] == [0]
    assert run_job(table.uri, "verify").exit_code == 0


@pytest.mark.parametrize("copy", ["branch", "deep_clone"])
def test_progress_that_a_copy_inherited_proves_nothing(tmp_path: Path, copy: str) -> None:
    """A branch or clone says that generations 1 to 3 of a region are merged; its own generation 1 is not."""
    table = Workload(4, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    for number in (100, 101, 102):
        table.put([number])
        table.flush()
    merge.apply(open_table(table.uri), merge.MergeOptions())
    if copy == "branch":
        lance.dataset(table.uri).create_branch("side")
        uri = f"{table.uri}/tree/side"
    else:
        uri = str(tmp_path / "clone.lance")
        lance.dataset(table.uri).deep_clone(uri, reference=open_table(table.uri).version)
    other = lance.dataset(uri).mem_wal_writer(table.regions[0])
    other.put(lance.dataset(table.uri).to_table().slice(0, 2))
    other.close()
    before = Files(uri).listing("_mem_wal")

    report = merge.apply(open_table(uri), merge.MergeOptions())
    assert report.decision == "blocked"
    assert isinstance(report.blocked[0].error, RegionManifestCorruptError)
    collected = gc.apply(open_table(uri), IMMEDIATE)
    assert collected.faults
    assert Files(uri).listing("_mem_wal") == before


def test_a_tagged_version_that_is_not_listed_keeps_everything(tmp_path: Path) -> None:
    """Its manifest is behind a link, which pylance follows and we do not."""
    table = Workload(5, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    table.put([100])
    table.flush()
    tagged = open_table(table.uri).version
    lance.dataset(table.uri).tags.create("keep", tagged)
    merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    name = f"{2**64 - 1 - tagged:020d}.manifest"
    os.rename(f"{table.uri}/_versions/{name}", tmp_path / name)
    os.symlink(tmp_path / name, f"{table.uri}/_versions/{name}")
    assert lance.dataset(table.uri, version="keep").version == tagged
    report = gc.apply(open_table(table.uri), IMMEDIATE)
    assert any(item.generation == 1 for item in report.items[Verdict.HELD])
    assert any("keep" in item.path for item in report.items[Verdict.UNKNOWN])


def test_fragments_that_change_faster_than_the_index(tmp_path: Path) -> None:
    """The version before an uncovered fragment has older ones, which the versions after it do not have any more.

    Looked for in all versions, such a fragment is missed, and the search comes back to where it began.
    """
    table = Workload(3, regions=1, base_rows=12).create(str(tmp_path / "t.lance"))
    for number in range(100, 108):
        table.put([number])
        table.flush()
        merge.apply(open_table(table.uri), merge.MergeOptions())
        lance.dataset(table.uri).optimize.compact_files(defer_index_remap=False)
        after = open_table(table.uri)
        (reached,) = covered_generations(after)["id_idx"].values()
        assert reached == 0, "the index was not built again since generation 1"
        assert all(not any(claim.values()) for claim in stale_entries(after, ["id_idx"]).values())


def test_a_compaction_of_covered_rows_proves_no_entry_wrong(tmp_path: Path) -> None:
    """Earlier versions name the covered fragments by other ids: the entry cannot be judged, and is right."""
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("w", pa.int64())])

    def rows(keys: Sequence[int], write: int) -> pa.Table:
        return pa.table({"id": [*keys], "w": [write] * len(keys)}, schema=schema)

    def put(keys: Sequence[int], write: int) -> None:
        writer = RegionWriter(uri, "00000000-0000-4000-8000-000000000007")
        writer.put(rows(keys, write))
        writer.close()

    lance.write_dataset(rows(range(96), 0), uri, max_rows_per_file=32).create_scalar_index("w", "BITMAP")
    create_mem_wal(uri)
    put([1, 2, 3, 7, 96, 97], 1)
    run_job(uri, "maintain")
    put([40, 70, 76, 80, 98, 101], 4)
    run_job(uri, "merge")
    put([1, 2, 78, 89, 111, 112], 9)
    assert run_job(uri, "compact", tier_factor=1, deleted_fraction=0.01).decision == "compacted"
    report = run_job(uri, "verify")
    assert [(finding.check, finding.severity) for finding in report.findings.kept] == [("index_catchup", "warning")]
    assert report.exit_code == 0
    run_job(uri, "catchup")
    assert run_job(uri, "verify").decision == "healthy"
