"""Kill a merge at each of its storage calls and at each step between them; run it again; nothing is lost."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table
from memwal_ops.engines import local
from memwal_ops.jobs import merge as job
from tests.crash.dying_store import DyingStore, Killed
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base, read_lsm, read_spec
from tests.tables.region_layout import RegionLayout
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tables.lsm_table import LsmTable

STEPS = ["_open_all", "collapse", "locate", "rewrite", "_commit"]


def build(layout: str, path: Path, **options: Any) -> LsmTable:
    kind = {"shard": Workload, "region": RegionLayout}[layout]
    table = kind(3, regions=2, base_rows=60, **options).create(str(path / "made.lance")).step(12)
    table.close()
    return table


def copy(table: LsmTable, path: Path, name: str) -> str:
    uri = str(path / f"{name}.lance")
    shutil.copytree(table.uri, uri)
    return uri


def check(table: LsmTable, uri: str) -> None:
    """Base = exactly what the progress says; base and generations together = every write."""
    merged = dict(wire.progress(Files(uri, None)))
    assert_same(read_base(uri), table.expected(merged))
    assert_same(read_lsm(uri) if isinstance(table, Workload) else read_spec(uri), table.expected())


def finish(table: LsmTable, uri: str) -> None:
    """What the next run does: everything, whatever the killed one left behind."""
    assert job.apply(open_table(uri), job.MergeOptions()).decision in {"merged", "nothing_to_merge"}
    assert_same(read_base(uri), table.expected())
    # A kill between build and publication leaves one detached manifest, which no reader looks at.
    assert sum("/d" in path for path in Files(uri, None).listing("_versions")) <= 1


@pytest.mark.req("S0-168")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("layout", ["shard", "region"])
def test_killed_at_every_storage_call(tmp_path: Path, layout: str, after: bool) -> None:
    made = build(layout, tmp_path)
    number = 0
    while True:
        number += 1
        uri = copy(made, tmp_path, str(number))
        table = open_table(uri)
        store = DyingStore(table.store, number, after=after)
        try:
            job.apply(replace(table, store=store), job.MergeOptions(max_generations=3))
        except Killed:
            check(made, uri)
            finish(made, uri)
            shutil.rmtree(uri)
        else:
            break
    assert number > 20, store.calls


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_between_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool) -> None:
    made = build("shard", tmp_path, stable_row_ids=True)
    real = getattr(local, step)
    passes = [0]

    def dying(*arguments: Any, **named: Any) -> Any:
        passes[0] += 1
        if passes[0] < 2:
            return real(*arguments, **named)
        if after:
            real(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(local, step, dying)
        with pytest.raises(Killed):
            job.apply(open_table(made.uri), job.MergeOptions(max_generations=2))
    check(made, made.uri)
    finish(made, made.uri)
