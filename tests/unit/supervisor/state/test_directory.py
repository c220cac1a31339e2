"""What a service keeps is for its user alone, whatever the umask, and also where an earlier release made it."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from memwal_ops.places import default_state_dir
from memwal_ops.supervisor.http.acting import Audit
from memwal_ops.supervisor.state.directory import StateDir, state_dir
from memwal_ops.supervisor.state.history import History


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
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


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o777])
def test_the_folder_is_private(tmp_path: Path, umask: int) -> None:
    """Also one that an earlier release made; not one that is somebody's."""
    (tmp_path / "earlier").mkdir(0o750)
    (tmp_path / "earlier/lock").touch()
    (tmp_path / "home").mkdir(0o755)
    (tmp_path / "home/notes").touch()
    before = os.umask(umask)
    try:
        for name in ("new", "earlier", "home"):
            StateDir(str(tmp_path / name)).close()
        History.open(str(tmp_path / "elsewhere/history.sqlite")).close()
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("new", "earlier", "elsewhere", "home")}
    assert modes == {"new": 0o700, "earlier": 0o700, "elsewhere": 0o700, "home": 0o755}


def test_commands_in_a_shell_find_the_state_folder_of_the_unit(tmp_path: Path) -> None:
    """systemd gives STATE_DIRECTORY to the service alone: status, history, cost and plan have to find it without."""
    unit, home = tmp_path / "unit", tmp_path / "home/memwal-ops"
    shell = {"XDG_STATE_HOME": str(home.parent)}
    assert default_state_dir(shell, unit=str(unit)) == str(home), "there is none: it is made in the user's home"
    unit.mkdir()
    assert default_state_dir(shell, unit=str(unit)) == str(unit)
    assert default_state_dir({**shell, "STATE_DIRECTORY": "/given:/more"}, unit=str(unit)) == "/given"
    assert state_dir(Mock(state_dir=None), shell) == str(home), "a service that starts leaves the unit's alone"
    home.mkdir(parents=True)
    assert default_state_dir(shell, unit=str(unit)) == str(home), "the user has a service of their own"
