"""Which numbered statements of the specifications have a test, and which module implements them.

Reads tests/requirements.md, the ``@pytest.mark.req(...)`` markers in tests/ and the numbers that the
docstrings and comments of memwal_ops/ cite, without running anything.

``make requirements`` prints the statements without a test or a reason (tests/untested.md), and exits with 1 where one
of them names a statement that does not exist. The documentation site has :func:`page`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/spec.md")
"""Where the page would be among the others; only the site has it."""
_ROW = re.compile(r"\| (S\d-\d+) \| (.*) \| ([^|]+) \|")
_CITED = re.compile(r"\b(S\d)-(\d{3})(?: to (S\d)-(\d{3}))?")
_UNTESTED = re.compile(r"\| ((?:S\d-\d{3}(?:, )?)+) \| (.+) \|")
_TITLE = re.compile(r"## (S\d): (.+)")
_WIDTH = 110
_HEAD = """# Which statement is implemented where

Generated from the requirement marks by `make site`. [tests/requirements.md](../tests/requirements.md)
numbers the statements of each document. A row below is a statement that the code cites by its number, or that a test
proves (`@pytest.mark.req("S0-187")`). A statement without a row is about another program (writers, readers), is
background, or is not implemented; `make requirements` lists those that no test proves. The last table has the
statements on which no job depends.

| document | statements | cited by the code | proven by a test |
|---|---|---|---|
"""


def statements() -> dict[str, str]:
    """Number to statement, in the order of the document."""
    rows = (_ROW.fullmatch(line) for line in (ROOT / "tests/requirements.md").read_text().splitlines())
    return {row[1]: row[2] for row in rows if row is not None}


def untested() -> dict[str, str]:
    """Number to the reason why no test proves the statement, from tests/untested.md."""
    rows = (_UNTESTED.fullmatch(line) for line in (ROOT / "tests/untested.md").read_text().splitlines())
    return {number: row[2] for row in rows if row is not None for number in row[1].split(", ")}


def markers(path: Path) -> Iterator[tuple[str, int]]:
    """Every number that a marker of the file names, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "req":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, node.lineno


def citations(path: Path) -> set[str]:
    """Every number that the text of a file cites; ``S0-050 to S0-053`` is four."""
    found: set[str] = set()
    for document, first, _, last in _CITED.findall(path.read_text()):
        found |= {f"{document}-{number:03}" for number in range(int(first), int(last or first) + 1)}
    return found


def tests_by_statement() -> dict[str, list[str]]:
    """Per statement the places of its tests, as ``path:line``."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number, line in markers(path):
            places[number].append(f"{path.relative_to(ROOT)}:{line}")
    return places


def page() -> str:
    """The page of all statements that the code cites or a test proves, in Markdown, for the place :data:`PAGE`."""
    known = statements()
    code: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "memwal_ops").rglob("*.py")):
        for number in citations(path):
            code[number].append(str(path.relative_to(ROOT)))
    tests = tests_by_statement()
    titles = dict(_TITLE.findall((ROOT / "tests/requirements.md").read_text()))
    summary, sections = [], []
    for document, title in sorted(titles.items()):
        own = [number for number in known if number.startswith(document)]
        shown = [number for number in own if number in code or number in tests]
        cited, proven = (sum(number in where for number in own) for where in (code, tests))
        summary.append(f"| {document}: {title} | {len(own)} | {cited} | {proven} |")
        if shown:
            sections += [f"\n## {document}: {title}\n", "| | statement | code | tests |\n|---|---|---|---|"]
            sections += [f"| {one} | {known[one]} | {_links(code[one])} | {_links(tests[one])} |" for one in shown]
    reasons = {number: why for number, why in untested().items() if number not in tests}
    sections += ["\n## Without a test, and why\n", "| | statement | why |\n|---|---|---|"]
    sections += [f"| {one} | {known[one]} | {why} |" for one, why in sorted(reasons.items())]
    return _HEAD + "\n".join([*summary, *sections]) + "\n"


def _links(places: list[str]) -> str:
    paths = sorted({place.partition(":")[0] for place in places})
    return ", ".join(f"[{path.rpartition('/')[2].removesuffix('.py')}](../{path})" for path in paths)


def main() -> None:
    """Print the statements without a test, and how many of each document have one."""
    known = statements()
    places, reasons = tests_by_statement(), untested()
    print("Statements without a test, and without a reason in tests/untested.md:")
    for number, text in known.items():
        if number not in places and number not in reasons:
            shown = f"  {number}  {text}"
            print(shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + "…")
    total = Counter(number[:2] for number in known)
    proven = Counter(number[:2] for number in known if number in places)
    print("\nProven by a test:")
    for document, count in total.items():
        print(f"  {document}  {proven[document]:3} of {count}")
    unknown = {number: where for number, where in places.items() if number not in known}
    unknown |= {number: ["tests/untested.md"] for number in reasons if number not in known}
    for number, where in unknown.items():
        print(f"No such statement: {number} ({', '.join(where)})", file=sys.stderr)
    if unknown:
        sys.exit(1)


if __name__ == "__main__":
    main()
