"""The four layouts: which one a table has, what no job takes yet, and what is not answered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import legacy as legacy_tables, memwal, open_table, run_job
from memwal_ops.core.job import JobSpec
from memwal_ops.core.registry import job_specs
from memwal_ops.errors import (
    InvalidFormatError,
    InvalidUsageError,
    InvariantViolatedError,
    LegacyLayoutError,
    MemwalOpsError,
    NoMemWalIndexError,
)
from memwal_ops.formats.lance import specs
from memwal_ops.formats.lance.files.blobs import stream_bytes
from memwal_ops.formats.lance.layouts import LEGACY, NONE, REGION, SHARD, Layout
from memwal_ops.formats.lance.table import open_lance_table, read_table
from memwal_ops.memwal import RegionRouter, RegionWriter, create_mem_wal
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.counting_store import CountingStore
from tests.support.tables import damage
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload


@pytest.mark.parametrize("layout", ["none", "legacy", "region", "shard"])
def test_the_module_of_each_job_is_there(layout: str) -> None:
    for spec in (one for one in vars(specs).values() if isinstance(one, JobSpec)):
        assert spec.for_layout(layout).job is not None


def plain(uri: str) -> None:
    lance.write_dataset(pa.table({"a": [1, 2]}), uri)


def legacy(uri: str) -> None:
    Workload(1, regions=1, base_rows=10).create(uri).close()
    damage.put_legacy_details(uri)


@pytest.mark.parametrize(
    ("make", "layout", "error"), [(plain, NONE, NoMemWalIndexError), (legacy, LEGACY, LegacyLayoutError)]
)
def test_the_layout_is_told_without_a_second_look(
    tmp_path: Path, make: Callable[[str], None], layout: Layout, error: type[MemwalOpsError]
) -> None:
    uri = str(tmp_path / "t.lance")
    make(uri)
    location = resolve(uri)
    store = CountingStore(open_store(location))
    table = read_table(location, store)
    store.reset()
    assert table.layout is layout
    assert store.calls == {}, "the version's manifest tells"
    assert table.memwal is None
    for attempt in (lambda: open_lance_table(uri), table.require_memwal):
        with pytest.raises(error, match=r"t\.lance") as refused:
            attempt()
        assert type(refused.value) is error
    assert lance.dataset(uri).count_rows() == table.dataset.count_rows()


def test_what_needs_a_log_refuses_a_plain_table(tmp_path: Path) -> None:
    """In one line, with what applies; nothing is written."""
    uri = str(tmp_path / "t.lance")
    plain(uri)
    table = open_table(uri)
    assert table.jobs.keys() >= {"inspect", "verify", "why"}
    refused = [lambda job=job: run_job(uri, job) for job in ("merge", "snapshot", "adopt", "migrate")]
    refused += [lambda: RegionWriter(uri), lambda: RegionWriter(table), lambda: RegionRouter(table)]
    refused += [lambda: memwal.read(uri), lambda: legacy_tables.read(uri), lambda: legacy_tables.mem_wals(uri)]
    for attempt in refused:
        with pytest.raises(NoMemWalIndexError, match="there is no log to merge") as error:
            attempt()
        assert "\n" not in str(error.value)
        assert "memwal-ops init URI" in error.value.remedy
    with pytest.raises(NoMemWalIndexError) as error:
        run_job(uri, "merge")
    _, listed = error.value.remedy.removesuffix(".").split("The jobs that apply: ")
    assert {*listed.split(", ")} == table.jobs.keys() - {"migrate"}, "it has nothing to migrate"
    assert lance.dataset(uri).version == 1


def test_a_plain_table_with_regions_is_refused(tmp_path: Path) -> None:
    """They belong to a table that was overwritten: an expiry would delete the versions that they need."""
    made = Workload(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    made.put([2])
    made.close()
    lance.write_dataset(pa.table({"a": [1]}), made.uri, mode="overwrite")
    what = rf"{made.regions[0]} \(flushed generations: 1, with 1 row; written log entries: [0-9]+\)"
    with pytest.raises(NoMemWalIndexError, match=what):
        open_table(made.uri)


def test_other_jobs_say_why_they_do_not_apply_to_a_legacy_table(tmp_path: Path) -> None:
    """And what to do; nothing is written."""
    uri = str(tmp_path / "t.lance")
    legacy(uri)
    table = open_table(uri)
    assert table.jobs.keys() >= {"inspect", "merge", "maintain"}
    before = lance.dataset(uri).version
    for job in job_specs("lance").keys() - table.jobs.keys():
        with pytest.raises(LegacyLayoutError, match=f"{job} does not apply to .*mem_wal_list") as refused:
            run_job(uri, job)
        assert refused.value.exit_code == 7
        assert ", migrate, " in refused.value.remedy.partition("The jobs that apply: ")[2]
    with pytest.raises(InvalidUsageError, match="compost does not apply"):
        run_job(uri, "compost")
    for write in (lambda: create_mem_wal(uri), lambda: RegionWriter(uri)):
        with pytest.raises(MemwalOpsError):
            write()
    assert lance.dataset(uri).version == before


@pytest.mark.parametrize(("kind", "layout"), [(Workload, SHARD), (RegionLayout, REGION)])
def test_the_log_distinguishes_region_and_shard(
    tmp_path: Path, kind: type[Workload | RegionLayout], layout: Layout
) -> None:
    made = kind(1, regions=2, base_rows=10).create(str(tmp_path / "t.lance"))
    made.put([2])
    made.flush()
    made.close()
    table = open_table(made.uri)
    assert table.layout is layout
    assert table.memwal is table.index
    assert table.jobs.keys() >= {"merge", "gc"}


QUESTIONS: list[Callable[[Layout], object]] = [
    lambda one: one.wal_suffix,
    lambda one: one.writer_epoch(None, "x"),
    lambda one: one.entry_rows(None, "x"),
    lambda one: one.entry_table(None, "x"),
    lambda one: one.emptied_entry(None, "x"),
    lambda one: one.empty_entry(None, 1, "x"),
    lambda one: one.claims_with_entry,
    lambda one: one.generations_in_log,
    lambda one: one.unlisted_index_is_caught_up,
    lambda one: one.snapshot_rows({}, {}, ()),
]  # fmt: skip


@pytest.mark.parametrize("layout", [NONE, LEGACY], ids=["none", "legacy"])
@pytest.mark.parametrize("question", range(len(QUESTIONS)))
def test_what_a_layout_lacks_it_is_not_asked(layout: Layout, question: int) -> None:
    with pytest.raises(InvariantViolatedError, match=f"layout {layout.name} has no"):
        QUESTIONS[question](layout)


def test_every_question_is_asked_above() -> None:
    """And region and shard answer each of them themselves."""
    others = {"refusal", "why_not", "without_index"}
    asked = {name for name in vars(Layout) if not name.startswith("_")} - others
    assert len(asked) == len(QUESTIONS)
    for one in (REGION, SHARD):
        assert asked <= vars(type(one)).keys(), one.name


def test_an_entry_that_is_damaged_anywhere_is_named(tmp_path: Path) -> None:
    """Arrow raises a plain OSError for most damage: erase and readers ended with it."""
    path, whole = tmp_path / "entry.arrow", stream_bytes(pa.table({"k": [1, 2], "text": ["a", "b"]}))
    store = open_store(resolve(str(tmp_path)))
    for at in range(0, len(whole), 3):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with suppress(InvalidFormatError):
                SHARD.entry_table(store, path.name)
    path.write_bytes(whole[:200])
    with pytest.raises(InvalidFormatError, match="is not an Arrow stream"):
        SHARD.entry_table(store, path.name)
