"""Does what a page of runbooks/ says: runs the commands of its fenced blocks, one after the other."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from unittest import mock

from tests.support.runbook import commands
from tests.system.drills.lines import run_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest


def steps(page: Path) -> list[str]:
    """The commands of a page, without those that only say what a variable stands for."""
    return [line for line in commands(page.read_text()) if line.strip() and not line.startswith("export ")]


def follow(
    page: Path, variables: Mapping[str, str], capfd: pytest.CaptureFixture[str], ends: Mapping[int, int] | None = None
) -> list[str]:
    """Run all commands of a page; what each of them showed.

    ``ends``: exit codes by the number of the command, where they are not 0.
    """
    named = set(re.findall(r"^export (\w+)=", page.read_text(), re.MULTILINE))
    assert named <= variables.keys()
    shown = []
    with mock.patch.dict(os.environ, {name: variables[name] for name in named}):
        for number, line in enumerate(steps(page)):
            outcome = run_line(capfd, line)
            assert outcome.code == (ends or {}).get(number, 0), f"{page.name}: {line}\n{outcome}"
            shown.append(outcome.out + outcome.err)
    return shown
