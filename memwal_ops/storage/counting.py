"""Counts what a store is asked for: benchmarks and tests state their requests with it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.storage.api import DeleteReport, Listing, ObjectMeta, Store


class CountingStore:
    """A store that passes everything on and counts it. Safe to use from several threads.

    Attributes:
        calls: calls per verb of :class:`memwal_ops.storage.api.Store`. Retries inside the store
            are not seen; a listing is one call, however many pages it takes.
        bytes_read: bytes that ``get`` and ``get_range`` returned.
        bytes_written: bytes given to ``put``, ``put_if_absent`` and ``compare_and_swap``.
        objects_listed: entries that ``list`` and ``list_level`` gave.
        objects_deleted: objects that ``delete_many`` reported as deleted.
    """

    def __init__(self, inner: Store) -> None:
        """Wrap ``inner``."""
        self._inner = inner
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0
        self.objects_listed = 0
        self.objects_deleted = 0

    def reset(self) -> None:
        """Set all counts to zero."""
        with self._lock:
            self.calls = Counter()
            self.bytes_read = self.bytes_written = self.objects_listed = self.objects_deleted = 0

    @property
    def root(self) -> str:
        """The wrapped store's root."""
        return self._inner.root

    def get(self, path: str) -> bytes:
        """Counted ``get``."""
        self._count("get")
        data = self._inner.get(path)
        self._count(read=len(data))
        return data

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Counted ``get_range``."""
        self._count("get_range")
        data = self._inner.get_range(path, start, length)
        self._count(read=len(data))
        return data

    def head(self, path: str) -> ObjectMeta | None:
        """Counted ``head``."""
        self._count("head")
        return self._inner.head(path)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """Counted ``list``; objects count as they are taken."""
        self._count("list")
        return self._listed(self._inner.list(prefix, after=after))

    def list_level(self, prefix: str = "") -> Listing:
        """Counted ``list_level``."""
        self._count("list_level")
        found = self._inner.list_level(prefix)
        self._count(listed=len(found.directories) + len(found.objects))
        return found

    def put(self, path: str, data: bytes) -> None:
        """Counted ``put``."""
        self._count("put", written=len(data))
        self._inner.put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Counted ``put_if_absent``."""
        self._count("put_if_absent", written=len(data))
        return self._inner.put_if_absent(path, data)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Counted ``compare_and_swap``."""
        self._count("compare_and_swap", written=len(data))
        return self._inner.compare_and_swap(path, data, e_tag)

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Counted ``delete_many``."""
        self._count("delete_many")
        report = self._inner.delete_many(paths)
        self._count(deleted=report.deleted)
        return report

    def _listed(self, found: Iterator[ObjectMeta]) -> Iterator[ObjectMeta]:
        for meta in found:
            self._count(listed=1)
            yield meta

    def _count(
        self, verb: str | None = None, *, read: int = 0, written: int = 0, listed: int = 0, deleted: int = 0
    ) -> None:
        with self._lock:
            if verb is not None:
                self.calls[verb] += 1
            self.bytes_read += read
            self.bytes_written += written
            self.objects_listed += listed
            self.objects_deleted += deleted
