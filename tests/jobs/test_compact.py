"""The compact job: fewer fragments, the same rows, the same MemWAL index, whoever commits beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from lance.optimize import Compaction

from memwal_ops import open_table
from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.codebook import read_codebook
from memwal_ops.core.snapshots import is_external, read_snapshot, snapshot_path
from memwal_ops.errors import (
    CommitConflictError,
    IndexesBehindError,
    InvalidUsageError,
    InvariantViolatedError,
    StorageError,
    UnsupportedFeatureError,
)
from memwal_ops.jobs import catchup, merge, snapshot
from memwal_ops.jobs import compact as job
from memwal_ops.jobs.compact import CompactOptions
from tests.cli.run import contents
from tests.jobs import test_catchup as indexed
from tests.tables import damage
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base, read_spec
from tests.tables.region_layout import RegionLayout
from tests.tables.schemas import PRIMARY_KEY
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.core.table import Table
    from tests.tables.lsm_table import LsmTable

LAYOUTS: list[type[LsmTable]] = [Workload, RegionLayout]


def merged(made: LsmTable, *, caught_up: bool = True) -> LsmTable:
    made.close()
    merge.apply(open_table(made.uri, made.storage_options), merge.MergeOptions())
    if caught_up:
        catchup.apply(open_table(made.uri, made.storage_options), catchup.CatchupOptions())
    return made


def make(path: Path, kind: type[LsmTable] = Workload, *, caught_up: bool = True, **options: Any) -> LsmTable:
    """Old fragments of which most rows were updated, and a new one for each of three merges."""
    made = kind(1, regions=3, base_rows=90, **options).create(str(path / "t.lance"))
    for _ in range(3):
        merged(made.step(6), caught_up=False)
    return merged(made, caught_up=caught_up)


def fragments(table: Table) -> int:
    return len(table.manifest.manifest.fragments)


def covered(table: Table) -> dict[str, bool]:
    return {name: coverage(index.covered, table.manifest).complete for name, index in base_indexes(table).items()}


def check_kept(before: Table, after: Table, made: LsmTable) -> None:
    """The MemWAL index says what it said, and the rows are those of the model."""
    assert after.index.details == before.index.details
    assert_same(read_base(made.uri, made.storage_options), made.expected(), seed=made.seed)
    assert_same(read_spec(made.uri, made.storage_options), made.expected(), seed=made.seed)


@pytest.fixture
def at_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let others work after all tasks ran and before the commit, the first ``times`` times."""

    def install(others: Callable[[], object], times: int = 1) -> list[int]:
        real, seen = Compaction.commit, []

        class Beside:
            plan = staticmethod(Compaction.plan)

            @staticmethod
            def commit(dataset: Any, results: Any, options: Any) -> Any:
                seen.append(len(results))
                if len(seen) <= times:
                    others()
                return real(dataset, results, options)

        monkeypatch.setattr(job, "Compaction", Beside)
        monkeypatch.setattr("memwal_ops.jobs.races._BACKOFF_SECONDS", 0)
        return seen

    return install


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
@pytest.mark.parametrize("stored", ["none", "inline", "external"])
def test_rows_progress_and_all_else_stay(tmp_path: Path, kind: type[LsmTable], stable: bool, stored: str) -> None:
    made = make(tmp_path, kind, stable_row_ids=stable)
    if stored != "none":
        snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0 if stored == "external" else 100))
    before = open_table(made.uri)
    assert before.index.merged_generations
    assert before.index.index_catchup
    asked = []
    report = job.apply(before, CompactOptions(), on_task=lambda: asked.append(1))
    after = open_table(made.uri)
    check_kept(before, after, made)
    assert (report.decision, report.why, len(asked)) == ("compacted", None, 1)
    assert (report.fragments_before, report.fragments_after) == (fragments(before), 1)
    assert (report.fragments_removed, report.fragments_added) == (fragments(before), 1)
    assert report.rows_rewritten == len(made.expected())
    assert report.bytes_written == sum(
        file.file_size_bytes for fragment in after.manifest.manifest.fragments for file in fragment.files
    )
    assert (report.version, report.lost_races, report.snapshot_lost) == (after.version, 0, False)
    assert covered(after) == {"id_idx": True}
    if stored != "none":
        found = read_snapshot(after)
        assert found is not None
        assert found.stored == stored
        assert snapshot.apply(after, snapshot.SnapshotOptions(0 if stored == "external" else 100)).decision in {
            "unchanged",
            "built",  # the layout's first snapshot may have written the logs' ends down
        }
    again = job.apply(after, CompactOptions())
    assert (again.decision, again.version) == ("unchanged", after.version)
    assert again.why is not None
    made.step(6)
    merged(made)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_unmerged_generations_stay_on_top(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind).step(10)
    made.close()
    before = open_table(made.uri)
    assert job.apply(before, CompactOptions()).decision == "compacted"
    assert open_table(made.uri).index.details == before.index.details
    assert_same(read_spec(made.uri), made.expected(), seed=made.seed)
    merged(made)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_on_s3(bucket: tuple[str, dict[str, str]]) -> None:
    uri, options = f"{bucket[0]}/t.lance", bucket[1]
    made = Workload(1, regions=3, base_rows=60).create(uri, options).step(12)
    merged(made)
    snapshot.apply(open_table(uri, options), snapshot.SnapshotOptions(0))
    before = open_table(uri, options)
    assert job.apply(before, CompactOptions()).decision == "compacted"
    after = open_table(uri, options)
    check_kept(before, after, made)
    assert (after.index.uuid, covered(after)) == (before.index.uuid, {"id_idx": True})
    assert read_snapshot(after) is not None


