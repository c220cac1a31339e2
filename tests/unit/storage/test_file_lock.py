"""Locks that another process keeps: they are waited for within a limit, and their holder is named."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops.errors import BusyError
from memwal_ops.storage import local
from memwal_ops.storage.local import LOCK_PATH, LockedFolder, holder_of, lock_within, swaps_wait

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN = str(os.getpid())
A_MOMENT = timedelta(milliseconds=20)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A file that is locked: another handle of one process conflicts as another process does."""
    path = tmp_path / LOCK_PATH
    path.parent.mkdir()
    with path.open("wb") as file:
        assert lock_within(file.fileno(), 0) is None
        yield path


def test_the_holder_is_named(held: Path) -> None:
    with held.open("r+b") as file:
        assert lock_within(file.fileno(), 0.02) == OWN


def test_a_process_id_that_a_dead_process_left_is_not_named(held: Path) -> None:
    held.write_text("1\n")
    with held.open("r+b") as file:
        assert holder_of(file.fileno()) == OWN


def test_without_a_list_of_the_kernel_the_file_names_the_holder(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LOCKS", str(held.parent / "none"))
    with held.open("r+b") as file:
        assert holder_of(file.fileno()) == OWN
        held.write_text("")
        assert holder_of(file.fileno()) == "unknown"


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("before")
    with path.open("r+b") as file:
        assert lock_within(file.fileno(), 0, announced=False) is None
    assert path.read_text() == "before"


def test_a_swap_does_not_wait_for_ever(held: Path) -> None:
    folder = LockedFolder(str(held.parent.parent))
    folder.put_if_absent("a", b"1")
    tag = folder.get_with_tag("a")[1]
    with swaps_wait(A_MOMENT), pytest.raises(BusyError, match=OWN) as refused:
        folder.compare_and_swap("a", b"2", tag)
    assert f"kill -CONT {OWN}" in refused.value.remedy
    assert folder.get("a") == b"1"


def test_a_free_lock_is_taken_even_without_a_wait(tmp_path: Path) -> None:
    folder = LockedFolder(str(tmp_path))
    folder.put_if_absent("a", b"1")
    with swaps_wait(timedelta(0)):
        assert folder.compare_and_swap("a", b"2", folder.get_with_tag("a")[1])
