"""What writers left in the logs, as a poll reads it: entries, their ages, and who is told."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.server import BUCKET, counting_server
from memwal_ops import open_table
from memwal_ops.formats.lance.generations.backlog import backlog_of, with_listed_log
from memwal_ops.formats.lance.generations.wal import read_unflushed
from memwal_ops.supervisor.observe.findings import writer_findings
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.lsm_table import LsmTable
from tests.support.tables.workload import Workload

NAMES = ("unflushed_entries", "unflushed_oldest_seconds", "seconds_since_last_write")
HOURS = 3 * 3600.0


def figures(table: LsmTable) -> dict[str, float]:
    found = open_table(table.uri).jobs["merge"].job.backlog(open_table(table.uri))
    return {name: found[name] for name in NAMES if name in found}


def age(table: LsmTable) -> None:
    long_ago = time.time() - HOURS
    for path in Path(table.uri).glob("_mem_wal/*/wal/*"):
        os.utime(path, (long_ago, long_ago))


def told(table: LsmTable, expected: float | None = None) -> list[str | None]:
    document = {"uri": table.uri, "format": "lance", "backlog": figures(table), "expect_writes_seconds": expected}
    return [one["runbook"] for one in writer_findings(document)]


@pytest.mark.parametrize("make", LAYOUTS)
def test_rows_that_nobody_flushes(make: type[LsmTable], tmp_path: Path) -> None:
    table = make(3, regions=2, base_rows=8).create(str(tmp_path / "t.lance"))
    assert figures(table).get("unflushed_entries") == 0
    assert told(table, 1.0) == [], "nothing was ever written"
    table.put([1])
    now = figures(table)
    assert now["unflushed_entries"] >= 1
    assert now["seconds_since_last_write"] < HOURS / 2
    assert told(table, HOURS) == [], "its writer may live"
    age(table)
    now = figures(table)
    assert now["unflushed_oldest_seconds"] == pytest.approx(now["seconds_since_last_write"], abs=HOURS / 10)
    assert now["unflushed_oldest_seconds"] >= HOURS
    assert told(table) == ["runbooks/alerts/MemwalOpsUnflushedRows.md"]
    assert "runbooks/alerts/MemwalOpsNoWrites.md" in told(table, HOURS)
    table.flush()
    age(table)
    assert figures(table)["unflushed_entries"] == 0
    assert told(table) == []
    table.close()


def test_a_claim_alone_leaves_nothing(tmp_path: Path) -> None:
    """pylance's writer claims by an entry without rows."""
    table = Workload(3, regions=1, base_rows=8).create(str(tmp_path / "t.lance"))
    table.put([1])
    table.flush()
    before = len(list(Path(table.uri).glob("_mem_wal/*/wal/*")))
    table.writer(table.regions[0])
    assert len(list(Path(table.uri).glob("_mem_wal/*/wal/*"))) > before
    assert figures(table)["unflushed_entries"] == 1, "a young one may have rows"
    age(table)
    assert figures(table)["unflushed_entries"] == 0
    assert told(table) == []
    table.close()


@pytest.mark.long
@pytest.mark.s3
def test_the_log_of_a_small_table_costs_no_request() -> None:
    with counting_server() as (options, counts):
        table = Workload(3, regions=3, base_rows=8).create(f"s3://{BUCKET}/t.lance", options)
        table.put([1])
        listed = with_listed_log(open_table(table.uri, options))
        backlog = backlog_of(listed)
        counts.clear()
        found = read_unflushed(listed, backlog)
        assert counts.total() == 0
        assert found == read_unflushed(replace(listed, store=listed.store.listed_store), backlog)  # type: ignore[attr-defined]
        assert found.entries >= 1
        assert counts.total() <= 3 * 4
        table.close()
