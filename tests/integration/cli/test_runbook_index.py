"""runbooks/index-behind.md: its reasons exist, and its commands run on a table that is behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memwal_ops import errors, open_table
from memwal_ops.formats.lance.indexes import index_faults
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from tests.support.runbook import commands, shell
from tests.support.tables.indexed import create, write

RUNBOOK = (Path(__file__).parents[3] / "runbooks/index-behind.md").read_text()


def test_every_reason_is_one_of_ours() -> None:
    known = [*vars(errors).values(), *vars(index_faults).values()]
    reasons = {found.reason for found in known if hasattr(found, "reason")}
    headings = {word for line in re.findall(r"^## (.*)$", RUNBOOK, re.MULTILINE) for word in line.split(", ")}
    others = {"UNBALANCED", "index_rows: an index lacks rows", "Build an index anew"}  # findings, and a remedy
    assert headings - others <= reasons


@pytest.mark.long
def test_its_commands_run(tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    ran = 0
    for command in commands(RUNBOOK):
        if command.startswith("export"):
            continue
        filled = command.replace("OLD NEW", "vector_idx fresh").replace("--index NAME", "--index id_idx")
        code, output = shell(filled, URI=uri)
        assert code == 0, f"{filled}\n{output}"
        ran += 1
    assert ran >= 7
    assert {"id_idx", "fresh"} <= set(base_indexes(open_table(uri)))
