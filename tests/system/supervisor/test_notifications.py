"""A service that notifies: of a table that is lost, and found again; of nothing twice, also over a restart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.receivers import Receiver, http_receiver
from tests.support.run_cli import run_process
from tests.support.service import service
from tests.support.tables.plain import PlainTable
from tests.support.waiting import until


def told(server: Receiver) -> list[tuple[str, str]]:
    documents = (json.loads(body) for _, _, body in server.received)
    return [(one["kind"], one["table"]) for document in documents for one in document["changes"]]


def test_a_table_that_is_lost_and_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        PlainTable(str(tmp_path / f"{name}.lance")).create(rows=3)
    # A poll that fails defers the next by its time: polled second, and no other format is loaded for it.
    shutil.move(tmp_path / "b.lance/_versions", tmp_path / "versions")
    off = ", ".join(f"{job}: {{enabled: false}}" for job in ("compact", "catchup", "expire", "gc", "verify", "merge"))
    with http_receiver() as server:
        config = tmp_path / "c.yaml"
        config.write_text(
            f"state_dir: {tmp_path}/state-c\nhttp: {{port: 0}}\n"
            f"notify: {{group_wait: 0s, targets: [{{name: ops, type: webhook, url: '{server.url}'}}]}}\n"
            f"defaults: {{poll: 1s, jobs: {{{off}}}}}\n"
            f"tables: [{{uri: {tmp_path}/a.lance}}, {{uri: {tmp_path}/b.lance, format: lance}}]\n"
        )
        with service(config) as running:
            until(lambda: told(server))
            assert set(told(server)) == {("new", "b")}
            until(
                lambda: (
                    'memwal_ops_notifications_total{outcome="succeeded",target="ops"} 1.0' in running.get("/metrics")
                )
            )
        with service(config) as running:
            until(lambda: len(running.events("ready")) == 2)
            until(lambda: all(one["look_error"] or one["looked_at"] for one in running.get("/api/v1/status")["tables"]))
            shutil.move(tmp_path / "versions", tmp_path / "b.lance/_versions")
            until(lambda: told(server).count(("resolved", "b")) == told(server).count(("new", "b")))
    assert {table for _, table in told(server)} == {"b"}


def test_by_run_once(tmp_path: Path) -> None:
    """As by cron: at its end, with what it has found."""

    with http_receiver() as server:
        config = tmp_path / "c.yaml"
        config.write_text(
            f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\n"
            f"notify: {{targets: [{{name: ops, type: webhook, url: '{server.url}'}}]}}\n"
            f"tables: [{{uri: {tmp_path}/none.lance}}]\n"
        )
        assert run_process("run", "--config", str(config), "--once").code == 3
        assert set(told(server)) == {("new", "none")}
        assert run_process("run", "--config", str(config), "--once").code == 3
        assert len(server.received) == 1
