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
        found.polls.labels(name, "failed").inc()
    for place, value in enumerate(VALUES):
        found.runs.labels("a", "merge", str(place))._value.set(value)
    return found


def test_it_is_that_of_the_library(metrics: Metrics) -> None:
    assert metrics.expose().decode() == generate_latest(metrics.registry).decode()


def test_unprintable_characters_are_escaped(metrics: Metrics) -> None:
    metrics.run_seconds.labels("a\x1bb").observe(1)
    metrics.polls.labels("a\u202eb\nc", "failed").inc()
    text = metrics.expose().decode()
    assert r'job="a\\x1bb"' in text
    assert r'table="a\\u202eb\nc"' in text
