"""What goes wrong around a supervisor, and must neither lose, starve nor wedge anything, nor be told wrongly."""

from __future__ import annotations

import http.client
import io
import json
import shutil
import signal
import socket
import sqlite3
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table
from memwal_ops.core.leases import Holder
from memwal_ops.errors import HistoryError, JobPluginError, TableNotFoundError
from memwal_ops.jobs import looks
from memwal_ops.jobs.api import Job
from memwal_ops.jobs.registry import load_jobs, package_of
from memwal_ops.supervisor import history as history_module
from memwal_ops.supervisor.clockwork import Clockwork
from memwal_ops.supervisor.config import ConfigProblemsError, load_settings
from memwal_ops.supervisor.discovery import FoundTable, discover
from memwal_ops.supervisor.heartbeat import Heartbeat
from memwal_ops.supervisor.history import History
from memwal_ops.supervisor.http import HttpServer
from memwal_ops.supervisor.job_answers import amounts, checked_figures, checked_report, unexpected, whole_numbers
from memwal_ops.supervisor.leasing import LeaseDesk
from memwal_ops.supervisor.looking import look_at
from memwal_ops.supervisor.requests import Answer, LookRequest
from memwal_ops.supervisor.state_dir import StateDir
from tests.cli.run import run_here
from tests.supervisor.fakes import START, Stage, vars_of
from tests.supervisor.plugin_packages import install
from tests.tables import damage
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLES = "tables: [{uri: /a}, {uri: /b}]\n"


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        made.put([1, 2, 50])
        made.flush()
    return made


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


def desk_for(table_uri: str, tmp_path: Path) -> tuple[LeaseDesk, FoundTable, list[Callable[[], None]]]:
    file = tmp_path / "c.yaml"
    file.write_text(f"tables: [{{uri: {table_uri}}}]\n")
    (entry,) = load_settings(str(file), {}).tables
    posted: list[Callable[[], None]] = []
    desk = LeaseDesk(Holder("us", "us@here"), timedelta(minutes=5), posted.append)
    return desk, FoundTable("t", table_uri, entry), posted


def test_a_lease_makes_no_table_of_nothing(tmp_path: Path) -> None:
    """Whoever lists the folder would take it for one."""
    desk, found, posted = desk_for(str(tmp_path / "tables/typo.lance"), tmp_path)
    answers: list[Any] = []
    desk.acquire(found, "merge", lambda taken, error: answers.append((taken, error)))
    desk.close(wait=True)
    for one in posted:
        one()
    ((taken, error),) = answers
    assert taken is None
    assert isinstance(error, TableNotFoundError)
    assert not (tmp_path / "tables").exists()


def test_a_lease_that_is_given_back_brings_no_table_back(table: Workload, tmp_path: Path) -> None:
    desk, found, posted = desk_for(table.uri, tmp_path)
    taken: list[Any] = []
    desk.acquire(found, "merge", lambda answer, _: taken.append(answer))
    desk.close(wait=True)
    posted[0]()
    again, _, _ = desk_for(table.uri, tmp_path)
    shutil.rmtree(table.uri)
    again.release(found, taken[0][0], "failed")
    again.close(wait=True)
    assert not Path(table.uri).exists()


# -- the clock


