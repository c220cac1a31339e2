"""Another program merges the table, too, and drops generations without progress: no row is lost or comes back."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.candidates import Verdict
from memwal_ops.core.triggers import parse_trigger
from memwal_ops.errors import GenerationMissingError, InvalidUsageError
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.generations.wal import wal_entry_path
from memwal_ops.formats.lance.jobs import adopt, drained, expire, merge
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.options import AdoptOptions, MergeOptions
from memwal_ops.formats.lance.specs import MERGE
from tests.integration.contracts import small
from tests.support.dying_store import DyingStore, Killed
from tests.support.gc_options import IMMEDIATE
from tests.support.json_types import assert_json
from tests.support.overtaken import Overtaken
from tests.support.run_cli import contents, run_here

DRAINED = AdoptOptions(drained=True)
ACCEPT = MergeOptions(accept_drained=True)


def folder(uri: str) -> Path:
    return Path(uri, "_mem_wal", small.REGION)


def theirs(uri: str, *, merged: bool = True, folders: bool = False, only: int | None = None) -> None:
    """A merge of another program: rows of the listed generations, newest last; then the list; then the folders."""
    region = open_table(uri).region(UUID(small.REGION))
    manifest = region.latest()
    taken = [flushed for flushed in manifest.flushed_generations if only in {None, flushed.generation}]
    for flushed in taken if merged else ():
        rows = lance.dataset(f"{folder(uri)}/{flushed.path}").to_table().to_pylist()
        newest = {row["id"]: row for row in rows}
        gone = [key for key, row in newest.items() if row["_tombstone"]]
        kept = [{name: row[name] for name in ("id", "val", "txt")} for key, row in newest.items() if key not in gone]
        if kept:
            small.upsert(lance.dataset(uri), pa.Table.from_pylist(kept, schema=small.SCHEMA))
        if gone:
            lance.dataset(uri).delete(f"id IN ({', '.join(map(str, gone))})")
    assert region.commit(manifest.next().without_generations({flushed.generation for flushed in taken}))
    for flushed in taken if not folders else ():
        shutil.rmtree(folder(uri) / flushed.path)


def flushed(folder: Path) -> str:
    """Four generations: values 1 to 3 of keys that overlap; the last one deletes key 1."""
    uri = small.make(folder)
    for number in range(3):
        small.flush(uri, small.rows(number, number + 10, number + 1.0))
    small.flush(uri, small.keys(1), small.rows(200, 201, 4.0))
    return uri


EXPECTED = {key: [0.0] for key in range(12, 100)} | {key: [3.0] for key in range(2, 12)} | {0: [1.0], 200: [4.0]}


def blocked(uri: str) -> list[str]:
    return [fault.error.reason for fault in read_backlog(open_table(uri)).blocked]


def test_what_it_merged_is_recorded_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = flushed(tmp_path)
    theirs(uri)
    assert small.values(uri) == EXPECTED
    run = run_here(capfd, "merge", uri)
    text = " ".join(run.out.split())
    assert run.code == 10
    for part in (
        ": drained_elsewhere", "of its manifest dropped generations 1 to 4", "Another program (lance ",
        "Of 13 keys that can still be read, 13 are in the base table", "memwal-ops adopt URI --drained",
    ):  # fmt: skip
        assert part in text, part
    assert run_here(capfd, "why", uri, small.REGION).code == 0
    assert "merges it, too" in run_here(capfd, "inspect", uri).out
    before = contents(uri)
    planned = adopt.plan(open_table(uri), DRAINED)
    assert contents(uri) == before
    (region,) = planned.regions
    assert (planned.decision, region.first, region.last, region.keys, region.in_base) == ("planned", 1, 4, 13, 13)
    done = adopt.apply(open_table(uri), DRAINED)
    for report in (planned, done):
        assert_json(report.to_json())
        assert "4 of its manifest" not in report.describe()
    assert (done.decision, done.exit_code, small.progress(uri)) == ("adopted", 0, {small.REGION: 4})
    assert adopt.apply(open_table(uri), DRAINED).decision == "nothing_to_adopt"
    assert merge.apply(open_table(uri), MergeOptions()).decision == "nothing_to_merge"
    small.flush(uri, small.rows(50, 51, 9.0))
    assert merge.apply(open_table(uri), MergeOptions()).decision == "merged"
    assert small.values(uri) == EXPECTED | {50: [9.0]}
    inspected = run_job(uri, "inspect").to_json()
    assert inspected["merged_elsewhere"]["program"].startswith("lance ")
    assert merge.backlog(open_table(uri))["merged_elsewhere"] >= 1


def test_a_merge_that_only_accepts_says_what_it_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = flushed(tmp_path)
    numbers = [one.generation for one in open_table(uri).region(UUID(small.REGION)).latest().flushed_generations]
    theirs(uri)
    accepted = f"{len(numbers)} generations that another program dropped"
    planned = run_here(capfd, "merge", uri, "--accept-drained", "--dry-run").out
    assert planned.startswith(f"dry_run: would accept {accepted}; nothing was changed.\n")
    done = run_here(capfd, "merge", uri, "--accept-drained").out
    assert done.startswith(f"merged: accepted {accepted}, ")
    assert f"They are recorded as merged up to generation {numbers[-1]}." in " ".join(done.split())


@pytest.mark.parametrize("folders", [True, False])
def test_what_it_did_not_merge_is_listed_again(tmp_path: Path, folders: bool) -> None:
    uri = flushed(tmp_path)
    theirs(uri, merged=False, folders=folders)
    planned = merge.plan(open_table(uri), ACCEPT)
    assert (planned.blocked, [len(region.missing) for region in planned.drained]) == ((), [13])
    report = merge.apply(open_table(uri), ACCEPT)
    assert_json(report.to_json())
    assert (report.decision, [(region.first, region.last) for region in report.drained]) == ("merged", [(1, 4), (2, 4)])
    assert (small.values(uri), small.progress(uri)) == (EXPECTED, {small.REGION: 4})
    assert gc.apply(open_table(uri), IMMEDIATE).exit_code == 0
    assert small.values(uri) == EXPECTED


def test_only_what_is_missing_is_merged_again(tmp_path: Path) -> None:
    """What the table's users wrote into the base since stays."""
    uri = flushed(tmp_path)
    small.flush(uri, small.rows(120, 121, 5.0))
    for number in range(1, 5):
        theirs(uri, only=number)
    theirs(uri, only=5, merged=False)
    lance.dataset(uri).update({"val": "70"}, where="id = 7")
    lance.dataset(uri).delete("id = 8")
    region = adopt.plan(open_table(uri), DRAINED).regions[0]
    assert (region.first, region.last, region.missing) == (1, 5, ("120",))
    assert adopt.apply(open_table(uri), DRAINED).exit_code == 0
    assert adopt.apply(open_table(uri), DRAINED).exit_code == 10
    assert merge.apply(open_table(uri), MergeOptions()).decision == "blocked"
    assert adopt.apply(open_table(uri), DRAINED).regions[0].missing == ()
    assert merge.apply(open_table(uri), MergeOptions()).decision == "nothing_to_merge"
    assert small.values(uri) == {key: value for key, value in EXPECTED.items() if key != 8} | {7: [70.0], 120: [5.0]}


