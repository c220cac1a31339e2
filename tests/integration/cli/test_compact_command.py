"""``compact`` at the command line: documents, words and exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job
from tests.support.run_cli import contents, run_here, run_process
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    *("decision", "why", "fragments_before", "fragments_after", "fragments_removed", "fragments_added", "engine"),
    *(
        "rows_rewritten",
        "engine_reason",
        "bytes_read",
        "bytes_written",
        "debt",
        "dropped_column_bytes",
        "settings",
        "snapshot_lost",
        "answers",
        "indexed_again",
        "indexes_behind",
        "error",
        "expected_seconds",
    ),
    *("version", "seconds", "commit_conflicts", "lost_races", "run_id"),
}


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    table = Workload(1, regions=2, base_rows=60).create(str(tmp_path / "t.lance")).step(8)
    table.close()
    merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    return table


def test_documents(made: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(made.uri)
    dry = run_here(capfd, "compact", made.uri, "--dry-run", "--json")
    assert (dry.code, dry.document["decision"]) == (0, "dry_run")
    assert dry.document["expected_seconds"] is None, "there is no run history"
    assert 0 < dry.document["bytes_written"] == dry.document["debt"] <= dry.document["bytes_read"]
    assert set(dry.document) == KEYS | {"cost"}
    assert contents(made.uri) == before
    ran = run_here(capfd, "compact", made.uri, "--json")
    assert (ran.code, ran.document["decision"], ran.document["why"]) == (0, "compacted", None)
    assert set(ran.document) == KEYS
    assert (ran.document["fragments_after"], ran.document["rows_rewritten"]) == (1, len(made.expected()))
    assert ran.document["bytes_read"] == dry.document["bytes_read"]
    assert ran.document["bytes_written"] > ran.document["debt"] == 0
    assert ran.document["settings"]["tier_factor"] == {"value": 4, "from": "default"}
    assert ran.document["version"] == open_table(made.uri).version
    again = run_here(capfd, "compact", made.uri, "--json")
    assert (again.code, again.document["decision"]) == (0, "unchanged")
    assert again.document["why"].startswith("In no fragment are more than 19% deleted rows")
    assert again.document["version"] == ran.document["version"]


def test_words(made: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    dry = run_here(capfd, "compact", made.uri, "--dry-run")
    assert dry.code == 0
    assert dry.out.startswith("dry_run: would rewrite 4 fragments into 1 (about), ")
    assert "time unknown: there is no past run" in " ".join(dry.out.split())
    shown = " ".join(run_here(capfd, "inspect", made.uri).out.split())
    assert "The next compact: reads " in shown
    assert "The next catchup: nothing is due: No index lacks enough rows, or has too many segments." in shown
    ran = run_here(capfd, "compact", made.uri, "--target-rows", "1000")
    assert ran.code == 0
    assert ran.out.startswith("compacted: 4 fragments into 1, ")
    again = run_here(capfd, "compact", made.uri, "--target-rows", "1000")
    assert again.code == 0
    assert again.out.startswith("unchanged: nothing was rewritten. In no fragment are more than 19%")
    shown = run_here(capfd, "inspect", made.uri, "--json").document["next_runs"]["compact"]
    assert (shown["debt"], shown["why"][:32]) == (0, "In no fragment are more than 19%")
    last = run_here(capfd, "compact", made.uri, "--dry-run")
    assert (last.code, last.out.startswith("dry_run: would rewrite nothing. In no fragment")) == (0, True)


def test_a_lost_snapshot_is_reported() -> None:
    report = job.CompactReport(
        "compacted", "id", "local", None, 4, 1, 4, 1, 10, 100, 100, 0, {}, 7, 0.1, snapshot_lost=True
    )
    assert "run memwal-ops snapshot" in " ".join(report.describe().split())


def test_the_settings_of_the_table_and_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri, rows = str(tmp_path / "t.lance"), pa.table({"id": range(100)})
    for _ in range(10):
        lance.write_dataset(rows, uri, mode="append")
    config = {"target_rows_per_fragment": 250, "max_bytes_per_file": 1 << 30, "materialize_deletions_threshold": 0.25}
    lance.dataset(uri).update_config({f"lance.compaction.{key}": str(value) for key, value in config.items()})
    assert run_here(capfd, "compact", uri, "--json", "--target-bytes", "1MiB").document["settings"] == {
        "target_rows": {"value": 250, "from": "table"},
        "target_bytes": {"value": 1 << 20, "from": "option"},
        "tier_factor": {"value": 4, "from": "default"},
        "deleted_fraction": {"value": 0.25, "from": "table"},
    }
    assert sorted(one.count_rows() for one in lance.dataset(uri).get_fragments()) == [100, 300, 300, 300]
    lance.dataset(uri).delete("id < 20")
    assert run_here(capfd, "compact", uri, "--json").document["decision"] == "unchanged"
    ran = run_here(capfd, "compact", uri, "--json", "--deleted-fraction", "0", "--tier-factor", "1").document
    assert (ran["rows_rewritten"], lance.dataset(uri).stats.dataset_stats()["num_deleted_rows"]) == (800, 0)


@pytest.mark.parametrize("value", ["many", "0", "-3"])
def test_a_setting_of_the_table_that_is_no_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], value: str
) -> None:
    uri = str(tmp_path / "t.lance")
    for _ in range(4):
        lance.write_dataset(pa.table({"id": range(100)}), uri, mode="append")
    lance.dataset(uri).update_config({"lance.compaction.target_rows_per_fragment": value})
    for more in ([], ["--dry-run"]):
        ran = run_here(capfd, "compact", uri, "--json", *more)
        assert (ran.code, ran.document["error"]["reason"]) == (2, "invalid_usage")
        assert f"target_rows_per_fragment = {value}" in ran.document["error"]["message"]
    assert len(lance.dataset(uri).get_fragments()) == 4
    assert run_here(capfd, "inspect", uri).code == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_usage(made: Workload, capfd: pytest.CaptureFixture[str], value: str) -> None:
    ran = run_here(capfd, "compact", made.uri, "--target-rows", value, "--json")
    assert (ran.code, ran.document["error"]["reason"]) == (2, "invalid_usage")


@pytest.mark.long
def test_nothing_is_printed_but_the_result(tmp_path: Path) -> None:
    """pylance warns of centroids in the statistics of a vector index, once in a process."""
    made = PlainTable(str(tmp_path / "t.lance")).create(rows=300).create_indexes()
    made.delete(*range(100))
    ran = run_process("compact", made.uri)
    assert ran.out.startswith("compacted: ")
    assert ran.err == ""
