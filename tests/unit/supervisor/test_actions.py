"""What an operator may ask of a running service: run, retry, cancel, pause, resume."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.errors import HistoryError
from memwal_ops.supervisor.actions import ActionConflictError, Actions, UnknownTargetError, end_of_pause
from memwal_ops.supervisor.observe.status import status_of
from memwal_ops.supervisor.state.pauses import Pauses
from tests.support.fakes import START, Stage
from tests.unit.supervisor.conftest import PLAIN

CLOSED = PLAIN.replace("merge: {", 'merge: {windows: ["Sun 01:00-02:00"], budget: {time: 1s, per: 1d}, ')


def act(stage: Stage, do: Callable[[Actions], Any]) -> Any:
    """Ask on a thread, while the loop turns."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(do, Actions(stage.scheduler, lambda table: "m2" if table == "theirs" else ""))
        while not asked.done():
            stage.scheduler.step(0.01)
    stage.turn()
    return asked.result()


def run(stage: Stage, table: str = "a", job: str = "merge") -> Any:
    return act(stage, lambda actions: actions.run(table, job, "anna"))


def test_a_run_that_is_asked_for_begins_whatever_its_window_and_budget(tmp_path: Path) -> None:
    stage = Stage(tmp_path, CLOSED)
    stage.due("a")
    stage.turn()
    assert stage.job("a")["waiting_for"] == "window"
    assert run(stage) == {"table": "a", "job": "merge", "state": "queued"}
    assert stage.in_flight == [("a", "merge")]
    stage.answer("a")
    [done] = stage.history.runs()
    assert (done["why"], done["plan"]["asked_by"]) == ("request", "anna")
    stage.due("a")
    stage.turn()
    assert stage.job("a")["waiting_for"] == "window", "only that run went first"


