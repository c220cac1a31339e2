"""gc on a table that is removed and created again, or restored, during the run: the new one loses nothing."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.errors import MemwalOpsError, TableReplacedError
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.retention.identity import region_anchor, table_anchor
from tests.support.calm import calm
from tests.support.gc_options import IMMEDIATE
from tests.support.overtaken import Replaced
from tests.support.run_cli import contents
from tests.support.stores import LikeRemote
from tests.support.tables.gc_tables import ZERO, collect, free, grow, make, make_anew, merged, sound, table_of
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from uuid import UUID

    from tests.support.tables.lsm_table import LsmTable

BARE = replace(IMMEDIATE, fence_retention=ZERO)


def made_of(path: Path, kind: type[LsmTable], generations: int) -> LsmTable:
    """A table of its own: one that is copied could be taken for the other."""
    table = make_anew(str(path / "t.lance"), kind, generations, 1)
    table.close()
    return table


def files(uri: str) -> dict[str, tuple[int, bytes]]:
    """All but the notes of jobs and the hints."""
    return {
        path: one for path, one in contents(uri).items() if "_mem_wal_ops" not in path and not path.endswith(".json")
    }


def collectable(uri: str, copy: str, options: gc.GcOptions) -> set[str]:
    """What gc deletes of a table that it is asked to collect."""
    shutil.copytree(uri, copy)
    gc.apply(open_table(copy), options)
    return set(files(uri)) - set(files(copy))


def lost(uri: str, other: str) -> set[str]:
    """Files of the other table that are gone, or changed, in the place where it was put."""
    now = files(uri)
    return {path for path, one in files(other).items() if now.get(path) != one}


def check_hints(made: LsmTable) -> None:
    """No hint leads beyond the region's manifests."""
    table = open_table(made.uri)
    for region in table.regions.region_ids:
        table.region(region).latest(checked=True)


def regions_of(made: LsmTable) -> str:
    return f"{made.uri}/_mem_wal"


def put_in_its_place(uri: str, other: str) -> None:
    shutil.rmtree(uri)
    shutil.copytree(other, uri)


@pytest.mark.long
def test_a_restored_backup_keeps_its_list_of_generations(tmp_path: Path) -> None:
    """At any moment of a drain: nothing of the backup is merged, and it has the manifest that the drain read."""
    made = made_of(tmp_path, Workload, 3)
    backup, start = str(tmp_path / "backup"), str(tmp_path / "start")
    shutil.copytree(made.uri, backup)
    free(made)
    shutil.copytree(made.uri, start)
    at = 0
    while True:
        at += 1
        put_in_its_place(made.uri, start)
        table = open_table(made.uri)
        store = Replaced(table.store, at, lambda: put_in_its_place(made.uri, backup))
        with suppress(MemwalOpsError), calm():  # it was half there while it was read
            gc.apply(replace(table, store=store), BARE)
        if not store.happened:
            break
        newest = table_of(made).region(table.regions.region_ids[0]).latest(checked=True)
        assert [one.generation for one in newest.flushed_generations] == [1, 2, 3], f"restored before call {at}"
    assert at > 20


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("later", ["made anew", "restored"])
def test_a_table_that_takes_the_place_loses_no_file(tmp_path: Path, kind: type[LsmTable], later: str) -> None:
    """At any moment: the same steps make the same region ids, and here also the same generation and file numbers."""
    old = made_of(tmp_path / "old", kind, 6)
    other = made_of(tmp_path / "other", kind, 3)
    assert old.regions == other.regions
    if later == "restored":
        shutil.rmtree(other.uri)
        shutil.copytree(old.uri, other.uri)  # nothing is merged in it
    free(old)
    collect(old, replace(IMMEDIATE, max_deletes=1))  # drained
    start = str(tmp_path / "start")
    shutil.copytree(old.uri, start)
    its_own = collectable(other.uri, str(tmp_path / "collected"), BARE)
    # Not each moment in each case: together they come by all.
    reported, at = 0, 1 + 2 * LAYOUTS.index(kind) + (later == "restored")
    while True:
        put_in_its_place(old.uri, start)
        table = open_table(old.uri)
        store = Replaced(table.store, at, lambda: put_in_its_place(old.uri, other.uri))
        try:
            with calm():
                report = gc.apply(replace(table, store=store), BARE)
        except MemwalOpsError:
            report = None  # the table was half there while it was read
        if not store.happened:
            break
        assert lost(old.uri, other.uri) <= its_own, f"replaced before call {at}"
        check_hints(old)
        if report is not None and report.replaced is not None:
            reported += 1
            assert (report.decision, report.exit_code) == ("incomplete", 28)
        at += 4
    assert at > 60
    assert reported > 3


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("remote", [False, True])
def test_a_region_that_is_opened_again_loses_no_file(tmp_path: Path, kind: type[LsmTable], remote: bool) -> None:
    """Only the region's folder is removed and created again; the base table stays."""
    old = made_of(tmp_path / "old", kind, 6)
    other = made_of(tmp_path / "other", kind, 3)
    free(old)
    collect(old, replace(IMMEDIATE, max_deletes=1))
    start = str(tmp_path / "start")
    shutil.copytree(old.uri, start)
    at, kept = 1 + LAYOUTS.index(kind), 0
    while True:
        put_in_its_place(old.uri, start)
        table = open_table(old.uri)
        files = LikeRemote(table.store) if remote else table.store
        store = Replaced(files, at, lambda: put_in_its_place(regions_of(old), regions_of(other)))
        try:
            with calm():
                report = gc.apply(replace(table, store=store), BARE)
        except MemwalOpsError:
            report = None
        if not store.happened:
            break
        assert not {path for path in lost(old.uri, other.uri) if "_mem_wal/" in path}, f"replaced before call {at}"
        check_hints(old)
        if report is not None:
            assert report.replaced is None
            kept += any("the table was recreated or restored" in item.why for item in report.items[Verdict.HELD])
        at += 4
    assert at > 60
    assert kept > 2


