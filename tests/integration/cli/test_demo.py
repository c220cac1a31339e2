"""``memwal-ops demo --format``: each format's story ends well, and touches nothing that is there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.run import run_job
from memwal_ops.errors import InvariantViolatedError
from memwal_ops.formats.lance.jobs.demo import plain
from tests.support.run_cli import run_here
from tests.support.waiting import until

NEEDS_EXTRA = pytest.mark.skipif(find_spec("numba") is None, reason="the extra memwal-ops[lm-diskann] is not installed")
STORIES = [
    pytest.param("zeppelin", "items", id="zeppelin"),
    pytest.param("lm_diskann", "vectors.lmd", id="lm-diskann", marks=NEEDS_EXTRA),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "table"), STORIES)
def test_the_story_ends_well(name: str, table: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capfd, "demo", "--format", name, "--dir", str(tmp_path / "new"))
    assert outcome.code == 0
    assert "4. THE PROOF" in outcome.out
    uri = str(tmp_path / "new" / table)
    assert open_table(uri).format.name == name
    assert run_job(uri, "merge").decision == "nothing_to_merge"
    again = run_here(capfd, "demo", "--format", name, "--dir", str(tmp_path / "new"))
    assert again.code == 2
    assert f"{uri} exists already" in again.err


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "table"), STORIES)
def test_without_the_merge_something_waits(
    name: str, table: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capfd, "demo", "--format", name, "--no-merge", "--dir", str(tmp_path))
    assert outcome.code == 0
    assert f"memwal-ops merge {tmp_path / table}" in outcome.out
    assert run_job(str(tmp_path / table), "merge").decision == "merged"


def test_a_layout_that_the_format_has_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capfd, "demo", "--format", "zeppelin", "--layout", "region", "--dir", str(tmp_path / "new"))
    assert outcome.code == 2
    assert "no layout region" in outcome.err
    assert not (tmp_path / "new").exists()


def figures(comparison: str) -> dict[str, list[float]]:
    """The rows of the demo's table that count something, with the numbers of its three states."""
    rows = re.findall(r"^ {3}(\S.*?) {2,}([\d,]+) +([\d,]+) +([\d,]+)$", comparison, re.MULTILINE)
    return {name: [int(one.replace(",", "")) for one in counts] for name, *counts in rows}


@pytest.mark.long
def test_a_table_as_lancedb_leaves_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What it prints is what the table is: afterwards queries need fewer reads, and a week later it is small."""
    outcome = run_here(capfd, "demo", "--layout", "none", "--dir", str(tmp_path / "db"))
    assert outcome.code == 0, outcome.err
    uri = str(tmp_path / "db/documents.lance")
    dataset = lance.dataset(uri)
    shown = figures(outcome.out.partition("5. BEFORE AND AFTER")[2])
    assert shown["fragments"][2] == len(dataset.get_fragments())
    assert shown["versions"][2] == len(dataset.versions())
    assert shown["files"][2] == sum(path.is_file() for path in Path(uri).rglob("*"))
    for name in ("fragments", "versions", "files"):
        assert shown[name][0] > 4 * shown[name][2], name
    queries = [name for name in shown if name.endswith("reads")]
    assert len(queries) == 3
    for name in queries:
        assert shown[name][0] > 2 * shown[name][1], name
    assert f"{dataset.count_rows():,} documents, each with its last text" in outcome.out
    (commits,) = re.findall(r"ok  (\d+) commits? of a writer", outcome.out)
    assert dataset.count_rows(filter="text LIKE '% during the maintenance'") == 20 * int(commits)
    assert max(map(len, outcome.out.splitlines())) <= 110 + len(uri)
    again = run_here(capfd, "demo", "--layout", "none", "--dir", str(tmp_path / "db"))
    assert (again.code, "exists already" in again.err) == (2, True)


def test_a_lost_row_is_no_proof(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """The demo compares rows, and believes no command."""
    monkeypatch.setattr(plain, "_DOCUMENTS", 1_000)
    monkeypatch.setattr(plain, "_DAYS", 3)
    monkeypatch.setattr(plain, "_command", lambda *_: str(lance.dataset(uri).delete("id = 7")))
    uri = str(tmp_path / "documents.lance")
    outcome = run_here(capfd, "demo", "--layout", "none", "--no-merge", "--dir", str(tmp_path))
    assert outcome.code == InvariantViolatedError.exit_code
    assert "does not have the rows that were written" in outcome.err


def test_a_slow_machine_makes_the_writer_write_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its small files would outnumber those that maintenance joined."""
    made = plain._Documents(str(tmp_path / "documents.lance"))
    lance.write_dataset(made._new(range(200), "as imported"), made.uri)
    monkeypatch.setattr(plain, "_PAUSE", 0)
    monkeypatch.setattr(plain, "_command", lambda *_: until(lambda: made.commits.total() >= 2 * plain._MOST_PAIRS))
    _, commits = plain._beside_a_writer(made, "maintain")
    assert commits == 2 * plain._MOST_PAIRS


@pytest.mark.long
def test_what_it_leaves_without_maintenance(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with work for the jobs, and commands that do it."""
    monkeypatch.setattr(plain, "_DOCUMENTS", 1_000)
    monkeypatch.setattr(plain, "_DAYS", 6)
    outcome = run_here(capfd, "demo", "--layout", "none", "--no-merge", "--dir", str(tmp_path))
    assert outcome.code == 0, outcome.err
    uri = str(tmp_path / "documents.lance")
    before = read_rows(uri)
    (line,) = [one for one in outcome.out.splitlines() if f"maintain {uri}" in one]
    assert run_here(capfd, *line.split("   ")[1].split()[1:]).code == 0
    assert run_here(capfd, "maintain", uri, "--apply").code == 0
    assert len(lance.dataset(uri).get_fragments()) <= 2
    assert read_rows(uri) == before


def read_rows(uri: str) -> Any:
    return lance.dataset(uri).to_table().sort_by("id")
