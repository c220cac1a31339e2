"""The account of runs: nothing of it is lost by a kill, and it does not grow for ever."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from memwal_ops.errors import AlreadyRunningError, HistoryError
from memwal_ops.supervisor.state.directory import StateDir
from memwal_ops.supervisor.state.history import History
from tests.support.run_cli import run_here

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History.open(str(tmp_path / "state/history.sqlite"))


def add(
    history: History, outcome: str | None = "succeeded", *, table: str = "a", job: str = "merge", at: datetime = NOW
) -> int:
    number = history.begin(table=table, uri=f"/{table}", job=job, supervisor="s", why="schedule", plan={"x": 1}, now=at)
    if outcome is not None:
        failed = {"exit_code": 24, "reason": "store_unavailable", "error": "no answer", "remedy": "wait"}
        details = (
            failed if outcome == "failed" else {"versions": [3], "figures": {"rows_merged": 5}, "decision": "merged"}
        )
        history.finish(number, at + MINUTE, outcome, **details)
    return number


def test_a_run_and_what_became_of_it(history: History) -> None:
    number = add(history)
    (run,) = history.runs()
    assert run == {
        "id": number,
        "table": "a",
        "uri": "/a",
        "job": "merge",
        "supervisor": "s",
        "why": "schedule",
        "started": "2026-11-21T12:00:00.000+00:00",
        "finished": "2026-11-21T12:01:00.000+00:00",
        "seconds": 60.0,
        "outcome": "succeeded",
        "exit_code": None,
        "decision": "merged",
        "error": None,
        "plan": {"x": 1},
        "figures": {"rows_merged": 5},
        "phases": None,
        "versions": [3],
        "report": None,
        "used": None,
        "achieved": None,
    }


def test_what_was_running_is_marked(history: History) -> None:
    add(history)
    add(history, None, table="b")
    assert history.mark_killed(NOW + MINUTE) == 1
    assert history.mark_killed(NOW + MINUTE) == 0
    (run,) = history.runs(failed=True)
    assert (run["table"], run["outcome"], run["error"]["reason"]) == ("b", "killed", "killed")


def test_filters(history: History) -> None:
    for n, outcome in enumerate(["succeeded", "failed", "partial", "hung", "stopped"]):
        add(history, outcome, table="ab"[n % 2], job=["merge", "gc"][n > 2], at=NOW + n * MINUTE)
    assert [one["outcome"] for one in history.runs()] == ["stopped", "hung", "partial", "failed", "succeeded"]
    assert [one["outcome"] for one in history.runs(failed=True)] == ["hung", "partial", "failed"]
    assert [one["outcome"] for one in history.runs(table="b")] == ["hung", "failed"]
    assert [one["outcome"] for one in history.runs(table="/b")] == ["hung", "failed"]
    assert [one["outcome"] for one in history.runs(job="gc")] == ["stopped", "hung"]
    assert len(history.runs(limit=2)) == 2
    assert history.runs(table="x' OR 1=1 --") == []


@pytest.mark.parametrize("table", ["a", "/a", "none"])
def test_runs_of_a_table_are_found_without_reading_those_of_others(history: History, table: str) -> None:
    """With 10,000 tables, of each of which each job had its last runs read, a start took 37 minutes."""
    for number in range(500):
        add(history, table=f"other{number}")
    add(history)
    steps = list[int]()
    history._connection.set_progress_handler(lambda: steps.append(1), 10)
    for filters in ({"job": "merge"}, {"failed": True}, {}):
        history.runs(table=table, limit=20, **filters)
    history._connection.set_progress_handler(None, 0)
    assert 10 * len(steps) < 1500


def test_it_forgets_by_age(history: History) -> None:
    for days in (40, 20, 0):
        add(history, at=NOW - timedelta(days=days))
    add(history, None, at=NOW - timedelta(days=50))
    assert history.prune(NOW, timedelta(days=30), 1000) == 1
    assert len(history.runs()) == 3, "what runs stays, however long it takes"
    for minute in range(10):
        add(history, at=NOW + minute * MINUTE)
    history.prune(NOW, timedelta(days=30), 4)
    assert [one["started"][14:16] for one in history.runs()] == ["09", "08", "07", "06", "00"]
    assert history.runs()[-1]["outcome"] == "running"


def test_what_is_known_of_a_job(history: History) -> None:
    history.record_first_seen("a", "merge", NOW)
    history.record_first_seen("a", "merge", NOW + MINUTE)
    assert history.last("a", "/a", "merge", NOW + MINUTE).first_seen == NOW
    for n, outcome in enumerate(["succeeded", "failed", "killed", "died", "stopped", "hung", "lost"]):
        add(history, outcome, at=NOW + n * MINUTE)
    last = history.last("a", "/a", "merge", NOW)
    assert last.failures == 3, "what others ended says nothing of the job"
    assert last.started == NOW + 5 * MINUTE
    assert last.succeeded == NOW + MINUTE
    assert last.outcome == "lost"
    assert history.last("b", "/b", "merge", NOW).started is None
    add(history, "partial", at=NOW + 10 * MINUTE)
    assert history.last("a", "/a", "merge", NOW).failures == 0


def test_the_time_of_a_budget(history: History) -> None:
    for n in range(4):
        add(history, at=NOW + n * timedelta(hours=1))

    def seconds_since(table: str, since: datetime) -> float:
        ended = history.ended_since(table, "merge", since)
        return sum(ends - max(begins, since.timestamp()) for begins, ends in ended)

    assert seconds_since("a", NOW - MINUTE) == 240
    assert seconds_since("a", NOW + timedelta(hours=1, seconds=30)) == 150
    assert seconds_since("b", NOW) == 0


def test_what_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"no database" * 100)
    with pytest.raises(HistoryError):
        History.open(str(tmp_path / "junk"))
    with pytest.raises(HistoryError):
        History.open_to_read(str(tmp_path / "junk"))
    with pytest.raises(HistoryError, match="no history"):
        History.open_to_read(str(tmp_path / "none"))
    connection = sqlite3.connect(tmp_path / "newer")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(HistoryError, match="newer release"):
        History.open(str(tmp_path / "newer"))


def test_one_service_for_each_folder(tmp_path: Path) -> None:
    first = StateDir(str(tmp_path / "s"))
    with pytest.raises(AlreadyRunningError):
        StateDir(str(tmp_path / "s"))
    assert StateDir(str(tmp_path / "other")).instance != first.instance
    first.close()
    again = StateDir(str(tmp_path / "s"))
    assert again.instance == first.instance, "its leases are still its own"
    again.close()
    Path(tmp_path, "s/instance").write_text("nonsense")
    assert StateDir(str(tmp_path / "s")).instance != first.instance


def test_a_folder_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError):
        StateDir(str(tmp_path / "file"))


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    history = History.open(str(tmp_path / "history.sqlite"))
    add(history)
    add(history, "failed", table="b", at=NOW + MINUTE)
    add(history, "failed", table="b", at=NOW + MINUTE)
    state = ("--state-dir", str(tmp_path))
    found = run_here(capfd, "history", *state, "--json")
    assert found.code == 0
    assert [one["table"] for one in found.document["runs"]] == ["b", "b", "a"]
    assert run_here(capfd, "history", *state, "--failed", "--json").document["runs"][0]["outcome"] == "failed"
    text = run_here(capfd, "history", *state)
    assert "2026-11-21 12:01:00" in text.out
    page = "runbooks/errors/24-store_unavailable.md"
    assert text.out.count(f"b merge: no answer wait (store_unavailable; {page})") == 1, "each error once"
    assert run_here(capfd, "history", *state, "--table", "a", "--failed").out == "No run.\n"
    for kind, known in (("table", "/a, /b, a, b"), ("job", "merge")):
        unknown = run_here(capfd, "history", *state, f"--{kind}", "none", "--json")
        assert unknown.code == 2, "a typing error is no table without runs"
        assert unknown.document["error"]["message"] == f"The history has no {kind} 'none'."
        assert unknown.document["error"]["remedy"].startswith(f"It has these {kind}s: {known}")
    assert run_here(capfd, "history", "--state-dir", str(tmp_path / "none")).code == 56
    (tmp_path / "c.yaml").write_text(f"state_dir: {tmp_path}\ntables: [{{uri: /a}}]\n")
    by_file = run_here(capfd, "history", "--config", str(tmp_path / "c.yaml"), "--limit", "1", "--json")
    assert len(by_file.document["runs"]) == 1
    (tmp_path / "c.yaml").write_text(f"state_dir: {tmp_path}\ntables: [{{uri: /not/yet.lance}}]\n")
    configured = run_here(capfd, "history", "--config", str(tmp_path / "c.yaml"), "--table", "/not/yet.lance")
    assert (configured.code, configured.out) == (0, "No run.\n"), "configured, and not seen yet"
    (tmp_path / "c.yaml").write_text(f"state_dir: {tmp_path}\ntables: [{{uri: /by/hand.lance, name: orders}}]\n")
    history.add(uri="/by/hand.lance", job="merge", started=NOW, finished=NOW + MINUTE, outcome="succeeded")
    by_hand = run_here(capfd, "history", "--config", str(tmp_path / "c.yaml"), "--table", "orders", "--json")
    assert [run["uri"] for run in by_hand.document["runs"]] == ["/by/hand.lance"], "before the first of the service"


def test_a_file_of_an_earlier_release_is_read_and_gets_the_columns_of_the_ledger(tmp_path: Path) -> None:
    path = str(tmp_path / "history.sqlite")
    made = History.open(path)
    add(made)
    made.close()
    with sqlite3.connect(path) as file:
        for name in ("used", "achieved"):
            file.execute(f"ALTER TABLE runs DROP COLUMN {name}")
    read = History.open_to_read(path)
    assert [run["used"] for run in read.runs()] == [None]
    assert [run["used"] for run in read.ledger(NOW - MINUTE)] == [None]
    assert read.spent("a", "/a", "merge", 5) == []
    read.close()
    written = History.open(path)
    number = add(written, None)
    written.finish(number, NOW + MINUTE, "succeeded", used={"store": "s3"}, achieved={"rows_merged": 1})
    assert [run["used"] for run in written.ledger(NOW - MINUTE)] == [{"store": "s3"}, None]
