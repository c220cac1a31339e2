"""Register the jobs and formats of pyproject.toml where the package was not installed since they changed.

Entry points are read from the metadata of an installation. In a tree that is not the installed one (a worktree, a
branch), tests and the reference of commands would know other jobs than the tree has.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = "memwal-ops"


def use_registrations() -> None:
    """Let this process, and those that it starts, find the entry points of pyproject.toml; nothing if they do."""
    named = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    installed = distribution(_PACKAGE)
    found = {(entry.group, entry.name, entry.value) for entry in installed.entry_points if entry.group in named}
    if found == {(group, name, value) for group, entries in named.items() for name, value in entries.items()}:
        return
    folder = tempfile.mkdtemp(prefix="memwal-ops-registrations-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = Path(folder) / f"memwal_ops-{installed.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(installed.read_text("METADATA") or installed.read_text("PKG-INFO") or "")
    scripts = "".join(f"{one.name} = {one.value}\n" for one in installed.entry_points if one.group == "console_scripts")
    lines = [f"[console_scripts]\n{scripts}"]
    for group, entries in named.items():
        lines.append(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()))
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
