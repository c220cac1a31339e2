"""compact publishes nothing by which an index answers worse, and deletes what it does not publish."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import numpy as np
import pytest
from lance.optimize import Compaction

from memwal_ops import open_table, run_job
from memwal_ops.core.context import StopRequested
from memwal_ops.errors import AnswersWorseError, CommitStateUnknownError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit import commit, rebased_commit
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.jobs.catchup import building
from memwal_ops.formats.lance.jobs.compact import corrections, job
from memwal_ops.formats.lance.jobs.compact.job import CompactOptions
from memwal_ops.formats.lance.retention.garbage import find_leftovers, sweep_leftovers
from memwal_ops.formats.lance.wire.version_manifest import encode_fragment_bitmap
from tests.support.listeners import at_checkpoint
from tests.support.tables import indexed
from tests.support.tables.answering import SCALARS, VECTORS, claims_too_much, rows, vectors
from tests.support.tables.gc_tables import ZERO
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table

KINDS = ["id_btree", "id_bitmap", "text_ngram", "text_inverted", "vector_index"]


@pytest.fixture
def made(tmp_path: Path) -> PlainTable:
    """600 rows in three fragments, without an index."""
    return PlainTable(str(tmp_path / "t.lance")).create(fragments=3, rows=200)


def with_log(tmp_path: Path) -> str:
    """A table with a log and several fragments, all of them under one segment of each index."""
    uri = indexed.create(str(tmp_path / "t.lance"))
    indexed.write(uri, 0)
    assert run_job(uri, "catchup", max_segments=1).decision == "caught_up"
    return uri


def before_asking(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Table, Table], None]) -> None:
    """Change what a compaction would publish, as if pylance had made it so."""
    real = corrections._Question.__call__

    def planted(self: Any, later: Table) -> None:
        plant(self.before, later)
        real(self, later)

    monkeypatch.setattr(corrections._Question, "__call__", planted)


def not_remapped(only: str) -> Callable[[Table, Table], None]:
    """The index's new files are those of before: they name rows where these were."""

    def plant(before: Table, later: Table) -> None:
        old, new = (base_indexes(one)[only].segments[0].uuid.uuid for one in (before, later))
        folder = Path(before.location.uri) / "_indices"
        if old != new:
            shutil.copytree(folder / str(UUID(bytes=old)), folder / str(UUID(bytes=new)), dirs_exist_ok=True)

    return plant


def claims_all(only: str) -> Callable[[Table, Table], None]:
    """The index's entry claims every fragment, also those that the index does not have."""

    def plant(_: Table, later: Table) -> None:
        assert later.manifest.indexes is not None
        for entry in later.manifest.indexes.indices:
            if entry.name == only:
                entry.fragment_bitmap = encode_fragment_bitmap({one.id for one in later.manifest.manifest.fragments})

    return plant


def files_of(made: PlainTable) -> set[str]:
    """All files but those of versions, and what jobs write for themselves."""
    return {one for one in made.files() if not one.startswith(("_versions", "_transactions", "_mem_wal_ops"))}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_an_index_that_was_not_remapped_is_not_published(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made.create_indexes("IVF_FLAT")
    files, before = files_of(made), open_table(made.uri)
    before_asking(monkeypatch, not_remapped(name))
    report = run_job(made.uri, "compact")
    assert (report.decision, report.exit_code) == ("answers_worse", AnswersWorseError.exit_code)
    document = report.to_json()
    assert document["error"]["reason"] == "answers_worse"
    assert f"--index {name} --rebuild" in document["error"]["detail"]
    assert report.describe().startswith("answers_worse: nothing was published, 3 fragments now, ")
    [worse] = [one for one in document["answers"] if one["worse"]]
    assert worse["index"] == name
    assert (report.fragments_removed, report.fragments_after) == (0, 3)
    after = open_table(made.uri)
    assert after.manifest.manifest.fragments == before.manifest.manifest.fragments
    assert after.manifest.indexes == before.manifest.indexes
    assert files_of(made) == files, "what was not published is deleted"
    assert not [one for one in made.files("_versions") if "-" in one]
    assert made.read() == made.model
    monkeypatch.undo()
    assert run_job(made.uri, "compact").decision == "compacted"
    assert made.dataset.to_table(filter="id = 450", columns=["id"]).num_rows == 1


@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_an_index_that_claims_too_much_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stable: bool
) -> None:
    uri = str(tmp_path / "t.lance")
    for first in (0, 200, 400):
        data = PlainTable.batch(range(first, first + 200))
        lance.write_dataset(data, uri, mode="append" if first else "create", enable_stable_row_ids=stable)
        if first == 200:
            lance.dataset(uri).create_scalar_index("text", "INVERTED")
    before_asking(monkeypatch, claims_all("text_idx"))
    report = run_job(uri, "compact")
    assert report.decision == "answers_worse"
    assert report.to_json()["answers"][0]["wrong"] > report.to_json()["answers"][0]["wrong_before"] == 0
    monkeypatch.undo()
    assert run_job(uri, "compact").decision == "compacted"


