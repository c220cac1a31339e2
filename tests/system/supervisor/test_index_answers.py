"""The supervisor asks the indexes of each table by default; a bad one is seen wherever an operator looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from memwal_ops.cli.check import table_faults
from memwal_ops.supervisor.observe.findings import CRITICAL
from tests.support.run_cli import run_here
from tests.support.service import configure, service
from tests.support.tables.answering import rebuilt_elsewhere
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def answers(running: Any) -> list[dict[str, Any]]:
    tables = running.get("/api/v1/status")["tables"]
    return list(tables[0]["answers"]) if tables else []


def test_metrics_and_status_have_answers(tmp_path: Path) -> None:
    uri = str(tmp_path / "tables" / "t.lance")
    dataset = lance.write_dataset(pa.table({"n": range(500)}), uri)
    dataset.create_scalar_index("n", "BTREE", name="by_n")
    config = configure(tmp_path, "verify: {schedule: {every: 1d}}")
    for start in (1, 2):  # the second time from the history
        with service(config) as running:
            until(lambda ready=start: len(running.events("ready")) == ready)  # one log for both
            [one] = until(lambda: answers(running))
            assert (one["index"], one["type"], one["wrong"], one["asked_version"]) == ("by_n", "BTree", 0, 2)
            text = running.get("/metrics")
            assert 'memwal_ops_index_wrong_answers{index="by_n",table="t"} 0.0' in text
            assert 'memwal_ops_index_findings{index="by_n",table="t"} 0.0' in text
            assert 'memwal_ops_index_segments{index="by_n",table="t"} 1.0' in text


def test_a_bad_index_is_seen_everywhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing names verify; the index lost 40 of 500 values."""
    uri = str(tmp_path / "tables" / "t.lance")
    lance.write_dataset(pa.table({"n": range(500)}), uri)
    lose = lambda rows: pa.table({"n": [one if one >= 40 else 10_000 + one for one in rows["n"].to_pylist()]})  # noqa: E731
    rebuilt_elsewhere(uri, str(tmp_path / "aside.lance"), "by_n", "n", "BTREE", lose)
    config = configure(tmp_path, "verify:")
    config.write_text(config.read_text().replace("verify:, ", ""))
    monkeypatch.setenv("MEMWAL_OPS_CONFIG", str(config))
    with service(config) as running:
        [one] = until(lambda: answers(running))
        [run] = running.runs(job="verify")
        assert (run["outcome"], run["exit_code"], run["plan"]["options"]) == ("partial", 9, {"answers_only": True})
        assert (one["index"], one["wrong"] > 0) == ("by_n", True)
        assert "index_misses_rows" in {found["check"] for found in one["findings"]}
        text = running.get("/metrics")
        assert f'memwal_ops_index_wrong_answers{{index="by_n",table="t"}} {float(one["wrong"])}' in text
        assert 'memwal_ops_index_findings{index="by_n",table="t"} 0.0' not in text
        assert "The index by_n (BTree) answers wrongly" in running.get("/tables/t")
        faults = [*table_faults(running.get("/api/v1/status")["tables"][0])]
        live = run_here(capfd, "status", "--config", str(config))
    assert (CRITICAL, True) in {(level, "t: the index by_n" in text) for level, text in faults}
    later = run_here(capfd, "status", "--config", str(config))  # from the history: no service runs
    for shown in (live, later):
        assert "CRITICAL t: The index by_n (BTree) answers wrongly" in shown.out
        assert f"memwal-ops catchup {uri} --rebuild --index by_n" in shown.out
    scanned = run_here(capfd, "scan", uri)
    assert scanned.out.startswith("WRONG: t: the index by_n (BTree) answers wrongly")
    assert run_here(capfd, "catchup", uri, "--rebuild", "--index", "by_n").code == 0
    assert run_here(capfd, "verify", uri, "--answers-only").code == 0
