"""The jobs of plain tables on S3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import run_job
from memwal_ops.formats.lance.options import MaintainOptions
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.integration.formats.lance.jobs.test_plain_jobs import NOW
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.s3


@pytest.mark.long
def test_maintain(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    """Caught up, compacted and expired; a tag keeps what it names."""
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=6, rows=60).create_indexes()
    made.delete(*range(50))
    made.append(10)
    made.dataset.tags.create("kept", 4)
    root, options = bucket
    uri = f"{root}/t.lance"
    store = open_store(resolve(uri, options))
    for path in made.files():
        store.put(path, (tmp_path / "t.lance" / path).read_bytes())
    kept = made.read(4)
    all_now = MaintainOptions(apply=True, expire=NOW)
    report = run_job(uri, "maintain", all_now, apply=True, storage_options=options)
    assert report.exit_code == 0, report.describe()
    steps = {step["step"]: step["decision"] for step in report.to_json()["steps"]}
    assert (steps["catchup"], steps["compact"], steps["expire"]) == ("caught_up", "compacted", "expired")
    dataset = lance.dataset(uri, storage_options=options)
    assert [one["version"] for one in dataset.versions()] == [4, dataset.version]
    rows = dataset.to_table(columns=["id", "text"])
    assert dict(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True)) == made.model
    old = lance.dataset(uri, version="kept", storage_options=options).to_table(columns=["id"])
    assert sorted(old["id"].to_pylist()) == sorted(kept)
    assert run_job(uri, "verify", deep=True, storage_options=options).decision == "healthy"
