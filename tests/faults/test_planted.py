"""The matrix finds bugs that are planted on purpose: each is what somebody might really write."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.core import commit, publication
from memwal_ops.core.holds import announced_expiry
from memwal_ops.core.retention import Retention
from memwal_ops.engines import local
from memwal_ops.errors import MemwalOpsError
from memwal_ops.jobs import expire, gc, index_publishing
from tests.faults.jobs import JOBS
from tests.faults.plan import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.cells import Cell, Matrix

Patch = pytest.MonkeyPatch


def exists_means_lost(patch: Patch) -> None:
    """Whoever is told that the version exists takes that for another's, and cleans up."""
    patch.setattr(publication, "_read_back", lambda *_: b"another's")


def clean_up_after_any_error(patch: Patch) -> None:
    """A merge whose commit fails takes its files away, also where nobody knows whether it landed."""

    def commit_and_clean_up(table: Any, change: Any, merge_pass: Any, note: Any) -> int:
        try:
            return commit.commit_strict(table, change.operation(), merge_pass.progress, note)
        except MemwalOpsError:
            table.store.delete_many(change.written_files())
            raise

    patch.setattr(local, "commit_pass", commit_and_clean_up)


def discard_what_may_be_named(patch: Patch) -> None:
    """An index build is discarded whenever its publication does not return."""

    def publish(built_on: Any, name: str, build: Any, change: Any, note: Any, races: Any) -> Any:
        try:
            commit.commit_indexes(built_on, change(built_on), note)
        except BaseException:
            index_publishing.discard(built_on, build)
            raise
        return races.win(built_on)

    from memwal_ops.jobs import catchup

    patch.setattr(catchup, "publish_build", publish)


def expire_in_silence(patch: Patch) -> None:
    """An expiry neither says what it is about to do, nor looks again."""

    @contextmanager
    def silent(*_: Any) -> Iterator[None]:
        yield

    patch.setattr(expire, "announced_expiry", silent)
    look = Retention.refresh
    patch.setattr(Retention, "refresh", lambda self, *rest: None if self._trees else look(self, *rest))
    assert announced_expiry is not expire.announced_expiry


def publish_beside(patch: Patch) -> None:
    """A version is put where it belongs, whatever stands there."""

    def put(table: Any, data: bytes, version: int) -> None:
        table.store.put(publication.version_path(version, table.naming), data)

    patch.setattr(commit, "publish", put)
    patch.setattr(commit, "refuse_overtaken", lambda *_: None)


def delete_the_newest_first(patch: Patch) -> None:
    """Old region manifests go in the wrong order: whoever dies in between leaves a gap."""
    real = gc._Run._delete_manifests
    patch.setattr(gc._Run, "_delete_manifests", lambda run, view, batch: real(run, view, batch[::-1]))


@pytest.mark.parametrize(
    ("bug", "job", "other"),
    [
        (exists_means_lost, "merge", None),
        (clean_up_after_any_error, "merge", None),
        (discard_what_may_be_named, "catchup", None),
        (expire_in_silence, "expire", "hold"),
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
