"""What a repair keeps: written before anything is replaced, once, and never taken for something else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from memwal_ops.core.quarantine import content_of, keep, object_place, read_record
from memwal_ops.errors import InvalidFormatError, InvalidUsageError, InvariantViolatedError
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.storage.api import Store


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """With compare-and-swap, and without."""
    return open_store(resolve(f"memory://{uuid4()}" if request.param == "memory" else str(tmp_path)))


def test_a_swap_needs_what_was_seen(store: Store) -> None:
    place = object_place(store, "folder/hint")
    assert place.read() is None
    assert place.swap(None, b"1")
    assert not place.swap(None, b"2")
    assert not place.swap(b"0", b"2")
    assert place.swap(b"1", b"2")
    assert place.read() == b"2"
    assert not place.swap(b"1", None)
    assert place.swap(b"2", None)
    assert place.read() is None
    assert not place.swap(b"2", b"3")
    assert not place.swap(None, None)


def test_it_is_kept_once_and_read_back(store: Store) -> None:
    kept = keep(store, "check", "object:a", b"old", b"new")
    assert keep(store, "check", "object:a", b"old", b"new") == kept
    assert read_record(store, kept.id) == kept
    assert content_of(store, kept) == b"old"
    other = keep(store, "check", "object:a", None, b"new")
    assert other.id != kept.id
    assert content_of(store, read_record(store, other.id)) is None


def test_what_is_not_what_was_kept_is_refused(store: Store) -> None:
    kept = keep(store, "check", "object:a", b"old", b"new")
    store.put(kept.content, b"another")
    with pytest.raises(InvalidFormatError, match="its hash differs"):
        content_of(store, kept)
    with pytest.raises(InvariantViolatedError):
        keep(store, "check", "object:a", b"old", b"new")
    store.delete_many([kept.content])
    with pytest.raises(InvalidFormatError, match="is missing"):
        content_of(store, kept)


@pytest.mark.parametrize("change", [{"place": 7}, {"id": "0" * 16}, {"content": "data/x"}])
def test_a_record_that_was_changed_is_refused(store: Store, change: dict[str, object]) -> None:
    kept = keep(store, "check", "object:a", b"old", b"new")
    path = f"{kept.folder}/record.json"
    store.put(path, json.dumps({**json.loads(store.get(path)), **change}).encode())
    with pytest.raises(InvalidFormatError, match="record"):
        read_record(store, kept.id)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null"])
def test_what_is_no_record_is_refused(store: Store, data: bytes) -> None:
    store.put(f"_mem_wal_ops/quarantine/{'a' * 16}/record.json", data)
    with pytest.raises(InvalidFormatError):
        read_record(store, "a" * 16)


@pytest.mark.parametrize("name", ["b" * 16, "../" * 5 + "a", "", "A" * 16])
def test_an_unknown_id_names_those_that_there_are(store: Store, name: str) -> None:
    kept = keep(store, "check", "object:a", b"old", b"new")
    with pytest.raises(InvalidUsageError) as refused:
        read_record(store, name)
    assert kept.id in refused.value.remedy
