"""Every job, under a lease that is lost right before its first commit or deletion: it says so, and leaves nothing."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.anchors import LeaseGuard
from memwal_ops.core.context import RunContext
from memwal_ops.core.registry import job_specs
from memwal_ops.errors import LeaseLostError
from memwal_ops.formats.lance.files.version_files import missing_files, references
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.options import MaintainOptions
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import contents
from tests.support.tables.indexed import REGION, create, rows, write

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {
    "expire": expire.ExpireOptions(timedelta(0), allow_unsafe=True),
    "gc": IMMEDIATE,
    "compact": compact.CompactOptions(),
    "maintain": MaintainOptions(apply=True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["merge", "catchup", "compact", "snapshot", "expire", "gc", "maintain"])
def test_a_job_that_lost_its_lease_changes_nothing(tmp_path: Path, name: str) -> None:
    uri = create(str(tmp_path / "t.lance"))
    for number in range(2):
        write(uri, number)
    if name in {"merge", "maintain"}:
        with lance.dataset(uri).mem_wal_writer(str(REGION)) as writer:
            writer.put(rows([1, 2, 3], "new"))
    if name in {"compact", "gc"}:
        catchup.apply(open_table(uri), catchup.CatchupOptions())
    if name == "gc":
        expire.apply(open_table(uri), expire.ExpireOptions(timedelta(0), allow_unsafe=True))
        assert gc.plan(open_table(uri), IMMEDIATE).bytes_reclaimable
    before = contents(uri)
    asked = []

    def check() -> None:
        asked.append(name)
        raise LeaseLostError("held by another")

    table = open_table(uri)
    spec = job_specs("lance")[name]
    guard = LeaseGuard(check)
    with pytest.raises(LeaseLostError):
        spec.job.apply(table.with_guard(guard), OPTIONS.get(name) or spec.options(), RunContext(guard=guard))
    assert asked
    left = {path for path in contents(uri).keys() - before.keys() if not path.startswith("_mem_wal_ops")}
    # pylance's clean-up takes what a compaction wrote, the next merge takes the file of a transaction.
    allowed = {"compact": ("data/", "_indices/"), "merge": ("_transactions/",), "maintain": ("_transactions/",)}
    assert all(path.startswith(allowed.get(name, ("nothing",))) for path in left), left
    assert before.items() <= contents(uri).items(), "something is gone, or was changed"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["merge", "catchup", "compact", "snapshot", "expire"])
def test_a_lease_that_is_lost_right_after_a_commit(tmp_path: Path, name: str) -> None:
    """Nothing of the version goes: what the run wrote for it is not unpublished any more."""
    uri = create(str(tmp_path / "t.lance"))
    for number in range(2):
        write(uri, number)
    with lance.dataset(uri).mem_wal_writer(str(REGION)) as writer:
        writer.put(rows([1, 2, 3], "new"))
    table = open_table(uri)

    def check() -> None:
        if open_table(uri).revision > table.revision:
            raise LeaseLostError("held by another")

    guard = LeaseGuard(check)
    spec = job_specs("lance")[name]
    with suppress(LeaseLostError):
        spec.job.apply(table.with_guard(guard), OPTIONS.get(name) or spec.options(), RunContext(guard=guard))
    newest = open_table(uri)
    assert newest.revision > table.revision or name == "expire"
    assert not missing_files(newest.store, references(newest.manifest).own)
    assert newest.dataset.to_table().num_rows
