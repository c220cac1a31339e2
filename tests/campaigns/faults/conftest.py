"""One matrix for all tests of a process: its tables are made once."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pytest

from tests.campaigns.faults.cells import Matrix
from tests.campaigns.faults.plan import pylance_points

if TYPE_CHECKING:
    from collections.abc import Iterator

# Some hundred small files are put right for each cell, which costs less in memory.
_MEMORY = "/dev/shm"


@pytest.fixture(scope="session")
def tables() -> Iterator[Matrix]:
    folder = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="memwal-ops-", dir=folder) as made:
        matrix = Matrix(made)
        yield matrix
        matrix.verify()


@pytest.fixture
def matrix(tables: Matrix) -> Iterator[Matrix]:
    with pylance_points():
        yield tables
