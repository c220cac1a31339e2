"""Tables whose manifests have V1 names: which jobs work on them (docs/jobs.md, what no job touches)."""

from __future__ import annotations

import uuid
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import UnsupportedFeatureError
from tests.support.tables.damage import make_v1_named_table

_KEY = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})


def rows(first: int) -> pa.Table:
    return pa.table([pa.array(range(first, first + 10), pa.int64())], schema=pa.schema([_KEY]))


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A plain table of three fragments."""
    made = str(tmp_path / "t.lance")
    make_v1_named_table(made, rows(0))
    for first in (10, 20):
        lance.write_dataset(rows(first), made, mode="append")
    return made


def test_compact_and_expire_act_on_a_plain_table(uri: str) -> None:
    assert run_job(uri, "compact").decision == "compacted"
    assert run_job(uri, "expire", older_than=timedelta(0), allow_unsafe=True, apply=True).decision == "expired"
    table = lance.dataset(uri)
    assert len(table.get_fragments()) == 1
    assert len(table.versions()) == 1
    assert sorted(table.to_table()["id"].to_pylist()) == list(range(30))


def test_a_merge_is_refused_and_names_the_command(uri: str) -> None:
    dataset = lance.dataset(uri)
    dataset.initialize_mem_wal()
    assert run_job(uri, "compact").decision == "compacted", "beside a log, too"
    writer = dataset.mem_wal_writer(str(uuid.uuid4()))
    writer.put(rows(5))
    writer.close()
    with pytest.raises(UnsupportedFeatureError, match="V1 scheme") as raised:
        run_job(uri, "merge")
    assert "migrate_manifest_paths_v2" in raised.value.remedy
    lance.dataset(uri).migrate_manifest_paths_v2()
    assert run_job(uri, "merge").decision == "merged"
