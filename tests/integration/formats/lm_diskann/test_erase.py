"""erase on an index folder: no byte of a deleted row is in any file, and all other rows are found."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.context import RunContext
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.core.options import EraseOptions
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann.files import lowest_reader
from memwal_ops.formats.lm_diskann.jobs import erase as job
from memwal_ops.formats.lm_diskann.library import Index
from tests.support.lm_diskann.decoder import Folder
from tests.support.lm_diskann.folders import Killed, check_rows, check_sound
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# 17 and 900 are in the graph; 900 was deleted before; 1205 is in a delta block; 30 was replaced.
GONE = [17, 900, 1205]
WHERE = "row_id IN (17, 900, 1205)"


@pytest.fixture
def uri(made: str, vectors: NDArray[np.float32]) -> str:
    with Index(made) as index:
        index.delete([900])
        index.insert(np.arange(1200, 1210), vectors[1200:1210])
        index.insert([30], vectors[2000:2001])
    return made


@pytest.fixture
def left(vectors: NDArray[np.float32]) -> dict[int, NDArray[np.float32]]:
    rows = {number: vectors[number] for number in range(1210) if number not in GONE}
    return {**rows, 30: vectors[2000]}


def erase(uri: str, **options: Any) -> Any:
    return run_job(uri, "erase", **{"where": WHERE, "apply": True, **options})


def holders(uri: str, vectors: NDArray[np.float32], replaced: tuple[int, ...] = (30,)) -> set[str]:
    """Files that have 16 bytes of the vector of a row that must be gone, raw or as DuckDB reads them."""
    wanted = [vectors[number][:4].tobytes() for number in [*GONE, *replaced]]
    found = set()
    for path in Path(uri).rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if path.suffix == ".duckdb":
            with duckdb.connect(str(path), read_only=True) as db:
                data += b"".join(one for (one,) in db.execute("SELECT data FROM lmd_delta_blocks").fetchall())
                rows = [one for (one,) in db.execute("SELECT row_id FROM lmd_lookup").fetchall()]
                data += vectors[[one for one in rows if one in GONE]][:, :4].tobytes()
        if any(one in data for one in wanted):
            found.add(path.name if path.parent == Path(uri) else path.parent.name)
    return found


def test_no_byte_of_a_vector_is_left(
    uri: str, vectors: NDArray[np.float32], left: dict[int, NDArray[np.float32]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert holders(uri, vectors) >= {"graph.lmd", "diskann_store.duckdb", "view"}
    codes = _codes(uri)
    plan = run_job(uri, "erase", where=WHERE)
    assert (plan.decision, plan.living) == ("planned", 2)
    assert {one.kind for one in plan.holders} >= {"node", "delta block", "store", "view"}
    report = erase(uri, certificate=f"{uri}.json")
    assert report.decision == "erased", report.describe()
    assert report.done["rows_deleted"] == 2
    assert holders(uri, vectors) == set()
    graph = Path(uri, "graph.lmd").read_bytes()
    assert not [number for number, code in codes.items() if code in graph], "compressed vectors in neighbours"
    check_rows(uri, left)
    check_sound(uri)
    assert erase(uri).done == {}
    assert run_here(capfd, "erase", "--check", f"{uri}.json", "--json").document["decision"] == "valid"
    with Index(uri) as index:
        index.insert([5000], vectors[3000:3001])
    run_job(uri, "maintain", apply=True)
    assert run_job(uri, "erase", check=f"{uri}.json").decision == "valid", "files that are written in place"
    assert run_job(uri, "erase", where="row_id = 1").decision == "planned"


def _codes(uri: str) -> dict[int, bytes]:
    """The compressed vectors of deleted rows: those in other blocks, which link to them."""
    folder = Folder(uri)
    graph = Path(uri, "graph.lmd").read_bytes()
    with duckdb.connect(f"{uri}/diskann_store.duckdb", read_only=True) as db:
        nodes = dict(db.execute("SELECT node_id, row_id FROM lmd_lookup WHERE row_id IN (17, 900)").fetchall())
        slots = [slot for (slot,) in db.execute("SELECT slot FROM lmd_slots").fetchall()]
    found: dict[int, bytes] = {}
    for slot in slots:
        block = folder.block(graph[slot * folder.block_size : (slot + 1) * folder.block_size])
        for link, code in zip(block["links"], block["codes"].reshape(-1, folder.code_bytes), strict=True):
            if link in nodes:
                found[nodes[link]] = code.tobytes()
    assert found.keys() == {17, 900}
    return found


@pytest.mark.long
def test_all_that_was_deleted_whenever_that_was(uri: str, vectors: NDArray[np.float32]) -> None:
    with Index(uri) as index:
        index.delete([17, 1205])
    assert erase(uri, where=None, within="30d").decision == "erased"
    assert holders(uri, vectors) == set()


@pytest.mark.long
def test_a_reader_and_a_hold_are_named(uri: str, vectors: NDArray[np.float32]) -> None:
    hold = take_hold(open_table(uri), open_table(uri).revision, timedelta(hours=1), note="a notebook")
    with Index(uri, read_only=True) as reader:
        before = reader.epoch
        with Index(uri) as index:
            index.delete([17])
        report = erase(uri)
        assert lowest_reader(uri) == before
        assert (report.decision, report.exit_code) == ("held", 63)
        assert {one.kind for one in report.holders if one.blocks} == {"reader", "hold"}
        assert f"{hold.number} of epoch" in report.describe()
    release_hold(open_table(uri), hold.number)
    assert erase(uri).decision == "erased"
    assert holders(uri, vectors) == set()


def test_a_view_without_its_log_is_made_anew(uri: str, vectors: NDArray[np.float32]) -> None:
    for path in Path(uri, "view").glob("*.log"):
        path.unlink()
    assert erase(uri, apply=False).decision
    assert erase(uri).decision == "erased"
    assert not holders(uri, vectors)


def test_bad_input_is_refused(uri: str) -> None:
    with pytest.raises(InvalidUsageError, match="does not apply to an index folder"):
        erase(uri, where="name = 'x'")
    with pytest.raises(InvalidUsageError, match="no column of times"):
        run_job(uri, "erase", options=EraseOptions.read({"within": "30d", "ttl": {"column": "at", "keep": "1d"}}))
    Path(uri, "export.csv").write_text("a,b")
    assert {one.kind for one in erase(uri).holders} == {"unrecognized"}


@pytest.mark.long
def test_rows_of_a_followed_table_are_deleted_there(
    folder: str, tmp_path: Path, vectors: NDArray[np.float32], capfd: pytest.CaptureFixture[str]
) -> None:
    table = str(tmp_path / "t.lance")
    rows = pa.table(
        {"id": pa.array(range(1210), pa.int64()), "v": pa.FixedSizeListArray.from_arrays(vectors[:1210].ravel(), 16)}
    )
    lance.write_dataset(rows, table)
    made = ["init", folder, "--format", "lm_diskann", "--table", table, "--column", "v", "--key", "id"]
    assert run_here(capfd, *made, "--links", "8").code == 0
    run_job(folder, "catchup")
    report = erase(folder)
    assert report.decision == "held"
    assert [one.why for one in report.holders] == [f"living in {table}: erase them there first"]
    where = "id IN (17, 900, 1205)"
    plan = run_job(table, "erase", where=where)
    assert [one.name for one in plan.holders if one.kind == "index folder"] == [folder]
    now = {"where": where, "older_than": "0s", "allow_unsafe": True}
    assert [one.blocks for one in plan.holders if one.kind == "index folder"] == [True], "a record names no folder"
    assert f"give --follower {folder}" in "".join(one.why for one in plan.holders)
    elsewhere = run_job(table, "erase", where=where, followers=[str(tmp_path / "other")])
    assert "no record in the table has it" in "".join(one.why for one in elsewhere.holders)
    now["followers"] = [folder]
    with Index(folder, read_only=True):
        report = run_job(table, "erase", now, apply=True)
        assert report.decision == "held"
        assert {one.kind for one in report.holders if one.blocks} == {"reader"}
    report = run_job(table, "erase", now, apply=True)
    assert report.decision == "erased", report.describe()
    assert report.done["index_folders_erased"] == 1
    assert holders(folder, vectors, replaced=()) == set()
    shutil.move(folder, f"{folder}.elsewhere")
    assert run_job(table, "erase", where=where).decision == "erased", "its record says so"
    plan = run_job(table, "erase", where="id = 18")
    assert [one.blocks for one in plan.holders if one.kind == "index folder"] == [True]


def steps_of(uri: str) -> list[str]:
    names: list[str] = []

    def step(name: str, act: Callable[[], Any]) -> Any:
        names.append(name)
        return act()

    job.apply(replace(open_table(uri), steps=step), EraseOptions(where=WHERE), RunContext())
    return names


@pytest.mark.long
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.campaign)])
def test_killed_before_a_step_and_run_again(
    every: int, uri: str, tmp_path: Path, vectors: NDArray[np.float32], left: dict[int, NDArray[np.float32]]
) -> None:
    names = steps_of(shutil.copytree(uri, str(tmp_path / "whole")))
    assert len({*names}) > 10
    for name in sorted({*names})[::every]:
        at = len(names) - 1 - names[::-1].index(name)
        copy = shutil.copytree(uri, str(tmp_path / f"{at}.lmd"))
        count = 0

        def step(_: str, act: Callable[[], Any], at: int = at) -> Any:
            nonlocal count
            count += 1
            if count > at:
                raise Killed
            return act()

        with suppress(Killed):
            job.apply(replace(open_table(copy), steps=step), EraseOptions(where=WHERE), RunContext())
        assert count == at + 1
        report = erase(copy)
        assert report.decision == "erased", f"{name}: {report.describe()}"
        assert holders(copy, vectors) == set(), name
        check_rows(copy, left)
        shutil.rmtree(copy)
    assert not os.path.exists(str(tmp_path / "0.lmd"))
