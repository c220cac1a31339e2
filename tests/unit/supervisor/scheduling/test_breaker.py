"""A circuit breaker: what keeps failing, or achieves nothing time and again, is stopped, is seen, and tries again."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from memwal_ops.supervisor.actions import ActionConflictError, Actions
from memwal_ops.supervisor.observe.findings import job_findings
from tests.support.fakes import Stage
from tests.unit.supervisor.conftest import PLAIN

FOR_LONG = timedelta(hours=6).total_seconds()


def fruitless(stage: Stage, times: int, number: int = 0) -> None:
    """Runs by trigger that achieve nothing, each of another backlog."""
    for time in range(times):
        stage.see("a", generations=9.0, rows=number + time + 1.0)
        assert stage.in_flight == [("a", "merge")], stage.job("a")
        stage.answer("a")
        stage.clock.seconds += 60


def test_what_achieves_nothing_is_stopped_and_tries_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN)
    fruitless(stage, 4)
    assert stage.job("a")["breaker"] is None
    fruitless(stage, 1, 50)
    breaker = stage.job("a")["breaker"]
    assert (breaker["reason"], breaker["runs"]) == ("saves_nothing", 5)
    ((_, text),) = job_findings("merge", stage.job("a"))
    assert text.startswith("the last 5 runs of merge by trigger achieved nothing: its triggers are ignored until ")
    stage.see("a", generations=9.0, rows=100.0)
    assert stage.in_flight == [], "its trigger is ignored"
    again = Stage(tmp_path, PLAIN, seconds=stage.clock.seconds + 60)
    assert again.job("a")["breaker"] == breaker, "over a restart, too"
    again.due("a")
    again.turn()
    again.answer("a")
    assert again.job("a")["breaker"] == breaker, "its schedule goes on, and finds nothing"
    again.clock.seconds += FOR_LONG
    fruitless(again, 1, 200)
    assert again.job("a")["breaker"]["runs"] == 6, "one run tried again"
    again.due("a")
    again.turn()
    again.answer("a", achieved={"rows_merged": 3})
    assert again.job("a")["breaker"] is None, "a run achieved something"


def test_a_retry_closes_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    fruitless(stage, 5)
    monkeypatch.setattr(stage.scheduler, "ask", lambda question: question())
    assert Actions(stage.scheduler).retry("a", "merge", "anna") == {"retried": [{"table": "a", "job": "merge"}]}
    assert stage.job("a")["breaker"] is None
    stage.turn()
    with pytest.raises(ActionConflictError, match="no circuit breaker is open"):
        Actions(stage.scheduler).retry("a", "merge", "anna")
    fruitless(stage, 1, 70)


def test_what_is_not_measured_or_only_plans_is_not_stopped(tmp_path: Path) -> None:
    text = PLAIN.replace("{schedule: 10m, when", "{schedule: 10m, apply: false, when")
    stage = Stage(tmp_path, text)
    fruitless(stage, 7)
    assert stage.job("a")["breaker"] is None


def test_what_keeps_failing_waits_for_its_breaker(stage: Stage) -> None:
    stage.due("a")
    for _ in range(10):
        stage.turn(8 * 3600)
        stage.answer("a", outcome="failed", exit_code=24)
    stage.turn()
    assert stage.job("a")["waiting_for"] == "breaker"
    breaker = stage.job("a")["breaker"]
    assert (breaker["reason"], breaker["runs"]) == ("failures", 10)
