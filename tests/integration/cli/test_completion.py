"""Completion of commands and options, by the lines of docs/install.md."""

from __future__ import annotations

import re
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
        ("config c", {"check"}),
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