@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_every_kind_of_index_answers_as_before(tmp_path: Path, stable: bool) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"), stable=stable)
    for at in range(2):
        indexed.write(uri, at)
    catchup.apply(open_table(uri), catchup.CatchupOptions())
    before = open_table(uri)
    codebooks = {read_codebook(before, entry) for entry in base_indexes(before)["vector_idx"].segments}
    assert job.apply(before, CompactOptions()).decision == "compacted"
    after = open_table(uri)
    assert after.index.details == before.index.details
    assert set(covered(after).values()) == {True}
    assert {read_codebook(after, entry) for entry in base_indexes(after)["vector_idx"].segments} == codebooks
    indexed.check_queries(uri, indexed.expected(2))
    indexed.write(uri, 2)
    assert catchup.apply(open_table(uri), catchup.CatchupOptions()).decision == "caught_up"
    assert job.apply(open_table(uri), CompactOptions()).decision == "compacted"
    indexed.check_queries(uri, indexed.expected(3))
    indexed.check_claims(open_table(uri))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_indexes_behind_keep_what_they_cover(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    made.step(6)
    merged(made, caught_up=False)
    before = open_table(made.uri)
    said = dict(before.index.index_catchup)
    behind = {fragment.id for fragment in before.manifest.manifest.fragments} - base_indexes(before)["id_idx"].covered
    assert behind
    assert job.apply(before, CompactOptions()).decision == "compacted"
    after = open_table(made.uri)
    check_kept(before, after, made)
    assert dict(after.index.index_catchup) == said
    assert covered(after) == {"id_idx": False}
    last = job.apply(after, CompactOptions())
    assert last.decision == "unchanged"
    assert last.why is not None
    assert last.why.endswith("To join more, run memwal-ops catchup first: not all is covered by id_idx.")


def test_segments_of_an_index_keep_fragments_apart(tmp_path: Path) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"))
    indexed.write(uri, 0)
    catchup.apply(open_table(uri), catchup.CatchupOptions())
    report = job.apply(open_table(uri), CompactOptions())
    assert report.decision == "unchanged"
    assert report.why is not None
    assert report.why.endswith("run memwal-ops catchup --max-segments 1: there are several of vector_idx.")
    catchup.apply(open_table(uri), catchup.CatchupOptions(max_segments=1))
    report = job.apply(open_table(uri), CompactOptions())
    assert (report.decision, report.fragments_after) == ("compacted", 1)
    indexed.check_queries(uri, indexed.expected(1))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_dry_run_writes_nothing(tmp_path: Path, kind: type[LsmTable]) -> None:
    made = make(tmp_path, kind)
    before = contents(made.uri)
    report = job.dry_run(open_table(made.uri), CompactOptions())
    assert contents(made.uri) == before
    table = open_table(made.uri)
    assert (report.decision, report.why, report.version) == ("dry_run", None, table.version)
    done = job.apply(table, CompactOptions())
    for name in ("fragments_before", "fragments_after", "fragments_removed", "fragments_added", "rows_rewritten"):
        assert getattr(report, name) == getattr(done, name), name
    assert job.dry_run(open_table(made.uri), CompactOptions()).why is not None


def test_deleted_rows_go(tmp_path: Path) -> None:
    made = Workload(1, regions=1, base_rows=90).create(str(tmp_path / "t.lance"))
    made.delete(list(range(5, 30)))  # all of the first fragment's but five
    merged(made)
    before = open_table(made.uri)
    assert [one.deletion_file.num_deleted_rows for one in before.manifest.manifest.fragments] == [25, 0, 0]
    report = job.apply(before, CompactOptions(target_rows=30))
    assert (report.decision, report.fragments_removed, report.fragments_added) == ("compacted", 1, 1)
    after = open_table(made.uri)
    assert sorted(one.physical_rows for one in after.manifest.manifest.fragments) == [5, 30, 30]
    assert not any(one.HasField("deletion_file") for one in after.manifest.manifest.fragments)
    check_kept(before, after, made)


def test_all_rows_deleted(tmp_path: Path) -> None:
    made = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    made.delete(list(range(30)))
    merged(made)
    report = job.apply(open_table(made.uri), CompactOptions())
    assert report.decision == "unchanged"
    assert read_base(made.uri) == {}


def test_an_empty_table(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("val", pa.int32())])
    lance.write_dataset(schema.empty_table(), uri).initialize_mem_wal()
    before = contents(uri)
    for report in (job.dry_run(open_table(uri), CompactOptions()), job.apply(open_table(uri), CompactOptions())):
        assert report.why == "The base table has no fragments."
        assert (report.fragments_before, report.fragments_after, report.rows_rewritten) == (0, 0, 0)
    assert report.decision == "unchanged"
    assert contents(uri) == before


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_merge_that_touches_what_was_rewritten_wins(
    tmp_path: Path, kind: type[LsmTable], at_commit: Callable[..., list[int]]
) -> None:
    made = make(tmp_path, kind)

    def others() -> None:
        for region in range(3):
            numbers = list(made._live[region])[:4]
            made.put(numbers[:2])
            made.delete(numbers[2:])
        merged(made, caught_up=False)

    at_commit(others)
    report = job.apply(open_table(made.uri), CompactOptions())
    table = open_table(made.uri)
    assert (report.decision, report.lost_races) == ("compacted", 1)
    assert table.index.merged_generations == {
        region: max(one.generation for one in table.region(region).latest().flushed_generations)
        for region in table.regions.region_ids
    }
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)
    files = {file.path for one in table.manifest.manifest.fragments for file in one.files}
    assert len(set(Files(made.uri).listing("data"))) > len(files), "those of the lost attempt are pylance's to collect"


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_merge_between_plan_and_rewrite(
    tmp_path: Path, kind: type[LsmTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path, kind)
    real, planned = Compaction.plan, []

    def plan(dataset: Any, options: Any) -> Any:
        found = real(dataset, options)
        planned.append(found.num_tasks())
        if len(planned) == 1:
            made.put(list(made._live[0])[:3])
            merged(made, caught_up=False)
        return found

    monkeypatch.setattr(job, "Compaction", type("Beside", (), {"plan": plan, "commit": Compaction.commit}))
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.lost_races) == ("compacted", 1)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_merge_that_only_adds_rows_costs_nothing(
    tmp_path: Path, kind: type[LsmTable], at_commit: Callable[..., list[int]]
) -> None:
    made = make(tmp_path, kind)
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0))
    before = open_table(made.uri)

    def others() -> None:
        made.put([made._fresh(0)])
        merged(made, caught_up=False)

    at_commit(others)
    report = job.apply(before, CompactOptions())
    after = open_table(made.uri)
    assert (report.decision, report.lost_races, report.snapshot_lost) == ("compacted", 0, False)
    assert report.fragments_after == 2, "what came meanwhile is left for the next run"
    assert sum(after.index.merged_generations.values()) == sum(before.index.merged_generations.values()) + 1
    assert after.index.index_catchup == before.index.index_catchup
    assert (is_external(after), read_snapshot(after) is not None) == (True, True)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_indexes_that_others_change_meanwhile(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    made = make(tmp_path)
    at_commit(lambda: lance.dataset(made.uri).create_scalar_index("val", "BTREE"))
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.lost_races) == ("compacted", 1)
    assert covered(open_table(made.uri)) == {"id_idx": True, "val_idx": True}
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_two_compactions_at_once(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    made = make(tmp_path)
    before = open_table(made.uri)
    at_commit(lance.dataset(made.uri).optimize.compact_files)
    report = job.apply(before, CompactOptions())
    assert (report.decision, report.lost_races, report.fragments_after) == ("unchanged", 1, 1)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_a_version_that_is_gone_is_never_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance rebases over what it can still read, and would bring back the rows that a gone version deleted."""
    made = make(tmp_path)
    real, planned = Compaction.plan, []

    def plan(dataset: Any, options: Any) -> Any:
        found = real(dataset, options)
        planned.append(1)
        if len(planned) == 1:
            made.delete(list(made._live[0])[:5])
            merged(made)
            lance.dataset(made.uri).update_metadata({"a": "b"})
            # What the plan reads stays, so that the rewrite itself goes through.
            gone = open_table(made.uri).version - 1
            for version in range(int(dataset.version) + 1, gone + 1):
                os.unlink(os.path.join(made.uri, "_versions", f"{2**64 - 1 - version:020d}.manifest"))
        return found

    monkeypatch.setattr(job, "Compaction", type("Beside", (), {"plan": plan, "commit": Compaction.commit}))
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.lost_races) == ("compacted", 1)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_another_table_in_the_same_place(tmp_path: Path) -> None:
    """Removed and made anew by the same steps while files were rewritten: at the same version, with other files."""
    made = make(tmp_path)
    other = make(tmp_path / "other")
    seen = []

    def replace() -> None:
        if not seen:
            shutil.rmtree(made.uri)
            shutil.copytree(other.uri, made.uri)
        seen.append(1)

    table = open_table(made.uri)
    assert open_table(other.uri).version == table.version
    assert job.apply(table, CompactOptions(), on_commit=replace).lost_races == 1
    assert_same(read_base(made.uri), other.expected(), seed=made.seed)


def test_one_commit_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tables are committed in parts; the result is the same, and each part is right by itself."""
    made = make(tmp_path, RegionLayout)
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0))
    monkeypatch.setattr(job, "ROWS_PER_COMMIT", 1)
    before = open_table(made.uri)
    (wanted,) = {job.dry_run(before, CompactOptions(20)).fragments_removed}
    seen: list[int] = []

    def on_task() -> None:
        assert_same(read_base(made.uri), made.expected(), seed=made.seed)
        seen.append(open_table(made.uri).version)

    report = job.apply(before, CompactOptions(20), on_task=on_task)
    assert len(set(seen)) == len(seen) > 1
    assert report.fragments_removed == wanted
    after = open_table(made.uri)
    check_kept(before, after, made)
    assert (after.index.uuid, covered(after)) == (before.index.uuid, {"id_idx": True})
    assert read_snapshot(after) is not None


