"""Figures by what they mean: what is shown and exported of a table comes from the specs of its jobs."""

from __future__ import annotations

import pytest

from memwal_ops.core.figures import Figures, backlog_of, exported_metrics, jobs_of, shared_noun
from memwal_ops.core.job import BACKLOG_ROLES, ROLES
from memwal_ops.core.registry import job_specs

GAUGES = {
    "backlog_generations", "backlog_rows", "backlog_bytes", "backlog_oldest_seconds", "blocked_regions",
    "uncovered_rows", "fragments", "versions", "merged_generations", "snapshot_age_seconds",
}  # fmt: skip
COUNTERS = {"conflicts", "merged_bytes", "merged_rows", "collected_bytes", "collected_objects"}


def test_a_figure_is_found_by_its_role() -> None:
    values = {"rows": 9, "generations": 3, "oldest_age": 60.0, "regions_behind": 2, "blocked_regions": 1}
    polled = Figures(values, "lance")
    assert [polled.amount(role) for role in BACKLOG_ROLES] == [3, 60.0, 2, 1]
    assert Figures({"regions_blocked": 0}, "lance", "run").amount("blocked") == 0
    assert polled.name_of("blocked") == "blocked_regions"


def test_what_waits_is_named_as_its_format_names_it() -> None:
    values = {"generations": 3, "rows": 9, "oldest_age": 60.0, "regions_behind": 2, "blocked_regions": 1}
    lance = {"backlog": values, "format": "lance"}
    index = {"backlog": {"delta_blocks": 5, "delta_bytes": 70, "dirty_percent": 1}, "format": "lm_diskann"}
    assert [backlog_of(lance).noun_of(role) for role in ("backlog", "blocked")] == ["generations", "regions"]
    assert [backlog_of(index).noun_of(role) for role in ("backlog", "blocked")] == ["delta blocks", "parts"]
    assert shared_noun([lance, {"backlog": {}}, lance], "backlog") == "generations"
    assert shared_noun([lance, index], "backlog") == "parts"


@pytest.mark.parametrize("role", ROLES)
def test_what_was_not_read_is_none_and_not_0(role: str) -> None:
    assert Figures({"small_fragments": 4}, "lance").amount(role) is None  # type: ignore[arg-type]  # a parameter is any text


def test_the_job_that_reduces_the_backlog_is_known_by_its_metrics() -> None:
    assert jobs_of("backlog") == jobs_of("blocked", "run") == ("merge",)


def test_alert_rules_find_the_names_that_they_ask_for() -> None:
    assert {one.exported for one in exported_metrics("backlog").values()} >= GAUGES
    assert {one.exported for one in exported_metrics("run").values()} >= COUNTERS


def test_a_name_that_two_formats_use_is_read_as_the_table_s_own() -> None:
    values = {"fragments": 7}
    lance, zeppelin = Figures(values, "lance"), Figures(values, "zeppelin")
    assert (lance.amount("backlog"), zeppelin.amount("backlog")) == (None, 7)
    assert lance.metrics["fragments"].exported == "fragments"
    assert zeppelin.metrics["fragments"].exported == "backlog_wal_fragments"
    unknown = Figures({"fragments": 7, "delta_blocks": 1}, None)
    assert unknown.metrics["fragments"] == lance.metrics["fragments"]
    assert unknown.amount("backlog") == 1
    assert Figures({"fragments": 7}, "not_installed").amount("backlog") is None


def test_jobs_that_share_a_metric_declare_it_alike() -> None:
    for spec in job_specs("lance").values():
        for name, metric in spec.metrics.items():
            if metric.exported is not None:
                assert exported_metrics(metric.kind)[metric.exported] == metric, (spec.name, name)
