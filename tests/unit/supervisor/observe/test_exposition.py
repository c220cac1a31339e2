"""The text of /metrics against that of Prometheus' client library."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from memwal_ops.supervisor.observe.metrics import Metrics
from memwal_ops.supervisor.observe.status import status_of
from tests.support.fakes import Stage
from tests.support.fleet import JOBS, job, table

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
    found, pools = status_of(stage.scheduler)
    tables = [*found]
    service = {"ready": True, "config": {"error": None}, "discovery_faults": [], "budget": None}
    metrics = Metrics(lambda: {"service": service, "pools": pools, "tables": tables})
    metrics.init_table("a", ["merge", "gc"])
    metrics.run_seconds.labels("merge").observe(0.7)
    for name in NAMES:
        metrics.polls.add(name, "failed")
    for place, value in enumerate(VALUES):
        metrics.runs.add("a", "merge", str(place), by=value)
    return metrics


def test_it_is_that_of_the_library(metrics: Metrics) -> None:
    assert b"".join(metrics.expose()).decode() == generate_latest(metrics.registry).decode()


def test_unprintable_characters_are_escaped(metrics: Metrics) -> None:
    metrics.run_seconds.labels("a\x1bb").observe(1)
    metrics.polls.add("a\u202eb\nc", "failed")
    text = b"".join(metrics.expose()).decode()
    assert r'job="a\\x1bb"' in text
    assert r'table="a\\u202eb\nc"' in text


def test_series_that_are_zero_take_no_memory_and_are_exposed(metrics: Metrics) -> None:
    """70 objects of the library for each table were 40 KiB."""
    for number in range(100):
        metrics.init_table(f"t{number}", [*("merge", "gc")])
    assert "t7" not in metrics.runs._values
    assert 'memwal_ops_runs_total{job="gc",outcome="failed",table="t7"} 0.0' in b"".join(metrics.expose()).decode()
    assert len({id(jobs) for name, jobs in metrics._tables.items() if name[0] == "t"}) == 1
    metrics.runs.add("t7", "gc", "failed")
    assert 'memwal_ops_runs_total{job="gc",outcome="failed",table="t7"} 1.0' in b"".join(metrics.expose()).decode()
    metrics.forget_tables({"t7"})
    assert 't7"' not in b"".join(metrics.expose()).decode()


def test_a_scrape_of_many_tables_keeps_none_of_their_documents() -> None:
    """Ten thousand tables had 560 MB of documents, rows and lines at each scrape."""
    count = 1500
    service = {"ready": True, "config": {"error": None}, "discovery_faults": [], "budget": None}

    def document() -> dict[str, Any]:
        many = (
            table(f"t{number:05}") | {"jobs": {name: job(breaker=None) for name in JOBS}} for number in range(count)
        )
        return {"service": service, "pools": {}, "tables": (one | {"expect_writes_seconds": None} for one in many)}

    metrics = Metrics(document)
    for number in range(count):
        metrics.init_table(f"t{number:05}", JOBS)
    page = b"".join(metrics.expose())
    assert page.count(b"memwal_ops_consecutive_failures{") == count * len(JOBS)
    tracemalloc.start()
    try:
        size = sum(map(len, metrics.expose()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 5000 * count
    assert peak < 1.9 * size
