"""A compaction with concurrent jobs: merges win, nothing is lost, and a killed one starts again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import pytest
from lance.optimize import Compaction

from memwal_ops import open_table, run_job
from memwal_ops.errors import CommitConflictError, InvariantViolatedError, StorageError
from memwal_ops.formats.lance.indexes.snapshots import is_external, read_snapshot, snapshot_path
from memwal_ops.formats.lance.jobs import snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import corrections as compact_memwal, job, planning
from memwal_ops.formats.lance.jobs.compact.job import CompactOptions
from tests.integration.formats.lance.jobs.compact.compact_tables import (
    check_kept,
    covered,
    fragments,
    make,
    make_anew,
    merged,
)
from tests.support.listeners import at_checkpoint
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.plain import PlainTable
from tests.support.tables.reading import read_base
from tests.support.tables.region_layout import RegionLayout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.formats.lance.table import Table

from tests.support.tables.lsm_table import LsmTable


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
        monkeypatch.setattr("memwal_ops.core.commit_retry._BACKOFF_SECONDS", 0)
        return seen

    return install


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
    assert (report.decision, report.commit_conflicts) == ("compacted", 1)
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
        if not found.num_tasks():
            return found  # the check of the settings
        planned.append(found.num_tasks())
        if len(planned) == 1:
            made.put(list(made._live[0])[:3])
            merged(made, caught_up=False)
        return found

    monkeypatch.setattr(planning, "Compaction", type("Beside", (), {"plan": plan}))
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.commit_conflicts) == ("compacted", 1)
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
    assert (report.decision, report.commit_conflicts, report.snapshot_lost) == ("compacted", 0, False)
    assert report.fragments_after == 2, "what came meanwhile is left for the next run"
    assert sum(after.index.merged_generations.values()) == sum(before.index.merged_generations.values()) + 1
    assert after.index.index_catchup == before.index.index_catchup
    assert (is_external(after), read_snapshot(after) is not None) == (True, True)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_indexes_that_others_change_meanwhile(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    made = make(tmp_path)
    at_commit(lambda: lance.dataset(made.uri).create_scalar_index("val", "BTREE"))
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.commit_conflicts) == ("compacted", 1)
    assert covered(open_table(made.uri)) == {"id_idx": True, "val_idx": True}
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_two_compactions_at_once(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    made = make(tmp_path)
    before = open_table(made.uri)
    at_commit(lance.dataset(made.uri).optimize.compact_files)
    report = job.apply(before, CompactOptions())
    assert (report.decision, report.commit_conflicts, report.fragments_after) == ("unchanged", 1, 1)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_a_version_that_is_gone_is_never_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance rebases over what it can still read, and would bring back the rows that a gone version deleted."""
    made = make(tmp_path)
    real, planned = Compaction.plan, []

    def plan(dataset: Any, options: Any) -> Any:
        found = real(dataset, options)
        if not found.num_tasks():
            return found  # the check of the settings
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

    monkeypatch.setattr(planning, "Compaction", type("Beside", (), {"plan": plan}))
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.commit_conflicts) == ("compacted", 1)
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


@pytest.mark.long
def test_another_table_in_the_same_place(tmp_path: Path) -> None:
    """Removed and created again by the same steps while files were rewritten: at the same version, with other files."""
    made = make(tmp_path)
    other = make_anew(str(tmp_path / "other.lance"), type(made), True)
    seen = []

    def replace() -> None:
        if not seen:
            shutil.rmtree(made.uri)
            shutil.copytree(other.uri, made.uri)
        seen.append(1)

    table = open_table(made.uri)
    assert open_table(other.uri).version == table.version
    assert job.apply(table, CompactOptions(), at_checkpoint(replace)).commit_conflicts == 1
    assert_same(read_base(made.uri), other.expected(), seed=made.seed)