@pytest.mark.long
def test_new_versions_are_no_reason_to_stop(tmp_path: Path) -> None:
    """Mergers and writers go on; versions behind the newest are expired meanwhile."""
    made = free(make(tmp_path, Workload, generations=4, regions=2))
    collect(made, replace(IMMEDIATE, max_deletes=1))
    table = table_of(made)
    at, ends = 1, set()
    while at < 40:
        store = Replaced(table.store, at, lambda: (grow(made), merged(made)))
        report = gc.apply(replace(table_of(made), store=store), IMMEDIATE)
        assert report.replaced is None
        ends.add(report.decision)
        at += 7
    assert "deleted" in ends
    sound(made)


def test_a_table_that_was_opened_long_before_is_collected(tmp_path: Path) -> None:
    made = make(tmp_path, Workload)
    early = table_of(made)
    free(made)
    assert early.version not in {one["version"] for one in lance.dataset(made.uri).versions()}
    report = gc.apply(early, IMMEDIATE)
    assert (report.decision, report.replaced) == ("deleted", None)
    sound(made)


def test_a_version_that_is_expired_concurrently_stops_it(tmp_path: Path) -> None:
    """Whether the table was expired or replaced cannot be told; it is reported, and the next run goes on."""
    made = free(make(tmp_path, Workload))

    def expire_it() -> None:
        grow(made)
        merged(made)
        expire.apply(table_of(made), expire.ExpireOptions(ZERO, allow_unsafe=True))

    for at in range(10, 40, 3):
        table = table_of(made)
        report = gc.apply(replace(table, store=Replaced(table.store, at, expire_it)), IMMEDIATE)
        if report.replaced is not None:
            break
    assert report.replaced is not None
    assert f"Version {table.version} of {made.uri} does not exist any more" in report.replaced
    assert report.exit_code == TableReplacedError.exit_code
    free(made)
    assert collect(made).replaced is None
    sound(made)


def test_anchors(tmp_path: Path) -> None:
    made = make(tmp_path, Workload, regions=1)
    table = table_of(made)
    region: UUID = table.regions.region_ids[0]
    manifest = table.region(region).latest()
    anchors = (table_anchor(table), region_anchor(table, manifest))
    grow(made)
    merged(made)
    for anchor in anchors:
        anchor.check(table.store)
    copy = str(tmp_path / "copy")
    shutil.copytree(made.uri, copy)
    put_in_its_place(made.uri, copy)
    for anchor in anchors:  # the same bytes, as a backup has them
        with pytest.raises(TableReplacedError, match="is not the same object"):
            anchor.check(table.store)
    shutil.rmtree(made.uri)
    for anchor in anchors:
        with pytest.raises(TableReplacedError, match="does not exist any more"):
            anchor.check(table.store)
    with pytest.raises(TableReplacedError):
        table_anchor(table)
    with pytest.raises(TableReplacedError):
        region_anchor(table, manifest)
    made_of(tmp_path, Workload, 3)
    with pytest.raises(TableReplacedError, match="has changed since it was read"):
        table_anchor(table)
    assert open_table(made.uri).version == table.version
