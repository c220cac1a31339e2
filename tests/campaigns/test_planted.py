"""Planted bugs that only a particular history of a Lance table shows: the test of that history finds each.

The random histories (:mod:`tests.campaigns.sim.planted`) have no client of another release, no reader that keeps a
version open for weeks, no index that is removed, no branch that is opened by its path, and few flushes that fail and
are collected before the next one, and seldom a merge that ends while an index is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops.formats.lance import table as tables
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.engines.merge import locate
from memwal_ops.formats.lance.files.datasets import Branch
from memwal_ops.formats.lance.generations import backlog
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.catchup import update
from memwal_ops.formats.lance.jobs.gc import evidence
from memwal_ops.formats.lance.log.memtable import Growing
from tests.campaigns.sim.planted import Bug, Patch
from tests.integration.formats.lance import test_branches, test_index_made_again
from tests.integration.formats.lance.jobs import test_odd_data
from tests.integration.formats.lance.jobs.catchup import test_catchup
from tests.integration.formats.lance.jobs.gc import test_gc_pinned_readers
from tests.integration.formats.lance.log import test_region_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


def merged_by_an_index_that_was_not_checked() -> Iterable[Patch]:
    """Keys are looked up by a B-tree that lacks rows which it claims to cover: they stand twice."""
    yield Patch(locate, "known_faults", lambda _: {})
    yield Patch(locate, "sampled_fault", lambda *_: None)


def drained_when_merged() -> Iterable[Patch]:
    """A generation is taken off its region's list while a reader keeps the version before its merge open."""
    yield Patch(evidence, "merged_before", lambda _, retention, __: retention.progress_at(None))


def records_of_before_a_restore() -> Iterable[Patch]:
    """When a generation was merged is taken from before a restore to a version without it."""
    yield Patch(commit, "drop_contradicted", lambda *_: None)


def progress_begins_with_the_index() -> Iterable[Patch]:
    """Of an index that was removed and made again, nothing counts as merged: old values replace newer ones."""
    yield Patch(backlog, "lost_progress", lambda *_: None)


def region_is_new_with_the_index() -> Iterable[Patch]:
    """The same, by a merge that does not ask to which index a region belongs."""
    yield Patch(backlog, "check_identity", lambda *_, **__: None)


def specs_begin_with_the_index() -> Iterable[Patch]:
    """Of an index that was removed and made again, only the specs count that it was given since."""
    yield Patch(backlog, "_add_specs", lambda *_: ())


def restored_progress_alone() -> Iterable[Patch]:
    """Progress is restored without a catch-up entry: an index that lacks merged rows counts as caught up."""
    yield Patch(backlog, "with_catchup", lambda details, _: details)


def progress_read_after_the_rebuild() -> Iterable[Patch]:
    """A catch-up says that the index covers whatever is merged by the time that it is published."""
    yield Patch(update, "catchup_entry", lambda table, *_, **__: dict(table.index.merged_generations))


def what_shows_the_progress_expires() -> Iterable[Patch]:
    """While a table has no index, its versions that have one are expired like others."""
    yield Patch(expire, "_shows_progress", lambda *_: None)


def branch_taken_for_main() -> Iterable[Patch]:
    """Tags and branches of a branch that is opened by its path are looked for below the path."""
    yield Patch(tables.datasets, "resolve_branch", lambda _, store, __: Branch(None, store))


def directory_of_a_flush_that_failed() -> Iterable[Patch]:
    """A region writer lists the directory that an earlier flush wrote, whatever became of it since."""
    yield Patch(Growing, "publishable", lambda self, _: self.path)


def _made_again(path: Path, capfd: Any) -> None:
    test_index_made_again.test_init_makes_the_index_again(test_index_made_again.merged_by("ours", path), capfd)


def _merged_again(path: Path, _: Any) -> None:
    uri = test_index_made_again.merged_by("ours", path)
    test_index_made_again.test_merging_continues_where_it_was(uri, drained=False, waiting=False, times=1)


def _merged_meanwhile(path: Path, _: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_catchup.test_a_merge_in_between_costs_no_second_build(path, patch)


FOUND_BY: list[tuple[Callable[[], Iterable[Patch]], Callable[[Path, Any], None]]] = [
    (
        merged_by_an_index_that_was_not_checked,
        lambda path, _: test_odd_data.test_an_index_that_claims_rows_which_it_does_not_have_is_not_asked(
            path, lance.__version__, None
        ),
    ),
    (drained_when_merged, lambda path, _: test_gc_pinned_readers.test_a_reader_with_an_old_version_misses_no_row(path)),
    (
        records_of_before_a_restore,
        lambda path, _: test_gc_pinned_readers.test_a_restored_version_that_pylance_cleans_up(path),
    ),
    (progress_begins_with_the_index, _made_again),
    (region_is_new_with_the_index, _merged_again),
    (
        specs_begin_with_the_index,
        lambda path, capfd: test_index_made_again.test_region_specs_are_restored(path, capfd, "pylance, merge"),
    ),
    (
        restored_progress_alone,
        lambda path, _: test_index_made_again.test_an_index_that_lacks_merged_rows_is_not_caught_up(path),
    ),
    (progress_read_after_the_rebuild, _merged_meanwhile),
    (
        what_shows_the_progress_expires,
        test_index_made_again.test_what_shows_that_unmerged_regions_are_the_tables_own_is_kept,
    ),
    (
        directory_of_a_flush_that_failed,
        lambda path, _: test_region_writer.test_a_flush_that_failed_publishes_nothing_that_gc_deleted(
            test_region_writer.made(path), True
        ),
    ),
    (
        branch_taken_for_main,
        lambda path, _: test_branches.test_an_expiry_keeps_what_tags_and_child_branches_of_the_branch_need(path, "dev"),
    ),
]


@pytest.mark.parametrize(("bug", "history"), FOUND_BY, ids=[bug.__name__ for bug, _ in FOUND_BY])
def test_a_planted_bug_is_found(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    bug: Callable[[], Iterable[Patch]],
    history: Callable[[Path, Any], None],
) -> None:
    planted = Bug(bug.__name__, bug.__doc__ or "", bug)
    with planted.planted() as calls, pytest.raises((AssertionError, ValueError)) as told:  # or pylance cannot read it
        history(tmp_path, capfd)
    assert all(calls.values()), f"the product never called {[name for name, number in calls.items() if not number]}"
    assert str(told.value)
