"""What runs and threads share of a schema history."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import open_table
from memwal_ops.errors import SchemaProjectionError
from memwal_ops.formats.lance.files.version_files import read_version_manifest, version_path
from memwal_ops.formats.lance.retention.schema_history import Flush, SchemaHistory
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table


@pytest.fixture
def table(tmp_path: Path) -> Table:
    made = PlainTable(str(tmp_path / "t.lance")).create()
    for _ in range(4):
        made.append()
    return open_table(made.uri)


def test_the_newest_known_version_is_gone_while_threads_ask(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soaks on a store that fails met it: one thread dropped what all had read while another looked it up."""
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


def at_first(table: Table) -> Flush:
    """A flush at the first version."""
    time = read_version_manifest(table.store, 1, table.naming).manifest.timestamp.ToNanoseconds()
    return Flush(by_writer=time, by_store=time)


def test_a_manifest_of_another_version(table: Table) -> None:
    """What follows the parents of versions went in a circle, for ever: the parent of version 3 was version 3."""
    number = table.version - 2
    later = table.store.get(version_path(number + 1, table.naming))
    Path(table.location.uri, version_path(number, table.naming)).write_bytes(later)
    with pytest.raises(SchemaProjectionError, match=f"contains version {number + 1} instead of {number}"):
        SchemaHistory(table).is_same_field(0, at_first(table), renamed=False)


@pytest.mark.parametrize("restored", [3, 4, 1000])
def test_a_restore_of_a_later_version(table: Table, restored: int) -> None:
    """Nor may a damaged transaction lead back to where the search came from: whose field it is, is not known."""
    found = read_version_manifest(table.store, 3, table.naming)
    transaction = table_pb2.Transaction()
    transaction.restore.version = restored
    data = encode_version_manifest(replace(found, transaction=transaction))
    Path(table.location.uri, version_path(3, table.naming)).write_bytes(data)
    assert SchemaHistory(table)._same(0, 1) is None
