"""The matrix finds planted bugs: each is a plausible mistake."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.core.holds import announced_expiry
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.commit import commit, publication
from memwal_ops.formats.lance.engines.merge import passes
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.catchup import publishing as index_publishing
from memwal_ops.formats.lance.jobs.gc.collectors import RegionCollector
from memwal_ops.formats.lance.retention.garbage import NeededFiles, find_garbage
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from memwal_ops.storage.clock import store_time
from tests.campaigns.faults.jobs import JOBS
from tests.campaigns.faults.plan import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.campaigns.faults.cells import Cell, Matrix

Patch = pytest.MonkeyPatch


def exists_means_lost(patch: Patch) -> None:
    """A run that gets "exists" takes the version for another's, and cleans up."""
    patch.setattr(publication, "_read_back", lambda *_: b"another's")


def clean_up_after_any_error(patch: Patch) -> None:
    """A merge whose commit fails deletes its files, also if it is unknown whether it was published."""

    def commit_and_clean_up(table: Any, change: Any, merge_pass: Any, note: Any) -> int:
        try:
            # With the records, or later passes read more than in the run that numbered the points.
            return commit.commit_strict(
                table, change.operation(), merge_pass.progress, note, records=merge_pass.records
            )
        except MemwalOpsError:
            table.store.delete_many(change.written_files())
            raise

    patch.setattr(passes, "commit_pass", commit_and_clean_up)


def discard_what_may_be_named(patch: Patch) -> None:
    """An index build is discarded whenever its publication does not return."""

    def publish(built_on: Any, name: str, build: Any, change: Any, note: Any, retry: Any) -> Any:
        try:
            commit.commit_indexes(built_on, change(built_on), note)
        except BaseException:
            index_publishing.discard(built_on, build)
            raise
        return retry.landed(built_on)

    from memwal_ops.formats.lance.jobs.catchup import update as catchup

    patch.setattr(catchup, "publish_build", publish)


def expire_in_silence(patch: Patch) -> None:
    """An expiry neither says what it is about to do, nor looks again."""

    @contextmanager
    def silent(*_: Any) -> Iterator[None]:
        yield

    patch.setattr(expire, "announced_expiry", silent)
    look = LiveVersions.refresh
    patch.setattr(LiveVersions, "refresh", lambda self, *rest: None if self._trees else look(self, *rest))
    assert announced_expiry is not expire.announced_expiry


def expire_data_first(patch: Patch) -> None:
    """An expiry deletes the files of versions before their manifests, as pylance's own clean-up does."""
    real = expire._Run.retire

    def retire(run: Any, batch: tuple[int, ...]) -> None:
        # Below the points of the matrix, which are numbered as in a run without the bug.
        store, needed = getattr(run.table.store, "_inner", run.table.store), NeededFiles()
        below = replace(run.table, store=store)
        needed.read(below, without={version_path(version, run.table.naming) for version in batch})
        needed.set_aside(below, batch, apply=False)
        find_garbage(
            store, needed, store_time(store), lambda files: bool(store.delete_many([one.path for one in files]))
        )
        real(run, batch)

    patch.setattr(expire._Run, "retire", retire)


def publish_beside(patch: Patch) -> None:
    """A version is put where it belongs, whatever stands there."""

    def put(table: Any, data: bytes, version: int) -> None:
        table.store.put(version_path(version, table.naming), data)

    patch.setattr(commit, "publish", put)
    patch.setattr(commit, "refuse_if_not_newest", lambda *_: None)


def delete_the_newest_first(patch: Patch) -> None:
    """Old region manifests are deleted in the wrong order: a kill in between leaves a gap."""
    real = RegionCollector.revalidate
    patch.setattr(RegionCollector, "revalidate", lambda self, batch: [*real(self, batch)][::-1])


@pytest.mark.parametrize(
    ("bug", "job", "other"),
    [
        (exists_means_lost, "merge", None),
        (clean_up_after_any_error, "merge", None),
        (discard_what_may_be_named, "catchup", None),
        (expire_in_silence, "expire", "hold"),
        (expire_data_first, "expire", None),
        (publish_beside, "snapshot", "merge"),
        (delete_the_newest_first, "gc", None),
    ],
)
def test_a_planted_bug_is_found(
    matrix: Matrix, monkeypatch: Patch, bug: Callable[[Patch], None], job: str, other: str | None
) -> None:
    registered = JOBS[job]
    cells = [*(matrix.hits(registered) if other is None else matrix.meetings(registered, other))]
    cells.sort(key=lambda cell: cell.fault in {Fault.ERROR, Fault.CRASH_BEFORE, Fault.TOLD_BEFORE})
    matrix.forget()
    try:
        bug(monkeypatch)
        assert any(_is_caught(matrix, cell) for cell in cells)
    finally:
        matrix.forget()


def _is_caught(matrix: Matrix, cell: Cell) -> bool:
    try:
        matrix.run(cell)
    except (AssertionError, MemwalOpsError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}\n{cell}")  # noqa: T201 - shown where a test fails
        return True
    return False
