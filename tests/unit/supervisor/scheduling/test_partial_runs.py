"""A run that did all it could, and left a part undone: its reason is in the history and among the findings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops.cli.check import table_faults
from memwal_ops.supervisor.observe.findings import DEFAULT_LIMITS, findings_of, poll_error
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
    # The remedy is apart, so that it is what to do, and names the table.
    apart = {**REFUSED, "remedy": "Train it anew."}
    details = classified({"indexes": [{"name": "v", "error": apart}]})
    assert (details["error"], details["remedy"]) == ("Index v is IVF_PQ.", "Train it anew.")


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


def verification(*, answers: bool) -> dict[str, Any]:
    wrong = {"check": "index_misses_rows", "evidence": "Rows are missing.", "remedy": "Rebuild it."}
    lost = {"check": "base_file", "place": "data/x.lance", "evidence": "It is missing.", "remedy": "Restore it."}
    found = [{**wrong, "place": "v", "severity": "error"}, *([] if answers else [{**lost, "severity": "error"}])]
    return {"decision": "findings", "findings": found, "answers": [{"index": "v", "findings": [wrong]}]}


def test_damage_that_a_verification_found_is_its_reason() -> None:
    """But not wrong answers of indexes, of which there are findings already."""
    details = classified(verification(answers=False))
    assert (details["reason"], details["remedy"]) == ("base_file", "Restore it.")
    assert details["error"] == "data/x.lance: It is missing."
    assert classified(verification(answers=True))["reason"] is None


URI = "s3://lake/orders.lance"
LOST = "data/01.lance is missing, although the newest version refers to it"
UNREAD = f"It fails: Cannot read index '{URI}/_indices/u-1/page_data.lance': Not found."
UNAVAILABLE = "Cannot list '_mem_wal_ops/leases': GET http://s3/lake?prefix=orders.lance failed"


class _Several(_Errors):
    def __init__(self, **found: tuple[str, str]) -> None:
        self.found = found

    def last_error(self, table: str, job: str) -> dict[str, Any] | None:
        reason, message = self.found[job]
        return {"reason": reason, "message": message, "remedy": "Restore it.", "exit_code": 9}


@pytest.mark.parametrize(
    ("found", "answer", "poll", "concerned"),
    [
        (
            {
                "catchup": ("table_corrupt", f"{LOST} (Cannot build index 'v': Not found: lake/orders.lance/data/01)"),
                "compact": ("table_corrupt", f"data/02.lance is damaged (Cannot read '{URI}')"),
                "verify": ("missing_object", "data/01.lance: It is missing or damaged."),
            },
            None,
            None,
            ["catchup", "compact", "verify"],
        ),
        (
            {
                "catchup": ("indexes_behind", "pylance built nothing for index v and raised no error."),
                "compact": ("indexes_behind", f"Index v cannot be opened: {URI}/_indices/u-1/page_data.lance is lost."),
            },
            UNREAD,
            None,
            ["catchup", "compact", "verify"],
        ),
        (
            {"catchup": ("table_corrupt", "_indices/u-1/page_data.lance is missing.")},
            UNREAD,
            None,
            ["catchup", "verify"],
        ),
        (
            {"compact": ("store_unavailable", UNAVAILABLE), "merge": ("store_unavailable", f"{UNAVAILABLE} late")},
            None,
            f"Cannot list '{URI}': GET http://s3/lake failed",
            ["compact"],
        ),
    ],
    ids=["files of one folder", "an index", "an index and its answers", "a store that is away"],
)
def test_one_cause_is_one_finding_with_all_that_it_concerns(
    found: dict[str, tuple[str, str]], answer: str | None, poll: str | None, concerned: list[str]
) -> None:
    """One missing file was three findings, an unreachable table two."""
    partial = {"catchup", "verify"} if poll is None else set()
    jobs = {
        name: job(last_outcome="partial") if name in partial else job(last_outcome="failed", consecutive_failures=3)
        for name in found
    }
    check = {"check": "index_misses_rows", "evidence": answer}
    answers = [] if answer is None else [{"index": "v", "type": "BTree", "wrong": 1, "findings": [check]}]
    document = {**table("orders"), "jobs": jobs, "answers": answers, "error": None, "blocked": []}
    if poll is not None:
        document |= {"backlog": {}, "look_error": poll, "state": "unreadable"}
        document["error"] = poll_error(document)
    [one] = findings_of(document, _Several(**found), DEFAULT_LIMITS, "f.yaml")
    assert (one["level"], one["jobs"], one["do"]) == ("critical", concerned, "Restore it.")
    for name in found:
        assert name in one["what"]
    other = {**document, "answers": [{"index": "w", "type": "BTree", "wrong": 1, "findings": []}]}
    assert len([*findings_of(other, _Several(**found), DEFAULT_LIMITS, "f.yaml")]) == 2


def test_what_blocks_a_part_is_also_why_jobs_are_late_and_rows_wait() -> None:
    """It was three findings, of which one said that 0 generations wait, the oldest for an hour."""
    late = job(last_outcome="partial", last_success=None, seconds_since_success=90_000.0)
    blocked = {"region_id": "r", "generation": 1, "reason": "generation_missing", "detail": "It is missing."}
    document = {**table("orders", waiting=200, blocked=1), "error": None, "blocked": [blocked]}
    document["jobs"]["merge"] = late

    class Blocked(_Errors):
        def part_of(self, uri: str, blocked: Any) -> tuple[str, str]:
            return "Region r", "generation 1"

    [found] = findings_of(document, Blocked(), DEFAULT_LIMITS, "f.yaml")
    assert "generation_missing" in found["what"]
    document["jobs"]["gc"] = job(seconds_since_success=90_000.0)
    assert len([*findings_of(document, Blocked(), DEFAULT_LIMITS, "f.yaml")]) == 2, "it does not depend on the part"


class _Damage(_Errors):
    def last_error(self, table: str, job: str) -> dict[str, Any] | None:
        lost = {"reason": "base_file", "message": "data/x.lance: It is missing.", "remedy": "Restore it."}
        return {**lost, "exit_code": 9} if job == "verify" else None


def test_a_table_that_a_verification_found_damaged_is_critical() -> None:
    document = {**table("orders"), "error": None, "blocked": []}
    document["jobs"]["verify"] = job(last_outcome="partial")
    [found] = findings_of(document, _Damage(), DEFAULT_LIMITS, "f.yaml")
    assert (found["level"], found["do"]) == ("critical", "Restore it.")
    assert found["what"] == "verify found damage: base_file. data/x.lance: It is missing."
    assert found["runbook"] == "runbooks/errors/09-table_corrupt.md"
    assert [*table_faults(document)] == [(2, "orders: verify found damage")]
    bad = {"index": "v", "type": "BTree", "findings": [{"check": "index_misses_rows", "evidence": "Rows are missing."}]}
    [(level, what)] = table_faults({**document, "answers": [bad]})
    assert (level, "answers wrongly" in what) == (2, True), "once, by the index"
