"""What runs when, on whom, and what becomes of it: decided by a clock that the test holds."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import pytest

from memwal_ops.core.leases import LastRun
from memwal_ops.errors import HistoryError, LeaseLostError, StoreUnavailableError
from tests.supervisor.fakes import START, THEM, Stage

TABLES = "tables: [{uri: /a}, {uri: /b}, {uri: /c}]\n"
PLAIN = "defaults: {jobs: {merge: {schedule: 10m, when: generations >= 8}, gc: {apply: true}}}\n" + TABLES


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, PLAIN)


def test_the_one_that_waits_longest_comes_first(stage: Stage) -> None:
    """One table is always behind; it comes to the end of the queue with every run, and no other starves."""
    order = []
    for name in "cab":
        stage.due(name)
        stage.clock.seconds += 1
    stage.turn()
    for _ in range(9):
        ((name, _),) = stage.in_hand
        order.append(name)
        stage.turn(1)
        stage.answer(name)
        stage.due(name, why="when: generations >= 8")
        stage.turn(1)
    assert order == list("cab" * 3)


def test_no_overlap_on_one_table_and_job(stage: Stage) -> None:
    for _ in range(3):
        stage.due("a")
        stage.turn()
    assert stage.in_hand == [("a", "merge")]
    stage.answer("a")
    assert stage.in_hand == []
    assert stage.outcomes() == ["succeeded"]


def test_pools_do_not_starve_each_other(stage: Stage) -> None:
    for entry in stage.conductor.entries():
        entry.started = START
    for job in ("merge", "catchup", "compact", "snapshot", "gc"):
        for name in "abc":
            stage.due(name, job)
    stage.turn()
    assert {job for _, job in stage.in_hand} == {"merge", "catchup", "gc"}
    assert len(stage.in_hand) == 3
    tables = stage.conductor.pools.limits  # type: ignore[attr-defined]
    assert tables["merge"].workers == 1


def test_first_runs_have_an_order(stage: Stage) -> None:
    """What catchup, compact and snapshot do before the first merge, they would do again after it."""
    jobs = ("gc", "snapshot", "compact", "catchup", "merge")

    def due(times: int) -> None:
        for job in jobs:
            stage.due("a", job)
        stage.turn(times)

    due(1)
    order = []
    while stage.in_hand:
        order.append(sorted(job for _, job in stage.in_hand))
        assert {stage.job("a", job)["waiting_for"] for job in jobs} <= {"earlier", "worker", None}
        for job in order[-1]:
            stage.answer("a", job)
    assert order == [["merge"], ["catchup"], ["compact"], ["snapshot"], ["gc"]]
    due(2)
    assert {job for _, job in stage.in_hand} == {"merge", "catchup", "gc"}, "later on nobody waits for a merge"


def test_a_first_run_that_cannot_begin_holds_nothing_back(tmp_path: Path) -> None:
    later = "defaults: {jobs: {merge: {windows: ['01:00-02:00']}, catchup: {schedule: 10m}}}\n" + TABLES
    stage = Stage(tmp_path, later)
    stage.due("a", "merge")
    stage.due("a", "catchup")
    stage.turn()
    assert stage.in_hand == [("a", "catchup")], "merge waits for its window"
    failing = Stage(tmp_path, PLAIN)
    failing.due("b", "merge")
    failing.due("b", "catchup")
    failing.turn()
    failing.answer("b", outcome="failed", exit_code=24)
    assert failing.in_hand == [("b", "catchup")], "and where it fails, the next one has its turn"


def test_once_means_in_order_every_time(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN, once=True)
    for entry in stage.conductor.entries():
        entry.started = START
    for job in ("gc", "catchup", "merge"):
        stage.due("a", job)
    stage.turn()
    for job in ("merge", "catchup", "gc"):
        assert (stage.in_hand, stage.conductor.waits) == ([("a", job)], True)
        stage.answer("a", job)
    assert not stage.conductor.waits


def test_a_table_that_is_gone_for_a_moment_keeps_its_run(stage: Stage) -> None:
    """A pattern that finds nothing once, or a file that was half-written: the run in hand must not get a rival."""
    stage.due("a")
    stage.turn()
    tables = stage.tables(stage.settings)
    stage.conductor.set_tables([])
    stage.turn(1)
    stage.conductor.set_tables(tables)
    stage.due("a")
    stage.turn(1)
    assert stage.in_hand == [("a", "merge")]
    stage.answer("a", versions=(2,))
    assert stage.in_hand == []
    assert (stage.job("a")["last_outcome"], stage.job("a")["state"]) == ("succeeded", "idle")


def test_what_the_history_cannot_take_stops_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full, locked, damaged: tables come and go, budgets are asked for, and jobs run."""

    def refuse(*_: object, **__: object) -> None:
        raise HistoryError("The history is locked.")

    for name in ("see", "last", "begin", "finish", "seconds_since", "prune"):
        monkeypatch.setattr(stage.history, name, refuse)
    again = stage.load(PLAIN.replace("10m,", "10m, budget: {time: 1m},").replace("/c}]", "/c}, {uri: /d}]"))
    stage.conductor.set_settings(again)
    stage.conductor.set_tables(stage.tables(again))
    stage.due("d")
    stage.due("a")
    stage.turn()
    for name in ("a", "d"):
        stage.answer(name)
        assert stage.job(name)["last_outcome"] == "succeeded"