def test_older_rows_that_it_put_over_newer_ones_are_replaced(tmp_path: Path) -> None:
    uri = flushed(tmp_path)
    first = open_table(uri).region(UUID(small.REGION)).latest().flushed_generations[0]
    older = lance.dataset(f"{folder(uri)}/{first.path}").to_table(columns=["id", "val", "txt"])
    theirs(uri)
    small.upsert(lance.dataset(uri), older)
    region = adopt.plan(open_table(uri), DRAINED).regions[0]
    assert region.missing == ("1", *"23456789")
    report = merge.apply(open_table(uri), ACCEPT)
    assert (report.decision, small.values(uri)) == ("merged", EXPECTED)


def test_it_cannot_be_told_where_a_later_write_may_be_unread(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = flushed(tmp_path)
    first, *_, last = open_table(uri).region(UUID(small.REGION)).latest().flushed_generations
    shutil.copytree(folder(uri) / first.path, kept := tmp_path / "kept")
    theirs(uri, merged=False)
    shutil.copytree(kept, folder(uri) / first.path)
    shutil.rmtree(folder(uri) / "wal")
    report = adopt.apply(open_table(uri), DRAINED)
    (region,) = report.regions
    assert (report.exit_code, region.unread, len(region.unknown), region.missing) == (10, (2, 3, 4), 10, ())
    assert "--as merged --up-to 4" in " ".join(report.describe().split())
    assert (small.progress(uri), blocked(uri)) == ({}, ["drained_elsewhere"])
    shutil.rmtree(folder(uri) / first.path)
    assert adopt.plan(open_table(uri), DRAINED).regions[0].keys == 0
    assert "None of their rows can be read" in run_here(capfd, "adopt", uri, "--drained").out.replace("\n  ", " ")
    del last


def test_generations_before_them_are_not_put_over_them(tmp_path: Path) -> None:
    uri = flushed(tmp_path)
    theirs(uri, only=3)
    assert merge.apply(open_table(uri), MergeOptions()).passes == ()
    report = adopt.plan(open_table(uri), DRAINED)
    assert (report.exit_code, report.regions[0].waiting, small.progress(uri)) == (0, 2, {})
    assert merge.apply(open_table(uri), ACCEPT).decision == "merged"
    assert small.values(uri) == EXPECTED


def test_a_row_that_the_base_had_before_is_no_proof(tmp_path: Path) -> None:
    """Generation 1 deletes a key, 2 puts its row again; theirs merges the first, and drops both."""
    uri = small.make(tmp_path)
    small.flush(uri, small.keys(5))
    small.flush(uri, small.rows(5, 6))
    small.upsert(lance.dataset(uri), small.rows(300, 301))
    theirs(uri, only=1)
    theirs(uri, only=2, merged=False)
    report = adopt.apply(open_table(uri), DRAINED)
    (region,) = report.regions
    assert (report.exit_code, region.unknown, region.missing, small.progress(uri)) == (10, ("5",), (), {})
    assert merge.apply(open_table(uri), ACCEPT).decision == "blocked"


@pytest.mark.parametrize(
    ("later", "step", "unknown"), [(0, 0, True), (3600, 0, True), (3600, -1, True), (0, 1, False)],
    ids=["one second", "copied at once", "copied from the log on", "another second"],
)  # fmt: skip
def test_a_row_of_the_second_of_its_flush_is_no_proof(tmp_path: Path, later: int, step: int, unknown: bool) -> None:
    """The base has a row; users change it; the log puts it again; theirs drops that: S3's times have whole seconds."""
    uri = small.make(tmp_path)
    small.upsert(lance.dataset(uri), small.rows(5, 6, 1.0))
    lance.dataset(uri).update({"val": "2"}, where="id = 5")
    now = int(time.time()) + later
    for path in (path for path in Path(uri).rglob("*") if path.is_file()):
        os.utime(path, (now, now))
    small.flush(uri, small.rows(5, 6, 1.0))
    theirs(uri, merged=False)
    for path in (path for path in folder(uri).rglob("*") if path.is_file()):
        os.utime(path, (now + step, now + step))
    report = adopt.apply(open_table(uri), DRAINED)
    (region,) = report.regions
    wanted = (10, ("5",), ()) if unknown else (0, (), ("5",))
    assert (report.exit_code, region.unknown, region.missing) == wanted
    assert merge.apply(open_table(uri), ACCEPT).decision == ("blocked" if unknown else "merged")
    assert small.values(uri)[5] == ([2.0] if unknown else [1.0])


def test_versions_that_a_restore_left_are_no_proof(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    before = lance.dataset(uri).version
    small.flush(uri, small.rows(5, 6, 1.0))
    assert merge.apply(open_table(uri), MergeOptions()).decision == "merged"
    lance.dataset(uri, version=before).restore()
    for path in (path for path in Path(uri).rglob("*") if path.is_file()):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3600 * 10**9))
    theirs(uri, merged=False)
    assert adopt.plan(open_table(uri), DRAINED).regions[0].missing == ("5",)
    assert merge.apply(open_table(uri), ACCEPT).decision == "merged"
    assert small.values(uri)[5] == [1.0]


