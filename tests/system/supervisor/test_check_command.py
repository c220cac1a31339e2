"""What check reports of a service in each state."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from tests.support.run_cli import run_here
from tests.support.tables import damage
from tests.support.tables.workload import Workload
from tests.system.supervisor.conftest import TABLES

EVENTS = {"queue": "https://sqs/1/q", "error": None, "missed": [], "unreadable": 0, "lag_seconds": None}


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, 0, "OK - 1 table"),
        ({"service": {"discovery_faults": [{"pattern": "s3://b/*", "error": "no answer"}]}}, 1, "s3://b/*: no answer"),
        ({"service": {"events": {**EVENTS, "error": "no answer"}}}, 1, "The queue of events cannot be read"),
        ({"service": {"events": EVENTS}}, 0, "OK - 1 table"),
        ({"tables": []}, 1, "no table is maintained"),
        ({"job": {"waiting_for": "lease"}, "late": True}, 0, "OK"),
        ({"job": {"waiting_for": "worker"}, "late": True}, 1, "a/merge has not succeeded for 240 s"),
        ({"job": {"consecutive_failures": 1}}, 1, "a/merge failed 1 time in a row"),
        ({"job": {"consecutive_failures": 3}}, 2, "a/merge failed 3 times in a row"),
        ({"table": {"look_error": "no answer"}}, 2, "CRITICAL - a cannot be read: no answer"),
        ({"table": {"state": "not_read"}}, 3, "UNKNOWN - not read yet: 1 of 1 table | tables=1 not_read=1"),
        ({"table": {"state": "not_read"}, "job": {"consecutive_failures": 3}}, 2, "not read yet: 1 of 1 table"),
        ({"table": {"state": "not_read"}, "service": {"ready": False}}, 3, "the service is not ready"),
        ({"table": {"backlog": {"blocked_regions": 2.0}}}, 2, "a: 2 regions blocked"),
        ({"document": [1, 2]}, 2, "is not memwal-ops"),
        ({"document": {"status": "up"}}, 2, "is not memwal-ops"),
    ],
)
def test_check_in_every_state(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any], code: int, says: str,
) -> None:  # fmt: skip
    since = 240.0 if "late" in change else 1.0
    state = {
        "consecutive_failures": 0, "schedule_seconds": 60.0, "seconds_since_success": since,
        "waiting_for": None, "state": "queued", "last_outcome": "succeeded", **change.get("job", {}),
    }  # fmt: skip
    one = {"name": "a", "backlog": {}, "look_error": None, "jobs": {"merge": state}, **change.get("table", {})}
    service = {
        "instance": "i", "ready": True, "config": {"error": None}, "discovery_faults": [], **change.get("service", {}),
    }  # fmt: skip
    document = change.get("document", {"service": service, "tables": change.get("tables", [one])})
    monkeypatch.setattr(
        "urllib.request.OpenerDirector.open", lambda *_, **__: io.BytesIO(json.dumps(document).encode())
    )
    file = tmp_path / "c.yaml"
    file.write_text(TABLES)
    outcome = run_here(capfd, "check", "--nagios", "--config", str(file))
    assert (outcome.code, says in outcome.out) == (code, True), outcome.out


def test_what_waits_behind_a_missing_generation_has_an_age(table: Workload) -> None:
    damage.remove_generation(table.uri, table.regions[0], 1)
    figures = merge.backlog(open_table(table.uri))
    assert figures["blocked_regions"] == 1
    assert figures["oldest_age"] > 0
