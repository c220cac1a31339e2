"""Tables at ``s3+ddb://``: jobs that stop at every write to S3, to DynamoDB and by pylance, and writers at each.

The other tests of this folder have local files. Here a point is one write below the store's wrapper, so that those of a
commit are points of their own: the staged manifest, its item, the copy, the final item, the deletion.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.migrate import store as migrate_store
from tests.campaigns.faults.dynamodb_plan import FAULTS, DynamoPlan
from tests.support.dying_store import Killed
from tests.support.dynamodb_tables import DynamoTable
from tests.support.gc_options import AT_ONCE, IMMEDIATE
from tests.support.s3_server import s3_client
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.usefixtures("no_aws_environment"), pytest.mark.s3]

# Of how many parts of the points one is run; which one, the seed tells.
PARTS = env_number("FAULT_PARTS", 1)
_ROWS = [*range(40)]
_BESIDE = [*range(900, 905)]


_numbers = itertools.count()


def _copy(start: DynamoTable) -> DynamoTable:
    """The same objects and items, elsewhere in the bucket."""
    made = replace(start, path=f"copies/{next(_numbers)}.lance")
    client = s3_client(start.endpoint)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=start.bucket, Prefix=f"{start.path}/"):
        for one in page["Contents"]:
            key = made.path + one["Key"].removeprefix(start.path)
            client.copy_object(Bucket=start.bucket, Key=key, CopySource={"Bucket": start.bucket, "Key": one["Key"]})
    for item in start.entries.values():
        path = made.path + item["path"]["S"].removeprefix(start.path)
        made.put_entry({**item, "base_uri": {"S": made.path}, "path": {"S": path}})
    return made


def _prepare(table: DynamoTable) -> None:
    """An index that is behind, fragments to compact, old versions, one with a tag; commits that were not finished."""
    table.dataset.create_scalar_index("id", "BTREE", name="by_id")
    table.append(30)
    table.dataset.tags.create("kept", 2)
    store = open_table(table.uri, table.options).store
    store.put(f"_versions/{2**64 - 4}.manifest-lost", store.get(f"_versions/{2**64 - 4}.manifest"))
    table.unfinish(3, copied=True)
    table.unfinish(5)


def _job(name: str, **options: Any) -> Callable[[DynamoTable], Any]:
    return lambda table: run_job(table.uri, name, storage_options=table.options, apply=True, **options)


_JOBS: dict[str, Callable[[DynamoTable], Any]] = {
    "compact": lambda table: run_job(table.uri, "compact", storage_options=table.options),
    "catchup": lambda table: run_job(table.uri, "catchup", storage_options=table.options),
    "expire": _job("expire", older_than=timedelta(0), allow_unsafe=True),
    "gc": _job("gc", **AT_ONCE),
    "migrate": _job("migrate", to="s3"),
}
_AGAIN = {
    "compact": {"compacted", "unchanged"}, "catchup": {"caught_up", "unchanged"},
    "expire": {"expired", "nothing_to_expire"}, "gc": {"deleted", "nothing_to_delete"},
}  # fmt: skip


def _check(table: DynamoTable, rows: list[int]) -> None:
    """pylance reads the newest version, the tag, and every version that is listed; the newest entry is the newest."""
    assert table.ids() == rows
    assert table.ids(version="kept") == [*range(20)]
    for one in table.dataset.versions():
        assert set(table.ids(version=one["version"])) <= {*_ROWS, *_BESIDE}
    assert max(table.entries) == table.dataset.version
    assert sorted(table.dataset.to_table(filter="id >= 0")["id"].to_pylist()) == rows


def _check_moved(table: DynamoTable, rows: list[int]) -> None:
    assert table.ids(table.plain_uri) == rows
    assert table.ids(table.plain_uri, "kept") == [*range(20)]
    row = pa.table({"id": pa.array([1000], pa.int64())})
    with pytest.raises((OSError, ValueError)):
        lance.write_dataset(row, table.uri, mode="append", storage_options=table.options)
    lance.write_dataset(row, table.plain_uri, mode="append", storage_options=table.options)
    assert table.ids(table.plain_uri) == [*rows, 1000]


@pytest.mark.parametrize("job", _JOBS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_write_of_a_job(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, job: str, fault: str) -> None:
    monkeypatch.setattr(migrate_store, "FENCED_VERSIONS", 20)
    _prepare(dynamo_table)
    run = _JOBS[job]
    run(_copy(dynamo_table))  # the store is probed once
    plan = DynamoPlan()
    with plan.active():
        run(_copy(dynamo_table))
    assert len(plan.trail) > 1
    for at, name in enumerate(plan.trail, 1):
        if (at + CAMPAIGN_SEED) % PARTS:
            continue
        table = _copy(dynamo_table)
        beside = DynamoPlan(at, fault, partial(_append, table))
        try:
            with beside.active(), suppress(Killed, MemwalOpsError):
                run(table)
            assert beside.struck
            _finish(job, table)
        except BaseException as error:
            error.add_note(f"{job}: {fault} at {at}, {name}")
            raise


def _append(table: DynamoTable) -> None:
    """Refused once the table was moved."""
    with suppress(OSError, ValueError):
        table.append(_BESIDE[0], len(_BESIDE))


def _finish(job: str, table: DynamoTable) -> None:
    moved = any("moved_to" in item for item in table.entries.values())
    rows = _rows(table, moved=moved)
    if not moved:
        _check(table, rows)
        report = _JOBS[job](table)
        assert job == "migrate" or report.decision in _AGAIN[job]
    if job == "migrate":
        if moved:
            with pytest.raises(MemwalOpsError, match="was migrated"):
                open_table(table.uri, table.options)
        _check_moved(table, rows)
        return
    _check(table, rows)
    gc.apply(open_table(table.uri, table.options), IMMEDIATE)
    assert not [name for name in table.objects() if "manifest-" in name]
    table.append(950, 1)
    assert table.ids() == [*rows, 950]


def _rows(table: DynamoTable, *, moved: bool) -> list[int]:
    """Those from the start, and those that were appended beside, all or none of them."""
    found = table.ids(table.plain_uri if moved else "")
    assert found in (_ROWS, [*_ROWS, *_BESIDE])
    return found
