"""The formats under test; the toy is installed as a package of its own for as long as a module's tests run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from memwal_ops.core.registry import clear_caches
from memwal_ops.storage import probe
from tests.conformance.formats import FORMATS, FormatUnderTest, TableUnderTest
from tests.support.plugin_packages import install

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = os.path.dirname(__file__)


@pytest.fixture(scope="module", autouse=True)
def toy_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a process needs to see the toy; this one sees it."""
    from pathlib import Path

    environment = install(["toy"], tmp_path_factory.mktemp("toy"), Path(HERE))
    with pytest.MonkeyPatch.context() as patch:
        for path in environment["PYTHONPATH"].split(os.pathsep):
            if path not in sys.path:
                patch.syspath_prepend(path)
        clear_caches()
        yield environment
    clear_caches()


@pytest.fixture(params=FORMATS, ids=lambda one: one.label)
def kind(request: pytest.FixtureRequest) -> FormatUnderTest:
    found = request.param
    assert isinstance(found, FormatUnderTest)
    return found


@pytest.fixture
def made(kind: FormatUnderTest, tmp_path: Path) -> TableUnderTest:
    """A table with a backlog."""
    probe._proven.clear()
    return kind.make(str(tmp_path / "t.lance"))
