"""Count the requests to a store, for benchmarks and tests."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from memwal_ops.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.storage.api import DeleteReport, Listing, ObjectMeta, Store

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CountingStore(StoreWrapper):
    """A store that forwards every call and counts it. Safe to use from several threads.

    Attributes:
        calls: calls per method of :class:`memwal_ops.storage.api.Store`. Retries inside the store
            are not counted; a listing is one call, however many pages it has.
        bytes_read: bytes that ``get`` and ``get_range`` returned.
        bytes_written: bytes given to ``put``, ``put_if_absent`` and ``compare_and_swap``.
        objects_listed: entries that ``list`` and ``list_level`` returned.
        objects_deleted: objects that ``delete_many`` reported as deleted.
    """

    def __init__(self, inner: Store) -> None:
        """Wrap ``inner``."""
        super().__init__(inner)
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        with self._lock:
            self.calls: Counter[str] = Counter()
            self.bytes_read = self.bytes_written = self.objects_listed = self.objects_deleted = 0

    def get(self, path: str) -> bytes:
        """Counted with its bytes."""
        data = super().get(path)
        self._count(read=len(data))
        return data

    def get_with_tag(self, path: str) -> tuple[bytes, str]:
        """Counted with its bytes."""
        data, tag = super().get_with_tag(path)
        self._count(read=len(data))
        return data, tag

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Counted with its bytes."""
        data = super().get_range(path, start, length)
        self._count(read=len(data))
        return data

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """Counted; objects count as they are taken."""
        return self._listed(super().list(prefix, after=after))

    def list_level(self, prefix: str = "") -> Listing:
        """Counted with its entries."""
        listing = super().list_level(prefix)
        self._count(listed=len(listing.directories) + len(listing.objects))
        return listing

    def put(self, path: str, data: bytes) -> None:
        """Counted with its bytes."""
        self._count(written=len(data))
        super().put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Counted with its bytes."""
        self._count(written=len(data))
        return super().put_if_absent(path, data)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Counted with its bytes."""
        self._count(written=len(data))
        return super().compare_and_swap(path, data, e_tag)

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Counted with what is gone."""
        report = super().delete_many(paths)
        self._count(deleted=report.deleted)
        return report

    def _call(self, verb: str, method: Callable[_P, _R], /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        self._count(verb)
        return method(*arguments, **named)

    def _listed(self, objects: Iterator[ObjectMeta]) -> Iterator[ObjectMeta]:
        for meta in objects:
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
