"""Rows that move to other centres: the codebook no longer fits them, verify finds it, and catchup builds anew."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.registry import job_specs
from memwal_ops.core.triggers import parse_trigger
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import graph
from memwal_ops.formats.lm_diskann.jobs import catchup
from memwal_ops.formats.lm_diskann.library import Index
from tests.support.lm_diskann.folders import Killed, check_rows, check_sound, killer, nearest, recall

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNT, DIMENSION, MOVED = 1500, 16, 500


def around_new_centres(seed: int, count: int) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(2, DIMENSION)) * 5
    spread = random.normal(size=(count, DIMENSION)) * 0.1
    return (centres[random.integers(0, 2, count)] + spread).astype(np.float32)


def move(folder: str, rows: dict[int, NDArray[np.float32]], seed: int) -> None:
    """Replace a third of the rows by others around new centres."""
    gone = np.random.default_rng(seed).choice([*rows], MOVED, replace=False)
    fresh = np.arange(MOVED) + max(rows) + 1
    vectors = around_new_centres(seed, MOVED)
    with Index(folder) as index:
        index.delete(gone)
        index.insert(fresh, vectors)
    for row in gone.tolist():
        del rows[row]
    rows.update(zip(fresh.tolist(), vectors, strict=True))


def found(folder: str, rows: dict[int, NDArray[np.float32]]) -> float:
    """Recall@10 of a sample of the rows, with the L of the index."""
    ids, vectors = np.array([*rows]), np.stack([*rows.values()])
    queries = vectors[:: len(vectors) // 150]
    with Index(folder, read_only=True) as index:
        return recall(index.search(queries, k=10)[0], nearest(ids, vectors, queries, 10))


@pytest.fixture(scope="module")
def drifted(template: str) -> tuple[str, dict[int, NDArray[np.float32]]]:
    """An index of which a third moved away, and its rows."""
    vectors = around_new_centres(1, COUNT)
    lm_diskann.create(template, dimension=DIMENSION, R=8, L=60).close()
    with Index(template) as index:
        index.insert(np.arange(COUNT), vectors)
    rows = dict(enumerate(vectors))
    move(template, rows, 2)
    return template, rows


@pytest.fixture
def made(drifted: tuple[str, dict[int, NDArray[np.float32]]], folder: str) -> str:
    return shutil.copytree(drifted[0], folder)


@pytest.fixture
def rows(drifted: tuple[str, dict[int, NDArray[np.float32]]]) -> dict[int, NDArray[np.float32]]:
    return {**drifted[1]}


def low(folder: str) -> list[tuple[str, str]]:
    """Severity and remedy of the findings about recall."""
    findings = run_job(folder, "verify", answers_only=True, samples=200).findings.kept
    assert {one.check for one in findings} <= {"index_recall_low"}
    return [(one.severity.value, one.remedy) for one in findings]


@pytest.mark.long
@pytest.mark.req("S2-044")
def test_catchup_builds_anew_what_drifted(made: str, rows: dict[int, NDArray[np.float32]]) -> None:
    assert found(made, rows) < 0.85
    [(severity, remedy)] = low(made)
    assert (severity, "memwal-ops catchup URI builds the graph anew" in remedy) == ("error", True)
    for seed in range(3, 6):
        report = run_job(made, "catchup")
        assert report.to_json()["rebuilt"] == COUNT, "the codebook was stale"
        assert "built anew" in report.describe()
        assert found(made, rows) > 0.98
        assert low(made) == []
        check_rows(made, rows)
        check_sound(made)
        run_job(made, "merge")
        run_job(made, "compact")
        run_job(made, "gc", apply=True)
        move(made, rows, seed)
    assert run_job(made, "verify", deep=True).to_json()["counts"].keys() <= {"index_recall_low"}


@pytest.mark.long
def test_rows_that_follow_the_same_distribution_do_not_build_anew(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16, R=8, L=40).close()
    with Index(folder) as index:
        index.insert(np.arange(1500), vectors[:1500])
        index.delete(np.arange(0, 500))
        index.insert(np.arange(2000, 2500), vectors[2000:2500])
    report = run_job(folder, "catchup").to_json()
    assert (report["decision"], report["rebuilt"], report["stale"]) == ("caught_up", 0, False)


@pytest.fixture(scope="module")
def of_few_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, NDArray[np.float32]]:
    """An index whose codebook knows its 1,100 rows by heart; and 1,500 rows that are like them."""
    noise = np.random.default_rng(6).normal(size=(1500, 384)).astype(np.float32)
    template = str(tmp_path_factory.mktemp("of_few_rows") / "index.lmd")
    lm_diskann.create(template, dimension=384, R=8, L=20).close()
    with Index(template) as index:
        index.insert(np.arange(1100), noise[:1100])
    return template, noise


@pytest.mark.long
@pytest.mark.parametrize("replaced", [80, 300])
def test_a_codebook_of_few_rows_is_trained_anew_once_others_took_their_place(
    of_few_rows: tuple[str, NDArray[np.float32]], folder: str, replaced: int
) -> None:
    template, noise = of_few_rows
    shutil.copytree(template, folder)
    with Index(folder) as index:
        index.delete(np.arange(replaced))
        index.insert(np.arange(1100, 1100 + replaced), noise[1100 : 1100 + replaced])
        before = wear_of(index)
    report = run_job(folder, "catchup").to_json()
    assert (report["healed"], report["rebuilt"]) == (replaced, 1100 if replaced == 300 else 0)
    with Index(folder) as index:
        assert before > 0.02
        assert wear_of(index) == (0 if replaced == 300 else pytest.approx(before, rel=0.5))
    assert run_job(folder, "catchup").decision == "unchanged"
    check_rows(folder, dict(enumerate(noise[replaced : 1100 + replaced], replaced)))
    check_sound(folder)


def wear_of(index: Index) -> float:
    """The share by which codes are worse than those of the rows on which the codebook was trained."""
    wear = catchup.wear_of(index.view, index.writable(), np.random.default_rng(1))
    return wear.more / wear.trained


def test_rows_that_no_insert_changed_are_not_searched(
    of_few_rows: tuple[str, NDArray[np.float32]], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(of_few_rows[0], folder)
    with Index(folder) as index:
        index.delete(np.arange(50))
    monkeypatch.setattr(Index, "search", None)
    monkeypatch.setattr(catchup, "train", None)
    assert run_job(folder, "catchup").to_json()["healed"] == 50


def catchup_is_due(folder: str) -> bool:
    spec = job_specs("lm_diskann")["catchup"]
    assert spec.when is not None
    return parse_trigger(spec.when, {name: one.unit for name, one in spec.backlog_metrics.items()}).is_met(
        spec.job.backlog(open_table(folder))
    )


def test_inserts_alone_that_drift_start_catchup(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16, R=8, L=40).close()
    assert not catchup_is_due(folder)
    with Index(folder) as index:
        index.insert(np.arange(1500), vectors[:1500])
        assert not catchup_is_due(folder)
        index.insert(np.arange(1500, 2500), vectors[1500:2500])
        assert not catchup_is_due(folder), "they follow the distribution of those before"
        index.insert(np.arange(3000, 3600), around_new_centres(3, 600))
        assert catchup_is_due(folder)
    assert run_job(folder, "catchup").to_json()["rebuilt"] == 3100
    assert not catchup_is_due(folder)


def test_an_epoch_before_is_read_with_its_own_codebook(made: str, rows: dict[int, NDArray[np.float32]]) -> None:
    ids, vectors = np.array([*rows]), np.stack([*rows.values()])
    queries = vectors[::10]
    with lm_diskann.open(made, read_only=True) as reader, reader.hold() as epoch:
        before = reader.search(queries, k=10, as_of=epoch)
        run_job(made, "catchup")
        move(made, rows, 7)
        run_job(made, "maintain", apply=True)
        again = reader.search(queries, k=10, as_of=epoch)
        starts = reader.view.starts(epoch)
        assert starts is not None
        assert (reader.view.state.codebook_id, reader.view.book_at(starts, epoch) is reader.view.book) == (3, False)
        truth = nearest(ids, vectors, queries, 10)
        assert recall(again[0], truth) >= recall(before[0], truth) - 0.02  # L depends on the deleted rows of now
        with lm_diskann.open(made, read_only=True) as other:  # it never had that codebook: it compares all rows
            exact, _ = other.search(queries, k=10, as_of=epoch)
        assert recall(exact, truth) == 1


def test_a_build_above_the_memory_is_only_reported(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal_ops.formats.lm_diskann.jobs.catchup.memory_of", lambda *_: 1 << 40)
    report = run_job(made, "catchup")
    assert (report.to_json()["rebuilt"], report.to_json()["stale"]) == (0, True)
    assert "--build-memory" in report.describe()
    [(severity, _)] = low(made)
    assert severity == "error"


@pytest.mark.long
def test_rebuild_of_a_folder_that_follows_no_table(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16, R=8, L=40).close()
    with Index(folder) as index:
        index.insert(np.arange(100), vectors[:100])
    assert run_job(folder, "catchup", rebuild=True).decision == "unchanged", "it has no graph yet"
    with Index(folder) as index:
        index.insert(np.arange(100, 1300), vectors[100:1300])
        index.delete(np.arange(50))
    report = run_job(folder, "catchup", rebuild=True)
    assert (report.decision, report.to_json()["rebuilt"], report.to_json()["healed"]) == ("caught_up", 1250, 50)
    check_rows(folder, dict(enumerate(vectors[50:1300], 50)))
    check_sound(folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "step",
    [
        "write blocks into free slots",
        "sync the graph",
        "commit to the store",
        "append the commit to the view",
        "write the base of a view",
        "publish the view",
    ],
)
def test_killed_while_it_builds_anew(made: str, rows: dict[int, NDArray[np.float32]], step: str) -> None:
    with pytest.raises(Killed), Index(made, step=killer(step)) as index:
        graph.build_again(index, killer(step))
    Index(made).close()  # the next writer publishes what was committed
    check_rows(made, rows)
    check_sound(made)
    run_job(made, "catchup")
    assert found(made, rows) > 0.98
    check_rows(made, rows)
    check_sound(made)


@pytest.mark.long
def test_an_insert_of_most_rows_trains_the_codebook_anew(made: str, rows: dict[int, NDArray[np.float32]]) -> None:
    vectors = around_new_centres(9, COUNT)
    with Index(made) as index:
        index.insert(np.arange(10_000, 10_000 + COUNT), vectors)
        assert index.view.state.codebook_id == 2
    rows.update(zip(range(10_000, 10_000 + COUNT), vectors, strict=True))
    assert found(made, rows) > 0.98
    check_sound(made)


def test_a_change_that_fails_keeps_the_codebook(made: str, rows: dict[int, NDArray[np.float32]]) -> None:
    before = found(made, rows)
    with Index(made) as index:
        book = index.view.book.parts.copy()
        with pytest.raises(RuntimeError, match="stop"), index.staged() as staged:
            graph.build_anew(staged)
            raise RuntimeError("stop")
        assert (index.view.book.parts == book).all()
    assert found(made, rows) == before


@pytest.mark.long
def test_recall_below_the_objective_without_drift_names_no_codebook(folder: str) -> None:
    noise = np.random.default_rng(0).normal(size=(1500, 64)).astype(np.float32)
    lm_diskann.create(folder, dimension=64, R=4, L=10).close()
    with Index(folder) as index:
        index.insert(np.arange(1500), noise)
    report = run_job(folder, "verify", answers=True, samples=200, min_recall=0.99)
    assert [one.check for one in report.findings.kept] == ["index_recall_low"]
    assert "catchup URI builds the graph anew, with" not in report.describe(), "no codebook would fit better"
