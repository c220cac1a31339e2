"""docs/notebook.py: it runs from its first cell to its last, and uses nothing but what is public."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memwal_ops

NOTEBOOK = Path(__file__).parents[3] / "docs/notebook.py"
SHOWN = (
    "revision 3, 3 regions, 12 unmerged generations",
    "dry_run - still at revision 3",
    "merged: 12 generations in 1 pass",
    "exit code 0 - keys: decision, passes, blocked",
    "before: 3 now: 4",
    "waiting: 0",
    "a second merge: nothing_to_merge",
    "catchup -> caught_up",
    "snapshot -> built",
    "nothing_to_delete: every object is needed",
    "invalid_usage (2): max_bytes: 'much' is not a size",
    "table_not_found (3): No table found at",
    "maintained",
)


@pytest.mark.long
def test_it_runs_and_shows_what_its_cells_tell(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        [sys.executable, str(NOTEBOOK)],
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    at = 0
    for line in SHOWN:
        assert line in ran.stdout[at:], f"{line!r} is not shown, or too early:\n{ran.stdout}"
        at = ran.stdout.index(line, at)


def test_it_uses_what_is_public_alone() -> None:
    tree = ast.parse(NOTEBOOK.read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names} == {"memwal_ops"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "memwal_ops"
    }
    assert used >= {"open_table", "run_job", "Report", "MemwalOpsError"}
    assert used <= {*memwal_ops.__all__}


def test_each_cell_of_code_has_an_expected_output() -> None:
    """A cell of text stands before each."""
    cells = re.split(r"^# %%", NOTEBOOK.read_text(), flags=re.MULTILINE)[1:]
    kinds = ["text" if cell.startswith(" [markdown]") else "code" for cell in cells]
    assert len(kinds) > 10
    assert kinds == ["text", "code"] * (len(kinds) // 2)
