"""The service in a process of its own: configured, started, asked, killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memwal_ops.errors import HistoryError
from memwal_ops.supervisor.state.history import History
from tests.support.waiting import PATIENCE, until


class Running:
    """A service in a process of its own."""

    def __init__(self, config: Path, environ: dict[str, str]) -> None:
        self.log = config.with_suffix(".log").open("ab")
        command = [sys.executable, "-m", "memwal_ops", "run", "--config", str(config)]
        self.process = subprocess.Popen(command, stderr=self.log, env={**os.environ, **environ})
        self.config = config
        self.state = config.parent / f"state-{config.stem}"
        self.log_path = config.with_suffix(".log")

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.log_path.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in events if event["event"] == name]

    @property
    def port(self) -> int:
        return int(until(lambda: self.events("ready"))[-1]["http"])

    def get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        return json.loads(text) if path.startswith("/api") else text

    def runs(self, **filters: Any) -> list[dict[str, Any]]:
        path = self.state / "history.sqlite"
        if not path.exists():
            return []
        try:
            history = History.open_to_read(str(path))
        except HistoryError:  # it is just being made
            return []
        try:
            return history.runs(limit=1000, **filters)
        finally:
            history.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


@contextmanager
def service(config: Path, environ: dict[str, str] | None = None) -> Iterator[Running]:
    running = Running(config, environ or {})
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()
        running.log.close()


def configure(tmp_path: Path, jobs: str, *, name: str = "config", more: str = "") -> Path:
    """Only the named jobs; everything else is off, so that few workers start."""
    off = ", ".join(
        f"{job}: {{enabled: false}}"
        for job in ("merge", "catchup", "compact", "snapshot", "verify")
        if f"{job}:" not in jobs
    )
    path = tmp_path / f"{name}.yaml"
    path.write_text(
        f"state_dir: {tmp_path}/state-{name}\nhttp: {{port: 0}}\n{more}\n"
        f"defaults: {{poll: 1s, jobs: {{{jobs}{', ' if off else ''}{off}}}}}\n"
        f"tables: [{{pattern: '{tmp_path}/tables/*.lance'}}]\n"
    )
    return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
