"""A version that is published too late must not stand: others went on, and a clean-up freed its name."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.jobs import merge
from tests.support.stores import LyingStore
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Before which step of the commit the others come: it is stalled there.
STEPS = ["_build_detached", "_refuse_unreadable", "publish"]


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
    # No version and no data file as old as the backlog is left: what the columns were then, a person has to say.
    rewritten = lance.dataset(uri)
    rewritten.update_config({"memwal-ops.same-columns-at": str(rewritten.version)})
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))


def merge_and_clean_up(uri: str) -> None:
    merge.apply(open_table(uri), merge.MergeOptions(max_generations=1))
    merge.apply(open_table(uri), merge.MergeOptions())
    rewrite_and_clean_up(uri)


def replace_every_file(uri: str) -> None:
    """No file of an older version is left."""
    for _ in range(2):
        merge.apply(open_table(uri), merge.MergeOptions(max_generations=1))
    for index in ("id", "val"):
        lance.dataset(uri).create_scalar_index(index, "BTREE", replace=True)
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))


def stall(monkeypatch: pytest.MonkeyPatch, step: str, others: Callable[[], None]) -> None:
    """Lets the others work before the first call of a step of the commit."""
    real = getattr(commit, step)

    def late(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(commit, step, real)
        others()
        return real(*arguments, **named)

    monkeypatch.setattr(commit, step, late)


@pytest.mark.parametrize("others", [rewrite_and_clean_up, merge_and_clean_up, replace_every_file])
@pytest.mark.parametrize("step", STEPS)
def test_every_version_reads_after_a_stalled_commit(
    made: Workload, monkeypatch: pytest.MonkeyPatch, step: str, others: Callable[[str], None]
) -> None:
    stall(monkeypatch, step, lambda: others(made.uri))
    report = merge.apply(open_table(made.uri), merge.MergeOptions(max_generations=3))
    assert report.decision in {"merged", "superseded"}
    assert report.commit_conflicts == 1
    assert_same(read_base(made.uri), made.expected())
    for version in lance.dataset(made.uri).versions():
        lance.dataset(made.uri, version=version["version"]).to_table()


@pytest.mark.parametrize("keeper", ["tag", "branch"])
def test_a_late_version_that_is_named_stays(made: Workload, monkeypatch: pytest.MonkeyPatch, keeper: str) -> None:
    """It cannot be read, and a tag or hold refers to it: an operator has to decide."""
    late: list[int] = []

    def keep() -> None:
        version = min(one["version"] for one in lance.dataset(made.uri).versions())
        late.append(version)
        assert version < open_table(made.uri).version
        with pytest.raises(pa.ArrowInvalid, match="Not found"):
            lance.dataset(made.uri, version=version).to_table()
        if keeper == "tag":
            lance.dataset(made.uri).tags.create("audit", version)
        else:
            lance.dataset(made.uri).create_branch("what-if", version)

    def go_on() -> None:
        replace_every_file(made.uri)
        stall(monkeypatch, "verify_in_history", keep)

    stall(monkeypatch, "publish", go_on)
    report = merge.apply(open_table(made.uri), merge.MergeOptions(max_generations=3))
    assert report.commit_conflicts == 1
    assert late[0] in {one["version"] for one in lance.dataset(made.uri).versions()}
    assert_same(read_base(made.uri), made.expected())


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

    stall(monkeypatch, "verify_in_history", go_on_and_restore)
    merge.apply(open_table(made.uri), merge.MergeOptions())
    assert_same(read_base(made.uri), made.expected())
    for version in lance.dataset(made.uri).versions():
        lance.dataset(made.uri, version=version["version"]).to_table()
    assert {version["version"] for version in lance.dataset(made.uri).versions()} >= set(built)


@pytest.mark.parametrize("keeper", ["tag", "branch", "hold", "nobody"])
def test_a_skewed_clock_deletes_no_version(made: Workload, monkeypatch: pytest.MonkeyPatch, keeper: str) -> None:
    """Others go on from ours until no file of it is left in the newest version, on a machine whose clock is behind."""
    ours: list[int] = []
    rows: list[Any] = []

    def go_on() -> None:
        dataset = lance.dataset(made.uri)
        ours.append(dataset.version)
        rows.append(dataset.to_table().sort_by("id"))
        match keeper:
            case "tag":
                dataset.tags.create("audit", dataset.version)
            case "branch":
                dataset.create_branch("what-if", dataset.version)
            case "hold":
                take_hold(open_table(made.uri), dataset.version, timedelta(hours=1))
        for index in ("id", "val"):
            dataset.create_scalar_index(index, "BTREE", replace=True)
        dataset = lance.dataset(made.uri)
        assert dataset.optimize.compact_files().fragments_removed == len(
            lance.dataset(made.uri, version=ours[0]).get_fragments()
        )
        by_another_machine = lance.dataset(made.uri).version
        os.utime(f"{made.uri}/_versions/{2**64 - 1 - by_another_machine:020d}.manifest", (1, 1))

    stall(monkeypatch, "verify_in_history", go_on)
    merge.apply(open_table(made.uri), merge.MergeOptions())
    assert lance.dataset(made.uri).version > ours[0]
    assert lance.dataset(made.uri, version=ours[0]).to_table().sort_by("id").equals(rows[0])
    assert_same(read_base(made.uri), made.expected())


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
    merge.apply(lying, merge.MergeOptions())
    assert_same(read_base(made.uri), made.expected())
