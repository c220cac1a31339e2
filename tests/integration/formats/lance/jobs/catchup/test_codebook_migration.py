"""Replacing a vector index's codebook: one safe step per run, and never a step too early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING
from uuid import UUID

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.errors import InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.codebook import read_codebook
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.catchup.job import migrate
from tests.support.json_types import assert_json
from tests.support.tables.files import Files
from tests.support.tables.indexed import VECTOR_KINDS, check_queries, claims, create, expected, rows, write

if TYPE_CHECKING:
    from pathlib import Path

REGION = UUID("00000000-0000-4000-8000-000000000001")


def maintaining(path: Path, vector: str = "IVF_PQ") -> str:
    """400 rows, writers maintain the vector index."""
    uri = str(path / "t.lance")
    dataset = lance.write_dataset(rows(list(range(400)), "old"), uri)
    dataset.create_index(
        "vector", vector, num_partitions=2, **({"num_sub_vectors": 2} if vector.endswith("PQ") else {})
    )
    lance.dataset(uri).initialize_mem_wal(maintained_indexes=["vector_idx"])
    return uri


def flush(uri: str, numbers: list[int]) -> None:
    with lance.dataset(uri).mem_wal_writer(str(REGION)) as writer:
        writer.put(rows(numbers, "new"))


def step(uri: str) -> str:
    return migrate(open_table(uri), "vector_idx", "fresh").decision


@pytest.mark.long
@pytest.mark.req("S0-113")
@pytest.mark.parametrize("vector", VECTOR_KINDS)
def test_the_whole_way(tmp_path: Path, vector: str) -> None:
    uri = maintaining(tmp_path, vector)
    flush(uri, [1, 2, 3])
    assert step(uri) == "created"
    table = open_table(uri)
    old, new = (base_indexes(table)[name] for name in ("vector_idx", "fresh"))
    assert new.type == old.type
    before, after = (read_codebook(table, index.segments[0]) for index in (old, new))
    assert before.kind == after.kind
    assert before.partitions == after.partitions
    details = {one.name: one.details for one in table.dataset.describe_indices()}
    for name in ("metric_type", "compression", "hnsw"):
        assert details["fresh"].get(name) == details["vector_idx"].get(name)
    assert step(uri) == "maintained"
    assert open_table(uri).index.maintained_indexes == ("vector_idx", "fresh")
    report = migrate(open_table(uri), "vector_idx", "fresh")
    assert_json(report.to_json())
    assert report.decision == "waiting"
    assert [(hold.region_id, hold.generation) for hold in report.holds] == [(REGION, 1)]
    merge.apply(open_table(uri), merge.MergeOptions())
    assert step(uri) == "caught_up"
    flush(uri, [4, 5])
    announced = migrate(open_table(uri), "vector_idx", "fresh", dry_run=True)
    assert announced.holds == (), "this generation has both"
    assert "vector_idx will be dropped" in announced.next
    assert set(base_indexes(open_table(uri))) == {"vector_idx", "fresh"}
    assert step(uri) == "dropped"
    table = open_table(uri)
    assert set(base_indexes(table)) == {"fresh"}
    assert table.index.maintained_indexes == ("fresh",)
    assert "vector_idx" not in claims(table)
    assert step(uri) == "done"
    near = {"column": "vector", "q": rows([7], "old")["vector"][0].as_py(), "k": 3}
    assert table.dataset.to_table(columns=["id"], nearest=near).num_rows == 3
    flush(uri, [6])
    merge.apply(open_table(uri), merge.MergeOptions())
    assert catchup.apply(open_table(uri), catchup.CatchupOptions()).decision == "caught_up"


def test_an_unflushed_log_is_waited_for(tmp_path: Path) -> None:
    uri = maintaining(tmp_path)
    writer = lance.dataset(uri).mem_wal_writer(str(REGION), max_wal_flush_interval_ms=1)
    writer.put(rows([1], "new"))
    assert [step(uri), step(uri)] == ["created", "maintained"]
    report = migrate(open_table(uri), "vector_idx", "fresh")
    assert report.decision == "waiting"
    assert [(hold.region_id, hold.generation) for hold in report.holds] == [(REGION, None)]
    writer.close()
    assert [hold.generation for hold in migrate(open_table(uri), "vector_idx", "fresh").holds] == [1]


def test_a_dry_run_prints_the_next_step(tmp_path: Path) -> None:
    uri = maintaining(tmp_path)
    before = Files(uri).listing("")
    report = migrate(open_table(uri), "vector_idx", "fresh", dry_run=True)
    assert report.decision == "dry_run"
    assert "fresh will be built" in report.next
    assert Files(uri).listing("") == before


def test_an_index_that_writers_do_not_maintain(tmp_path: Path) -> None:
    """No generation has it: nothing to tell the writers, nothing to wait for."""
    uri = create(str(tmp_path / "t.lance"))
    lance.dataset(uri).drop_index("__lance_mem_wal")
    lance.dataset(uri).initialize_mem_wal(maintained_indexes=[])
    write(uri, 0)
    if open_table(uri).index.maintain_all_indexes:
        pytest.fail("an empty list is not all")
    assert [step(uri), step(uri), step(uri)] == ["created", "dropped", "done"]
    check_queries(uri, expected(1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nope", "fresh", "no index nope"),
        ("vector_idx", "vector_idx", "another name"),
        ("id_idx", "fresh", "no codebook"),
        ("vector_idx", "id_idx", "no codebook"),
    ],
)
def test_usage(tmp_path: Path, old: str, new: str, message: str) -> None:
    uri = create(str(tmp_path / "t.lance"))
    before = open_table(uri).version
    with pytest.raises(InvalidUsageError, match=message):
        migrate(open_table(uri), old, new)
    assert open_table(uri).version == before


def test_an_index_without_build_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in its files nor, as of older releases, in the manifest; what the manifest describes is enough."""
    uri = maintaining(tmp_path)
    table = open_table(uri)
    (entry,) = base_indexes(table)["vector_idx"].segments
    path = tmp_path / "t.lance" / "_indices" / str(UUID(bytes=entry.uuid.uuid)) / "index.idx"
    path.write_bytes(b"of another format")
    real = lance.LanceDataset.describe_indices

    def undescribed(self: lance.LanceDataset) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=index.name, field_names=index.field_names, details={}) for index in real(self)]

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "describe_indices", undescribed)
        with pytest.raises(UnsupportedFeatureError, match="has no record of how it was built") as refused:
            migrate(table, "vector_idx", "fresh")
    assert "create_index" in refused.value.remedy
    assert open_table(uri).version == table.version
    assert migrate(table, "vector_idx", "fresh").decision == "created"
