"""erase in time: what was deleted is gone within a time, and rows are deleted by their age."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.core.options import TtlOptions
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.options import EraseOptions
from tests.support.tables import patterns

if TYPE_CHECKING:
    from pathlib import Path

TODAY = datetime.now(UTC)


@pytest.mark.parametrize(("within", "lag"), [("30d", 21), ("9d", 0), ("8d", 0)])
def test_it_begins_as_late_as_it_can(within: str, lag: int) -> None:
    assert EraseOptions.read({"within": within}).cut(TODAY) == TODAY - timedelta(days=lag)


@pytest.mark.parametrize(
    "given",
    [
        {"within": "7d"},
        {"within": "30d", "where": "id = 1"},
        {"ttl": {"column": "at", "keep": "90d"}},
        {"within": "30d", "ttl": {"column": "at"}},
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsageError):
        EraseOptions.read(given)


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.date32()], ids=str)
def test_rows_are_deleted_by_their_age_and_erased(tmp_path: Path, kind: pa.DataType) -> None:
    uri = str(tmp_path / "t.lance")
    made = patterns.rows(range(20))
    days = [TODAY - timedelta(days=number * 10) for number in range(20)]
    values = [one.date() if pa.types.is_date(kind) else one.replace(tzinfo=kind.tz and UTC) for one in days]
    assert isinstance(values[0], date)
    lance.write_dataset(made.append_column("at", pa.array(values, kind)), uri)
    options = EraseOptions(
        within=timedelta(days=1),
        older_than=timedelta(0),
        allow_unsafe=True,
        ttl=TtlOptions(column="at", keep=timedelta(days=95)),
    )
    plan = run_job(uri, "erase", options=options)
    assert (plan.decision, plan.living) == ("planned", 10)
    assert run_job(uri, "erase", options=options, apply=True).done["rows_deleted"] == 10
    assert run_job(uri, "erase", options=options, apply=True).decision == "erased", "what the first run deleted"
    assert sorted(lance.dataset(uri).to_table(columns=["id"]).column("id").to_pylist()) == [*range(10)]
    assert patterns.holders(uri, range(10, 20)) == {}


def test_rows_of_the_log_are_deleted_by_their_age(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    at = pa.array(
        [TODAY.replace(tzinfo=None) - timedelta(days=number * 10) for number in range(20)], pa.timestamp("us")
    )
    made = patterns.rows(range(20), blobs=False).append_column("at", at)
    lance.write_dataset(made.slice(0, 12), uri)
    lance.dataset(uri).initialize_mem_wal()
    with lance.dataset(uri).mem_wal_writer("00000000-0000-4000-8000-000000000001") as writer:
        writer.put(made.slice(12))
    options = EraseOptions(
        within=timedelta(days=1),
        older_than=timedelta(0),
        allow_unsafe=True,
        ttl=TtlOptions(column="at", keep=timedelta(days=95)),
    )
    for _ in range(4):
        report = run_job(uri, "erase", options=options, apply=True)
    assert report.decision == "erased", report.describe()
    assert patterns.holders(uri, range(10, 20)) == {}
    assert sorted(lance.dataset(uri).to_table(columns=["id"]).column("id").to_pylist()) == [*range(10)]
