"""Rows of the covering array, the seed's first ones; and that the walk finds, reduces and prints what it must."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops.core.job import JobSpec
from tests.campaigns.pairs import damage, planted
from tests.campaigns.pairs.covering import covering
from tests.campaigns.pairs.dimensions import LANCE, LANCE_RULES, MODELS, PLAINS, THREES
from tests.campaigns.pairs.walk import MOST_LINES, Process, pairs, reduced, remote, script, threes
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED, ROWS = env_number("PAIRS_SEED", CAMPAIGN_SEED), env_number("PAIRS_ROWS", 40)
PLACE = Path(__file__).parent
FOUND = json.loads((PLACE / "found.json").read_text())
PUBLIC = {
    "memwal_ops", "memwal_ops.memwal", "memwal_ops.legacy", "memwal_ops.errors", "memwal_ops.cli.main",
    "memwal_ops.formats",
}  # fmt: skip
#: What runs of each hundred rows: the other formats have fewer, and those of three dimensions are many.
SHARES = {"lance": 66, "zeppelin": 12, "lm_diskann": 7, "remote": 3, "threes": 12}


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.close()


@pytest.mark.parametrize("name", SHARES)
def test_rows(process: Process, name: str) -> None:
    """Each as ``make pairs`` runs it: the first ones, which cover most; of other seeds others."""
    others = {"remote": remote, "threes": threes}
    found = others[name](SEED) if name in others else pairs(SEED, name)
    wrong = []
    for number, row in zip(range(ROWS * SHARES[name] // 100), found, strict=False):
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


def test_every_three_values_are_together() -> None:
    """Of layouts, jobs, row ids, damages and places, in rows that are otherwise drawn by the seed."""
    found = [*threes(SEED)]
    rules = [rule for rule in LANCE_RULES if {*rule.about} <= {*THREES}]
    assert not [row for row in found if any(rule.broken(row) for rule in LANCE_RULES)]
    for names in combinations(THREES, 3):
        of_them = [rule for rule in rules if {*rule.about} <= {*names}]
        wanted = set(product(*(LANCE[name] for name in names)))
        wanted = {one for one in wanted if not any(rule.broken(dict(zip(names, one, strict=True))) for rule in of_them)}
        assert {tuple(row[name] for name in names) for row in found} == wanted


@pytest.mark.parametrize("name", MODELS)
def test_the_plainest_table_is_allowed(name: str) -> None:
    model, rules = MODELS[name]
    assert not [rule.why for rule in rules if rule.broken(PLAINS[name])]
    assert all(PLAINS[name][one] in values for one, values in model.items())
    assert all(rule.why and {*rule.about} <= {*model} for rule in rules)


def test_each_job_of_a_format_is_in_its_model(tmp_path: Path) -> None:
    """By its name, or with an option."""
    for name in MODELS:
        if name == "lance":
            continue
        specs = importlib.import_module(f"memwal_ops.formats.{name}.specs")
        jobs = {spec.name for spec in vars(specs).values() if isinstance(spec, JobSpec)}
        assert jobs <= {*MODELS[name][0]["job"]}


def test_remedies_are_found_in_what_commands_tell() -> None:
    """With the values of their options; none that is to be filled in, and each once; then those of the page."""

    def told(text: str, code: int = 0) -> list[list[str]]:
        return [*damage.remedies(text, code, "U", set())]

    assert told("memwal-ops repair URI --deep\n--apply links it again.") == [["repair", "U", "--deep", "--apply"]]
    assert told("memwal-ops catchup URI --index v_idx --rebuild. Or") == [
        ["catchup", "U", "--index", "v_idx", "--rebuild"]
    ]
    assert told("memwal-ops catchup URI --migrate-codebook v_idx NEW; memwal-ops merge /t") == [["merge", "U"]]
    assert told("", 27) == [["gc", "U", "--apply", "--json"], ["gc", "U", "--json"], ["gc", "U", "--apply"]]


def test_the_oracle_shares_no_code_with_the_product() -> None:
    """It imports what a user imports, and no builder of tests that has parts of the product."""

    def imported(path: Path) -> set[str]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
        return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}

    for path in PLACE.glob("*.py"):
        if path.name.startswith("test_"):
            continue
        for name in imported(path):
            assert not name.startswith("memwal_ops") or name in PUBLIC, f"{path.name} imports {name}"
            if name.startswith("tests.support."):
                of = imported(Path(name.replace(".", "/")).with_suffix(".py"))
                assert not [one for one in of if one.startswith("memwal_ops")], f"{path.name} imports {name}"
            else:
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
    row, seed, steps = FOUND[name]["row"], FOUND[name]["seed"], FOUND[name].get("steps")
    process = Process(name)
    try:
        outcome = process.run(row, seed, steps)
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
