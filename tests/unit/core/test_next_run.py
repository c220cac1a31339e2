"""What the next run of a job costs, by its metrics and by past runs."""

from __future__ import annotations

import pytest

from memwal_ops.core.job import JobSpec
from memwal_ops.core.outlook import MAX_RATES, NextRun, describe_next_run, next_run, rates_of
from memwal_ops.core.past_runs import PastRun
from memwal_ops.formats.lance.specs import CATCHUP, COMPACT, MERGE

DUE = {"due_fragments": 4.0, "debt": 4e6, "debt_read": 5e6, "debt_rows": 1000.0, "fragments": 9.0}


def test_a_run_takes_as_long_as_the_last_comparable_one() -> None:
    rates = [(0.1, 10.0), (6.0, 3000.0), (100.0, 1000.0)]
    found = next_run(COMPACT, DUE, rates)
    assert found == NextRun(4_000_000, 5_000_000, 4_000_000, 2.0)
    assert describe_next_run(found.to_json()) == "reads 4.8 MiB and writes 3.8 MiB (about 2 s)"


@pytest.mark.parametrize("rates", [[], [(0.1, 10.0)], [(1.0, 0.0)]])
def test_without_a_comparable_run_the_time_is_unknown(rates: list[tuple[float, float]]) -> None:
    found = next_run(COMPACT, DUE, rates)
    assert found is not None
    assert found.seconds is None
    assert describe_next_run(found.to_json()).endswith("(time unknown: there is no past run to compare with)")


def test_where_nothing_is_due_the_reason_is_told() -> None:
    figures = {**DUE, "due_fragments": 0.0}
    found = next_run(COMPACT, figures, [])
    assert found is not None
    assert found.to_json() == {
        "debt": 0, "bytes_read": 0, "bytes_written": 0, "seconds": None,
        "why": "No fragments are to be joined by their sizes, and none has too many deleted rows.",
    }  # fmt: skip
    assert describe_next_run(found.to_json()).startswith("nothing is due: No fragments")
    better = next_run(COMPACT, figures, [], "For this reason.")
    assert better is not None
    assert better.why == "For this reason."


def test_what_is_not_known_is_none() -> None:
    assert next_run(COMPACT, {"fragments": 9.0}, []) is None
    assert next_run(MERGE, {"generations": 9.0}, []) is None


def test_the_rates_of_past_runs_are_of_those_that_wrote() -> None:
    compacted = [PastRun(3.0, {"rows_rewritten": 900}), PastRun(1.0, {"rows_rewritten": 0}), PastRun(1.0, {})]
    assert rates_of("compact", compacted) == ((3.0, 900.0),)
    indexes = [{"decision": "updated", "uncovered_rows": 700}, {"decision": "failed", "uncovered_rows": 9}]
    assert rates_of("catchup", [PastRun(2.0, {"indexes": indexes})]) == ((2.0, 700.0),)
    assert len(rates_of("compact", compacted * 20)) == MAX_RATES


@pytest.mark.parametrize("spec", [COMPACT, CATCHUP])
def test_the_metrics_of_a_debt_are_declared(spec: JobSpec) -> None:
    debt = spec.debt
    assert debt is not None
    names = {debt.due, debt.rows, debt.bytes_written, debt.bytes_read, *([debt.checks] if debt.checks else [])}
    assert names <= spec.backlog_metrics.keys()
