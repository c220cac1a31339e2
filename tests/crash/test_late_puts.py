"""A commit whose put is stuck on its way: it lands after the client gave up, and after others went on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.errors import CommitStateUnknownError, StoreUnavailableError
from memwal_ops.jobs import merge as job
from tests.tables.model import assert_same
from tests.tables.reading import read_base, read_lsm
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


class SlowStore:
    """The first put of a base version is not answered, and reaches the store when :meth:`land` says so."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._late: list[tuple[str, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if path.startswith("_versions/") and not self._late:
            self._late.append((path, data))
            raise StoreUnavailableError("no answer")
        return bool(self._store.put_if_absent(path, data))

    def land(self) -> bool:
        path, data = self._late[0]
        return bool(self._store.put_if_absent(path, data))


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    table = Workload(7, regions=2, base_rows=60).create(str(tmp_path / "t.lance")).step(14)
    table.close()
    return table


@pytest.fixture
def slow(made: Workload) -> SlowStore:
    """After a merge of which nobody knows how it ended."""
    table = open_table(made.uri)
    store = SlowStore(table.store)
    with pytest.raises(CommitStateUnknownError):
        job.apply(replace(table, store=store), job.MergeOptions(max_generations=2))
    return store


def check(made: Workload) -> None:
    assert job.apply(open_table(made.uri), job.MergeOptions()).decision in {"merged", "nothing_to_merge"}
    assert_same(read_base(made.uri), made.expected())
    assert_same(read_lsm(made.uri), made.expected())


def every_version_reads(uri: str) -> None:
    for version in lance.dataset(uri).versions():
        lance.dataset(uri, version=version["version"]).to_table()


def test_it_lands_before_the_next_run(made: Workload, slow: SlowStore) -> None:
    assert slow.land()
    check(made)
    every_version_reads(made.uri)


@pytest.mark.parametrize("generations", [1, 2, 3, None])
def test_it_lands_after_the_next_run(made: Workload, slow: SlowStore, generations: int | None) -> None:
    job.apply(open_table(made.uri), job.MergeOptions(max_generations=generations))
    assert not slow.land()
    check(made)
    every_version_reads(made.uri)


@pytest.mark.parametrize("at", range(1, 3))
def test_it_lands_in_the_middle_of_the_next_run(made: Workload, slow: SlowStore, at: int) -> None:
    class Landing:
        """Lets it land just before the n-th put of the run: first the detached proof, then the version."""

        def __init__(self, store: Any) -> None:
            self._store, self.calls = store, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def _tick(self) -> None:
            self.calls += 1
            if self.calls == at:
                assert slow.land()

        def put(self, path: str, data: bytes) -> None:
            self._tick()
            self._store.put(path, data)

        def put_if_absent(self, path: str, data: bytes) -> bool:
            self._tick()
            return bool(self._store.put_if_absent(path, data))

    table = open_table(made.uri)
    store = Landing(table.store)
    report = job.apply(replace(table, store=store), job.MergeOptions(max_generations=1))
    assert store.calls >= at
    assert report.lost_races <= 1
    check(made)
    every_version_reads(made.uri)


def test_it_lands_under_a_name_that_a_clean_up_freed(made: Workload, slow: SlowStore) -> None:
    """Nobody can hold it back then; but nobody builds on it, and the next clean-up takes it away."""
    job.apply(open_table(made.uri), job.MergeOptions(max_generations=1))
    lance.dataset(made.uri).optimize.compact_files()
    lance.dataset(made.uri).cleanup_old_versions(older_than=timedelta(0))
    assert slow.land()
    check(made)
    lance.dataset(made.uri).cleanup_old_versions(older_than=timedelta(0))
    every_version_reads(made.uri)
    check(made)
