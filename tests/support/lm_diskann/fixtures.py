"""Folders, and vectors that have clusters."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXTRA = all(find_spec(name) is not None for name in ("duckdb", "numba"))
NOT_COLLECTED = [] if EXTRA else ["test_*.py"]


@cache
def compile_kernels() -> None:
    """Let one process compile the kernels (40 processor seconds); the others wait, and find them in the cache."""
    from memwal_ops.formats import lm_diskann

    rows = np.random.default_rng(0).random((3010, 8), dtype=np.float32)
    lock = Path(tempfile.gettempdir(), f"memwal-ops-kernels-{os.getuid()}.lock")
    with lock.open("w") as file, tempfile.TemporaryDirectory() as folder:
        fcntl.flock(file, fcntl.LOCK_EX)
        lm_diskann.create(f"{folder}/made", dimension=8, R=8)
        with lm_diskann.open(f"{folder}/made") as index:
            index.insert(np.arange(3000), rows[:3000])
            index.insert(np.arange(3000, 3010), rows[3000:])
            index.search(rows[:1])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    compile_kernels()
    return str(tmp_path / "vectors.lmd")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a module builds the index that its tests begin with: each on a copy of its own."""
    compile_kernels()
    return str(tmp_path_factory.mktemp("template") / "vectors.lmd")


@pytest.fixture(scope="module")
def built(template: str, vectors: NDArray[np.float32]) -> str:
    """A merged graph of 1,200 nodes, unless a module builds another one."""
    from memwal_ops.formats import lm_diskann

    lm_diskann.create(template, dimension=16, R=8, L=40)
    with lm_diskann.open(template) as index:
        index.insert(np.arange(1200), vectors[:1200])
        index.merge()
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    """A copy of what the module built."""
    return shutil.copytree(built, folder)


@pytest.fixture(scope="session")
def vectors() -> NDArray[np.float32]:
    random = np.random.default_rng(7)
    centres = random.normal(size=(40, 16)) * 2
    return (centres[random.integers(0, 40, 4000)] + random.normal(size=(4000, 16))).astype(np.float32)
