"""Which run takes a lease, renews it, loses it, and learns from the last one what is done."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import pytest
import structlog

from memwal_ops.core.leases import LastRun
from memwal_ops.errors import LeaseLostError, MemwalOpsError, StoreUnavailableError
from memwal_ops.storage.api import DiskFullError
from memwal_ops.supervisor.state.pauses import Pause
from tests.support.fakes import START, THEM, Stage
from tests.unit.supervisor.conftest import PLAIN, TABLES


def test_leases_are_renewed_at_a_third(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    token = stage.leases.lease("merge", THEM).token - 1
    stage.turn(99)
    assert stage.leases.renewals == []
    stage.turn(2)
    assert [lease.token for lease in stage.leases.renewals] == [token]
    stage.turn(101)
    assert len(stage.leases.renewals) == 2
    assert stage.job("a")["lease"]["state"] == "held"
    stage.answer("a")
    assert stage.job("a")["lease"]["state"] == "free"
    assert stage.leases.released == [("a", "merge", "succeeded")]


def test_a_full_disk_keeps_no_job_from_freeing_it(tmp_path: Path) -> None:
    """Its lease needs space; others wait, and say why."""
    with structlog.testing.capture_logs() as logs:
        stage = Stage(tmp_path, PLAIN)
        stage.leases.refusal = DiskFullError("No space left on device.")
        for job in ("merge", "gc"):
            stage.scheduler.enqueue("a", job, "schedule")
        stage.turn()
    assert sorted(stage.outcomes()) == ["failed", "running"]
    _, request = stage.request("a", "gc")
    assert (request.job, request.lease, request.apply) == ("gc", None, True)
    page = {"reason": "disk_full", "exit_code": 20, "runbook": "runbooks/disk-full.md"}
    by_event = {event["event"]: event for event in logs}
    assert by_event["run_not_started"].items() >= {"job": "merge", **page}.items()
    assert by_event["lease_not_taken"].items() >= page.items()


def test_a_lease_that_is_lost_ends_the_run(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    worker, _ = stage.request("a")
    stage.leases.refusal = LeaseLostError("held by them")
    stage.turn(101)
    assert worker.signals == [signal.SIGTERM]
    stage.answer("a", outcome="stopped")
    (run,) = stage.history.runs()
    assert (run["outcome"], run["exit_code"]) == ("lost", 52)
    assert stage.leases.released == [], "it is not ours to give back"
    assert stage.job("a")["consecutive_failures"] == 0


def test_a_store_that_is_away_loses_no_lease_before_its_time(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    worker, _ = stage.request("a")
    stage.leases.refusal = StoreUnavailableError("no answer")
    for _ in range(28):
        stage.turn(10)
    assert worker.signals == []
    stage.leases.refusal = None
    stage.turn(10)
    stage.leases.refusal = StoreUnavailableError("no answer")
    for _ in range(28):
        stage.turn(10)
    assert worker.signals == []
    for _ in range(10):
        stage.turn(10)
    assert worker.signals == [signal.SIGTERM, signal.SIGKILL], "another may have it by now"


@pytest.mark.parametrize("refusal", [None, DiskFullError("full")])
def test_what_is_paused_while_its_lease_is_requested_does_not_begin(
    refusal: MemwalOpsError | None, tmp_path: Path
) -> None:
    """Whoever paused it was told that nothing runs, and relies on it."""
    stage = Stage(tmp_path, PLAIN)
    stage.leases.refusal = refusal
    stage.due("a", "gc")
    stage.scheduler._dispatch()
    assert stage.job("a", "gc")["state"] == "leasing"
    stage.scheduler.pauses.set(("a",), Pause(None, "a move", "anna", START))
    stage.scheduler.touch()
    stage.turn()
    assert (stage.in_flight, stage.job("a", "gc")["waiting_for"]) == ([], "paused")
    assert stage.leases.released == ([] if refusal else [("a", "gc", None)])
    stage.scheduler.pauses.remove([("a",)])
    stage.scheduler.touch()
    stage.turn(1)
    assert stage.in_flight == [("a", "gc")]


def test_a_lease_that_cannot_be_asked_for_is_a_failure(stage: Stage) -> None:
    stage.leases.refusal = StoreUnavailableError("no answer")
    stage.due("a")
    stage.turn()
    (run,) = stage.history.runs()
    assert (run["outcome"], run["exit_code"], run["error"]["reason"]) == ("failed", 24, "store_unavailable")
    assert stage.job("a")["consecutive_failures"] == 1
    assert stage.scheduler.in_flight == 0


def test_who_is_kept_away_asks_again_until_the_lease_ends(stage: Stage) -> None:
    stage.leases.held["a", "merge"] = stage.leases.lease("merge", THEM)
    stage.due("a")
    stage.turn()
    assert stage.in_flight == []
    for _ in range(4):
        stage.turn(65)
    status = stage.job("a")
    assert (status["waiting_for"], status["lease"]["state"]) == ("lease", "elsewhere")
    assert status["lease"]["holder"]["name"] == "them@there"
    assert status["lease"]["elsewhere_seconds"] == 260
    del stage.leases.held["a", "merge"]
    stage.turn(65)
    assert stage.in_flight == [("a", "merge")], "within one time to live of its end"
    assert stage.outcomes() == ["running"], "being kept away is no run"


def test_what_another_supervisor_has_just_done_is_not_done_again(stage: Stage) -> None:
    stage.turn(1000)
    stage.leases.last["a", "merge"] = LastRun("succeeded", START + timedelta(seconds=700), "them")
    stage.due("a")
    stage.turn()
    assert stage.in_flight == []
    assert stage.job("a")["last_outcome"] == "succeeded"
    assert stage.job("a")["seconds_since_success"] == 300
    stage.turn(600)
    stage.due("a")
    stage.turn()
    assert stage.in_flight == [("a", "merge")], "it has stopped doing it"


@pytest.mark.parametrize(
    "last",
    [
        LastRun("succeeded", START + timedelta(seconds=900), "us"),
        LastRun("failed", START + timedelta(seconds=900), "them"),
        LastRun("succeeded", START + timedelta(seconds=300), "them"),
    ],
)
def test_undone_work_is_done(stage: Stage, last: LastRun) -> None:
    stage.turn(1000)
    stage.leases.last["a", "merge"] = last
    stage.due("a")
    stage.turn()
    assert stage.in_flight == [("a", "merge")]


def taken_over(tmp_path: Path) -> Stage:
    """Tables that this member of a fleet has just got; it has never run their jobs, and `merge` is due by schedule."""
    stage = Stage(tmp_path, f"fleet: {{uri: {tmp_path}, name: us}}\n{PLAIN}")
    stage.turn(1000)
    stage.scheduler.on_schedule("a", "merge")
    stage.turn()
    assert stage.in_flight == [], "the poll reads the lease first"
    return stage


def by_lease(last: LastRun) -> dict[str, dict[str, str]]:
    return {"merge": last.to_json()}


def test_a_table_that_is_taken_over_keeps_its_schedule(tmp_path: Path) -> None:
    stage = taken_over(tmp_path)
    stage.see("a", recorded=by_lease(LastRun("succeeded", START + timedelta(seconds=700), "them")))
    assert stage.in_flight == []
    assert stage.leases.released == [], "no lease was taken"
    assert (stage.job("a")["last_outcome"], stage.job("a")["seconds_since_success"]) == ("succeeded", 300)
    stage.turn(600)
    stage.scheduler.on_schedule("a", "merge")
    stage.turn()
    assert stage.in_flight == [("a", "merge")]


@pytest.mark.parametrize(
    "last",
    [
        None,
        LastRun("failed", START + timedelta(seconds=900), "them"),
        LastRun("succeeded", START + timedelta(seconds=300), "them"),
    ],
)
def test_a_table_that_is_taken_over_is_maintained(tmp_path: Path, last: LastRun | None) -> None:
    stage = taken_over(tmp_path)
    stage.see("a", recorded=None if last is None else by_lease(last))
    assert stage.in_flight == [("a", "merge")]


VERIFIED = "defaults: {jobs: {merge: {enabled: false}, verify: {enabled: true, schedule: 7d}}}\n" + TABLES


@pytest.mark.parametrize("verified", [False, True])
def test_damage_that_another_member_found_is_looked_for_again(tmp_path: Path, verified: bool) -> None:
    """What is wrong stands in that one's history: by an older run of its own, or none, this one called it healthy."""
    text = f"fleet: {{uri: {tmp_path}, name: us}}\n{VERIFIED}"
    if verified:
        before = Stage(tmp_path, text)
        before.due("a", "verify")
        before.turn()
        before.answer("a", "verify")
    stage = Stage(tmp_path, text, seconds=1000)
    found = {"verify": {"outcome": "partial", "instance": "them", "finished": stage.clock.now().isoformat()}}
    stage.turn(10)
    stage.see("a", recorded=found)
    assert stage.in_flight == [("a", "verify")]
    stage.answer("a", "verify")
    stage.turn(10)
    stage.see("a", recorded=found)
    assert stage.in_flight == [], "it has looked since"


