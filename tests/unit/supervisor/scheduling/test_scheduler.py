"""What runs when, on whom, and what becomes of it: decided by a clock that the test holds."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
import structlog

from memwal_ops.errors import HistoryError
from memwal_ops.supervisor.scheduling.due import queue_retry
from memwal_ops.supervisor.scheduling.runs import Dispatcher
from memwal_ops.supervisor.state.outcomes import log_fields, repeated
from memwal_ops.supervisor.state.tables import TableJob
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import START, THEM, Stage, vars_of
from tests.unit.supervisor.conftest import PLAIN, TABLES


def test_the_one_that_waits_longest_comes_first(stage: Stage) -> None:
    """One table is always behind; it comes to the end of the queue with every run, and no other starves."""
    order = []
    for name in "cab":
        stage.due(name)
        stage.clock.seconds += 1
    stage.turn()
    for _ in range(9):
        ((name, _),) = stage.in_flight
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
    assert stage.in_flight == [("a", "merge")]
    stage.answer("a")
    assert stage.in_flight == []
    assert stage.outcomes() == ["succeeded"]


def test_pools_do_not_starve_each_other(stage: Stage) -> None:
    for entry in stage.scheduler.entries():
        entry.started = START
    for job in ("merge", "catchup", "compact", "snapshot", "gc"):
        for name in "abc":
            stage.due(name, job)
    stage.turn()
    assert {job for _, job in stage.in_flight} == {"merge", "catchup", "gc"}
    assert len(stage.in_flight) == 3
    tables = stage.scheduler.pools.limits  # type: ignore[attr-defined]
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
    while stage.in_flight:
        order.append(sorted(job for _, job in stage.in_flight))
        assert {stage.job("a", job)["waiting_for"] for job in jobs} <= {"earlier", "worker", None}
        for job in order[-1]:
            stage.answer("a", job)
    assert order == [["merge"], ["catchup"], ["compact"], ["snapshot"], ["gc"]]
    due(2)
    assert {job for _, job in stage.in_flight} == {"merge", "catchup", "gc"}, "later on no job waits for a merge"


def test_a_first_run_that_cannot_begin_holds_nothing_back(tmp_path: Path) -> None:
    later = "defaults: {jobs: {merge: {windows: ['01:00-02:00']}, catchup: {schedule: 10m}}}\n" + TABLES
    stage = Stage(tmp_path, later)
    stage.due("a", "merge")
    stage.due("a", "catchup")
    stage.turn()
    assert stage.in_flight == [("a", "catchup")], "merge waits for its window"
    failing = Stage(tmp_path, PLAIN)
    failing.due("b", "merge")
    failing.due("b", "catchup")
    failing.turn()
    failing.answer("b", outcome="failed", exit_code=24)
    assert failing.in_flight == [("b", "catchup")], "and where it fails, the next one has its turn"


def test_once_means_in_order_every_time(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN, once=True)
    for entry in stage.scheduler.entries():
        entry.started = START
    for job in ("gc", "catchup", "merge"):
        stage.due("a", job)
    stage.turn()
    for job in ("merge", "catchup", "gc"):
        assert (stage.in_flight, stage.scheduler.has_work) == ([("a", job)], True)
        stage.answer("a", job)
    assert not stage.scheduler.has_work


def test_a_table_that_is_gone_for_a_moment_keeps_its_run(stage: Stage) -> None:
    """A pattern that finds nothing once, or a file that was half-written: the current run must not get a second one."""
    stage.due("a")
    stage.turn()
    tables = stage.tables(stage.settings)
    stage.scheduler.set_tables([])
    stage.turn(1)
    stage.scheduler.set_tables(tables)
    stage.due("a")
    stage.turn(1)
    assert stage.in_flight == [("a", "merge")]
    stage.answer("a", versions=(2,))
    assert stage.in_flight == []
    assert (stage.job("a")["last_outcome"], stage.job("a")["state"]) == ("succeeded", "idle")


def test_what_the_history_cannot_take_stops_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full, locked, damaged: tables come and go, budgets are asked for, and jobs run."""

    def refuse(*_: object, **__: object) -> None:
        raise HistoryError("The history is locked.")

    for name in ("record_first_seen", "last", "begin", "finish", "ended_since", "prune"):
        monkeypatch.setattr(stage.history, name, refuse)
    again = stage.load(PLAIN.replace("10m,", "10m, budget: {time: 1m},").replace("/c}]", "/c}, {uri: /d}]"))
    stage.scheduler.set_settings(again)
    stage.scheduler.set_tables(stage.tables(again))
    stage.due("d")
    stage.due("a")
    stage.turn()
    for name in ("a", "d"):
        stage.answer(name)
        assert stage.job(name)["last_outcome"] == "succeeded"


