"""When a candidate may be deleted, and what is said of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from memwal_ops.core.candidates import Candidate, CollectionReport, Gate, Verdict, age_gate, unrecognized

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
MET, OPEN = Gate(met=True, text="met"), Gate(met=False, text="open")


def candidate(*gates: Gate, kind: str = "data") -> Candidate:
    return Candidate(kind, "a/b", 7, 2, gates)


@pytest.mark.parametrize(
    ("gates", "verdict", "why"),
    [
        ((MET, MET), Verdict.DELETE, "met; met"),
        ((MET, OPEN), Verdict.HELD, "open"),
        ((OPEN, MET, OPEN), Verdict.HELD, "open; open"),
        ((), Verdict.HELD, ""),
    ],
)
def test_every_gate_must_be_met(gates: tuple[Gate, ...], verdict: Verdict, why: str) -> None:
    one = candidate(*gates)
    assert (one.verdict, one.why) == (verdict, why)
    because = "proof" if verdict is Verdict.DELETE else "because"
    assert one.to_json() == {"kind": "data", "path": "a/b", "bytes": 7, "objects": 2, because: why}


def test_what_is_not_recognized_is_kept() -> None:
    one = unrecognized("x/y", 5, "not ours")
    assert one == Candidate("unknown", "x/y", 5, 1, (Gate(met=False, text="not ours"),))
    assert (one.verdict, one.why, one.drain) == (Verdict.UNKNOWN, "not ours", False)
    assert candidate(MET, kind="unknown").verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("ago", "limit", "met"),
    [
        (3600, 3600, True),
        (3599, 3600, False),
        (3601, 3600, True),
        (-5, 3600, False),
        (-5, 0, True),
        (0, 0, True),
    ],
)
def test_age(ago: int, limit: int, met: bool) -> None:
    assert age_gate("written", NOW - timedelta(seconds=ago), timedelta(seconds=limit), NOW).met is met


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (60, "1 min"),
        (61, "61 s"),
        (119, "119 s"),
        (120, "2 min"),
        (121, "2 min"),
        (3600, "1 h"),
        (3660, "61 min"),
        (7200, "2 h"),
        (7261, "2 h"),
        (86400, "1 d"),
        (90000, "25 h"),
        (172800, "2 d"),
        (259199, "2 d"),
    ],
)
def test_age_as_text(seconds: int, text: str) -> None:
    gate = age_gate("last written", NOW - timedelta(seconds=seconds), timedelta(days=1), NOW)
    assert gate.text == f"last written, {text} ago; kept for 1 d"


def test_a_gate_tells_when_it_is_met() -> None:
    written, day = NOW - timedelta(hours=1), timedelta(days=1)
    assert age_gate("written", written, day, NOW).until == written + day
    assert age_gate("written", NOW - day, day, NOW).until is None


def test_a_report_counts_all_and_names_some() -> None:
    report: CollectionReport[Candidate] = CollectionReport(applied=False, limit=1, run_id="r", seconds=1.5)
    for one in (candidate(MET), candidate(MET), candidate(OPEN), unrecognized("x/y", 5, "not ours")):
        report.add(one)
    report.add(Candidate("list", "z", 1, 1, (OPEN,), drain=True))
    report.add(Candidate("list", "z", 1, 1, (OPEN,), drain=True))
    document = report.to_json()
    assert document["counts"] == {
        "data": {"delete": 2, "held": 1, "unknown": 0},
        "unknown": {"delete": 0, "held": 0, "unknown": 1},
        "list": {"delete": 0, "held": 2, "unknown": 0},
    }
    assert (document["delete"], document["truncated"]) == ([candidate(MET).to_json()], True)
    assert (document["seconds"], document["bytes_reclaimable"], report.drainable) == (1.5, 14, 2)
    first, table, held, unknown, closing = report.describe().split("\n\n")
    assert first == "planned: 14 B deletable, 2 parts drainable; nothing was changed."
    assert [line.split() for line in table.splitlines()] == [
        ["deletable", "held", "unknown"], ["data", "2", "1", "0"], ["unknown", "0", "0", "1"], ["list", "0", "2", "0"],
    ]  # fmt: skip
    assert held == "Held:\n  a/b (7 B): open\n  z and 1 more (2 B): open"
    assert unknown == "Unknown, and kept:\n  x/y (5 B): not ours"
    assert "every check is then repeated" in closing