@pytest.mark.parametrize(("outcome", "begun"), [("partial", [("a", "verify")]), ("succeeded", [])])
def test_a_verification_counts_for_others_unless_it_found_damage(
    tmp_path: Path, outcome: str, begun: list[tuple[str, str]]
) -> None:
    stage = Stage(tmp_path, VERIFIED)
    stage.leases.last["a", "verify"] = LastRun(outcome, START, "them")
    stage.due("a", "verify")
    stage.turn()
    assert stage.in_flight == begun


def test_a_trigger_is_evaluated_again_after_another_run(stage: Stage) -> None:
    stage.turn(1000)
    stage.see("a", generations=8)
    stage.answer("a")
    stage.see("a", generations=3)
    stage.turn(100)
    stage.leases.last["a", "merge"] = LastRun("succeeded", START + timedelta(seconds=1099), "them")
    stage.due("a", why="when: generations >= 8")
    stage.turn()
    assert stage.in_flight == []
    assert stage.scheduler.tables["a"].polling
    stage.see("a", generations=9)
    assert stage.in_flight == [("a", "merge")]


def test_without_leases(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN, leases=False)
    stage.due("a")
    stage.turn()
    assert stage.in_flight == [("a", "merge")]
    _, request = stage.request("a")
    assert request.lease is None
    stage.answer("a")
    assert stage.outcomes() == ["succeeded"]


def test_a_plan_takes_no_lease(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "defaults: {jobs: {gc: {}}}\n" + TABLES)
    stage.leases.refusal = StoreUnavailableError("nothing can be written here")
    stage.due("a", "gc")
    stage.turn()
    _, request = stage.request("a", "gc")
    assert (request.apply, request.lease) == (False, None)
    stage.answer("a", "gc", decision="planned")
    assert stage.outcomes() == ["succeeded"]