def test_what_users_wrote_after_a_merged_delete_stays(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    small.flush(uri, small.keys(5))
    theirs(uri)
    small.upsert(lance.dataset(uri), small.rows(5, 6, 8.0))
    assert merge.apply(open_table(uri), ACCEPT).exit_code == 0
    assert (small.values(uri)[5], small.progress(uri)) == ([8.0], {small.REGION: 1})


@pytest.mark.parametrize("left", ["folder", "log"])
def test_rows_that_cannot_be_compared_are_not_recorded(
    tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be all that is left of rows that it did not merge."""
    uri = flushed(tmp_path)
    theirs(uri, merged=False, folders=left == "folder")
    if left == "folder":
        shutil.rmtree(folder(uri) / "wal")
    monkeypatch.setattr(drained, "_MAX_ROWS", 0)
    report = merge.apply(open_table(uri), ACCEPT)
    assert (report.exit_code, small.progress(uri)) == (10, {})
    assert "cannot be compared" in " ".join(report.describe().split())
    assert_json(adopt.plan(open_table(uri), DRAINED).to_json())


def test_a_program_that_is_not_known_has_no_release(tmp_path: Path) -> None:
    uri = flushed(tmp_path)
    assert merge.apply(open_table(uri), MergeOptions()).decision == "merged"
    small.flush(uri, small.rows(5, 6, 8.0))
    theirs(uri, merged=False)
    figures = merge.backlog(open_table(uri))
    assert (figures["blocked_regions"], figures.get("merged_elsewhere")) == (1, None)


def test_gone_manifests_are_no_proof(tmp_path: Path) -> None:
    uri = flushed(tmp_path)
    theirs(uri)
    manifests = sorted(folder(uri).joinpath("manifest").glob("*.binpb"), key=lambda path: path.name[::-1])
    for path in manifests[:-1]:
        path.unlink()
    assert blocked(uri) == ["generation_missing"]


@pytest.mark.parametrize("flushed_before", [True, False])
def test_a_base_from_a_backup_is_not_taken_for_merged(tmp_path: Path, flushed_before: bool) -> None:
    """Ours merged, and collected; the base alone was put back: the region shows a drop, and nothing else is left."""
    uri, backup = small.make(tmp_path, btree=False), tmp_path / "backup"

    def flush() -> None:
        for number in range(3):
            small.flush(uri, small.rows(10 * number, 10 * number + 10, 1.0))

    if flushed_before:
        flush()
    shutil.copytree(uri, backup, ignore=shutil.ignore_patterns("_mem_wal"))
    if not flushed_before:
        flush()
    assert merge.apply(open_table(uri), MergeOptions()).decision == "merged"
    expire.apply(open_table(uri), expire.ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True))
    assert gc.apply(open_table(uri), IMMEDIATE).exit_code == 0
    assert gc.apply(open_table(uri), IMMEDIATE).exit_code == 0
    assert not [*folder(uri).glob("*_gen_*")]
    for name in os.listdir(uri):
        if name != "_mem_wal":
            shutil.rmtree(Path(uri, name))
    shutil.copytree(backup, uri, dirs_exist_ok=True)
    for _ in range(2):
        report = merge.apply(open_table(uri), ACCEPT)
        assert (report.exit_code, small.progress(uri)) == (10, {})
        assert "is it from a backup?" in " ".join(report.describe().split())
    report = adopt.apply(open_table(uri), DRAINED)
    assert (report.exit_code, small.progress(uri), report.regions[0].unread) == (10, {}, (1, 2, 3))
    assert small.values(uri)[5] == [0.0]


def test_what_it_merged_is_recorded_though_nothing_is_left(tmp_path: Path) -> None:
    """lance-context deletes the folders that it dropped, and gc what the log had of them."""
    uri = flushed(tmp_path)
    theirs(uri)
    shutil.rmtree(folder(uri) / "wal")
    (region,) = merge.apply(open_table(uri), ACCEPT).drained
    assert (region.keys, region.unread) == (0, (1, 2, 3, 4))
    assert (small.values(uri), small.progress(uri)) == (EXPECTED, {small.REGION: 4})


def test_what_the_log_has_is_compared_though_its_first_entries_are_gone(tmp_path: Path) -> None:
    uri = flushed(tmp_path)
    table = open_table(uri)
    ends = table.region(UUID(small.REGION)).flushes(0, 1 << 30)
    for number in range(1, ends[2][0] + 1):
        Path(uri, wal_entry_path(UUID(small.REGION), number, table.layout_of(UUID(small.REGION)))).unlink(
            missing_ok=True
        )
    theirs(uri, merged=False)
    report = adopt.apply(open_table(uri), DRAINED)
    (region,) = report.regions
    assert (region.unread, region.keys, len(region.missing)) == ((1, 2), 12, 12)
    assert (report.exit_code, small.progress(uri)) == (10, {}), "none wrote what is gone into the base"


def test_a_restored_table_is_no_proof(tmp_path: Path) -> None:
    """Ours merged and drained; the table was restored to before: the rows are in no version but those."""
    uri = flushed(tmp_path)
    before = lance.dataset(uri).version
    assert merge.apply(open_table(uri), MergeOptions()).decision == "merged"
    theirs(uri, merged=False)  # as gc drains it
    lance.dataset(uri, version=before).restore()
    assert blocked(uri) == ["generation_missing"]
    with pytest.raises(GenerationMissingError):
        expire.apply(open_table(uri), expire.ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True))
    for version in range(1, lance.dataset(uri).version):
        for name in (f"{version}.manifest", f"{2**64 - 1 - version}.manifest"):
            Path(uri, "_versions", name).unlink(missing_ok=True)
    assert blocked(uri) == ["generation_missing"]
    assert adopt.plan(open_table(uri), DRAINED).decision == "nothing_to_adopt"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("job", ["adopt", "merge"])
def test_killed_at_each_write_and_run_again(tmp_path: Path, job: str, missing: bool, after: bool) -> None:
    made = flushed(tmp_path)
    small.flush(made, small.rows(120, 121, 5.0))
    for number in range(1, 5):
        theirs(made, only=number)
    theirs(made, only=5, merged=not missing)
    small.flush(made, small.rows(60, 61, 6.0))

    def run(uri: str, store: object = None) -> None:
        table = open_table(uri)
        table = table if store is None else replace(table, store=store)
        if job == "adopt":
            adopt.apply(table, DRAINED)
        else:
            merge.apply(table, ACCEPT)

    shutil.copytree(made, whole := f"{tmp_path}/whole.lance")
    counting = DyingStore(open_table(whole).store, 1 << 30, after=False)
    run(whole, counting)
    writes = [at for at, name in enumerate(counting.calls, 1) if name.startswith("put")]
    assert writes
    for at in writes:
        shutil.copytree(made, uri := f"{tmp_path}/{at}.lance")
        with suppress(Killed):
            run(uri, DyingStore(open_table(uri).store, at, after=after))
        assert gc.apply(open_table(uri), IMMEDIATE).exit_code in {0, 10}
        run(uri)
        for _ in range(2):
            assert merge.apply(open_table(uri), ACCEPT).exit_code == 0
            assert gc.apply(open_table(uri), IMMEDIATE).exit_code == 0
        assert small.values(uri) == EXPECTED | {120: [5.0], 60: [6.0]}, at


@pytest.mark.parametrize("missing", [True, False])
def test_two_at_once(tmp_path: Path, missing: bool) -> None:
    uri = flushed(tmp_path)
    theirs(uri, merged=not missing)
    failed: list[BaseException] = []

    def act() -> None:
        try:
            merge.apply(open_table(uri), ACCEPT)
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert merge.apply(open_table(uri), ACCEPT).exit_code == 0
    assert (small.values(uri), small.progress(uri)) == (EXPECTED, {small.REGION: 4})


@pytest.mark.parametrize("at", range(1, 6))
def test_overtaken_by_another_run_or_a_writer(tmp_path: Path, at: int) -> None:
    uri = flushed(tmp_path)
    theirs(uri, merged=False)

    def others() -> None:
        small.flush(uri, small.rows(60, 61, 6.0))
        merge.apply(open_table(uri), ACCEPT)

    table = open_table(uri)
    merge.apply(replace(table, store=Overtaken(table.store, at, others, writes=True)), ACCEPT)
    assert merge.apply(open_table(uri), ACCEPT).exit_code == 0
    assert small.values(uri) == EXPECTED | {60: [6.0]}


def deletable(uri: str) -> list[str]:
    candidates = gc.candidates(open_table(uri), IMMEDIATE)
    return [one.path for one in candidates if one.verdict is Verdict.DELETE and one.region_id is not None]


def overtaken_by_ours(uri: str) -> None:
    """Theirs reads the first generation; ours merges all; theirs puts what it read."""
    first = open_table(uri).region(UUID(small.REGION)).latest().flushed_generations[0]
    read = lance.dataset(f"{folder(uri)}/{first.path}").to_table(columns=["id", "val", "txt"])
    assert merge.apply(open_table(uri), MergeOptions()).decision == "merged"
    small.upsert(lance.dataset(uri), read)


def test_its_merge_after_ours_puts_older_rows_over_newer_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = flushed(tmp_path)
    overtaken_by_ours(uri)
    expected = ["1", *"23456789"]
    assert not deletable(uri)
    run = run_here(capfd, "inspect", uri)
    assert "older rows of 9 keys than region" in " ".join(run.out.split())
    small.flush(uri, small.rows(60, 61, 6.0))
    report = merge.apply(open_table(uri), MergeOptions())
    assert_json(report.to_json())
    assert {region: [*keys] for region, keys in report.overwritten.items()} == {small.REGION: expected}
    assert "PROBLEM: the base table has older rows of 9 keys" in " ".join(report.describe().split())
    # Ours is the newest version now: the finding is recorded.
    assert merge.apply(open_table(uri), MergeOptions()).overwritten == {}
    assert run_job(uri, "inspect").to_json()["merged_elsewhere"]["overwritten"] == {small.REGION: expected}
    assert not deletable(uri)
    small.flush(uri, small.keys(1), small.rows(2, 11, 8.0))
    assert merge.apply(open_table(uri), MergeOptions()).exit_code == 0
    assert run_job(uri, "inspect").to_json()["merged_elsewhere"]["overwritten"] == {}
    assert deletable(uri)


def test_a_restored_table_is_looked_at_anew(tmp_path: Path) -> None:
    """The restored table reaches the version that was looked at before, by another write."""
    uri = flushed(tmp_path / "table")
    merge.apply(open_table(uri), MergeOptions())
    shutil.copytree(uri, tmp_path / "backup")
    small.upsert(lance.dataset(uri), small.rows(300, 310, 1.0))
    before = open_table(uri)
    assert drained.overwritten(before, [before.region(UUID(small.REGION)).latest()]) == {}
    shutil.rmtree(uri)
    shutil.copytree(tmp_path / "backup", uri)
    small.upsert(lance.dataset(uri), small.rows(0, 10, 1.0))
    after = open_table(uri)
    assert after.version == before.version
    assert drained.overwritten(after, [after.region(UUID(small.REGION)).latest()]) == {small.REGION: (*"123456789",)}


def test_direct_writes_are_no_merge(tmp_path: Path) -> None:
    uri = flushed(tmp_path)
    assert merge.apply(open_table(uri), MergeOptions()).decision == "merged"
    lance.dataset(uri).update({"val": "70"}, where="id = 7")
    small.upsert(lance.dataset(uri), small.rows(300, 310, 1.0))
    assert run_job(uri, "inspect").to_json()["merged_elsewhere"] is None
    assert merge.apply(open_table(uri), MergeOptions()).overwritten == {}


@pytest.mark.parametrize("other", [{"answer": "merged"}, {"same_columns": True}, {"moved": True}])
def test_decisions_exclude_each_other(tmp_path: Path, other: dict[str, object]) -> None:
    with pytest.raises(InvalidUsageError, match="drained"):
        run_job(small.make(tmp_path), "adopt", drained=True, **other)


def without_sizes(uri: str) -> None:
    """The generations as Lance 9 lists them (lance-context, LanceDB 0.36)."""
    region = open_table(uri).region(UUID(small.REGION))
    manifest = region.latest()
    bare = tuple(replace(one, physical_rows=None, in_memory_bytes=None) for one in manifest.flushed_generations)
    assert region.commit(replace(manifest.next(), flushed_generations=bare))


def test_many_generations_without_recorded_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trigger by their rows fires by what their files have; where these are too many, one by their number does."""
    uri = small.make(tmp_path)
    for number in range(66):  # of others, the first 64 are looked at
        small.flush(uri, small.rows(number, number + 2))
    without_sizes(uri)
    figures = merge.backlog(open_table(uri))
    assert (figures["generations"], figures["rows"], figures["bytes"] > 66 * 100) == (66, 132, True)
    monkeypatch.setattr(merge, "_MAX_WITHOUT_SIZE", 65)
    figures = merge.backlog(open_table(uri))
    assert figures["generations"] == 66
    assert not {"rows", "bytes"} & figures.keys()
    kinds = {name: metric.unit for name, metric in MERGE.backlog_metrics.items()}
    assert parse_trigger(MERGE.when or "", kinds).is_met(figures)
    assert not parse_trigger("rows >= 1 or bytes >= 1", kinds).is_met(figures)


def test_generations_without_recorded_sizes_take_one_pass(tmp_path: Path) -> None:
    """A pass takes what fits by their files."""
    without_sizes(uri := flushed(tmp_path))
    assert len(merge.plan(open_table(uri), MergeOptions()).passes) == 1
    report = merge.apply(open_table(uri), MergeOptions())
    assert ([len(one.merge_pass.generations) for one in report.passes], small.values(uri)) == ([4], EXPECTED)
    assert re.match(r"a backlog of [1-9][0-9,]* bytes", report.engine_reason)
