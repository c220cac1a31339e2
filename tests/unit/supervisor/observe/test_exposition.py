"""The text of /metrics against that of Prometheus' client library."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest

from memwal_ops.supervisor.observe.metrics import Metrics
from memwal_ops.supervisor.observe.status import status_of
from tests.support.fakes import Stage

VALUES = (0.0, 1, 0.1, 1e6, 1234567.5, 1e21, -1e21, 1e-9, math.inf, -math.inf, math.nan, 3.0)
NAMES = ("plain", 'a "quoted" \\ name', "größe", "a b,c=d{e}", "")


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    """Of a fleet of two tables, in which something has happened, with odd labels and values."""
    stage = Stage(tmp_path, "tables: [{uri: /a}, {uri: /b}]\n")
    stage.due("a")
    stage.turn()
    stage.answer("a", outcome="succeeded", figures={"merged_rows": 5.0}, phases={"open": 0.5})
    stage.see("b", generations=3.0, oldest_generation_seconds=1234567.5)
    tables, pools = status_of(stage.scheduler)
    service = {"ready": True, "config": {"error": None}, "discovery_faults": [], "budget": None}
    found = Metrics(lambda: {"service": service, "pools": pools, "tables": tables})  # type: ignore[arg-type,typeddict-item]
    found.init_table("a", ["merge", "gc"])
    found.run_seconds.labels("merge").observe(0.7)
    for name in NAMES:
        found.polls.add(name, "failed")
    for place, value in enumerate(VALUES):
        found.runs.add("a", "merge", str(place), by=value)
    return found


def test_it_is_that_of_the_library(metrics: Metrics) -> None:
    assert metrics.expose().decode() == generate_latest(metrics.registry).decode()


def test_unprintable_characters_are_escaped(metrics: Metrics) -> None:
    metrics.run_seconds.labels("a\x1bb").observe(1)
    metrics.polls.add("a\u202eb\nc", "failed")
    text = metrics.expose().decode()
    assert r'job="a\\x1bb"' in text
    assert r'table="a\\u202eb\nc"' in text


def test_series_that_are_zero_take_no_memory_and_are_exposed(metrics: Metrics) -> None:
    """70 objects of the library for each table were 40 KiB."""
    for number in range(100):
        metrics.init_table(f"t{number}", [*("merge", "gc")])
    assert metrics.runs._values.keys().isdisjoint({("t7", "merge", "failed")})
    assert 'memwal_ops_runs_total{job="gc",outcome="failed",table="t7"} 0.0' in metrics.expose().decode()
    assert len({id(jobs) for name, jobs in metrics._tables.items() if name[0] == "t"}) == 1
    metrics.runs.add("t7", "gc", "failed")
    assert 'memwal_ops_runs_total{job="gc",outcome="failed",table="t7"} 1.0' in metrics.expose().decode()
    metrics.forget_tables({"t7"})
    assert 't7"' not in metrics.expose().decode()
