"""What a service keeps is for its user alone, whatever the umask, and also where an earlier release made it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memwal_ops.supervisor.http.acting import Audit
from memwal_ops.supervisor.state.directory import StateDir
from memwal_ops.supervisor.state.history import History


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_files_of_the_state_folder_are_private(tmp_path: Path, umask: int) -> None:
    (tmp_path / "history.sqlite").touch(0o644)
    before = os.umask(umask)
    try:
        folder, history = StateDir(str(tmp_path)), History.open(str(tmp_path / "history.sqlite"))
        folder.members = 3
        Audit(str(tmp_path)).record("pause", 200, who="me", client="here")
        made = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        history.close()
        folder.close()
    finally:
        os.umask(before)
    assert made.keys() >= {"lock", "instance", "members", "history.sqlite", "history.sqlite-wal", "audit.jsonl"}
    assert {*made.values()} == {0o600}, made
