"""Which numbered statements of the specification have a test: ``make requirements``.

Reads tests/requirements.md and the ``@pytest.mark.req(...)`` markers in tests/, without running
anything. Exits with 1 where a marker names a statement that does not exist.
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

ROOT = Path(__file__).parents[1]
_ROW = re.compile(r"\| (S\d-\d+) \| (.*) \| ([^|]+) \|")
_WIDTH = 110


def statements() -> dict[str, str]:
    """Number to statement, in the order of the document."""
    rows = (_ROW.fullmatch(line) for line in (ROOT / "tests/requirements.md").read_text().splitlines())
    return {row[1]: row[2] for row in rows if row is not None}


def markers(path: Path) -> Iterator[tuple[str, int]]:
    """Every number that a marker of the file names, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "req":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, node.lineno


def main() -> None:
    """Print the statements without a test, and how many of each document have one."""
    known = statements()
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number, line in markers(path):
            places[number].append(f"{path.relative_to(ROOT)}:{line}")
    print("Statements without a test:")
    for number, text in known.items():
        if number not in places:
            shown = f"  {number}  {text}"
            print(shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + "…")
    total = Counter(number[:2] for number in known)
    proven = Counter(number[:2] for number in known if number in places)
    print("\nProven by a test:")
    for document, count in total.items():
        print(f"  {document}  {proven[document]:3} of {count}")
    unknown = {number: where for number, where in places.items() if number not in known}
    for number, where in unknown.items():
        print(f"No such statement: {number} ({', '.join(where)})", file=sys.stderr)
    if unknown:
        sys.exit(1)


if __name__ == "__main__":
    main()
