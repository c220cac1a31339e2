"""An expiry that is refused, killed, suspended, or that meets links: no listed version is without its files."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.core import holds
from memwal_ops.core.holds import EXPIRIES_FOLDER, HOLDS_FOLDER, Hold, take_hold
from memwal_ops.errors import TableCorruptError, TableReplacedError, VersionGoneError
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.expire import ExpireOptions
from memwal_ops.formats.lance.jobs.inspect import job as inspect
from memwal_ops.storage.api import LinkError
from tests.integration.formats.lance.jobs.expire.test_expire import ALL, because, no_copies, run, versions
from tests.support.dying_store import DyingStore, Killed
from tests.support.faulty_proxy import FaultyProxy
from tests.support.run_cli import contents, run_here, run_process
from tests.support.stores import beside, refusing
from tests.support.tables import damage
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import DAY, age, make, merged, sound, table_of, write
from tests.support.tables.reading import open_dataset, read_base
from tests.support.tables.templates import copy_of
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

HOUR = timedelta(hours=1)
WEEK = ExpireOptions()


@pytest.fixture
def made(tmp_path: Path) -> LsmTable:
    """Old versions whose data files no later version refers to."""
    return copy_of(compacted, str(tmp_path / "t.lance"))


def compacted(uri: str) -> LsmTable:
    table = make(Path(uri).parent, generations=2, regions=1)
    merged(table)
    lance.dataset(table.uri).optimize.compact_files(target_rows_per_fragment=10_000)
    return table


def readable(made: LsmTable) -> list[int]:
    """Every listed version, each read as a whole."""
    found = versions(made)
    for version in found:
        open_dataset(made.uri, made.storage_options, version).to_table()
    return found


def data_files(made: LsmTable) -> set[str]:
    return set(Files(made.uri, made.storage_options).listing("data"))


# -- refused


@pytest.mark.parametrize(
    ("denied", "goes"),
    [("_versions/", "nothing"), ("data/", "manifests"), ("", "nothing")],
    ids=["versions", "data", "everything"],
)
def test_what_the_store_refuses_is_reported_and_finished_later(made: LsmTable, denied: str, goes: str) -> None:
    before, files = versions(made), data_files(made)
    report = run(made, refusing(lambda path: path.startswith(denied)))
    assert (report.decision, report.exit_code) == ("incomplete", 27)
    assert any(path.startswith(denied) for path in report.failed)
    left = readable(made)
    assert report.versions == tuple(sorted(set(before) - set(left)))
    assert left == (before if goes == "nothing" else before[-1:])
    assert data_files(made) == files
    if goes == "nothing":
        if not denied:
            # The announcement could not be taken back either; it ends by itself.
            age(made, f"{EXPIRIES_FOLDER}/*", 25 * 3600)
        assert take_hold(table_of(made), before[0], HOUR).versions == (before[0],)
        return
    assert expire.plan(table_of(made), ALL).decision == "planned"
    again = expire.apply(table_of(made), WEEK)
    assert (again.decision, again.versions) == ("expired", ())
    assert again.objects >= 2
    assert data_files(made) < files
    assert no_copies(made)
    sound(made)
    assert expire.apply(table_of(made), WEEK).decision == "nothing_to_expire"


def test_one_manifest_is_refused(made: LsmTable) -> None:
    first, *_, newest = versions(made)
    locked = version_path(first, table_of(made).naming)
    report = run(made, refusing(lambda path: path == locked))
    assert (report.exit_code, list(report.failed)) == (27, [locked])
    assert readable(made) == [first, newest]
    assert expire.apply(table_of(made), ALL).versions == (first,)
    assert no_copies(made)


@pytest.mark.long
@pytest.mark.parametrize("folder", ["_versions", "data"])
def test_a_folder_without_write_permission(made: LsmTable, folder: str) -> None:
    before = versions(made)
    path = Path(made.uri, folder)
    path.chmod(0o555)
    try:
        outcome = run_process(
            "expire", made.uri, "--older-than=0", "--allow-unsafe", "--apply", "--json", wrap=damage.held_by_permissions
        )
    finally:
        path.chmod(0o755)
    assert outcome.code == 27
    assert outcome.document["decision"] == "incomplete"
    assert all(one["path"].startswith(f"{folder}/") for one in outcome.document["failed"])
    assert readable(made) == (before if folder == "_versions" else before[-1:])
    assert run_process("expire", made.uri, "--older-than=0", "--allow-unsafe", "--apply").code == 0
    assert readable(made) == before[-1:]


@pytest.mark.long
@pytest.mark.s3
@pytest.mark.parametrize("denied", ["_versions/", "data/"])
def test_a_bucket_that_denies(bucket: tuple[str, dict[str, str]], denied: str) -> None:
    uri, options = bucket
    made = Workload(1, regions=1, base_rows=30).create(f"{uri}/t.lance", options)
    made.step(4)
    made.flush()
    merged(made)
    open_dataset(made.uri, options).optimize.compact_files(target_rows_per_fragment=10_000)
    before = versions(made)
    with FaultyProxy(options["aws_endpoint"]) as proxy:
        files = Files(made.uri, options)
        proxy.undeletable = {f"t.lance/{path}" for path in files.listing(denied)}
        behind = open_table(made.uri, {**options, "aws_endpoint": proxy.endpoint})
        report = expire.apply(behind, ALL)
    assert report.exit_code == 27
    assert report.versions == tuple(sorted(set(before) - set(readable(made))))
    assert len(readable(made)) == (len(before) if denied == "_versions/" else 1)
    done = expire.apply(table_of(made), ALL)
    assert (done.decision, readable(made)) == ("expired", before[-1:])
    assert no_copies(made)
    sound(made)


# -- killed


@pytest.mark.long
def test_killed_anywhere_and_run_again(made: LsmTable, tmp_path: Path) -> None:
    whole = damage.copy_table(made.uri, str(tmp_path / "whole.lance"))
    expire.apply(open_table(whole), ALL)
    goal = set(contents(whole))
    number, states = 0, set()
    while True:
        number += 1
        trial = damage.copy_table(made.uri, str(tmp_path / "trial.lance"))
        table = open_table(trial)
        store = DyingStore(table.store, number, after=number % 2 == 0)
        try:
            expire.apply(replace(table, store=store), ALL)
        except Killed:
            pass
        else:
            break
        listed = [int(one["version"]) for one in lance.dataset(trial).versions()]
        for version in listed:
            lance.dataset(trial, version=version).to_table()
            assert inspect.inspect(open_table(trial)).versions.unreadable == {}
        states.add((len(listed), len(list(Path(trial, "data").iterdir()))))
        expire.apply(open_table(trial), WEEK)
        expire.apply(open_table(trial), ALL)
        # A trial of the clock and an announcement of the killed run end by themselves.
        rest = {path for path in contents(trial) if not path.startswith(("_mem_wal_ops/clock", EXPIRIES_FOLDER))}
        assert rest == goal, number
        shutil.rmtree(trial)
    assert number > 30
    assert len(states) > 2, "killed before manifests went, between them and the data, and after"


def test_versions_that_another_cleanup_left_without_files(
    made: LsmTable, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """pylance's own is killed after it deleted data, and before manifests."""
    before = versions(made)
    lost = damage.copy_table(made.uri, str(tmp_path / "copy.lance"))
    lance.dataset(made.uri).cleanup_old_versions(older_than=timedelta(0))
    for path in Path(lost, "_versions").iterdir():
        shutil.copy2(path, Path(made.uri, "_versions"))
    assert versions(made) == before
    with pytest.raises(VersionGoneError, match=r"is listed, but data/.* is missing"):
        take_hold(table_of(made), before[0], HOUR)
    assert take_hold(table_of(made), before[-1], HOUR).versions == (before[-1],)
    look = inspect.inspect(table_of(made)).versions
    assert (look.listed, look.checked) == (len(before), len(before))
    assert before[0] in look.unreadable
    assert before[-1] not in look.unreadable
    said = run_here(capfd, "inspect", made.uri)
    assert (said.code, "cannot be read" in said.out) == (0, True)
    for act in (expire.plan, expire.apply):
        report = act(table_of(made), WEEK)
        assert (report.decision, report.versions, report.exit_code) == ("nothing_to_expire", (), 0)
        assert report.unreadable.keys() == look.unreadable.keys()
        assert "cannot be read" in report.warnings[-1]
    assert "UNREADABLE: version" in run_here(capfd, "expire", made.uri).out
    assert expire.apply(table_of(made), ALL).versions == tuple(before[:-1])
    sound(made)


