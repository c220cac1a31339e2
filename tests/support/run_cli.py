"""The command line as a script sees it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; anything beside it fails."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def run_here(capfd: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """In this process: quick, and everything but start-up is the same."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main.main(list(arguments))
    out, err = capfd.readouterr()
    return Outcome(int(ended.value.code or 0), out, err)


def run_process(*arguments: str, wrap: Any = list, **environment: str) -> Outcome:
    """As a process of its own; ``wrap`` may put something before the command."""
    command = wrap([sys.executable, "-m", "memwal_ops", *arguments])
    # What is imported for another test, in the same process, may have set what Lance logs.
    kept = {name: value for name, value in os.environ.items() if name != "LANCE_LOG"}
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **environment}, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def contents(uri: str) -> dict[str, tuple[int, bytes]]:
    """Every file below a table, to prove that nothing was touched."""
    return {
        str(path.relative_to(uri)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(Path(uri).rglob("*"))
        if path.is_file()
    }
