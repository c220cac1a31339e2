"""What others see: HTTP, metrics, systemd, heartbeats, and the tables that a pattern finds."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.errors import HistoryError, InvalidUsageError
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.http.server import HttpServer
from memwal_ops.supervisor.observe.findings import service_findings
from memwal_ops.supervisor.observe.heartbeat import Heartbeat, SystemdNotifier
from memwal_ops.supervisor.observe.metrics import Metrics
from memwal_ops.supervisor.observe.status import status_of
from memwal_ops.supervisor.scheduling.discovery import discover
from tests.support.fakes import Stage

DOCS = Path(__file__).parents[3] / "docs/http.md"
TABLES = "tables: [{uri: /a}, {uri: /b}]\n"


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=600) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def document(stage: Stage) -> dict[str, Any]:
    tables, pools = status_of(stage.scheduler)
    service = {"ready": True, "config": {"error": None}, "discovery_faults": [], "budget": None}
    return {"service": service, "pools": pools, "tables": [*tables]}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Two tables; one has been looked at, merged and failed on, one never."""
    made = Stage(tmp_path, TABLES)
    made.see("a", generations=9, rows=90, bytes=900, oldest_age=12.5, blocked_regions=1)
    made.answer(
        "a", figures={"bytes_merged": 900, "rows_merged": 90, "conflicts": 2}, phases={"open": 0.5, "commit": 0.1},
        decision="merged", versions=(4,),
    )  # fmt: skip
    made.due("a", "catchup")
    made.turn()
    made.die("a", "catchup")
    made.metrics = Metrics(lambda: document(made))
    made.scheduler.metrics = made.metrics
    made.due("b")
    made.turn()
    made.answer("b", figures={"bytes_collected": 7, "objects_collected": 1}, phases={"open": 0.5})
    return made


def test_every_path(stage: Stage) -> None:
    health = {"alive": (True, "ok"), "ready": (False, "starting")}

    def runs(**filters: Any) -> list[dict[str, Any]]:
        if filters["job"] == "broken":
            raise HistoryError("a bad disk")
        return stage.history.runs(**filters)

    server = HttpServer(
        "127.0.0.1",
        0,
        alive=lambda: health["alive"],
        ready=lambda: health["ready"],
        metrics=stage.metrics.expose,
        status=lambda: document(stage),
        runs=runs,
    )
    base = f"http://127.0.0.1:{server.port}"
    try:
        assert fetch(f"{base}/healthz") == (200, "ok\n")
        assert fetch(f"{base}/readyz") == (503, "starting\n")
        health["ready"] = (True, "ready")
        assert fetch(f"{base}/readyz") == (200, "ready\n")
        code, text = fetch(f"{base}/metrics")
        assert code == 200
        assert 'memwal_ops_backlog_generations{table="a"} 9.0' in text
        code, text = fetch(f"{base}/api/v1/status")
        assert json.loads(text)["tables"][0]["jobs"]["catchup"]["last_outcome"] == "died"
        code, text = fetch(f"{base}/api/v1/runs?table=a&failed=true&limit=5")
        assert [one["outcome"] for one in json.loads(text)["runs"]] == ["died"]
        for query in ("limit=0", "limit=x", "limit=100000", "failed=maybe", "tabel=a"):
            assert fetch(f"{base}/api/v1/runs?{query}")[0] == 400
        assert fetch(f"{base}/api/v1/runs?job=broken")[0] == 503
        assert fetch(f"{base}/etc/passwd")[0] == 404
        with pytest.raises(InvalidUsageError, match="cannot be bound"):
            HttpServer("127.0.0.1", server.port, alive=None, ready=None, metrics=None, status=None, runs=None)  # type: ignore[arg-type]
    finally:
        server.close()


def values(stage: Stage) -> dict[str, float]:
    lines = b"".join(stage.metrics.expose()).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_what_prometheus_reads(stage: Stage) -> None:
    found = values(stage)
    assert found['memwal_ops_backlog_oldest_seconds{table="a"}'] == 12.5
    assert found['memwal_ops_blocked_regions{table="a"}'] == 1
    assert found['memwal_ops_runs_total{job="merge",outcome="succeeded",table="b"}'] == 1
    assert found['memwal_ops_collected_bytes_total{table="b"}'] == 7
    assert found['memwal_ops_consecutive_failures{job="catchup",table="a"}'] == 1
    assert found['memwal_ops_lease_state{job="merge",state="free",table="a"}'] == 1
    assert found['memwal_ops_phase_seconds_count{job="merge",phase="open"}'] == 1
    assert found["memwal_ops_tables"] == 2
    stage.scheduler.set_tables([stage.scheduler.tables["a"].table])
    assert not [name for name in values(stage) if 'table="b"' in name], "a table that is gone takes its series along"