def test_runs_of_a_clock_that_was_ahead_keep_no_job_away(tmp_path: Path) -> None:
    history = Stage(tmp_path, PLAIN).history
    ahead = START + timedelta(days=400)
    history.see("a", "merge", ahead)
    number = history.begin(table="a", uri="/a", job="merge", supervisor="us", why="schedule", plan={}, now=ahead)
    history.finish(number, ahead, "succeeded")
    stage = Stage(tmp_path, PLAIN)
    assert stage.job("a")["next_due"] == (START + timedelta(minutes=10)).isoformat(timespec="milliseconds")
    assert stage.job("a")["last_success"] == START.isoformat(timespec="milliseconds")


def test_a_trigger_fires_at_a_look(stage: Stage) -> None:
    stage.see("a", generations=7, rows=1, bytes=1)
    assert stage.in_hand == []
    stage.see("a", generations=8, rows=1, bytes=1)
    assert stage.in_hand == [("a", "merge")]
    _, request = stage.request("a")
    assert request.apply
    stage.answer("a", versions=(4,), figures={"bytes_merged": 10, "conflicts": 2}, decision="merged")
    (run,) = stage.history.runs()
    assert run["why"] == "when: generations >= 8"
    assert run["plan"]["backlog"]["generations"] == 8
    assert (run["versions"], run["decision"], run["figures"]["bytes_merged"]) == ([4], "merged", 10)
    assert stage.conductor.tables["a"].looking, "what it published is looked at"


