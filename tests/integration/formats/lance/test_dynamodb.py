"""The jobs of plain tables on a table at ``s3+ddb://``, beside pylance's writers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.maintain import tables_of_database
from memwal_ops.core.registry import short_name
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.log.create import create_mem_wal
from memwal_ops.formats.lance.options import CompactOptions, ExpireOptions
from memwal_ops.formats.lance.retention.garbage import NeededFiles, put_back
from memwal_ops.storage.external_manifests import MARK
from memwal_ops.storage.locations import below
from tests.support.gc_options import IMMEDIATE
from tests.support.s3_server import s3_client
from tests.support.stores import beside

if TYPE_CHECKING:
    from tests.support.dynamodb_tables import DynamoTable

pytestmark = [pytest.mark.usefixtures("no_aws_environment"), pytest.mark.s3, pytest.mark.req("S3-052")]
_ALL_BUT_NEWEST = ExpireOptions(older_than=timedelta(0), allow_unsafe=True)


def _open(table: DynamoTable):  # type: ignore[no-untyped-def]
    return open_table(table.uri, table.options)


def _staged(table: DynamoTable) -> list[str]:
    return [name for name in table.objects() if "manifest-" in name]


@pytest.mark.long
def test_jobs_beside_pylance(dynamo_table: DynamoTable) -> None:
    """Each version that a job publishes has its entry; pylance reads on, and so do we."""
    dynamo_table.dataset.create_scalar_index("id", "BTREE", name="by_id")
    dynamo_table.append(30)
    options = {"storage_options": dynamo_table.options}
    assert run_job(dynamo_table.uri, "catchup", **options).decision == "caught_up"
    dynamo_table.append(40)
    assert run_job(dynamo_table.uri, "compact", **options).decision == "compacted"
    dynamo_table.append(50)
    report = run_job(dynamo_table.uri, "maintain", apply=True, **options)
    assert report.exit_code == 0
    assert run_job(dynamo_table.uri, "verify", **options).exit_code == 0
    newest = _open(dynamo_table).version
    assert [*dynamo_table.entries] == [*range(1, newest + 1)], "no other, and none that is detached"
    assert dynamo_table.dataset.version == newest
    assert dynamo_table.ids() == [*range(60)]
    assert dynamo_table.append(60) == newest + 1
    plan = dynamo_table.dataset.scanner(filter="id = 41").explain_plan()
    assert "by_id" in plan


@pytest.mark.long
@pytest.mark.parametrize("point", ["get", "list", "put_if_absent", "delete_many"])
def test_a_writer_between_the_calls_of_a_job(dynamo_table: DynamoTable, point: str) -> None:
    table = _open(dynamo_table)
    wrapped = replace(table, store=beside(point, "", lambda: dynamo_table.append(100))(table.store))
    compact.apply(wrapped, CompactOptions())
    later = beside(point, "", lambda: dynamo_table.append(200))
    expire.apply(replace(table.newest(), store=later(table.store)), _ALL_BUT_NEWEST)
    assert dynamo_table.ids()[:30] == [*range(30)]
    assert open_table(dynamo_table.uri, dynamo_table.options).version == dynamo_table.dataset.version


@pytest.mark.long
def test_expire_keeps_entries_and_what_is_named(dynamo_table: DynamoTable) -> None:
    """A version whose commit was not finished expires for good; the others read as before."""
    dynamo_table.dataset.tags.create("kept", 2)
    dynamo_table.append(30)
    dynamo_table.unfinish(3, copied=True)
    report = expire.apply(_open(dynamo_table), _ALL_BUT_NEWEST)
    assert report.versions == (1, 3)
    assert [*dynamo_table.entries] == [1, 2, 3, 4]
    assert _staged(dynamo_table) == []
    assert dynamo_table.ids(version="kept") == [*range(20)]
    assert dynamo_table.ids() == [*range(40)]
    for version in (1, 3):
        with pytest.raises(ValueError, match="not found"):
            dynamo_table.ids(version=version)
    assert dynamo_table.append(40) == 5


def test_a_version_that_turns_out_to_be_needed_is_put_back(dynamo_table: DynamoTable) -> None:
    table = _open(dynamo_table)
    NeededFiles().set_aside(table, [2])
    table.store.delete_many([f"_versions/{2**64 - 3}.manifest"])
    assert put_back(table, [2], [1, 3]) == (2,)
    assert dynamo_table.ids(version=2) == [*range(20)]


@pytest.mark.long
def test_gc_deletes_staged_manifests_of_commits_that_lost(dynamo_table: DynamoTable) -> None:
    """One of a version that is not committed yet may become that version, at any age."""
    table = _open(dynamo_table)
    data = table.store.get(f"_versions/{2**64 - 4}.manifest")
    lost, early = f"_versions/{2**64 - 4}.manifest-lost", f"_versions/{2**64 - 5}.manifest-early"
    for path in (lost, early):
        table.store.put(path, data)
    kept = gc.apply(_open(dynamo_table), replace(IMMEDIATE, orphan_min_age=timedelta(hours=1)))
    assert kept.decision == "nothing_to_delete"
    report = gc.apply(_open(dynamo_table), IMMEDIATE)
    assert report.decision == "deleted"
    assert _staged(dynamo_table) == [early.rpartition("/")[2]]
    assert dynamo_table.append(30) == 4
    gc.apply(_open(dynamo_table), IMMEDIATE)
    assert _staged(dynamo_table) == [], "another commit has its version now"


def test_gc_never_deletes_the_only_manifest(dynamo_table: DynamoTable) -> None:
    dynamo_table.unfinish(3)
    gc.apply(_open(dynamo_table), IMMEDIATE)
    assert dynamo_table.ids() == [*range(30)]
    assert _open(dynamo_table).version == 3


@pytest.mark.long
def test_an_unfinished_version_before_the_newest_keeps_its_files(dynamo_table: DynamoTable) -> None:
    """It is named by a tag alone: a listing without it let an expiry delete its rows."""
    dynamo_table.append(30)
    dynamo_table.dataset.tags.create("kept", 4)
    dynamo_table.dataset.delete("id >= 30")
    dynamo_table.unfinish(4)
    report = expire.apply(_open(dynamo_table), _ALL_BUT_NEWEST)
    assert report.versions == (1, 2, 3)
    gc.apply(_open(dynamo_table), IMMEDIATE)
    assert dynamo_table.ids(version="kept") == [*range(40)]


@pytest.mark.long
def test_a_compaction_leaves_the_mark(dynamo_table: DynamoTable) -> None:
    """The store was proven before, and all commits are pylance's: none passes our store."""
    options = {"storage_options": dynamo_table.options}
    assert run_job(dynamo_table.uri, "compact", **options).decision == "compacted"
    run_job(dynamo_table.uri, "compact", **options)
    s3_client(dynamo_table.endpoint).delete_object(
        Bucket=dynamo_table.bucket, Key=f"{dynamo_table.path}/_versions/{MARK}"
    )
    dynamo_table.append(30)
    assert run_job(dynamo_table.uri, "compact", **options).decision == "compacted"
    assert MARK in dynamo_table.objects()


