"""compact, expire, gc and maintain on plain tables: what is kept, what is freed, and who else may be at work."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import TableReplacedError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.options import ExpireOptions, MaintainOptions
from tests.support.dying_store import DyingStore, Killed
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table

NOW = ExpireOptions(older_than=timedelta(0), keep=1, allow_unsafe=True)
ALL = MaintainOptions(apply=True, expire=NOW)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> PlainTable:
    uri = str(tmp_path_factory.mktemp("template") / "t.lance")
    table = PlainTable(uri).create(fragments=12, rows=40).create_indexes()
    table.delete(*range(0, 480, 5))
    table.upsert(7, 480)
    return table


@pytest.fixture
def made(template: PlainTable, tmp_path: Path) -> PlainTable:
    """12 small fragments under all indexes, a fifth of whose rows is deleted, and 24 versions or so."""
    return template.copy(str(tmp_path / "t.lance"))


def healthy(made: PlainTable) -> None:
    assert made.read() == made.model
    report = run_job(made.uri, "verify", deep=True)
    assert report.decision == "healthy", report.describe()


def is_whole(made: PlainTable, index: BaseIndex) -> bool:
    return {fragment.fragment_id for fragment in made.dataset.get_fragments()} <= index.covered


def test_maintain_does_all_that_applies(made: PlainTable) -> None:
    run_job(made.uri, "expire", NOW)
    report = run_job(made.uri, "maintain", ALL, apply=True)
    steps = {step["step"]: step["decision"] for step in report.to_json()["steps"]}
    assert report.exit_code == 0
    assert steps == {
        "merge": "not_applicable", "catchup": "caught_up", "compact": "compacted", "snapshot": "not_applicable",
        "expire": "expired", "gc": "nothing_to_delete",
    }  # fmt: skip
    because = "does not apply to .* a Lance table without a MemWAL index, so there is no log to merge"
    for step in (step for step in report.to_json()["steps"] if step["decision"] == "not_applicable"):
        assert re.fullmatch(f"{step['step']} {because}", step["because"])
    assert "there is no log to merge. catchup" in " ".join(report.describe().split())
    healthy(made)
    assert len(made.dataset.get_fragments()) == 2, "the vector index has a segment of its own for what was new"
    second = run_job(made.uri, "maintain", apply=True).to_json()["steps"][1]["report"]["indexes"]
    # pylance's compaction does not carry zone maps and bloom filters over: compact has caught them up.
    assert not [index["name"] for index in second if index["decision"] == "updated"]
    again = run_job(made.uri, "maintain", apply=True)
    assert {step["decision"] for step in again.to_json()["steps"]} <= {
        "not_applicable", "unchanged", "nothing_to_expire", "nothing_to_delete",
    }  # fmt: skip


@pytest.mark.long
def test_a_compaction_ends_at_its_budget_and_goes_on(made: PlainTable) -> None:
    run_job(made.uri, "catchup")
    left, budget, runs = len(made.dataset.get_fragments()), 8192, 0
    assert left > 6
    while (report := run_job(made.uri, "compact", target_rows=80, max_bytes=budget)).decision == "compacted":
        document = report.to_json()
        assert document["bytes_written"] < 3 * budget
        now = len(made.dataset.get_fragments())
        assert now == document["fragments_after"] <= left
        left, runs = now, runs + 1
        assert runs < 20
        healthy(made)
        if document["why"]:
            assert "--max-bytes" in report.describe()
        behind = {name for name, index in base_indexes(open_table(made.uri)).items() if not is_whole(made, index)}
        assert behind == set(document["indexes_behind"])
        assert not behind or "memwal-ops catchup URI" in report.describe()
    assert runs > 1
    assert left < 8
    assert run_job(made.uri, "catchup").exit_code == 0
    assert run_job(made.uri, "compact", target_rows=80).decision == "unchanged"


@pytest.mark.long
def test_expiry_keeps_what_tags_branches_holds_and_the_newest_need(made: PlainTable) -> None:
    made.dataset.tags.create("kept", 3)
    made.dataset.create_branch("side", 5)
    table = open_table(made.uri)
    take_hold(table, 7, made.hour)
    needed = {version: made.read(version) for version in (3, 5, 7)}
    run_job(made.uri, "catchup")
    run_job(made.uri, "compact")
    report = run_job(made.uri, "expire", NOW, apply=True)
    assert report.decision == "expired"
    assert [one["version"] for one in made.dataset.versions()] == [3, 5, 7, made.dataset.version]
    for version, rows in needed.items():
        assert made.read(version) == rows
    side = lance.dataset(made.uri).checkout_version(("side", None)).to_table(columns=["id"])
    assert sorted(side["id"].to_pylist()) == sorted(needed[5])
    healthy(made)


def test_a_shallow_clone_reads_on_while_its_version_is_tagged(made: PlainTable, tmp_path: Path) -> None:
    made.dataset.tags.create("cloned", 4)
    clone = made.dataset.shallow_clone(str(tmp_path / "clone.lance"), 4)
    rows = clone.to_table(columns=["id"]).num_rows
    run_job(made.uri, "compact")
    run_job(made.uri, "expire", NOW, apply=True)
    assert lance.dataset(str(tmp_path / "clone.lance")).to_table(columns=["id"]).num_rows == rows
    report = run_job(str(tmp_path / "clone.lance"), "maintain", ALL, apply=True)
    assert report.exit_code == 0
    assert made.read(4) == {number: text for number, text in made.read(4).items() if number < 160}
    assert lance.dataset(str(tmp_path / "clone.lance")).to_table(columns=["id"]).num_rows == rows


@pytest.mark.long
def test_what_a_killed_writer_left_is_deleted_after_a_week(made: PlainTable, tmp_path: Path) -> None:
    """pylance's clean-up of the newest versions leaves it; a younger file may belong to a commit that is under way."""
    left = lance.fragment.write_fragments(made.batch(range(5)), made.uri, schema=made.dataset.schema)
    path = f"data/{left[0].files[0].path}"
    run_job(made.uri, "expire", apply=True)
    assert path in made.files()
    week_ago = time.time() - timedelta(days=8).total_seconds()
    os.utime(tmp_path / "t.lance" / path, (week_ago, week_ago))
    assert run_job(made.uri, "expire").to_json()["objects"] == 1
    run_job(made.uri, "expire", apply=True)
    assert path not in made.files()
    healthy(made)


