"""Nothing compares layouts: code asks the table what its log means (``Table.log``), or its layout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from memwal_ops.formats import lance

ROOT = Path(lance.__file__).parent
# They make a log, change its layout, or find out that another process migrated the table.
DOORS = {"init.py", "migrate/job.py", "migrate/layout.py", "legacy/gc.py", "erase/job.py"}


def compared(source: str) -> Iterator[str]:
    """Comparisons of ``.memwal`` with None, and of a layout's name."""
    if ".memwal" not in source and ".layout" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                text = ast.unparse(side)
                if text.endswith((".memwal", ".layout.name")):
                    yield ast.unparse(node)


def asks_for_a_log(source: str) -> bool:
    if ".log" not in source:
        return False
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return any(ast.unparse(node).endswith(".log.exists") for node in found)


def test_nothing_compares_layouts() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    found = {name: [*compared(text)] for name, text in sources.items()}
    assert {name for name, lines in found.items() if lines} == {"table.py"}, found
    jobs = {name.removeprefix("jobs/"): text for name, text in sources.items() if name.startswith("jobs/")}
    assert {name for name, text in jobs.items() if asks_for_a_log(text)} == DOORS


def test_comparisons_are_seen() -> None:
    assert [*compared("if table.memwal is not None: pass")] == ["table.memwal is not None"]
    assert [*compared("one = run.layout.name == 'none'")] == ["run.layout.name == 'none'"]
    assert not [*compared("table.log.strict_commits and table.primary_key == ()")]
    assert asks_for_a_log("if not self.view.table.log.exists: pass")
