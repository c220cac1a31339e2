"""Rows are mapped to nodes again by the row ids in the blocks, if these prove it; else a person decides."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.store import NAME
from tests.support.lm_diskann.folders import check_rows, check_sound, partly_merged
from tests.support.run_cli import contents, run_here

if TYPE_CHECKING:
    from collections.abc import Callable

GONE = 7


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    partly_merged(template, vectors)
    with Index(template) as index:
        index.insert([5], vectors[400:401])  # a new node of a row that another node had
        index.delete(np.array([GONE]))
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


@pytest.fixture
def rows(vectors: np.ndarray) -> dict[int, np.ndarray]:
    return {row: vectors[400 if row == 5 else row] for row in range(340) if row != GONE}


def harm(folder: str, *statements: str) -> None:
    with duckdb.connect(f"{folder}/{NAME}") as store:
        for statement in statements:
            store.execute(statement)


def lookup(folder: str) -> Any:
    with duckdb.connect(f"{folder}/{NAME}", read_only=True) as store:
        return store.execute("SELECT row_id, node_id, removed_epoch FROM lmd_lookup ORDER BY ALL").fetchall()


def checks(folder: str) -> set[str]:
    return {one["check"] for one in run_job(folder, "verify").to_json()["findings"]}


LIVE = "removed_epoch IS NULL"
FAULTS = {
    "another row": ({"row_differs"}, "UPDATE lmd_lookup SET row_id = 9000 WHERE row_id = 11"),
    "swapped": (
        {"row_differs"},
        "UPDATE lmd_lookup SET row_id = CASE row_id WHEN 12 THEN 13 ELSE 12 END WHERE row_id IN (12, 13)",
    ),
    "lost": ({"row_missing", "count_differs"}, "DELETE FROM lmd_lookup WHERE row_id BETWEEN 20 AND 25"),
    "another node": (
        {"row_differs", "row_missing"},
        f"UPDATE lmd_lookup SET node_id = 31 WHERE row_id = 30 AND {LIVE}",
    ),
    "no node": ({"row_without_block", "row_missing"}, "UPDATE lmd_lookup SET node_id = 99999 WHERE row_id = 40"),
    "a node beyond 63 bits": (
        {"row_without_block", "row_missing"},
        "UPDATE lmd_lookup SET node_id = 9223372036854775813 WHERE row_id = 40",
    ),
    "twice": ({"count_differs"}, "INSERT INTO lmd_lookup SELECT * FROM lmd_lookup WHERE row_id = 50"),
    "deleted row": (
        {"tombstone_differs", "count_differs"},
        f"UPDATE lmd_lookup SET removed_epoch = NULL WHERE row_id = {GONE}",
    ),
    "live row": (
        {"tombstone_differs", "tombstone_missing", "count_differs"},
        "UPDATE lmd_lookup SET removed_epoch = 3 WHERE row_id = 60",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_rows_are_mapped_again(
    made: str, vectors: np.ndarray, rows: dict[int, np.ndarray], fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = lookup(made)
    expected, statement = FAULTS[fault]
    harm(made, statement)
    assert lookup(made) != before
    assert checks(made) == expected
    was = contents(made)
    planned = run_here(capfd, "repair", made, "--json").document
    assert planned["decision"] == "planned"
    assert [one["fix"] for one in planned["fixes"]] == ["map the rows again by the row ids in their blocks"]
    assert {path: one for path, one in contents(made).items() if path != "writer.lock"} == {
        path: one for path, one in was.items() if path != "writer.lock"
    }
    done = run_here(capfd, "repair", made, "--apply", "--json").document
    assert (done["decision"], done["decisions"]) == ("repaired", [])
    assert lookup(made) == before
    check_sound(made)
    check_rows(made, rows)
    with Index(made) as index:
        some = np.array([11, 12, 22, 30, 40, 50, 60])
        assert index.search(vectors[some], 1, allow=some)[0][:, 0].tolist() == some.tolist()
        assert index.delete(some) == len(some)
    check_sound(made)
    assert run_here(capfd, "repair", made, "--apply", "--json").document["decision"] == "nothing_to_repair"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("DELETE FROM lmd_slots WHERE node_id = 200", "some may be lost"),
        ("UPDATE lmd_metadata SET live = live + 1", "some may be lost"),
        ("DELETE FROM lmd_tombstoned_nodes", "differ about which rows were deleted"),
    ],
)
def test_what_blocks_do_not_prove_is_for_a_person(made: str, statement: str, why: str) -> None:
    harm(made, FAULTS["another row"][1], statement)
    before = lookup(made)
    report = run_job(made, "repair", apply=True).to_json()
    assert report["decision"] == "decision_needed"
    assert report["fixes"] == []
    assert why in {one["check"]: one["why"] for one in report["decisions"]}["row_differs"]
    assert lookup(made) == before


@pytest.mark.long
def test_killed_at_each_step(made: str, rows: dict[int, np.ndarray]) -> None:
    harm(made, *(FAULTS[one][1] for one in ("another row", "lost", "no node", "twice")))
    backup, last = f"{made}.backup", 0
    shutil.copytree(made, backup)

    def stepper(last: int) -> Callable[[str, Callable[[], Any]], Any]:
        left = last

        def step(_: str, act: Callable[[], Any]) -> Any:
            nonlocal left
            for do in (act, lambda: None):
                if left == 0:
                    raise Killed
                left -= 1
                do()

        return step

    while True:
        table: Any = replace(open_table(made), steps=stepper(last))  # type: ignore[type-var]
        try:
            run_job(table, "repair", apply=True)
            break
        except Killed:
            last += 1
        run_job(made, "repair", apply=True)
        check_sound(made)
        check_rows(made, rows)
        shutil.rmtree(made)
        shutil.copytree(backup, made)
    assert last >= 6
