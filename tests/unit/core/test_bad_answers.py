"""Which recorded answers are bad, and what reports tell about them."""

from __future__ import annotations

from typing import Any

from memwal_ops.core.answers import IndexAnswers, bad_answers
from memwal_ops.core.verification import (
    AnswersPlan,
    Inconsistencies,
    Inconsistency,
    RowsRead,
    Severity,
    VerifyReport,
    with_findings,
)


def recorded(index: str, *checks: str, **figures: Any) -> dict[str, Any]:
    found = [Inconsistency(Severity.ERROR, one, "", f"Evidence of {one}.", "", f"Fix {index}.") for one in checks]
    answers = with_findings(IndexAnswers(index=index, type="BTree", queries=62, **figures), found)
    return {**answers.to_json(), "asked_at": "2026-11-26T01:02:03.000+00:00", "asked_version": 4}


def test_wrong_answers_come_before_low_recall() -> None:
    found = bad_answers([
        recorded("fine"), recorded("low", "index_recall_low"), recorded("wrong", "index_misses_rows", wrong=3),
        recorded("gone", "index_coverage_wrong", "index_recall_low"),
    ])  # fmt: skip
    assert [(one.index, one.wrong) for one in found] == [("wrong", True), ("gone", True), ("low", False)]
    first, _, low = found
    assert first.describe() == (
        "the index wrong (BTree) answers wrongly, asked 2026-11-26 01:02 UTC: Evidence of index_misses_rows."
    )
    assert low.to_json() == {
        "index": "low", "type": "BTree", "kind": "recall_low", "why": "Evidence of index_recall_low.",
        "remedy": "Fix low.", "asked_at": "2026-11-26T01:02:03.000+00:00", "runbook": "runbooks/wrong-answers.md",
    }  # fmt: skip


def test_what_an_earlier_release_recorded() -> None:
    """It has no findings; wrong answers are known, and how many."""
    entry = recorded("n", wrong=1)
    del entry["findings"]
    del entry["asked_at"]
    [found] = bad_answers([entry])
    assert found.wrong
    assert found.describe() == "the index n (BTree) answers wrongly: 1 answer of 62 was wrong."
    assert "--rebuild --index n" in found.remedy
    assert bad_answers([{"index": "n"}, {"index": "n", "findings": "odd", "wrong": None}]) == []


def test_a_report_counts_in_the_singular_and_in_the_plural() -> None:
    def text(checked: dict[str, int], answers: tuple[IndexAnswers, ...] = ()) -> str:
        report = VerifyReport(3, Inconsistencies(10), checked, rows_read=RowsRead.NONE, answers=answers)
        return report.describe().splitlines()[0]

    assert "; 1 fragment was checked;" in text({"regions": 0, "fragments": 1})
    assert "; 1 region, 1 fragment were checked;" in text({"regions": 1, "fragments": 1})
    assert "; 2 fragments were checked;" in text({"fragments": 2})
    assert "; 0 fragments were checked;" in text({"fragments": 0})
    assert text({}).endswith("there is no index to ask; of the rest only the existence of objects was checked.")
    one = IndexAnswers(index="n", type="BTree", queries=1, rows_compared=1)
    assert text({}, (one,)).endswith("only indexes were asked; of the rest only the existence of objects was checked.")
    assert one.describe() == "n (BTree): 1 query, 0 wrong; 1 row compared"


def test_bad_ones_come_first_in_a_report() -> None:
    """Of a long report, the run history keeps the beginning of its lists."""
    finding = Inconsistency(Severity.ERROR, "index_misses_rows", "", "Gone.", "", "Fix.")
    answers = [IndexAnswers(index=f"i{number}", type="BTree") for number in range(5)]
    answers.append(with_findings(IndexAnswers(index="bad", type="BTree"), [finding]))
    document = VerifyReport(3, Inconsistencies(10), {}, answers=answers).to_json()
    assert [one["index"] for one in document["answers"]][:2] == ["bad", "i0"]


def test_the_cost_names_what_is_not_asked() -> None:
    plan = AnswersPlan(
        3,
        (
            IndexAnswers(index="n", type="BTree", queries=1, bytes_at_most=1 << 20),
            IndexAnswers(index="v", type="IVF_PQ", skipped="it has no rows"),
        ),
        4 << 20,
    )
    assert plan.describe().splitlines() == [
        "dry_run: asking 2 indexes would read at most 1.0 MiB (--max-bytes is 4.0 MiB). Nothing was asked.",
        "  n (BTree): about 1 query, at most 1.0 MiB",
        "  v (IVF_PQ): would not be asked: it has no rows",
    ]
    assert (plan.exit_code, plan.to_json()["bytes_at_most"]) == (0, 1 << 20)
