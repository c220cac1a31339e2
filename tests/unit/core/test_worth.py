"""What a run is worth: its savings by its cost, by what past runs achieved, and the objective that it restores."""

from __future__ import annotations

from typing import Any

from memwal_ops.core.cost import Spent
from memwal_ops.core.worth import expected_amounts, missed_objective, worth_of
from memwal_ops.formats.lance.specs import CATCHUP, COMPACT, EXPIRE, MERGE, SNAPSHOT

USED: dict[str, Any] = {"store": "local", "requests": {"get": 10}, "cpu_seconds": 1.0}


def test_more_debt_is_worth_more_and_a_dearer_run_less() -> None:
    few, many = (worth_of(COMPACT, {"due_fragments": number, "debt": 0.0}, ()) for number in (4.0, 40.0))
    dear = worth_of(COMPACT, {"due_fragments": 40.0, "debt": 100e9}, ())
    assert 0 < few.ratio < many.ratio
    assert dear.saves == many.saves
    assert dear.ratio < many.ratio
    assert worth_of(COMPACT, {"due_fragments": 4.0}, (), weight=20).ratio > many.ratio


def test_a_first_run_on_many_parts_is_not_expected_to_be_cheap() -> None:
    """Of a budget of 40 requests, runs with 300 fragments were expected to use 50 each."""
    few, many = (expected_amounts(COMPACT, {"due_fragments": number, "debt": 9000.0}, ()) for number in (0.0, 300.0))
    assert many.requests == few.requests + 300


def test_past_runs_that_achieved_nothing_make_the_next_one_worth_less() -> None:
    figures = {"due_fragments": 40.0, "debt_rows": 10.0}
    good = worth_of(COMPACT, figures, [Spent(1.0, USED, 10, {"fragments": 3})] * 5)
    idle = worth_of(COMPACT, figures, [Spent(1.0, USED, 10)] * 5)
    assert idle.saves < good.saves / 5
    assert idle.costs == good.costs > 0, "a local store has no prices: jobs are ranked by those of S3"


def test_a_job_without_savings_is_worth_nothing() -> None:
    assert worth_of(SNAPSHOT, {"snapshot_age": 99.0}, ()).ratio == 0


def test_what_was_not_counted_saves_nothing_that_is_known() -> None:
    known = worth_of(MERGE, dict.fromkeys((save.metric for save in MERGE.saves), 1e6), ())
    assert known.to_json()["saves_daily"] > 0
    assert worth_of(MERGE, {}, ()).to_json() | {"costs": 0} == {
        "saves_daily": None, "costs": 0, "weight": 1.0, "ratio": None, "missed": None,
    }  # fmt: skip


def test_objectives_belong_to_the_job_that_restores_them() -> None:
    figures = {"oldest_age": 700.0, "fragments": 3.0, "uncovered_rows": 5.0, "bytes_held": 9.0}
    limits = {"max_backlog_age": 600.0, "max_fragments": 3.0, "max_unindexed_rows": 4.0, "max_bytes_held": 8.0}
    found = {spec.name: missed_objective(spec, figures, limits) for spec in (MERGE, COMPACT, CATCHUP, EXPIRE)}  # type: ignore[arg-type]  # plain names
    assert {name: one and one.objective for name, one in found.items()} == {
        "merge": "max_backlog_age",
        "compact": None,
        "catchup": "max_unindexed_rows",
        "expire": "max_bytes_held",
    }
    assert missed_objective(MERGE, {}, {"max_backlog_age": 1.0}) is None, "not known is not missed"


def test_what_past_runs_achieved_of_what_was_due_goes_into_the_next_ranking() -> None:
    figures = {"due_fragments": 40.0}
    half = Spent(1.0, {**USED, "debt": {"fragments": 40.0}}, 10, {"fragments": 20.0, "rows_rewritten": 9.0})
    whole = Spent(1.0, {**USED, "debt": {"fragments": 40.0}}, 10, {"fragments": 60.0})
    one, other = (worth_of(COMPACT, figures, [run] * 9).saves for run in (half, whole))
    assert one == 0.55 * other, "nine runs, and one that is taken to achieve all"
