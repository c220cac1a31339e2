"""The store on obstore: conditional writes, streamed listings, batch deletes.

Implements :class:`memwal_ops.storage.api.Store` for S3, GCS, Azure and memory; local files add
what a file system has and an object store has not (:mod:`memwal_ops.storage.local`). May not
enter: what the objects mean.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from memwal_ops.errors import ConditionalWriteUnsupportedError, InvalidUsageError, InvariantViolatedError
from memwal_ops.storage import deletes
from memwal_ops.storage.api import Listing
from memwal_ops.storage.errors import is_absent, is_no_table, is_transient, starts_beyond_end
from memwal_ops.storage.paging import Pages, to_meta
from memwal_ops.storage.retries import RetryPolicy, call, conditional_write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memwal_ops.storage.api import DeleteReport, ObjectMeta
    from memwal_ops.storage.clients import Client


class ObjectStore:
    """An object store under one root. Safe to use from several threads.

    Args:
        client: obstore's client, rooted at ``root``; None where a subclass makes it later.
        root: the root as a URI, without credentials.
        delete_batch: how many objects one delete request takes.
        retry: how long transient errors are retried.
    """

    def __init__(
        self, client: Client | None, root: str, *, delete_batch: int = 1000, retry: RetryPolicy | None = None
    ) -> None:
        """See the class."""
        self._made_client = client
        self._root = root
        self._delete_batch = delete_batch
        self._retry = retry or RetryPolicy()

    @property
    def root(self) -> str:
        """The root as a URI, without credentials."""
        return self._root

    def __repr__(self) -> str:
        """Class and root."""
        return f"{type(self).__name__}({self._root!r})"

    def get(self, path: str) -> bytes:
        """The whole object. Raises ``ObjectNotFoundError``."""
        name = self._checked(path)
        return call(
            lambda: bytes(obstore.get(self._client(), name).bytes()), path=path, action="read", policy=self._retry
        )

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; what is there beyond the end. Raises ``ObjectNotFoundError``."""
        if start < 0 or length < 0:
            raise InvalidUsageError("A range needs start >= 0 and length >= 0.")
        name = self._checked(path)

        def attempt() -> bytes:
            if length == 0:
                # No store takes an empty range, but an absent object must still be named.
                obstore.head(self._client(), name)
                return b""
            try:
                return bytes(obstore.get_range(self._client(), name, start=start, length=length))
            except Exception as exc:
                if starts_beyond_end(exc):
                    return b""
                raise

        return call(attempt, path=path, action="read", policy=self._retry)

    def head(self, path: str) -> ObjectMeta | None:
        """Metadata of one object, or None where there is none."""
        name = self._checked(path)

        def attempt() -> ObjectMeta | None:
            try:
                return to_meta(obstore.head(self._client(), name))
            except Exception as exc:
                if is_absent(exc):
                    return None
                raise

        return call(attempt, path=path, action="read", policy=self._retry)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects below the folder ``prefix``, streamed a page of 1,000 at a time.

        ``after``: only those whose whole path sorts after it.

        A page that fails is asked for again from the last object on, as long as the store lists
        in order; S3 Express does not, and a listing there fails as a whole.

        Raises:
            StoreUnavailableError: a page did not come before the deadline.
        """
        return self._pages(self._folder(prefix), after)

    def list_level(self, prefix: str = "") -> Listing:
        """The entries directly in the folder ``prefix``; an absent folder is empty."""
        folder = self._folder(prefix)

        def attempt() -> Listing:
            found = obstore.list_with_delimiter(self._client(), folder or None)
            return Listing(
                directories=tuple(sorted(found["common_prefixes"])),
                # A key that ends in "/", as consoles make them, is listed as the folder itself.
                objects=tuple(to_meta(entry) for entry in found["objects"] if entry["path"] != folder),
            )

        return call(attempt, path=prefix, action="list", policy=self._retry)

    def put(self, path: str, data: bytes) -> None:
        """Write without condition: for hints only, never for truth."""
        name = self._checked(path)
        call(
            lambda: obstore.put(self._client(writing=True), name, data, use_multipart=False),
            path=path,
            action="write",
            policy=self._retry,
        )

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write unless an object stands there; False where one does (S0-051, S3-045).

        If the store's answer is lost, the object is read back: True where it then has exactly
        these bytes. See :func:`memwal_ops.storage.retries.conditional_write`.

        Raises:
            StoreUnavailableError: no answer before the deadline; it may have been written.
            ConditionalWriteUnsupportedError: the store refuses the condition itself.
        """
        name = self._checked(path)

        def write() -> bool:
            try:
                obstore.put(self._client(writing=True), name, data, mode="create")
            except AlreadyExistsError as exc:
                if is_transient(exc):
                    raise
                return False
            return True

        def read_back() -> bool | None:
            found = self._content(name, len(data))
            return None if found is None else found[0] == data

        return conditional_write(write, read_back, path=path, policy=self._retry)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Replace the object if it still has ``e_tag``; False where it has another or is absent (S4-021).

        Raises:
            ConditionalWriteUnsupportedError: the store cannot (local files).
            StoreUnavailableError: no answer before the deadline; it may have been written.
        """
        name = self._checked(path)

        def write() -> bool:
            try:
                obstore.put(self._client(writing=True), name, data, mode={"e_tag": e_tag})
            except (PreconditionError, AlreadyExistsError) as exc:
                # obstore calls every 404 of a conditional put a failed condition, a missing bucket's too.
                if is_transient(exc) or is_no_table(exc):
                    raise
                return False
            except NotImplementedError as exc:
                raise ConditionalWriteUnsupportedError(
                    f"{self._root} has no compare-and-swap.",
                    remedy="Use numbered versions by put-if-absent on this store.",
                ) from exc
            return True

        def read_back() -> bool | None:
            found = self._content(name, len(data))
            if found is None:
                return False
            content, standing = found
            if content == data:
                return True
            return None if standing == e_tag else False

        return conditional_write(write, read_back, path=path, policy=self._retry)

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Delete in batches; an absent object counts as deleted; never stops at the first failure.

        Only where the store itself cannot be reached or refuses the credentials is the rest
        reported as failed without being tried: each would cost a whole deadline.
        """
        return deletes.delete_many(
            paths, delete=self._delete, check=self._checked, batch_size=self._delete_batch, policy=self._retry
        )

    def _delete(self, names: Sequence[str]) -> None:
        obstore.delete(self._client(writing=True), names)

    def _pages(self, folder: str, after: str | None) -> Iterator[ObjectMeta]:
        pages = Pages(self._client, folder, after)
        while True:
            page = call(pages.attempt, path=folder, action="list", policy=self._retry)
            if page is None:
                return
            yield from (meta for meta in page if meta.path != folder)

    def _content(self, name: str, size: int) -> tuple[bytes | None, str | None] | None:
        """Content and entity tag, None where absent; the content is not fetched where its size differs."""
        try:
            found = obstore.get(self._client(), name)
        except Exception as exc:
            if is_absent(exc):
                return None
            raise
        tag = found.meta["e_tag"]
        return (bytes(found.bytes()) if found.meta["size"] == size else None), tag

    def _client(self, *, writing: bool = False) -> Client:
        """The client; local files make the root's folder when ``writing``."""
        del writing
        if self._made_client is None:
            raise InvariantViolatedError(f"{self._root} has no client.")
        return self._made_client

    def _checked(self, path: str) -> str:
        return checked_path(path)

    def _folder(self, prefix: str) -> str:
        return checked_path(prefix.removesuffix("/")) if prefix else ""


_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def checked_path(path: str) -> str:
    """The path itself, if it is relative, has no empty, ``.`` or ``..`` segment and no control character.

    Raises:
        InvalidUsageError: it is not; nothing above the root can be named.
    """
    if any(segment in {"", ".", ".."} for segment in path.split("/")):
        raise InvalidUsageError(f"{path!r} is no object path: it must be relative, without empty, '.' or '..' parts.")
    if _CONTROL_CHARACTER.search(path):
        raise InvalidUsageError(f"{path!r} is no object path: it contains a control character.")
    return path
