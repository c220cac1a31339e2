"""A region id that is used again: nothing is merged, collected or shown before a person decides, for good."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.errors import RegionReplacedError
from memwal_ops.formats.lance.jobs import adopt, expire, merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.inspect import job as inspect
from memwal_ops.formats.lance.options import AdoptOptions
from memwal_ops.formats.lance.regions.merge_history import Moment, is_earlier
from memwal_ops.memwal import read
from tests.integration.contracts import small
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import run_here
from tests.support.tables.reading import read_base

REGION = uuid.UUID(small.REGION)
HOUR = timedelta(hours=1)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def folder(uri: str) -> Path:
    return Path(uri, "_mem_wal", small.REGION)


def merged_by(uri: str, how: str) -> None:
    """Three generations, merged by this project or by pylance's own marked upserts."""
    for number in range(3):
        small.flush(uri, small.rows(number, number + 1, 1.0))
        if how == "pylance":
            small.upsert(lance.dataset(uri), small.rows(number, number + 1, 1.0), number + 1)
    if how == "ours":
        assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    assert open_table(uri).index.merged_generations == {REGION: 3}


def used_again(uri: str, how: str) -> str:
    """The URI under which the region starts again: a branch, a clone, or the same with its folder removed."""
    if how == "branch":
        lance.dataset(uri).create_branch("side")
        return f"{uri}/tree/side"
    if how == "clone":
        target = f"{uri}.clone.lance"
        lance.dataset(uri).shallow_clone(target, lance.dataset(uri).version)
        return target
    shutil.rmtree(folder(uri))
    return uri


def flush_new(uri: str, number: int) -> None:
    dataset = lance.dataset(uri.split("/tree/", maxsplit=1)[0])
    if "/tree/" in uri:
        dataset = dataset.checkout_version(("side", None))
    elif ".clone." in uri:
        dataset = lance.dataset(uri)
    with dataset.mem_wal_writer(small.REGION) as writer:
        writer.put(small.rows(500 + number, 501 + number, 9.0))


def assert_blocked(uri: str) -> None:
    """The same answer from every job, and not a byte of the region is touched."""
    before = sorted(str(path) for path in folder(uri).rglob("*"))
    assert merge.plan(open_table(uri), merge.MergeOptions()).passes == ()
    report = merge.apply(open_table(uri), merge.MergeOptions())
    assert (report.decision, [one.error.reason for one in report.blocked]) == ("blocked", ["region_replaced"])
    taken = snapshot.apply(open_table(uri), snapshot.SnapshotOptions())
    assert (taken.exit_code, [one.reason for one in taken.skipped if one.is_fault]) == (10, ["region_replaced"])
    collected = gc.apply(open_table(uri), IMMEDIATE)
    assert (collected.exit_code, list(collected.faults)) == (10, [REGION])
    assert catchup.apply(open_table(uri), catchup.CatchupOptions()).exit_code == 10
    (region,) = inspect.inspect(open_table(uri)).regions
    assert region.fault is not None
    assert region.fault.error.reason == "region_replaced"
    assert sorted(str(path) for path in folder(uri).rglob("*")) == before


@pytest.mark.long
@pytest.mark.parametrize("how", ["branch", "clone", "removed"])
@pytest.mark.parametrize("merger", ["ours", "pylance"])
def test_blocked_after_any_number_of_generations(tmp_path: Path, how: str, merger: str) -> None:
    uri = small.make(tmp_path)
    merged_by(uri, merger)
    uri = used_again(uri, how)
    for number in range(6):
        flush_new(uri, number)
        assert_blocked(uri)
    assert not {row["id"] for row in lance.dataset(uri).to_table().to_pylist()} & set(range(500, 506))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["branch", "clone", "removed"])
def test_a_reader_leaves_no_rows_of_another_region_out(tmp_path: Path, how: str) -> None:
    """By its number alone, the new region's first generation would count as merged, and its rows be in no answer."""
    uri = small.make(tmp_path)
    merged_by(uri, "ours")
    uri = used_again(uri, how)
    for number in range(5):
        flush_new(uri, number)
        with pytest.raises(RegionReplacedError):
            read(uri, "manifests").scan().to_table()
        with pytest.raises(RegionReplacedError):
            read(uri, "manifests").get([500])


