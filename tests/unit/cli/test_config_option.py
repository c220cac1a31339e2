"""The file of ``config``'s commands: as an argument, or by the option that all other commands have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = ["check", "systemd", "cron", "kubernetes"]


@pytest.mark.parametrize("command", COMMANDS)
def test_both_say_the_same(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("http: {host: 0.0.0.0}\ntables:\n  - uri: s3://bucket/t.lance\n")
    argument = run_here(capfd, "config", command, str(file))
    option = run_here(capfd, "config", command, "--config", str(file))
    assert (argument.code, argument.out) == (0, option.out)
    assert str(file) in argument.out or "t.lance" in argument.out


@pytest.mark.parametrize("command", COMMANDS)
def test_two_files_are_refused(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    refused = run_here(capfd, "config", command, "one.yaml", "--config", "two.yaml")
    assert refused.code == 2
    assert "Give one file, not one.yaml and --config two.yaml." in refused.err