def test_others_always_win(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    made = make(tmp_path)

    def others() -> None:
        lance.dataset(made.uri).create_scalar_index("val", "BTREE", replace=True)

    at_commit(others, times=10**6)
    with pytest.raises(CommitConflictError):
        job.apply(open_table(made.uri), CompactOptions())
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_a_lost_answer_is_no_lost_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0))
    before = open_table(made.uri)

    def commit(dataset: Any, results: Any, options: Any) -> None:
        Compaction.commit(dataset, results, options)
        merged(made.step(4), caught_up=False)
        raise OSError("error sending request: operation timed out")

    monkeypatch.setattr(job, "Compaction", type("Lossy", (), {"plan": Compaction.plan, "commit": commit}))
    report = job.apply(before, CompactOptions())
    assert (report.decision, report.lost_races, report.snapshot_lost) == ("compacted", 0, False)
    assert report.fragments_removed == fragments(before)
    assert open_table(made.uri).index.index_catchup == before.index.index_catchup
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_a_failure_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)

    def commit(dataset: Any, results: Any, options: Any) -> None:
        raise OSError("something else")

    monkeypatch.setattr(job, "Compaction", type("Broken", (), {"plan": Compaction.plan, "commit": commit}))
    before = open_table(made.uri)
    with pytest.raises(StorageError, match="something else"):
        job.apply(before, CompactOptions())
    monkeypatch.undo()
    assert job.apply(open_table(made.uri), CompactOptions()).decision == "compacted"
    check_kept(before, open_table(made.uri), made)


