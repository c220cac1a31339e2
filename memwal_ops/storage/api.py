"""The interface of an object store, as the rest of this package uses it.

Paths are relative to the table's root, use ``/`` and never start with it. Implementations
raise only classes of :mod:`memwal_ops.errors`, never an error of a client library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Protocol, TypeVar

from memwal_ops.errors import StorageError

_T = TypeVar("_T")
_R = TypeVar("_R")
_QUICK = 0.0005  # seconds for an item


def concurrently(
    function: Callable[[_T], _R], items: Iterable[_T], *, threads: int, chunk: int | None = None
) -> Iterator[tuple[_T, _R]]:
    """Each item with the function's result, in order; ``chunk`` items (by default ``threads``) are taken at a time.

    Those after a quick chunk need no threads: to change them takes longer than to read a small file of a local disk.
    No thread outlives an element: an iterator that is dropped halfway is closed by whichever thread collects the
    garbage, and one of its own could not wait for itself.
    """
    remaining, needed = iter(items), threads
    while taken := list(islice(remaining, chunk or threads)):
        began = time.monotonic()
        results = results_of(function, taken, threads=needed)
        needed = 1 if time.monotonic() - began < _QUICK * len(taken) else threads
        yield from zip(taken, results, strict=True)


def results_of(function: Callable[[_T], _R], items: Iterable[_T], *, threads: int) -> list[_R]:
    """The function's result for each item, in order; after an error no other one is begun."""
    items = [*items]
    if threads == 1:
        return [function(item) for item in items]
    results: dict[int, _R] = {}
    numbers = iter(range(len(items)))

    def work(_: int) -> None:  # a future for each item would cost more than the read of a local file
        try:
            for number in numbers:
                results[number] = function(items[number])
        finally:
            list(numbers)

    with ThreadPoolExecutor(threads) as pool:
        try:
            [*pool.map(work, range(min(threads, len(items))))]
        finally:
            list(numbers)
    return [results[number] for number in range(len(items))]


class LinkError(StorageError):
    """A local path is not followed: it contains a symbolic link, a pipe, a socket or a device."""

    remedy = "Replace the link by the files themselves, or mount the other folder there (mount --bind)."


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """Metadata of one object from a listing or HEAD: ``size`` in bytes, ``last_modified`` aware, in UTC."""

    path: str
    size: int
    last_modified: datetime
    e_tag: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of a listing: ``directories`` (relative paths without trailing ``/``) and ``objects``.

    ``empty``: folders without any object below them; on local files only. ``links``: symbolic
    links that are not followed; on local files only. A path through one raises ``LinkError``.
    """

    directories: tuple[str, ...]
    objects: tuple[ObjectMeta, ...]
    empty: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """Outcome of a batch delete. An absent object counts as deleted. ``failed`` maps path to message."""

    deleted: int
    failed: Mapping[str, str]


class Store(Protocol):
    """An object store under one root.

    Every method raises ``LinkError`` if a path contains a symbolic link that is not followed (local files).
    """

    @property
    def root(self) -> str:
        """The root as a URI, without credentials."""

    def get(self, path: str) -> bytes:
        """The whole object. Raises ``ObjectNotFoundError``."""

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; fewer at the object's end. Raises ``ObjectNotFoundError``."""

    def get_with_tag(self, path: str) -> tuple[bytes, str]:
        """The whole object and its entity tag from the same response, for :meth:`compare_and_swap`.

        Raises ``ObjectNotFoundError``; ``ConditionalWriteUnsupportedError`` if the store has no entity tags.
        """

    def head(self, path: str) -> ObjectMeta | None:
        """Metadata of one object; None if it does not exist."""

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects below the folder ``prefix``, streamed in no particular order.

        ``after``: only objects with a whole path that sorts after it; the others cost no request if the
        store lists in order. Any name is listed, including paths that the other methods refuse.
        """

    def list_level(self, prefix: str = "") -> Listing:
        """The entries directly in the folder ``prefix``; an absent folder is empty."""

    def put(self, path: str, data: bytes) -> None:
        """Write without condition: for hints only, never for authoritative data."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write if no object exists at the path; False if one does.

        False after a retried request may hide this caller's own success: callers compare contents
        if that matters.
        """

    def put_back(self, path: str, data: bytes) -> bool:
        """Write an expired version's manifest again, if no object exists at the path; False if one does.

        Only this differs from :meth:`put_if_absent` where another store decides which commit of a version holds.
        """

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Replace the object if it still has ``e_tag``; False if it has another one.

        Raises ``ConditionalWriteUnsupportedError`` if the store has no such write (local files).
        """

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Delete in batches; a failure does not stop the remaining deletions."""


class DiskFullError(StorageError):
    """There is no space left: on the disk, in a quota, or in the store."""

    reason = "disk_full"
    remedy = "Free space as runbooks/disk-full.md explains, then run the command again; nothing was half-written."


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """The entry of one version: the manifest's key in the bucket and its size in bytes (None: not recorded).

    ``moved_to``: the version is fenced, since the table was migrated to that URI; there is no manifest. ``last_fence``
    is the last version that is fenced, or is to be.
    """

    version: int
    path: str
    size: int | None
    moved_to: str | None = None
    last_fence: int | None = None
