"""Foreign names and symbolic links in a table's folder: reported, kept, and no reason to stop for all regions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.errors import GenerationMissingError
from memwal_ops.formats.lance.jobs import expire, merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.inspect import job as inspect
from memwal_ops.storage.api import LinkError
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import contents, run_here
from tests.support.tables import damage
from tests.support.tables.gc_tables import ZERO, free, make
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

PLACES = ["_mem_wal", "_mem_wal/REGION", "_mem_wal/REGION/manifest", "_mem_wal/REGION/wal", "_versions"]


def put_odd(folder: bytes) -> set[bytes]:
    """A file and a folder that no job can have made; the paths of their files."""
    os.makedirs(folder + b"/no\xffutf8")
    found = {folder + b"/line\nbreak", folder + b"/no\xffutf8/inner"}
    for path in found:
        with open(path, "wb") as file:
            file.write(b"precious")
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("place", PLACES)
def test_an_odd_name_stops_no_region(tmp_path: Path, place: str, kind: type[LsmTable]) -> None:
    """Every job goes on; what is below _mem_wal is reported, and all of it is kept."""
    table = make(tmp_path, kind)
    odd = put_odd(os.fsencode(f"{table.uri}/{place.replace('REGION', table.regions[0])}"))
    assert not inspect.inspect(open_table(table.uri)).backlog.blocked
    assert merge.apply(open_table(table.uri), merge.MergeOptions()).decision == "merged"
    assert catchup.apply(open_table(table.uri), catchup.CatchupOptions()).decision == "caught_up"
    seen = snapshot.apply(open_table(table.uri), snapshot.SnapshotOptions())
    assert not [one for one in seen.skipped if one.is_fault]
    compact.apply(open_table(table.uri), compact.CompactOptions())
    assert expire.apply(open_table(table.uri), expire.ExpireOptions(ZERO, allow_unsafe=True)).decision == "expired"
    report = gc.apply(open_table(table.uri), IMMEDIATE)
    assert not report.faults
    assert not report.failed
    assert report.deleted_objects
    assert all(os.path.exists(path) for path in odd)
    if place != "_versions":
        told = {os.fsencode(item.path) for item in report.items[Verdict.UNKNOWN]}
        below = {os.path.relpath(path, os.fsencode(table.uri)) for path in odd}
        assert all(path in told or os.path.dirname(path) in told for path in below)
    assert_same(read_base(table.uri), table.model.expected())


def test_an_odd_name_in_a_deleted_generation(tmp_path: Path) -> None:
    """All else of the generation goes; what cannot be deleted by its name is reported, and not again by others."""
    table = make(tmp_path)
    generation = damage.generation_path(table.uri, table.regions[0], 1)
    odd = put_odd(os.fsencode(generation))
    report = gc.apply(open_table(free(table).uri), IMMEDIATE)
    assert {os.fsencode(f"{table.uri}/{path}") for path in report.failed} == odd
    assert all(os.path.exists(path) for path in odd)
    left = {os.fsencode(path) for path in Path(table.uri).glob("_mem_wal/*/*_gen_*/**/*") if path.is_file()}
    assert left == odd
    assert_same(read_base(table.uri), table.model.expected())


# -- links


def moved_and_linked(path: Path, outside: Path) -> None:
    """What an operator does whose disk is full."""
    shutil.move(path, outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_region_behind_a_link_is_blocked_by_name(tmp_path: Path, kind: type[LsmTable]) -> None:
    """pylance follows the link, so its rows count; unseen, they would wait for ever in silence."""
    table = make(tmp_path, kind)
    linked, other = table.regions
    region = Path(table.uri, "_mem_wal", linked)
    moved_and_linked(region, tmp_path / "elsewhere")
    before = contents(str(tmp_path / "elsewhere"))

    (fault,) = [one.fault for one in inspect.inspect(open_table(table.uri)).regions if one.fault is not None]
    assert fault.region_id == UUID(linked)
    report = merge.apply(open_table(table.uri), merge.MergeOptions())
    assert report.decision == "blocked"
    assert [one.region_id for one in report.blocked] == [UUID(linked)]
    assert isinstance(report.blocked[0].error, LinkError)
    assert "is a symbolic link to" in str(report.blocked[0].error)
    assert UUID(other) in open_table(table.uri).index.merged_generations
    seen = snapshot.apply(open_table(table.uri), snapshot.SnapshotOptions())
    assert any(linked in one.path and one.is_fault for one in seen.skipped)
    collected = gc.apply(open_table(table.uri), IMMEDIATE)
    assert list(collected.faults) == [UUID(linked)]
    assert contents(str(tmp_path / "elsewhere")) == before

    # What the remedy says.
    region.unlink()
    shutil.move(tmp_path / "elsewhere", region)
    assert merge.apply(open_table(table.uri), merge.MergeOptions()).decision == "merged"
    assert_same(read_base(table.uri), table.model.expected())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loop", [False, True], ids=["elsewhere", "loop"])
@pytest.mark.parametrize("command", ["inspect", "merge", "gc", "snapshot", "maintain"])
def test_mem_wal_behind_a_link_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, loop: bool
) -> None:
    table = make(tmp_path)
    folder = Path(table.uri, "_mem_wal")
    moved_and_linked(folder, tmp_path / "elsewhere")
    if loop:
        folder.unlink()
        folder.symlink_to("_mem_wal")
    before = contents(str(tmp_path / "elsewhere"))
    done = run_here(capfd, command, table.uri)
    assert done.code == 20
    said = " ".join((done.out + done.err).split())
    assert "'_mem_wal' is a symbolic link to" in said
    assert ("leads to itself" if loop else str(tmp_path / "elsewhere")) in said
    assert contents(str(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ["manifest", "wal"])
def test_a_part_of_a_region_behind_a_link(tmp_path: Path, name: str, kind: type[LsmTable]) -> None:
    """No other region is held up, and nothing behind the link is touched."""
    table = make(tmp_path, kind)
    region = Path(table.uri, "_mem_wal", table.regions[0])
    if not (region / name).exists():
        pytest.skip("the layout has no such folder before anything is written to it")
    moved_and_linked(region / name, tmp_path / "elsewhere")
    before = contents(str(tmp_path / "elsewhere"))
    states = {one.region_id: one for one in inspect.inspect(open_table(table.uri)).regions}
    fault = states[UUID(table.regions[0])].fault
    assert fault is not None
    assert "is a symbolic link to" in str(fault.error)
    assert states[UUID(table.regions[1])].fault is None
    merge.apply(open_table(table.uri), merge.MergeOptions())
    assert UUID(table.regions[1]) in open_table(table.uri).index.merged_generations
    gc.apply(open_table(table.uri), IMMEDIATE)
    assert contents(str(tmp_path / "elsewhere")) == before
    assert_same(read_spec(table.uri), table.model.expected())


def test_a_generation_behind_a_link(tmp_path: Path) -> None:
    """It is said to be missing for the reason that it is, and the generations of other regions are merged."""
    table = make(tmp_path)
    generation = damage.generation_path(table.uri, table.regions[0], 2)
    moved_and_linked(generation, tmp_path / "elsewhere")
    (fault,) = [one.fault for one in inspect.inspect(open_table(table.uri)).regions if one.fault is not None]
    assert isinstance(fault.error, GenerationMissingError)
    assert "is a symbolic link" in str(fault.error)
    report = merge.apply(open_table(table.uri), merge.MergeOptions())
    assert report.decision == "blocked"
    assert [(str(one.region_id), one.generation) for one in report.blocked] == [(table.regions[0], 2)]
    assert "is a symbolic link" in str(report.blocked[0].error)
    merged = open_table(table.uri).index.merged_generations
    assert [merged[UUID(region)] for region in table.regions] == [1, 3]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_generation_is_not_deleted_under_another_name(tmp_path: Path, kind: type[LsmTable]) -> None:
    """A link beside a generation looked like an orphan, and its collection deleted what the generation holds."""
    table = make(tmp_path, kind)
    generation = damage.generation_path(table.uri, table.regions[0], 1)
    alias = generation.with_name("ffffffff_gen_1")
    alias.symlink_to(generation.name)
    before = contents(str(generation))
    report = gc.apply(open_table(table.uri), IMMEDIATE)
    assert contents(str(generation)) == before
    assert any(item.path.endswith(alias.name) for item in report.items[Verdict.UNKNOWN])
    assert merge.apply(open_table(table.uri), merge.MergeOptions()).decision == "merged"
    assert_same(read_base(table.uri), table.model.expected())
