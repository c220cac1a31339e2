"""Every job with every fault at every point, and with every other job at every point."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.cells import DELAY
from tests.faults.jobs import JOBS, OTHERS

if TYPE_CHECKING:
    from tests.faults.cells import Matrix

_PROVES = {
    "merge": pytest.mark.req("S0-168"),
    "expire": pytest.mark.req("S0-189"),
    "gc": pytest.mark.req("S0-060", "S0-183", "S0-189", "S0-190"),
}
_MEETINGS = [
    (job.name, other) for job in JOBS.values() if job.is_beside for other in (*OTHERS, DELAY) if other != job.name
]


@pytest.mark.parametrize("job", [pytest.param(name, marks=_PROVES.get(name, ())) for name in JOBS])
def test_a_fault_at_every_point(matrix: Matrix, job: str) -> None:
    for cell in matrix.hits(JOBS[job]):
        matrix.run(cell)


@pytest.mark.parametrize(("job", "other"), _MEETINGS)
def test_others_run_at_every_point(matrix: Matrix, job: str, other: str) -> None:
    for cell in matrix.meetings(JOBS[job], other):
        matrix.run(cell)