def test_runs_of_a_clock_that_was_ahead_keep_no_job_away(tmp_path: Path) -> None:
    history = Stage(tmp_path, PLAIN).history
    ahead = START + timedelta(days=400)
    history.record_first_seen("a", "merge", ahead)
    number = history.begin(table="a", uri="/a", job="merge", supervisor="us", why="schedule", plan={}, now=ahead)
    history.finish(number, ahead, "succeeded")
    stage = Stage(tmp_path, PLAIN)
    assert stage.job("a")["next_due"] == (START + timedelta(minutes=10)).isoformat(timespec="milliseconds")
    assert stage.job("a")["last_success"] == START.isoformat(timespec="milliseconds")


def test_a_trigger_fires_at_a_look(stage: Stage) -> None:
    stage.see("a", generations=7, rows=1, bytes=1)
    assert stage.in_flight == []
    stage.see("a", generations=8, rows=1, bytes=1)
    assert stage.in_flight == [("a", "merge")]
    _, request = stage.request("a")
    assert request.apply
    stage.answer("a", versions=(4,), figures={"bytes_merged": 10, "conflicts": 2}, decision="merged")
    (run,) = stage.history.runs()
    assert run["why"] == "when: generations >= 8"
    assert run["plan"]["backlog"]["generations"] == 8
    assert (run["versions"], run["decision"], run["figures"]["bytes_merged"]) == ([4], "merged", 10)
    assert stage.scheduler.tables["a"].polling, "what it published is looked at"


