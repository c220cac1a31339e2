"""Every job, under a lease that is lost right before its first commit or deletion: it says so, and leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.errors import LeaseLostError
from memwal_ops.jobs import catchup, compact, expire, gc, maintain
from memwal_ops.jobs.api import Run
from memwal_ops.jobs.registry import load_jobs
from memwal_ops.supervisor.guarded_store import GuardedStore
from tests.cli.run import contents
from tests.jobs.test_catchup import REGION, create, rows, write
from tests.sim.steps import IMMEDIATE

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {
    "expire": expire.ExpireOptions(timedelta(0)),
    "gc": IMMEDIATE,
    "compact": compact.CompactOptions(),
    "maintain": maintain.MaintainOptions(apply=True),
}


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
        expire.apply(open_table(uri), expire.ExpireOptions(timedelta(0)))
        assert gc.plan(open_table(uri), IMMEDIATE).bytes_reclaimable
    before = contents(uri)
    asked = []

    def check() -> None:
        asked.append(name)
        raise LeaseLostError("held by another")

    table = open_table(uri)
    job = load_jobs()[name]
    with pytest.raises(LeaseLostError):
        job.apply(
            replace(table, store=GuardedStore(table.store, check, lambda: None)),
            OPTIONS.get(name, job.options()),
            Run(on_commit=check),
        )
    assert asked
    left = {path for path in contents(uri).keys() - before.keys() if not path.startswith("_mem_wal_ops")}
    # pylance's clean-up takes what a compaction wrote, the next merge takes the file of a transaction.
    allowed = {"compact": ("data/", "_indices/"), "merge": ("_transactions/",), "maintain": ("_transactions/",)}
    assert all(path.startswith(allowed.get(name, ("nothing",))) for path in left), left
    assert before.items() <= contents(uri).items(), "something is gone, or was changed"
