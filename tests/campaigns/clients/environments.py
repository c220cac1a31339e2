"""One environment for each release, made once below the folder that CLIENT_ENVIRONMENTS names, or a temporary one."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from tools.try_dist import interpreter

_NUMBERS = ("7.0.0", "9.0.1", "10.0.0", "11.0.0", "12.0.0", "13.0.0", "14.0.0", "14.0.2")
PYLANCE = tuple(f"pylance {one}" for one in _NUMBERS)
LANCEDB = tuple(f"lancedb {one}" for one in ("0.34.0", "0.36.0", "0.37.1", "0.38.0", "0.39.0", "0.40.0"))
RELEASES = (*PYLANCE, *LANCEDB)
LIMIT = 600  # seconds for the packages of one, some 150 MB


class NoEnvironmentError(Exception):
    """The environment of a release cannot be made here."""


def folder() -> Path:
    """Where environments are: outside of the tree, since each takes half a gigabyte."""
    found = Path(os.environ.get("CLIENT_ENVIRONMENTS") or Path(tempfile.gettempdir(), "memwal-ops-clients"))
    found.mkdir(parents=True, exist_ok=True)
    return found


def python_of(release: str, *more: str, version: str | None = None) -> str:
    """The Python of an environment with that release and nothing of ours; several processes may ask at once.

    Args:
        release: a package and its number.
        more: requirements of packages beside it; PyArrow's is ours by default.
        version: that of the Python; None: ours.

    Raises:
        NoEnvironmentError: it cannot be installed, with the last lines of pip.
    """
    home = _home(release)
    name, number = release.split()
    done, python = home / "ready", str(home / "bin" / "python")
    with Path(f"{home}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            base = sys.executable if version is None else interpreter(version)
            if base is None:
                raise NoEnvironmentError(f"{release} needs Python {version}, which is not installed here.")
            subprocess.run([base, "-m", "venv", "--clear", "--without-pip", str(home)], check=True)
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
            command = [*pip, f"{name}=={number}", *(more or [f"pyarrow=={pa.__version__}"])]
            try:
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
            except subprocess.SubprocessError as error:
                why = getattr(error, "stderr", None) or error
                raise NoEnvironmentError(f"{release} cannot be installed here: {str(why)[-300:]}") from error
            done.touch()
    return python


def remove() -> None:
    """Delete all environments."""
    for release in RELEASES:
        shutil.rmtree(_home(release), ignore_errors=True)
        Path(f"{_home(release)}.lock").unlink(missing_ok=True)


def _home(release: str) -> Path:
    return folder() / release.replace(" ", "-")