def test_progress_that_fell_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    real = job._read

    def read(table: Table, version: int) -> Any:
        step = real(table, version)
        if step.manifest.manifest.fragments == table.manifest.manifest.fragments:
            return step
        return replace(step, index=replace(step.index, merged_generations={}))

    monkeypatch.setattr(job, "_read", read)
    with pytest.raises(InvariantViolatedError, match="merge progress"):
        job.apply(open_table(made.uri), CompactOptions())


def test_a_snapshot_that_cannot_be_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0))
    before = open_table(made.uri)
    monkeypatch.setattr(job, "_put_back", lambda table, newest, *_: newest)
    report = job.apply(before, CompactOptions())
    assert (report.decision, report.snapshot_lost) == ("compacted", True)
    after = open_table(made.uri)
    assert after.store.head(snapshot_path(before.index.uuid)) is not None
    assert snapshot.apply(after, snapshot.SnapshotOptions(0)).decision == "built"
    catchup.apply(open_table(made.uri), catchup.CatchupOptions())
    assert open_table(made.uri).index.index_catchup == before.index.index_catchup


_KILLED = """
import os, sys
from lance.optimize import Compaction
from memwal_ops import open_table
from memwal_ops.jobs import compact as job
uri, at = sys.argv[1], sys.argv[2]

class Dying:
    plan = staticmethod(Compaction.plan)
    @staticmethod
    def commit(dataset, results, options):
        if at == "before":
            os._exit(9)
        Compaction.commit(dataset, results, options)
        os._exit(9)

job.Compaction = Dying
job.apply(open_table(uri), job.CompactOptions(), on_task=lambda: os._exit(9) if at == "task" else None)
"""


