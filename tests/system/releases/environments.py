"""Environments with other releases of pylance, which tests make once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

if TYPE_CHECKING:
    from pathlib import Path


def python_with(release: str, home: Path, variable: str) -> str:
    """A Python with that release of pylance and nothing of ours: a new one, or the one that a variable names.

    The test is skipped where the release cannot be installed.
    """
    given = os.environ.get(variable)
    if given:
        return given
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = str(home / "bin/python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    command += [f"pylance=={release}", f"pyarrow=={pa.__version__}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pylance {release} cannot be installed here: {done.stderr[-300:]}")
    return python


def run(python: str, script: Path, *arguments: str) -> str:
    """What a script prints, run by another release."""
    command = [python, str(script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"}, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
