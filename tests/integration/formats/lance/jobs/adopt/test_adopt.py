"""A person's answer about a region whose id was used before: no row is lost by it, whatever it is interrupted by."""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.errors import GenerationMissingError, InvalidUsageError
from memwal_ops.formats.lance.generations.wal import unflushed_entries
from memwal_ops.formats.lance.jobs import adopt, expire, merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.log import region_seal
from memwal_ops.formats.lance.options import AdoptOptions
from tests.integration.contracts import small
from tests.integration.formats.lance.generations.test_region_identity import (
    REGION,
    flush_new,
    folder,
    merged_by,
    used_again,
)
from tests.support.dying_store import DyingStore, Killed
from tests.support.gc_options import IMMEDIATE
from tests.support.json_types import assert_json
from tests.support.run_cli import run_here
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base
from tests.support.tables.region_layout import RegionLayout

UNMERGED = AdoptOptions(answer="unmerged")
MERGED = AdoptOptions(answer="merged")


def in_question(tmp_path: Path, how: str, generations: int = 5) -> str:
    uri = small.make(tmp_path)
    merged_by(uri, "ours")
    uri = used_again(uri, how)
    for number in range(generations):
        flush_new(uri, number)
    return uri


def ids(uri: str) -> set[int]:
    return {row["id"] for row in lance.dataset(uri).to_table().to_pylist()}


def finish(uri: str) -> None:
    """All jobs, twice, with everything that may go: a row that was in no base would be lost by now."""
    for _ in range(2):
        assert merge.apply(open_table(uri), merge.MergeOptions()).exit_code == 0
        assert catchup.apply(open_table(uri), catchup.CatchupOptions()).exit_code == 0
        assert snapshot.apply(open_table(uri), snapshot.SnapshotOptions()).exit_code == 0
        if "/tree/" not in uri:
            expire.apply(open_table(uri), expire.ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True))
        assert gc.apply(open_table(uri), IMMEDIATE).exit_code == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["branch", "clone", "removed"])
@pytest.mark.parametrize("generations", [1, 2, 3, 4, 6])
def test_unmerged_generations_get_a_region_of_their_own(tmp_path: Path, how: str, generations: int) -> None:
    uri = in_question(tmp_path, how, generations)
    planned = adopt.plan(open_table(uri), UNMERGED)
    assert (planned.decision, adopt.plan(open_table(uri), UNMERGED).regions) == ("planned", planned.regions)
    done = adopt.apply(open_table(uri), UNMERGED)
    for report in (planned, done):
        assert_json(report.to_json())
    assert (done.decision, done.regions) == ("adopted", planned.regions)
    assert adopt.apply(open_table(uri), UNMERGED).decision == "nothing_to_adopt"
    finish(uri)
    assert ids(uri) == {*range(100), *range(500, 500 + generations)}
    assert lance.dataset(uri).count_rows() == 100 + generations


@pytest.mark.long
def test_what_a_live_writer_wrote_comes_along(tmp_path: Path) -> None:
    """It is told at its next put that it was fenced; no writer can claim the old id again, and all can the new one."""
    uri = in_question(tmp_path, "removed")
    live = small.writer(uri)
    live.put(small.rows(700, 710, 3.0))
    (done,) = adopt.apply(open_table(uri), UNMERGED).regions
    with pytest.raises(OSError, match="fenced"):
        live.put(small.rows(710, 720, 3.0))
    with pytest.raises(Exception, match="sealed"):
        small.writer(uri)
    small.flush(uri, small.rows(720, 721, 4.0), region=str(done.new_id))
    finish(uri)
    assert ids(uri) == {*range(100), *range(500, 505), *range(700, 710), 720}


@pytest.mark.long
def test_killed_after_any_write_and_repeated(tmp_path: Path) -> None:
    made = in_question(tmp_path, "removed", 2)
    small.flush(made, small.rows(502, 503, 9.0))
    whole = f"{tmp_path}/whole.lance"
    shutil.copytree(made, whole)
    counting = DyingStore(open_table(whole).store, 1 << 30, after=False)
    adopt.apply(replace(open_table(whole), store=counting), UNMERGED)
    writes = [at for at, name in enumerate(counting.calls, 1) if name.startswith("put")]
    assert len(writes) > 20
    for at in writes:
        uri = f"{tmp_path}/{at}.lance"
        shutil.copytree(made, uri)
        with suppress(Killed):
            adopt.apply(replace(open_table(uri), store=DyingStore(open_table(uri).store, at, after=True)), UNMERGED)
        merge.apply(open_table(uri), merge.MergeOptions())
        gc.apply(open_table(uri), IMMEDIATE)
        adopt.apply(open_table(uri), UNMERGED)
        finish(uri)
        assert ids(uri) == {*range(100), 500, 501, 502}, at


def test_two_at_once(tmp_path: Path) -> None:
    uri = in_question(tmp_path, "removed")
    failed: list[BaseException] = []

    def act() -> None:
        try:
            adopt.apply(open_table(uri), UNMERGED)
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    adopt.apply(open_table(uri), UNMERGED)
    assert len(wire.regions(Files(uri))) == 2
    finish(uri)
    assert ids(uri) == {*range(100), *range(500, 505)}


