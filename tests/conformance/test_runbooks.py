"""The commands of runbooks, on a table of each format: one that a page does not restrict to Lance exists for all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.run_cli import run_here
from tests.support.runbook import commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.conformance.formats import FormatUnderTest, TableUnderTest

RUNBOOKS = Path(__file__).parents[2] / "runbooks"
#: What any table can come to; the others have logs, branches or settings of Lance tables for their subject.
PAGES = ("backlog-growing", "clock-skew", "disk-full", "gc-frees-nothing", "repair-a-table", "stuck-lease")
ERRORS = (10, 20, 26, 27, 40)
_ABOUT_A_TABLE = re.compile(
    r'memwal-ops ([a-z]+) "\$URI"'
    r'((?:(?: --region)? "\$REGION(?:/\d)?"| -[a-z-]+(?: \d+\w*)?| --[a-z-]+(?: \w+)?| list)*)'
)


def pages_of(kind: FormatUnderTest) -> Iterator[Path]:
    """Those that a table of this format can lead to; of Lance tables, of all errors but those of other formats."""
    yield from (RUNBOOKS / f"{name}.md" for name in PAGES)
    for page in sorted(RUNBOOKS.glob("errors/*.md")):
        code = int(page.name[:2])
        lance = kind.name == "lance" and not 57 <= code <= 62 and (code != 36 or kind.label == "lance-legacy")
        if code in ERRORS or lance or (code == 57 and kind.waits):
            yield page


def told(kind: FormatUnderTest) -> Iterator[tuple[str, list[str]]]:
    """The lines that name no more than the table, and that their page does not restrict to others; their words."""
    others = {"Lance alone": kind.name != "lance", "not of Zeppelin": kind.name == "zeppelin", "spark": True}
    for line in dict.fromkeys(line for page in pages_of(kind) for line in commands(page.read_text())):
        match = _ABOUT_A_TABLE.fullmatch(line.partition(" #")[0].strip())
        if match and not any(others[word] for word in others if word in line):
            yield line, [match[1], *match[2].replace('"', "").split()]


def region_of(document: Mapping[str, Any]) -> str | None:
    """The first region that ``inspect`` names; None: a table without regions."""
    return next((one["region_id"] for one in document.get("regions", ())), None)


@pytest.mark.sampled(2)
def test_commands_of_runbooks_exist(
    kind: FormatUnderTest, made: TableUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    """They end with what the page says, or with what this table is: never with a usage that it does not have."""
    if kind.name == "jsonlog":
        return  # no page is about the toy
    done, wrong = dict[tuple[str, ...], int](), []
    region = region_of(run_here(capfd, "inspect", made.uri, "--json").document)
    for line, words in told(kind):
        if region is None and "$REGION" in line:
            continue
        job, *flags = (word.replace("$REGION", region or "") for word in words)
        outcome = run_here(capfd, job, made.uri, *flags) if (job, *flags) not in done else None
        code = done.setdefault((job, *flags), outcome.code if outcome else 0)
        said = re.search(r"#.*exits with (\d+)", line)
        if outcome and code in {1, 2, 20} and not (said and int(said[1]) == code):
            wrong.append(f"{line}: {code} {outcome.err[:300]}")
    assert len(done) > 15
    assert not wrong, "\n".join(wrong)
