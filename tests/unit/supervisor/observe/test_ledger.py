"""The ledger: runs summed up by table, job and day, with their money, and how wrong the estimates were."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.core.cost import LIST_PRICES
from memwal_ops.supervisor.observe.spending import By, ledger_document
from memwal_ops.supervisor.state.history import BY_HAND, History
from tests.support.run_cli import run_here

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
REQUESTS = {"get": 1000, "put": 1000, "list": 0, "delete": 7}
USED = {"store": "s3", "requests": REQUESTS, "bytes_read": 5, "bytes_written": 3, "cpu_seconds": 2.0, "peak_memory": 9}
COST = 0.0054


def add(history: History, table: str, job: str, days: int, cost: float | None = None, **details: Any) -> None:
    began = NOW - timedelta(days=days)
    plan = {} if cost is None else {"cost": {"money": cost, "seconds": 1}}
    number = history.begin(table=table, uri=f"/{table}", job=job, supervisor="s", why="schedule", plan=plan, now=began)
    history.finish(number, began + timedelta(seconds=5), details.pop("outcome", "succeeded"), **details)


@pytest.fixture
def history(tmp_path: Path) -> History:
    made = History.open(str(tmp_path / "history.sqlite"))
    add(made, "a", "merge", 2, cost=COST, used=USED, achieved={"rows_merged": 10})
    add(made, "a", "gc", 1, cost=COST * 2, used=USED, achieved={"bytes_freed": 100 << 30})
    add(made, "b", "merge", 1, outcome="failed", used=None)
    add(made, "b", "merge", 40, used=USED)
    return made


@pytest.mark.parametrize(
    ("by", "names", "runs"), [("table", ["a", "b"], [2, 1]), ("job", ["gc", "merge"], [1, 2]), ("day", None, [1, 2])]
)
def test_the_runs_of_a_time_by(history: History, by: By, names: list[str] | None, runs: list[int]) -> None:
    since = NOW - timedelta(days=30)
    found = ledger_document(history.ledger(since), LIST_PRICES, "USD", by, since)
    assert [one[by] for one in found["groups"]] == (names or ["2026-11-19", "2026-11-20"])
    assert [one["runs"] for one in found["groups"]] == runs
    total = found["total"]
    assert (total["runs"], total["failed"], total["unmeasured"]) == (3, 1, 1)
    assert total["requests"] == {kind: 2 * number for kind, number in REQUESTS.items()}
    assert (total["bytes_read"], total["bytes_written"], total["peak_memory"]) == (10, 6, 9)
    assert (total["money"], total["cpu_seconds"]) == (pytest.approx(2 * COST), 4.0)
    assert (total["achieved"]["rows_merged"], total["achieved"]["bytes_freed"]) == (10, 100 << 30)
    assert total["saves_monthly"] == pytest.approx(2.3)
    assert found["estimates"] == {"runs": 2, "error": pytest.approx(0.5)}, "one was right, the other twice too high"


def test_a_run_by_hand_counts_in_the_ledger_and_in_no_schedule(history: History) -> None:
    began = NOW - timedelta(hours=1)
    before = history.last("a", "/a", "merge", NOW)
    history.add(uri="/a", job="merge", started=began, finished=NOW, outcome="failed", used=USED)
    assert history.last("a", "/a", "merge", NOW) == before
    assert history.ended_since("a", "merge", began - timedelta(hours=1)) == []
    (run,) = history.runs(limit=1)
    assert (run["table"], run["supervisor"], run["used"]) == ("a", BY_HAND, USED)
    assert sum(1 for _ in history.ledger(NOW - timedelta(days=30))) == 4
    assert [used for _, used, _ in history.spent("a", "/a", "merge", 5)] == [USED]


def test_the_command(
    history: History, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal_ops.cli.plan.datetime", _Now)
    file = tmp_path / "config.yaml"
    file.write_text(
        f"history: {{path: {history.path}}}\nprices: {{s3: {{put: 0.01}}}}\ntables: [{{uri: {tmp_path}/a.lance}}]\n"
    )
    ran = run_here(capfd, "cost", "--config", str(file))
    assert ran.code == 0
    text = " ".join(ran.out.split())
    assert text.startswith("3 runs in the last 30d: $0.02 (4,014 requests, 10 B read, 6 B written, 4 s of processor).")
    assert "They merged 10 rows, freed 100.0 GiB, which saves $2.30 a month." in text
    assert "1 run recorded nothing" in text
    found = run_here(capfd, "cost", "--config", str(file), "--by", "job", "--since", "36h", "--json").document
    assert [one["job"] for one in found["groups"]] == ["gc", "merge"]
    assert found["prices"]["s3"]["source"] == "the configuration file"
    assert found["prices"]["gcs"]["date"], "a list price has its date"
    none = run_here(capfd, "cost", "--config", str(file), "--since", "1s")
    assert (none.code, none.out) == (0, "No run ended in the last 1s.\n")


class _Now(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW.astimezone(tz)


def test_what_polls_used_by_table_and_day(history: History) -> None:
    since = NOW - timedelta(days=30)
    for _ in range(2):
        history.add_polls([("a", "2026-11-20", "s3", 100.0, 500.0, 0, 900.0, 0, 7.0, 0, 1.5)])
    history.add_polls([("idle", "2026-11-21", "s3", 1.0, 0, 0, 1.0, 0, 0, 0, 0.5)])
    history.add_polls([("a", "2026-09-01", "s3", 1.0, 9e9, 0, 0, 0, 0, 0, 0.5)])
    polls = history.polls(since)
    by = {
        one: ledger_document(history.ledger(since), LIST_PRICES, "USD", one, since, polls)
        for one in ("table", "job", "day")
    }  # type: ignore[var-annotated]  # By
    found = {one["table"]: one for one in by["table"]["groups"]}
    assert (found["a"]["polls"], found["idle"]["polls"], found["idle"]["runs"]) == (200, 1, 0)
    assert found["a"]["requests"]["list"] == 1800 + 2 * REQUESTS["list"]
    poll = next(one for one in by["job"]["groups"] if one["job"] == "poll")
    assert (poll["polls"], poll["cpu_seconds"], poll["bytes_read"]) == (201, 3.5, 14)
    assert poll["money"] == pytest.approx(0.0004 + 1801 * 0.000005)
    assert {one["day"]: one["polls"] for one in by["day"]["groups"]}["2026-11-21"] == 1
    assert by["day"]["polls"] == {"polls": 201, "requests": 2801, "money": round(poll["money"], 6)}
    assert by["day"]["total"]["money"] == pytest.approx(2 * COST + poll["money"], abs=1e-6)
    history.thin_samples(NOW, timedelta(days=30))
    assert {one["day"] for one in history.polls(NOW - timedelta(days=900))} == {"2026-11-20", "2026-11-21"}


def test_what_a_shadow_would_have_done(history: History) -> None:
    since = NOW - timedelta(days=30)
    for would in ("over_budget", "run", "run_other"):
        plan = {"shadow": {"would": would}}
        number = history.begin(table="a", uri="/a", job="gc", supervisor="s", why="schedule", plan=plan, now=NOW)
        history.finish(number, NOW, "succeeded", used=USED)
    found = ledger_document(history.ledger(since), LIST_PRICES, "USD", "table", since)
    assert found["shadow"] == {"held": 1, "money": pytest.approx(COST), "others": 1}
