"""List the objects of many folders in the requests of one listing.

A folder of eight objects takes a request of its own to be listed, and so do 125 of them together: a page has 1,000
objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.storage.api import ObjectMeta, Store

_PAGE = 1000


class FolderListings:
    """Lists folders in few requests. They are asked for in ascending order, and read from one listing of their parent.

    The listing is read on from folder to folder. At the end of a page that does not reach the next one, it is begun
    again there: so it takes no more requests than a listing of each folder, but one for each that ends with a page.
    It may be a page older than the call: an object that was added meanwhile may be missing.

    A folder in which it finds fewer objects than are expected is listed by itself: some are gone, the store does not
    list in order (local files, S3 Express), or the folder was asked for out of order.

    Args:
        store: the store.
        parent: the folder that has the folders.
    """

    def __init__(self, store: Store, parent: str) -> None:
        """Nothing is listed yet."""
        self._store, self._parent = store, parent
        self._listing: Iterator[ObjectMeta] = iter(())
        self._next: ObjectMeta | None = None
        self._read = 0
        self._in_order = not store.root.startswith("/")

    def objects(self, folder: str, expected: int) -> dict[str, int]:
        """Path and bytes of all objects below ``folder``, which had ``expected`` of them when it was seen last."""
        found = self._read_on(folder) if self._in_order else {}
        if expected and len(found) >= expected:
            return found
        return {meta.path: meta.size for meta in self._store.list(folder)}

    def _read_on(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        inside, end = f"{folder}/", f"{folder}0".encode()  # "0" is the character after "/"
        if self._read == 0:
            self._begin(inside)
        while self._next is not None and self._next.path.encode() < end:
            if self._next.path.startswith(inside):
                found[self._next.path] = self._next.size
            elif self._read % _PAGE == 0:
                self._begin(inside)
                continue
            self._advance()
            if not self._in_order:
                return {}
        return found

    def _begin(self, after: str) -> None:
        self._listing, self._next, self._read = self._store.list(self._parent, after=after), None, 0
        self._advance()

    def _advance(self) -> None:
        last, self._next = self._next, next(self._listing, None)
        self._read += 1
        self._in_order = last is None or self._next is None or last.path.encode() < self._next.path.encode()
