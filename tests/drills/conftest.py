"""The drill of the page that a test is named for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.drills.drill import ERRORS, Drill
from tests.drills.error_pages import Page

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def drill(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Drill]:
    """For ``test_03_table_not_found``: runbooks/errors/03-table_not_found.md, which the test follows to its end."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-", 1)
    made = Drill(Page(ERRORS / f"{name}.md"), capfd, monkeypatch)
    yield made
    assert made.followed, "commands of the page were left out"