@pytest.mark.parametrize("at", ["task", "before", "after"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_killed_and_run_again(tmp_path: Path, kind: type[LsmTable], at: str) -> None:
    made = make(tmp_path, kind)
    before = open_table(made.uri)
    done = subprocess.run([sys.executable, "-c", _KILLED, made.uri, at], check=False, capture_output=True)
    assert done.returncode == 9, done.stderr
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.fragments_after) == ("unchanged" if at == "after" else "compacted", 1)
    after = open_table(made.uri)
    assert after.index.merged_generations == before.index.merged_generations
    assert covered(after) == {"id_idx": True}
    if at == "after":
        # The commit that puts the claims back was never made: the next catch-up records them.
        assert {one.decision for one in catchup.apply(after, catchup.CatchupOptions()).indexes} == {"recorded"}
    last = open_table(made.uri)
    assert last.index.merged_generations == before.index.merged_generations
    assert last.index.index_catchup == before.index.index_catchup
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_a_table_that_must_not_be_written(tmp_path: Path) -> None:
    made = make(tmp_path)
    damage.set_feature_flag(made.uri, reader=False)
    before = contents(made.uri)
    for run in (job.apply, job.dry_run):
        with pytest.raises(UnsupportedFeatureError):
            run(open_table(made.uri), CompactOptions())
    assert contents(made.uri) == before


def test_usage() -> None:
    with pytest.raises(InvalidUsageError):
        CompactOptions(0)


def test_an_index_that_cannot_be_opened_keeps_what_it_covers(tmp_path: Path) -> None:
    table = Workload(41, regions=1, base_rows=60).create(str(tmp_path / "t.lance")).step(8)
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    indices = tmp_path / "t.lance" / "_indices"
    indices.rename(tmp_path / "away")
    version = open_table(table.uri).version
    with pytest.raises(IndexesBehindError, match="id_idx"):
        job.apply(open_table(table.uri), CompactOptions())
    assert open_table(table.uri).version == version
    (tmp_path / "away").rename(indices)
    assert job.apply(open_table(table.uri), CompactOptions()).decision == "compacted"
    after = open_table(table.uri)
    assert coverage(base_indexes(after)["id_idx"].covered, after.manifest).complete
