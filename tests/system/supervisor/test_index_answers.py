"""The supervisor verifies a table with ``answers``: metrics and status have what its indexes answered, also later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from tests.support.service import configure, service
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

VERIFY = "verify: {schedule: {every: 1d}, options: {answers: true}}"


def answers(running: Any) -> list[dict[str, Any]]:
    tables = running.get("/api/v1/status")["tables"]
    return list(tables[0]["answers"]) if tables else []


def test_metrics_and_status_have_answers(tmp_path: Path) -> None:
    uri = str(tmp_path / "tables" / "t.lance")
    dataset = lance.write_dataset(pa.table({"n": range(500)}), uri)
    dataset.create_scalar_index("n", "BTREE", name="by_n")
    config = configure(tmp_path, VERIFY)
    for start in (1, 2):  # the second time from the history
        with service(config) as running:
            until(lambda ready=start: len(running.events("ready")) == ready)  # one log for both
            [one] = until(lambda: answers(running))
            assert (one["index"], one["type"], one["wrong"]) == ("by_n", "BTree", 0)
            text = running.get("/metrics")
            assert 'memwal_ops_index_wrong_answers{index="by_n",table="t"} 0.0' in text
            assert 'memwal_ops_index_segments{index="by_n",table="t"} 1.0' in text
