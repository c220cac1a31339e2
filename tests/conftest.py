"""What holds for every test: fixtures, and the order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["tests.s3_server", "tests.spark"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, so that no process waits for the last of them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
