"""catchup on plain tables: every kind of index, the codebook guard, and commits beside those of other writers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import CodebookChangedError, InvalidUsageError, NoMemWalIndexError
from memwal_ops.formats.lance.commit import rebased_commit
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.codebook import read_codebook
from memwal_ops.formats.lance.jobs.catchup import building, publishing as index_publishing
from memwal_ops.formats.lance.jobs.catchup.tiers import catchup_figures
from memwal_ops.formats.lance.jobs.compact import job as compact
from tests.support.tables.indexed import VECTOR_KINDS
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.formats.lance.commit.index_build import IndexBuild
    from memwal_ops.formats.lance.commit.publication import CommitNote
    from memwal_ops.formats.lance.table import Table


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> PlainTable:
    table = PlainTable(str(tmp_path_factory.mktemp("template") / "t.lance")).create(rows=400).create_indexes()
    table.append(100)
    return table


@pytest.fixture
def made(template: PlainTable, tmp_path: Path) -> PlainTable:
    """400 rows under indexes of every kind, and 100 that none covers."""
    return template.copy(str(tmp_path / "t.lance"))


def behind(uri: str) -> list[str]:
    table = open_table(uri)
    return [name for name, one in base_indexes(table).items() if not coverage(one.covered, table.manifest).complete]


def check(made: PlainTable) -> None:
    """Each index finds a row that it was behind on, and no row is lost."""
    assert made.read() == made.model
    dataset, last = made.dataset, max(made.model)
    assert behind(made.uri) == []
    assert dataset.to_table(filter=f"id = {last}", columns=["id"])["id"].to_pylist() == [last]
    found = dataset.to_table(filter=f"contains(text, 'of {last}')", columns=["id"])
    assert found["id"].to_pylist() == [last]
    found = dataset.to_table(full_text_query=str(last), columns=["id"], fast_search=True)
    assert last in found["id"].to_pylist()
    vector = dataset.to_table(filter=f"id = {last}")["vector"][0].as_py()
    near = {"column": "vector", "q": vector, "k": 3, "nprobes": 8, "refine_factor": 10}
    assert last in dataset.to_table(nearest=near, columns=["id"], fast_search=True)["id"].to_pylist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vector", VECTOR_KINDS)
def test_every_kind_of_index(tmp_path: Path, vector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of an entry gets lost on its way through pylance's commit; a vector index keeps its codebook."""
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=400).create_indexes(vector)
    made.append(100)
    built = []
    commit = index_publishing.commit_segments

    def spy(table: Table, build: IndexBuild, note: CommitNote) -> None:
        built.extend(build.added)
        commit(table, build, note)

    monkeypatch.setattr(index_publishing, "commit_segments", spy)
    before = open_table(made.uri)
    codebooks = {read_codebook(before, one) for one in base_indexes(before)["vector_index"].segments}
    report = run_job(made.uri, "catchup")
    assert report.decision == "caught_up"
    assert len(built) == 7
    after = open_table(made.uri)
    entries = {one.uuid.uuid: one for one in after.manifest.indexes.indices}
    for one in built:
        published = entries[one.uuid.uuid]
        for entry in (one, published):
            entry.ClearField("dataset_version")
        assert published == one
    assert {read_codebook(after, one) for one in base_indexes(after)["vector_index"].segments} == codebooks
    check(made)
    assert run_job(made.uri, "catchup").decision == "unchanged"