def test_a_manifest_that_does_not_decode_stops_it_before_any_deletion(made: LsmTable) -> None:
    before = contents(made.uri)
    path = Path(made.uri, version_path(versions(made)[1], table_of(made).naming))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    for act in (expire.plan, expire.apply):
        with pytest.raises(TableCorruptError, match=path.name):
            act(table_of(made), ALL)
    path.write_bytes(whole)
    assert set(contents(made.uri)) == set(before)


# -- beside others


@pytest.mark.parametrize("part", ["_mem_wal_ops/expired", "_versions/", "data/"])
def test_two_at_once(made: LsmTable, part: str) -> None:
    before = versions(made)
    verb = "put_if_absent" if part == "_mem_wal_ops/expired" else "delete_many"
    first = run(made, beside(verb, part, lambda: expire.apply(table_of(made), ALL)))
    assert first.exit_code == 0
    assert readable(made) == before[-1:]
    sound(made)
    assert expire.apply(table_of(made), ALL).exit_code == 0
    assert no_copies(made)


@pytest.mark.parametrize("part", ["_mem_wal_ops/expired", "_versions/"])
def test_a_tag_while_another_run_is_at_it(made: LsmTable, part: str) -> None:
    """The tag is made in the middle of one run, and another run begins and ends before the first goes on."""
    old, *_ = versions(made)
    rows = read_base(made.uri, version=old)

    def others() -> None:
        open_dataset(made.uri).tags.create("late", old)
        expire.apply(table_of(made), ALL)

    verb = "put_if_absent" if part == "_mem_wal_ops/expired" else "delete_many"
    run(made, beside(verb, part, others))
    assert read_base(made.uri, version=old) == rows
    expire.apply(table_of(made), ALL)
    assert read_base(made.uri, version=old) == rows


