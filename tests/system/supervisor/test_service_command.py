"""``memwal-ops service`` acts on a service that runs; ``status`` asks it also when its file has an error."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from memwal_ops import open_table
from memwal_ops.core.holds import holds
from memwal_ops.errors import InvalidUsageError
from memwal_ops.supervisor.config.loader import http_of
from memwal_ops.supervisor.http.client import ServiceClient
from tests.support.run_cli import contents, run_here
from tests.support.service import configure, service
from tests.support.tables.workload import Workload
from tests.support.waiting import until

TOKEN = "t" * 32


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def config(tmp_path: Path, tables: list[Workload]) -> Path:
    assert tables
    (tmp_path / "tokens").write_text(f"view {'v' * 32} viktor\noperate {TOKEN} anna\n")
    (tmp_path / "tokens").chmod(0o600)
    file = configure(tmp_path, "merge: {schedule: 1d, when: generations >= 100}")
    text = file.read_text().replace("{port: 0}", f"{{port: {free_port()}, token_file: {tmp_path}/tokens}}")
    file.write_text(text)
    return file


@pytest.mark.long
def test_an_operator_acts_on_a_service(
    config: Path, tables: list[Workload], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def act(*arguments: str, code: int = 0) -> str:
        done = run_here(capfd, "service", *arguments, "--config", str(config))
        assert done.code == code, done.err
        return done.out if code == 0 else done.err

    refused = act("run", "--table", "t0", "--job", "merge", code=2)
    assert "does not respond" in refused
    with service(config) as running:
        until(lambda: running.events("ready"))
        until(lambda: len(running.runs(job="merge")) == 3 and all(one["finished"] for one in running.runs(job="merge")))
        assert "paused: all tables until resume." in act("pause", "--reason", "a move")
        assert "resume it first" in act("run", "--table", "t0", "--job", "merge", code=2)
        assert json.loads(act("resume", "--json")) == {"resumed": {"table": None, "job": None}}
        tables[0].put([7])
        tables[0].flush()
        assert "queued: merge of t0" in act("run", "--table", "t0", "--job", "merge", "--reason", "now")
        asked = until(lambda: [one for one in running.runs(table="t0") if one["why"] == "request" and one["finished"]])
        assert (asked[0]["outcome"], "@" in asked[0]["plan"]["asked_by"]) == ("succeeded", True)
        log = running.get(f"/api/v1/runs/{asked[0]['id']}")["log"]
        assert isinstance(log, list)
        planned = json.loads(act("plan", "--table", "t0", "--job", "merge", "--json"))
        assert (planned["job"], planned["report"]["decision"]) == ("merge", "dry_run")
        assert "planned: merge of t0; nothing was changed." in act("plan", "--table", "t0", "--job", "merge")
        assert "Give --table" in act("plan", "--table", "t0", code=2)
        held = act("hold", "--table", "t0", "--version", "2", "--for", "1d", "--reason", "backup")
        assert re.match(r"held: version 2 of t0 until \S+, as hold 1\.", held)
        assert "released: hold 1 of t0, version 2." in act("hold", "--table", "t0", "--release", "1")
        assert "Leave out" in act("hold", "--table", "t0", "--release", "1", "--version", "2", code=2)
        assert "Give --table" in act("hold", "--job", "gc", code=2)
        assert "no table 'none'" in act("pause", "--table", "none", "--for", "2h", code=2)
        assert "Nothing here waits in backoff" in act("retry", code=2)
        assert "no run to cancel" in act("cancel", "--table", "t0", "--job", "merge", code=2)
        act("pause", "--table", "t1", "--for", "2h")
        (tmp_path / "wrong").write_text("w" * 32)
        (tmp_path / "wrong").chmod(0o600)
        assert "token is wrong" in act("pause", "--token-file", str(tmp_path / "wrong"), code=2)
        (tmp_path / "wrong").chmod(0o644)
        assert "chmod 600" in act("pause", "--token-file", str(tmp_path / "wrong"), code=50)
        assert "Give --table" in act("run", code=2)
        assert "Give --table" in act("pause", "--job", "merge", code=2)
        audit = [json.loads(line) for line in (running.state / "audit.jsonl").read_text().splitlines()]
        assert [(one["action"], one["status"], one["who"]) for one in audit][:4] == [
            ("pause", 200, "anna"), ("run", 409, "anna"), ("resume", 200, "anna"), ("run", 202, "anna"),
        ]  # fmt: skip
        assert TOKEN not in running.log_path.read_text()
    with service(config) as again:
        until(lambda: len(again.events("ready")) == 2)
        paused = {one["name"]: one["paused"] for one in again.get("/api/v1/status")["tables"]}
        assert (paused["t0"], paused["t1"]["reason"]) == (None, "")


def test_plans_and_holds_are_made_by_workers(config: Path, tables: list[Workload]) -> None:
    http = http_of(str(config))
    with service(config) as running:
        until(lambda: running.events("ready"))
        client = ServiceClient(http, TOKEN)
        until(lambda: all(one["finished"] for one in running.runs(job="merge")) and len(running.runs(job="merge")) == 3)
        # A run is over in the history before its lease is given back.
        until(
            lambda: all(
                job["lease"]["state"] == "free"
                for one in running.get("/api/v1/status")["tables"]
                for job in one["jobs"].values()
            )
        )

        def stored() -> list[tuple[str, str]]:
            """What the tables have; a poll may record their schemas meanwhile."""
            kept = ((table.uri, path) for table in tables for path in contents(table.uri))
            return [(uri, path) for uri, path in kept if not path.startswith("_mem_wal_ops/schema/")]

        before, runs = stored(), len(running.runs())
        planned = client.act("/tables/t0/jobs/merge/plan", {})
        assert (planned["job"], planned["report"]["decision"]) == ("merge", "dry_run")
        assert (stored(), len(running.runs())) == (before, runs)
        held = client.act("/tables/t0/holds", {"for": "3h", "reason": "a training run"})["hold"]
        assert held["note"] == "anna: a training run"
        [found] = holds(open_table(tables[0].uri))
        assert (found.number, found.released, found.versions) == (held["id"], False, (held["version"],))
        assert client.act(f"/tables/t0/holds/{held['id']}/release", {})["hold"]["released"]
        assert holds(open_table(tables[0].uri))[0].released
        for path, fields, why in (
            ("/tables/t0/holds", {"version": "999"}, "version_gone"),
            ("/tables/t0/holds/77/release", {}, "There is no hold 77"),
            ("/tables/t0/holds/x/release", {}, "number from 1"),
            ("/tables/none/holds", {}, "no table"),
            ("/tables/t0/jobs/none/plan", {}, "no job"),
        ):
            with pytest.raises(InvalidUsageError, match=why):
                client.act(path, fields)


def test_status_asks_the_service_when_its_file_has_an_error(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = config.read_text()
    bad = good.replace("tables:", "tabels:")
    with service(config) as running:
        until(lambda: running.events("ready"))
        for text in (bad, f"{good}\n  - ]: {{"):
            config.write_text(text)
            shown = run_here(capfd, "status", "--config", str(config))
            if text == bad:
                assert (shown.code, "Service: runs" in shown.out, "t2" in shown.out) == (50, True, True)
            assert (shown.code, "invalid_config" in shown.err) == (50, True)
        config.write_text(bad)
        document = run_here(capfd, "status", "--config", str(config), "--json").document
        assert (document["exit_code"], document["error"]["reason"], len(document["tables"])) == (
            50,
            "invalid_config",
            3,
        )
        other = config.with_name("other.yaml")
        other.write_text(bad)
        alone = run_here(capfd, "status", "--config", str(other))
        assert (alone.code, "Service: runs" in alone.out) == (50, False), "another file's service"
    stopped = run_here(capfd, "status", "--config", str(config))
    assert (stopped.code, stopped.out) == (50, "")
