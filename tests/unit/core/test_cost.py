"""What the next run costs: by past runs of comparable work, with the error that this had about these."""

from __future__ import annotations

import random
from typing import Any

import pytest

from memwal_ops.core.cost import (
    LIST_PRICES,
    Prices,
    Spent,
    describe_cost,
    expected_cost,
    money_of,
    money_text,
    relative_error,
    spent_by,
)
from memwal_ops.core.past_runs import PastRun


def used(gets: int = 100, puts: int = 10, read: int = 0, store: str = "s3", **more: Any) -> dict[str, Any]:
    requests = {"get": gets, "put": puts, "list": 0, "delete": 0}
    base = {"store": store, "requests": requests, "bytes_read": read, "bytes_written": 0, "cpu_seconds": 1.0}
    return {**base, "peak_memory": 1, **more}


def test_money_is_of_requests_bytes_and_processor() -> None:
    assert money_of(used(1000, 1000), LIST_PRICES) == pytest.approx(0.0054)
    assert money_of(used(store="local"), LIST_PRICES) == 0
    mine = {"s3": Prices(read=0.5, cpu=3600.0)}
    assert money_of(used(read=2 << 30), mine) == pytest.approx(1.0 + 1.0)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "$0.00"), (1.2, "$1.20"), (0.0042, "$0.0042"), (1234.5, "$1,234.50"), (0.0000001, "$0.00")],
)
def test_money_as_text(amount: float, text: str) -> None:
    assert money_text(amount) == text
    assert money_text(amount, "EUR") == f"{text[1:]} EUR"


def test_without_a_past_run_that_recorded_it_nothing_is_known() -> None:
    assert expected_cost(()) is None
    assert spent_by("merge", [PastRun(1.0, {})]) == ()


def test_runs_of_different_sizes_show_a_fixed_part_and_one_by_work() -> None:
    past = [Spent(2 + rows / 100, used(20 + rows // 10), rows) for rows in (100, 300, 500, 1000)]
    found = expected_cost(past, 2000)
    assert found is not None
    assert (found.requests["get"], found.seconds) == (pytest.approx(220), pytest.approx(22))
    assert found.requests["put"] == 10
    assert found.runs == 4


def test_runs_that_did_nothing_do_not_show_what_one_costs_that_acts() -> None:
    past = [Spent(0.1, used(2, 0), 0), Spent(10.0, used(100, 10), 50), Spent(0.1, used(2, 0), 0)]
    found = expected_cost(past, 50)
    assert found is not None
    assert (found.requests["get"], found.runs) == (100, 1)
    idle = expected_cost(past, 0)
    assert idle is not None
    assert idle.requests["get"] == 2


def test_after_ten_runs_the_estimate_is_within_thirty_percent_in_the_median() -> None:
    """A job with a fixed part, a part by work, and noise of 15 %."""
    seeds = range(20)
    errors = []
    for seed in seeds:
        draw = random.Random(seed)

        def run(draw: random.Random = draw) -> Spent:
            rows = draw.lognormvariate(8, 1)
            requests = (40 + rows / 50) * draw.gauss(1, 0.15)
            return Spent(rows / 1000, used(int(requests), 5), rows)

        past = [run() for _ in range(10)]
        one = run()
        found = expected_cost(past, one.work)
        assert found is not None
        errors.append(relative_error(found.money, money_of(one.used, LIST_PRICES)))
    assert sorted(errors)[len(errors) // 2] < 0.3, f"seeds {seeds}: {errors}"


def test_the_error_is_that_about_the_past_runs() -> None:
    steady = [Spent(1.0, used(), 10) for _ in range(5)]
    found = expected_cost(steady, 10)
    assert found is not None
    assert found.error == 0
    doubled = [Spent(1.0, used(200, 20), 10), *steady]
    worse = expected_cost(doubled, 10)
    assert worse is not None
    assert worse.error == 0, "one of five, in the median"
    assert expected_cost(steady[:1], 10).error is None  # type: ignore[union-attr]  # it is known


def test_words() -> None:
    past = [Spent(40.0, used(3000, 100, 4 << 30), 10) for _ in range(12)]
    found = expected_cost(past, 10)
    assert found is not None
    text = describe_cost(found.to_json())
    assert text == (
        "about 3,100 requests, 4.0 GiB, $0.0017, 40 s, by the last 12 runs, whose own cost this tells within 0%"
    )
    one = expected_cost(past[:1], 10)
    assert one is not None
    assert describe_cost(one.to_json()).endswith("40 s, by the last run")