def test_what_alerts_count_begins_at_zero(stage: Stage) -> None:
    """A counter that appears with its first event has not risen, as Prometheus sees it."""
    stage.scheduler.set_tables([state.table for state in stage.scheduler.tables.values()])
    for series in (
        'memwal_ops_polls_total{outcome="failed",table="b"}',
        'memwal_ops_conflicts_total{job="merge",table="b"}',
        'memwal_ops_runs_total{job="merge",outcome="hung",table="b"}',
        'memwal_ops_worker_deaths_total{pool="watch"}',
        'memwal_ops_config_reloads_total{outcome="failed"}',
    ):
        assert values(stage)[series] == 0


def test_a_deferred_job_is_reported(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "defaults: {jobs: {merge: {windows: ['13:00-14:00']}}}\n" + TABLES)
    stage.metrics = Metrics(lambda: document(stage))
    series = 'memwal_ops_deferred{job="merge",table="a"}'
    assert values(stage)[series] == 0
    stage.due("a")
    stage.turn()
    assert values(stage)[series] == 1, "the window opens in an hour"
    assert values(stage)['memwal_ops_waiting_seconds{job="merge",table="a"}'] == 0
    stage.turn(3600)
    assert values(stage)[series] == 0


def test_labels_are_bounded(stage: Stage) -> None:
    for number in range(500):
        stage.metrics.observe_phases("merge", {f"phase {number}": 1.0})
    phases = {name for name in values(stage) if name.startswith("memwal_ops_phase_seconds_count")}
    assert len(phases) <= 42
    assert 'memwal_ops_phase_seconds_count{job="merge",phase="other"}' in phases


def test_the_reference_has_every_metric_and_no_other(stage: Stage) -> None:
    families = {
        family.name + ("_total" if family.type == "counter" else "") for family in stage.metrics.registry.collect()
    }
    listed = set(re.findall(r"^\| `(memwal_ops_\w+)`", DOCS.read_text(), re.MULTILINE))
    assert listed == families