def test_another_table_at_the_uri(made: LsmTable, tmp_path: Path) -> None:
    """A backup is restored, in which names that were free to go are needed again."""
    backup = damage.copy_table(made.uri, str(tmp_path / "backup.lance"))
    newest = versions(made)[-1]

    def restore() -> None:
        shutil.rmtree(made.uri)
        shutil.copytree(backup, made.uri)
        at = time.time() + 5
        os.utime(Path(made.uri, version_path(newest, table_of(made).naming)), (at, at))

    before = set(contents(made.uri))
    with pytest.raises(TableReplacedError):
        run(made, beside("put_if_absent", "_mem_wal_ops/expired", restore))
    assert {path for path in contents(made.uri) if not path.startswith("_mem_wal_ops/")} == {
        path for path in before if not path.startswith("_mem_wal_ops/")
    }


# -- suspended


class Asleep:
    """The machine's clock, and what happens while the machine sleeps for a day."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept = 0.0
        real = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + self.slept)

    def sleep(self, made: LsmTable) -> None:
        self.slept += 25 * 3600
        age(made, f"{EXPIRIES_FOLDER}/*", 25 * 3600)


@pytest.mark.parametrize("part", ["_mem_wal_ops/expired", "_versions/"], ids=["before the proof ends", "in a batch"])
def test_a_hold_that_is_taken_while_it_sleeps(made: LsmTable, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The announcement expires; a hold can be placed then."""
    asleep = Asleep(monkeypatch)
    old, *_ = versions(made)
    rows = read_base(made.uri, version=old)

    def sleep() -> None:
        asleep.sleep(made)
        take_hold(table_of(made), old, HOUR)

    verb = "put_if_absent" if part == "_mem_wal_ops/expired" else "delete_many"
    report = run(made, beside(verb, part, sleep))
    assert old not in report.versions
    assert report.put_back == ((old,) if part == "_versions/" else ())
    assert because(report)[old].startswith("hold")
    assert read_base(made.uri, version=old) == rows


@pytest.mark.req("S0-189")
def test_a_hold_that_is_about_to_be_refused_puts_nothing_back(made: LsmTable) -> None:
    """gc may have drained what a version lacks whose manifest is deleted: it must not be listed again."""
    old, *_ = versions(made)
    refused: list[Hold] = []

    def write_hold() -> None:
        """As :func:`take_hold`, which has checked that the version exists, and reads the announcements next."""
        assert old not in versions(made)
        refused.append(holds._add(table_of(made).store, HOLDS_FOLDER, (old,), HOUR, ""))

    report = run(made, beside("delete_many", EXPIRIES_FOLDER, write_hold))
    assert refused
    assert (report.put_back, old in report.versions) == ((), True)
    assert old not in readable(made)
    with pytest.raises(VersionGoneError):
        take_hold(table_of(made), old, HOUR)
    assert no_copies(made)