def test_failures_back_off(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    waits = []
    for _ in range(6):
        stage.answer("a", outcome="failed", exit_code=24, reason="store_unavailable", message="no answer")
        stage.due("a")
        stage.turn()
        assert stage.in_hand == [], "neither schedule nor trigger come before the wait is over"
        waits.append(stage.job("a")["backoff_seconds"])
        stage.due("b")
        stage.turn()
        assert stage.in_hand == [("b", "merge")], "others do not wait with it"
        stage.answer("b")
        stage.turn(waits[-1] + 1)
        assert stage.in_hand == [("a", "merge")]
    assert waits[:2] == [60, 120]
    for wait, base in zip(waits[2:], (600, 1200, 2400, 4800), strict=True):
        assert base <= wait <= base * 1.2
    assert stage.job("a")["consecutive_failures"] == 6
    stage.answer("a")
    assert stage.job("a")["consecutive_failures"] == 0
    stage.due("a")
    stage.turn()
    assert stage.in_hand == [("a", "merge")]


def test_backoff_outlives_the_service(tmp_path: Path) -> None:
    first = Stage(tmp_path, PLAIN)
    for _ in range(3):
        first.due("a")
        first.turn(700)
        first.answer("a", outcome="failed", exit_code=24)
    first.history.close()
    second = Stage(tmp_path, PLAIN, seconds=first.clock.seconds)
    second.due("a")
    second.turn(500)
    assert second.in_hand == []
    assert second.job("a")["waiting_for"] == "backoff"
    second.turn(300)
    assert second.in_hand == [("a", "merge")]


def test_who_mends_the_configuration_need_not_wait(stage: Stage) -> None:
    for _ in range(3):
        stage.due("a")
        stage.turn(700)
        stage.answer("a", outcome="failed", exit_code=2)
    stage.turn(1)
    assert stage.in_hand == []
    changed = stage.load(PLAIN.replace("schedule: 10m", "options: {max_generations: 3}"))
    stage.conductor.set_settings(changed)
    stage.conductor.set_tables(stage.tables(changed))
    stage.turn()
    assert stage.in_hand == [("a", "merge")]
    stage.conductor.set_tables(stage.tables(changed))
    stage.answer("a", outcome="failed", exit_code=2)
    stage.conductor.set_tables(stage.tables(changed))
    stage.turn(1)
    assert stage.in_hand == [], "a reload that changes nothing changes nothing"


def test_what_was_done_in_part_is_no_failure(stage: Stage) -> None:
    for _ in range(5):
        stage.due("a")
        stage.turn(1)
        stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    assert stage.job("a")["consecutive_failures"] == 0
    assert stage.job("a")["last_success"] is None
    assert stage.outcomes() == ["partial"] * 5


def test_a_hung_job_is_ended_and_then_killed(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    worker, request = stage.request("a")
    for _ in range(5):
        stage.turn(1700)
        stage.conductor.on_message(worker, {"say": "progress", "id": request.id})  # type: ignore[arg-type]
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
    assert stage.desk.released == [("a", "merge", "hung")]


def test_a_timeout_ends_what_is_alive(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {timeout: 1h}}}\n" + TABLES)
    stage.due("a")
    stage.turn()
    worker, request = stage.request("a")
    for _ in range(7):
        stage.turn(600)
        stage.conductor.on_message(worker, {"say": "progress", "id": request.id})  # type: ignore[arg-type]
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
    assert "passed its limit" in run["error"]["message"]


def test_a_worker_that_dies_takes_nothing_along(stage: Stage) -> None:
    stage.due("a")
    stage.due("b")
    stage.turn()
    stage.die("a")
    (run,) = stage.history.runs(failed=True)
    assert run["error"]["message"].endswith("ended: killed by SIGKILL.")
    assert stage.in_hand == [("b", "merge")]
    stage.turn(61)
    stage.answer("b")
    assert stage.in_hand == [("a", "merge")], "again after a minute"


def test_a_look_that_fails_is_said(stage: Stage) -> None:
    stage.see("a", generations=1)
    stage.conductor.look("a")
    stage.turn()
    worker, _ = stage.pools.given[-1]
    worker.exit_status = 7
    stage.conductor.on_message(worker, None)  # type: ignore[arg-type]
    stage.turn()
    assert "exit code 7" in str(stage.conductor.tables["a"].error)
    assert stage.conductor.tables["a"].figures == {"generations": 1}
    stage.see("a", generations=2)
    assert stage.conductor.tables["a"].error is None


def test_a_look_that_hangs_is_ended(stage: Stage) -> None:
    stage.conductor.look("a")
    stage.turn()
    worker, _ = stage.pools.given[-1]
    stage.turn(299)
    assert worker.signals == []
    stage.turn(2)
    assert worker.signals[0] is signal.SIGKILL
    worker.exit_status = -9
    stage.conductor.on_message(worker, None)  # type: ignore[arg-type]
    stage.see("b", generations=1)
    assert stage.conductor.tables["b"].figures == {"generations": 1}
    assert "SIGKILL" in str(stage.conductor.tables["a"].error)


def test_a_trigger_does_not_hammer_on_what_is_blocked(stage: Stage) -> None:
    stage.see("a", generations=9, oldest_age=10)
    stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    for age in range(20, 60, 10):
        stage.see("a", generations=9, oldest_age=age)
        assert stage.in_hand == []
    stage.turn(600)
    stage.see("a", generations=9, oldest_age=700)
    assert stage.in_hand == [("a", "merge")], "it may be mended by now"
    stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    stage.due("a")
    stage.turn()
    assert stage.in_hand == [("a", "merge")], "the schedule goes on"
    stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    stage.see("a", generations=10, oldest_age=70)
    assert stage.in_hand == [("a", "merge")], "there is more to do"
    stage.answer("a", outcome="partial", exit_code=10, decision="blocked", versions=(5,))
    stage.see("a", generations=10, oldest_age=80)
    assert stage.in_hand == [("a", "merge")], "it did something"


def test_what_only_a_merge_finds_blocked_is_shown(tmp_path: Path) -> None:
    """A look lists generations and does not open them; what is damaged is known by the last merge."""
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {schedule: 1h, when: generations >= 1}}}\n" + TABLES)

    def shown() -> float:
        return stage.conductor.tables["a"].figures["blocked_regions"]

    backlog = {"generations": 3, "rows": 9, "bytes": 9, "oldest_age": 1, "regions_behind": 2, "blocked_regions": 0}
    stage.see("a", **backlog)
    assert shown() == 0
    stage.answer("a", outcome="partial", exit_code=10, figures={"regions_blocked": 1})
    assert shown() == 1
    stage.see("a", **backlog)
    assert shown() == 1, "the look knows less"
    assert stage.in_hand == [], "nothing has changed, so the trigger does not fire again"
    stage.see("a", **{**backlog, "blocked_regions": 2})
    assert shown() == 2, "or more"
    stage.turn(3600)
    stage.due("a")
    stage.turn()
    stage.answer("a", figures={"regions_blocked": 0})
    assert shown() == 2
    stage.see("a", **backlog)
    assert shown() == 0, "the last merge found it mended"
    stage.turn(3600)
    stage.due("a")
    stage.turn()
    stage.answer("a", outcome="partial", exit_code=10, figures={"regions_blocked": 1})
    stage.see("a", **{**backlog, "generations": 0, "regions_behind": 0})
    assert shown() == 0, "somebody mended it, and merged by hand"