def test_the_reference_has_every_key_of_the_status(stage: Stage) -> None:
    text = DOCS.read_text()
    table = document(stage)["tables"][0]
    keys = {*table, *table["jobs"]["merge"], *table["jobs"]["merge"]["lease"], *document(stage)["pools"]["merge"]}
    keys |= set(stage.history.runs()[0])
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_systemd_is_notified(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(600)
        notifier = SystemdNotifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000000"})
        assert notifier.watchdog_seconds == 10
        notifier.ready("3 tables\nand a line")
        assert listener.recv(1000) == b"READY=1\nSTATUS=3 tables and a line"
        notifier.reloading()
        assert re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=\d+", listener.recv(1000))
        notifier.watchdog()
        assert listener.recv(1000) == b"WATCHDOG=1"
        notifier.stopping()
        assert listener.recv(1000).startswith(b"STOPPING=1\n")
    notifier.status("nobody listens any more")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0memwal-ops-test-" + tmp_path.name)
        listener.settimeout(600)
        SystemdNotifier({"NOTIFY_SOCKET": f"@memwal-ops-test-{tmp_path.name}"}).status("abstract")
        assert listener.recv(1000) == b"STATUS=abstract"
    silent = SystemdNotifier({})
    assert silent.watchdog_seconds is None
    silent.ready("not started by systemd")
    assert SystemdNotifier({"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}).watchdog_seconds is None


def test_a_heartbeat_is_fetched_and_its_failure_is_none_of_ours() -> None:
    asked: list[str] = []
    done: list[str] = []
    both = threading.Semaphore(0)

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if "good" in self.path else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def result(outcome: str) -> None:
        done.append(outcome)
        both.release()

    heart = Heartbeat(result)
    base = f"http://127.0.0.1:{server.server_address[1]}"
    heart.beat(base + "/good/{table}/{job}", "a/b c", "merge", 600.0)
    heart.beat(base + "/bad", "a", "merge", 600.0)
    for _ in range(2):
        assert both.acquire(timeout=600)
    heart.close(600.0)
    server.shutdown()
    server.server_close()
    assert asked == ["/good/a%2Fb%20c/merge", "/bad"]
    assert done == ["succeeded", "failed"]


FLEET = """\
tables:
  - pattern: {root}/tenants/*/*.lance
    exclude: ["*/scratch-*", "old/*"]
    max_tables: {most}
  - uri: {root}/tenants/acme/events.lance
    name: special
  - pattern: {root}/named/*.lance
    name: n
    include: ["keep*"]
"""


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_pattern_finds_its_tables(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    root, options = str(tmp_path / "data"), ""
    if kind == "s3":
        root, given = request.getfixturevalue("bucket")
        options = f"defaults: {{storage_options: {json.dumps(given)}}}\n"
    names = [
        "tenants/acme/events.lance", "tenants/acme/orders.lance", "tenants/acme/scratch-1.lance",
        "tenants/beta/orders.lance", "tenants/old/orders.lance", "tenants/acme/readme", "tenants/acme/deep/x.lance",
        "named/keep.lance", "named/drop.lance",
    ]  # fmt: skip
    for name in names:
        given_options = json.loads(options[len("defaults: {storage_options: ") : -2]) if options else None
        open_store(resolve(f"{root}/{name}", given_options)).put("_versions/1.manifest", b"x")

    def found(most: int) -> Any:
        file = tmp_path / "c.yaml"
        file.write_text(options + FLEET.format(root=root, most=most))
        return discover(load_settings(str(file), {}).tables)

    tables = {table.name: table for table in found(100).tables}
    assert sorted(tables) == ["acme/orders", "beta/orders", "n/keep", "special"]
    assert tables["acme/orders"].uri == f"{root}/tenants/acme/orders.lance"
    few = found(1)
    assert sorted(table.name for table in few.tables) == ["acme/orders", "n/keep", "special"]
    assert "max_tables = 1" in few.faults[0].why


def test_a_pattern_finds_links_and_passes_over_odd_names(tmp_path: Path) -> None:
    """A link to a table is one, as for a shell; a name that nothing can open is a fault, and no end of the pattern."""
    elsewhere = tmp_path / "elsewhere/a.lance"
    elsewhere.mkdir(parents=True)
    (elsewhere / "object").write_bytes(b"x")
    tables = tmp_path / "data/one"
    tables.mkdir(parents=True)
    for name in (b"b.lance", b"no\xffutf8.lance", b"line\nbreak.lance"):
        os.mkdir(os.fsencode(tables) + b"/" + name)
        with open(os.fsencode(tables) + b"/" + name + b"/object", "wb") as file:
            file.write(b"x")
    (tables / "c.lance").symlink_to(elsewhere)
    (tables / "loop.lance").symlink_to("loop.lance")
    (tables / "gone.lance").symlink_to("nothing")
    (tmp_path / "data/two").symlink_to(tmp_path / "elsewhere")
    file = tmp_path / "c.yaml"
    file.write_text(f"tables: [{{pattern: '{tmp_path}/data/*/*.lance'}}]")
    found = discover(load_settings(str(file), {}).tables)
    assert sorted(table.name for table in found.tables) == ["one/b", "one/c", "two/a"]
    assert sorted(fault.why.split(" is ")[0] for fault in found.faults) == [
        r"'one/line\nbreak'", r"'one/no\udcffutf8'",
    ]  # fmt: skip


def test_a_pattern_that_cannot_be_resolved_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tables: [{pattern: 's3://b/*.lance', storage_options: {aws_profile: no-such-profile}}, {uri: /a}]")
    found = discover(load_settings(str(file), {}).tables)
    assert [table.name for table in found.tables] == ["a"]
    (fault,) = found.faults
    assert (fault.pattern, fault.exit_code) == ("s3://b/*.lance", 21)
    assert "no-such-profile" in fault.why
    assert fault.why.endswith(fault.remedy)  # for a log, plan and status; a page shows the remedy apart
    (finding,) = service_findings(None, found.faults, "c.yaml")
    assert finding["do"] == fault.remedy and fault.remedy not in finding["what"]
