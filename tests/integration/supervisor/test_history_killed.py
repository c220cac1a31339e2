"""The run history survives a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from memwal_ops.supervisor.state.history import History

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    script = f"""
import os, signal
from datetime import datetime, UTC
from memwal_ops.supervisor.state.history import History
history = History.open({str(path)!r})
for n in range(50):
    number = history.begin(table="a", uri="/a", job="merge", supervisor="s", why="w", plan={{}}, now=datetime.now(UTC))
    if n < 49:
        history.finish(number, datetime.now(UTC), "succeeded", decision="merged")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    history = History.open(str(path))
    assert history.mark_killed(NOW) == 1
    outcomes = [one["outcome"] for one in history.runs(limit=100)]
    assert outcomes == ["killed"] + ["succeeded"] * 49