def test_windows_and_budgets(tmp_path: Path) -> None:
    text = "defaults: {jobs: {merge: {windows: ['13:00-14:00'], budget: {time: 10m, per: 1h}}}}\n"
    stage = Stage(tmp_path, text + TABLES)
    stage.due("a")
    stage.turn(3590)
    assert stage.in_hand == []
    assert (stage.job("a")["waiting_for"], stage.job("a")["waiting_seconds"]) == ("window", 0)
    stage.turn(10)
    assert stage.in_hand == [("a", "merge")]
    stage.turn(620)
    stage.answer("a")
    stage.due("a")
    stage.turn(60)
    assert stage.in_hand == []
    assert stage.job("a")["waiting_for"] == "budget"
    stage.due("b")
    stage.turn()
    assert stage.in_hand == [("b", "merge")], "the budget is one of each table"


def test_leases_are_renewed_at_a_third(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    token = stage.desk.lease("merge", THEM).token - 1
    stage.turn(99)
    assert stage.desk.renewals == []
    stage.turn(2)
    assert [lease.token for lease in stage.desk.renewals] == [token]
    stage.turn(101)
    assert len(stage.desk.renewals) == 2
    assert stage.job("a")["lease"]["state"] == "held"
    stage.answer("a")
    assert stage.job("a")["lease"]["state"] == "free"
    assert stage.desk.released == [("a", "merge", "succeeded")]


def test_a_lease_that_is_lost_ends_the_run(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    worker, _ = stage.request("a")
    stage.desk.refusal = LeaseLostError("held by them")
    stage.turn(101)
    assert worker.signals == [signal.SIGTERM]
    stage.answer("a", outcome="stopped")
    (run,) = stage.history.runs()
    assert (run["outcome"], run["exit_code"]) == ("lost", 52)
    assert stage.desk.released == [], "it is not ours to give back"
    assert stage.job("a")["consecutive_failures"] == 0


def test_a_store_that_is_away_loses_no_lease_before_its_time(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    worker, _ = stage.request("a")
    stage.desk.refusal = StoreUnavailableError("no answer")
    for _ in range(28):
        stage.turn(10)
    assert worker.signals == []
    stage.desk.refusal = None
    stage.turn(10)
    stage.desk.refusal = StoreUnavailableError("no answer")
    for _ in range(28):
        stage.turn(10)
    assert worker.signals == []
    for _ in range(10):
        stage.turn(10)
    assert worker.signals == [signal.SIGTERM, signal.SIGKILL], "another may have it by now"


def test_a_lease_that_cannot_be_asked_for_is_a_failure(stage: Stage) -> None:
    stage.desk.refusal = StoreUnavailableError("no answer")
    stage.due("a")
    stage.turn()
    (run,) = stage.history.runs()
    assert (run["outcome"], run["exit_code"], run["error"]["reason"]) == ("failed", 24, "store_unavailable")
    assert stage.job("a")["consecutive_failures"] == 1
    assert stage.conductor.in_hand == 0


def test_who_is_kept_away_asks_again_until_the_lease_ends(stage: Stage) -> None:
    stage.desk.held["a", "merge"] = stage.desk.lease("merge", THEM)
    stage.due("a")
    stage.turn()
    assert stage.in_hand == []
    for _ in range(4):
        stage.turn(65)
    status = stage.job("a")
    assert (status["waiting_for"], status["lease"]["state"]) == ("lease", "elsewhere")
    assert status["lease"]["holder"]["name"] == "them@there"
    assert status["lease"]["elsewhere_seconds"] == 260
    del stage.desk.held["a", "merge"]
    stage.turn(65)
    assert stage.in_hand == [("a", "merge")], "within one time to live of its end"
    assert stage.outcomes() == ["running"], "being kept away is no run"


def test_what_another_supervisor_has_just_done_is_not_done_again(stage: Stage) -> None:
    stage.turn(1000)
    stage.desk.last["a", "merge"] = LastRun("succeeded", START + timedelta(seconds=700), "them")
    stage.due("a")
    stage.turn()
    assert stage.in_hand == []
    assert stage.job("a")["last_outcome"] == "succeeded"
    assert stage.job("a")["seconds_since_success"] == 300
    stage.turn(600)
    stage.due("a")
    stage.turn()
    assert stage.in_hand == [("a", "merge")], "it has stopped doing it"


@pytest.mark.parametrize(
    "last",
    [
        LastRun("succeeded", START + timedelta(seconds=900), "us"),
        LastRun("failed", START + timedelta(seconds=900), "them"),
        LastRun("succeeded", START + timedelta(seconds=300), "them"),
    ],
)
def test_what_nobody_else_did_is_done(stage: Stage, last: LastRun) -> None:
    stage.turn(1000)
    stage.desk.last["a", "merge"] = last
    stage.due("a")
    stage.turn()
    assert stage.in_hand == [("a", "merge")]


def test_a_trigger_is_told_again_by_what_another_left(stage: Stage) -> None:
    stage.turn(1000)
    stage.see("a", generations=8)
    stage.answer("a")
    stage.see("a", generations=3)
    stage.turn(100)
    stage.desk.last["a", "merge"] = LastRun("succeeded", START + timedelta(seconds=1099), "them")
    stage.due("a", why="when: generations >= 8")
    stage.turn()
    assert stage.in_hand == []
    assert stage.conductor.tables["a"].looking
    stage.see("a", generations=9)
    assert stage.in_hand == [("a", "merge")]


def test_stopping_lets_the_step_in_hand_end(stage: Stage) -> None:
    stage.due("a")
    stage.due("b")
    stage.turn()
    worker, request = stage.request("a")
    stage.conductor.stop()
    stage.turn()
    assert worker.sent[-1] == {"do": "stop", "id": request.id}
    assert worker.signals == []
    stage.answer("a", outcome="stopped", decision="stopped", versions=(7,))
    stage.turn(10)
    assert stage.in_hand == [], "nothing more begins"
    assert stage.conductor.in_hand == 0
    (run,) = stage.history.runs()
    assert (run["outcome"], run["versions"]) == ("stopped", [7])
    assert stage.desk.released == [("a", "merge", None)]


def test_what_is_still_in_hand_at_the_end_is_written_down(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    stage.conductor.stop()
    stage.conductor.abandon()
    assert stage.outcomes() == ["stopped"]
    assert stage.desk.released == [("a", "merge", None)]


def test_without_leases(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN, leases=False)
    stage.due("a")
    stage.turn()
    assert stage.in_hand == [("a", "merge")]
    _, request = stage.request("a")
    assert request.lease is None
    stage.answer("a")
    assert stage.outcomes() == ["succeeded"]


def test_a_plan_takes_no_lease(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "defaults: {jobs: {gc: {}}}\n" + TABLES)
    stage.desk.refusal = StoreUnavailableError("nothing can be written here")
    stage.due("a", "gc")
    stage.turn()
    _, request = stage.request("a", "gc")
    assert (request.apply, request.lease) == (False, None)
    stage.answer("a", "gc", decision="planned")
    assert stage.outcomes() == ["succeeded"]


def test_tables_come_and_go(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    changed = stage.load(
        "defaults: {jobs: {merge: {schedule: 1h, options: {max_generations: 2}}}}\ntables: [{uri: /b}, {uri: /d}]"
    )
    stage.conductor.set_settings(changed)
    stage.conductor.set_tables(stage.tables(changed))
    assert sorted(stage.conductor.tables) == ["b", "d"]
    assert "gc" not in stage.conductor.tables["b"].entries
    stage.answer("a")
    assert stage.outcomes(table="a") == ["succeeded"], "what was in hand ends, and is written down"
    stage.due("a")
    stage.due("d")
    stage.turn()
    assert stage.in_hand == [("d", "merge")]
    _, request = stage.request("d")
    assert request.options == {"max_generations": 2}


def test_heartbeats_follow_success_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "heartbeat: {url: 'https://x/{table}/{job}'}\n" + TABLES)
    for outcome in ("failed", "partial", "succeeded"):
        stage.due("a")
        stage.turn(100)
        stage.answer("a", outcome=outcome)
    assert stage.heartbeat.beats == [("https://x/{table}/{job}", "a", "merge")]


def test_once_does_what_is_due_and_no_more(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN, once=True)
    conductor = stage.conductor
    stage.desk.held["b", "merge"] = stage.desk.lease("merge", THEM)
    conductor.due_by_clock()
    stage.turn()
    done = set()
    while stage.in_hand:
        name, job = stage.in_hand[0]
        assert (name, job) not in done
        done.add((name, job))
        outcome = "failed" if job == "snapshot" else "succeeded"
        stage.answer(name, job, outcome=outcome, exit_code=24 if outcome == "failed" else 0)
    assert len(done) == 3 * 5 - 1, "what another supervisor does is left to it"
    assert not conductor.waits
    assert max(conductor.codes) == 24
    stage.desk.held.clear()
    conductor.due_by_clock()
    stage.turn(60)
    assert stage.in_hand == [("b", "merge")], "what ran is not due again"


def test_a_bug_of_ours_ends_nothing(stage: Stage) -> None:
    stage.conductor.post(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    stage.due("a")
    stage.turn()
    assert stage.in_hand == [("a", "merge")]
    assert stage.metrics.registry.get_sample_value("memwal_ops_internal_errors_total") == 1


def test_a_full_disk_of_ours_stops_no_table(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.history.close()
    monkeypatch.setattr(stage.history, "seconds_since", lambda *_: 0.0)

    class Closed:
        def execute(self, *_: object) -> None:
            import sqlite3

            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(stage.history, "_connection", Closed())
    stage.due("a")
    stage.turn()
    assert stage.in_hand == [("a", "merge")]
    stage.answer("a")
    assert stage.job("a")["last_outcome"] == "succeeded"