@pytest.mark.long
def test_one_commit_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tables are committed in parts; the result is the same, and each part is right by itself."""
    made = make(tmp_path, RegionLayout)
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0))
    monkeypatch.setattr(job.LocalExecutor, "rows_per_commit", 1)
    before = open_table(made.uri)
    (wanted,) = {job.plan(before, CompactOptions(20)).fragments_removed}
    seen: list[int] = []

    def rewritten() -> None:
        assert_same(read_base(made.uri), made.expected(), seed=made.seed)
        seen.append(open_table(made.uri).version)

    report = job.apply(before, CompactOptions(20), at_checkpoint(rewritten))
    assert len(set(seen)) == len(seen) > 1
    assert report.fragments_removed == wanted
    after = open_table(made.uri)
    check_kept(before, after, made)
    assert (after.index.uuid, covered(after)) == (before.index.uuid, {"id_idx": True})
    assert read_snapshot(after) is not None


@pytest.mark.long
def test_others_always_win(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    made = make(tmp_path)

    def others() -> None:
        lance.dataset(made.uri).create_scalar_index("val", "BTREE", replace=True)

    at_commit(others, times=10**6)
    with pytest.raises(CommitConflictError):
        job.apply(open_table(made.uri), CompactOptions())
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_fragments_that_others_keep_changing_are_left_out(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=8, rows=10)
    numbers = iter(range(10))
    at_commit(lambda: made.delete(next(numbers)), times=10**6)
    report = job.apply(open_table(made.uri), CompactOptions())
    assert (report.decision, report.commit_conflicts, report.fragments_removed) == ("compacted", 3, 7)
    assert "left for the next run" in report.describe()
    assert made.read() == made.model


def test_others_keep_changing_every_fragment(tmp_path: Path, at_commit: Callable[..., list[int]]) -> None:
    """To leave them out would be to do nothing, and to say that nothing is to do."""
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=2, rows=40)
    numbers = iter(range(30))

    def others() -> None:
        number = next(numbers)
        made.delete(number, number + 40)

    at_commit(others, times=10**6)
    with pytest.raises(CommitConflictError):
        job.apply(open_table(made.uri), CompactOptions())
    assert made.read() == made.model


def test_a_lost_answer_is_not_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0))
    before = open_table(made.uri)

    def commit(dataset: Any, results: Any, options: Any) -> None:
        Compaction.commit(dataset, results, options)
        merged(made.step(4), caught_up=False)
        raise OSError("error sending request: operation timed out")

    monkeypatch.setattr(job, "Compaction", type("Lossy", (), {"plan": Compaction.plan, "commit": commit}))
    report = job.apply(before, CompactOptions())
    assert (report.decision, report.commit_conflicts, report.snapshot_lost) == ("compacted", 0, False)
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


def test_progress_that_fell_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    real = compact_memwal._read

    def read(table: Table, version: int) -> Any:
        step = real(table, version)
        if step.manifest.manifest.fragments == table.manifest.manifest.fragments:
            return step
        return replace(step, index=replace(step.index, merged_generations={}))

    monkeypatch.setattr(compact_memwal, "_read", read)
    with pytest.raises(InvariantViolatedError, match="merge progress"):
        job.apply(open_table(made.uri), CompactOptions())


def test_a_restore_behind_the_commit_may_lower_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner's decision: what the compaction published is compared with the version before that alone."""
    made = make(tmp_path)
    before, files = open_table(made.uri), Files(made.uri)
    lower = max(one for one in range(1, before.version) if 0 < sum(wire.progress(files, one).values()) < 9)
    real, published = job.record, list[int]()

    def restored(version: int) -> None:
        real(version)
        published.append(version)
        if len(published) == 1:
            lance.dataset(made.uri, version=lower).restore()

    monkeypatch.setattr(job, "record", restored)
    assert job.apply(before, CompactOptions()).decision == "compacted"
    assert sum(wire.progress(files).values()) < sum(before.index.merged_generations.values())
    assert run_job(made.uri, "merge").decision == "merged"
    assert_same(read_base(made.uri), made.expected(), seed=made.seed)


def test_a_snapshot_that_cannot_be_kept_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions(0))
    before = open_table(made.uri)
    monkeypatch.setattr(job.corrections, "restore_memwal_index", lambda table, newest, *_: newest)
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
from memwal_ops.formats.lance.jobs.compact import job
from tests.support.listeners import at_checkpoint
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
job.apply(open_table(uri), job.CompactOptions(), at_checkpoint(lambda: os._exit(9) if at == "task" else None))
"""


@pytest.mark.long
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
