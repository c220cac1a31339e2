"""Does what a page of runbooks/ says: runs the commands of its fenced blocks, one after the other."""

from __future__ import annotations

import re
import shlex
from string import Template
from typing import TYPE_CHECKING

from tests.cli.run import run_here
from tests.cli.test_runbook import commands, shell

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

    Our own are run in this process, which is quicker and the same. ``ends``: exit codes by the number of the
    command, where they are not 0.
    """
    text = page.read_text()
    named = set(re.findall(r"^export (\w+)=", text, re.MULTILINE))
    assert named <= variables.keys()
    given = {name: variables[name] for name in named}
    shown = []
    for number, line in enumerate(steps(page)):
        if line.startswith("memwal-ops ") and not re.search(r"[|<>;&]", line.split("#")[0]):
            words = [Template(word).substitute(given) for word in shlex.split(line, comments=True)]
            outcome = run_here(capfd, *words[1:])
            code, said = outcome.code, outcome.out + outcome.err
        else:
            code, said = shell(line, **given)
        assert code == (ends or {}).get(number, 0), f"{page.name}: {line}\n{said}"
        shown.append(said)
    return shown