def test_a_reader_that_was_opened_before_an_operator_decided(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    merged_by(uri, "ours")
    used_again(uri, "removed")
    flush_new(uri, 0)
    reader = read(uri, "manifests")
    with pytest.raises(RegionReplacedError):
        reader.scan().to_table()
    adopt.apply(open_table(uri), AdoptOptions(answer="unmerged"))
    assert 500 in reader.scan(["id"]).to_table()["id"].to_pylist()


def test_blocked_when_all_old_versions_are_expired(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    merged_by(uri, "ours")
    used_again(uri, "removed")
    for number in range(5):
        flush_new(uri, number)
    expire.apply(open_table(uri), expire.ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True))
    assert len(lance.dataset(uri).versions()) == 1
    assert_blocked(uri)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("merger", ["ours", "pylance"])
def test_the_same_region_continues(tmp_path: Path, merger: str, *, drained: bool) -> None:
    """Also where nothing that was merged stands any more, and in a table that was copied as a whole, times and all."""
    uri = small.make(tmp_path)
    merged_by(uri, merger)
    merge.apply(open_table(uri), merge.MergeOptions())
    if drained:
        catchup.apply(open_table(uri), catchup.CatchupOptions())
        expire.apply(open_table(uri), expire.ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True))
        assert gc.apply(open_table(uri), IMMEDIATE).decision == "deleted"
    copy = f"{tmp_path}/copy.lance"
    shutil.copytree(uri, copy, copy_function=shutil.copyfile)
    for one in (uri, copy):
        small.flush(one, small.rows(7, 8, 5.0))
        assert merge.apply(open_table(one), merge.MergeOptions()).decision == "merged"
        assert [row["val"] for row in read_base(one).values() if row["id"] == 7] == [5.0]
        assert gc.apply(open_table(one), IMMEDIATE).exit_code == 0


