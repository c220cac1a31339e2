"""What goes wrong around a supervisor, and must neither lose, starve nor wedge anything, nor be told wrongly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
import yaml

from memwal_ops.core.leases import Holder
from memwal_ops.errors import HistoryError, TableNotFoundError
from memwal_ops.supervisor.config.loader import ConfigProblemsError, load_settings
from memwal_ops.supervisor.observe.heartbeat import Heartbeat
from memwal_ops.supervisor.scheduling.discovery import FoundTable, discover
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.state import history as run_history
from memwal_ops.supervisor.state.directory import StateDir
from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.workers.leasing import LeaseClient
from memwal_ops.supervisor.workers.protocol import RELEASE_VARIABLE, PollRequest, RunRequest, encode
from tests.support.fakes import START, Stage
from tests.support.run_cli import contents, run_here
from tests.support.service import configure, service
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload
from tests.support.waiting import PATIENCE, until
from tests.system.supervisor.conftest import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable


# -- tables that come and go


def test_two_patterns_that_find_one_name(tmp_path: Path) -> None:
    for folder, names in (("eu", ("orders", "users")), ("us", ("orders", "users", "own"))):
        for name in names:
            (tmp_path / folder / f"{name}.lance").mkdir(parents=True)
            (tmp_path / folder / f"{name}.lance/file").touch()
    file = tmp_path / "c.yaml"
    text = f"tables: [{{pattern: '{tmp_path}/eu/*.lance'}}, {{pattern: '{tmp_path}/us/*.lance'}}]\n"
    file.write_text(text)
    found = discover(load_settings(str(file), {}).tables)
    assert [table.uri for table in found.tables] == [
        f"{tmp_path}/{path}.lance" for path in ("eu/orders", "eu/users", "us/own")
    ]
    (fault,) = found.faults
    assert "us/orders.lance has the name 'orders' of" in fault.why
    assert "(2 such tables)" in fault.why
    file.write_text(text.replace("us/*.lance'", "us/*.lance', name: us"))
    named = discover(load_settings(str(file), {}).tables)
    assert (len(named.tables), named.faults) == (5, ())


def lease_client_for(table_uri: str, tmp_path: Path) -> tuple[LeaseClient, FoundTable, list[Callable[[], None]]]:
    file = tmp_path / "c.yaml"
    file.write_text(f"tables: [{{uri: {table_uri}}}]\n")
    (entry,) = load_settings(str(file), {}).tables
    posted: list[Callable[[], None]] = []
    leases = LeaseClient(Holder("us", "us@here"), timedelta(minutes=5), posted.append)
    return leases, FoundTable("t", table_uri, entry), posted


def test_a_lease_makes_no_table_of_nothing(tmp_path: Path) -> None:
    """A listing of the folder would take it for one."""
    leases, found, posted = lease_client_for(str(tmp_path / "tables/typo.lance"), tmp_path)
    answers: list[Any] = []
    leases.acquire(found, "merge", lambda taken, error: answers.append((taken, error)))
    leases.close(60.0)
    for one in posted:
        one()
    ((taken, error),) = answers
    assert taken is None
    assert isinstance(error, TableNotFoundError)
    assert not (tmp_path / "tables").exists()


def test_a_lease_that_is_given_back_brings_no_table_back(table: Workload, tmp_path: Path) -> None:
    leases, found, posted = lease_client_for(table.uri, tmp_path)
    taken: list[Any] = []
    leases.acquire(found, "merge", lambda answer, _: taken.append(answer))
    leases.close(60.0)
    posted[0]()
    again, _, _ = lease_client_for(table.uri, tmp_path)
    shutil.rmtree(table.uri)
    again.release(found, taken[0][0], "failed")
    again.close(60.0)
    assert not Path(table.uri).exists()


def test_a_lease_that_was_taken_of_a_removed_table_is_removed(table: Workload, tmp_path: Path) -> None:
    """It keeps the folder, which the service and LanceDB would take for a table for ever."""
    leases, found, posted = lease_client_for(table.uri, tmp_path)
    taken: list[Any] = []
    leases.acquire(found, "merge", lambda answer, _: taken.append(answer))
    leases.close(60.0)
    posted[0]()
    for entry in Path(table.uri).iterdir():
        if entry.name != "_mem_wal_ops":  # a removal that began before it was taken
            shutil.rmtree(entry)
    again, _, _ = lease_client_for(table.uri, tmp_path)
    again.release(found, taken[0][0], "failed")
    again.close(60.0)
    assert not [*Path(table.uri).rglob("*")]


# -- the clock


def test_a_clock_that_is_put_back_stops_nothing(tmp_path: Path) -> None:
    """The next due times are from the clock that was ahead; no job must wait until that time."""
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {schedule: 10m}}}\n" + TABLES)
    timers = Timers(stage.scheduler, timedelta(hours=1))
    monotonic = [1000.0]
    stage.clock.monotonic = lambda: monotonic[0]  # type: ignore[method-assign]
    timers._ahead = timers._offset()
    timers.every("discover", timedelta(minutes=5), lambda: None)
    timers.sync()
    stage.see("a")
    stage.answer("a")
    for _ in range(3):
        stage.due("b")
        stage.turn(0)
        stage.answer("b", outcome="failed", exit_code=24)
        stage.scheduler.tables["b"].entries["merge"].not_before = None
    stage.scheduler.tables["b"].entries["merge"].not_before = stage.clock.now() + timedelta(minutes=10)
    stage.clock.seconds -= 400 * 86400
    monotonic[0] += 1
    timers.check_clock()
    now = stage.clock.now()
    for fires, longest in (
        (timers.next_poll("a"), 30),
        (timers.next_run("a", "merge"), 660),
        (timers.next_poll("b"), 30),
    ):
        assert fires is not None
        assert now <= fires <= now + timedelta(seconds=longest)
    b = stage.scheduler.tables["b"].entries["merge"]
    assert b.not_before is not None
    assert b.not_before <= now + timedelta(minutes=10)
    assert stage.job("a")["last_success"] == now.isoformat(timespec="milliseconds")
    before = timers.next_run("a", "merge")
    for seconds in (1, 3600):
        stage.clock.seconds += seconds
        monotonic[0] += 1
        timers.check_clock()
    assert timers.next_run("a", "merge") == before, "the clock goes on, or jumps ahead"


def test_a_run_by_backlog_moves_no_schedule(tmp_path: Path) -> None:
    """What the status tells as the next run is what fires, and not an interval after the last one."""
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {schedule: {every: 10m}}}}\ntables: [{uri: /a}]\n")
    timers = Timers(stage.scheduler, timedelta(hours=1))
    timers.sync()
    stage.see("a")
    stage.answer("a")
    fires = timers.next_run("a", "merge")
    assert fires == START + timedelta(minutes=10)
    stage.turn(540)
    stage.due("a", why="when: generations >= 8")
    stage.turn()
    assert stage.job("a")["state"] == "running"
    stage.answer("a")
    assert stage.job("a")["last_started"] == (START + timedelta(minutes=9)).isoformat(timespec="milliseconds")
    assert timers.next_run("a", "merge") == fires
    assert timers.next_run("a", "nothing") is None
    timers.stop()
    assert timers.next_run("a", "merge") is None


# -- the history


def test_runs_are_recorded_after_the_history_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person at a prompt, a backup: the run that ended meanwhile must not stand as running for ever."""
    monkeypatch.setattr(run_history, "_BUSY_TIMEOUT", 0.01)
    path = str(tmp_path / "history.sqlite")
    history = History.open(path)
    numbers = [
        history.begin(table="a", uri="/a", job="merge", supervisor="us", why="schedule", plan={}, now=START)
        for _ in range(2)
    ]
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for number in numbers:
        with pytest.raises(HistoryError, match="locked"):
            history.finish(number, START, "succeeded")
    assert {one["outcome"] for one in history.runs()} == {"running"}
    assert "locked" in str(history.fault)
    other.execute("ROLLBACK")
    history.prune(START, timedelta(days=1), 1000)
    assert [one["outcome"] for one in history.runs()] == ["succeeded", "succeeded"]
    assert history.fault is None
    with pytest.raises(HistoryError):
        history.finish(numbers[0], START, "succeeded", decision={"no": "word"})
    history.finish(numbers[1], START, "failed")
    assert history.runs()[0]["outcome"] == "failed", "what can never be written keeps nothing else back"