def test_a_restore_at_the_last_moment(made: LsmTable) -> None:
    """The newest version refers again to files that only old ones did when everything was asked."""
    first, *_ = versions(made)
    rows = read_base(made.uri, version=first)
    report = run(made, beside("delete_many", "_versions/", open_dataset(made.uri, version=first).restore))
    assert first in report.versions
    assert read_base(made.uri) == rows


# -- links, and what is not Lance's


def foreign(path: Path) -> dict[str, bytes]:
    """Files elsewhere that look like Lance's own, and are old."""
    path.mkdir()
    at = time.time() - 30 * DAY
    for name in ("a.lance", "b.blob", "c.arrow", "d.txn", "index.idx"):
        (path / name).write_bytes(b"somebody's")
        os.utime(path / name, (at, at))
    return {one.name: one.read_bytes() for one in path.iterdir()}


@pytest.mark.parametrize("where", ["data/sub", "_indices/sub", "_indices/0f9d0ba6-4e8b-4f5f-9c3b-0a7f5d8d2c11"])
def test_nothing_behind_a_link_is_deleted(made: LsmTable, tmp_path: Path, where: str) -> None:
    elsewhere = foreign(tmp_path / "elsewhere")
    link = Path(made.uri, where)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    report = expire.apply(table_of(made), ALL)
    assert report.decision == "expired"
    assert foreign_files(tmp_path / "elsewhere") == elsewhere
    assert link.is_symlink()
    sound(made)


@pytest.mark.parametrize("where", ["data/sub", "data/stem", "_indices/0f9d0ba6-4e8b-4f5f-9c3b-0a7f5d8d2c11"])
def test_nothing_behind_a_link_inside_the_table_is_deleted(made: LsmTable, where: str) -> None:
    """It leads to the log; what is old there is needed all the same."""
    log = next(Path(made.uri, "_mem_wal").glob("*/wal"))
    (log / "x.blob").write_bytes(b"somebody's")
    age(made, "_mem_wal/**/*", 30 * DAY)
    before = {path for path in contents(made.uri) if path.startswith("_mem_wal/")}
    link = Path(made.uri, where)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(log)
    assert expire.apply(table_of(made), ALL).decision == "expired"
    assert {path for path in contents(made.uri) if path.startswith("_mem_wal/")} == before
    assert link.is_symlink()
    link.unlink()
    sound(made)


@pytest.mark.parametrize("folder", ["data", "_versions", "_transactions"])
def test_a_base_folder_behind_a_link_is_refused(made: LsmTable, tmp_path: Path, folder: str) -> None:
    """Its listing is empty: what is there cannot be told from what is missing."""
    table = table_of(made)
    moved = tmp_path / "moved"
    Path(made.uri, folder).rename(moved)
    Path(made.uri, folder).symlink_to(moved)
    before = {path.name for path in moved.iterdir()}
    for act in (expire.plan, expire.apply):
        with pytest.raises(LinkError, match=f"'{folder}' is a symbolic link"):
            act(table, ALL)
    assert {path.name for path in moved.iterdir()} == before


