"""Random histories of a plain table at ``s3+ddb://``: pylance's writers, our jobs, kills, lost answers, old handles.

After each step pylance reads the rows of the model in the newest version, by each tag and on the branch; a version that
was the newest reads as it did for as long as it is listed; and the newest item in DynamoDB is the newest version.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.migrate import store as migrate_store
from memwal_ops.formats.lance.options import CompactOptions
from tests.campaigns.faults.dynamodb_plan import FAULTS, DynamoPlan
from tests.support.dying_store import Killed
from tests.support.gc_options import AT_ONCE, IMMEDIATE
from tests.support.s3_server import s3_client
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table
    from tests.support.dynamodb_tables import DynamoTable

pytestmark = [pytest.mark.usefixtures("no_aws_environment"), pytest.mark.s3]

HISTORIES = env_number("DYNAMODB_HISTORIES", 6)
_STEPS = 16
_POINTS = 40
_JOBS: dict[str, dict[str, Any]] = {
    "compact": {}, "catchup": {}, "verify": {}, "gc": {"apply": True, **AT_ONCE},
    "maintain": {"apply": True},
    "expire": {"apply": True, "older_than": timedelta(0), "keep": 2, "allow_unsafe": True},
}  # fmt: skip


@dataclass
class _History:
    """One history, and the model of its table.

    Attributes:
        table: the table, or its branch in :attr:`dev`.
        rows: of the newest version.
        tags: the rows of each.
        versions: the rows of each version that was the newest after a step.
        handle: what another process opened some steps ago.
        opened: the same, of ours.
    """

    table: DynamoTable
    random: random.Random
    rows: list[int] = field(default_factory=lambda: [*range(30)])
    tags: dict[str, list[int]] = field(default_factory=dict)
    versions: dict[int, list[int]] = field(default_factory=dict)
    dev: _History | None = None
    handle: lance.LanceDataset | None = None
    opened: Table | None = None
    next_row: int = 1000
    trail: list[str] = field(default_factory=list)

    def step(self) -> None:
        steps: list[tuple[int, Any]] = [
            (4, self.append), (2, self.delete), (1, self.pylance_compacts), (1, self.pylance_cleans), (2, self.restore),
            (2, self.tag), (1, self.index), (2, self.open_elsewhere), (3, self.old_handle), (3, self.unfinish),
            (1, self.lost_manifest), (8, self.job), (2, self.old_table), (1, self.branch), (3, self.on_branch),
        ]  # fmt: skip
        chosen = self.random.choices([one for _, one in steps], [weight for weight, _ in steps])[0]
        self.trail.append(chosen.__name__)
        chosen()

    def fresh(self) -> list[int]:
        self.next_row += 3
        return [*range(self.next_row, self.next_row + 3)]

    def append(self) -> None:
        rows = self.fresh()
        self.table.append(rows[0], 3)
        self.rows += rows

    def delete(self) -> None:
        gone = self.random.randrange(7)
        self.table.dataset.delete(f"id % 7 = {gone}")
        self.rows = [row for row in self.rows if row % 7 != gone]

    def pylance_compacts(self) -> None:
        self.table.dataset.optimize.compact_files()

    def pylance_cleans(self) -> None:
        self.table.dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)

    def restore(self) -> None:
        known = [one["version"] for one in self.table.dataset.versions() if one["version"] in self.versions]
        if known:
            version = self.random.choice(known)
            lance.dataset(self.table.uri, version, storage_options=self.table.options).restore()
            self.rows = [*self.versions[version]]

    def tag(self) -> None:
        name = f"t{len(self.tags)}"
        self.table.dataset.tags.create(name, self.table.dataset.version)
        self.tags[name] = [*self.rows]

    def index(self) -> None:
        self.table.dataset.create_scalar_index("id", "BTREE", name="by_id")

    def open_elsewhere(self) -> None:
        self.handle, self.opened = self.table.dataset, open_table(self.table.uri, self.table.options)

    def old_handle(self) -> None:
        """A writer goes on with a version that it opened before: all or nothing, as pylance answers."""
        if self.handle is None:
            return
        rows, before = self.fresh(), [*self.rows]
        data = lance.dataset(self.table.uri, storage_options=self.table.options).schema.empty_table()
        data = data.from_pydict({"id": rows}, schema=data.schema)
        try:
            self.handle.insert(data)
        except OSError:
            assert self.table.ids() == sorted(before), "an insert that failed is not there"
        else:
            self.rows += rows

    def unfinish(self) -> None:
        """A writer is killed, or goes on after its copy failed: of any version that is still there."""
        listed = [one["version"] for one in self.table.dataset.versions()]
        self.table.unfinish(self.random.choice(listed[-3:]), copied=self.random.random() < 0.5)

    def lost_manifest(self) -> None:
        """A writer is killed after it staged the next version: that is never committed, or by another."""
        newest = self.table.dataset.version
        client, prefix = s3_client(self.table.endpoint), f"{self.table.path}/_versions"
        source = {"Bucket": self.table.bucket, "Key": f"{prefix}/{2**64 - 1 - newest}.manifest"}
        for version in (newest, newest + 1):
            key = f"{prefix}/{2**64 - 1 - version}.manifest-lost{self.next_row}"
            client.copy_object(Bucket=self.table.bucket, Key=key, CopySource=source)

    def job(self) -> None:
        name = self.random.choice([*_JOBS])
        self.trail[-1] += f" {name}"
        self.faulty(lambda: run_job(self.table.uri, name, storage_options=self.table.options, **_JOBS[name]))

    def old_table(self) -> None:
        """A process of ours goes on with a table that it opened before."""
        if self.opened is not None:
            table = self.opened
            action = self.random.choice(
                [lambda: gc.apply(table, IMMEDIATE), lambda: compact.apply(table, CompactOptions())]
            )
            self.faulty(action)

    def faulty(self, action: Callable[[], object]) -> None:
        """Run a job of ours that may stop at one of its writes, or meet an append there."""
        fault = self.random.choice([*FAULTS, ""])
        rows: list[int] = []

        def beside() -> None:
            rows.extend(self.fresh())
            self.table.append(rows[0], 3)

        plan = DynamoPlan(self.random.randrange(1, _POINTS) if fault else 0, fault, beside)
        with plan.active(), suppress(Killed):
            try:
                action()
            except MemwalOpsError as error:
                assert plan.struck or self.opened is not None, error
                self.trail[-1] += f" {type(error).__name__}"
        self.trail[-1] += f" ({fault} at {plan.trail[-1]})" if plan.struck else ""
        self.rows += rows

    def branch(self) -> None:
        if self.dev is None and "tree/" not in self.table.path:
            self.table.dataset.create_branch("dev")
            self.dev = _History(replace(self.table, path=f"{self.table.path}/tree/dev"), self.random, [*self.rows])
            self.dev.next_row = 100_000

    def on_branch(self) -> None:
        if self.dev is not None:
            dev = self.dev
            self.random.choice([dev.append, dev.delete, dev.job, dev.unfinish])()
            self.trail[-1] += f" {dev.trail[-1:]}"

    def check(self) -> None:
        assert self.table.ids() == sorted(self.rows)
        newest = self.table.dataset.version
        assert max(self.table.entries) == newest
        assert open_table(self.table.uri, self.table.options).version == newest
        for name, rows in self.tags.items():
            assert self.table.ids(version=name) == sorted(rows), name
        self.versions[newest] = [*self.rows]
        for one in self.table.dataset.versions():
            if one["version"] in self.versions:
                assert self.table.ids(version=one["version"]) == sorted(self.versions[one["version"]]), one
        if self.dev is not None:
            self.dev.trail.append("")
            assert self.dev.table.ids() == sorted(self.dev.rows), "branch"


@pytest.mark.parametrize("number", range(HISTORIES))
def test_history(dynamo_table: DynamoTable, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(migrate_store, "FENCED_VERSIONS", 5)
    seed = CAMPAIGN_SEED * HISTORIES + number
    history = _History(dynamo_table, random.Random(seed))
    try:
        for _ in range(_STEPS):
            history.step()
            history.check()
        _end(history)
    except BaseException as error:
        error.add_note(f"history {seed}: {', '.join(history.trail)}")
        raise


def _end(history: _History) -> None:
    """All is healthy, nothing is left; and in plain S3 all rows are there."""
    table, options = history.table, {"storage_options": history.table.options}
    assert run_job(table.uri, "verify", **options).exit_code == 0
    history.append()
    history.append()
    gc.apply(open_table(table.uri, table.options), IMMEDIATE)
    assert not [name for name in table.objects() if "manifest-" in name]
    history.check()
    assert run_job(table.uri, "migrate", to="s3", apply=True, **options).decision == "migrated"
    assert table.ids(table.plain_uri) == sorted(history.rows)
    for name, rows in history.tags.items():
        assert table.ids(table.plain_uri, name) == sorted(rows)
    if history.dev is not None:
        assert table.ids(history.dev.table.plain_uri) == sorted(history.dev.rows)
