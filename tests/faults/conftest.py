"""One matrix for all tests of a process: its tables are made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.cells import Matrix
from tests.faults.plan import pylance_points

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    matrix = Matrix(str(tmp_path_factory.mktemp("faults")))
    yield matrix
    matrix.verify()


@pytest.fixture
def matrix(tables: Matrix) -> Iterator[Matrix]:
    with pylance_points():
        yield tables
