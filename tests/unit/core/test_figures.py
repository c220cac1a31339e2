"""Figures by what they mean: what is shown and exported of a table comes from the specs of its jobs."""

from __future__ import annotations

import pytest

from memwal_ops.core.figures import amount, exported_metrics, jobs_of, metrics_of, name_of, noun_of, shared_noun
from memwal_ops.core.job import ROLES
from memwal_ops.core.registry import job_specs

GAUGES = {
    "backlog_generations", "backlog_rows", "backlog_bytes", "backlog_oldest_seconds", "blocked_regions",
    "uncovered_rows", "fragments", "versions", "merged_generations", "snapshot_age_seconds",
}  # fmt: skip
COUNTERS = {"conflicts", "merged_bytes", "merged_rows", "collected_bytes", "collected_objects"}


def test_a_figure_is_found_by_its_role() -> None:
    look = {"rows": 9, "generations": 3, "oldest_age": 60.0, "regions_behind": 2, "blocked_regions": 1}
    assert [amount(look, role) for role in ROLES] == [3, 60.0, 2, 1]
    assert amount({"regions_blocked": 0}, "blocked", "run") == 0
    assert name_of(look, "blocked") == "blocked_regions"


def test_what_waits_is_named_as_its_format_names_it() -> None:
    lance = {"generations": 3, "rows": 9, "oldest_age": 60.0, "regions_behind": 2, "blocked_regions": 1}
    index = {"delta_blocks": 5, "delta_bytes": 70, "dirty_percent": 1}
    assert (noun_of(lance, "backlog"), noun_of(lance, "blocked")) == ("generations", "regions")
    assert (noun_of(index, "backlog"), noun_of(index, "blocked")) == ("delta blocks", "parts")
    assert shared_noun([lance, {}, lance], "backlog") == "generations"
    assert shared_noun([lance, index], "backlog") == "parts"


@pytest.mark.parametrize("role", ROLES)
def test_what_was_not_read_is_none_and_not_0(role: str) -> None:
    assert amount({"fragments": 4}, role) is None  # type: ignore[arg-type]  # a parameter is any text


def test_the_job_that_reduces_the_backlog_is_known_by_its_metrics() -> None:
    assert jobs_of("backlog") == jobs_of("blocked", "run") == ("merge",)


def test_alert_rules_find_the_names_that_they_ask_for() -> None:
    assert {one.exported for one in exported_metrics("backlog").values()} >= GAUGES
    assert {one.exported for one in exported_metrics("run").values()} >= COUNTERS


def test_a_name_that_two_formats_use_is_read_as_the_table_s_own() -> None:
    lance = {"fragments": 4, "small_fragments": 2, "generations": 1}
    zeppelin = {"fragments": 7, "blocked_parts": 0}
    assert (amount(lance, "backlog"), amount(zeppelin, "backlog")) == (1, 7)
    assert metrics_of(lance)["fragments"].exported == "fragments"
    assert metrics_of(zeppelin)["fragments"].exported == "backlog_wal_fragments"


def test_jobs_that_share_a_metric_declare_it_alike() -> None:
    for spec in job_specs("lance").values():
        for name, metric in spec.metrics.items():
            if metric.exported is not None:
                assert exported_metrics(metric.kind)[metric.exported] == metric, (spec.name, name)
