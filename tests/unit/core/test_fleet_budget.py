"""The budget of a fleet: what it refuses, when it does no more, and what it is charged for."""

from __future__ import annotations

import random

import pytest

from memwal_ops.core.fleet_budget import Amounts, FleetBudget, amounts_of

DAY = 86_400.0


def test_no_limits_refuse_nothing() -> None:
    budget = FleetBudget({}, DAY)
    budget.add(0.0, Amounts(1e9, 1e9, 1e9, 1e9))
    assert budget.refuses(0.0) is None


def test_a_limit_that_is_reached_refuses_until_runs_are_long_ago() -> None:
    budget = FleetBudget({"cpu": 10.0, "requests": 100.0}, DAY)
    budget.add(0.0, Amounts(cpu=6.0, requests=1.0))
    assert budget.refuses(1.0) is None
    assert budget.refuses(1.0, Amounts(cpu=4.0)) == "cpu", "with what is in flight"
    budget.add(100.0, Amounts(requests=99.0))
    assert budget.refuses(101.0) == "requests"
    assert budget.frees_at(101.0) == DAY
    assert budget.refuses(DAY - 1) == "requests"
    assert budget.refuses(DAY) is None
    assert budget.used(DAY) == Amounts(requests=99.0)
    assert budget.used(3 * DAY) == Amounts()


def test_a_part_is_kept_for_objectives() -> None:
    budget = FleetBudget({"money": 10.0}, DAY, keeps=True)
    budget.add(0.0, Amounts(money=9.5))
    assert budget.refuses(1.0) == "money"
    assert budget.refuses(1.0, objective=True) is None
    budget.add(1.0, Amounts(money=2.0))
    assert budget.refuses(2.0, objective=True) is None, "others used it up"
    budget.add(2.0, Amounts(money=2.5), objective=True)
    assert budget.refuses(2.5, objective=True) is None, "half of the limit is theirs"
    budget.add(2.5, Amounts(money=2.5), objective=True)
    assert budget.refuses(3.0, objective=True) == "money"
    assert budget.refuses(DAY + 3, objective=True) is None


def test_a_run_must_fit_unless_nothing_else_was_used() -> None:
    budget = FleetBudget({"cpu": 10.0}, DAY)
    assert budget.refuses(0.0, own=Amounts(cpu=99.0)) is None
    budget.add(0.0, Amounts(cpu=2.0))
    assert budget.refuses(1.0, own=Amounts(cpu=8.0)) is None
    assert budget.refuses(1.0, own=Amounts(cpu=8.1)) == "cpu"
    assert budget.refuses(1.0) is None, "unless it has waited longest"
    assert budget.frees_at(1.0, Amounts(cpu=8.1)) == DAY


def test_what_exceeds_a_limit_is_charged_for_longer() -> None:
    """In the long run, no more is used than the limits allow, however large the runs are."""
    chance = random.Random(43)
    budget, used, now, end = FleetBudget({"cpu": 10.0}, DAY), 0.0, 0.0, 400 * DAY
    while now < end:
        if budget.refuses(now) is None:
            cpu = chance.choice([0.5, 9.0, 35.0])
            budget.add(now, Amounts(cpu=cpu))
            used += cpu
        else:
            assert budget.frees_at(now) > now
            now = budget.frees_at(now)
            assert budget.refuses(now) is None
        now += 60.0
    assert used <= 10.0 * 400 + 35.0 + 10.0


@pytest.mark.parametrize("used", [None, {}])
def test_a_run_that_recorded_nothing_costs_nothing(used: dict[str, float] | None) -> None:
    assert amounts_of(used, 0.0) == Amounts()


def test_the_amounts_of_a_run_and_of_an_estimate() -> None:
    used = {"cpu_seconds": 2.0, "bytes_written": 3, "requests": {"get": 4, "put": 1}, "money": 0.5}
    assert amounts_of(used) == Amounts(2.0, 3.0, 5.0, 0.5)
    assert amounts_of(used, 7.0) == Amounts(2.0, 3.0, 5.0, 7.0)