@pytest.mark.long
@pytest.mark.parametrize("job", ["catchup", "compact", "expire", "gc"])
def test_a_killed_job_is_run_again(made: PlainTable, job: str) -> None:
    """At calls to the store, before or after they were carried out: each listed version can be read, no row is lost."""
    backup = f"{made.uri}.backup"
    shutil.copytree(made.uri, backup)
    for step in range(1, 1000, 21):
        shutil.rmtree(made.uri)
        shutil.copytree(backup, made.uri)
        table = open_table(made.uri)
        options = NOW if job == "expire" else table.jobs[job].options()
        try:
            dying = replace(table, store=DyingStore(table.store, step, after=bool(step % 2)))
            run_job(dying, job, options, apply=True)
        except Killed:
            for version in [one["version"] for one in made.dataset.versions()]:
                lance.dataset(made.uri, version=version).to_table(columns=["id"])
            assert run_job(made.uri, job, options, apply=True).exit_code == 0
            healthy(made)
        else:
            break
    else:
        pytest.fail("it never ended")
    healthy(made)


def test_an_expiry_stops_where_the_table_is_made_again(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = expire._Run.choose

    def replaced(run: expire._Run) -> object:
        chosen = choose(run)
        monkeypatch.undo()
        shutil.rmtree(made.uri)
        made.model.clear()
        made.create(fragments=30)
        return chosen

    monkeypatch.setattr(expire._Run, "choose", replaced)
    with pytest.raises(TableReplacedError):
        expire.apply(open_table(made.uri), NOW)
    healthy(made)
    assert len(made.dataset.versions()) == 30


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "write",
    [lambda made: made.append(5), lambda made: made.delete(1), lambda made: made.upsert(2, 900), None],
    ids=["append", "delete", "merge_insert", "init"],
)
def test_a_compaction_beside_a_commit(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch, write: Callable[[PlainTable], object] | None
) -> None:
    """Rebased, or planned again. One that gives the table a MemWAL index is no conflict either."""
    refuse = compact.refuse_gaps

    def late(table: Table) -> None:
        refuse(table)
        monkeypatch.setattr(compact, "refuse_gaps", refuse)
        if write is None:
            made.dataset.initialize_mem_wal()
        else:
            write(made)

    if write is None:
        made.mark_key()
    run_job(made.uri, "catchup")
    monkeypatch.setattr(compact, "refuse_gaps", late)
    report = run_job(made.uri, "compact")
    assert report.decision == "compacted"
    assert made.read() == made.model
    healthy(made)


@pytest.mark.long
def test_what_triggers_compare(made: PlainTable) -> None:
    """Each figure of a plain table rises with what its job would do, and falls when it did."""
    made.dataset.tags.create("kept", made.dataset.version)
    made.append(6)
    before = open_table(made.uri).summary().backlog
    assert before.keys() >= {"fragments", "small_fragments", "deleted_rows", "uncovered_rows", "versions", "bytes_held"}
    assert (before["deleted_rows"], before["uncovered_rows"]) == (97, 8)
    assert before["versions"] == made.dataset.version
    assert run_job(made.uri, "maintain", ALL, apply=True).exit_code == 0
    with_tag = open_table(made.uri).summary().backlog
    assert (with_tag["deleted_rows"], with_tag["versions"]) == (0, 2)
    assert with_tag["fragments"] < before["fragments"]
    assert with_tag["bytes_held"] > 0, "the tagged version's"
    made.dataset.tags.delete("kept")
    run_job(made.uri, "expire", NOW, apply=True)
    assert open_table(made.uri).summary().backlog["bytes_held"] == 0
    assert run_job(made.uri, "catchup").exit_code == 0