def test_failures_back_off(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    waits = []
    for _ in range(6):
        stage.answer("a", outcome="failed", exit_code=24, reason="store_unavailable", message="no answer")
        stage.due("a")
        stage.turn()
        assert stage.in_flight == [], "neither schedule nor trigger come before the wait is over"
        waits.append(stage.job("a")["backoff_seconds"])
        stage.due("b")
        stage.turn()
        assert stage.in_flight == [("b", "merge")], "others do not wait with it"
        stage.answer("b")
        stage.turn(waits[-1] + 1)
        assert stage.in_flight == [("a", "merge")]
    assert waits[:2] == [60, 120]
    for wait, base in zip(waits[2:], (600, 1200, 2400, 4800), strict=True):
        assert base <= wait <= base * 1.2
    assert stage.job("a")["consecutive_failures"] == 6
    stage.answer("a")
    assert stage.job("a")["consecutive_failures"] == 0
    stage.due("a")
    stage.turn()
    assert stage.in_flight == [("a", "merge")]


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
    assert second.in_flight == []
    assert second.job("a")["waiting_for"] == "backoff"
    second.turn(300)
    assert second.in_flight == [("a", "merge")]


def test_a_fixed_configuration_is_used_at_once(stage: Stage) -> None:
    for _ in range(3):
        stage.due("a")
        stage.turn(700)
        stage.answer("a", outcome="failed", exit_code=2)
    stage.turn(1)
    assert stage.in_flight == []
    changed = stage.load(PLAIN.replace("schedule: 10m", "options: {max_generations: 3}"))
    stage.scheduler.set_settings(changed)
    stage.scheduler.set_tables(stage.tables(changed))
    stage.turn()
    assert stage.in_flight == [("a", "merge")]
    stage.scheduler.set_tables(stage.tables(changed))
    stage.answer("a", outcome="failed", exit_code=2)
    stage.scheduler.set_tables(stage.tables(changed))
    stage.turn(1)
    assert stage.in_flight == [], "a reload that changes nothing changes nothing"


def test_what_was_done_in_part_is_no_failure(stage: Stage) -> None:
    for _ in range(5):
        stage.due("a")
        stage.turn(1)
        stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    assert stage.job("a")["consecutive_failures"] == 0
    assert stage.job("a")["last_success"] is None
    assert stage.outcomes() == ["partial"] * 5


def test_a_trigger_does_not_hammer_on_what_is_blocked(stage: Stage) -> None:
    stage.see("a", generations=9, oldest_age=10)
    stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    for age in range(20, 60, 10):
        stage.see("a", generations=9, oldest_age=age)
        assert stage.in_flight == []
    stage.turn(600)
    stage.see("a", generations=9, oldest_age=700)
    assert stage.in_flight == [("a", "merge")], "it may be fixed by now"
    stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    stage.due("a")
    stage.turn()
    assert stage.in_flight == [("a", "merge")], "the schedule goes on"
    stage.answer("a", outcome="partial", exit_code=10, decision="blocked")
    stage.see("a", generations=10, oldest_age=70)
    assert stage.in_flight == [("a", "merge")], "there is more to do"
    stage.answer("a", outcome="partial", exit_code=18, decision="incomplete", versions=(5,))
    stage.see("a", generations=10, oldest_age=80)
    assert stage.in_flight == [("a", "merge")], "it did something, and nothing blocks it"


def test_a_blocked_merge_that_merged_the_rest_runs_once(stage: Stage) -> None:
    """The generations that it left are behind the fault: the poll of its own version must not start it again."""
    sums, left = {"regions_blocked": 1}, {"generations": 9, "rows": 3, "blocked_regions": 0}
    stage.see("a", generations=40, rows=90, regions_behind=2, blocked_regions=0)
    stage.answer("a", outcome="partial", exit_code=10, versions=(5,), figures=sums, remaining=left)
    for age in range(3):
        stage.see("a", **left, regions_behind=1, oldest_age=age)
        assert stage.in_flight == []
    stage.see("a", **{**left, "generations": 10}, regions_behind=2)
    assert stage.in_flight == [("a", "merge")], "something was written since"
    assert stage.outcomes() == ["partial", "running"]


def test_the_log_line_of_a_run_says_why_and_what_to_do(tmp_path: Path) -> None:
    why = {"reason": "generation_corrupt", "detail": "Generation 4 cannot be read.", "remedy": "Restore it."}
    first = {"region_id": "r1", "generation": 4, **why}
    report = {"blocked": [first, {"region_id": "r2", "generation": None, "reason": "region_replaced"}]}
    with structlog.testing.capture_logs() as logs:
        stage = Stage(tmp_path, PLAIN)
        for table in "ab":
            stage.due(table)
        stage.turn()
        stage.answer("a", outcome="partial", exit_code=10, decision="blocked", report=report)
        error = {"reason": "store_unavailable", "message": "No answer.", "remedy": "Wait."}
        stage.answer("b", outcome="failed", exit_code=24, **error)
    blocked, failed = (event for event in logs if event["event"] == "run_finished")
    page = "runbooks/errors/14-generation_corrupt.md"
    assert (
        blocked.items() >= {**first, "decision": "blocked", "outcome": "partial", "blocked": 2, "runbook": page}.items()
    )
    page = "runbooks/errors/24-store_unavailable.md"
    expected = {"reason": "store_unavailable", "error": "No answer.", "remedy": "Wait.", "runbook": page}
    assert failed.items() >= expected.items()


def test_what_blocks_a_merge_is_logged_once(tmp_path: Path) -> None:
    """Again when it changes, and after a run that it did not block."""

    def report(generation: int) -> dict[str, object]:
        return {"blocked": [{"region_id": "r1", "generation": generation, "reason": "generation_corrupt"}]}

    runs = [report(4), report(4), report(5), report(5), {}, report(5)]
    with structlog.testing.capture_logs() as logs:
        stage = Stage(tmp_path, PLAIN)
        for one in runs:
            stage.scheduler.enqueue("a", "merge", "schedule")
            stage.turn()
            stage.answer("a", outcome="partial" if one else "succeeded", exit_code=10 if one else 0, report=one)
    warned = [event for event in logs if event["event"] == "run_finished" and event["log_level"] == "warning"]
    assert [event["generation"] for event in warned] == [4, 5, 5]
    shown = log_fields({"decision": "blocked", "exit_code": 10, "report": report(4)})
    assert repeated(shown) == {
        "decision": "blocked", "reason": "generation_corrupt", "exit_code": 10, "same_as_before": True,
    }  # fmt: skip


def test_what_only_a_merge_finds_blocked_is_shown(tmp_path: Path) -> None:
    """A look lists generations and does not open them; what is damaged is known by the last merge."""
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {schedule: 1h, when: generations >= 1}}}\n" + TABLES)

    def shown() -> float:
        return stage.scheduler.tables["a"].figures["blocked_regions"]

    backlog = {"generations": 3, "rows": 9, "bytes": 9, "oldest_age": 1, "regions_behind": 2, "blocked_regions": 0}
    stage.see("a", **backlog)
    assert shown() == 0
    stage.answer("a", outcome="partial", exit_code=10, figures={"regions_blocked": 1})
    assert shown() == 1
    stage.see("a", **backlog)
    assert shown() == 1, "the look knows less"
    assert stage.in_flight == [], "nothing has changed, so the trigger does not fire again"
    stage.see("a", **{**backlog, "blocked_regions": 2})
    assert shown() == 2, "or more"
    stage.turn(3600)
    stage.due("a")
    stage.turn()
    stage.answer("a", figures={"regions_blocked": 0})
    assert shown() == 2
    stage.see("a", **backlog)
    assert shown() == 0, "the last merge found it fixed"
    stage.turn(3600)
    stage.due("a")
    stage.turn()
    stage.answer("a", outcome="partial", exit_code=10, figures={"regions_blocked": 1})
    stage.see("a", **{**backlog, "generations": 0, "regions_behind": 0})
    assert shown() == 0, "it was fixed, and merged by hand"


