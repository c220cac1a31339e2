"""Runs the commands of a runbook: those of memwal-ops and Python in this process, which is quick; others by bash."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.run_cli import Outcome, run_here

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

_OPERATORS = set("();<>|&")


def run_line(
    capfd: pytest.CaptureFixture[str], line: str, *, wrap: Callable[[list[str]], list[str]] | None = None
) -> Outcome:
    """One line as a reader would run it, with the variables of the environment.

    With ``wrap`` it is bash's in any case, as a process of its own by the command that this gives.
    """
    words = [] if wrap else _words(line)
    if words[:1] == ["memwal-ops"]:
        return run_here(capfd, *words[1:])
    if words[:2] == ["python", "-c"] and len(words) == 3:
        return _python(capfd, words[2])
    return _bash(line, wrap or list)


def _words(line: str) -> list[str]:
    """The words of a plain command; none of a line that only a shell understands."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    if any(set(word) <= _OPERATORS or "$(" in word or "`" in word for word in words):
        return []
    expanded = [os.path.expandvars(word) for word in words]
    unset = [word for word in expanded if "$" in word]
    assert not unset, f"not set: {unset}"
    return expanded


def _python(capfd: pytest.CaptureFixture[str], code: str) -> Outcome:
    capfd.readouterr()
    ended = 0
    try:
        exec(compile(code, "<page>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        ended = 1
    return Outcome(ended, *capfd.readouterr())


def _bash(command: str, wrap: Callable[[list[str]], list[str]]) -> Outcome:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        wrap(["bash", "-c", command]), env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