def test_what_others_merged_is_recorded_before_the_versions_expire(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    merged_by(uri, "pylance")
    version = lance.dataset(uri).version
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "nothing_to_merge"
    assert lance.dataset(uri).version == version + 1
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "nothing_to_merge"
    assert lance.dataset(uri).version == version + 1, "once"


def test_what_others_merged_in_versions_that_are_gone_is_asked(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    merged_by(uri, "pylance")
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert_blocked(uri)


@pytest.mark.parametrize("merger", ["ours", "pylance"])
def test_regions_of_a_table_that_was_overwritten(tmp_path: Path, merger: str) -> None:
    """The remedy of a table without MemWAL index, followed to the letter, brings nothing back from before."""
    uri = small.make(tmp_path)
    merged_by(uri, merger)
    small.flush(uri, small.rows(3, 4, 1.0))
    lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    assert_blocked_unmerged(uri)
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert_blocked_unmerged(uri)
    assert {row["id"] for row in lance.dataset(uri).to_table().to_pylist()} == {900, 901, 902}


def test_an_unmerged_region_of_a_table_that_was_overwritten(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    small.flush(uri, small.rows(3, 4, 1.0))
    lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    small.flush(uri, small.rows(4, 5, 1.0))
    assert_blocked_unmerged(uri)
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert_blocked_unmerged(uri)


def assert_blocked_unmerged(uri: str) -> None:
    report = merge.apply(open_table(uri), merge.MergeOptions())
    assert (report.decision, [one.error.reason for one in report.blocked]) == ("blocked", ["region_replaced"])
    assert gc.apply(open_table(uri), IMMEDIATE).exit_code == 10
    assert snapshot.apply(open_table(uri), snapshot.SnapshotOptions()).exit_code == 10


KEYS = pa.schema([small.SCHEMA.field("id")])


def made_anew(uri: str, columns: pa.Schema, by: str) -> None:
    """A table of one unmerged region is removed, or overwritten, and its old regions come back without their times."""
    lance.write_dataset(small.rows(0, 1).select(columns.names), uri).initialize_mem_wal(unsharded=True)
    with small.writer(uri) as writer:
        writer.put(small.rows(3, 4, 1.0).select(columns.names))
    shutil.move(folder(uri).parent, f"{uri}.kept")
    if by == "removed":
        shutil.rmtree(uri)
    anew = small.rows(900, 903).select(columns.names)
    lance.write_dataset(anew, uri, mode="overwrite" if by == "overwritten" else "create")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)


def copy_back(uri: str) -> None:
    """As ``cp -r`` or a bucket's copy does, so that all of it is younger than the table."""
    time.sleep(1.2)
    shutil.copytree(f"{uri}.kept", folder(uri).parent, copy_function=shutil.copyfile)


@pytest.mark.parametrize("columns", [KEYS, small.SCHEMA], ids=["keys", "values"])
@pytest.mark.parametrize("by", ["removed", "overwritten"])
def test_regions_copied_without_times_to_a_table_created_again(tmp_path: Path, columns: pa.Schema, by: str) -> None:
    """Only what their files say of themselves tells that they are older; a person's answer is followed, both ways."""
    uri = f"{tmp_path}/t.lance"
    made_anew(uri, columns, by)
    copy_back(uri)
    assert_blocked_unmerged(uri)
    assert {row["id"] for row in lance.dataset(uri).to_table().to_pylist()} == {900, 901, 902}
    assert adopt.apply(open_table(uri), AdoptOptions(regions=(REGION,), answer="unmerged")).decision == "adopted"
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    assert {row["id"] for row in lance.dataset(uri).to_table().to_pylist()} == {3, 900, 901, 902}


@pytest.mark.parametrize("columns", [KEYS, small.SCHEMA], ids=["keys", "values"])
@pytest.mark.parametrize("times", ["kept", "lost"])
def test_regions_copied_back_when_the_versions_that_tell_are_expired(
    tmp_path: Path, columns: pa.Schema, times: str
) -> None:
    """Nothing of the table is as old as the region: what a person is asked names both answers."""
    uri = f"{tmp_path}/t.lance"
    made_anew(uri, columns, "removed")
    lance.dataset(uri).delete("id = 902")
    lance.dataset(uri).optimize.compact_files(materialize_deletions=True, materialize_deletions_threshold=0.0)
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert len(lance.dataset(uri).versions()) == 1
    if times == "kept":
        shutil.move(f"{uri}.kept", folder(uri).parent)
    else:
        copy_back(uri)
    report = merge.apply(open_table(uri), merge.MergeOptions())
    (fault,) = report.blocked
    assert fault.error.reason in {"schema_projection", "region_replaced"}
    assert "created again" in fault.error.remedy
    assert "outside the table" in fault.error.remedy
    assert {row["id"] for row in lance.dataset(uri).to_table().to_pylist()} == {900, 901}


@pytest.mark.parametrize("ahead", [-HOUR, HOUR], ids=["behind", "ahead"])
def test_a_store_whose_clock_is_another_asks_nothing(tmp_path: Path, ahead: timedelta) -> None:
    uri = f"{tmp_path}/t.lance"
    lance.write_dataset(small.rows(0, 1), uri).initialize_mem_wal(unsharded=True)
    small.flush(uri, small.rows(3, 4, 1.0))
    for path in (one for one in Path(uri).rglob("*") if one.is_file()):
        os.utime(path, (path.stat().st_mtime + ahead.total_seconds(),) * 2)
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"


def test_a_table_copied_regions_first_is_asked_how_it_was_copied(tmp_path: Path) -> None:
    """As tools copy in the order of names; the answer brings every row."""
    uri, copy = f"{tmp_path}/t.lance", f"{tmp_path}/copy.lance"
    lance.write_dataset(small.rows(0, 1), uri).initialize_mem_wal(unsharded=True)
    small.flush(uri, small.rows(3, 4, 1.0))
    shutil.copytree(f"{uri}/_mem_wal", f"{copy}/_mem_wal", copy_function=shutil.copyfile)
    time.sleep(1.2)
    without = shutil.ignore_patterns("_mem_wal")
    shutil.copytree(uri, copy, copy_function=shutil.copyfile, ignore=without, dirs_exist_ok=True)
    (fault,) = merge.apply(open_table(copy), merge.MergeOptions()).blocked
    assert fault.error.reason == "region_replaced"
    assert "copied without file times" in str(fault.error)
    adopt.apply(open_table(copy), AdoptOptions(regions=(REGION,), answer="unmerged"))
    assert merge.apply(open_table(copy), merge.MergeOptions()).decision == "merged"
    assert {row["id"]: row["val"] for row in read_base(copy).values()} == {0: 0.0, 3: 1.0}


def test_an_answer_brings_no_dropped_column_back(tmp_path: Path) -> None:
    """The versions tell that the table is the one of the flush, so that they tell of its columns, too."""
    uri, copy = f"{tmp_path}/t.lance", f"{tmp_path}/copy.lance"
    lance.write_dataset(small.rows(0, 0), uri).initialize_mem_wal(unsharded=True)
    small.flush(uri, small.rows(3, 4, 1.0))
    lance.dataset(uri).drop_columns(["txt"])
    lance.dataset(uri).add_columns(pa.field("txt", pa.string()))
    shutil.copytree(f"{uri}/_mem_wal", f"{copy}/_mem_wal", copy_function=shutil.copyfile)
    time.sleep(1.2)
    without = shutil.ignore_patterns("_mem_wal")
    shutil.copytree(uri, copy, copy_function=shutil.copyfile, ignore=without, dirs_exist_ok=True)
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    adopt.apply(open_table(copy), AdoptOptions(answer="unmerged"))
    (fault,) = merge.apply(open_table(copy), merge.MergeOptions()).blocked
    assert fault.error.reason == "schema_projection"
    assert "'txt'" in str(fault.error)
    assert "copy it to a new column" in fault.error.remedy
    lance.dataset(copy).add_columns(pa.field("copy", pa.string()))
    lance.dataset(copy).drop_columns(["txt"])
    lance.dataset(copy).alter_columns({"path": "copy", "name": "txt"})
    assert merge.apply(open_table(copy), merge.MergeOptions()).decision == "merged"
    for one in (uri, copy):
        assert lance.dataset(one).to_table().to_pylist() == [{"id": 3, "val": 1.0, "txt": None}]


def test_a_table_copied_base_first_asks_nothing(tmp_path: Path) -> None:
    uri, copy = f"{tmp_path}/t.lance", f"{tmp_path}/copy.lance"
    lance.write_dataset(small.rows(0, 1), uri).initialize_mem_wal(unsharded=True)
    small.flush(uri, small.rows(3, 4, 1.0))
    shutil.copytree(uri, copy, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("_mem_wal"))
    time.sleep(1.2)
    shutil.copytree(f"{uri}/_mem_wal", f"{copy}/_mem_wal", copy_function=shutil.copyfile)
    assert merge.apply(open_table(copy), merge.MergeOptions()).decision == "merged"


def test_a_table_copied_by_a_tool_that_keeps_no_times(tmp_path: Path) -> None:
    """What others merged long ago is told by what the files say of themselves."""
    uri = small.make(tmp_path)
    merged_by(uri, "pylance")
    later = datetime.now(UTC).timestamp() + 7200
    for path in sorted(Path(uri).rglob("*"), reverse=True):
        os.utime(path, (later, later))
        later += 5  # regions, which sort first, look as if they were written last
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "nothing_to_merge"


@pytest.mark.parametrize(
    ("stored", "said", "answer"),
    [
        (-HOUR, -HOUR, True),
        (HOUR, HOUR, False),
        (-HOUR, HOUR, True),  # the writer's clock is wrong; the store has one
        (timedelta(0), -HOUR, True),  # in the same second
        (timedelta(milliseconds=-300), HOUR, None),
        (timedelta(milliseconds=300), -HOUR, None),
    ],
)
def test_earlier_by_two_clocks(stored: timedelta, said: timedelta, *, answer: bool | None) -> None:
    assert is_earlier(Moment(NOON + stored, NOON + HOUR + said), Moment(NOON, NOON + HOUR)) is answer


def test_earlier_in_a_copy() -> None:
    copied = NOON + timedelta(days=3)
    assert is_earlier(Moment(copied + HOUR, NOON), Moment(copied, NOON + HOUR)) is True
    assert is_earlier(Moment(copied, NOON + HOUR), Moment(copied + HOUR, NOON)) is False


def test_regions_of_a_table_without_index(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The remedy names them and both choices; following either brings no row back into the other table."""
    uri = small.make(tmp_path)
    merged_by(uri, "ours")
    right = lance.dataset(uri).version
    small.flush(uri, small.rows(3, 4, 1.0))
    lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    outcome = run_here(capfd, "merge", uri)
    assert outcome.code == 5
    told = " ".join(outcome.err.split())
    for words in (small.REGION, "move _mem_wal to a place outside the table", "tag the newest version", "restore()"):
        assert words in told
    copy = f"{tmp_path}/copy.lance"
    shutil.copytree(uri, copy)
    shutil.move(f"{uri}/_mem_wal", f"{tmp_path}/kept")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    assert run_here(capfd, "maintain", uri, "--apply").code == 0
    assert lance.dataset(uri).count_rows() == 3
    lance.dataset(copy).tags.create("overwritten", lance.dataset(copy).version)
    lance.dataset(copy, version=right).restore()
    assert run_here(capfd, "merge", copy, "--json").document["decision"] == "merged"
    assert lance.dataset(copy, version="overwritten").count_rows() == 3
    assert {row["id"]: row["val"] for row in read_base(copy).values()}[3] == 1.0
