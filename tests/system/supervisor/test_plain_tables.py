"""A LanceDB folder that nobody maintained: two commands, and afterwards its tables are small, with every index."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from tests.support.run_cli import run_process
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
def test_scan_and_run(tmp_path: Path) -> None:
    tables = []
    for name in ("orders", "users", "events"):
        made = PlainTable(str(tmp_path / f"db/{name}.lance")).create(fragments=8, rows=50).create_indexes()
        made.delete(*range(0, 400, 3))
        made.append(120)
        month_ago = time.time() - timedelta(days=30).total_seconds()
        for path in (tmp_path / f"db/{name}.lance/_versions").iterdir():
            os.utime(path, (month_ago, month_ago))
        tables.append((made, made.dataset.version))
    seen = tmp_path / "seen.yaml"
    seen.write_text(f"state_dir: {tmp_path}/none\nhttp: {{enabled: false}}\ntables: [{{database: {tmp_path}/db}}]\n")
    shown = run_process("status", "--config", str(seen)).out
    assert re.search(r"^table +state +uncovered_rows +uncovered_fragments +fragments +small_frag", shown, re.MULTILINE)
    assert re.search(r"^orders +ok +120 ", shown, re.MULTILINE)
    assert "rows wait" not in shown
    scanned = run_process("scan", "--database", str(tmp_path / "db"))
    assert scanned.code == 0
    assert "3 tables: 3 ok; jobs have work on 3;" in scanned.out
    config = tmp_path / "memwal.yaml"
    configuration = scanned.out[scanned.out.index("defaults:") :]
    config.write_text(f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\n{configuration}")
    ran = run_process("run", "--once", "--config", str(config))
    assert ran.code == 0, ran.err
    failed = run_process("history", "--config", str(config), "--failed")
    assert "No run" in failed.out
    for made, versions in tables:
        assert made.read() == made.model
        assert len(made.dataset.get_fragments()) <= 2
        assert len(made.dataset.versions()) < versions
        table = open_table(made.uri)
        behind = {
            name for name, one in base_indexes(table).items() if not coverage(one.covered, table.manifest).complete
        }
        assert behind <= {"id_zonemap", "id_bloomfilter"}, "which a compaction does not carry over"
        last = max(made.model)
        assert lance.dataset(made.uri).to_table(filter=f"id = {last}", columns=["id"])["id"].to_pylist() == [last]
    status = run_process("status", "--config", str(config), "--json").document
    assert [table["level"] for table in status["tables"]] == ["ok", "ok", "ok"]
