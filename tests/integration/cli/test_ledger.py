"""A run by hand is recorded in the history of this machine's service, and tells what the next one costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops.core.registry import open_table
from memwal_ops.core.run import run_job
from memwal_ops.core.usage import Measurement
from memwal_ops.supervisor.state.history import BY_HAND, History
from tests.support.run_cli import run_here


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    file, path = tmp_path / "config.yaml", str(tmp_path / "history.sqlite")
    file.write_text(f"history: {{path: {path}}}\ntables: [{{uri: {tmp_path}/t.lance}}]\n")
    monkeypatch.setenv("MEMWAL_OPS_CONFIG", str(file))
    made = History.open(path)
    yield made
    made.close()


def append(uri: str, times: int) -> None:
    for _ in range(times):
        lance.write_dataset(pa.table({"id": range(100)}), uri, mode="append")


def test_a_run_by_hand(history: History, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "t.lance")
    append(uri, 10)
    assert run_here(capfd, "compact", uri, "--dry-run", "--json").document["cost"] is None, "no run is known"
    assert not history.runs(), "a plan is no run"
    assert run_here(capfd, "compact", uri).code == 0
    (run,) = history.runs()
    assert (run["table"], run["why"], run["outcome"], run["decision"]) == (uri, BY_HAND, "succeeded", "compacted")
    assert run["achieved"] == {"fragments": 9, "rows_rewritten": 1000}
    assert (run["used"]["store"], run["used"]["work"]) == ("local", 1000)
    assert run["used"]["requests"]["get"] > 10
    assert run["used"]["bytes_written"] > 0
    assert run["used"]["peak_memory"] > 10 << 20
    append(uri, 10)
    cost = run_here(capfd, "compact", uri, "--dry-run", "--json").document["cost"]
    assert (cost["runs"], cost["money"], cost["error"]) == (1, 0, None)
    words = " ".join(run_here(capfd, "compact", uri, "--dry-run").out.split())
    assert "A run costs about " in words
    assert words.endswith("by the last run.")


def test_a_run_by_hand_that_fails(history: History, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "t.lance")
    append(uri, 1)
    assert run_here(capfd, "expire", uri, "--version", "99", "--apply").code != 0
    (run,) = history.runs(failed=True)
    assert (run["job"], run["outcome"]) == ("expire", "failed")
    assert run["error"]["message"]


def test_without_a_history_nothing_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMWAL_OPS_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    append(uri := str(tmp_path / "t.lance"), 2)
    assert run_here(capfd, "compact", uri).code == 0
    assert not (tmp_path / "state").exists()


def test_the_requests_of_a_run_are_those_that_the_server_counts() -> None:
    """Ours and pylance's, within a tenth: a few of pylance's are made by readers that do not count."""
    with counting_server() as (options, counts):
        uri = f"s3://{BUCKET}/ledger.lance"
        make(uri, Shape(base=2_000, regions=1, generations=3, rows=200), storage_options=options)
        for job in ("merge", "catchup", "compact", "snapshot", "gc"):
            counts.clear()
            measurement = Measurement()
            run_job(table := open_table(uri, options), job, apply=True)
            used = measurement.used(table.location)
            counted = sum(used["requests"].values())
            assert used["store"] == "s3"
            assert abs(counted - counts.total()) <= max(2, counts.total() * 0.1), (job, used, counts)
