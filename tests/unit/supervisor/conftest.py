"""A supervisor on a stage: three tables, and a clock that the test holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fakes import Stage

TABLES = "tables: [{uri: /a}, {uri: /b}, {uri: /c}]\n"
PLAIN = "defaults: {jobs: {merge: {schedule: 10m, when: generations >= 8}, gc: {apply: true}}}\n" + TABLES


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, PLAIN)