def test_it_goes_before_what_has_waited_longer(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    stage.due("b")
    stage.turn(60)
    run(stage, "c")
    stage.answer("a")
    assert stage.in_flight == [("c", "merge")]


def test_what_runs_or_is_not_there_cannot_be_run(stage: Stage) -> None:
    run(stage)
    with pytest.raises(ActionConflictError, match="running already"):
        run(stage)
    with pytest.raises(UnknownTargetError, match="no table 'x'"):
        run(stage, "x")
    with pytest.raises(UnknownTargetError, match="'theirs' is that of the member 'm2' of the fleet"):
        run(stage, "theirs")
    with pytest.raises(UnknownTargetError, match=r"no job .x.; its jobs: .*merge"):
        run(stage, "a", "x")


def test_a_request_ends_a_backoff_and_so_does_a_retry(stage: Stage) -> None:
    for table in ("a", "b"):
        stage.due(table)
        stage.turn()
        stage.answer(table, outcome="failed", exit_code=1)
        assert stage.job(table)["waiting_for"] == "backoff"
    with pytest.raises(ActionConflictError, match="Nothing here waits"):
        act(stage, lambda actions: actions.retry("c", None, "anna"))
    act(stage, lambda actions: actions.pause("b", None, "ben", until=None, reason=""))
    with pytest.raises(ActionConflictError, match="It is paused: resume it first"):
        act(stage, lambda actions: actions.retry("b", None, "anna"))
    act(stage, lambda actions: actions.resume("b", None))
    asked = act(stage, lambda actions: actions.retry(None, None, "anna"))
    assert asked == {"retried": [{"table": name, "job": "merge"} for name in ("a", "b")]}
    assert stage.in_flight == [("a", "merge")]
    stage.answer("a", outcome="failed", exit_code=1)
    assert stage.in_flight == [("b", "merge")]
    stage.answer("b", outcome="failed", exit_code=1)
    run(stage, "a")
    assert stage.in_flight == [("a", "merge")]
    assert stage.job("b")["waiting_for"] == "backoff"


def test_a_cancelled_run_stops_after_its_step_and_is_neither_a_failure_nor_due_again(stage: Stage) -> None:
    with pytest.raises(ActionConflictError, match="no run to cancel: it is idle"):
        act(stage, lambda actions: actions.cancel("a", "merge", "anna"))
    run(stage)
    asked = act(stage, lambda actions: actions.cancel("a", "merge", "ben"))
    assert not asked["at_once"]
    worker, request = stage.request("a")
    assert {"do": "stop", "id": request.id} in worker.sent
    assert not worker.signals
    stage.answer("a", outcome="stopped")
    [done] = stage.history.runs()
    assert (done["outcome"], done["error"]["reason"]) == ("cancelled", "cancelled")
    assert done["error"]["message"].startswith("ben cancelled")
    assert (stage.job("a")["state"], stage.job("a")["consecutive_failures"]) == ("idle", 0)
    again = Stage(stage.folder, PLAIN, seconds=60)
    assert again.job("a")["state"] == "idle", "nor at the next start of the service"


@pytest.mark.parametrize("by_time", [True, False])
def test_a_cancelled_run_that_does_not_stop_is_ended(stage: Stage, by_time: bool) -> None:
    run(stage)
    act(stage, lambda actions: actions.cancel("a", "merge", "ben"))
    stage.turn(30)
    worker, _ = stage.request("a")
    assert not worker.signals
    if by_time:
        stage.turn(31)
    else:
        assert act(stage, lambda actions: actions.cancel("a", "merge", "ben"))["at_once"]
    assert [one.name for one in worker.signals] == ["SIGTERM"]
    stage.turn(6)
    assert [one.name for one in worker.signals] == ["SIGTERM", "SIGKILL"]
    stage.die("a")
    assert stage.outcomes() == ["cancelled"]


@pytest.mark.parametrize("scope", [(None, None), ("a", None), ("a", "merge")])
def test_what_is_paused_waits_until_it_is_resumed(stage: Stage, scope: tuple[str | None, str | None]) -> None:
    asked = act(stage, lambda actions: actions.pause(*scope, "anna", until=None, reason="a move"))
    assert asked["paused"] == {"until": None, "reason": "a move", "by": "anna", "since": START.isoformat()}
    for table in ("a", "b"):
        stage.due(table)
    stage.turn(3600)
    assert stage.job("a")["waiting_for"] == "paused"
    assert bool(stage.in_flight) == (scope[0] is not None), "the others go on"
    with pytest.raises(ActionConflictError, match="paused by anna: resume it first"):
        run(stage)
    act(stage, lambda actions: actions.resume(*scope))
    stage.turn()
    assert stage.job("a")["waiting_for"] != "paused"
    with pytest.raises(ActionConflictError, match="not paused"):
        act(stage, lambda actions: actions.resume(*scope))


def test_a_pause_ends_by_itself(stage: Stage) -> None:
    act(stage, lambda actions: actions.pause("a", None, "anna", until=START + timedelta(hours=1), reason=""))
    stage.due("a")
    stage.turn(3599)
    assert not stage.in_flight
    assert next(status_of(stage.scheduler)[0])["paused"] is not None
    stage.turn(1)
    assert stage.in_flight == [("a", "merge")]
    assert next(status_of(stage.scheduler)[0])["paused"] is None


def test_pauses_survive_a_restart_and_a_damaged_file_starts_nothing(stage: Stage) -> None:
    folder = str(stage.folder)
    stage.scheduler.pauses = Pauses(folder)
    act(stage, lambda actions: actions.pause("a", "merge", "anna", until=None, reason="a move"))
    again = Pauses(folder)
    assert again.covering("a", "merge", START) == stage.scheduler.pauses.covering("a", "merge", START) is not None
    assert again.covering("a", "gc", START) is None
    Path(folder, "pauses.json").write_text("[{")
    with pytest.raises(HistoryError, match=r"pauses\.json cannot be read") as refused:
        Pauses(folder)
    assert "remove it to resume" in refused.value.remedy


def test_a_pause_that_would_not_survive_is_refused(stage: Stage, tmp_path: Path) -> None:
    stage.scheduler.pauses = Pauses(str(tmp_path / "none"))
    with pytest.raises(HistoryError, match="cannot be written"):
        act(stage, lambda actions: actions.pause("a", None, "anna", until=None, reason=""))
    assert next(status_of(stage.scheduler)[0])["paused"] is None


def test_when_a_pause_ends() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert end_of_pause(None, None, now) is None
    assert end_of_pause(None, "2h", now) == now + timedelta(hours=2)
    assert end_of_pause("2026-01-01T03:00:00+01:00", None, now) == now + timedelta(hours=2)
    for until, span in (
        ("2025-01-01", None),
        ("soon", None),
        (None, "0s"),
        (None, "9"),
        ("2026-01-02", "2h"),
        ("9999-12-31T23:59:59-23:00", None),
    ):
        with pytest.raises(ValueError, match=r".+\."):
            end_of_pause(until, span, now)
