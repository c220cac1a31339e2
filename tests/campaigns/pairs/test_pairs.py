"""Rows of the covering array, the seed's first ones; and that the walk finds, reduces and prints what it must."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.campaigns.pairs import planted
from tests.campaigns.pairs.covering import covering
from tests.campaigns.pairs.dimensions import LANCE, LANCE_RULES, PLAIN
from tests.campaigns.pairs.walk import MOST_LINES, Process, reduced, rows, script
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED, ROWS = env_number("PAIRS_SEED", CAMPAIGN_SEED), env_number("PAIRS_ROWS", 40)
PLACE = Path(__file__).parent
FOUND = json.loads((PLACE / "found.json").read_text())
PUBLIC = {"memwal_ops", "memwal_ops.memwal", "memwal_ops.legacy", "memwal_ops.errors", "memwal_ops.cli.main"}


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.close()


def test_rows(process: Process) -> None:
    """Each as ``make pairs`` runs it."""
    wrong = []
    for number, row in zip(range(ROWS), rows(SEED), strict=False):
        outcome = process.run(row, f"{SEED}-{number}")
        if outcome.kind:
            wrong.append(f"PAIRS_SEED={SEED}, row {number}: {outcome.kind}: {outcome.text} at {outcome.source}; {row}")
    assert not wrong, "\n".join(wrong)


def test_every_two_values_are_together() -> None:
    """But for those that no row may have."""
    names = ["layout", "file", "row_ids", "place", "damage", "holder"]
    model = {name: LANCE[name] for name in names}
    rules = [rule for rule in LANCE_RULES if {*rule.about} <= {*names}]
    found = [*covering(model, rules, SEED)]
    assert not [row for row in found if any(rule.broken(row) for rule in rules)]
    for one, other in combinations(names, 2):
        pairs = {(row[one], row[other]) for row in found}
        of_both = [rule for rule in rules if {*rule.about} <= {one, other}]
        wanted = {
            (a, b) for a in model[one] for b in model[other]
            if not any(rule.broken({one: a, other: b}) for rule in of_both)
        }  # fmt: skip
        assert pairs == wanted


def test_the_plainest_table_is_allowed() -> None:
    assert not [rule.why for rule in LANCE_RULES if rule.broken(PLAIN)]
    assert all(PLAIN[name] in values for name, values in LANCE.items())
    assert all(rule.why and {*rule.about} <= {*LANCE} for rule in LANCE_RULES)


def test_the_oracle_shares_no_code_with_the_product() -> None:
    """It imports what a user imports, and no builder of tests that has parts of the product."""
    for path in PLACE.glob("*.py"):
        if path.name.startswith("test_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for name in names:
                assert not name.startswith("memwal_ops") or name in PUBLIC, f"{path.name} imports {name}"
                assert not name.startswith("tests.") or name.startswith("tests.campaigns.pairs"), path.name


def test_each_planted_bug_is_one_line_of_today() -> None:
    assert FOUND.keys() <= planted.BUGS.keys()
    for name, bug in planted.BUGS.items():
        path = Path(bug.name.replace(".", "/"))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert path.read_text().count(bug.old) == 1, f"{name}: {bug.old!r} in {path}"
        assert bug.new != bug.old


@pytest.mark.parametrize("name", FOUND)
def test_planted_bugs_are_found(name: str) -> None:
    """By the row that found it, whose table is right without it."""
    row, seed = FOUND[name]["row"], FOUND[name]["seed"]
    process = Process(name)
    try:
        outcome = process.run(row, seed)
        assert outcome.kind, f"{name} is not found by {row}"
    finally:
        process.close()


def test_a_failure_is_printed_as_a_short_program(tmp_path: Path) -> None:
    """The plainest values and fewest steps; it fails alone as it did in its row."""
    name = min(FOUND, key=lambda one: FOUND[one]["seconds"])
    process = Process(name)
    try:
        row, seed = FOUND[name]["row"], FOUND[name]["seed"]
        outcome = process.run(row, seed)
        row, kept, outcome = reduced(row, seed, outcome, process)
    finally:
        process.close()
    text = script(row, seed, kept, outcome)
    assert len(text.splitlines()) <= MOST_LINES, text
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "RUST_LOG": "off"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or outcome.kind.split()[0] in done.stderr or "memwal_ops" in done.stderr, done.stderr