@pytest.mark.long
def test_the_guard_may_be_off_and_nothing_is_asked_without_an_index(
    made: PlainTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made.copy(str(tmp_path / "plain.lance"))
    made.create_indexes()
    monkeypatch.setattr(corrections, "commit_checked", None)
    assert run_job(plain.uri, "compact").to_json()["answers"] == []
    assert run_job(made.uri, "compact", answers="off").to_json()["answers"] == []
    assert made.read() == made.model


@pytest.mark.long
def test_beside_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = with_log(tmp_path)
    before = open_table(uri)
    before_asking(monkeypatch, not_remapped("kind_idx"))
    assert run_job(uri, "compact").exit_code == AnswersWorseError.exit_code
    after = open_table(uri)
    assert after.manifest.manifest.fragments == before.manifest.manifest.fragments
    assert after.index.details == before.index.details
    assert after.index.uuid == before.index.uuid
    monkeypatch.undo()
    assert run_job(uri, "compact").decision == "compacted"
    indexed.check_queries(uri, indexed.expected(1))


def test_an_index_that_is_wrong_already_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that lacks rows which it claims, before and after they were moved."""
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=400)
    made.dataset.create_scalar_index("id", "BITMAP")
    made.append(200)
    monkeypatch.setattr(building, "update_index", claims_too_much)
    assert run_job(made.uri, "catchup", answers="off").decision == "caught_up"
    monkeypatch.undo()
    report = run_job(made.uri, "compact")
    assert report.decision == "compacted", report.describe()
    [(_, compared)] = report.answers
    assert compared.wrong_before is not None
    assert 0 < compared.wrong <= compared.wrong_before


def healthy(uri: str, times: int, seed: int, mode: str, *, stable: bool) -> None:
    """Appends, deletions, catch-up and compaction, time and again, under an index of every type."""
    random = np.random.default_rng(seed)
    print("seed", seed)  # noqa: T201

    def batch(first: int) -> Any:
        made = rows(random, first, 400)
        for kind in VECTORS:
            made = made.append_column(kind.lower(), vectors(random, 400))
        return made

    dataset = lance.write_dataset(batch(0), uri, enable_stable_row_ids=stable)
    for name, (column, kind) in SCALARS.items():
        dataset.create_scalar_index(column, kind, name=name)
    for kind in VECTORS:
        quantizer = {"num_sub_vectors": 4} if kind.endswith("PQ") else {}
        dataset.create_index(kind.lower(), kind, num_partitions=2, name=f"near_{kind.lower()}", **quantizer)
    for at in range(1, times + 1):
        dataset = lance.write_dataset(batch(at * 400), uri, mode="append")
        dataset.delete(f"number % 40 = {at % 40} OR (number < {at * 100} AND number % 2 = 0)")
        assert run_job(uri, "catchup", max_segments=1, answers="off").decision in {"caught_up", "unchanged"}
        report = run_job(uri, "compact", answers=mode, tier_factor=1)
        assert report.decision == "compacted", f"{at}: {report.describe()}"
        asked = {name for name, one in report.answers if one.queries}
        assert asked >= {"by_number", "by_text", "near_ivf_flat"}, report.to_json()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["sample", "strict"])
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_healthy_indexes_are_published(tmp_path: Path, mode: str, stable: bool) -> None:
    healthy(str(tmp_path / "t.lance"), 1, 7, mode, stable=stable)
    assert not [one for one in Path(tmp_path, "t.lance", "_versions").iterdir() if one.name.startswith("d")]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(11, 16))
@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable ids"])
def test_healthy_indexes_are_published_fifty_times(tmp_path: Path, stable: bool, seed: int) -> None:
    """Five times in each of ten tables."""
    healthy(str(tmp_path / "t.lance"), 5, seed, "sample", stable=stable)


def test_a_rebased_version_is_asked_if_its_indexes_are_others(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that came meanwhile change no answer of what was asked."""
    made.create_indexes("IVF_FLAT")
    real, seen = corrections._Question.__call__, []

    def beside(self: Any, later: Table) -> None:
        real(self, later)
        seen.append(later.version)
        if len(seen) == 2:  # after the version that reserves ids
            made.append(10)

    monkeypatch.setattr(corrections._Question, "__call__", beside)
    report = run_job(made.uri, "compact")
    assert (report.decision, report.commit_conflicts) == ("compacted", 0)
    assert len(seen) == 3
    assert seen[2] == seen[1] + 1
    names = [name for name, _ in report.answers]
    assert len(names) == len(set(names)), "each index was asked once"
    assert made.read() == made.model
    assert made.dataset.to_table(filter="id = 605", columns=["id"]).num_rows == 1


@pytest.mark.long
def test_it_can_be_stopped_while_it_asks(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    made.create_indexes("IVF_FLAT")
    files, stops = files_of(made), []

    def stop() -> None:
        stops.append(1)
        if len(stops) == 2:
            raise StopRequested

    with pytest.raises(StopRequested):
        job.apply(open_table(made.uri), CompactOptions(), at_checkpoint(stop))
    assert files_of(made) == files
    assert made.read() == made.model
    assert run_job(made.uri, "compact").decision == "compacted"


def test_pylance_fails_in_the_middle(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own errors are raised as they are."""
    made.create_indexes("IVF_FLAT")

    def fails(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(job, "Compaction", type("Fails", (), {"plan": Compaction.plan, "commit": staticmethod(fails)}))
    with pytest.raises(Exception, match="the disk is gone"):
        run_job(made.uri, "compact")
    assert made.read() == made.model


@pytest.mark.long
def test_a_put_that_arrives_late_finds_its_files(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance does not go on after an unknown outcome: a later version could be refused, and the files deleted."""
    made.create_indexes("IVF_FLAT")
    real, puts = rebased_commit.publication.publish, []

    def no_response(*put: Any) -> None:
        puts.append(put)
        if len(puts) > 1:  # the first one reserves ids
            raise CommitStateUnknownError("Whether the version was committed is unknown.")
        real(*put)

    monkeypatch.setattr(rebased_commit.publication, "publish", no_response)
    with pytest.raises(StorageError, match="unknown"):
        run_job(made.uri, "compact")
    assert len(puts) == 2
    real(*puts[1])
    assert len(open_table(made.uri).manifest.manifest.fragments) == 1
    assert made.read() == made.model


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["staged", "asking", "published"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_leaves_the_old_state_or_the_new_one(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    """Before a staged version is read, while it is asked, and after it was published; at each of the two versions."""
    made.create_indexes("IVF_FLAT")
    seen: list[str] = []

    def kill(*_: Any, **__: Any) -> Any:
        raise Killed

    def nth(real: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(where)
            result = real(*arguments, **named) if after and len(seen) == at else None
            if len(seen) == at:
                monkeypatch.setattr("memwal_ops.formats.lance.table.Table.discard", kill)
                raise Killed
            return result if after and len(seen) == at else real(*arguments, **named)

        return call

    target, name = {
        "staged": (rebased_commit._CheckedVersions, "_create"),
        "asking": (commit, "open_dataset"),
        "published": (rebased_commit.publication, "advance_hint"),
    }[where]
    monkeypatch.setattr(target, name, nth(getattr(target, name), after=where == "published"))
    with pytest.raises(Killed):
        run_job(made.uri, "compact")
    monkeypatch.undo()
    assert len(seen) == at
    assert made.read() == made.model
    published = where == "published" and at == 2
    assert len(made.dataset.get_fragments()) == (1 if published else 3)
    for number in (0, 450):
        assert made.dataset.to_table(filter=f"id = {number}", columns=["id"]).num_rows == 1
    if where == "asking":
        table = open_table(made.uri)
        [left] = find_leftovers(table)
        assert left.job == "compact"
        assert sweep_leftovers(table, abandoned_after=ZERO) == 1
    staged = [one for one in made.files("_versions") if "-" in one]
    assert len(staged) == (where == "staged")
    assert run_job(made.uri, "compact").decision == ("unchanged" if published else "compacted")
    if staged:
        monkeypatch.setattr("memwal_ops.formats.lance.retention.garbage._STAGED_AGE", ZERO)
        made.append(1)
        run_job(made.uri, "compact")
        assert not [one for one in made.files("_versions") if "-" in one]


@pytest.mark.sampled(1)
@pytest.mark.s3
@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_on_s3_leaves_no_table_of_dynamodb(
    monkeypatch: pytest.MonkeyPatch, bucket: tuple[str, dict[str, str]], at: int
) -> None:
    """A staged manifest shows that versions are recorded in DynamoDB, but not those of our own commits to s3://."""
    root, options = bucket
    uri, rows = f"{root}/t.lance", range(1200)
    for first in range(0, 1200, 300):
        data = PlainTable.batch(range(first, first + 300))
        made = lance.write_dataset(data, uri, mode="append" if first else "create", storage_options=options)
    made.create_scalar_index("id", "BTREE")
    seen: list[int] = []

    def killed(self: Any, version: int, path: str) -> Any:
        seen.append(version)
        if len(seen) < at:
            return real(self, version, path)
        raise Killed

    real = rebased_commit._CheckedVersions._create
    monkeypatch.setattr(rebased_commit._CheckedVersions, "_create", killed)
    with pytest.raises(Killed):
        run_job(uri, "compact", storage_options=options)
    monkeypatch.undo()
    table = open_table(uri, options)
    [staged] = [meta.path for meta in table.listed.files if "manifest-" in meta.path]
    assert run_job(uri, "compact", storage_options=options).decision == "compacted"
    table = open_table(uri, options)
    assert table.dataset.to_table(columns=["id"])["id"].to_pylist() == list(rows)
    added = lance.write_dataset(PlainTable.batch([1200]), uri, mode="append", storage_options=options).version
    appended = table.store.get(version_path(added, table.naming))
    table.store.put_if_absent(f"{version_path(added + 1, table.naming)}-{UUID(int=1)}", appended)
    with pytest.raises(UnsupportedFeatureError, match=f"{UUID(int=1)} shows"):
        open_table(uri, options)
    assert staged in [meta.path for meta in table.store.list("_versions")]