def test_a_changed_codebook_is_not_published(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    version = made.dataset.version
    (one,) = base_indexes(open_table(made.uri))["vector_index"].segments[:1]
    known = read_codebook(open_table(made.uri), one)
    others = (replace(known, quantizer=str(number)) for number in count())
    monkeypatch.setattr(building, "read_codebook", lambda *_: next(others))
    report = run_job(made.uri, "catchup", indexes=["vector_index"])
    assert report.exit_code == CodebookChangedError.exit_code
    assert made.dataset.version == version
    with pytest.raises(NoMemWalIndexError, match="--migrate-codebook"):
        run_job(made.uri, "catchup", migrate_codebook=["vector_index", "other"])


@pytest.mark.parametrize(
    "write",
    [
        lambda made: made.append(5),
        lambda made: made.delete(3, 450),
        lambda made: made.upsert(4, 460, 900),
        lambda made: made.update(7, text="new words"),
    ],
    ids=["append", "delete", "merge_insert", "update"],
)
def test_writers_do_not_stop_a_build(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch, write: Callable[[PlainTable], object]
) -> None:
    """They commit between build and commit: pylance rebases, and no build is thrown away."""
    builds, build = [], building.update_index

    def slow(*args: object, **more: object) -> object:
        builds.append(args[1])
        done = build(*args, **more)  # type: ignore[arg-type]
        write(made)
        return done

    monkeypatch.setattr(building, "update_index", slow)
    report = run_job(made.uri, "catchup", indexes=["id_btree"])
    assert report.decision == "caught_up"
    assert builds[0] == "id_btree"
    assert report.to_json()["commit_conflicts"] == 0
    assert made.read() == made.model
    for number in (3, 4, 7, 450, 460, 900):
        found = made.dataset.to_table(filter=f"id = {number}", columns=["text"])["text"].to_pylist()
        assert found == [text for text in [made.model.get(number)] if text is not None]


def test_a_compaction_in_between_is_a_conflict(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it commits after the last look: it rewrote what the segments cover."""
    commit, tries = rebased_commit.publication.refuse_gaps, []

    def late(table: Table) -> None:
        commit(table)
        tries.append(table.version)
        if len(tries) == 1:
            made.dataset.optimize.compact_files()

    made.delete(*range(100))
    monkeypatch.setattr(rebased_commit.publication, "refuse_gaps", late)
    report = run_job(made.uri, "catchup", indexes=["id_btree"])
    assert report.decision == "caught_up"
    assert report.to_json()["commit_conflicts"] == 1
    assert made.read() == made.model
    assert "id_btree" not in behind(made.uri)


def test_an_index_that_was_dropped_or_caught_up_in_between_is_not_published(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = rebased_commit.publication.refuse_gaps

    def late(table: Table) -> None:
        commit(table)
        made.dataset.optimize.optimize_indices(index_names=["text_ngram"])
        monkeypatch.setattr(rebased_commit.publication, "refuse_gaps", commit)

    monkeypatch.setattr(rebased_commit.publication, "refuse_gaps", late)
    report = run_job(made.uri, "catchup", indexes=["text_ngram"])
    assert report.to_json()["commit_conflicts"] == 1
    assert len(base_indexes(open_table(made.uri))["text_ngram"].segments) == 1

    made.append(3)

    def dropping(table: Table) -> None:
        commit(table)
        made.dataset.drop_index("id_btree")
        monkeypatch.setattr(rebased_commit.publication, "refuse_gaps", commit)

    monkeypatch.setattr(rebased_commit.publication, "refuse_gaps", dropping)
    run_job(made.uri, "catchup", indexes=["id_btree"])
    assert "id_btree" not in base_indexes(open_table(made.uri))


def test_a_lost_answer_is_no_failure(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit succeeded although pylance raised: its files are not deleted."""
    commit = rebased_commit.lance.LanceDataset.commit

    def loses(*args: object, **more: object) -> object:
        commit(*args, **more)
        raise OSError("connection reset")

    monkeypatch.setattr(rebased_commit.lance.LanceDataset, "commit", loses)
    report = run_job(made.uri, "catchup", indexes=["id_btree"])
    assert report.decision == "caught_up"
    monkeypatch.undo()
    assert made.dataset.to_table(filter="id = 499", columns=["id"]).num_rows == 1
    assert run_job(made.uri, "verify", deep=True).decision == "healthy"


def test_a_table_that_was_made_again_gets_no_index(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder was removed while the segments were built: they belong to the table that was there."""
    build = building.update_index

    def replaced(*args: object, **more: object) -> object:
        done = build(*args, **more)  # type: ignore[arg-type]
        monkeypatch.setattr(building, "update_index", build)
        shutil.rmtree(made.uri)
        other = PlainTable(made.uri).create(rows=400).create_indexes()
        other.append(100)
        return done

    monkeypatch.setattr(building, "update_index", replaced)
    report = run_job(made.uri, "catchup", indexes=["id_btree"])
    assert report.to_json()["commit_conflicts"] == 1
    assert run_job(made.uri, "verify").decision == "healthy"
    assert behind(made.uri) != []
    assert "id_btree" not in behind(made.uri)


_LATE: dict[str, Callable[[PlainTable], object]] = {
    "restore": lambda made: made.dataset.checkout_version(1).restore(),
    "overwrite": lambda made: lance.write_dataset(made.batch(range(50)), made.uri, mode="overwrite"),
    "drop column": lambda made: made.dataset.drop_columns(["text"]),
    "update of the column": lambda made: made.dataset.update({"text": "'other words'"}),
    "values replaced in place": lambda made: made.replace_texts(),
    "delete of all rows": lambda made: made.dataset.delete("true"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("late", [*_LATE])
@pytest.mark.parametrize("job", ["catchup", "compact"])
def test_a_commit_that_does_not_go_with_the_jobs(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch, late: str, job: str
) -> None:
    """It comes after the last look. Afterwards rows, and what each index finds, are those of that commit."""
    module = rebased_commit.publication if job == "catchup" else compact
    refuse = module.refuse_gaps
    rows: list[dict[int, str | None]] = []

    def look(table: Table) -> None:
        refuse(table)
        if not rows:
            _LATE[late](made)
            rows.append(texts(made))

    made.delete(*range(100))
    monkeypatch.setattr(module, "refuse_gaps", look)
    options = {"indexes": ["text_ngram"]} if job == "catchup" else {}
    run_job(made.uri, job, options)
    assert len(rows) == 1
    assert made.dataset.to_table(filter="id = 450", columns=["id"]).num_rows == (450 in rows[0])
    assert texts(made) == rows[0]
    report = run_job(made.uri, "verify", deep=True)
    assert report.decision == "healthy", report.describe()
    run_job(made.uri, "catchup")
    assert texts(made) == rows[0]
    if "text" in made.dataset.schema.names:
        for word in ("word", "other", "place"):
            found = made.dataset.to_table(filter=f"contains(text, '{word}')", columns=["id"])["id"].to_pylist()
            assert sorted(found) == sorted(number for number, text in rows[0].items() if word in str(text))


def texts(made: PlainTable) -> dict[int, str | None]:
    """The text of each row by a scan, without any index; None where the column is gone."""
    columns = ["id", *({"text"} & {*made.dataset.schema.names})]
    rows = made.dataset.scanner(columns=columns, use_scalar_index=False).to_table().to_pylist()
    found = {row["id"]: row.get("text") for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vector", VECTOR_KINDS)
def test_retrain_replaces_the_centroids_of_vector_indexes_alone(tmp_path: Path, vector: str) -> None:
    """In one segment, by the same parameters; a writer that commits meanwhile loses nothing."""
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=400).create_indexes(vector)
    made.append(100)
    assert run_job(made.uri, "catchup").decision == "caught_up"
    before, described = open_table(made.uri), made.dataset.describe_indices()
    report = run_job(made.uri, "catchup", retrain=True)
    after = open_table(made.uri)
    assert [one.decision for one in report.indexes].count("updated") == 1
    old, new = base_indexes(before)["vector_index"], base_indexes(after)["vector_index"]
    assert (len(old.segments), len(new.segments)) == (2, 1)
    assert {read_codebook(after, one) for one in new.segments}.isdisjoint(
        read_codebook(before, one) for one in old.segments
    )
    for name in base_indexes(before).keys() - {"vector_index"}:
        assert base_indexes(before)[name] == base_indexes(after)[name]
    assert [(one.name, one.index_type) for one in made.dataset.describe_indices()] == [
        (one.name, one.index_type) for one in described
    ]
    check(made)


def test_retrain_is_for_tables_without_a_log(made: PlainTable) -> None:
    made.mark_key()
    made.dataset.initialize_mem_wal()
    with pytest.raises(InvalidUsageError, match="has a log"):
        run_job(made.uri, "catchup", retrain=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vector", VECTOR_KINDS)
def test_an_index_without_a_row_is_trained_anew(tmp_path: Path, vector: str) -> None:
    """All rows under it were deleted: pylance trains it by the new ones, and there is no codebook to keep."""
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=300).create_indexes(vector)
    made.append(300)
    made.delete(*range(300))
    assert run_job(made.uri, "catchup").decision == "caught_up"
    check(made)


def test_too_few_rows_to_train_with_are_left_to_scans(tmp_path: Path) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=300).create_indexes()
    made.dataset.delete("true")
    made.model.clear()
    lance.write_dataset(made.batch(range(50)), made.uri, mode="append")
    made.model = {number: made.text(number) for number in range(50)}
    files = made.files("_indices")
    report = run_job(made.uri, "catchup", indexes=["vector_index"])
    assert (report.decision, report.indexes[0].decision) == ("unchanged", "below_threshold")
    assert made.files("_indices") == files
    assert made.read() == made.model


def test_a_budget_leaves_indexes_for_the_next_run(tmp_path: Path) -> None:
    """The one that lacks most rows is first, however large it is; then what fits."""
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=2, rows=50)
    for column, kind in (("id", "BTREE"), ("text", "INVERTED")):
        made.dataset.create_scalar_index(column, kind, name=column)
    made.append(10)
    run_job(made.uri, "catchup", indexes=("id",))
    made.append(10)
    plan = run_job(made.uri, "catchup", apply=False, max_bytes=1)
    assert [(one.name, one.decision, one.method) for one in plan.indexes] == [
        ("text", "would_update", "update"),
        ("id", "over_budget", None),
    ]
    assert "would update 1 index, 1 index left by --max-bytes for the next run" in plan.describe().replace("\n  ", " ")
    first = run_job(made.uri, "catchup", max_bytes=1)
    assert [(one.name, one.decision, one.why) for one in first.indexes] == [
        ("text", "updated", None),
        ("id", "over_budget", "The run has used its --max-bytes; the next run continues."),
    ]
    assert "1 index left by --max-bytes for the next run" in first.describe().replace("\n  ", " ")
    second = run_job(made.uri, "catchup", max_bytes=1)
    assert [(one.name, one.decision) for one in second.indexes] == [("id", "updated"), ("text", "unchanged")]
    made.append(10)
    every = run_job(made.uri, "catchup", max_bytes=1 << 30)
    assert {one.decision for one in every.indexes} == {"updated"}
    assert run_job(made.uri, "catchup").decision == "unchanged"


def test_what_a_look_up_reads_falls_with_a_catch_up(made: PlainTable, tmp_path: Path) -> None:
    """Segments, and fragments that the index lacks; without an index a look-up reads all fragments."""

    def reads(uri: str) -> float:
        return catchup_figures(open_table(uri))["lookup_reads"]

    assert reads(made.uri) == 2, "a segment and the appended fragment"
    made.append(50)
    assert reads(made.uri) == 3
    run_job(made.uri, "catchup")
    assert reads(made.uri) == max(len(one.segments) for one in base_indexes(open_table(made.uri)).values())
    bare = PlainTable(str(tmp_path / "bare.lance")).create(rows=10)
    bare.append(10)
    assert reads(bare.uri) == 2