def test_windows_and_budgets(tmp_path: Path) -> None:
    text = "defaults: {jobs: {merge: {windows: ['13:00-14:00'], budget: {time: 10m, per: 1h}}}}\n"
    stage = Stage(tmp_path, text + TABLES)
    stage.due("a")
    stage.turn(3590)
    assert stage.in_flight == []
    assert (stage.job("a")["waiting_for"], stage.job("a")["waiting_seconds"]) == ("window", 0)
    stage.turn(10)
    assert stage.in_flight == [("a", "merge")]
    stage.turn(620)
    stage.answer("a")
    stage.due("a")
    stage.turn(60)
    assert stage.in_flight == []
    assert stage.job("a")["waiting_for"] == "budget"
    stage.due("b")
    stage.turn()
    assert stage.in_flight == [("b", "merge")], "the budget is one of each table"


def test_tables_are_added_and_removed(stage: Stage) -> None:
    stage.due("a")
    stage.turn()
    changed = stage.load(
        "defaults: {jobs: {merge: {schedule: 1h, options: {max_generations: 2}}}}\ntables: [{uri: /b}, {uri: /d}]"
    )
    stage.scheduler.set_settings(changed)
    stage.scheduler.set_tables(stage.tables(changed))
    assert sorted(stage.scheduler.tables) == ["b", "d"]
    assert "gc" not in stage.scheduler.tables["b"].entries
    stage.answer("a")
    assert stage.outcomes(table="a") == ["succeeded"], "the running jobs end, and are recorded"
    stage.due("a")
    stage.due("d")
    stage.turn()
    assert stage.in_flight == [("d", "merge")]
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
    scheduler = stage.scheduler
    stage.leases.held["b", "merge"] = stage.leases.lease("merge", THEM)
    scheduler.queue_scheduled()
    for name in "abc":
        stage.see(name, due_fragments=1.0, unchecked_segments=0.0)
    done = set()
    while stage.in_flight:
        name, job = stage.in_flight[0]
        assert (name, job) not in done
        done.add((name, job))
        outcome = "failed" if job == "snapshot" else "succeeded"
        stage.answer(name, job, outcome=outcome, exit_code=24 if outcome == "failed" else 0)
    assert len(done) == 3 * 6 - 1, "what another supervisor does is left to it"
    assert not scheduler.has_work
    assert max(scheduler.codes) == 24
    stage.leases.held.clear()
    stage.turn(60)
    scheduler.queue_scheduled()
    for name in "abc":
        stage.see(name, due_fragments=1.0, unchecked_segments=0.0)
    assert stage.in_flight == [("b", "merge")], "what ran is not due again"


