"""What failed or was interrupted is not forgotten: after a restart, a reload, or a success of another process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.core.leases import BY_HAND, LastRun
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import US, Stage, vars_of
from tests.unit.supervisor.conftest import PLAIN

LONG = "defaults: {jobs: {compact: {schedule: 6h}, merge: {schedule: 6h}, gc: {apply: true}}}\ntables: [{uri: /a}]\n"


def restarted(stage: Stage, text: str = LONG, **options: Any) -> Stage:
    """The next service on the same state folder, after that one was killed."""
    stage.history.close()
    again = Stage(stage.folder, text, seconds=stage.clock.seconds + 1, **options)
    again.history.mark_killed(again.clock.now())
    again.scheduler.set_tables([])
    again.scheduler.set_tables(again.tables(again.settings))
    again.turn()
    return again


def fail(stage: Stage, times: int, job: str = "merge") -> None:
    for _ in range(times):
        stage.due("a", job)
        stage.turn(1000)
        stage.answer("a", job, outcome="failed", exit_code=24, message="Old.", reason="store_unavailable")


@pytest.mark.parametrize("once", [False, True])
def test_a_killed_retry_is_due_at_once(tmp_path: Path, once: bool) -> None:
    """A worker is killed, then the service while it tries again: the last run that ended is minutes old, not hours."""
    stage = Stage(tmp_path, LONG)
    stage.due("a", "compact")
    stage.turn()
    stage.die("a", "compact")
    stage.turn(61)
    assert stage.in_flight == [("a", "compact")]
    again = restarted(stage, once=once)
    assert ("a", "compact") in again.in_flight
    assert again.job("a", "compact")["why"] == "retry"
    again.answer("a", "compact")
    assert again.job("a", "compact")["consecutive_failures"] == 0


def test_a_failed_job_is_tried_again_after_a_restart(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LONG)
    fail(stage, 1)
    again = restarted(stage)
    assert again.in_flight == []
    assert again.job("a")["waiting_for"] == "backoff"
    assert again.job("a")["backoff_seconds"] <= 60
    again.turn(60)
    assert again.in_flight == [("a", "merge")]


@pytest.mark.parametrize("outcome", ["stopped", "killed"])
def test_an_interrupted_run_is_due_at_the_next_start(tmp_path: Path, outcome: str) -> None:
    """It ran by its trigger, and its schedule is hours away."""
    stage = Stage(tmp_path, LONG)
    stage.due("a")
    stage.turn()
    stage.answer("a")
    stage.due("a", why="when: generations >= 8")
    stage.turn(1)
    if outcome == "stopped":
        stage.scheduler.stop()
        stage.answer("a", outcome="stopped")
    again = restarted(stage)
    assert again.outcomes()[1] == outcome
    assert again.in_flight == [("a", "merge")]


def test_another_table_of_the_name_begins_anew(tmp_path: Path) -> None:
    """A wrong URI is corrected: no failure, error or schedule of the wrong one counts."""
    wrong = LONG.replace("{uri: /a}", "{uri: /wrong/a, name: a}")
    stage = Stage(tmp_path, wrong)
    timers = Timers(stage.scheduler, timedelta(hours=1))
    timers.sync()
    stage.turn()
    for _ in range(2):
        for job in ("merge", "compact", "gc"):
            entry = stage.scheduler.tables["a"].entries[job]
            stage.scheduler._ends.not_started(entry, None)
    stage.turn(1)
    right = stage.load(LONG)
    stage.scheduler.set_settings(right)
    stage.scheduler.set_tables(stage.tables(right))
    timers.sync()
    worker, poll = next((worker, given) for worker, given in stage.pools.given if isinstance(given, PollRequest))
    stage.scheduler.on_message(worker, vars_of(Result(poll.id, "failed", exit_code=2)))  # type: ignore[arg-type]  # of the stage
    stage.see("a")
    states = {job: stage.job("a", job) for job in ("merge", "compact", "gc")}
    assert {state["consecutive_failures"] for state in states.values()} == {0}
    assert {state["state"] for state in states.values()} <= {"running", "queued"}
    assert {state["last_outcome"] for state in states.values()} == {None}


def test_other_credentials_are_tried_at_once(stage: Stage) -> None:
    fail(stage, 3)
    stage.turn(1)
    assert stage.in_flight == []
    changed = stage.load(PLAIN.replace("{uri: /a}", "{uri: /a, storage_options: {region: eu}}"))
    stage.scheduler.set_settings(changed)
    stage.scheduler.set_tables(stage.tables(changed))
    stage.turn()
    assert stage.in_flight == [("a", "merge")]


def recorded(stage: Stage, ago: float, outcome: str = "succeeded", instance: str = BY_HAND) -> dict[str, Any]:
    finished = (stage.clock.now() - timedelta(seconds=ago)).isoformat()
    return {"merge": {"outcome": outcome, "instance": instance, "finished": finished}}


def test_a_run_by_hand_ends_the_backoff(stage: Stage) -> None:
    fail(stage, 3)
    stage.turn(100)
    for last in (
        recorded(stage, 1, "failed"),
        recorded(stage, 1, instance=US.instance),
        recorded(stage, 5000),
    ):
        stage.see("a", last)
        assert stage.in_flight == []
        assert stage.job("a")["consecutive_failures"] == 3
    _, request = next(given for given in reversed(stage.pools.given) if isinstance(given[1], PollRequest))
    assert request.failing == ("merge",)
    stage.see("a", recorded(stage, 1))
    assert stage.job("a")["consecutive_failures"] == 0
    assert stage.in_flight == [("a", "merge")], "it may have run with other options"
    stage.answer("a", outcome="failed", exit_code=24)
    assert stage.job("a")["consecutive_failures"] == 1, "it fails here, all the same"


def test_a_success_of_another_supervisor_ends_the_backoff(stage: Stage) -> None:
    fail(stage, 3)
    stage.turn(100)
    last = recorded(stage, 1, instance="them")
    stage.leases.last["a", "merge"] = LastRun("succeeded", stage.clock.now() - timedelta(seconds=1), "them")
    stage.see("a", last)
    assert stage.in_flight == [], "it is done"
    assert (stage.job("a")["consecutive_failures"], stage.job("a")["state"]) == (0, "idle")
    stage.leases.last["a", "merge"] = LastRun("succeeded", stage.clock.now(), BY_HAND)
    stage.due("a")
    stage.turn(1)
    assert stage.in_flight == [("a", "merge")], "a run by hand is not what the schedule asks for"


def test_a_failing_table_is_polled_at_each_poll(stage: Stage) -> None:
    for _ in range(15):
        stage.see("a", generations=0)
    assert stage.scheduler._polling.skips("a")
    fail(stage, 1)
    assert not stage.scheduler._polling.skips("a")
