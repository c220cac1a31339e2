"""``migrate --to s3``: off DynamoDB, with a fence for every writer that is left."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import CommitConflictError, InvalidUsageError, NoMemWalIndexError, UnsupportedFeatureError
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.migrate import store as migrate_store
from memwal_ops.storage.dynamodb import VersionEntries
from memwal_ops.storage.external_manifests import MARK, MOVED, ManifestEntryStore
from memwal_ops.storage.object_store import ObjectStore
from tests.support.dying_store import Killed
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import run_here
from tests.support.runbook import commands

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.dynamodb_tables import DynamoTable

pytestmark = [pytest.mark.usefixtures("no_aws_environment"), pytest.mark.s3]


@pytest.fixture(autouse=True)
def _fewer_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one transaction has; the server of the tests takes a second for each hundred."""
    monkeypatch.setattr(migrate_store, "FENCED_VERSIONS", 120)


def _migrate(table: DynamoTable, *, apply: bool = True) -> Any:
    return run_job(table.uri, "migrate", to="s3", apply=apply, storage_options=table.options)


def _append_plain(table: DynamoTable, first: int) -> int:
    row = pa.table({"id": pa.array([first], pa.int64())})
    done = lance.write_dataset(row, table.plain_uri, mode="append", storage_options=table.options)
    return int(done.version)


def _is_migrated(table: DynamoTable, ids: list[int]) -> None:
    """The plain URI has all versions, with their rows, and goes on; the other one is refused by name."""
    newest = lance.dataset(table.plain_uri, storage_options=table.options).version
    assert table.ids(table.plain_uri) == ids
    for version in (1, 2, 3):
        assert table.ids(table.plain_uri, version) == [*range(10 * version)]
    with pytest.raises(UnsupportedFeatureError, match="was migrated to plain S3") as refused:
        open_table(table.uri, table.options)
    assert table.plain_uri in refused.value.remedy
    assert open_table(table.plain_uri, table.options).version == newest
    assert MARK not in table.objects()
    assert _append_plain(table, 1000) == newest + 1
    with pytest.raises((OSError, ValueError)):
        table.append(2000)
    assert table.ids(table.plain_uri) == [*ids, 1000]


def test_plan_changes_nothing(dynamo_table: DynamoTable) -> None:
    before = dynamo_table.objects(), dynamo_table.entries
    report = _migrate(dynamo_table, apply=False)
    assert (report.decision, report.version) == ("planned", 3)
    assert dynamo_table.plain_uri in report.describe()
    assert (dynamo_table.objects(), dynamo_table.entries) == before
    assert dynamo_table.append(30) == 4


@pytest.mark.long
def test_migrates_with_all_versions_and_branches(dynamo_table: DynamoTable) -> None:
    dynamo_table.dataset.create_branch("dev")
    branch = replace(dynamo_table, path=f"{dynamo_table.path}/tree/dev")
    branch.append(500)
    branch.unfinish(4)
    dynamo_table.unfinish(2, copied=True)
    dynamo_table.unfinish(3)
    run_job(dynamo_table.uri, "verify", storage_options=dynamo_table.options)
    report = _migrate(dynamo_table)
    assert (report.decision, report.branches, report.version) == ("migrated", 1, 3)
    assert report.to_json()["moved_to"] == dynamo_table.plain_uri
    _is_migrated(dynamo_table, [*range(30)])
    assert dynamo_table.ids(branch.plain_uri) == [*range(30), *range(500, 510)]
    assert open_table(dynamo_table.plain_uri, dynamo_table.options, branch="dev").version == 4
    with pytest.raises((OSError, ValueError)):
        branch.append(600)
    assert run_job(dynamo_table.plain_uri, "maintain", storage_options=dynamo_table.options).exit_code == 0


@pytest.mark.long
def test_a_writer_that_opened_the_table_before_fails(dynamo_table: DynamoTable) -> None:
    """Also after others have committed to plain S3: its version is fenced, too. Its staged manifests are gc's."""
    stale = dynamo_table.dataset
    _migrate(dynamo_table)
    row = pa.table({"id": pa.array([77], pa.int64())})
    for commit in range(3):
        with pytest.raises((OSError, ValueError), match=r"unknown|not number type|path is not a string"):
            stale.insert(row)
        _append_plain(dynamo_table, 100 + commit)
    assert dynamo_table.ids(dynamo_table.plain_uri) == [*range(30), 100, 101, 102]
    assert [name for name in dynamo_table.objects() if "manifest-" in name]
    gc.apply(open_table(dynamo_table.plain_uri, dynamo_table.options), IMMEDIATE)
    assert not [name for name in dynamo_table.objects() if "manifest-" in name]
    assert MOVED in dynamo_table.objects()
    assert max(dynamo_table.entries) == 3 + migrate_store.FENCED_VERSIONS