@pytest.mark.parametrize("once", [True, False])
def test_figures_from_before_a_run_ended_do_not_start_the_next(tmp_path: Path, once: bool) -> None:
    """A look that began before the merge ended tells of a backlog that this merge has worked off."""
    stage = Stage(tmp_path, PLAIN, once=once)
    stage.due("a")
    stage.scheduler.poll("a")
    stage.turn(1)
    looks = lambda: [request for _, request in stage.pools.given if isinstance(request, PollRequest)]  # noqa: E731
    worker = next(worker for worker, request in stage.pools.given if isinstance(request, PollRequest))
    stage.turn(1)
    stage.answer("a", versions=(4,))
    (stale,) = looks()
    figures = {"generations": 9.0}
    stage.scheduler.on_message(worker, vars_of(Result(stale.id, "succeeded", figures=figures, version=3)))  # type: ignore[arg-type]
    stage.turn(1)
    assert stage.in_flight == []
    assert stage.outcomes() == ["succeeded"]
    assert len(looks()) == (1 if once else 2), "a service asks again, for what has come meanwhile"
    if not once:
        stage.see("a", generations=9.0)
        assert stage.in_flight == [("a", "merge")]


def test_neither_a_poll_nor_a_start_looks_at_other_tables(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 tables, each of the thousands of polls and starts would go through all jobs of all of them."""
    for name in "abc":
        stage.see(name, generations=1)
        stage.due(name, "gc")
    stage.turn(1)
    seen: set[str] = set()
    evaluate = Dispatcher._evaluate
    monkeypatch.setattr(stage.scheduler, "entries", lambda: pytest.fail("it goes through all jobs"))

    def noted(dispatcher: Dispatcher, entry: TableJob, now: datetime) -> None:
        seen.add(entry.table.name)
        evaluate(dispatcher, entry, now)

    monkeypatch.setattr(Dispatcher, "_evaluate", noted)
    stage.see("a", generations=8)
    assert stage.in_flight[-1] == ("a", "merge")
    stage.turn(1.5)
    stage.answer("a")
    assert seen == {"a"}


PLAIN_JOBS = ("catchup", "compact", "expire", "gc", "verify")


def started(stage: Stage, *applies: str, **figures: float) -> set[str]:
    """What is queued or runs once the schedules of all jobs have fired, and a poll has shown which apply."""
    for entry in [*stage.scheduler.entries()]:
        stage.scheduler.on_schedule(*entry.key)
    stage.see("a", applies=applies, **figures)
    return {entry.settings.name for entry in stage.scheduler.entries() if entry.state != "idle"}


def test_jobs_that_do_not_apply_are_never_started(tmp_path: Path) -> None:
    """Half of a history were merges and snapshots of plain tables, each of which found that it does not apply."""
    stage = Stage(tmp_path, "tables: [{uri: /a}]\n")
    queue_retry(stage.scheduler.tables["a"].entries["snapshot"], START, None)  # of an earlier release
    assert started(stage, *PLAIN_JOBS) <= {*PLAIN_JOBS}
    stage.scheduler.tables["a"].entries["merge"].succeeded = START
    assert stage.job("a", "merge")["applies"] is False
    assert stage.job("a", "merge")["last_success"] is None
    assert "merge" not in started(stage, *PLAIN_JOBS)
    assert "merge" in started(stage, "merge", *PLAIN_JOBS, generations=9.0, bytes=1.0), "it has a log by now"


def test_a_job_that_the_entry_of_its_table_names_fails_if_it_does_not_apply(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "tables: [{uri: /a, jobs: {merge: {schedule: 1h}}}]\n")
    assert "merge" in started(stage, *PLAIN_JOBS)
