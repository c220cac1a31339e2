"""verify --deep finds rows that no search reaches, and repair links them again."""

from __future__ import annotations

import duckdb
import numpy as np
import pytest

from memwal_ops import run_job
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import graph
from memwal_ops.formats.lm_diskann.graph import insert
from tests.support.lm_diskann.folders import check_sound


def cut_off(folder: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: an insert to which nothing links back."""
    with monkeypatch.context() as patch, lm_diskann.open(folder) as index, index.staged() as staged:
        patch.setattr(staged, "link", lambda nodes, rows, given: _alone(staged, nodes, rows, given))
        insert(staged, np.arange(5000, 5010), vectors[2000:2010])


def _alone(staged, nodes, rows, given) -> None:  # type: ignore[no-untyped-def]
    from memwal_ops.formats.lm_diskann.kernels.inserting import write_nodes

    staged.reserve(len(nodes))
    write_nodes(staged.view.source, staged.parameters.layout, nodes, rows, given, staged.epoch, staged.origin, 1)


@pytest.mark.req("S2-044", "S2-045")
def test_rows_that_no_search_reaches_are_found_and_linked_again(
    made: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_job(made, "verify", deep=True)
    healthy = report.to_json()
    assert healthy["decision"] == "healthy"
    assert healthy["checked"]["recall"] >= 0.9
    assert f"1,200 blocks were read; recall {healthy['checked']['recall']:.3f}." in report.describe()
    cut_off(made, vectors, monkeypatch)
    assert run_job(made, "verify").decision == "healthy", "each link has its backlink"
    found = run_job(made, "verify", deep=True).to_json()
    assert found["counts"] == {"unreachable": 10}
    with lm_diskann.open(made) as index:
        hits, _ = index.search(vectors[:1], k=1500)
        assert {*hits[0].tolist()} == {-1, *range(1200), *range(5000, 5010)}, "who asks for all of them gets them"
    assert run_job(made, "repair", deep=True, apply=True).decision == "repaired"
    assert run_job(made, "verify", deep=True).decision == "healthy"
    with lm_diskann.open(made) as index:
        hits, _ = index.search(vectors[2000:2010], k=1, L=100)
        assert (hits[:, 0] == np.arange(5000, 5010)).all()
    check_sound(made)


def _sparse(folder: str) -> None:
    """An index with four links per node and vectors that many rows share, in which rows lost their path."""
    random = np.random.default_rng(2)

    def some(count: int) -> np.ndarray:
        return random.integers(-1, 2, (count, 3)).astype(np.float32)

    lm_diskann.create(folder, dimension=3, R=4, L=20)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1200), some(1200))
        for _ in range(3):
            index.insert(random.choice(1200, 300, replace=False), some(300))
    assert run_job(folder, "verify", deep=True).to_json()["counts"]["unreachable"]


@pytest.mark.long
@pytest.mark.parametrize("searched", [True, False], ids=["searched", "not searched"])
def test_rows_that_lose_their_path_while_others_are_linked_are_linked_as_well(
    folder: str, monkeypatch: pytest.MonkeyPatch, *, searched: bool
) -> None:
    """Also where no search links them: a reached node gives up a link to one that has another path."""
    _sparse(folder)
    if not searched:
        monkeypatch.setattr(graph, "relink", lambda staged, nodes: 0)
    assert run_job(folder, "repair", deep=True, apply=True).decision == "repaired"
    assert run_job(folder, "verify", deep=True).decision == "healthy"
    check_sound(folder)


@pytest.mark.long
def test_rows_that_no_node_can_link_to_are_not_called_repaired(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _sparse(folder)
    monkeypatch.setattr(graph, "link_unreached", lambda staged: 3)
    report = run_job(folder, "repair", deep=True, apply=True)
    assert (report.decision, report.exit_code) == ("incomplete", 9)
    assert "3 rows remain without a path" in report.describe()
    assert "catchup URI --rebuild" in report.describe()


def test_lost_slots_and_epochs_beyond_the_end(made: str) -> None:
    with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
        store.execute("UPDATE lmd_metadata SET slot_count = slot_count + 2")
    with open(f"{made}/graph.lmd", "ab") as graph:
        graph.write(bytes(2 * 4096))
    run_job(made, "repair", apply=True)
    assert run_job(made, "verify", deep=True).to_json()["counts"] == {"slot_lost": 2}


def test_a_small_index_is_exact(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16)
    assert run_job(folder, "verify", deep=True).to_json()["checked"]["recall"] is None
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(50), vectors[:50])
    assert run_job(folder, "verify", deep=True).to_json()["checked"]["recall"] == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_recall_counts_distances(folder: str, metric: str) -> None:
    """Of equal vectors, which of them a search returns makes no difference."""
    with lm_diskann.create(folder, dimension=16, metric=metric, R=8, L=40) as index:
        index.insert(np.arange(1300), np.ones((1300, 16), np.float32))
        assert not index.exact
    assert run_job(folder, "verify", deep=True).to_json()["checked"]["recall"] == 1
