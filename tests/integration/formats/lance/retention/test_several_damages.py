"""Of several files that are missing or damaged, each report says how many, and names the first."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops.core.holds import take_hold
from memwal_ops.core.registry import open_table
from memwal_ops.core.run import run_job
from memwal_ops.errors import TableCorruptError, VersionGoneError
from tests.support.run_cli import run_here


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[str, list[Path]]:
    """A table of five data files, and three of them, which are still there."""
    uri = str(tmp_path / "t.lance")
    for number in range(5):
        lance.write_dataset(pa.table({"id": range(number * 10, number * 10 + 10)}), uri, mode="append")
    return uri, sorted(Path(uri, "data").iterdir())[:3]


def test_several_missing_files_are_counted(damaged: tuple[str, list[Path]], capfd: pytest.CaptureFixture[str]) -> None:
    uri, files = damaged
    for file in files:
        file.unlink()
    said = f"3 data files are missing, the first is data/{files[0].name}"
    for job, apply in (("compact", True), ("compact", False), ("expire", True)):
        with pytest.raises(TableCorruptError) as refused:  # a plan, too: it promised what no run could do
            run_job(uri, job, apply=apply)
        assert str(refused.value).startswith(said), job
    assert f"PROBLEM: {said}, and the newest version needs them." in " ".join(
        run_here(capfd, "inspect", uri).out.split()
    )
    nagios = run_here(capfd, "check", "--nagios", uri)
    named = f"data/{files[0].name} (the first of 3) is missing or damaged"
    assert (nagios.code, named in nagios.out) == (2, True), nagios.out
    table = open_table(uri, {})
    with pytest.raises(VersionGoneError, match="the first of 3"):
        take_hold(table, table.revision, timedelta(hours=1))


def test_one_that_is_damaged_among_the_missing_says_how(damaged: tuple[str, list[Path]]) -> None:
    uri, files = damaged
    size = files[0].stat().st_size
    files[0].write_bytes(files[0].read_bytes()[:-10])
    files[1].unlink()
    with pytest.raises(TableCorruptError) as refused:
        run_job(uri, "expire")
    said = f"2 data files are missing or damaged, the first is data/{files[0].name}, which has {size - 10:,} bytes"
    assert str(refused.value).startswith(said)
    files[0].unlink()
    Path(uri, "data", files[1].name).write_bytes(b"")
    with pytest.raises(TableCorruptError, match="2 data files are missing or damaged"):
        run_job(uri, "expire")
