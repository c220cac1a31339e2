"""Run the command line: in this process where speed matters, as a program where the process is the point."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from memwal_ops.cli import main

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = [sys.executable, "-m", "memwal_ops"]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Stdout as one JSON object; fails where it is anything else or anything more."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def error(self) -> dict[str, Any]:
        """The error document of a command that was run with ``--json``."""
        assert list(self.document) == ["error"]
        error = self.document["error"]
        assert isinstance(error, dict)
        return error


def run(*arguments: str) -> Outcome:
    """Run a command in this process; neither stream is a terminal."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main._run(list(arguments))
    finally:
        signal.signal(signal.SIGTERM, handler)
        structlog.reset_defaults()
    return Outcome(code, out.getvalue(), err.getvalue())


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what decides on logs and colours, and with ``more``."""
    quiet = ("LANCE_LOG", "RUST_LOG", "MEMWAL_OPS_LOG_LEVEL", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONWARNINGS")
    return {name: value for name, value in os.environ.items() if name not in quiet} | more


def spawn(*arguments: str, program: list[str] | None = None, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a command as a program with both streams piped."""
    done = subprocess.run(
        [*(program or PROGRAM), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=dict(env or environment()),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
