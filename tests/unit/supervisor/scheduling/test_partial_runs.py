"""A run that did all it could, and left a part undone: its reason is in the history and among the findings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from memwal_ops.supervisor.observe.findings import DEFAULT_LIMITS, findings_of
from memwal_ops.supervisor.state.outcomes import classify_result
from tests.support.fleet import job, table

REFUSED = {"reason": "dot_product_index", "detail": "Index v is IVF_PQ. Train it anew."}
REPORT = {
    "decision": "incomplete",
    "blocked": [],
    "indexes": [{"name": "a", "error": None}, {"name": "v", "error": REFUSED}],
}


def classified(report: dict[str, Any] | None, outcome: str = "partial") -> dict[str, Any]:
    names = ("reason", "message", "remedy", "figures", "phases", "versions")
    result = {**dict.fromkeys(names), "outcome": outcome, "exit_code": 18, "decision": "incomplete", "report": report}
    entry: Any = SimpleNamespace(run=None)
    found, details = classify_result(entry, result)
    assert found == outcome
    return details


def test_the_history_has_the_reason_of_the_first_part_that_failed() -> None:
    details = classified(REPORT)
    assert (details["reason"], details["error"]) == (REFUSED["reason"], REFUSED["detail"])
    assert details["decision"] == "incomplete"


def test_a_report_without_such_a_part_gives_none() -> None:
    for report in (None, {}, {"indexes": [{"error": None}], "blocked": [{"reason": "x"}], "n": 1, "list": [1]}):
        assert classified(report)["reason"] is None
    assert classified(REPORT, outcome="succeeded")["reason"] is None


class _Errors:
    def last_error(self, table: str, job: str) -> dict[str, Any] | None:
        failed = {"reason": REFUSED["reason"], "message": REFUSED["detail"], "remedy": None, "exit_code": 18}
        return failed if (table, job) == ("orders", "catchup") else None

    def part_of(self, uri: str, blocked: Any) -> tuple[str, str]:
        raise NotImplementedError


def test_the_findings_name_it_once() -> None:
    """Also where the job is late because of it."""
    document = {**table("orders"), "error": None, "blocked": []}
    assert [*findings_of(document, _Errors(), DEFAULT_LIMITS, "f.yaml")] == []
    document["jobs"]["catchup"] = job(last_outcome="partial", seconds_since_success=90_000.0)
    [found] = findings_of(document, _Errors(), DEFAULT_LIMITS, "f.yaml")
    assert found["level"] == "warning"
    assert found["what"] == "catchup left a part undone: dot_product_index. Index v is IVF_PQ. Train it anew."
    assert found["runbook"] == "runbooks/errors/18-indexes_behind.md"
    assert "history" in found["do"]
