"""The record of an index that follows a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memwal_ops.core.erasure import FOLDER, read_followers, record_follower
from memwal_ops.errors import InvalidFormatError
from memwal_ops.storage.local import LocalObjectStore

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_erased_stays_recorded(tmp_path: Path) -> None:
    store = LocalObjectStore(str(tmp_path))
    record_follower(store, "one", str(tmp_path))
    record_follower(store, "two", "/nowhere")
    record_follower(store, "one", str(tmp_path), erased=7)
    record_follower(store, "one", str(tmp_path / "moved"))
    found = {one.uuid: one for one in read_followers(store)}
    assert (found["one"].erased, found["one"].folder, found["one"].is_here) == (7, str(tmp_path / "moved"), False)
    assert found["two"].erased == 0


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = LocalObjectStore(str(tmp_path))
    store.put(f"{FOLDER}/one.json", b"{}")
    with pytest.raises(InvalidFormatError, match=r"one\.json"):
        list(read_followers(store))
