"""A version that is published too late must not stand: others went on, and a clean-up freed its name."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core import commit
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.jobs import merge as job
from tests.core.test_commit import LyingStore
from tests.tables.model import assert_same
from tests.tables.reading import read_base
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Before which step of the commit the others come: it is stalled there.
STEPS = ["_build_detached", "_prove_readable", "publish"]


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    table = Workload(3, regions=2, base_rows=60).create(str(tmp_path / "t.lance")).step(12)
    table.close()
    return table


def rewrite_and_clean_up(uri: str) -> None:
    """Replaces every file of the table, and frees the names of all versions but the newest."""
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).create_scalar_index("val", "BTREE", replace=True)
    lance.dataset(uri).optimize.optimize_indices()
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))


def merge_and_clean_up(uri: str) -> None:
    job.apply(open_table(uri), job.MergeOptions(max_generations=1))
    job.apply(open_table(uri), job.MergeOptions())
    rewrite_and_clean_up(uri)


def stall(monkeypatch: pytest.MonkeyPatch, step: str, others: Callable[[], None]) -> None:
    """Lets the others work before the first call of a step of the commit."""
    real = getattr(commit, step)

    def late(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(commit, step, real)
        others()
        return real(*arguments, **named)

    monkeypatch.setattr(commit, step, late)


@pytest.mark.parametrize("others", [rewrite_and_clean_up, merge_and_clean_up])
@pytest.mark.parametrize("step", STEPS)
def test_every_version_reads_after_a_stalled_commit(
    made: Workload, monkeypatch: pytest.MonkeyPatch, step: str, others: Callable[[str], None]
) -> None:
    stall(monkeypatch, step, lambda: others(made.uri))
    report = job.apply(open_table(made.uri), job.MergeOptions(max_generations=3))
    assert report.decision in {"merged", "superseded"}
    assert report.lost_races == 1
    assert_same(read_base(made.uri), made.expected())
    for version in lance.dataset(made.uri).versions():
        lance.dataset(made.uri, version=version["version"]).to_table()


def test_a_skewed_clock_costs_no_version_its_files(made: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our version stands; the next one, built on it by a machine whose clock is behind, looks older."""
    before = lance.dataset(made.uri).version

    built = []

    def go_on_and_restore() -> None:
        lance.dataset(made.uri).update({"txt": "'later'"}, where="id = 1")
        built_on_ours = lance.dataset(made.uri).version
        lance.dataset(made.uri).checkout_version(before).restore()
        path = f"{made.uri}/_versions/{2**64 - 1 - built_on_ours:020d}.manifest"
        os.utime(path, (1, 1))
        built.extend([built_on_ours - 1, built_on_ours])

    stall(monkeypatch, "prove_living", go_on_and_restore)
    job.apply(open_table(made.uri), job.MergeOptions())
    assert_same(read_base(made.uri), made.expected())
    for version in lance.dataset(made.uri).versions():
        lance.dataset(made.uri, version=version["version"]).to_table()
    assert {version["version"] for version in lance.dataset(made.uri).versions()} >= set(built)


def test_a_store_that_contradicts_itself_costs_no_rows(made: Workload) -> None:
    """The put landed, the answer says that the name was taken, and a stale read says that nothing is there."""
    table = open_table(made.uri)
    lie = iter([True])

    def put_if_absent(path: str, data: bytes) -> bool:
        landed = table.store.put_if_absent(path, data)
        return landed and not path.startswith("_versions/")

    def get(path: str) -> bytes:
        if path.startswith("_versions/1") and next(lie, False):
            raise ObjectNotFoundError(path)
        return table.store.get(path)

    lying = replace(table, store=LyingStore(table.store, put_if_absent=put_if_absent, get=get))
    job.apply(lying, job.MergeOptions())
    assert_same(read_base(made.uri), made.expected())
