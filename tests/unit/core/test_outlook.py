"""How long maintenance takes, by past runs that compare or by an estimate, and until when it needs more space."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops.core.outlook import Outlook, Step, Work, describe_outlooks, outlook_on
from memwal_ops.core.past_runs import PastRun, no_past_runs
from memwal_ops.core.report import Need
from memwal_ops.formats.lance.options import ExpireOptions, GcOptions, MaintainOptions
from memwal_ops.formats.lance.specs import EXPIRE, GC

CATCHUP = {"indexes": [{"decision": "updated", "uncovered_rows": 700}, {"decision": "failed", "uncovered_rows": 9}]}


class Estimating:
    """A format that estimates one second and 50 bytes for everything."""

    def work_of(self, table: Any, need: Need) -> Work:
        del table, need
        return Work(1.0, 50)


def table(form: Any = None) -> Any:
    place = SimpleNamespace(address="/t.lance")
    return SimpleNamespace(format=form or Estimating(), location=place, jobs={"expire": EXPIRE, "gc": GC})


@pytest.mark.parametrize(
    ("need", "report", "seconds"),
    [
        (Need("merge", "", rows=300), {"passes": [{"rows_read": 100}, {"rows_read": 50}, {"rows_read": None}]}, 20.0),
        (Need("catchup", "", rows=1400), CATCHUP, 20.0),
        (Need("compact", "", rows=50), {"rows_rewritten": 500}, 1.0),
        (Need("expire", "", frees=40), {"bytes": 20}, 20.0),
        (Need("gc", "", frees=40), {"deleted": {"bytes": 40}}, 10.0),
    ],
    ids=lambda one: one.job if isinstance(one, Need) else "",
)
def test_by_the_rate_of_the_last_run(need: Need, report: dict[str, Any], seconds: float) -> None:
    found = outlook_on(
        table(), [need], lambda uri, job: [PastRun(10.0, report)] if (uri, job) == ("/t.lance", need.job) else []
    )
    assert (found.seconds, found.basis) == (pytest.approx(seconds), "last_run")


def test_a_run_that_did_hardly_anything_shows_no_rate() -> None:
    """The runs before it may; if none does, it is an estimate."""
    runs = [
        PastRun(3.0, {"rows_rewritten": 1}),
        PastRun(8.0, {"rows_rewritten": 2000}),
        PastRun(1.0, {"rows_rewritten": 4000}),
    ]
    need = Need("compact", "", rows=1000)
    assert outlook_on(table(), [need], lambda *_: runs).seconds == 4.0
    short = outlook_on(table(), [need], lambda *_: runs[:1])
    assert (short.seconds, short.basis) == (1.0, "estimate")


def test_a_report_that_the_history_has_in_part_shows_no_rate() -> None:
    """Its lists are cut: the run did more than they say."""
    run = PastRun(10.0, {**CATCHUP, "truncated": True})
    assert outlook_on(table(), [Need("catchup", "", rows=700)], lambda *_: [run]).basis == "estimate"


def test_steps_of_both_kinds_are_mixed_and_add_up() -> None:
    needs = [Need("compact", "", rows=10), Need("snapshot", ""), Need("expire", "", now=False)]
    found = outlook_on(
        table(), needs, lambda _, job: [PastRun(5.0, {"rows_rewritten": 10})] if job == "compact" else []
    )
    assert [(step.job, step.basis) for step in found.steps] == [("compact", "last_run"), ("snapshot", "estimate")]
    assert (found.seconds, found.basis, found.adds) == (6.0, "mixed", 100)


def test_a_format_that_estimates_nothing() -> None:
    """And promises nothing: what is said of writers beside its jobs is the format's to say."""
    found = outlook_on(table(object()), [Need("merge", "", rows=5)], no_past_runs)
    assert found.to_json() == {
        "seconds": None, "basis": None, "bytes": 0, "until": None,
        "steps": [{"job": "merge", "seconds": None, "basis": None, "bytes": 0}],
    }  # fmt: skip
    assert describe_outlooks([found]) == ""
    assert describe_outlooks([Outlook()]) == ""


def test_space_is_needed_until_what_was_replaced_is_old_enough() -> None:
    """By the options of the job that deletes it; a merge's generations are gc's."""
    options = MaintainOptions(expire=ExpireOptions(older_than=timedelta(days=3)), gc=GcOptions())
    short = outlook_on(table(), [Need("compact", "")], no_past_runs, options)
    assert short.kept == timedelta(days=3)
    until = datetime.fromisoformat(short.to_json()["until"])
    assert abs(until - datetime.now(UTC) - timedelta(days=3)) < timedelta(minutes=5)
    assert outlook_on(table(), [Need("compact", "")], no_past_runs).kept == ExpireOptions().older_than
    assert outlook_on(table(), [Need("merge", ""), Need("compact", "")], no_past_runs).kept == GcOptions().drain_after


def test_the_text_sums_up_all_tables() -> None:
    one = Outlook((Step("compact", 70.0, "last_run", 1 << 20),), timedelta(days=7))
    other = Outlook((Step("catchup", 90.0, "last_run", 2 << 20),), timedelta(days=1))
    told = " ".join(describe_outlooks([one, other, Outlook()]).split())
    assert "about 2 min (by the rate of the last runs)" in told
    assert f"up to 3.0 MiB more space until {datetime.now(UTC) + timedelta(days=7):%Y-%m-%d}" in told
