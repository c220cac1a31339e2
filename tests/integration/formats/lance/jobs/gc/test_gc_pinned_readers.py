"""gc and readers that keep a version of the base open, and read region manifests anew: lancedb's default handles."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.options import OptionError
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.jobs.gc.job import GcOptions
from memwal_ops.formats.lance.retention.merged_since import PROGRESS_FOLDER
from tests.support.gc_options import IMMEDIATE
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    DAY,
    age,
    caught_up,
    collect,
    free,
    generation_folders,
    grow,
    keep_by_tag,
    make,
    merged,
    planned,
    reasons,
    sound,
)
from tests.support.tables.model import assert_same
from tests.support.tables.reading import PinnedReader, open_dataset

#: Everything else at once: only readers that keep a version open are waited for.
PINNED = GcOptions(timedelta(0), timedelta(0), manifest_retention=2, drain_after=timedelta(days=30), allow_unsafe=True)
RECORDS = f"{PROGRESS_FOLDER}/*.json"


def test_a_reader_with_an_old_version_misses_no_row(tmp_path: Path) -> None:
    """Merged, expired, collected: the handle that was opened before still reads what it read."""
    made = make(tmp_path)
    reader = PinnedReader(made.uri)
    before = reader.rows()
    assert_same(before, made.expected(), seed=made.seed)
    folders = generation_folders(made)
    free(made)
    for days in (0, 8, 29):
        _older(made, days)
        report = collect(made, PINNED)
        assert (report.drained, generation_folders(made)) == (0, folders), f"after {days} days"
        assert_same(reader.rows(), before, seed=made.seed)
    why = set(reasons(planned(made, PINNED), CandidateKind.GENERATION).values())
    assert len(why) == 1
    assert "merged less than --drain-after (30d) ago" in why.pop()
    _older(made, 31)
    assert collect(made, PINNED).drained == 6
    assert generation_folders(made) == set()
    sound(made)


def test_a_lancedb_handle_with_default_settings(tmp_path: Path) -> None:
    """The same with lancedb itself, which the emulation above stands for."""
    lancedb: Any = pytest.importorskip("lancedb", reason="lancedb is not installed; PinnedReader reads in the same way")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])

    def rows(keys: range, text: str) -> pa.Table:
        return pa.table({"id": [*keys], "text": [text] * len(keys)}, schema=schema)

    def put(keys: range, text: str) -> None:
        table = database.open_table("t")
        table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows(keys, text))
        table.close_lsm_writers()

    def read(handle: Any) -> dict[int, str]:
        return {row["id"]: row["text"] for row in handle.search().limit(1000).to_list()}

    database = lancedb.connect(str(tmp_path))
    made = database.create_table("t", rows(range(100), "base"))
    made.set_unenforced_primary_key("id")
    made.set_lsm_write_spec(lancedb.LsmWriteSpec.unsharded())
    handle = database.open_table("t")
    put(range(50, 150), "log")
    expected = dict.fromkeys(range(50), "base") | dict.fromkeys(range(50, 150), "log")
    assert read(handle) == expected
    uri = str(tmp_path / "t.lance")
    for job, options in (
        ("merge", {}),
        ("catchup", {}),
        ("expire", {"older_than": "0s", "allow_unsafe": True, "apply": True}),
    ):
        run_job(uri, job, **options)
    for _ in range(2):
        gc.apply(open_table(uri), PINNED)
    assert read(handle) == expected
    gc.apply(open_table(uri), IMMEDIATE)
    assert read(handle) != expected, "what drain_after prevents"
    assert read(database.open_table("t")) == expected


@pytest.mark.long
def test_the_age_outlives_the_versions_that_show_it(tmp_path: Path) -> None:
    """Versions are expired each time, so that only the records of gc show when the first generations were merged."""
    made = free(make(tmp_path, generations=1))
    assert collect(made, PINNED).drained == 0
    for _ in range(3):
        grow(made)
        free(made)
        age(made, RECORDS, 31 * DAY)
        age(made, "_versions/*.manifest", 60)
        collect(made, PINNED)
    manifests = [open_table(made.uri).region(UUID(region)).latest() for region in made.regions]
    listed = [one.generation for manifest in manifests for one in manifest.flushed_generations]
    assert listed == [4, 4], "each round frees what the one before recorded"
    assert len([*Path(made.uri).glob(RECORDS)]) == 2, "outdated records are deleted"
    sound(made)


@pytest.mark.long
def test_a_younger_record_follows_only_after_a_while(tmp_path: Path) -> None:
    made = free(make(tmp_path, generations=1))
    for _ in range(3):
        collect(made, PINNED)
        grow(made)
        free(made)
    assert len([*Path(made.uri).glob(RECORDS)]) == 1
    age(made, RECORDS, DAY)
    collect(made, PINNED)
    collect(made, PINNED)
    assert len([*Path(made.uri).glob(RECORDS)]) == 2


@pytest.mark.parametrize("by", ["expire", "gc"])
def test_a_restored_version_begins_the_wait_anew(tmp_path: Path, by: str) -> None:
    """Generations that are merged a second time have readers of the time between, even if they were recorded before."""
    made = make(tmp_path, generations=1)
    unmerged = open_dataset(made.uri).version
    merged(made)
    collect(made, PINNED)
    age(made, RECORDS, 31 * DAY)
    open_dataset(made.uri, version=unmerged).restore()
    reader = PinnedReader(made.uri)
    before = reader.rows()
    if by == "gc":
        collect(made, PINNED)
    free(made)
    collect(made, PINNED)
    assert_same(reader.rows(), before, seed=made.seed)
    assert generation_folders(made)


def test_a_restored_version_that_pylance_cleans_up(tmp_path: Path) -> None:
    """Before any run of expire or gc: only the merge sees that the table had less progress than is recorded."""
    made = make(tmp_path, generations=1)
    unmerged = open_dataset(made.uri).version
    merged(made)
    collect(made, PINNED)
    age(made, RECORDS, 31 * DAY)
    open_dataset(made.uri, version=unmerged).restore()
    reader = PinnedReader(made.uri)
    before = reader.rows()
    merged(made)
    caught_up(made)
    open_dataset(made.uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
    for _ in range(2):
        assert collect(made, PINNED).drained == 0
        assert_same(reader.rows(), before, seed=made.seed)
    assert generation_folders(made)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"merged": 5}',
        b'{"merged": {"x": 1}}',
        b'{"merged": {"%s": "1"}}',
        b'{"merged": {"%s": true}}',
        b"\xff",
    ],
)
def test_a_damaged_record_frees_nothing(tmp_path: Path, data: bytes) -> None:
    made = free(make(tmp_path, generations=1))
    collect(made, PINNED)
    (record,) = Path(made.uri).glob(RECORDS)
    record.write_bytes(data.replace(b"%s", made.regions[0].encode()))
    age(made, RECORDS, 31 * DAY)
    assert collect(made, PINNED).drained == 0
    assert generation_folders(made)


def test_records_of_a_table_that_was_here_before_do_not_count(tmp_path: Path) -> None:
    """Of a later version than the table has: they are not of this table."""
    made = free(make(tmp_path, generations=1))
    collect(made, PINNED)
    (record,) = Path(made.uri).glob(RECORDS)
    record.rename(record.with_name(f"{10**6:020}.json"))
    age(made, RECORDS, 31 * DAY)
    assert gc.plan(open_table(made.uri), PINNED).drainable == 0
    assert collect(made, PINNED).drained == 0
    assert [one.name for one in Path(made.uri).glob(RECORDS)] == [record.name]


def test_generations_that_only_wait_are_no_backlog(tmp_path: Path) -> None:
    made = make(tmp_path, generations=2)
    assert gc.backlog(open_table(made.uri)) == {"merged_generations": 0}, "not merged"
    free(made)
    assert gc.backlog(open_table(made.uri)) == {"merged_generations": 4}, "gc never ran"
    collect(made, PINNED)
    assert gc.backlog(open_table(made.uri)) == {"merged_generations": 0}, "they wait"
    grow(made)
    merged(made)
    age(made, RECORDS, 31 * DAY)
    assert gc.backlog(open_table(made.uri)) == {"merged_generations": 4}, "due, but for those that were merged since"


def test_a_short_time_needs_a_permission() -> None:
    with pytest.raises(OptionError, match=r"drain_after.* below 1d: a process opens the table and keeps that version"):
        GcOptions(drain_after=timedelta(hours=23)).validate()
    GcOptions(drain_after=timedelta(days=1)).validate()
    GcOptions(drain_after=timedelta(0), allow_unsafe=True).validate()
    assert GcOptions().drain_after == timedelta(days=30)


def _older(made: Any, days: float) -> None:
    """The table's newest version, which merged everything, is so old."""
    if days:
        age(made, "_versions/*.manifest", days * DAY)
        for path in Files(made.uri).listing(f"{PROGRESS_FOLDER}/"):
            age(made, path, days * DAY)


@pytest.mark.parametrize("tagged", [True, False])
def test_a_version_before_a_restore_is_no_evidence(tmp_path: Path, tagged: bool) -> None:
    """Between it and the newest one stood a version with less progress, which a reader keeps open, and is expired."""
    made = make(tmp_path, generations=1)
    unmerged = open_dataset(made.uri).version
    merged(made)
    caught_up(made)
    if tagged:
        keep_by_tag(made, open_dataset(made.uri).version)
    age(made, "_versions/*.manifest", 40 * DAY)
    open_dataset(made.uri, version=unmerged).restore()
    reader = PinnedReader(made.uri)
    before = reader.rows()
    free(made)
    report = collect(made, PINNED)
    assert report.drained == 0
    assert_same(reader.rows(), before, seed=made.seed)
