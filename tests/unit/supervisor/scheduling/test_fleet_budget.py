"""What runs within the budget of the fleet, in which order, and what is not delayed; decided on a stage."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.cli.status import budget_lines
from memwal_ops.core.fleet_budget import Amounts, Charge, Others
from memwal_ops.errors import InvalidConfigError
from memwal_ops.supervisor.observe.status import budget_status, published_budget
from memwal_ops.supervisor.state.history import BY_HAND
from memwal_ops.supervisor.workers.protocol import Result
from tests.support.fakes import START, Stage, vars_of

TABLES = "tables: [{uri: /a}, {uri: /b}, {uri: /c, objectives: {max_fragments: 100}}]\n"
PLAIN = "defaults: {jobs: {merge: {schedule: 10m}, expire: {apply: true}}}\n" + TABLES
LIMITED = "budget: {cpu: 100s, per: 1h}\n" + PLAIN


def used(cpu: float, **more: Any) -> dict[str, Any]:
    requests = {"get": 10, "put": 0, "list": 0, "delete": 0}
    return {"store": "s3", "requests": requests, "bytes_read": 0, "bytes_written": 0, "cpu_seconds": cpu, **more}


def spend(stage: Stage, table: str, cpu: float) -> None:
    stage.due(table)
    stage.turn()
    stage.answer(table, used=used(cpu))


def test_what_saves_most_runs_first(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN.replace("{uri: /b}", "{uri: /b, weight: 100}"))
    for name, fragments in (("a", 90.0), ("b", 9.0), ("c", 30.0)):
        stage.see(name, due_fragments=fragments)
    for name in "abc":
        stage.scheduler.tables[name].entries["compact"].started = START
        stage.due(name, "compact")
        stage.clock.seconds += 1
    order = []
    for _ in range(3):
        stage.turn(1)
        ((name, _),) = stage.in_flight
        order.append(name)
        stage.answer(name, "compact")
    assert order == ["b", "a", "c"], "by weight, then by fragments"


def test_once_ends_where_only_time_would_help(tmp_path: Path) -> None:
    """What comes after a job that waits for the budget is not begun in its place."""
    stage = Stage(tmp_path, LIMITED, once=True)
    spend(stage, "a", 200.0)
    stage.see("a", uncovered_rows=1e6, indexes_urgent=1.0)
    for job in ("merge", "catchup", "compact"):
        stage.due("a", job)
    stage.turn()
    assert stage.in_flight == []
    assert stage.job("a")["waiting_for"] == "over_budget"
    assert stage.job("a", "compact")["waiting_for"] == "over_budget"
    assert not stage.scheduler.has_work


def test_a_budget_defers_all_but_objectives_and_safety(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED)
    spend(stage, "a", 95.0)
    stage.due("a")
    stage.turn(60)
    assert stage.in_flight == []
    status = stage.job("a")
    assert (status["state"], status["waiting_for"], status["waiting_seconds"]) == ("queued", "over_budget", 0)
    shown = budget_status(stage.scheduler)
    assert shown is not None
    assert (shown["used_up"], shown["used"]) == ("cpu", {"cpu": 95.0})
    stage.see("b", generations=1.0, blocked_regions=1.0)
    stage.due("b")
    stage.see("c", fragments=300.0, due_fragments=200.0)
    stage.turn()
    assert sorted(stage.in_flight) == [("b", "merge"), ("c", "compact")], "a blocked region is reported, c is restored"
    stage.answer("b", outcome="partial", exit_code=10)
    stage.answer("c", "compact", used=used(0.5))
    stage.turn(3600)
    assert ("a", "merge") in stage.in_flight, "and after an hour it has its turn"


def test_retention_is_not_delayed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED.replace("max_fragments: 100", "max_bytes_held: 1GiB"))
    spend(stage, "a", 990.0)
    stage.see("c", bytes_held=float(2 << 30), deletable_versions=3.0)
    stage.turn()
    assert ("c", "expire") in stage.in_flight
    assert (
        stage.history.runs(job="expire")[0]["why"] == "objective max_bytes_held: 2,147,483,648, at most 1,073,741,824"
    )


def test_the_budget_survives_a_restart(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED)
    spend(stage, "a", 95.0)
    by_hand = {"uri": "/a", "job": "merge", "started": stage.clock.now(), "finished": stage.clock.now()}
    stage.history.add(**by_hand, outcome="succeeded", used=used(1000.0))
    assert stage.history.runs(limit=1)[0]["supervisor"] == BY_HAND
    again = Stage(tmp_path, LIMITED, seconds=60)
    again.due("a")
    again.turn()
    assert again.job("a")["waiting_for"] == "over_budget"
    shown = budget_status(again.scheduler)
    assert shown is not None
    assert shown["used"] == {"cpu": 95.0}, "what was run by hand is not the service's"
    assert shown["frees"] == (START + timedelta(hours=1)).isoformat(timespec="seconds")
    without = Stage(tmp_path, PLAIN, seconds=60)
    without.due("a")
    without.turn()
    assert without.in_flight == [("a", "merge")]
    assert budget_status(without.scheduler) is None


def test_someone_who_asks_is_not_delayed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED)
    spend(stage, "a", 990.0)
    stage.due("a")
    stage.turn()
    stage.scheduler.tables["a"].entries["merge"].at_once = True
    stage.scheduler.touch("a")
    stage.turn(1)
    assert stage.in_flight == [("a", "merge")]


def test_what_is_in_flight_counts(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "pools: {merge: {workers: 3}}\n" + LIMITED)
    for name in "abc":
        spend(stage, name, 40.0)
        stage.turn(3600)
    for name in "abc":
        stage.due(name)
    stage.turn()
    assert len(stage.in_flight) == 2, "they are expected to use 80 s of 100 s, a third one does not fit"
    assert [stage.job(name)["waiting_for"] for name in "abc"].count("over_budget") == 1


def test_a_shadow_only_records(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED.replace("per: 1h", "per: 1h, shadow: true"))
    spend(stage, "a", 95.0)
    for name, rows in (("a", 1.0), ("b", 1e6)):
        stage.see(name, rows=rows)
    for name in "ab":
        stage.due(name)
        stage.clock.seconds += 1
    stage.turn()
    assert stage.in_flight == [("a", "merge")], "it has waited longest"
    assert stage.history.runs(limit=1)[0]["plan"]["shadow"] == {"would": "over_budget"}
    stage.answer("a", used=used(500.0))
    shown = budget_status(stage.scheduler)
    assert shown is not None
    assert shown["used"] == {"cpu": 95.0}, "it would not have been run"
    (tmp_path / "other").mkdir()
    other = Stage(tmp_path / "other", "budget: {shadow: true}\n" + PLAIN)
    for name, rows in (("a", 1.0), ("b", 1e6)):
        other.see(name, rows=rows)
    for name in "ab":
        other.due(name)
        other.clock.seconds += 1
    other.turn()
    plan = other.history.runs(limit=1)[0]["plan"]
    assert plan["shadow"] == {"would": "run_other", "table": "b", "job": "merge"}
    assert json.dumps(plan)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "at least one of cpu"),
        ("{money: 5 EUR}", "one currency"),
        ("{money: none}", "5 USD"),
        ("{requests: many}", "2M"),
        ("{requests: 0}", "greater than 0"),
        ("{cpu: 4}", "unit"),
        ("{bytes: 4GiB}", "bytes"),
    ],
)
def test_a_wrong_budget_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        Stage(tmp_path, f"budget: {text}\n{PLAIN}")
    assert says in str(refused.value), str(refused.value)


def test_the_limits_of_a_file(tmp_path: Path) -> None:
    given = "budget: {cpu: 4h, bytes_written: 500GiB, requests: 2M, money: 5 USD, per: 1d}\n"
    config = Stage(tmp_path, given + PLAIN).settings.config.budget
    assert config is not None
    assert config.limits() == {"cpu": 14_400.0, "bytes_written": 500 * 2.0**30, "requests": 2e6, "money": 5.0}


def test_polls_are_counted_by_table(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PLAIN)
    for _ in range(3):
        stage.scheduler.poll("a")
        stage.turn()
        worker, request = stage.pools.given[-1]
        answer = Result(request.id, "succeeded", figures={}, version=3, used=used(0.25))
        stage.scheduler.on_message(worker, vars_of(answer))  # type: ignore[arg-type]  # of the stage
        stage.turn()
        stage.scheduler.recorder.write_polls()
    (found,) = stage.history.polls(START)
    assert (found["table"], found["polls"], found["used"]["cpu_seconds"]) == ("a", 3, 0.75)
    assert found["used"]["requests"]["get"] == 30


def test_the_status_shows_what_the_budget_defers() -> None:
    amounts = {"limits": {"cpu": 10.0}, "used": {"cpu": 10.0}}
    budget = {"shadow": False, "used_up": "cpu", "frees": "2026-11-21T13:00:00+00:00", **amounts}
    tables = [{"jobs": {"merge": {"waiting_for": "over_budget"}, "gc": {"waiting_for": None}}}]
    assert budget_lines(budget, tables) == [
        "The budget of the fleet is used up (cpu) until 2026-11-21 13:00 UTC; it defers 1 due job."
    ]
    assert budget_lines({**budget, "used": {"cpu": 9.0}}, tables) == [
        "The next run would pass the budget of the fleet (cpu) until 2026-11-21 13:00 UTC; it defers 1 due job."
    ]
    assert budget_lines({**budget, "used_up": None}, tables) == [
        "What 1 due job would use does not fit the budget of the fleet now."
    ]
    assert budget_lines({**budget, "shadow": True}, tables) == budget_lines(None, tables) == []
    assert budget_lines({**budget, "used_up": None}, []) == []


def test_what_other_members_use_counts_and_each_shows_its_part(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED)
    spend(stage, "a", 30.0)
    now = stage.clock.now().timestamp()
    theirs = Charge(now + 60, Amounts(cpu=65.0))
    stage.scheduler.ranking.meet(Others((theirs,), Amounts(cpu=4.0), 2, now + 99), stage.clock.now())
    shown = budget_status(stage.scheduler)
    assert shown is not None
    assert (shown["used"], shown["in_flight"]) == ({"cpu": 95.0}, {"cpu": 4.0})
    assert shown["own"] == {"used": {"cpu": 30.0}, "in_flight": {"cpu": 0.0}}
    assert (shown["used_up"], shown["members"], shown["members_unread"]) == ("cpu", 3, 0)
    (text, deferred) = budget_lines(shown, [])
    assert text == "Used of the budget of 3 members per 1h: 95 s of 100 s of processor (30 s by this member)."
    assert "used up (cpu)" in deferred
    stage.due("a")
    stage.turn()
    assert stage.job("a")["waiting_for"] == "over_budget"
    stage.turn(61)
    assert stage.in_flight == [("a", "merge")], "theirs ended"


def test_a_member_that_cannot_read_the_others_has_its_part_of_what_is_left(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED)
    stage.scheduler.ranking.meet(Others((), Amounts(), 2, stage.clock.now().timestamp() + 15), stage.clock.now())
    stage.turn(20)
    spend(stage, "a", 30.0)
    shown = budget_status(stage.scheduler)
    assert shown is not None
    assert (shown["used"], shown["own"]["used"], shown["members_unread"]) == ({"cpu": 90.0}, {"cpu": 30.0}, 2)
    assert "2 other members cannot be read now" in budget_lines(shown, [])[0]
    spend(stage, "b", 3.4)
    stage.due("a")
    stage.turn()
    assert stage.job("a")["waiting_for"] == "over_budget"
    stage.scheduler.set_settings(stage.scheduler.settings)
    stage.turn()
    assert stage.job("a")["waiting_for"] == "over_budget", "and after a reload"


def test_what_is_published_is_what_is_charged(tmp_path: Path) -> None:
    stage = Stage(tmp_path, LIMITED)
    spend(stage, "a", 30.0)
    found = published_budget(stage.scheduler)
    assert found is not None
    assert (found["limits"], found["per"], found["in_flight"][0]) == ({"cpu": 100.0}, 3600.0, 0.0)
    ((left, cpu, *_),) = found["charges"]
    assert (left, cpu) == (3600.0, 30.0)
    assert published_budget(Stage(tmp_path, PLAIN).scheduler) is None


def test_what_does_not_fit_names_the_limit_that_it_would_pass(tmp_path: Path) -> None:
    """A small budget deferred nearly all, and the status said neither which limit nor until when."""
    stage = Stage(tmp_path, LIMITED.replace("cpu: 100s", "requests: 40"))
    spend(stage, "a", 1.0)
    assert stage.in_flight == []
    stage.see("b", due_fragments=90.0, urgent_fragments=9.0)
    stage.due("b", "compact")
    stage.turn()
    status = stage.job("b", "compact")
    assert (status["waiting_for"], status["limit"]) == ("over_budget", "requests")
    shown = budget_status(stage.scheduler)
    assert shown is not None
    assert (shown["used"]["requests"], shown["limits"]["requests"]) == (10, 40), "it is not reached"
    assert shown["used_up"] == "requests"
    assert shown["frees"] == (START + timedelta(hours=1)).isoformat(timespec="seconds")
    assert "would pass the budget of the fleet (requests)" in budget_lines(shown, [{"jobs": {"compact": status}}])[-1]
    stage.turn(3601)
    assert stage.in_flight == [("b", "compact")], "any run fits where nothing was used"
