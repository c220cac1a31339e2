"""A table's store as a supervised job sees it: nothing is published or deleted under a lease that was lost.

Every request is a sign of life, too.

The jobs know nothing of this: they get a table whose store asks before it writes. It saves work, and
proves nothing: between the question and the write, the lease may be lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.holds import EXPIRIES_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.storage.api import DeleteReport, Listing, ObjectMeta, Store

_OWN = "_mem_wal_ops/"
_COLLECTED = "_mem_wal/"


class GuardedStore:
    """Passes everything on; ``check`` is called before each conditional write and each collecting delete.

    Args:
        inner: the store itself.
        check: raises where the lease was lost.
        on_request: called at every request.
    """

    def __init__(self, inner: Store, check: Callable[[], None], on_request: Callable[[], None]) -> None:
        """Wrap ``inner``."""
        self._inner = inner
        self._check = check
        self._on_request = on_request

    @property
    def root(self) -> str:
        """The wrapped store's root."""
        return self._inner.root

    def get(self, path: str) -> bytes:
        """See the interface."""
        self._on_request()
        return self._inner.get(path)

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """See the interface."""
        self._on_request()
        return self._inner.get_range(path, start, length)

    def head(self, path: str) -> ObjectMeta | None:
        """See the interface."""
        self._on_request()
        return self._inner.head(path)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """See the interface."""
        for meta in self._inner.list(prefix, after=after):
            self._on_request()
            yield meta

    def list_level(self, prefix: str = "") -> Listing:
        """See the interface."""
        self._on_request()
        return self._inner.list_level(prefix)

    def put(self, path: str, data: bytes) -> None:
        """See the interface: hints, for which no lease is needed."""
        self._on_request()
        self._inner.put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Checked, unless it is a note that changes nothing; an expiry is announced right before versions go."""
        self._on_request()
        if not path.startswith(_OWN) or path.startswith(EXPIRIES_FOLDER):
            self._check()
        return self._inner.put_if_absent(path, data)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Checked."""
        self._on_request()
        self._check()
        return self._inner.compare_and_swap(path, data, e_tag)

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Checked where the collector deletes; a job's own leftovers go in any case."""
        self._on_request()
        wanted = [*paths]
        if any(path.startswith(_COLLECTED) for path in wanted):
            self._check()
        return self._inner.delete_many(wanted)