def test_a_removed_state_folder_is_reported(tmp_path: Path) -> None:
    folder = StateDir(str(tmp_path / "state"))
    assert folder.fault() is None
    shutil.rmtree(folder.path)
    assert "cannot be read any more" in str(folder.fault())
    another = StateDir(folder.path)
    assert "was replaced" in str(folder.fault())
    assert another.fault() is None
    another.close()
    folder.close()


@pytest.mark.parametrize("broken", ["no database", "another shape"])
def test_a_history_that_cannot_be_read_hides_no_table(
    table: Workload, tmp_path: Path, capfd: pytest.CaptureFixture[str], broken: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"state_dir: {tmp_path}/state\nhttp: {{port: 0}}\ntables: [{{uri: {table.uri}}}]\n")
    (tmp_path / "state").mkdir()
    path = tmp_path / "state/history.sqlite"
    if broken == "no database":
        path.write_bytes(bytes(range(256)) * 40)
    else:
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE runs (a)")
        other.close()
    document = run_here(capfd, "status", "--config", str(file), "--json").document
    assert "cannot be read" in document["history_error"]
    assert document["tables"][0]["backlog"]["generations"] == 3
    if broken == "no database":
        assert run_here(capfd, "run", "--once", "--config", str(file)).code == 56


# -- the rest

