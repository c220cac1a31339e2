"""How often a poll reads what does not change: the version once, and each region's newest manifest once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from benchmarks.server import BUCKET, counting_server
from memwal_ops.core.figures import cached_for_poll, fingerprint_of, is_unchanged, poll_cache, poll_table
from memwal_ops.core.registry import open_table
from memwal_ops.formats.lance.layouts import REGION, SHARD
from tests.support.counting_store import CountingStore
from tests.support.tables.many_regions import make_regions
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.formats.lance.layouts import Layout

JOBS = ("merge", "catchup", "compact", "snapshot", "expire", "gc")
REGIONS = 5


@pytest.mark.parametrize("layout", [SHARD, REGION])
def test_a_poll_reads_each_region_once_for_all_jobs(tmp_path: Path, layout: Layout) -> None:
    uri = str(tmp_path / "t.lance")
    make_regions(uri, REGIONS, layout)
    table = open_table(uri)
    store = CountingStore(table.store)
    counted = replace(table, store=store)  # type: ignore[type-var]
    _, faults = poll_table(counted, [counted.jobs[name] for name in JOBS if name in counted.jobs])
    assert faults == []
    of_all_jobs = sum(store.calls.values())
    store.reset()
    counted.jobs["merge"].job.backlog(counted)
    of_merge = sum(store.calls.values())
    assert of_merge >= REGIONS
    assert of_all_jobs <= of_merge + 2, "the other jobs read no region again"


def test_the_next_poll_of_the_same_table_sees_a_flush(tmp_path: Path) -> None:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    table.put([1])
    table.flush()
    opened = open_table(table.uri)
    jobs = [opened.jobs[name] for name in ("merge", "gc")]
    assert poll_table(opened, jobs)[0]["generations"] == 1
    table.put([2])
    table.flush()
    table.close()
    assert poll_table(opened, jobs)[0]["generations"] == 2


def test_nothing_is_shared_between_tables_or_polls() -> None:
    one, other, reads = object(), object(), []

    def read(what: str) -> str:
        reads.append(what)
        return what

    for _ in range(2):
        with poll_cache():
            found = [
                cached_for_poll(table, "backlog", partial(read, name))
                for table, name in zip((one, other, one), "123", strict=True)
            ]
        assert found == ["1", "2", "1"]
    assert reads == ["1", "2"] * 2
    assert [cached_for_poll(one, "backlog", lambda: read("4")) for _ in range(2)] == ["4", "4"]
    assert reads[4:] == ["4", "4"]


@pytest.mark.sampled(1)
@pytest.mark.s3
@pytest.mark.parametrize("layout", [SHARD, REGION])
def test_an_idle_table_costs_one_request_and_at_most_one_for_each_region(layout: Layout) -> None:
    with counting_server() as (options, counts):
        uri = f"s3://{BUCKET}/{layout.name}.lance"
        make_regions(uri, REGIONS, layout, options)
        table = open_table(uri, options)
        known = fingerprint_of(table, [table.jobs[name] for name in JOBS])
        assert known is not None
        counts.clear()
        assert is_unchanged(uri, options, known)
        assert 0 < counts.total() <= 1 + REGIONS
        assert counts["GET"] == counts.total(), "reads only"


def test_a_job_of_another_package_is_always_asked(tmp_path: Path) -> None:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    opened = open_table(table.uri)
    merge = opened.jobs["merge"]
    assert fingerprint_of(opened, [merge]) is not None
    assert fingerprint_of(opened, [merge, replace(merge, name="audit", load="somebody.audit")]) is None
    table.close()


def test_a_table_that_cannot_be_listed_is_read_again(tmp_path: Path) -> None:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    table.put([1])
    opened = open_table(table.uri)
    known = fingerprint_of(opened, [opened.jobs["merge"]])
    assert known is not None
    assert is_unchanged(table.uri, {}, known)
    folder = next((tmp_path / "t.lance" / "_mem_wal").iterdir()) / "manifest"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert not is_unchanged(table.uri, {}, known), "the poll then tells what is wrong"
    table.close()
