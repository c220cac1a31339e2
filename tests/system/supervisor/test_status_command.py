"""``memwal-ops status``: which table is behind, how far, why, and what to do, with a service and without one."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops import open_table
from memwal_ops.core.leases import Holder, acquire, release
from memwal_ops.supervisor.observe import status as fleet_module
from memwal_ops.supervisor.observe.status import status_of
from memwal_ops.supervisor.state.directory import StateDir
from memwal_ops.supervisor.state.history import History
from tests.support.fakes import Stage
from tests.support.receivers import silent_server
from tests.support.run_cli import Outcome, contents, run_here
from tests.support.tables import damage
from tests.support.tables.workload import Workload
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
THEM = Holder("them", "them@there")


@pytest.fixture
def fleet(tmp_path: Path) -> dict[str, Workload]:
    """Three tables; nothing serves HTTP."""
    tables = {}
    for number, name in enumerate(("events", "orders", "users")):
        tables[name] = Workload(number, regions=1, base_rows=20).create(str(tmp_path / f"tables/{name}.lance"))
        for _ in range(2):
            tables[name].put([1, 2, 30 + number])
            tables[name].flush()
    return tables


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\ntables: [{{pattern: '{tmp_path}/tables/*.lance'}}]\n"
    )
    return file


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History.open(str(tmp_path / "state/history.sqlite"))


class Ask:
    def __init__(self, capfd: pytest.CaptureFixture[str], file: Path) -> None:
        self._capfd, self._file = capfd, file

    def __call__(self, *arguments: str) -> Outcome:
        return run_here(self._capfd, "status", "--config", str(self._file), *arguments)

    def table(self, name: str, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = [one for one in self("--json", *arguments).document["tables"] if one["name"] == name]
        return found


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str], config: Path) -> Ask:
    return Ask(capfd, config)


def ran(history: History, table: Workload, job: str, outcome: str, ago: timedelta, **details: Any) -> None:
    when = datetime.now(UTC) - ago
    name = Path(table.uri).stem
    history.record_first_seen(name, job, when)
    number = history.begin(
        table=name, uri=table.uri, job=job, supervisor="us", why="schedule", plan={"apply": True}, now=when
    )
    history.finish(number, when, outcome, **details)


def test_all_is_well(fleet: dict[str, Workload], ask: Ask) -> None:
    before = {name: contents(table.uri) for name, table in fleet.items()}
    outcome = ask()
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.endswith("\n3 tables: 3 ok; 6 generations and 18 rows wait, " + outcome.out.rpartition(", ")[2])
    assert re.search(r"^orders +ok +2 +6 ", outcome.out, re.MULTILINE)
    document = ask("--json").document
    assert (document["exit_code"], document["level"], document["service"]) == (0, "ok", None)
    assert {name: contents(table.uri) for name, table in fleet.items()} == before, "nothing is written"


def test_its_keys_are_those_of_the_service(fleet: dict[str, Workload], ask: Ask, tmp_path: Path) -> None:
    stage = Stage(tmp_path, "tables: [{uri: /a}]\n")
    (theirs,), _ = status_of(stage.scheduler)
    ours = ask.table("orders")
    assert theirs.keys() <= ours.keys()
    assert ours.keys() - theirs.keys() == {"error", "blocked", "findings", "level"}
    for job, told in theirs["jobs"].items():
        assert told.keys() == ours["jobs"][job].keys()
        assert told["lease"].keys() == ours["jobs"][job]["lease"].keys()


def test_what_is_wrong_is_named_with_its_page_and_hides_nothing_else(fleet: dict[str, Workload], ask: Ask) -> None:
    damage.remove_generation(fleet["events"].uri, fleet["events"].regions[0], 1)
    (Path(fleet["users"].uri) / "_versions").rename(Path(fleet["users"].uri) / "elsewhere")
    outcome = ask()
    assert outcome.code == 2
    assert "CRITICAL users: It cannot be read: not_a_lance_table." in outcome.out
    assert " ".join(outcome.out.split()).endswith(", as far as can be read.")
    assert "is blocked at generation 1: generation_missing" in outcome.out.replace("\n  ", " ")
    assert re.search(r"^orders +ok +2 ", outcome.out, re.MULTILINE)
    assert re.search(r"^users +critical +\? +\? +\? +\?", outcome.out, re.MULTILINE)
    document = ask("--json").document
    assert document["summary"]["unreadable"] == document["summary"]["blocked_regions"] == 1
    findings = [one for table in document["tables"] for one in table["findings"]]
    assert {one["runbook"] for one in findings} == {
        "runbooks/errors/04-not_a_lance_table.md",
        "runbooks/merge-blocked.md",
    }
    assert all((ROOT / one["runbook"]).is_file() and one["do"] for one in findings)
    users = next(one for one in document["tables"] if one["name"] == "users")
    assert users["error"]["exit_code"] == 4
    assert users["look_error"] == users["error"]["message"]


def test_a_store_that_hangs_delays_no_other_and_what_was_not_begun_is_not_read(
    fleet: dict[str, Workload], ask: Ask, config: Path
) -> None:
    with silent_server() as port:
        away = "\n".join(
            f"  - {{uri: 's3://away/t{at}.lance', name: t{at}, format: lance, storage_options: {{aws_region: us-east-1,"
            f" aws_endpoint: 'http://127.0.0.1:{port}', allow_http: 'true', aws_access_key_id: x,"
            f" aws_secret_access_key: yyyyyyyyyy}}}}"
            for at in range(9)
        )
        local = "\n".join(f"  - {{uri: {one.uri}}}" for one in fleet.values())
        config.write_text(f"{config.read_text().partition('tables:')[0]}tables:\n{local}\n{away}\n")
        outcome = ask("--timeout", "12s", "--json")
    states = {one["name"]: (one["state"], one["level"]) for one in outcome.document["tables"]}
    assert {states[name] for name in fleet} == {("read", "ok")}
    late = [name for name in states if states[name] == ("unreadable", "critical")]
    unread = [name for name in states if states[name] == ("not_read", "unknown")]
    assert (len(late), len(unread)) == (4, 5)
    assert outcome.document["summary"]["not_read"] == 5
    assert outcome.code == 2


def test_what_only_a_merge_finds_is_taken_from_its_last_run(
    fleet: dict[str, Workload], ask: Ask, history: History
) -> None:
    blocked = {
        "region_id": fleet["orders"].regions[0],
        "generation": 1,
        "reason": "generation_corrupt",
        "detail": "Oh.",
    }
    ran(history, fleet["orders"], "merge", "partial", timedelta(minutes=1), exit_code=10, report={"blocked": [blocked]})
    told = ask.table("orders")
    assert (told["backlog"]["blocked_regions"], told["blocked"], told["level"]) == (1, [blocked], "critical")
    said = ask().out
    assert re.search(r"^orders +critical .* \d+ s ago +in ", said, re.MULTILINE), "it merged all but what is blocked"
    assert re.search(r"^orders +merge +idle +partial +never ", said, re.MULTILINE)
    assert f"\n    memwal-ops inspect {fleet['orders'].uri}\n" in said, "on one line, to be copied"
    assert f"(URI={fleet['orders'].uri})" in said


def test_the_history_shows_jobs_that_fail_and_that_are_late(
    fleet: dict[str, Workload], ask: Ask, history: History
) -> None:
    error = {"exit_code": 24, "reason": "store_unavailable", "error": "The store is away.", "remedy": "Wait for it."}
    for hours in (3, 2, 1):
        ran(history, fleet["orders"], "snapshot", "failed", timedelta(hours=hours), **error)
    ran(history, fleet["users"], "merge", "succeeded", timedelta(days=1))
    outcome = ask()
    assert outcome.code == 2
    text = outcome.out.replace("\n  ", " ")
    assert "CRITICAL orders: snapshot failed 3 times in a row, last with store_unavailable: The store" in text
    assert "Wait for it. See runbooks/errors/24-store_unavailable.md" in text
    assert "CRITICAL users: merge has not succeeded for 864" in text
    job = ask.table("orders")["jobs"]["snapshot"]
    assert (job["last_outcome"], job["consecutive_failures"], job["last_success"]) == ("failed", 3, None)
    assert ask.table("users")["jobs"]["merge"]["next_due"] is not None


@pytest.mark.parametrize(("ago", "code"), [(15, 0), (240, 1), (700, 2)])
def test_an_interval_of_seconds_is_not_late_at_once(
    fleet: dict[str, Workload], ask: Ask, config: Path, history: History, ago: int, code: int
) -> None:
    """Right after ``run --once`` a schedule of a second is some intervals past: nothing is wrong yet."""
    config.write_text(config.read_text() + "defaults: {jobs: {merge: {schedule: 1s}}}\n")
    for table in fleet.values():
        ran(history, table, "merge", "succeeded", timedelta(seconds=ago))
    outcome = ask()
    assert outcome.code == code
    assert ("merge has not succeeded for" in outcome.out) == bool(code)


def test_no_service_is_no_fault_of_the_tables(fleet: dict[str, Workload], ask: Ask, config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config.write_text(config.read_text().replace("{enabled: false}", f"{{port: {port}}}"))
    outcome = ask()
    assert outcome.code == 0
    assert outcome.out.startswith(
        f"The service does not respond on 127.0.0.1:{port} (Connection refused): what follows is"
    )
    assert "Due jobs run only while a service runs" in outcome.out
    document = ask("--json").document
    assert (document["exit_code"], document["service"]) == (0, None)
    assert document["service_error"] == f"the service does not respond on 127.0.0.1:{port} (Connection refused)"


def test_the_status_has_the_reason_why_nothing_merges_a_backlog(
    fleet: dict[str, Workload], ask: Ask, config: Path
) -> None:
    outcome = ask("--warn-generations", "2")
    assert outcome.code == 1
    assert "2 generations wait, the oldest for" in outcome.out
    assert "The next merge is due: now." in outcome.out.replace("\n  ", " ")
    acquire(open_table(fleet["orders"].uri).store, "merge", THEM)
    text = ask("--warn-generations", "2", "--table", "orders").out.replace("\n  ", " ")
    assert "Another holder has the lease of its merge: them@there, until " in text
    config.write_text(config.read_text() + "defaults: {jobs: {merge: {enabled: false}}}\n")
    assert "No merge is configured for it." in ask("--warn-generations", "2").out.replace("\n  ", " ")


def test_leases_are_shown_as_they_are_on_the_table(fleet: dict[str, Workload], ask: Ask, tmp_path: Path) -> None:
    ours = StateDir(str(tmp_path / "state"))
    store = open_table(fleet["orders"].uri).store
    taken, _ = acquire(store, "merge", THEM)
    acquire(store, "snapshot", Holder(ours.instance, "us@here"))
    acquire(store, "catchup", THEM, timedelta(0))
    jobs = ask.table("orders")["jobs"]
    assert {name: job["lease"]["state"] for name, job in jobs.items()} == {
        "merge": "elsewhere", "snapshot": "held", "catchup": "free", "compact": "free",
        "verify": "free",
    }  # fmt: skip
    assert jobs["merge"]["lease"]["holder"] == {"instance": "them", "name": "them@there"}
    said = ask().out
    assert re.search(r"^orders +merge +them@there +\d\d:\d\d:\d\d$", said, re.MULTILINE)
    assert re.search(r"^orders +snapshot +us@here \(this service\) +\d\d:\d\d:\d\d$", said, re.MULTILINE)
    assert taken is not None
    release(store, taken, "succeeded")
    merge = ask.table("orders")["jobs"]["merge"]
    assert (merge["lease"]["state"], merge["last_outcome"]) == ("free", "succeeded"), "by the lease, without a history"
    ours.close()


def test_what_a_running_service_knows(
    fleet: dict[str, Workload], ask: Ask, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path / "tables", f"tables: [{{uri: {fleet['orders'].uri}}}]\n")
    stage.due("orders")
    stage.due("orders", "catchup")
    stage.turn()
    tables, _ = status_of(stage.scheduler)
    service = {
        "instance": "us", "ready": True, "stopping": False, "holder": "us@here", "started": "2026-01-01T00:00:00+00:00",
        "state_dir": str(tmp_path / "state"), "config": {"error": None},
    }  # fmt: skip
    status = {"service": service, "tables": [*tables]}
    config.write_text(config.read_text().replace("http: {enabled: false}\n", ""))
    monkeypatch.setattr("urllib.request.OpenerDirector.open", lambda *_, **__: io.BytesIO(json.dumps(status).encode()))
    assert ask("--json").document["service_error"] is None
    jobs = ask.table("orders")["jobs"]
    assert (jobs["merge"]["state"], jobs["catchup"]["waiting_for"]) == ("running", "earlier")
    outcome = ask()
    assert outcome.out.startswith("Service: runs as us@here")
    assert re.search(r"^orders .* runs: [\d.]+ \w+$", outcome.out, re.MULTILINE)
    service["config"] = {"error": "line 3: no"}
    refused = ask()
    assert (refused.code, f"memwal-ops config check {config}" in refused.out) == (1, True)
    service["state_dir"] = "/another"
    assert ask("--json").document["service_error"].endswith("(its state_dir is /another)")


def test_tables_that_are_not_there(fleet: dict[str, Workload], ask: Ask, config: Path, tmp_path: Path) -> None:
    only = ask("--table", fleet["users"].uri)
    assert (only.code, "orders" in only.out, only.out.count("\nusers ")) == (0, False, 6)
    unknown = ask("--table", "nobody")
    assert (unknown.code, "events, orders, users" in unknown.err) == (2, True)
    good = config.read_text()
    config.write_text(good.replace("tables/*.lance", "nothing/*.lance"))
    assert (ask().code, "no pattern matches any" in ask().out) == (1, True)
    shutil.copytree(fleet["orders"].uri, tmp_path / "more/orders.lance")
    config.write_text(good.replace("*.lance'}", f"*.lance'}}, {{pattern: '{tmp_path}/more/*.lance'}}"))
    assert "has the name 'orders' of" in " ".join(ask().out.split())
    config.write_text("htp: 1\n")
    assert ask("--json").code == 50


def test_a_store_that_hangs_hides_no_other_table(
    fleet: dict[str, Workload], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, hangs, others = fleet_module._read, threading.Event(), {*threading.enumerate()}

    def hang(found: Any) -> Any:
        if found.name == "orders":
            hangs.wait()
        return answer(found)

    def now() -> float:
        """The time counts from when the threads that read the others have come to their ends."""
        until(lambda: [one.name for one in {*threading.enumerate()} - others].count("status") == 1)
        return time.monotonic()

    monkeypatch.setattr(fleet_module, "_read", hang)
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=now))
    outcome = ask("--timeout", "0.5s", "--json").document
    hangs.set()
    told = {one["name"]: one["error"] and one["error"]["reason"] for one in outcome["tables"]}
    assert told == {"events": None, "orders": "store_unavailable", "users": None}
