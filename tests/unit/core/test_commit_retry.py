"""A commit that conflicts waits longer each time, decides on the newest revision, and ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from memwal_ops.core import commit_retry as module
from memwal_ops.core.commit_retry import MAX_CONSECUTIVE_CONFLICTS, CommitRetry
from memwal_ops.errors import CommitConflictError, StorageError


class Table:
    location = SimpleNamespace(uri="memory://t")

    def __init__(self, revision: int) -> None:
        self.revision = revision

    def newest(self) -> Any:
        return Table(self.revision + 1)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The bounds of each random wait, in seconds; nothing waits."""
    found: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        found.append((low, high))
        return high

    slept: list[float] = []
    monkeypatch.setattr(module.random, "uniform", uniform)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    yield found
    assert slept == [high for _, high in found]


def test_the_wait_doubles_up_to_a_bound(waits: list[tuple[float, float]]) -> None:
    retry, table = CommitRetry(), Table(1)
    for _ in range(8):
        table = retry.conflict(table, StorageError("late"))  # type: ignore[type-var]
    assert waits == [(0, pytest.approx(0.02 * bound)) for bound in (2, 4, 8, 16, 32, 64, 64, 64)]
    assert (table.revision, retry.conflicts, retry.consecutive) == (9, 8, 8)


def test_a_conflict_is_logged(waits: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    logger = Mock()
    monkeypatch.setattr(module, "get_logger", logger)
    retry, late = CommitRetry(), StorageError("late")
    for revision in (7, 8):
        retry.conflict(Table(revision), late)  # type: ignore[type-var]
    assert {one.args for one in logger.call_args_list} == {("memwal_ops.core.commit_retry",)}
    assert logger.return_value.info.call_args_list == [
        call("commit_conflict", table="memory://t", version=8, attempt=1),
        call("commit_conflict", table="memory://t", version=9, attempt=2),
    ]


def test_a_successful_commit_resets_the_retries(waits: list[tuple[float, float]]) -> None:
    retry, table = CommitRetry(), Table(1)
    for _ in range(3):
        table = retry.conflict(table, StorageError("late"))  # type: ignore[type-var]
    assert retry.landed(table).revision == 5  # type: ignore[type-var]
    assert (retry.conflicts, retry.consecutive) == (3, 0)
    retry.conflict(table, StorageError("late"))  # type: ignore[type-var]
    assert waits[-1] == (0, pytest.approx(0.04))
    assert retry.conflicts == 4


def test_the_run_ends_if_others_always_win(waits: list[tuple[float, float]]) -> None:
    retry, table, late = CommitRetry(), Table(1), StorageError("late")
    for _ in range(MAX_CONSECUTIVE_CONFLICTS):
        retry.conflict(table, late)  # type: ignore[type-var]
    with pytest.raises(CommitConflictError, match="25 times in a row") as raised:
        retry.conflict(table, late)  # type: ignore[type-var]
    assert raised.value.__cause__ is late
    assert len(waits) == MAX_CONSECUTIVE_CONFLICTS
