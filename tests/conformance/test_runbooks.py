"""The commands of runbooks, on a table of each format: one that a page does not restrict to Lance exists for all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import errors
from tests.support.run_cli import run_here
from tests.support.runbook import commands

if TYPE_CHECKING:
    from tests.conformance.formats import FormatUnderTest, TableUnderTest

RUNBOOKS = Path(__file__).parents[2] / "runbooks"
#: What any table can come to; the others have logs, branches or settings of Lance tables for their subject.
PAGES = ("backlog-growing", "clock-skew", "disk-full", "gc-frees-nothing", "repair-a-table", "stuck-lease")
ERRORS = (10, 20, 26, 27, 40, 57)
_ABOUT_A_TABLE = re.compile(r'memwal-ops ([a-z]+) "\$URI"((?: -[a-z-]+(?: \d+\w*)?| --[a-z-]+(?: \w+)?| list)*)')


def told(page: Path, kind: FormatUnderTest) -> list[tuple[str, list[str]]]:
    """The lines of a page that name no more than the table, and that it does not restrict to others; their words."""
    others = {"Lance alone": kind.name != "lance", "not of Zeppelin": kind.name == "zeppelin"}
    lines = [line for line in commands(page.read_text()) if not any(others[word] for word in others if word in line)]
    found = [(line, _ABOUT_A_TABLE.fullmatch(line.partition(" #")[0].strip())) for line in lines]
    return [(line, [match[1], *match[2].split()]) for line, match in found if match]


@pytest.mark.parametrize("name", [*PAGES, *map(str, ERRORS)])
def test_commands_exist(
    kind: FormatUnderTest, made: TableUnderTest, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """They end with what the page says, or with what this table is: never with a usage that it does not have."""
    if kind.name == "jsonlog" or (name == "57" and not kind.waits):
        return  # no page is about the toy; and where runs race, none is told that another is busy
    page = RUNBOOKS / f"{name}.md" if not name.isdigit() else RUNBOOKS.parent / str(errors.runbook(int(name)))
    wrong = []
    for line, (job, *flags) in told(page, kind):
        outcome = run_here(capfd, job, made.uri, *flags)
        said = re.search(r"#.*exits with (\d+)", line)
        if outcome.code in {1, 2, 20} and not (said and int(said[1]) == outcome.code):
            wrong.append(f"{line}: {outcome.code} {outcome.err[:300]}")
    assert not wrong, "\n".join(wrong)
