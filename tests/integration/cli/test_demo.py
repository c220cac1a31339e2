"""``memwal-ops demo --format``: each format's story ends well, and touches nothing that is there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from memwal_ops import open_table
from memwal_ops.core.run import run_job
from tests.support.run_cli import run_here

NEEDS_EXTRA = pytest.mark.skipif(find_spec("numba") is None, reason="the extra memwal-ops[lm-diskann] is not installed")
STORIES = [
    pytest.param("zeppelin", "items", id="zeppelin"),
    pytest.param("lm_diskann", "vectors.lmd", id="lm-diskann", marks=NEEDS_EXTRA),
]


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
