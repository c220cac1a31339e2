"""Compaction and catch-up follow what is due by their policies; what a file says of them holds as it did."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.cli.status import describe
from memwal_ops.errors import AnswersWorseError
from memwal_ops.supervisor.observe.findings import job_findings
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import START, Stage, vars_of
from tests.support.fleet import job, pages_of, status, table

HOUR = 3600.0
NOTHING = {"due_fragments": 0.0, "urgent_fragments": 0.0, "unchecked_segments": 0.0, "debt": 0.0, "fragments": 3.0}
LITTLE = {**NOTHING, "due_fragments": 2.0, "debt": 9000.0}
MUCH = {**NOTHING, "due_fragments": 4.0, "urgent_fragments": 4.0, "debt": 4e6}


def staged(folder: Path, compact: str = "{}", *, once: bool = False) -> Stage:
    others = ", ".join(f"{name}: {{enabled: false}}" for name in ("merge", "catchup", "snapshot", "verify"))
    text = f"defaults: {{jobs: {{{others}, compact: {compact}}}}}\ntables: [{{uri: /a}}]\n"
    stage = Stage(folder, text, once=once)
    stage.scheduler.tables["a"].entries["compact"].started = START  # it ran before
    return stage


def test_a_debt_does_not_wait_for_the_clock(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    stage.see("a", **NOTHING)
    assert stage.in_flight == []
    stage.see("a", **LITTLE)
    assert stage.in_flight == [], "a run costs more than it saves"
    stage.see("a", **MUCH)
    assert stage.in_flight == [("a", "compact")]
    assert stage.job("a", "compact")["why"] == "when: urgent_fragments > 0"


@pytest.mark.parametrize(
    ("figures", "runs"),
    [
        (NOTHING, False),
        (LITTLE, True),
        pytest.param({**NOTHING, "unchecked_segments": 1.0}, True, id="indexes to check"),
        pytest.param({"fragments": 3.0}, True, id="what is due is not known"),
    ],
)
def test_by_the_clock_only_what_is_due_runs(tmp_path: Path, figures: dict[str, float], *, runs: bool) -> None:
    """And no poll is requested for that: the next one of the timer decides."""
    stage = staged(tmp_path)
    stage.see("a", **figures)
    asked = len(stage.pools.given)
    stage.clock.seconds += 6 * HOUR
    stage.scheduler.on_schedule("a", "compact")
    stage.turn()
    assert len(stage.pools.given) == asked
    assert stage.in_flight == []
    stage.see("a", **figures)
    assert stage.in_flight == ([("a", "compact")] if runs else [])
    found = stage.job("a", "compact")
    if not runs:
        assert stage.metrics.registry.get_sample_value(
            "memwal_ops_skipped_total", {"table": "a", "job": "compact", "why": "not_due"}
        )
        assert found["last_success"] == found["last_started"], "it counts as a success: it is not late"


@pytest.mark.parametrize(
    ("figures", "runs"),
    [
        ({"indexes_behind": 2.0, "indexes_due": 0.0, "merged_regions": 0.0}, False),
        ({"indexes_behind": 2.0, "indexes_due": 1.0, "merged_regions": 0.0}, True),
        pytest.param({"indexes_behind": 0.0, "indexes_due": 0.0, "merged_regions": 1.0}, True, id="records progress"),
    ],
)
def test_the_clock_leaves_indexes_that_lack_little(tmp_path: Path, figures: dict[str, float], *, runs: bool) -> None:
    others = ", ".join(f"{name}: {{enabled: false}}" for name in ("merge", "compact", "snapshot", "verify"))
    stage = Stage(tmp_path, f"defaults: {{jobs: {{{others}}}}}\ntables: [{{uri: /a}}]\n")
    stage.scheduler.tables["a"].entries["catchup"].started = START
    stage.see("a", **figures)
    stage.clock.seconds += HOUR
    stage.scheduler.on_schedule("a", "catchup")
    stage.turn()
    stage.see("a", **figures)
    assert stage.in_flight == ([("a", "catchup")] if runs else [])


def test_a_poll_that_fails_shows_nothing(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    stage.see("a", **NOTHING)
    stage.scheduler.on_schedule("a", "compact")
    stage.scheduler.poll("a")
    stage.turn()
    worker, request = stage.pools.given[-1]
    failed: Any = {**vars_of(Result(request.id, "failed", exit_code=20)), "message": "no answer"}
    stage.scheduler.on_message(worker, failed)
    stage.turn()
    assert stage.in_flight == [("a", "compact")], "its run reports the fault"


@pytest.mark.parametrize("compact", ["{schedule: 6h}", "{schedule: '0 3 * * *', when: null}", "{when: fragments > 99}"])
def test_a_schedule_of_the_file_runs_as_before(tmp_path: Path, compact: str) -> None:
    stage = staged(tmp_path, compact)
    stage.see("a", **MUCH)
    assert stage.in_flight == [], "and nothing else runs it"
    stage.see("a", **NOTHING)
    stage.scheduler.on_schedule("a", "compact")
    stage.turn()
    assert stage.in_flight == [("a", "compact")]


def test_a_trigger_of_the_file_replaces_the_default(tmp_path: Path) -> None:
    stage = staged(tmp_path, "{when: small_fragments >= 100}")
    stage.see("a", **MUCH, small_fragments=99.0)
    assert stage.in_flight == []
    stage.see("a", **NOTHING, small_fragments=100.0)
    assert stage.in_flight == [("a", "compact")]


def test_the_triggers_of_the_policies_are_the_defaults_of_a_file_that_has_none(tmp_path: Path) -> None:
    def when(jobs: str) -> list[str | None]:
        (table,) = staged(tmp_path).load(f"tables: [{{uri: /a, jobs: {{{jobs}}}}}]").tables
        return [None if (one := table.jobs[name].when) is None else one.text for name in ("compact", "catchup")]

    assert when("") == ["urgent_fragments > 0", "indexes_urgent >= 1"]
    assert when("compact: {options: {max_bytes: 1GiB}}") == ["urgent_fragments > 0", "indexes_urgent >= 1"]
    assert when("compact: {schedule: 1d}, catchup: {schedule: 1d}") == [None, "uncovered_rows >= 100000"], "as before"


def test_run_once_leaves_what_is_not_due(tmp_path: Path) -> None:
    for figures, expected in ((NOTHING, []), (LITTLE, [("a", "compact")])):
        folder = tmp_path / str(len(expected))
        folder.mkdir()
        stage = staged(folder, once=True)
        stage.clock.seconds += 7 * HOUR
        stage.scheduler.queue_scheduled()
        stage.see("a", **figures)
        assert stage.in_flight == expected


@pytest.mark.parametrize("figures", [NOTHING, LITTLE])
def test_what_comes_after_a_compaction_waits_until_that_is_decided(tmp_path: Path, figures: dict[str, float]) -> None:
    """``expire`` would find nothing to delete before it, and have to come again."""
    jobs = "expire: {apply: true}, catchup: {schedule: 30m}, verify: {enabled: false}"
    text = f"defaults: {{jobs: {{{jobs}}}}}\ntables: [{{uri: /a}}]\n"
    stage = Stage(tmp_path, text, once=True)
    stage.see("a")
    stage.scheduler.queue_scheduled()
    stage.turn()
    stage.answer("a", "merge")
    stage.answer("a", "catchup")
    assert stage.in_flight == []
    stage.see("a", **figures)
    if figures is LITTLE:
        assert stage.in_flight == [("a", "compact")]
        stage.answer("a", "compact")
    stage.answer("a", "snapshot")
    assert stage.in_flight == [("a", "expire")]


def test_the_first_run_waits_for_a_poll(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    stage.scheduler.tables["a"].entries["compact"].started = None
    timers = Timers(stage.scheduler, timedelta(hours=1))
    timers.start()
    try:
        timers.sync()
        stage.turn()
        assert stage.in_flight == []
        stage.see("a", **NOTHING)
        assert stage.in_flight == []
    finally:
        timers.stop()


def test_the_figures_are_those_of_the_options_of_the_runs(tmp_path: Path) -> None:
    stage = staged(tmp_path, "{options: {target_rows: 1000}}")
    stage.see("a", **NOTHING)
    polls = [request for _, request in stage.pools.given if isinstance(request, PollRequest)]
    assert polls[-1].options == {"compact": {"target_rows": 1000}}


def test_what_a_run_could_not_do_is_not_written_again_at_each_poll(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    stage.see("a", **MUCH)
    stage.answer("a", "compact", "partial", exit_code=AnswersWorseError.exit_code)
    for fragments in range(5, 9):
        stage.turn(700)
        stage.see("a", **{**MUCH, "fragments": float(fragments)})
        assert stage.in_flight == [], "each append changes the figures"
    stage.turn(6 * HOUR)
    stage.see("a", **MUCH)
    assert stage.in_flight == [("a", "compact")]


def test_the_status_has_the_cost_of_the_next_run_and_the_reason_for_none(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    assert stage.job("a", "compact")["next_run"] is None, "nothing is known yet"
    amounts = {"debt_read": 9000.0, "debt_rows": 500.0}
    stage.see("a", **LITTLE, **amounts)
    cost = {"debt": 9000, "bytes_read": 9000, "bytes_written": 9000, "seconds": None, "why": None}
    assert stage.job("a", "compact")["next_run"] == cost
    stage.due("a", "compact")
    stage.turn()
    stage.turn(20)
    stage.answer("a", "compact", report={"rows_rewritten": 1000, "decision": "compacted"}, versions=(4,))
    assert stage.job("a", "compact")["next_run"] == {**cost, "seconds": pytest.approx(10, abs=1)}
    again = Stage(tmp_path, Path(stage.settings.path).read_text(), seconds=stage.clock.seconds)
    again.see("a", **LITTLE, **amounts)
    assert again.job("a", "compact")["next_run"] == {**cost, "seconds": pytest.approx(10, abs=1)}, "from the history"
    again.see("a", **NOTHING, debt_read=0.0, debt_rows=0.0)
    assert again.job("a", "compact")["next_run"]["why"].startswith("No fragments are to be joined")


def test_a_job_is_not_late_while_nothing_is_due() -> None:
    late = job(schedule_seconds=300.0, seconds_since_success=1e6)
    assert list(job_findings("compact", late))
    idle = {"debt": 0, "bytes_read": 0, "bytes_written": 0, "seconds": None, "why": "No fragments."}
    assert not list(job_findings("compact", {**late, "next_run": idle}))
    assert list(job_findings("compact", {**late, "next_run": {**idle, "why": None}}))
    shown = {**table("a"), "level": "ok", "error": None, "findings": []}
    names = ("ok", "warning", "critical", "generations", "rows", "unreadable", "not_read", "oldest_age")
    counts = dict.fromkeys(names, 0)
    document = {
        **dict.fromkeys(("service", "history_error")),
        "service_error": "No service responds",
        "findings": [],
        "tables": [{**shown, "jobs": {"compact": {**late, "next_run": idle}}}],
        "summary": {**counts, "tables": 1, "oldest_table": None},
    }
    text = describe(document, in_full=True)
    assert "The next compact: nothing is due: No fragments." in text


def test_the_page_of_a_table_has_the_cost_of_the_next_run() -> None:
    run = {"debt": 9 << 20, "bytes_read": 10 << 20, "bytes_written": 9 << 20, "seconds": 12.0, "why": None}
    idle = {**run, "why": "No index lacks a fragment."}
    jobs = {"compact": job(next_run=run), "catchup": job(next_run=idle), "merge": job(next_run=None), "gc": job()}
    page = pages_of(status([table("a", jobs=jobs)])).table("a").body.decode()
    assert 'compact<br><small class="soft">next: reads 10.0 MiB and writes 9.0 MiB (about 12 s)</small>' in page
    assert 'catchup<br><small class="soft">next: nothing is due: No index lacks a fragment</small>' in page
    assert page.count(">next: ") == 2
