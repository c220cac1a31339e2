"""Store what a repair replaces below ``_mem_wal_ops/quarantine/``, with a record to restore it from.

A repair writes the replaced content and its record before it replaces anything. So a run that is killed in between
leaves a record of a repair that was not made, and never a repair without its record. The id of a record follows from
its content: a run that repeats a killed one writes the same objects.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memwal_ops import errors
from memwal_ops.core.anchors import anchor_at, delete_proven
from memwal_ops.storage.api import Store
from memwal_ops.storage.records import decode_record, encode_record

QUARANTINE_FOLDER = "_mem_wal_ops/quarantine"
_ID = re.compile(r"[0-9a-f]{16}")
_RECORD = re.compile(rf"{QUARANTINE_FOLDER}/([0-9a-f]{{16}})/record\.json")


@dataclass(frozen=True, slots=True)
class Place:
    """What a repair replaces. It is an object of the table, or an entry of a manifest.

    Attributes:
        name: in a record: ``KIND:WHAT``.
        read: its present content; None: it does not exist.
        swap: replaces the content, if it is still the first argument, by the second one; False if it is not. None: it
            does not exist.
    """

    name: str
    read: Callable[[], bytes | None]
    swap: Callable[[bytes | None, bytes | None], bool]


def object_place(store: Store, path: str) -> Place:
    """A whole object, on which no reader depends. It is a hint, or its content is known.

    On a store without compare-and-swap, the object is read again right before it is replaced: another writer's value
    may be lost. So either of the two values must be harmless.
    """

    def read() -> bytes | None:
        try:
            return store.get(path)
        except errors.ObjectNotFoundError:
            return None

    def swap(seen: bytes | None, data: bytes | None) -> bool:
        if seen is None:
            return data is not None and store.put_if_absent(path, data)
        if data is None:
            anchor = anchor_at(store, path, path)
            return read() == seen and not delete_proven(store, [path], [anchor]).failed
        try:
            present, tag = store.get_with_tag(path)
            return present == seen and store.compare_and_swap(path, data, tag)
        except errors.ObjectNotFoundError:
            return False
        except errors.ConditionalWriteUnsupportedError:
            if read() != seen:
                return False
            store.put(path, data)
            return True

    return Place(f"object:{path}", read, swap)


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """The record of one repair.

    Attributes:
        id: its name: 16 hexadecimal digits.
        before: SHA-256 of the content that was replaced, in hexadecimal; None: it did not exist.
        after: the same of the content that replaced it.
    """

    id: str
    check: str
    place: str
    before: str | None
    after: str | None

    @property
    def folder(self) -> str:
        """The path of its folder below the table's root."""
        return f"{QUARANTINE_FOLDER}/{self.id}"

    @property
    def content(self) -> str:
        """The path of the replaced content."""
        return f"{self.folder}/content"

    def to_json(self) -> dict[str, str | None]:
        """The record as it is stored, and as reports show it."""
        return {
            "id": self.id,
            "check": self.check,
            "place": self.place,
            "content": None if self.before is None else self.content,
            "before_sha256": self.before,
            "after_sha256": self.after,
        }


def keep(store: Store, check: str, place: str, before: bytes | None, after: bytes | None) -> RepairRecord:
    """Store what is about to be replaced, then its record. Called right before the replacement.

    Raises ``StorageError``: the store failed; nothing was replaced.
    """
    hashes = digest(before), digest(after)
    kept = RepairRecord(_id(check, place, *hashes), check, place, *hashes)
    if before is not None:
        _put(store, kept.content, before)
    _put(store, f"{kept.folder}/record.json", encode_record(kept.to_json(), indent=1))
    return kept


def read_record(store: Store, name: str) -> RepairRecord:
    """The record of a repair.

    Raises:
        InvalidUsageError: there is none of that id.
        InvalidFormatError: it cannot be read.
        UnsupportedFeatureError: a later release wrote it.
    """
    path = f"{QUARANTINE_FOLDER}/{name}/record.json"
    try:
        data = store.get(path) if _ID.fullmatch(name) else None
    except errors.ObjectNotFoundError:
        data = None
    if data is None:
        known = ", ".join(_ids(store)) or "none"
        raise errors.InvalidUsageError(
            f"No repair {name!r:.80} is recorded in this table.", remedy=f"Give the id of one: {known}."
        )
    try:
        document = decode_record(data, path)
        check, place, before, after = (document[key] for key in ("check", "place", "before_sha256", "after_sha256"))
        record = RepairRecord(_id(check, place, before, after), check, place, before, after)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.InvalidFormatError(f"{path} is not the record of a repair: {error!r}") from error
    if record.id != name or record.to_json() != document:
        raise errors.InvalidFormatError(f"{path} is not the record of a repair: it was changed.")
    return record


def content_of(store: Store, kept: RepairRecord) -> bytes | None:
    """The content that a repair replaced; None: the place did not exist.

    Raises ``InvalidFormatError``: it is gone, or is not what was replaced.
    """
    if kept.before is None:
        return None
    try:
        data = store.get(kept.content)
    except errors.ObjectNotFoundError as error:
        raise errors.InvalidFormatError(
            f"{kept.content}, the content that repair {kept.id} replaced, is missing."
        ) from error
    if digest(data) != kept.before:
        raise errors.InvalidFormatError(
            f"{kept.content} is not the content that repair {kept.id} replaced: its hash differs."
        )
    return data


def digest(content: bytes | None) -> str | None:
    """SHA-256 in hexadecimal; None for what does not exist."""
    return None if content is None else hashlib.sha256(content).hexdigest()


def _id(check: str, place: str, before: str | None, after: str | None) -> str:
    return hashlib.sha256(json.dumps([check, place, before, after]).encode()).hexdigest()[:16]


def _ids(store: Store) -> Iterator[str]:
    matches = (_RECORD.fullmatch(meta.path) for meta in store.list(QUARANTINE_FOLDER))
    return iter(sorted(match[1] for match in matches if match is not None))


def _put(store: Store, path: str, data: bytes) -> None:
    if not store.put_if_absent(path, data) and store.get(path) != data:
        raise errors.InvariantViolatedError(
            f"{path} exists with different content, although its name is a hash of what it must contain."
        )
