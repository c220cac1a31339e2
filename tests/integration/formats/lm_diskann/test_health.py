"""What every command looks at before it calls a folder healthy: each file's existence and length, and the view."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import TableCorruptError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.files import check_store_file
from memwal_ops.formats.lm_diskann.library import Index
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_sound, partly_merged
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from collections.abc import Callable

STORE = "diskann_store.duckdb"


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    partly_merged(template, vectors)
    run_job(template, "merge")
    with Index(template) as index:
        index.delete([3])
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


def newest(folder: str, suffix: str) -> Path:
    return max(Path(folder, "view").glob(f"*.{suffix}"))


def cut(path: Path, share: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


VIEW: dict[str, Callable[[str], None]] = {
    "no view": lambda folder: shutil.rmtree(f"{folder}/view"),
    "no CURRENT": lambda folder: Path(folder, "view/CURRENT").unlink(),
    "CURRENT cut": lambda folder: cut(Path(folder, "view/CURRENT")),
    "no base": lambda folder: newest(folder, "base").unlink(),
    "base cut": lambda folder: cut(newest(folder, "base")),
    "base flipped": lambda folder: flip(newest(folder, "base"), 300),
    "base a folder": lambda folder: folder_instead(newest(folder, "base")),
    "no log": lambda folder: newest(folder, "log").unlink(),
    "log cut": lambda folder: cut(newest(folder, "log")),
    "log flipped": lambda folder: flip(newest(folder, "log"), 300),
    "log a folder": lambda folder: folder_instead(newest(folder, "log")),
}
FILES: dict[str, Callable[[str], None]] = {
    "no store": lambda folder: Path(folder, STORE).unlink(),
    "store cut": lambda folder: cut(Path(folder, STORE)),
    "store without its last byte": lambda folder: os.truncate(
        f"{folder}/{STORE}", os.path.getsize(f"{folder}/{STORE}") - 1
    ),
    "store empty": lambda folder: os.truncate(f"{folder}/{STORE}", 0),
    "store a folder": lambda folder: folder_instead(Path(folder, STORE)),
    "graph cut": lambda folder: cut(Path(folder, "graph.lmd")),
    "graph empty": lambda folder: os.truncate(f"{folder}/graph.lmd", 0),
}
CLOSED: dict[str, Callable[[str], None]] = {
    "no graph": lambda folder: Path(folder, "graph.lmd").unlink(),
    "graph a folder": lambda folder: folder_instead(Path(folder, "graph.lmd")),
    "no metadata": lambda folder: Path(folder, "metadata.lmd").unlink(),
    "metadata cut": lambda folder: cut(Path(folder, "metadata.lmd")),
    "metadata flipped": lambda folder: flip(Path(folder, "metadata.lmd"), 50),
}


def test_a_healthy_folder(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(capfd, "check", "--nagios", made).out.startswith("MEMWAL OK - ")
    assert run_here(capfd, "report", made, "--json").document["findings"] == []
    assert run_here(capfd, "inspect", made, "--json").document["blocked"] == []
    assert " 1 ok; " in run_here(capfd, "scan", made).out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("damage", [*VIEW, *FILES])
def test_no_command_calls_it_healthy(made: str, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    {**VIEW, **FILES}[damage](made)
    checked = run_here(capfd, "check", "--nagios", made)
    assert (checked.code, checked.out.partition(" | ")[0]) == (2, "MEMWAL CRITICAL - 1 part blocked")
    [blocked] = run_here(capfd, "inspect", made, "--json").document["blocked"]
    assert blocked["detail"] in " ".join(run_here(capfd, "inspect", made).out.split())
    report = run_here(capfd, "report", made, "--json").document
    first = report["findings"][0]
    assert (first["level"], report["blocked"]) == ("critical", [blocked])
    assert first["do"].startswith(blocked["remedy"])
    assert "nothing more" not in first["do"]
    scanned = run_here(capfd, "scan", made)
    assert "1 table: 1 critical; " in scanned.out
    assert blocked["detail"] in " ".join(scanned.out.split())
    verified = run_here(capfd, "verify", made)
    assert verified.code in {9, 20}, f"{verified.code}: {verified.out}{verified.err}"
    assert "checkout_version" not in f"{verified.out}{verified.err}{checked.out}{blocked}"


@pytest.mark.parametrize("damage", FILES)
def test_no_plan_says_that_it_would(made: str, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    FILES[damage](made)
    [error] = open_table(made).faults
    for job in ("merge", "catchup", "compact", "gc", "snapshot"):
        more = [str(tmp_path / "copy.lmd")] if job == "snapshot" else []
        planned = run_here(capfd, job, made, *more, *([] if job == "gc" else ["--dry-run"]))
        assert (planned.code, planned.out) == (error.exit_code, "")
        assert str(error) in planned.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", VIEW)
def test_merge_publishes_the_view_again_as_its_remedy_says(
    made: str, vectors: np.ndarray, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    VIEW[damage](made)
    [blocked] = open_table(made).summary().blocked
    assert blocked.document["remedy"].startswith("Run memwal-ops merge on the folder")
    merged = run_here(capfd, "merge", made)
    assert merged.code == 0
    assert "The published view was damaged, or behind the store; it was published again." in merged.out
    assert run_here(capfd, "check", "--nagios", made).out.startswith("MEMWAL OK - ")
    check_sound(made)
    with lm_diskann.open(made, read_only=True) as reader:
        assert reader.search(vectors[:5], k=1)[0][:, 0].tolist() == [0, 1, 2, reader.search(vectors[3])[0][0, 0], 4]


@pytest.mark.parametrize("damage", CLOSED)
def test_a_folder_that_cannot_be_opened(made: str, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    CLOSED[damage](made)
    checked = run_here(capfd, "check", "--nagios", made)
    assert (checked.code, checked.out.startswith("MEMWAL CRITICAL - table_corrupt: ")) == (2, True)
    for command in ("inspect", "verify", "report", "scan", "merge", "why"):
        more = {"report": ["--json"], "why": ["nodes/3"]}.get(command, [])
        ended = run_here(capfd, command, made, *more)
        assert ended.code == 9
        assert "checkout_version" not in ended.out + ended.err
        assert ("metadata.lmd of any copy" if "metadata" in damage else "Restore a copy of it") in " ".join(
            (ended.out + ended.err).split()
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("damage", [one for one in CLOSED if "metadata" in one])
def test_metadata_of_any_copy(made: str, tmp_path: Path, damage: str) -> None:
    copy = str(tmp_path / "copy.lmd")
    lm_diskann.snapshot(made, copy)
    with Index(made) as index:
        index.delete([4])
    CLOSED[damage](made)
    with pytest.raises(TableCorruptError):
        run_job(made, "merge")
    shutil.copy(f"{copy}/metadata.lmd", f"{made}/metadata.lmd")
    check_sound(made)


def test_a_folder_is_restored_as_the_remedy_says(made: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy, aside = str(tmp_path / "copy.lmd"), str(tmp_path / "aside.lmd")
    lm_diskann.snapshot(made, copy)
    FILES["store cut"](made)
    os.rename(made, aside)
    assert run_here(capfd, "snapshot", copy, made).code == 0
    check_sound(made)


def test_jobs_leave_a_store_that_is_cut_short_as_it_is(made: str, vectors: np.ndarray) -> None:
    """DuckDB would write to it, and extend it by zeros."""
    with Index(made) as index:
        index.insert([600], vectors[600:601])
        shutil.copytree(made, f"{made}.open")  # with DuckDB's log
    os.truncate(f"{made}.open/{STORE}", 12_288 + 262_144)
    before = Path(f"{made}.open", STORE).read_bytes()
    for job in ("merge", "catchup", "compact", "gc", "verify"):
        with pytest.raises(TableCorruptError, match="its blocks need"):
            run_job(f"{made}.open", job)
    assert Path(f"{made}.open", STORE).read_bytes() == before


def test_a_missing_end_of_any_length_is_noticed(tmp_path: Path) -> None:
    """Also where a checkpoint has cut free blocks off, which the header still counts."""
    path, shorter = tmp_path / "store.duckdb", 0
    with duckdb.connect(str(path), config={"threads": 1}) as database:
        for round_ in range(12):
            database.execute(
                f"CREATE OR REPLACE TABLE t AS SELECT hash(i) h FROM range({(round_ * 7919) % 300_000}) r(i)"
            )
            database.execute("CHECKPOINT")
            check_store_file(str(path))
            whole = path.read_bytes()
            blocks = int.from_bytes(
                max(whole[4104:4144], whole[8200:8240], key=lambda one: one[:8][::-1])[24:32], "little"
            )
            shorter += blocks > (len(whole) - 12_288) // 262_144
            for length in {0, 1, 12_287, 12_288, len(whole) // 2, len(whole) - 262_144, len(whole) - 1}:
                short = tmp_path / "short.duckdb"
                short.write_bytes(whole[: max(0, length)])
                with pytest.raises(TableCorruptError):
                    check_store_file(str(short))
    assert shorter, "no checkpoint left a header that counts more blocks than there are"


def test_verify_reads_all_of_the_store(made: str) -> None:
    """A flipped byte in any block that a table uses; merge and catchup read other columns than the checks."""
    run_job(made, "merge")
    path = Path(made, STORE)
    with duckdb.connect(str(path)) as store:
        tables = [name for (name,) in store.execute("SELECT table_name FROM duckdb_tables()").fetchall()]
        used = {
            block
            for table in tables
            for (block,) in store.execute(f"SELECT block_id FROM pragma_storage_info('{table}')").fetchall()
            if block is not None and block >= 0
        }
    assert used
    whole = path.read_bytes()
    for block in used:
        path.write_bytes(whole)
        flip(path, 12_288 + block * 262_144 + 8 + 40)
        with pytest.raises(TableCorruptError, match="DuckDB cannot read"):
            run_job(made, "verify")
    path.write_bytes(whole)
    assert run_job(made, "verify").decision == "healthy"


def test_plans_notice_commits_that_are_missing(
    made: str, vectors: np.ndarray, capfd: pytest.CaptureFixture[str]
) -> None:
    torn = f"{made}.torn"
    with Index(made) as index:
        index.insert([600], vectors[600:601])
        shutil.copytree(made, torn)  # with DuckDB's log
    os.truncate(f"{torn}/{STORE}.wal", 0)
    scanned = run_here(capfd, "scan", torn)
    shown = " ".join(scanned.out.split())
    assert (scanned.code, "lacks commits" in shown, "1 critical" in shown) == (9, True, True)
    for job in ("gc", "compact"):
        with pytest.raises(TableCorruptError, match="lacks commits"):
            run_job(torn, job, apply=False)
    report = run_here(capfd, "report", torn, "--json").document
    assert [one["level"] for one in report["findings"]] == ["critical"]


def test_a_report_of_a_folder_that_cannot_be_verified(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    flip(Path(made, STORE), 0)
    [finding] = run_here(capfd, "report", made, "--json").document["findings"]
    assert (finding["level"], finding["runbook"]) == ("critical", "runbooks/errors/09-table_corrupt.md")
    assert finding["what"].startswith("It cannot be verified: table_corrupt. DuckDB cannot read ")


@pytest.fixture(scope="module")
def other_graph(built: str, tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray) -> bytes:
    """Of an index of the same shape and history, with other rows."""
    del built  # it compiled the kernels
    folder = tmp_path_factory.mktemp("other") / "index"
    partly_merged(str(folder), vectors[1000:])
    run_job(str(folder), "merge")
    return (folder / "graph.lmd").read_bytes()


def test_the_graph_of_another_index_is_refused(made: str, vectors: np.ndarray, other_graph: bytes) -> None:
    graph = Path(made, "graph.lmd")
    own = graph.read_bytes()
    graph.write_bytes(other_graph)
    with pytest.raises(TableCorruptError, match="not that of this index"):
        lm_diskann.open(made, read_only=True)
    with pytest.raises(TableCorruptError, match="not that of this index"):
        lm_diskann.open(made)
    with pytest.raises(TableCorruptError, match="not that of this index"):
        lm_diskann.snapshot(made, f"{made}.copy")
    for job in ("merge", "catchup", "compact", "gc", "erase", "snapshot"):
        more = (
            {"where": "row_id = 1"} if job == "erase" else {"destination": f"{made}.copy"} if job == "snapshot" else {}
        )
        for apply in (False, True):
            with pytest.raises(TableCorruptError, match="not that of this index"):
                run_job(made, job, apply=apply, **more)
    assert not Path(f"{made}.copy").exists()
    assert "not that of this index" in run_job(made, "inspect").to_json()["blocked"][0]["detail"]
    report = run_job(made, "verify", deep=True)
    assert (report.exit_code, report.to_json()["counts"]) == (9, {"graph_of_another_index": 1})
    graph.write_bytes(own)
    check_sound(made)
    with lm_diskann.open(made, read_only=True) as index:
        assert index.search(vectors[5:6], k=1)[0].tolist() == [[5]]


def test_the_sample_follows_the_graph(made: str, vectors: np.ndarray, other_graph: bytes) -> None:
    for round_ in range(3):
        with lm_diskann.open(made) as index:
            index.insert(np.arange(300), vectors[300 * round_ : 300 * round_ + 300])
            index.delete(np.arange(100 * round_, 100 * round_ + 50))
            index.merge()
        for job in ("catchup", "compact", "gc"):
            run_job(made, job, **({"apply": True} if job == "gc" else {}))
        with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
            valid = "SELECT count(*) FROM lmd_graph_sample SEMI JOIN lmd_slots USING (node_id, slot, from_epoch)"
            assert 8 < (store.execute(valid).fetchone() or (0,))[0] <= 16
    check_sound(made)
    Path(made, "graph.lmd").write_bytes(other_graph.ljust(Path(made, "graph.lmd").stat().st_size, b"\0"))
    with pytest.raises(TableCorruptError, match="not that of this index"):
        lm_diskann.open(made, read_only=True)


def test_folders_of_earlier_releases_get_a_sample(made: str, vectors: np.ndarray, other_graph: bytes) -> None:
    with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
        store.execute("DROP TABLE lmd_graph_sample")
    for job in ("inspect", "verify", "compact"):
        assert run_job(made, job, apply=False).exit_code == 0
    with lm_diskann.open(made) as index:
        index.merge()
    Path(made, "graph.lmd").write_bytes(other_graph.ljust(Path(made, "graph.lmd").stat().st_size, b"\0"))
    with pytest.raises(TableCorruptError, match="not that of this index"):
        lm_diskann.open(made)


def test_one_damaged_block_is_not_another_index(made: str, vectors: np.ndarray) -> None:
    with duckdb.connect(f"{made}/diskann_store.duckdb") as store:
        (slot,) = store.execute("SELECT slot FROM lmd_graph_sample ORDER BY slot").fetchone() or (0,)
    size = View(made).folder.block_size
    with Path(made, "graph.lmd").open("r+b") as file:
        file.seek(slot * size + 32)
        file.write(bytes(8))
    assert run_job(made, "verify").to_json()["counts"] == {"checksum": 1, "row_without_block": 1}
    with lm_diskann.open(made, read_only=True) as index:
        assert len(index) == 339
