"""The namespace that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.zeppelin.namespace import NamespaceUnderTest


@pytest.fixture(params=["wiki", "native"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> NamespaceUnderTest:
    found = NamespaceUnderTest(str(tmp_path / "ns"), request.param)
    found.write()
    return found
