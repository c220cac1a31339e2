"""erase on tables with a log: merged and unmerged generations, and entries that must stay as fence posts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.memwal import RegionWriter, create_mem_wal
from tests.support.tables import patterns

if TYPE_CHECKING:
    from pathlib import Path

REGION = UUID("00000000-0000-4000-8000-000000000001")
# In the base; updated by the log; in the log alone; deleted by it; not merged yet.
GONE = [5, 250, 400, 401, 403]
WHERE = f"id IN ({', '.join(map(str, GONE))})"


def write(uri: str, layout: str, puts: list[int], deletes: list[int] | None = None) -> None:
    """One generation."""
    keys = pa.table({"id": pa.array(deletes or [], pa.int64())})
    if layout == "region":
        with RegionWriter(uri, REGION) as writer:
            writer.put(patterns.rows(puts, blobs=False))
            if deletes:
                writer.delete(keys)
            writer.flush()
        return
    with lance.dataset(uri).mem_wal_writer(str(REGION)) as writer:
        writer.put(patterns.rows(puts, blobs=False))
        if deletes:
            writer.delete(keys)


def erase(uri: str, **options: Any) -> Any:
    return run_job(uri, "erase", **{"where": WHERE, "apply": True, "older_than": "0s", "allow_unsafe": True, **options})


@pytest.fixture(params=["shard", "region"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    uri = patterns.create(str(tmp_path / "t.lance"), range(300), every_index=False, blobs=False)
    if request.param == "region":
        create_mem_wal(uri)
    else:
        lance.dataset(uri).initialize_mem_wal()
    write(uri, request.param, [250, 400, 401, 402])
    run_job(uri, "merge")
    write(uri, request.param, [403, 404], [401])
    return uri, request.param


def living(uri: str) -> list[int]:
    return sorted(lance.dataset(uri).to_table(columns=["id"]).column("id").to_pylist())


@pytest.mark.sampled(1)
def test_merged_and_unmerged_rows_are_gone_from_base_and_log(made: tuple[str, str]) -> None:
    uri, layout = made
    assert any(path.startswith("_mem_wal/") for path in patterns.holders(uri, GONE))
    plan = run_job(uri, "erase", where=WHERE)
    assert plan.decision == "planned"
    assert {"generation", "log entry"} & {one.kind for one in plan.holders}
    report = erase(uri, certificate=f"{uri}.json")
    for _ in range(3):
        if report.decision == "waiting":
            report = erase(uri, certificate=f"{uri}.json")
    assert report.decision == "erased", report.describe()
    assert patterns.holders(uri, GONE) == {}
    assert living(uri) == [number for number in [*range(300), 402, 404] if number not in GONE]
    assert run_job(uri, "verify").decision == "healthy"
    write(uri, layout, [500])
    run_job(uri, "merge")
    assert 500 in living(uri), "the log goes on"
    assert run_job(uri, "erase", check=f"{uri}.json").decision == "valid"


def test_entries_that_are_not_flushed_are_named(tmp_path: Path) -> None:
    uri = patterns.create(str(tmp_path / "t.lance"), range(30), every_index=False, blobs=False)
    create_mem_wal(uri)
    writer = RegionWriter(open_table(uri), REGION)
    writer.put(patterns.rows([100], blobs=False))
    report = erase(uri, where="id = 100")
    assert report.decision == "held"
    assert {one.kind for one in report.holders if one.blocks} == {"log entry"}
    assert "not flushed" in report.describe()
    writer.flush()
    writer.close()
    for _ in range(3):
        report = erase(uri, where="id = 100")
    assert report.decision == "erased", report.describe()
    assert patterns.holders(uri, [100]) == {}
