"""A run by hand is recorded in the leases of the jobs that supervisors maintain, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.anchors import LeaseGuard
from memwal_ops.core.context import RunContext
from memwal_ops.core.leases import BY_HAND, Holder, acquire, list_leases, read_lease, release
from memwal_ops.supervisor.workers.worker import _recorded
from tests.support.tables.workload import Workload

JOBS = ("merge", "gc")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A table with a generation; a supervisor has failed to merge it, and to collect its garbage."""
    table = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    table.put([1, 2])
    table.flush()
    store = open_table(table.uri).store
    for job in JOBS:
        lease, _ = acquire(store, job, Holder("us", "us@here"))
        assert lease is not None
        release(store, lease, "failed")
    return table.uri


def outcomes(uri: str) -> dict[str, tuple[str, str]]:
    request = {"uri": uri, "storage_options": {}, "failing": JOBS}
    return {job: (last["outcome"], last["instance"]) for job, last in _recorded(request).items()}


FAILED, DONE = ("failed", "us"), ("succeeded", BY_HAND)


def test_a_job_and_the_steps_of_maintain(uri: str) -> None:
    assert outcomes(uri) == {"merge": FAILED, "gc": FAILED}
    run_job(uri, "merge", apply=False)
    run_job(uri, "gc")
    assert outcomes(uri) == {"merge": FAILED, "gc": FAILED}, "a plan proves nothing"
    run_job(uri, "merge")
    assert outcomes(uri) == {"merge": DONE, "gc": FAILED}
    run_job(uri, "maintain", apply=True)
    assert outcomes(uri) == {"merge": DONE, "gc": DONE}
    assert [lease.job for lease in list_leases(open_table(uri).store)] == ["gc", "merge"], (
        "no lease was made for others"
    )


def test_a_run_of_a_supervisor_is_recorded_by_it_alone(uri: str) -> None:
    run_job(uri, "merge", context=RunContext(guard=LeaseGuard(lambda: None)))
    newest = read_lease(open_table(uri).store, "merge")
    assert newest is not None
    assert newest.last is not None
    assert newest.last.instance == "us"