# libyaml refuses the escape, PyYAML's own parser reads it, and the configuration refuses the character.
ESCAPE = "invalid Unicode character escape code" if yaml.__with_libyaml__ else "invisible character"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('tables: [{uri: "/a\\0b"}]\n', "invisible character"),
        ('tables: [{uri: "/a\\ud800"}]\n', ESCAPE),
        ("defaults: {jobs: {merge: {schedule: 999999999d}}}\n" + TABLES, "at most 100 years"),
        ("history: {keep: 99999999d}\n" + TABLES, "at most 100 years"),
        ("defaults: {jobs: {merge: {schedule: {every: 1m, jitter: 1d}}}}\n" + TABLES, "longer than every"),
    ],
)
def test_values_that_nothing_could_work_with_are_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigProblemsError) as refused:
        load_settings(str(file), {})
    assert says in str(refused.value)


def test_a_slow_heartbeat_server_delays_no_run(tmp_path: Path) -> None:
    """Each byte restarts the timeout: such an answer never ends, and the process has to."""
    asked, enough = threading.Event(), threading.Event()

    class Drip(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            enough.wait()

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Drip)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    told: list[str] = []
    heart = Heartbeat(told.append)
    for _ in range(102):
        heart.beat(f"http://127.0.0.1:{server.server_address[1]}/", "a", "merge", 600.0)
    assert asked.wait(600)
    heart.close(0.01)
    assert "failed" in told, "what was too many is counted"
    assert [one for one in threading.enumerate() if one.name == "heartbeat" and not one.daemon] == []
    enough.set()
    server.shutdown()
    server.server_close()


def test_a_store_that_never_answers_keeps_no_service_from_stopping(tmp_path: Path) -> None:
    """Its process stayed for as long as requests were allowed to take, and, for a lease, as long as a run may."""
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length-000000\n")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as hole:
        options = {"aws_endpoint": f"http://127.0.0.1:{hole.getsockname()[1]}", "allow_http": "true", "timeout": "1h"}
        options |= {"aws_access_key_id": "x", "aws_secret_access_key": "x" * 9, "aws_region": "us-east-1"}
        file = configure(tmp_path, "merge: {}", more=f"stop_grace: 1h\nhttp: {{port: 0, token_file: {token}}}")
        text = file.read_text().replace("http: {port: 0}\n", "", 1)
        table = {"uri": "s3://b/t.lance", "format": "lance", "storage_options": options}
        file.write_text(yaml.safe_dump(yaml.safe_load(text) | {"tables": [table]}))
        with service(file) as running:
            asked = f"http://127.0.0.1:{running.port}/api/v1/tables/t/jobs/merge/run"
            headers = {"Authorization": f"Bearer {token.read_text().strip()}", "Content-Type": "application/json"}
            urlopen(Request(asked, b"{}", headers), timeout=PATIENCE).close()
            until(lambda: running.get("/api/v1/status")["tables"][0]["jobs"]["merge"]["state"] == "leasing")
            running.process.terminate()
            assert running.process.wait(PATIENCE) == 0
            assert running.events("stopped")


def test_a_reload_that_comes_before_the_service_is_up_does_not_end_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        run_here(capfd, "config", "check", str(tmp_path / "none.yaml"))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert run_here(capfd, "run", "--config", str(tmp_path / "none.yaml")).code == 50
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_workers_of_another_release_refuse_to_work(tmp_path: Path) -> None:
    """The package was upgraded below a service that runs: its next workers do nothing, and say what to do."""
    uri = PlainTable(str(tmp_path / "t.lance")).create(fragments=2, rows=20).uri
    before = contents(uri)
    requests = [
        RunRequest(1, uri, {}, "compact", {"tier_factor": 1}, apply=True),
        PollRequest(2, uri, {}, {"compact": {}}),
        {"do": "quit"},
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "memwal_ops.supervisor.workers.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, RELEASE_VARIABLE: "0.0.9"},
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(b"".join(map(encode, requests)))
        worker.stdin.flush()
        answers = [json.loads(line) for line in worker.stdout]  # until it quits: it ends with its input, too
        worker.stdin.close()
    refused = [answer for answer in answers if answer["type"] == "done"]
    assert [(one["exit_code"], one["reason"], one["remedy"]) for one in refused] == [
        (8, "unsupported_feature", "Restart the service.")
    ] * 2
    assert contents(uri) == before
