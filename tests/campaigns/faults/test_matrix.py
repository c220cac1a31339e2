"""Every job with every fault at every point, and with every other job at every point."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.campaigns.faults.cells import DELAY
from tests.campaigns.faults.jobs import JOBS, OTHERS
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.campaigns.faults.cells import Matrix

_PROVES = {
    "merge": pytest.mark.req("S0-168"),
    "expire": pytest.mark.req("S0-189"),
    "gc": pytest.mark.req("S0-060", "S0-183", "S0-189", "S0-190"),
}
_MEETINGS = [
    (job.name, other) for job in JOBS.values() if job.is_beside for other in (*OTHERS, DELAY) if other != job.name
]


_Cell = TypeVar("_Cell")
# Of how many parts of the matrix one is run; which one, the seed tells.
PARTS = env_number("FAULT_PARTS", 1)


def chosen(cells: Iterable[_Cell]) -> Iterator[_Cell]:
    return (cell for cell in cells if (zlib.crc32(str(cell).encode()) + CAMPAIGN_SEED) % PARTS == 0)


@pytest.mark.parametrize("job", [pytest.param(name, marks=_PROVES.get(name, ())) for name in JOBS])
def test_a_fault_at_every_point(matrix: Matrix, job: str) -> None:
    for cell in chosen(matrix.hits(JOBS[job])):
        matrix.run(cell)


@pytest.mark.parametrize(("job", "other"), _MEETINGS)
def test_others_run_at_every_point(matrix: Matrix, job: str, other: str) -> None:
    for cell in chosen(matrix.meetings(JOBS[job], other)):
        matrix.run(cell)