def test_a_table_with_a_log_is_refused(dynamo_table: DynamoTable) -> None:
    """inspect shows it; it gets none by us."""
    with pytest.raises(UnsupportedFeatureError, match="no log can be flushed"):
        create_mem_wal(_open(dynamo_table).location, _open(dynamo_table).store)
    keyed = pa.field("id", pa.int64(), nullable=False, metadata={b"lance-schema:unenforced-primary-key": b"true"})
    uri = dynamo_table.uri.replace("orders", "logged")
    made = lance.write_dataset(
        pa.table({"id": [1]}, schema=pa.schema([keyed])), uri, storage_options=dynamo_table.options
    )
    made.initialize_mem_wal()
    for job in ("merge", "gc", "verify", "compact"):
        with pytest.raises(UnsupportedFeatureError, match="has a MemWAL, and its versions are recorded in DynamoDB"):
            run_job(uri, job, storage_options=dynamo_table.options)
    assert run_job(uri, "inspect", storage_options=dynamo_table.options).exit_code == 0


@pytest.mark.long
def test_branches(dynamo_table: DynamoTable) -> None:
    """A branch has entries of its own, under its path; its unfinished commit counts for gc and expire of main."""
    dynamo_table.dataset.create_branch("dev")
    branch = replace(dynamo_table, path=f"{dynamo_table.path}/tree/dev")
    assert branch.uri == below(dynamo_table.uri, "tree/dev")
    branch.append(500)
    found = open_table(dynamo_table.uri, dynamo_table.options, branch="dev")
    assert found.location.uri == branch.uri
    assert found.branch.root.root == dynamo_table.uri
    branch.unfinish(4)
    report = expire.apply(_open(dynamo_table), _ALL_BUT_NEWEST)
    assert 3 not in report.versions
    assert branch.ids() == [*range(30), *range(500, 510)]
    assert run_job(branch.uri, "compact", storage_options=dynamo_table.options).decision == "compacted"
    assert branch.ids() == [*range(30), *range(500, 510)]
    assert dynamo_table.ids() == [*range(30)]


def test_a_folder_of_tables(dynamo_table: DynamoTable) -> None:
    folder = dynamo_table.uri.replace("/orders.lance", "")
    assert tables_of_database(folder, dynamo_table.options)[0] == [dynamo_table.uri]
    assert short_name(dynamo_table.uri.rpartition("/")[2]) == "orders"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["inspect", "doctor", "probe", "scan", "verify"])
def test_commands(dynamo_table: DynamoTable, command: str) -> None:
    options = [part for key, value in dynamo_table.options.items() for part in ("--storage-option", f"{key}={value}")]
    arguments = [sys.executable, "-m", "memwal_ops", command, dynamo_table.uri, *options, "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    if command == "doctor":
        (check,) = [one for one in found["checks"] if one["name"] == "DynamoDB"]
        assert check["level"] == "ok"