@pytest.mark.long
def test_a_second_one_after_the_first_was_merged_and_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the old region was emptied: what is repeated brings nothing back."""
    uri = in_question(tmp_path, "removed")
    with monkeypatch.context() as patch:
        patch.setattr(region_seal, "_empty", lambda *_: None)
        (done,) = adopt.apply(open_table(uri), UNMERGED).regions
    for number in range(4):
        small.flush(uri, small.rows(500, 501, 20.0 + number), region=str(done.new_id))
        merge.apply(open_table(uri), merge.MergeOptions())
        catchup.apply(open_table(uri), catchup.CatchupOptions())
        expire.apply(open_table(uri), expire.ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True))
        gc.apply(open_table(uri), IMMEDIATE)
    adopt.apply(open_table(uri), UNMERGED)
    finish(uri)
    assert [row["val"] for row in read_base(uri).values() if row["id"] == 500] == [23.0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["removed", "clone"])
def test_the_region_layout(tmp_path: Path, how: str) -> None:
    """Its generations have their rows in the log, which comes along; what was not flushed yet is flushed before."""
    made = RegionLayout(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    made.put([0, 1])
    made.flush()
    made.put([1, 2])
    made.flush()
    merge.apply(open_table(made.uri), merge.MergeOptions())
    region = made.regions[0]
    wanted = made.expected()
    other = RegionLayout(2, regions=1, base_rows=10)
    other.regions, other._states = made.regions, {region: type(made._states[region])()}
    other.schema, other._columns = made.schema, made._columns
    other.uri, other.model.base = used_again_in(made.uri, region, how), wanted
    other._publish(region)
    for number in (3, 4, 5):
        other.put([number])
        other.flush()
    other.put([6])  # in the log alone
    (done,) = adopt.apply(open_table(other.uri), UNMERGED).regions
    assert merge.apply(open_table(other.uri), merge.MergeOptions()).decision == "merged"
    catchup.apply(open_table(other.uri), catchup.CatchupOptions())
    gc.apply(open_table(other.uri), IMMEDIATE)
    assert read_base(other.uri) == other.expected({region: 4})
    moved = open_table(other.uri).region(uuid.UUID(str(done.new_id))).latest()
    assert unflushed_entries(open_table(other.uri), moved) == 0


def used_again_in(uri: str, region: str, how: str) -> str:
    if how == "clone":
        return used_again(uri, how)
    shutil.rmtree(Path(uri, "_mem_wal", region))
    return uri


def test_merges_continue_after_the_progress(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    merged_by(uri, "pylance")
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "blocked"
    assert adopt.apply(open_table(uri), MERGED).decision == "adopted"
    assert adopt.apply(open_table(uri), MERGED).decision == "nothing_to_adopt"
    small.flush(uri, small.rows(700, 701, 3.0))
    finish(uri)
    assert ids(uri) == {*range(100), 700}


def test_merged_is_refused_where_later_rows_would_be_lost(tmp_path: Path) -> None:
    uri = in_question(tmp_path, "removed", 2)
    with pytest.raises(InvalidUsageError, match="would count as merged"):
        adopt.apply(open_table(uri), MERGED)


def test_refused_where_a_generation_is_lost(tmp_path: Path) -> None:
    uri = in_question(tmp_path, "removed")
    shutil.rmtree(next(folder(uri).glob("*_gen_2")))
    with pytest.raises(GenerationMissingError):
        adopt.plan(open_table(uri), UNMERGED)


def test_regions_of_an_overwritten_table_may_come_into_it(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    small.flush(uri, small.rows(3, 4, 1.0))
    lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "blocked"
    with pytest.raises(InvalidUsageError, match="no progress"):
        adopt.plan(open_table(uri), MERGED)
    (done,) = adopt.apply(open_table(uri), UNMERGED).regions
    assert (done.region_id, done.new_id) == (REGION, None)
    finish(uri)
    assert ids(uri) == {3, 900, 901, 902}
    lance.write_dataset(small.rows(950, 951), uri, mode="overwrite")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "blocked"


def test_what_was_decided_holds_for_every_pass(tmp_path: Path) -> None:
    """The first pass replaces the record of the region; the second one still has to know its columns."""
    uri = small.make(tmp_path)
    for number in range(3):
        small.flush(uri, small.rows(3 + number, 4 + number, 1.0))
    lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    adopt.apply(open_table(uri), UNMERGED)
    report = merge.apply(open_table(uri), merge.MergeOptions(max_generations=1))
    assert (report.decision, len(report.passes)) == ("merged", 3)
    assert ids(uri) == {3, 4, 5, 900, 901, 902}


def test_an_answer_is_about_the_table_of_then(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    small.flush(uri, small.rows(3, 4, 1.0))
    for blocked in (1, 2):
        lance.write_dataset(small.rows(900, 903), uri, mode="overwrite")
        lance.dataset(uri).initialize_mem_wal(unsharded=True)
        assert len(merge.plan(open_table(uri), merge.MergeOptions()).blocked) == 1, blocked
        adopt.apply(open_table(uri), UNMERGED)
        assert merge.plan(open_table(uri), merge.MergeOptions()).blocked == ()


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = in_question(tmp_path, "removed")
    dry = run_here(capfd, "adopt", uri, "--as", "unmerged")
    assert dry.out.startswith("planned: 1 region as unmerged.\n")
    assert "would be moved to region" in dry.out.replace("\n  ", " ")
    document = run_here(capfd, "adopt", uri, "--region", small.REGION[:8], "--as", "unmerged", "--json").document
    assert document["decision"] == "planned"
    assert set(document["regions"][0]) == {
        "region_id", "new_region_id", "generations", "rows", "merged_generation", "unflushed_wal_entries"
    }  # fmt: skip
    assert run_here(capfd, "adopt", uri, "--as", "unmerged", "--apply").out.startswith("adopted: 1 region")
    assert (
        run_here(capfd, "adopt", uri, "--as", "unmerged").out
        == "nothing_to_adopt: no region with a reused id is blocked.\n"
    )
    assert run_here(capfd, "adopt", uri).code == 2
