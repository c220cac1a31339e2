"""Completion of commands and options, by the lines of docs/install.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_cli import run_here

PAGE = Path(__file__).parents[3] / "docs/install.md"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    (variable,) = set(re.findall(rf"(\w+)={shell}_source memwal-ops", PAGE.read_text()))
    monkeypatch.setenv(variable, f"{shell}_source")
    outcome = run_here(capfd)
    assert outcome.code == 0
    assert f"{variable}={shell}_complete" in outcome.out


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("com", {"compact"}),
        ("merge --max", {"--max-bytes", "--max-generations"}),
        ("config c", {"check", "cron"}),
        # the shell's own completion of paths
        ("merge /data/o", {"dir,/data/o"}),
        ("lease list ord", {"dir,ord"}),
        ("scan --database /d", {"dir,/d"}),
        ("run --config mem", {"file,mem"}),
        ("config check mem", {"file,mem"}),
    ],
)
def test_what_is_completed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, completed: set[str]
) -> None:
    monkeypatch.setenv("_MEMWAL_OPS_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"memwal-ops {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    outcome = run_here(capfd)
    assert {line.removeprefix("plain,") for line in outcome.out.split()} == completed


# What each shell's own completion offers for the words, with the line of docs/install.md in its start-up file.
BASH = """
offered() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  $(complete -p memwal-ops | sed 's/.*-F \\([^ ]*\\).*/\\1/') memwal-ops
  echo "${COMPREPLY[*]}"
}
"""
FISH = "function offered; complete -C \"$argv\" | string replace -r '\\t.*' ''; end"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("shell", "prelude"), [("bash", BASH), ("fish", FISH)])
def test_a_shell_completes(tmp_path: Path, shell: str, prelude: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "memwal-ops"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m memwal_ops "$@"\n')
    command.chmod(0o755)
    (line,) = re.findall(rf"^\| {shell}[^|]* \| [^|]+ \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)
    script = f"{line.replace(chr(92), '')}\n{prelude}\noffered memwal-ops maint\noffered memwal-ops merge --dry\n"
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["maintain", "--dry-run"], done
