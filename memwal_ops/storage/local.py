"""Local files as an object store: no folders, no way out of the root.

A file system differs from an object store in three ways that readers of a listing would trip
over: folders exist by themselves, links lead elsewhere, and a root may be missing. Here all
three are hidden. May not enter: anything about remote stores.
"""

from __future__ import annotations

import os
import re
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import obstore

from memwal_ops.errors import ConditionalWriteUnsupportedError, InvalidUsageError, StorageError
from memwal_ops.storage.api import Listing
from memwal_ops.storage.clients import local_client
from memwal_ops.storage.errors import translate
from memwal_ops.storage.object_store import ObjectStore, checked_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memwal_ops.storage.api import ObjectMeta
    from memwal_ops.storage.clients import Client
    from memwal_ops.storage.retries import RetryPolicy


# obstore cannot name these. It takes "x|" and "x:" for a Windows drive: it makes a folder of that
# name and then answers put-if-absent with "exists", though nothing was ever written there.
_UNNAMEABLE = re.compile(r"#[0-9]+$|[A-Za-z][:|]$")


class LocalObjectStore(ObjectStore):
    """The files below one local folder.

    The folder need not exist: it then reads as empty, and the first write makes it. Deleting
    the last file of a folder removes the folder, and its parents while they are empty, but
    never the root. A link that leaves the root is neither listed nor followed. A name that ends
    in ``#`` and digits belongs to an upload under way: it is refused, and not listed.
    """

    def __init__(self, root: str, *, retry: RetryPolicy | None = None) -> None:
        """``root`` is an absolute path."""
        super().__init__(None, root, delete_batch=1, retry=retry)
        self._real_root = os.path.realpath(root)
        self._lock = threading.Lock()

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects below the folder ``prefix``, streamed in no particular order; see the interface."""
        folder = self._folder(prefix)
        if not os.path.isdir(self._absolute(folder)):
            return iter(())
        inside = lru_cache(maxsize=1024)(self._is_inside)
        return (
            meta
            for meta in super()._pages(folder, after)
            if self._is_ours(meta.path, folder_is_inside=inside(os.path.dirname(meta.path)))
        )

    def list_level(self, prefix: str = "") -> Listing:
        """The entries directly in the folder ``prefix``; folders without any object stand apart, as ``empty``."""
        folder = self._folder(prefix)
        if not os.path.isdir(self._absolute(folder)):
            return Listing((), ())
        found = super().list_level(prefix)
        full = tuple(path for path in found.directories if next(self.list(path), None) is not None)
        return Listing(
            directories=full,
            empty=tuple(path for path in found.directories if path not in full and self._is_inside(path)),
            objects=tuple(
                meta for meta in found.objects if self._is_ours(meta.path, folder_is_inside=self._is_inside(folder))
            ),
        )

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Raises ``ConditionalWriteUnsupportedError``: a file has no tag that a write could depend on."""
        del path, data, e_tag
        raise ConditionalWriteUnsupportedError(
            f"{self._root} is a local folder, which has no compare-and-swap.",
            remedy="Use numbered versions by put-if-absent on this store.",
        )

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            obstore.delete(self._client(), name)

    def _client(self, *, writing: bool = False) -> Client:
        with self._lock:
            if self._made_client is None:
                try:
                    if writing:
                        os.makedirs(self._real_root, exist_ok=True)
                    elif not os.path.exists(self._real_root):
                        # Raised as an absence, which every verb understands.
                        raise FileNotFoundError(2, "No such folder", self._root)
                    self._made_client = local_client(self._real_root)
                except PermissionError as exc:
                    raise translate(exc, path=self._root, action="write" if writing else "read") from exc
            return self._made_client

    def _checked(self, path: str) -> str:
        checked_path(path)
        if _UNNAMEABLE.search(path):
            raise InvalidUsageError(f"{path!r} cannot be a local file here: its name ends in '#1', 'x:' or the like.")
        if not self._is_inside(path):
            raise StorageError(
                f"{path!r} leads out of {self._root} by a link.",
                remedy="Put the files themselves into the table's folder; nothing outside it is touched.",
            )
        return path

    def _absolute(self, path: str) -> str:
        return os.path.join(self._real_root, path)

    def _is_inside(self, path: str) -> bool:
        real = os.path.realpath(self._absolute(path))
        return real == self._real_root or real.startswith(self._real_root.rstrip("/") + "/")

    def _is_ours(self, path: str, *, folder_is_inside: bool) -> bool:
        """Whether a listed file lies in the root; the folder's own answer is the caller's to remember."""
        if not folder_is_inside:
            return False
        return not os.path.islink(self._absolute(path)) or self._is_inside(path)
