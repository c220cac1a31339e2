"""catchup publishes no index that answers worse than before, and is not stopped by one that was wrong already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import AnswersWorseError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.jobs.catchup import building
from memwal_ops.formats.lance.retention.garbage import find_leftovers, sweep_leftovers
from tests.support.tables import indexed
from tests.support.tables.answering import about_to_be_ruined, claims_too_much
from tests.support.tables.gc_tables import ZERO
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    pass

KINDS = ["id_btree", "id_bitmap", "id_zonemap", "id_bloomfilter", "text_ngram", "text_inverted"]


@pytest.fixture
def made(tmp_path: Path) -> PlainTable:
    """400 rows under indexes of every kind, and 100 that none covers."""
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=400).create_indexes()
    made.append(100)
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_an_index_that_would_lack_rows_is_not_published(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files, version = made.files(), made.dataset.version
    monkeypatch.setattr(building, "update_index", claims_too_much)
    report = run_job(made.uri, "catchup", indexes=[name])
    assert (report.decision, report.exit_code) == ("answers_worse", AnswersWorseError.exit_code)
    [index] = report.to_json()["indexes"]
    assert (index["decision"], index["error"]["reason"]) == ("answers_worse", "answers_worse")
    assert index["answers"]["wrong"] > index["answers"]["wrong_before"] == 0
    assert f"--index {name} --rebuild" in index["error"]["detail"]
    assert made.dataset.version == version
    assert {one for one in made.files() if not one.startswith("_mem_wal_ops")} == files
    monkeypatch.undo()
    assert run_job(made.uri, "catchup", indexes=[name]).decision == "caught_up"


@pytest.mark.long
def test_the_guard_may_be_off_and_an_index_that_is_wrong_stops_nothing(
    made: PlainTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "update_index", claims_too_much)
    report = run_job(made.uri, "catchup", indexes=["id_bitmap"], answers="off")
    assert report.decision == "caught_up"
    assert report.to_json()["indexes"][0]["answers"]["skipped"] == "--answers off"
    monkeypatch.undo()
    made.append(50)
    for answers in ("strict", "sample"):
        report = run_job(made.uri, "catchup", indexes=["id_bitmap"], answers=answers)
        [index] = report.to_json()["indexes"]
        if answers == "strict":
            assert index["answers"]["wrong"] == index["answers"]["wrong_before"] > 0
            assert "queries" in report.describe()
    assert run_job(made.uri, "catchup", indexes=["id_bitmap"], rebuild=True).indexes[0].answers.wrong == 0
    assert made.dataset.to_table(filter="id = 450", columns=["id"]).num_rows == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("answers", ["sample", "strict"])
def test_healthy_indexes_are_asked_and_published(tmp_path: Path, answers: str) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=400)
    for kind in ("BTREE", "BITMAP"):
        made.dataset.create_scalar_index("id", kind, name=f"id_{kind.lower()}")
    for kind in ("NGRAM", "INVERTED"):
        made.dataset.create_scalar_index("text", kind, name=f"text_{kind.lower()}")
    for kind in ("IVF_FLAT", "IVF_PQ", "IVF_SQ", "IVF_RQ", "IVF_HNSW_SQ"):
        more = {"num_sub_vectors": 4} if kind.endswith("PQ") else {}
        made.dataset.create_index("vector", kind, num_partitions=4, name=kind.lower(), **more)
    for _ in range(3):
        made.append(100)
        made.delete(*[number for number in made.model if number % 10 == 3][:20])
        report = run_job(made.uri, "catchup", answers=answers)
        assert report.decision == "caught_up", report.describe()
        assert all(one.answers is not None and one.answers.queries >= 10 for one in report.indexes), report.describe()
        assert not [one for one in report.indexes if one.answers is None or one.answers.wrong or one.answers.worse]
        assert "of the time." in report.describe()
    assert not [*Path(made.uri, "_versions").glob("d*")]


def test_dot_products_that_pylance_ruins_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody foresees it."""
    uri = str(tmp_path / "t.lance")
    dataset = about_to_be_ruined(uri, "one")
    monkeypatch.setattr(building, "refusal", lambda *_, **__: None)
    report = run_job(uri, "catchup")
    assert report.exit_code == AnswersWorseError.exit_code
    [answers] = [one.answers for one in report.indexes]
    assert answers is not None and answers.worse
    assert lance.dataset(uri).version == dataset.version


def test_beside_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"))
    indexed.write(uri, 0)
    version = lance.dataset(uri).version
    monkeypatch.setattr(building, "update_index", claims_too_much)
    report = run_job(uri, "catchup", indexes=["kind_idx"])
    assert report.exit_code == AnswersWorseError.exit_code
    assert lance.dataset(uri).version == version
    monkeypatch.undo()
    assert run_job(uri, "catchup").decision == "caught_up"
    indexed.check_queries(uri, indexed.expected(1))


@pytest.mark.long
def test_what_a_killed_question_leaves_is_known(made: PlainTable, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(commit, "open_dataset", kill)
    monkeypatch.setattr("memwal_ops.formats.lance.table.Table.discard", lambda *_: None)
    with pytest.raises(Killed):
        run_job(made.uri, "catchup", indexes=["id_btree"])
    monkeypatch.undo()
    table = open_table(made.uri)
    [left] = find_leftovers(table)
    assert left.job == "catchup"
    assert sweep_leftovers(table, abandoned_after=ZERO) == 1
    assert run_job(made.uri, "catchup").decision == "caught_up"
