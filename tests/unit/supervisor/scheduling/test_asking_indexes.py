"""The supervisor asks indexes once a day by default: with which options, after what, and again when one was fixed."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.observe.status import status_of
from memwal_ops.supervisor.scheduling.forecast import forecast
from memwal_ops.supervisor.state.pauses import Pauses
from tests.support.fakes import START, Stage

if TYPE_CHECKING:
    from pathlib import Path

HOUR = 3600.0
TABLES = "tables: [{uri: /a, format: lance}, {uri: /b, format: lance}]\n"
BUILD = "defaults: {jobs: {merge: {enabled: false}, snapshot: {enabled: false}}}\n"


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ("", {"answers_only": True}),
        ("merge: {schedule: 1h}", {"answers_only": True}),
        ("verify: {}", {"answers": True}),
        ("verify: {windows: ['22:00-06:00']}", {"answers": True}),
        ("verify: {options: {max_bytes: 1GiB}}", {"answers": True, "max_bytes": "1GiB"}),
        ("verify: {options: {answers: false}}", {"answers": False}),
        ("verify: {options: {answers_only: true}}", {"answers": True, "answers_only": True}),
        ("verify: {options: {deep: true}}", {"answers": True, "deep": True}),
    ],
)
def test_the_options_where_the_file_names_the_job_and_where_not(
    tmp_path: Path, jobs: str, expected: dict[str, Any]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"defaults: {{jobs: {{{jobs}}}}}\n{TABLES}")
    for name in ("lance", "zeppelin", "lm_diskann"):
        verify = load_settings(str(file), {}).tables[0].by_format.get(name, {}).get("verify")
        if verify is None:
            continue
        assert verify.enabled
        assert verify.options == expected
        only = "answers_only" in expected
        assert verify.job.options.read(verify.options).checks_all is not only  # type: ignore[attr-defined]
        assert verify.schedule is not None
        assert verify.schedule.every == timedelta(days=1)
    file.write_text(f"defaults: {{jobs: {{verify: {{enabled: false}}}}}}\n{TABLES}")
    assert not load_settings(str(file), {}).tables[0].jobs["verify"].enabled


def test_it_waits_for_what_changes_tables_and_not_for_ever(tmp_path: Path) -> None:
    stage = Stage(tmp_path, BUILD + TABLES)
    for entry in stage.scheduler.entries():
        entry.started = START
    stage.due("a", "verify")
    stage.turn()
    stage.due("b", "verify")
    assert stage.in_flight == [("a", "verify")], "of one worker"
    stage.turn(HOUR)
    stage.due("a", "catchup")
    stage.answer("a", "verify")
    assert stage.in_flight == [("a", "catchup")], "although the other verification has waited longer"
    stage.turn(24 * HOUR)
    stage.due("b", "catchup")
    stage.answer("a", "catchup")
    assert stage.in_flight == [("b", "verify")], "a day later it has waited long enough"


def report(wrong: int, version: int) -> dict[str, Any]:
    entry = {"index": "n", "type": "BTree", "queries": 62, "wrong": wrong, "recall": None, "findings": []}
    return {"decision": "findings" if wrong else "healthy", "version": version, "seed": version, "answers": [entry]}


def test_an_index_that_answered_badly_is_asked_again_when_the_table_was_written(tmp_path: Path) -> None:
    stage = Stage(tmp_path, BUILD + TABLES)

    def asked(wrong: int, version: int) -> None:
        stage.due("a", "verify")
        stage.turn()
        outcome, code = ("partial", 9) if wrong else ("succeeded", 0)
        stage.answer("a", "verify", outcome=outcome, exit_code=code, report=report(wrong, version))

    asked(1, 3)
    [entry] = stage.scheduler.tables["a"].entries["verify"].answers
    assert (entry["wrong"], entry["asked_version"]) == (1, 3)
    stage.turn(2 * HOUR)
    stage.see("a")  # the fakes' tables are at version 3
    assert stage.in_flight == [], "nothing was written since"
    asked(1, 2)
    stage.see("a")
    assert stage.in_flight == [], "not at every write"
    stage.turn(HOUR)
    stage.see("a")
    assert stage.in_flight == [("a", "verify")]
    assert stage.job("a", "verify")["why"] == "answers"
    stage.answer("a", "verify", report=report(0, 3))
    stage.turn(2 * HOUR)
    stage.see("a")
    assert stage.in_flight == []


def fallen(built: timedelta, trained: float = 0.95, appended: float = 0.6, **changes: Any) -> dict[str, Any]:
    entry = {**report(0, 3)["answers"][0], "index": "v", "type": "IVF_PQ", "recall": 0.8}
    entry |= {"built_rows_recall": trained, "appended_rows_recall": appended, "built_at": (START - built).isoformat()}
    return {**report(0, 3), "answers": [{**entry, **changes}]}


OLD = timedelta(days=9)


@pytest.mark.parametrize(
    ("found", "options", "expected"),
    [
        (fallen(OLD), "{}", {"retrain": "auto"}),
        (fallen(OLD), "{max_segments: 4}", {"max_segments": 4, "retrain": "auto"}),
        (fallen(OLD), "{retrain: never}", None),
        (fallen(timedelta(days=3)), "{}", None),
        (fallen(OLD, built_at=None), "{}", None),
        (fallen(OLD, appended=0.91), "{}", None),
        (fallen(OLD, appended=None), "{}", None),
    ],
    ids=["fell", "with other options", "refused by the file", "built this week", "built unknown", "hardly", "unknown"],
)
def test_an_index_whose_recall_fell_may_be_trained_anew_once(
    tmp_path: Path, found: dict[str, Any], options: str, expected: dict[str, Any] | None
) -> None:
    """At most once a week, by one run for each verification, which the plan names before."""
    jobs = f"{{merge: {{enabled: false}}, snapshot: {{enabled: false}}, catchup: {{options: {options}}}}}"
    stage = Stage(tmp_path, f"defaults: {{jobs: {jobs}}}\ntables: [{{uri: /a, format: lance}}]\n")
    stage.due("a", "catchup")
    stage.turn()
    assert "retrain" not in stage.request("a", "catchup")[1].options or expected is None
    stage.answer("a", "catchup")
    stage.turn(HOUR)
    stage.due("a", "verify")
    stage.turn()
    stage.answer("a", "verify", report=found)
    stage.see("a")
    assert (("a", "catchup") in stage.in_flight) == (expected is not None)
    if expected is None:
        return
    assert stage.request("a", "catchup")[1].options == expected
    assert stage.job("a", "catchup")["why"] == "answers: recall of v fell from 0.95 to 0.60"
    stage.answer("a", "catchup")
    stage.turn(HOUR)
    stage.see("a")
    assert stage.in_flight == [], "until it is asked again"
    stage.due("a", "catchup")
    stage.turn()
    assert "retrain" not in stage.request("a", "catchup")[1].options


def test_a_plan_names_the_training(tmp_path: Path) -> None:
    stage = Stage(tmp_path, BUILD + TABLES)
    stage.due("a", "verify")
    stage.turn()
    stage.answer("a", "verify", report=fallen(OLD))
    found, _ = status_of(stage.scheduler)
    planned = forecast(
        stage.settings, stage.tables(stage.settings), [*found], Pauses(str(tmp_path)), stage.history, stage.clock.now(),
        timedelta(hours=2),
    )  # fmt: skip
    [run] = [one for one in planned.jobs if (one.table, one.job) == ("a", "catchup")]
    assert (run.why, run.at is not None) == ("answers: recall of v fell from 0.95 to 0.60", True)


def test_the_last_answers_are_known_after_a_restart(tmp_path: Path) -> None:
    """Those of the newest run that asked: not of one that did not, that failed, or that only told the cost."""
    stage = Stage(tmp_path, BUILD + TABLES)
    for details in (
        {"outcome": "partial", "exit_code": 9, "report": report(2, 3)},
        {"report": {"decision": "healthy", "version": 4, "seed": None, "answers": []}},
        {"report": {**report(0, 5), "decision": "dry_run"}},
        {"outcome": "failed", "exit_code": 24},
    ):
        stage.due("a", "verify")
        stage.turn(HOUR)
        stage.answer("a", "verify", **details)  # type: ignore[arg-type]
    stage.history.close()
    again = Stage(tmp_path, BUILD + TABLES, seconds=stage.clock.seconds)
    [entry] = again.scheduler.tables["a"].entries["verify"].answers
    assert (entry["wrong"], entry["asked_version"]) == (2, 3)
    again.due("a", "verify")
    again.turn(HOUR)
    again.answer("a", "verify", report={"decision": "healthy", "version": 6, "seed": 6, "answers": []})
    assert again.scheduler.tables["a"].entries["verify"].answers == [], "all its indexes were dropped"
