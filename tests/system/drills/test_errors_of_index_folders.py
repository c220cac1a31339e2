"""The drill of the error that only formats with packages of their own have."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.formats import lm_diskann

if TYPE_CHECKING:
    from pathlib import Path

    from tests.system.drills.drill import Drill

EXTRA = all(importlib.util.find_spec(name) is not None for name in ("duckdb", "numba"))
pytestmark = pytest.mark.skipif(not EXTRA, reason="the extra memwal-ops[lm-diskann] is not installed")


@pytest.fixture
def folder(drill: Drill, tmp_path: Path) -> str:
    made = str(tmp_path / "vectors.lmd")
    lm_diskann.create(made, dimension=4)
    with lm_diskann.open(made) as index:
        index.insert([1, 2], [[0, 0, 0, 1], [0, 0, 1, 0]])
    drill.given(URI=made)
    return made


def test_58_extra_missing(drill: Drill, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "duckdb" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    drill.refused('memwal-ops merge "$URI"')
    drill.follow()
    monkeypatch.setattr(importlib.util, "find_spec", real)
    drill.rest()
