"""maintain: the steps in their order, each on what the one before left; deletions only when asked."""

from __future__ import annotations

import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table
from memwal_ops.core import maintain
from memwal_ops.core.candidates import Verdict
from memwal_ops.core.context import NullListener, RunContext
from memwal_ops.errors import DeletesFailedError, InvalidUsageError, StoreUnavailableError
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.expire import ExpireOptions
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.options import MaintainOptions
from tests.support.gc_options import AT_ONCE_FLAGS, IMMEDIATE
from tests.support.run_cli import run_process
from tests.support.tables.damage import remove_generation
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.tables.lsm_table import LsmTable

STEPS = ("merge", "catchup", "compact", "snapshot", "expire", "gc")


def now(*, apply: bool) -> MaintainOptions:
    """Whatever may go at once."""
    return MaintainOptions(apply=apply, expire=ExpireOptions(timedelta(0), allow_unsafe=True), gc=IMMEDIATE)


class Steps(NullListener):
    """Notes the steps."""

    def __init__(self, begun: list[str]) -> None:
        self.begun = begun

    def step(self, name: str) -> None:
        self.begun.append(name)


def run(uri: str, options: MaintainOptions, context: RunContext | None = None) -> maintain.MaintainReport:
    return maintain.JOB.apply(open_table(uri), options, context or RunContext())


def made(folder: Path, kind: type[LsmTable] = Workload) -> LsmTable:
    table = kind(11, regions=2, base_rows=60).create(str(folder / "t.lance")).step(25)
    table.close()
    return table


def decisions(report: maintain.MaintainReport) -> dict[str, str]:
    return {step.step: step.decision for step in report.steps}


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
def test_everything_that_is_due_is_done_in_order(tmp_path: Path, kind: type[LsmTable]) -> None:
    table = made(tmp_path, kind)
    begun: list[str] = []
    report = run(table.uri, now(apply=True), RunContext(listener=Steps(begun)))
    assert tuple(begun) == STEPS
    assert report.decision == "maintained"
    assert decisions(report) == {
        "merge": "merged",
        "catchup": "caught_up",
        "compact": "compacted",
        "snapshot": "built",
        "expire": "expired",
        "gc": "deleted",
    }
    assert_same(read_base(table.uri), table.expected())
    assert not [path for path in Files(table.uri).listing("_mem_wal") if "_gen_" in path]

    again = run(table.uri, now(apply=True))
    assert decisions(again)["merge"] == "nothing_to_merge"
    assert again.exit_code == 0
    table.step(10)
    table.close()
    assert run(table.uri, MaintainOptions()).decision == "maintained"
    assert_same(read_base(table.uri), table.expected())


def test_nothing_is_deleted_unasked(tmp_path: Path) -> None:
    table = made(tmp_path)
    before = set(Files(table.uri).listing("_mem_wal"))
    report = run(table.uri, now(apply=False))
    assert {decisions(report)["expire"], decisions(report)["gc"]} == {"planned"}
    assert before <= set(Files(table.uri).listing("_mem_wal"))


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    table = made(tmp_path)
    before = Files(table.uri).listing("")
    report = run(table.uri, MaintainOptions(dry_run=True))
    assert report.decision == "dry_run"
    assert Files(table.uri).listing("") == before


def test_nothing_is_deleted_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(tmp_path)

    def fails(*_: object) -> None:
        raise StoreUnavailableError("The store does not answer.")

    monkeypatch.setattr(catchup, "apply", fails)
    report = run(table.uri, now(apply=True))
    assert report.decision == "incomplete"
    assert report.exit_code == StoreUnavailableError.exit_code
    assert decisions(report) == {
        "merge": "merged",
        "catchup": "failed",
        "compact": "compacted",
        "snapshot": "built",
        "expire": "skipped",
        "gc": "skipped",
    }
    assert_same(read_base(table.uri), table.expected())


def test_no_step_begins_when_the_budget_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(tmp_path)
    monkeypatch.setattr(compact, "apply", lambda *_: pytest.fail("compact began"))
    clock = iter([0.0, 0.0, *[float(second) for second in range(100, 200)]])
    monkeypatch.setattr(maintain, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    report = run(table.uri, MaintainOptions(apply=True, budget=timedelta(seconds=90)))
    assert decisions(report) == {"merge": "merged", **dict.fromkeys(STEPS[1:], "skipped")}
    assert report.decision == "over_budget"
    assert report.exit_code == 0


@pytest.mark.long
def test_a_blocked_region_is_reported_and_keeps_its_log(tmp_path: Path) -> None:
    table = made(tmp_path)
    remove_generation(table.uri, table.regions[0], 1)
    logs = Files(table.uri).listing(f"_mem_wal/{table.regions[0]}/wal")
    done = run_process(
        "maintain", table.uri, "--apply", "--json", "--older-than", "0s", "--allow-unsafe", *AT_ONCE_FLAGS
    )
    assert done.code == 10, done.err
    assert done.document["decision"] == "incomplete"
    assert Files(table.uri).listing(f"_mem_wal/{table.regions[0]}/wal") == logs
    plan = gc.plan(open_table(table.uri), IMMEDIATE)
    why = [item.why for item in plan.items[Verdict.HELD]]
    assert any("generation 1 is missing" in one for one in why)


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    table = made(tmp_path)
    done = run_process("maintain", table.uri)
    assert done.code == 0
    assert done.out.startswith("maintained: ")
    assert "Nothing was deleted; add --apply" not in done.out  # all is young: nothing could go
    done = run_process("maintain", table.uri, "--older-than", "0s", "--allow-unsafe")
    assert "Nothing was deleted; add --apply" in done.out
    done = run_process(
        "maintain", table.uri, "--apply", "--json", "--older-than", "0s", "--allow-unsafe", *AT_ONCE_FLAGS
    )
    assert done.code == 0, done.err
    report = done.document
    assert set(report) == {"decision", "apply", "steps", "outlook", "version", "seconds", "run_id"}
    assert [step["step"] for step in report["steps"]] == list(STEPS)
    assert all(set(step) == {"step", "decision", "seconds", "report", "error", "because"} for step in report["steps"])
    assert_same(read_spec(table.uri), table.expected())
    assert merge.apply(open_table(table.uri), merge.MergeOptions()).decision == "nothing_to_merge"


@pytest.mark.parametrize("options", [{"apply": True, "dry_run": True}, {"budget": timedelta(0)}])
def test_what_contradicts_itself_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsageError):
        MaintainOptions(**options)


def test_a_step_exits_as_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletions that failed beside a region that cannot be read: the command says 27, and so does the step."""
    table = made(tmp_path)

    def failing(*_: object) -> gc.GcReport:
        return gc.GcReport(applied=True, limit=0, failed={"path": "why"}, faults={uuid.UUID(int=1): "gap"})

    monkeypatch.setattr(gc, "apply", failing)
    report = run(table.uri, now(apply=True))
    assert report.steps[-1].exit_code == report.exit_code == DeletesFailedError.exit_code
