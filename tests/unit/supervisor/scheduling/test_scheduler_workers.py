"""What becomes of workers that hang, die, grow, or report what they should not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.fakes import Stage
from tests.unit.supervisor.conftest import TABLES


def test_a_hung_job_is_ended_and_then_killed(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    worker, request = stage.request("a")
    for _ in range(5):
        stage.turn(1700)
        stage.scheduler.on_message(worker, {"type": "progress", "id": request.id})  # type: ignore[arg-type]
        stage.turn()
    assert worker.signals == [], "it says that it lives"
    worker.cpu = 50.0
    stage.turn(1700)
    worker.cpu = 90.0
    stage.turn(1700)
    assert worker.signals == [], "it works"
    stage.turn(1801)
    assert worker.signals == [signal.SIGTERM]
    stage.turn(6)
    assert worker.signals[-1] is signal.SIGKILL
    stage.die("a")
    (run,) = stage.history.runs()
    assert (run["outcome"], run["error"]["reason"], run["exit_code"]) == ("hung", "job_hung", 54)
    assert stage.job("a")["consecutive_failures"] == 1
    assert stage.leases.released == [("a", "merge", "hung")]


def test_a_timeout_ends_what_is_alive(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {timeout: 1h}}}\n" + TABLES)
    stage.due("a")
    stage.turn()
    worker, request = stage.request("a")
    for _ in range(7):
        stage.turn(600)
        stage.scheduler.on_message(worker, {"type": "progress", "id": request.id})  # type: ignore[arg-type]
    assert worker.signals == [signal.SIGTERM]
    stage.answer("a", outcome="stopped", decision="stopped")
    (run,) = stage.history.runs()
    assert run["outcome"] == "hung"
    assert "ran longer than 1:00:00" in run["error"]["message"]


def test_too_much_memory(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "pools: {merge: {memory: 1GiB}}\n" + TABLES)
    stage.due("a")
    stage.turn()
    worker, _ = stage.request("a")
    worker.memory = 2**30
    stage.turn(1)
    assert worker.signals == []
    worker.memory = 2**30 + 1
    stage.turn(1)
    assert worker.signals == [signal.SIGKILL]
    stage.die("a")
    (run,) = stage.history.runs()
    assert (run["outcome"], run["exit_code"]) == ("died", 53)
    assert "exceeded its memory limit" in run["error"]["message"]


def test_a_worker_that_dies_takes_nothing_along(stage: Stage) -> None:
    stage.due("a")
    stage.due("b")
    stage.turn()
    stage.die("a")
    (run,) = stage.history.runs(failed=True)
    assert run["error"]["message"].endswith("exited: killed by SIGKILL.")
    assert stage.in_flight == [("b", "merge")]
    stage.turn(61)
    stage.answer("b")
    assert stage.in_flight == [("a", "merge")], "again after a minute"


def test_a_poll_that_fails_is_reported(stage: Stage) -> None:
    stage.see("a", generations=1)
    stage.scheduler.poll("a")
    stage.turn()
    worker, _ = stage.pools.given[-1]
    worker.exit_status = 7
    stage.scheduler.on_message(worker, None)  # type: ignore[arg-type]
    stage.turn()
    assert "exit code 7" in str(stage.scheduler.tables["a"].error)
    assert stage.scheduler.tables["a"].figures == {"generations": 1}
    stage.see("a", generations=2)
    assert stage.scheduler.tables["a"].error is None


def test_after_failed_polls_the_next_one_waits_longer_each_time(stage: Stage) -> None:
    """A store that was away for a moment is read again soon; one that hangs takes a tenth of the worker's time."""

    state = stage.scheduler.tables["a"]

    def factor_after(seconds: float) -> float:
        """Fail the poll in flight, and return how many times its duration passes until the next one."""
        began = state.poll_began
        worker, _ = stage.pools.given[-1]
        stage.turn(seconds)
        worker.exit_status = 7
        stage.scheduler.on_message(worker, None)  # type: ignore[arg-type]
        stage.turn(0)
        failed, given = stage.clock.monotonic(), len(stage.pools.given)
        for _ in range(10_000):
            stage.scheduler.poll("a")
            stage.turn(0.1)
            if len(stage.pools.given) > given:
                break
        return (state.poll_began - failed) / (failed - began)

    stage.scheduler.poll("a")
    stage.turn()
    factors = [factor_after(20) for _ in range(6)]
    assert factors == pytest.approx([1, 2, 4, 8, 10, 10], rel=0.1)
    assert factor_after(290) == pytest.approx(1, rel=0.1), "five minutes are enough"
    stage.see("a", generations=1)
    stage.scheduler.poll("a")
    stage.turn()
    assert factor_after(20) == pytest.approx(1, rel=0.1), "it was read in between"


def test_a_poll_that_hangs_is_ended(stage: Stage) -> None:
    stage.scheduler.poll("a")
    stage.turn()
    worker, _ = stage.pools.given[-1]
    stage.turn(299)
    assert worker.signals == []
    stage.turn(2)
    assert worker.signals[0] is signal.SIGKILL
    worker.exit_status = -9
    stage.scheduler.on_message(worker, None)  # type: ignore[arg-type]
    stage.see("b", generations=1)
    assert stage.scheduler.tables["b"].figures == {"generations": 1}
    assert "SIGKILL" in str(stage.scheduler.tables["a"].error)


def test_stopping_lets_the_running_step_finish(stage: Stage) -> None:
    stage.due("a")
    stage.due("b")
    stage.turn()
    worker, request = stage.request("a")
    stage.scheduler.stop()
    stage.turn()
    assert worker.sent[-1] == {"do": "stop", "id": request.id}
    assert worker.signals == []
    stage.answer("a", outcome="stopped", decision="stopped", versions=(7,))
    stage.turn(10)
    assert stage.in_flight == [], "nothing more begins"
    assert stage.scheduler.in_flight == 0
    (run,) = stage.history.runs()
    assert (run["outcome"], run["versions"]) == ("stopped", [7])
    assert stage.leases.released == [("a", "merge", None)]


def test_what_is_still_running_at_the_end_is_recorded(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    stage.scheduler.stop()
    stage.scheduler.abandon()
    assert stage.outcomes() == ["stopped"]
    assert stage.leases.released == [("a", "merge", None)]


def test_a_bug_of_ours_ends_nothing(stage: Stage) -> None:
    stage.scheduler.post(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    stage.due("a")
    stage.turn()
    assert stage.in_flight == [("a", "merge")]
    assert stage.metrics.registry.get_sample_value("memwal_ops_internal_errors_total") == 1


def test_a_full_disk_of_ours_stops_no_table(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.history.close()
    monkeypatch.setattr(stage.history, "ended_since", lambda *_: [])

    class Closed:
        def execute(self, *_: object) -> None:
            import sqlite3

            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(stage.history, "_connection", Closed())
    stage.due("a")
    stage.turn()
    assert stage.in_flight == [("a", "merge")]
    stage.answer("a")
    assert stage.job("a")["last_outcome"] == "succeeded"


def test_what_a_worker_opened_last_is_in_the_error_if_a_signal_ended_it(stage: Stage) -> None:
    stage.see("a", generations=9)
    (entry,) = stage.scheduler.runs.values()
    assert entry.run is not None
    message = {"type": "opened", "id": entry.run.worker.request, "what": "read index t/_indices/1/page_data.lance"}
    stage.scheduler.on_message(entry.run.worker, message)
    stage.die("a")
    (run,) = stage.history.runs(failed=True)
    assert run["error"]["message"].endswith(
        "exited: killed by SIGKILL. The last that it began: read index t/_indices/1/page_data.lance."
    )
