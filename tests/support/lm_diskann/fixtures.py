"""Folders, and vectors that have clusters."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

EXTRA = all(find_spec(name) is not None for name in ("duckdb", "numba", "xxhash"))
NOT_COLLECTED = [] if EXTRA else ["test_*.py"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "vectors.lmd")


@pytest.fixture(scope="session")
def vectors() -> NDArray[np.float32]:
    random = np.random.default_rng(7)
    centres = random.normal(size=(40, 16)) * 2
    return (centres[random.integers(0, 40, 4000)] + random.normal(size=(4000, 16))).astype(np.float32)