def test_a_clock_that_is_put_back_stops_nothing(tmp_path: Path) -> None:
    """What fires next was told by the clock that was ahead; nobody must wait until it is there again."""
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {schedule: 10m}}}\n" + TABLES)
    clockwork = Clockwork(stage.conductor, timedelta(hours=1))
    monotonic = [1000.0]
    stage.clock.monotonic = lambda: monotonic[0]  # type: ignore[method-assign]
    clockwork._ahead = clockwork._offset()
    clockwork.every("discover", timedelta(minutes=5), lambda: None)
    clockwork.sync()
    stage.turn()
    stage.answer("a")
    for _ in range(3):
        stage.due("b")
        stage.turn(0)
        stage.answer("b", outcome="failed", exit_code=24)
        stage.conductor.tables["b"].entries["merge"].not_before = None
    stage.conductor.tables["b"].entries["merge"].not_before = stage.clock.now() + timedelta(minutes=10)
    stage.clock.seconds -= 400 * 86400
    monotonic[0] += 1
    clockwork.check_clock()
    now = stage.clock.now()
    scheduler = clockwork._scheduler
    scheduler.start(paused=True)
    for name, longest in (("look a", 30), ("run a merge", 660), ("look b", 30)):
        fires = scheduler.get_job(name).next_run_time
        assert now <= fires <= now + timedelta(seconds=longest), name
    b = stage.conductor.tables["b"].entries["merge"]
    assert b.not_before is not None
    assert b.not_before <= now + timedelta(minutes=10)
    assert stage.job("a")["last_success"] == now.isoformat(timespec="milliseconds")
    # A clock that goes on, or jumps ahead, is left to APScheduler.
    before = scheduler.get_job("run a merge").next_run_time
    for seconds in (1, 3600):
        stage.clock.seconds += seconds
        monotonic[0] += 1
        clockwork.check_clock()
    assert scheduler.get_job("run a merge").next_run_time == before
    scheduler.shutdown(wait=False)


def test_a_run_by_backlog_moves_no_schedule(tmp_path: Path) -> None:
    """What the status tells as the next run is what fires, and not an interval after the last one."""
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {schedule: {every: 10m}}}}\ntables: [{uri: /a}]\n")
    clockwork = Clockwork(stage.conductor, timedelta(hours=1))
    clockwork.sync()
    stage.turn()
    stage.answer("a")
    clockwork._scheduler.start(paused=True)
    fires = clockwork.next_run("a", "merge")
    assert fires == START + timedelta(minutes=10)
    stage.turn(540)
    stage.due("a", why="when: generations >= 8")
    stage.turn()
    assert stage.job("a")["state"] == "running"
    stage.answer("a")
    assert stage.job("a")["last_started"] == (START + timedelta(minutes=9)).isoformat(timespec="milliseconds")
    assert clockwork.next_run("a", "merge") == fires
    assert clockwork.next_run("a", "nothing") is None
    clockwork._scheduler.shutdown(wait=False)
    assert clockwork.next_run("a", "merge") is None


# -- the history


