"""A stop request is heard while a stage runs: its tasks are cancelled, and nothing is published."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import run_job
from memwal_ops.core.context import NullListener, RunContext, StopRequested
from memwal_ops.core.spark import stages
from memwal_ops.formats.lance.engines.spark import engine
from memwal_ops.formats.lance.engines.spark.running import LoggingTaskRunner
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions, MergeOptions, VerifyOptions
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.options import Options

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("spark")]


def waiting(work: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """``work`` that says that it started, and waits for a file."""

    def wait(*arguments: Any) -> Any:
        Path(folder, "started").touch()
        while not Path(folder, "gate").exists():
            time.sleep(0.05)
        return work(*arguments)

    return wait


class Stop(NullListener):
    """Requests a stop once a task runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self) -> None:
        """Raise it."""
        if (self.folder / "started").exists():
            raise StopRequested


def plain(uri: str) -> None:
    made = PlainTable(uri).create(fragments=3, rows=50)
    made.dataset.create_scalar_index("id", "BTREE")
    made.append(200)  # else most of what an update writes is in its segment already


def with_log(uri: str) -> None:
    Workload(5, regions=2, base_rows=50).create(uri).step(4).close()


@pytest.mark.parametrize(
    ("make", "job", "options"),
    [
        (plain, "catchup", CatchupOptions(engine="spark")),
        (plain, "compact", CompactOptions(engine="spark")),
        (plain, "verify", VerifyOptions(engine="spark", answers=True)),
        (with_log, "merge", MergeOptions(engine="spark")),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_stop_within_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], None], job: str, options: Options
) -> None:
    uri, folder = str(tmp_path / "t.lance"), tmp_path
    make(uri)
    before = lance.dataset(uri).version
    run, writer = LoggingTaskRunner.run, engine.group_writer
    monkeypatch.setattr(stages, "_SETTLE_SECONDS", 0.1)  # these tasks wait for longer

    def held(self: LoggingTaskRunner, table: Any, stage: Any, tasks: Any, work: Any) -> Any:
        return run(self, table, stage, tasks, waiting(work, str(folder)))

    monkeypatch.setattr(LoggingTaskRunner, "run", held)
    monkeypatch.setattr(engine, "group_writer", lambda work: waiting(writer(work), str(folder)))
    try:
        with pytest.raises(StopRequested):
            run_job(uri, job, options, context=RunContext(Stop(folder)))
    finally:
        (folder / "gate").touch()
    assert (folder / "started").exists()
    assert lance.dataset(uri).version == before
    monkeypatch.undo()
    assert run_job(uri, job, options).exit_code == 0, "it can be run again"
