"""What a run achieved, by its report: of each job, of maintain its steps, and nothing of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from memwal_ops.core.usage import achieved_by

COMPACT = {"decision": "compacted", "fragments_removed": 12, "fragments_added": 2, "rows_rewritten": 900}
ASKED = [{"index": "a", "found": 0.98, "found_before": 0.96}, {"index": "b", "found": 0.91, "found_before": None}]


@pytest.mark.parametrize(
    ("job", "report", "expected"),
    [
        ("merge", {"decision": "merged", "passes": [{"rows_read": 7}, {"rows_read": None}]}, {"rows_merged": 7}),
        ("merge", {"decision": "merged", "passes": [{"upserts": 5, "deletes": 1}]}, {"rows_merged": 6}),
        ("merge", {"decision": "nothing_to_merge", "passes": []}, {}),
        ("compact", COMPACT, {"fragments": 10, "rows_rewritten": 900}),
        ("compact", COMPACT | {"decision": "dry_run"}, {}),
        ("expire", {"apply": True, "bytes": 50, "counts": {"expire": 3}}, {"versions": 3, "bytes_freed": 50}),
        ("expire", {"apply": False, "bytes": 50, "counts": {"expire": 3}}, {}),
        ("gc", {"apply": True, "deleted": {"objects": 1, "bytes": 9}}, {"bytes_freed": 9}),
        ("catchup", {"indexes": [{"decision": "updated", "uncovered_rows": 4}]}, {"rows_indexed": 4}),
        ("compact", {"answers": ASKED}, {"recall_after": 0.91}),
        ("compact", {"answers": ASKED[:1]}, {"recall_after": 0.98, "recall_before": 0.96}),
        ("verify", {"answers": [{"index": "a", "recall": 0.5}, {"index": "b"}]}, {"recall_after": 0.5}),
        ("audit", {"decision": "fine", "indexes": "none"}, {}),
    ],
)
def test_of_a_job(job: str, report: dict[str, Any], expected: dict[str, float]) -> None:
    assert achieved_by(job, report) == expected


def test_of_maintain_its_steps_together() -> None:
    steps = [
        {"step": "merge", "report": {"decision": "merged", "passes": [{"rows_read": 7}]}},
        {"step": "compact", "report": COMPACT | {"answers": ASKED[:1]}},
        {"step": "expire", "report": {"apply": True, "bytes": 50, "counts": {"expire": 3}}},
        {"step": "gc", "report": {"apply": True, "deleted": {"bytes": 9}}},
        {"step": "snapshot", "report": None},
    ]
    found = achieved_by("maintain", {"steps": steps})
    sums = {"fragments": 10, "versions": 3, "bytes_freed": 59, "rows_merged": 7, "rows_rewritten": 900}
    assert found == sums | {"recall_before": 0.96, "recall_after": 0.98}