def test_a_history_that_is_locked_is_told_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person at a prompt, a backup: the run that ended meanwhile must not stand as running for ever."""
    monkeypatch.setattr(history_module, "_PATIENCE", 0.01)
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


def test_a_state_folder_that_is_removed_is_said(tmp_path: Path) -> None:
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


# -- packages of others


@dataclass(frozen=True)
class Options:
    pass


@dataclass(frozen=True)
class OddReport:
    decision: Any = "fine"
    told: Any = field(default_factory=dict)

    def to_json(self) -> Any:
        return self.told


def job(**details: Any) -> Job:
    return Job(
        name="odd", options=Options, plan=lambda *_: OddReport(), apply=lambda *_: OddReport(),
        figures={"depth": "count"}, **details,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"depth": "deep"}, "'deep' for depth, and no number"),
        ({"depth": None}, "None for depth"),
        ({"depth": float("nan")}, "nan for depth"),
        ({"generations": 3}, "'generations', which it does not declare"),
        ([3], "no mapping"),
    ],
)
def test_a_look_that_gives_no_numbers_is_its_packages_fault(table: Workload, figures: Any, says: str) -> None:
    odd = job(look=lambda _: figures)
    with pytest.raises(JobPluginError, match=says):
        checked_figures(odd, figures)
    found, faults = look_at(open_table(table.uri), [odd, load_jobs()["merge"]])
    assert [one.reason for one in faults] == ["job_plugin"]
    assert found["generations"] == 3, "and hides no figure of another job"


def test_whose_bug_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in install(["moody"], tmp_path)["PYTHONPATH"].split(":")[:2]:
        monkeypatch.syspath_prepend(path)
    assert package_of("merge") is None
    assert unexpected(ValueError("oh"), "merge").exit_code == 1
    theirs = unexpected(ValueError("oh"), "moody")
    assert (theirs.reason, str(theirs)) == (
        "job_plugin",
        f"The job 'moody' of {package_of('moody')} raised ValueError: oh",
    )
    assert "memwal-moody" in str(theirs)


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (OddReport(decision=None), 0),
        (OddReport(told=[1]), 0),
        (OddReport(), "bad"),
        (OddReport(), 300),
        (OddReport(), -1),
        (OddReport(), True),
    ],
)
def test_a_report_that_is_none_is_refused(report: OddReport, code: Any) -> None:
    with pytest.raises(JobPluginError, match="does not keep to the interface"):
        checked_report(job(exit_code=lambda _: code), report)


def test_what_is_told_of_a_run_is_json_and_numbers() -> None:
    told = checked_report(job(), OddReport(told={"share": float("nan"), "when": START}))
    assert told == (0, "fine", {"share": None, "when": str(START)})
    odd = {"bytes_merged": "many", "conflicts": -3, "rows_merged": float("inf"), "good": 2}
    assert amounts(odd) == {"good": 2}
    assert whole_numbers([1, "2", None, True]) == (1,)


def test_figures_of_a_look_that_failed_in_part_are_taken(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {when: generations >= 2}}}\n" + TABLES)
    stage.conductor.look("a")
    stage.turn()
    worker, request = next(one for one in reversed(stage.pools.given) if isinstance(one[1], LookRequest))
    half = Answer(request.id, "failed", exit_code=51, message="odd gave None", figures={"generations": 2}, version=3)
    stage.conductor.on_message(worker, vars_of(half))  # type: ignore[arg-type]
    stage.turn()
    assert stage.in_hand == [("a", "merge")]
    assert stage.conductor.tables["a"].error == "odd gave None"


def test_a_store_that_does_not_answer_leaves_the_watcher_to_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, TABLES)

    def failing(seconds: float) -> None:
        stage.conductor.look("a")
        stage.turn()
        worker, request = stage.pools.given[-1]
        stage.clock.seconds += seconds
        answer = Answer(request.id, "failed", exit_code=24, message="no answer")
        stage.conductor.on_message(worker, vars_of(answer))  # type: ignore[arg-type]
        stage.turn()

    def looks_at_a() -> int:
        return sum(isinstance(one, LookRequest) and one.uri == "/a" for _, one in stage.pools.given)

    failing(0.1)
    stage.turn(5)
    failing(60)
    assert looks_at_a() == 2, "one that fails at once is asked again as ever"
    stage.conductor.look("a")
    stage.turn(200)
    assert looks_at_a() == 2
    stage.turn(101)
    stage.conductor.look("a")
    stage.turn()
    assert looks_at_a() == 3


# -- HTTP


@pytest.fixture
def served() -> Iterator[HttpServer]:
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (False, "starting"), metrics=lambda: b"m 1\n",
        status=lambda: {"tables": []}, runs=lambda **_: [],
    )  # fmt: skip
    yield server
    server.close()


def answer(server: HttpServer, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path)
    got = connection.getresponse()
    found = got.status, dict(got.getheaders()), got.read()
    connection.close()
    return found


def test_other_methods(served: HttpServer) -> None:
    code, headers, body = answer(served, "HEAD", "/healthz")
    assert (code, headers["Content-Length"], body) == (200, "3", b"")
    assert answer(served, "HEAD", "/readyz")[0] == 503
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        code, headers, body = answer(served, method, "/healthz")
        assert (code, headers["Allow"]) == (405, "GET, HEAD")
        assert "GET or HEAD" in json.loads(body)["error"]


def test_odd_requests_make_no_noise(served: HttpServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as odd:
        odd.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
        assert odd.recv(12) == b"HTTP/1.0 400"
    assert answer(served, "GET", "/api/v1/runs?limit=%C2%B2")[0] == 400
    for sent in (b"GET /metrics HTTP/1.0\r\n\r\n", b"\x16\x03\x01\r\n", b""):
        left = socket.create_connection(("127.0.0.1", served.port))
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, and no good-bye
        left.sendall(sent)
        left.close()
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(100)]
    assert answer(served, "GET", "/healthz")[0] == 200
    for one in idle:
        one.close()
    assert "Traceback" not in capfd.readouterr().err


# -- what check says


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, 0, "OK - 1 table"),
        ({"service": {"discovery_faults": [{"pattern": "s3://b/*", "error": "no answer"}]}}, 1, "s3://b/*: no answer"),
        ({"tables": []}, 1, "no table is maintained"),
        ({"job": {"waiting_for": "lease"}, "late": True}, 0, "OK"),
        ({"job": {"waiting_for": "worker"}, "late": True}, 1, "a/merge did not succeed for 240 s"),
        ({"job": {"consecutive_failures": 1}}, 1, "a/merge failed 1 time in a row"),
        ({"job": {"consecutive_failures": 3}}, 2, "a/merge failed 3 times in a row"),
        ({"table": {"look_error": "no answer"}}, 1, "a cannot be read: no answer"),
        ({"table": {"backlog": {"blocked_regions": 2.0}}}, 2, "a: 2 regions blocked"),
        ({"document": [1, 2]}, 2, "is no memwal-ops"),
        ({"document": {"status": "up"}}, 2, "is no memwal-ops"),
    ],
)
def test_check_in_every_state(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any], code: int, says: str,
) -> None:  # fmt: skip
    since = 240.0 if "late" in change else 1.0
    state = {
        "consecutive_failures": 0, "schedule_seconds": 60.0, "seconds_since_success": since,
        "waiting_for": None, "state": "queued", **change.get("job", {}),
    }  # fmt: skip
    one = {"name": "a", "backlog": {}, "look_error": None, "jobs": {"merge": state}, **change.get("table", {})}
    service = {"ready": True, "config": {"error": None}, "discovery_faults": [], **change.get("service", {})}
    document = change.get("document", {"service": service, "tables": change.get("tables", [one])})
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(json.dumps(document).encode()))
    file = tmp_path / "c.yaml"
    file.write_text(TABLES)
    outcome = run_here(capfd, "check", "--nagios", "--config", str(file))
    assert (outcome.code, says in outcome.out) == (code, True), outcome.out


def test_what_waits_behind_a_missing_generation_has_an_age(table: Workload) -> None:
    damage.remove_generation(table.uri, table.regions[0], 1)
    figures = looks.merge(open_table(table.uri))
    assert figures["blocked_regions"] == 1
    assert figures["oldest_age"] > 0


# -- the rest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('tables: [{uri: "/a\\0b"}]\n', "nobody can see"),
        ('tables: [{uri: "/a\\ud800"}]\n', "nobody can see"),
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


def test_a_heartbeat_server_that_drips_holds_nobody(tmp_path: Path) -> None:
    """Each byte begins the timeout anew: such an answer never ends, and the process has to."""
    asked, enough = threading.Event(), threading.Event()

    class Drip(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            enough.wait()

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Drip)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told: list[str] = []
    heart = Heartbeat(told.append)
    for _ in range(102):
        heart.beat(f"http://127.0.0.1:{server.server_address[1]}/", "a", "merge", 30.0)
    assert asked.wait(30)
    heart.close(0.01)
    assert "failed" in told, "what was too many is counted"
    assert [one for one in threading.enumerate() if one.name == "heartbeat" and not one.daemon] == []
    enough.set()
    server.shutdown()
    server.server_close()


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
