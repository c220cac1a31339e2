"""What runs and threads share of a schema history."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from memwal_ops import open_table
from memwal_ops.formats.lance.schema_history import Flush, SchemaHistory
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_newest_known_version_is_gone_while_threads_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soaks on a store that fails met it: one thread dropped what all had read while another looked it up."""
    made = PlainTable(str(tmp_path / "t.lance")).create()
    for _ in range(4):
        made.append()
    table = open_table(made.uri)
    flush = Flush(by_writer=0, by_store=0)
    field_id = table.manifest.manifest.fields[0].id
    expected = SchemaHistory(table).is_same_field(field_id, flush, renamed=False)
    fetched, asked = SchemaHistory._fetched, count()

    def slow(history: SchemaHistory, number: int) -> object:
        time.sleep(0.01)
        gone = number == table.version - 1 and next(asked) < 8
        return None if gone else fetched(history, number)

    monkeypatch.setattr(SchemaHistory, "_fetched", slow)
    again = SchemaHistory(table)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(again.is_same_field, field_id, flush, renamed=False) for _ in range(8)]
        assert {answer.result() for answer in answers} <= {expected, None}
    monkeypatch.undo()
    assert SchemaHistory(table).is_same_field(field_id, flush, renamed=False) == expected
