"""Jobs of other packages that report nonsense: it is their package's fault, and stops no other table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops import open_table
from memwal_ops.core.figures import checked_figures, poll_table
from memwal_ops.core.job import JobSpec, MetricSpec
from memwal_ops.core.options import Options
from memwal_ops.core.registry import clear_caches, job_specs, package_of
from memwal_ops.core.run import amounts, checked_report, unexpected_error, whole_numbers
from memwal_ops.errors import JobPluginError
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import START, Stage, vars_of
from tests.support.plugin_packages import install
from tests.support.tables.workload import Workload
from tests.system.supervisor.conftest import TABLES


@dataclass(frozen=True)
class OddReport:
    decision: Any = "fine"
    told: Any = field(default_factory=dict)
    exit_code: Any = 0

    def describe(self) -> str:
        return str(self.decision)

    def to_json(self) -> Any:
        return self.told


class Odd(JobSpec):
    """A job whose code is here."""

    figures: Any = None

    @property
    def job(self) -> Any:
        return SimpleNamespace(backlog=lambda _: self.figures)


def job(figures: Any = None) -> JobSpec:
    odd = Odd(name="odd", summary="", options=Options, load="", metrics={"depth": MetricSpec("count", "")})
    object.__setattr__(odd, "figures", figures)
    return odd


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"depth": "deep"}, "'deep' for depth, not a number"),
        ({"depth": None}, "None for depth"),
        ({"depth": float("nan")}, "nan for depth"),
        ({"generations": 3}, "'generations', which it does not declare"),
        ([3], "not a mapping"),
    ],
)
def test_a_poll_that_returns_no_numbers_is_its_packages_fault(table: Workload, figures: Any, says: str) -> None:
    odd = job(figures)
    with pytest.raises(JobPluginError, match=says):
        checked_figures(odd, figures)
    found, faults = poll_table(open_table(table.uri), [odd, job_specs("lance")["merge"]])
    assert [one.reason for one in faults] == ["job_plugin"]
    assert found["generations"] == 3, "and hides no figure of another job"


def test_whose_bug_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in install(["moody"], tmp_path)["PYTHONPATH"].split(":")[:2]:
        monkeypatch.syspath_prepend(path)
    clear_caches()
    specs = job_specs("lance")
    assert package_of(specs["merge"]) is None
    assert unexpected_error(ValueError("oh"), specs["merge"]).exit_code == 1
    theirs = unexpected_error(ValueError("oh"), specs["moody"])
    clear_caches()
    assert (theirs.reason, str(theirs)) == (
        "job_plugin",
        f"The job 'moody' of {package_of(specs['moody'])} raised ValueError: oh",
    )
    assert "memwal-moody" in str(theirs)


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (OddReport(decision=None), 0),
        (OddReport(told=[1]), 0),
        (OddReport(), "bad"),
        (OddReport(), 300),
        (OddReport(), -1),
        (OddReport(), True),
    ],
)
def test_a_report_that_is_none_is_refused(report: OddReport, code: Any) -> None:
    with pytest.raises(JobPluginError, match="violates the job interface"):
        checked_report(job(), replace(report, exit_code=code))


def test_what_is_recorded_of_a_run_is_json_and_numbers() -> None:
    told = checked_report(job(), OddReport(told={"share": float("nan"), "when": START}))
    assert told == (0, "fine", {"share": None, "when": str(START)})
    odd = {"bytes_merged": "many", "conflicts": -3, "rows_merged": float("inf"), "good": 2}
    assert amounts(odd) == {"good": 2}
    assert whole_numbers([1, "2", None, True]) == (1,)


def test_figures_of_a_partly_failed_poll_are_used(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {when: generations >= 2}}}\n" + TABLES)
    stage.scheduler.poll("a")
    stage.turn()
    worker, request = next(one for one in reversed(stage.pools.given) if isinstance(one[1], PollRequest))
    half = Result(request.id, "failed", exit_code=51, message="odd gave None", figures={"generations": 2}, version=3)
    stage.scheduler.on_message(worker, vars_of(half))  # type: ignore[arg-type]
    stage.turn()
    assert stage.in_flight == [("a", "merge")]
    assert stage.scheduler.tables["a"].error == "odd gave None"


def test_a_store_that_does_not_answer_leaves_the_watcher_to_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, TABLES)

    def failing(seconds: float) -> None:
        stage.scheduler.poll("a")
        stage.turn()
        worker, request = stage.pools.given[-1]
        stage.clock.seconds += seconds
        answer = Result(request.id, "failed", exit_code=24, message="no answer")
        stage.scheduler.on_message(worker, vars_of(answer))  # type: ignore[arg-type]
        stage.turn()

    def looks_at_a() -> int:
        return sum(isinstance(one, PollRequest) and one.uri == "/a" for _, one in stage.pools.given)

    failing(0.1)
    stage.turn(5)
    failing(60)
    assert looks_at_a() == 2, "one that fails at once is asked again as ever"
    stage.scheduler.poll("a")
    stage.turn(200)
    assert looks_at_a() == 2
    stage.turn(101)
    stage.scheduler.poll("a")
    stage.turn()
    assert looks_at_a() == 3
