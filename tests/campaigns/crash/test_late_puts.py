"""A commit whose put is stuck on its way: it lands after the client gave up, and after others went on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.errors import CommitStateUnknownError, StoreUnavailableError
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_lsm
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


class SlowStore(StoreWrapper):
    """The first put of a base version is not answered, and reaches the store when :meth:`land` says so."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self._late: list[tuple[str, bytes]] = []

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if path.startswith("_versions/") and not self._late:
            self._late.append((path, data))
            raise StoreUnavailableError("no answer")
        return super().put_if_absent(path, data)

    def land(self) -> bool:
        path, data = self._late[0]
        return super().put_if_absent(path, data)


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    table = Workload(7, regions=2, base_rows=60).create(str(tmp_path / "t.lance")).step(14)
    table.close()
    return table


@pytest.fixture
def slow(made: Workload) -> SlowStore:
    """After a merge with an unknown outcome."""
    table = open_table(made.uri)
    store = SlowStore(table.store)
    with pytest.raises(CommitStateUnknownError):
        merge.apply(replace(table, store=store), merge.MergeOptions(max_generations=2))
    return store


def check(made: Workload) -> None:
    assert merge.apply(open_table(made.uri), merge.MergeOptions()).decision in {"merged", "nothing_to_merge"}
    assert_same(read_base(made.uri), made.expected())
    assert_same(read_lsm(made.uri), made.expected())


def every_version_reads(uri: str) -> None:
    for version in lance.dataset(uri).versions():
        lance.dataset(uri, version=version["version"]).to_table()


def test_it_is_committed_before_the_next_run(made: Workload, slow: SlowStore) -> None:
    assert slow.land()
    check(made)
    every_version_reads(made.uri)


@pytest.mark.parametrize("generations", [1, 2, 3, None])
def test_it_is_committed_after_the_next_run(made: Workload, slow: SlowStore, generations: int | None) -> None:
    merge.apply(open_table(made.uri), merge.MergeOptions(max_generations=generations))
    assert not slow.land()
    check(made)
    every_version_reads(made.uri)


@pytest.mark.parametrize("at", range(1, 3))
def test_it_is_committed_during_the_next_run(made: Workload, slow: SlowStore, at: int) -> None:
    class Landing(StoreWrapper):
        """Lets it land just before the n-th put of the run: first the detached proof, then the version."""

        calls = 0

        def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
            if verb in {"put", "put_if_absent"}:
                self.calls += 1
                if self.calls == at:
                    assert slow.land()
            return method(*arguments, **named)

    table = open_table(made.uri)
    store = Landing(table.store)
    report = merge.apply(replace(table, store=store), merge.MergeOptions(max_generations=1))
    assert store.calls >= at
    assert report.commit_conflicts <= 1
    check(made)
    every_version_reads(made.uri)


def test_it_is_committed_under_a_name_that_a_clean_up_freed(made: Workload, slow: SlowStore) -> None:
    """It cannot be prevented then; but no version is built on it, and the next clean-up deletes it."""
    merge.apply(open_table(made.uri), merge.MergeOptions(max_generations=1))
    lance.dataset(made.uri).optimize.compact_files()
    lance.dataset(made.uri).cleanup_old_versions(older_than=timedelta(0))
    assert slow.land()
    check(made)
    lance.dataset(made.uri).cleanup_old_versions(older_than=timedelta(0))
    every_version_reads(made.uri)
    check(made)