def foreign_files(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def test_what_no_version_refers_to_is_deleted_after_a_week(made: LsmTable) -> None:
    """What killed commits left, and nothing that Lance does not write."""
    uuid = "0f9d0ba6-4e8b-4f5f-9c3b-0a7f5d8d2c11"
    lances = [
        "data/0.lance",
        "data/0/1.blob",
        f"_indices/{uuid}/a/b.idx",
        "_deletions/1-2-3.bin",
        "_transactions/1-x.txn",
    ]
    lances += ["data/.tmpAbc", "_versions/.tmpAbc"]
    others = ["data/readme.txt", "data/sub/x.lance", "_indices/readme", "_indices/sub/x", "_deletions/x", "_versions/x"]
    others += ["data/sub/deeper/x.blob", "_fri/1/x.lance", "notes/x.lance"]
    for path in (*lances, *others):
        write(made, path)
    assert expire.apply(table_of(made), WEEK).decision == "nothing_to_expire"
    for path in (*lances, *others):
        age(made, path, 7 * DAY + 60)
    plan = expire.plan(table_of(made), WEEK)
    assert (plan.decision, plan.objects, plan.bytes, plan.versions) == ("planned", len(lances), len(lances), ())
    done = expire.apply(table_of(made), WEEK)
    assert (done.decision, done.objects, done.bytes) == ("expired", len(lances), len(lances))
    standing = contents(made.uri)
    assert not [path for path in lances if path in standing]
    assert not [path for path in others if path not in standing]
    sound(made)


# -- who else reads the table's files


def test_files_that_a_branch_reads_stay(made: LsmTable) -> None:
    """Also where the version that it left is not protected any more: the branch between them is gone."""
    dataset = open_dataset(made.uri)
    old = versions(made)[1]
    dataset.create_branch("one", old)
    dataset.checkout_version(("one", None)).create_branch("two", ("one", None))
    rows = dataset.checkout_version(("two", None)).to_table()
    shutil.rmtree(Path(made.uri, "tree/one"))
    Path(made.uri, "_refs/branches/one.json").unlink()
    report = expire.apply(table_of(made), ALL)
    assert old in report.versions
    assert (report.branches, report.for_branches > 0) == (1, True)
    assert lance.dataset(made.uri).checkout_version(("two", None)).to_table() == rows
    assert not no_copies(made)
    assert expire.apply(table_of(made), ALL).decision == "nothing_to_expire"
    assert expire.plan(table_of(made), ALL).decision == "nothing_to_expire"
    # They are younger than a week. That a version had them tells that no commit is about to.
    before = data_files(made)
    shutil.rmtree(Path(made.uri, "tree"))
    Path(made.uri, "_refs/branches/two.json").unlink()
    assert expire.plan(table_of(made), ALL).decision == "planned"
    assert expire.apply(table_of(made), ALL).objects == report.for_branches
    assert data_files(made) < before
    assert no_copies(made)
    sound(made)


def test_the_plan_warns_of_shallow_clones(made: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """pylance leaves no trace of them in the table: a tag does."""
    dataset = open_dataset(made.uri)
    old = versions(made)[1]
    dataset.tags.create("cloned", old)
    clone = str(tmp_path / "clone.lance")
    rows = dataset.checkout_version(old).shallow_clone(clone, old).to_table()
    assert "Shallow clones elsewhere" in run_here(capfd, "expire", made.uri, "--older-than=0", "--allow-unsafe").out
    assert (
        "Shallow clones elsewhere"
        in run_here(capfd, "expire", made.uri, "--older-than=0", "--allow-unsafe", "--apply").out
    )
    assert lance.dataset(clone).to_table() == rows
    dataset.tags.delete("cloned")
    expire.apply(table_of(made), ALL)
    with pytest.raises((OSError, ValueError), match=r"(?i)not found"):
        lance.dataset(clone).to_table()


def test_a_clone_deletes_nothing_of_its_source(made: LsmTable, tmp_path: Path) -> None:
    source = set(contents(made.uri))
    clone = str(tmp_path / "clone.lance")
    open_dataset(made.uri).shallow_clone(clone, versions(made)[-1])
    dataset = lance.dataset(clone)
    for _ in range(2):
        dataset.delete("true")
    report = expire.apply(open_table(clone), ALL)
    assert len(report.versions) > 0
    assert set(contents(made.uri)) == source
    sound(made)


def test_v1_names(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    key = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    rows = pa.table({"id": range(10)}, pa.schema([key]))
    lance.write_dataset(rows, uri, enable_v2_manifest_paths=False).initialize_mem_wal()
    lance.write_dataset(rows, uri, mode="overwrite", enable_v2_manifest_paths=False).initialize_mem_wal()
    newest = open_table(uri).version
    assert Path(uri, f"_versions/{newest}.manifest").exists()
    assert expire.apply(open_table(uri), ALL).versions == tuple(range(1, newest))
    assert [one["version"] for one in lance.dataset(uri).versions()] == [newest]
    assert len([*Path(uri, "data").iterdir()]) == 1
    assert lance.dataset(uri).count_rows() == 10
