"""verify --answers of an index folder: recall of searches, and whether each row finds itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.answers import wilson
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann.jobs import verify
from memwal_ops.formats.lm_diskann.library import Index


def test_recall_is_measured(made: str) -> None:
    report = run_job(made, "verify", answers=True, samples=50, seed=7)
    assert not report.findings.kept, report.describe()
    [one] = report.to_json()["answers"]
    assert (one["index"], one["queries"], one["wrong"], one["rows_compared"]) == ("graph", 50, 0, 1200)
    assert 0.8 <= one["recall_low"] <= one["recall"] <= one["recall_high"] <= 1
    assert one["found_itself"] > 0.95
    with pytest.raises(InvalidUsageError, match="no index 'other'"):
        run_job(made, "verify", index=["other"])


def test_a_graph_that_does_not_find_its_rows_is_a_finding(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = verify.recall

    def low(*arguments: object) -> verify.Recall | None:
        found = measure(*arguments)  # type: ignore[arg-type]
        assert found is not None
        itself = wilson(10, found.queries)
        assert itself is not None
        return replace(found, itself=itself)

    monkeypatch.setattr(verify, "recall", low)
    report = run_job(made, "verify", answers=True)
    assert [one.check for one in report.findings.kept] == ["index_recall_low"]
    assert report.exit_code == 9


def test_a_folder_above_the_budget_is_named_as_not_asked(made: str) -> None:
    size = run_job(made, "verify").checked["blocks"] * open_table(made).parameters.layout.block_size
    [one] = run_job(made, "verify", answers=True, max_bytes=max(size - 1, 1 << 20)).answers
    assert ("above --max-bytes" in one.skipped, one.recall is None) == (size > 1 << 20,) * 2


def test_the_index_alone_within_the_budget_and_what_that_costs(made: str) -> None:
    plan = run_job(made, "verify", answers=True, dry_run=True)
    assert (plan.decision, plan.answers[0].skipped) == ("dry_run", "")
    done = run_job(made, "verify", answers_only=True)
    [one] = done.answers
    assert (dict(done.checked), one.wrong, one.findings) == ({}, 0, [])
    assert 0 < one.bytes_at_most <= plan.bytes_at_most
    with Index(made):  # it is written to: without the lock, nobody waits for what is above the budget
        [large] = run_job(made, "verify", answers_only=True, max_bytes=1 << 20, wait="0s").answers
    assert "above --max-bytes" in large.skipped
