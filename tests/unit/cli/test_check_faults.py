"""What ``check --config`` and ``status`` report of tables in a status document."""

from __future__ import annotations

from typing import Any

import pytest

from memwal_ops.cli.check import CheckResult, table_faults
from memwal_ops.cli.status import _summary
from memwal_ops.supervisor.observe.findings import CRITICAL, WARNING
from tests.support import fleet

PARTIAL = "orders: the last merge could not process all: a part was blocked"


def orders(waiting: float, blocked: float = 0, **merge: Any) -> dict[str, Any]:
    return fleet.table("orders", waiting=waiting, blocked=blocked, jobs={"merge": fleet.job(**merge)})


@pytest.mark.parametrize(
    ("table", "faults"),
    [
        (orders(2), []),
        (orders(2, last_outcome="partial"), [(CRITICAL, PARTIAL)]),
        (orders(0, last_outcome="partial"), []),
        (orders(2, last_outcome="hung"), [(WARNING, "orders: the last merge hung")]),
        (orders(2, last_outcome="stopped"), []),
        (orders(2, 1, last_outcome="partial"), [(CRITICAL, "orders: 1 region blocked")]),
        (
            orders(2, last_outcome="failed", consecutive_failures=1),
            [(WARNING, "orders/merge failed 1 time in a row")],
        ),
    ],
)
def test_how_the_last_merge_ended(table: dict[str, Any], faults: list[tuple[int, str]]) -> None:
    """A run opens the files that a poll only lists, and counts while something waits."""
    assert [*table_faults(table)] == faults


def test_the_rows_of_all_are_not_known_where_those_of_one_are_not() -> None:
    known, unknown = orders(2), orders(1)
    del unknown["backlog"]["rows"]
    told = [
        _summary({"level": "ok", "error": None} | table for table in tables) for tables in ([known], [known, unknown])
    ]
    assert [(summary["generations"], summary["rows"]) for summary in told] == [(2, known["backlog"]["rows"]), (3, None)]


def test_a_figure_that_is_not_known_is_not_0() -> None:
    """The oldest generation of a region that cannot be read has an age, but not 0 s; U is Nagios's word for it."""
    result = CheckResult()
    result.compare("oldest", None, (1800, 10_800), "s")
    assert result.line("4 generations waiting") == "MEMWAL OK - 4 generations waiting | oldest=U;1800;10800"