@pytest.mark.long
def test_a_commit_in_between_is_kept(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = VersionEntries.fence

    def beside(self: VersionEntries, *arguments: Any) -> bool:
        monkeypatch.setattr(VersionEntries, "fence", fence)
        dynamo_table.append(30)
        dynamo_table.unfinish(4)
        return self.fence(*arguments)

    monkeypatch.setattr(VersionEntries, "fence", beside)
    assert _migrate(dynamo_table).version == 4
    _is_migrated(dynamo_table, [*range(40)])


@pytest.mark.long
def test_a_commit_on_an_unfinished_version_is_kept(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both came after the migration finished what it saw; the newest one, which it checks, is finished."""
    finish_all = ManifestEntryStore.finish_all

    def beside(self: ManifestEntryStore, folder: str) -> int:
        monkeypatch.setattr(ManifestEntryStore, "finish_all", finish_all)
        finished = self.finish_all(folder)
        dynamo_table.append(30)
        dynamo_table.append(40)
        dynamo_table.unfinish(4)
        return finished

    monkeypatch.setattr(ManifestEntryStore, "finish_all", beside)
    assert _migrate(dynamo_table).version == 5
    assert dynamo_table.ids(dynamo_table.plain_uri, 4) == [*range(40)]
    _is_migrated(dynamo_table, [*range(50)])


def test_writers_that_keep_committing(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate_store, "_ATTEMPTS", 3)
    monkeypatch.setattr(VersionEntries, "fence", lambda *_: False)
    with pytest.raises(CommitConflictError, match="Writers keep committing"):
        _migrate(dynamo_table)
    assert dynamo_table.append(30) == 4


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_point(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """The table is as it was, or migrated; a second run, or the first command by the old URI, leaves nothing to do."""
    trail: list[str] = []
    stop: list[int] = []

    def wrapped(owner: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            trail.append(name)
            if stop == [len(trail)] and not after:
                raise Killed
            result = method(*arguments)
            if stop == [len(trail)]:
                raise Killed
            return result

        monkeypatch.setattr(owner, name, call)

    wrapped(VersionEntries, "fence")
    wrapped(VersionEntries, "finalize")
    wrapped(ManifestEntryStore, "record_move")
    wrapped(ManifestEntryStore, "_copy")
    wrapped(ObjectStore, "delete_many")
    dynamo_table.unfinish(2, copied=True)
    for at in range(1, 20):
        trail.clear()
        stop[:] = [at]
        with suppress(Killed):
            _migrate(dynamo_table)
            break
        stop.clear()
        moved = any("moved_to" in item for item in dynamo_table.entries.values())
        if moved:
            break
        assert dynamo_table.ids() == [*range(30)]
    stop.clear()
    assert at > 2
    assert any("moved_to" in item for item in dynamo_table.entries.values())
    with pytest.raises(UnsupportedFeatureError):
        open_table(dynamo_table.uri, dynamo_table.options)
    _is_migrated(dynamo_table, [*range(30)])


@pytest.mark.long
def test_a_table_that_has_no_entries_is_refused(dynamo_table: DynamoTable) -> None:
    """Its writers may use another table in DynamoDB, and would not be fenced. After the remedy it is migrated."""
    for version in (1, 2, 3):
        dynamo_table.forget(version)
    with pytest.raises(InvalidUsageError, match=r"has no entry of .* has version 3"):
        _migrate(dynamo_table)
    lance.dataset(dynamo_table.uri, version=3, storage_options=dynamo_table.options)
    assert _migrate(dynamo_table).decision == "migrated"
    _is_migrated(dynamo_table, [*range(30)])


@pytest.mark.long
def test_a_branch_that_is_created_meanwhile_is_fenced(
    dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, branch = VersionEntries.fence, replace(dynamo_table, path=f"{dynamo_table.path}/tree/dev")

    def beside(self: VersionEntries, *arguments: Any) -> bool:
        monkeypatch.setattr(VersionEntries, "fence", fence)
        dynamo_table.dataset.create_branch("dev")
        branch.append(500)
        branch.unfinish(4)
        return self.fence(*arguments)

    monkeypatch.setattr(VersionEntries, "fence", beside)
    report = _migrate(dynamo_table)
    assert (report.version, report.branches) == (3, 1)
    assert dynamo_table.ids(branch.plain_uri) == [*range(30), *range(500, 510)]
    with pytest.raises((OSError, ValueError)):
        branch.append(600)
    assert _append_plain(branch, 700) == 5


def test_a_fence_of_a_killed_migration_is_completed(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first command that opens the table by the old URI, so that no older handle commits."""
    put_each = VersionEntries._put_each

    def killed(self: VersionEntries, fences: Any) -> None:
        put_each(self, [*fences][1::2])
        raise Killed

    monkeypatch.setattr(VersionEntries, "_put_each", killed)
    with pytest.raises(Killed):
        _migrate(dynamo_table)
    monkeypatch.undo()
    assert len(dynamo_table.entries) < 3 + migrate_store.FENCED_VERSIONS
    with pytest.raises(UnsupportedFeatureError, match="was migrated"):
        open_table(dynamo_table.uri, dynamo_table.options)
    assert [*dynamo_table.entries] == [*range(1, 124)]
    _is_migrated(dynamo_table, [*range(30)])


@pytest.mark.long
def test_the_page(
    dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """docs/formats/dynamodb.md, from top to bottom."""
    options = dynamo_table.options
    for variable, key in (
        ("AWS_ENDPOINT_URL", "aws_endpoint"), ("AWS_ACCESS_KEY_ID", "aws_access_key_id"), ("AWS_REGION", "aws_region"),
        ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"), ("DYNAMODB_ENDPOINT", "dynamodb_endpoint"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, options[key])
    page = Path(__file__).parents[6] / "docs/formats/dynamodb.md"
    first, *lines = commands(page.read_text())
    assert first.startswith("export URI='s3+ddb://")
    for line in lines:
        words = shlex.split(line.replace("$URI", dynamo_table.uri))
        assert words[0] == "memwal-ops"
        outcome = run_here(capfd, *words[1:])
        assert outcome.code == 0, f"{line}: {outcome.err}"
    monkeypatch.undo()
    _is_migrated(dynamo_table, [*range(30)])


@pytest.mark.long
def test_other_tables(dynamo_table: DynamoTable) -> None:
    report = run_job(dynamo_table.plain_uri, "migrate", to="s3", apply=True, storage_options=dynamo_table.options)
    assert report.decision == "nothing_to_migrate"
    for to in (None, "region"):
        with pytest.raises(NoMemWalIndexError):
            run_job(dynamo_table.uri, "migrate", to=to, storage_options=dynamo_table.options)
