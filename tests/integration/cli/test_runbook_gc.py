"""runbooks/gc-frees-nothing.md: its commands run, and its headings are words that gc really says."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from memwal_ops import errors, open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.gc import job as gc
from tests.support.runbook import commands, shell
from tests.support.tables.workload import Workload

RUNBOOK = (Path(__file__).parents[3] / "runbooks/gc-frees-nothing.md").read_text()


@pytest.mark.long
def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = Workload(5, regions=1, base_rows=50).create(str(tmp_path / "t.lance")).step(10)
    table.close()
    ran = 0
    for command in commands(RUNBOOK):
        if not command.startswith("export"):
            code, output = shell(command.replace("REGION", table.regions[0]), URI=table.uri)
            assert code == 0, f"{command}\n{output}"
            ran += 1
    assert ran >= 10
    assert (tmp_path / "plan.jsonl").read_text().count("\n") > 5


def test_its_headings_are_what_gc_says(tmp_path: Path) -> None:
    table = Workload(6, regions=1, base_rows=50).create(str(tmp_path / "t.lance")).step(10)
    table.close()
    said = [item.why for item in gc.plan(open_table(table.uri), gc.GcOptions()).items[Verdict.HELD]]
    merge.apply(open_table(table.uri), merge.MergeOptions())
    said += [item.why for item in gc.plan(open_table(table.uri), gc.GcOptions()).items[Verdict.HELD]]
    options = gc.GcOptions(reader_grace=timedelta(0), allow_unsafe=True)
    said += [item.why for item in gc.plan(open_table(table.uri), options).items[Verdict.HELD]]
    for heading in ("not merged yet", "covers generations only up to", "needed by version", "fence post"):
        assert heading in RUNBOOK
        assert any(heading in why for why in said), heading
    reasons = {found.reason for found in vars(errors).values() if hasattr(found, "reason")}
    assert {"deletes_failed", "version_gone"} <= reasons & set(re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE))
