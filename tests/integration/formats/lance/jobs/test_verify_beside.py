"""verify finds no damage where writers and gc only go on while it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.options import VerificationOptions
from memwal_ops.formats.lance.jobs import verify
from tests.support.gc_options import AT_ONCE
from tests.support.stores import Beside, LyingStore
from tests.support.tables.layouts import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.tables.lsm_table import LsmTable

GC = {**AT_ONCE, "manifest_retention": 1}


@pytest.fixture(params=LAYOUTS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LsmTable]:
    """A flushed and merged generation, one that waits, and a log."""
    made = request.param(7, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    for at in range(3):
        made.put([at])
        made.flush()
        if at == 0:
            run_job(made.uri, "merge")
    for at in range(5):
        made.put([at])
    yield made
    made.close()


def errors(table: LsmTable, wrap: Any) -> list[str]:
    opened: Any = open_table(table.uri)
    report = verify.verified(replace(opened, store=wrap(opened.store)), VerificationOptions())
    return [one["check"] for one in report.to_json()["findings"] if one["severity"] == "error"]


def test_a_listing_that_lacks_an_entry(table: LsmTable) -> None:
    """Local files that are listed while a writer appends: the next entry came before the place that was read."""

    def wrap(store: Any) -> LyingStore:
        def listed(prefix: str = "", **options: Any) -> Iterator[Any]:
            entries = [*store.list(prefix, **options)]
            log = sorted((one for one in entries if "/wal/" in one.path), key=lambda one: one.last_modified)
            return iter([one for one in entries if one not in log[-2:-1]])

        return LyingStore(store, list=listed)

    assert errors(table, wrap) == []


def test_a_flush_a_merge_and_gc_in_between(table: LsmTable) -> None:
    """The manifest is older than the listing, which lacks what was flushed, merged and deleted since."""

    def others() -> None:
        table.flush()
        table.put([9])
        run_job(table.uri, "merge")
        run_job(table.uri, "gc", apply=True, **GC)

    folder = f"_mem_wal/{table.regions[0]}"
    assert errors(table, lambda store: Beside(store, "list", lambda path: path.rstrip("/") == folder, others)) == []
