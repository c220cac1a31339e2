"""Unit tests stay fast: none may start a process. (Those that ask for S3 are left out by ``make check``.)"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*command: Any, **_: Any) -> None:
        pytest.fail(f"A unit test starts {command[:1]}: it belongs to tests/integration or tests/system.")

    if request.node.get_closest_marker("s3") is None:
        monkeypatch.setattr(subprocess, "Popen", refused)
