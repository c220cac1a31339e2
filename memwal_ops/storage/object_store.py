"""The store on obstore: conditional writes, streamed listings, batch deletes.

Implements :class:`memwal_ops.storage.api.Store` for S3, GCS, Azure and memory;
:mod:`memwal_ops.storage.local` derives the store on local files.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from obstore.exceptions import AlreadyExistsError, PreconditionError

from memwal_ops.errors import InvalidUsageError, InvariantViolatedError
from memwal_ops.storage import deletes, metering
from memwal_ops.storage.api import Listing
from memwal_ops.storage.entity_tags import accepted_spelling, bare, unsupported
from memwal_ops.storage.errors import has_no_swap, is_absent, is_no_table, is_transient, starts_beyond_end
from memwal_ops.storage.paging import Pages, to_meta
from memwal_ops.storage.retries import RetryPolicy, call, conditional_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memwal_ops.storage.api import DeleteReport, ObjectMeta
    from memwal_ops.storage.clients import Client


class ObjectStore:
    """An object store under one root. Safe to use from several threads.

    Args:
        client: obstore's client, rooted at ``root``; None if a subclass makes it later.
        root: the root as a URI, without credentials.
        delete_batch: the maximum number of objects in a delete request.
        retry: how long transient errors are retried.

    Attributes:
        service: identifies the service and the bucket for what is remembered of them beyond this process; None: nothing
            is. Set by :func:`memwal_ops.storage.objects.open_store`.
    """

    service: str | None = None

    def __init__(
        self, client: Client | None, root: str, *, delete_batch: int = 1000, retry: RetryPolicy | None = None
    ) -> None:
        """See the class."""
        self._made_client = client
        self._root = root
        self._delete_batch = delete_batch
        self._retry = retry or RetryPolicy()
        self._tag_spelling: str | None = None
        self._tag_lock = threading.Lock()

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
            lambda: bytes(metering.get(self._client(), name).bytes()), path=path, action="read", policy=self._retry
        )

    def get_with_tag(self, path: str) -> tuple[bytes, str]:
        """The whole object and its entity tag, from one response (S4-021).

        Raises:
            ObjectNotFoundError: it does not exist.
            ConditionalWriteUnsupportedError: the store has no entity tags.
        """
        name = self._checked(path)

        def attempt() -> tuple[bytes, str | None]:
            response = metering.get(self._client(), name)
            return bytes(response.bytes()), to_meta(response.meta).e_tag

        data, tag = call(attempt, path=path, action="read", policy=self._retry)
        if tag is None:
            raise unsupported(self._root, "gives its objects no entity tags")
        return data, tag

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; fewer at the object's end. Raises ``ObjectNotFoundError``."""
        if start < 0 or length < 0:
            raise InvalidUsageError("A range needs start >= 0 and length >= 0.")
        name = self._checked(path)

        def attempt() -> bytes:
            if length == 0:
                # Stores refuse an empty range, but an absent object must still be an error.
                metering.head(self._client(), name)
                return b""
            try:
                return metering.get_range(self._client(), name, start=start, length=length)
            except Exception as exc:
                if starts_beyond_end(exc):
                    return b""
                raise

        return call(attempt, path=path, action="read", policy=self._retry)

    def head(self, path: str) -> ObjectMeta | None:
        """Metadata of one object; None if it does not exist."""
        name = self._checked(path)

        def attempt() -> ObjectMeta | None:
            try:
                return to_meta(metering.head(self._client(), name))
            except Exception as exc:
                if is_absent(exc):
                    return None
                raise

        return call(attempt, path=path, action="read", policy=self._retry)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects below the folder ``prefix``, streamed a page of 1,000 at a time.

        ``after``: only objects with a whole path that sorts after it.

        A failed page is retried from the last object on if the store lists
        in order; S3 Express does not, and a listing there fails as a whole.

        Raises:
            StoreUnavailableError: a page was not received before the deadline.
        """
        return self._pages(self._folder(prefix), after)

    def list_level(self, prefix: str = "") -> Listing:
        """The entries directly in the folder ``prefix``; an absent folder is empty."""
        folder = self._folder(prefix)

        def attempt() -> Listing:
            listing = metering.list_with_delimiter(self._client(), folder or None)
            return Listing(
                directories=tuple(sorted(listing["common_prefixes"])),
                # A key that ends in "/", as consoles create them, is listed as the folder itself.
                objects=tuple(to_meta(entry) for entry in listing["objects"] if entry["path"] != folder),
            )

        return call(attempt, path=prefix, action="list", policy=self._retry)

    def put(self, path: str, data: bytes) -> None:
        """Write without condition: for hints only, never for authoritative data."""
        name = self._checked(path)
        call(
            lambda: metering.put(self._client(writing=True), name, data, use_multipart=False),
            path=path,
            action="write",
            policy=self._retry,
        )

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write if no object exists at the path; False if one does (S0-051, S3-045).

        If the store's response is lost, the object is read back: True if it then has exactly
        these bytes. See :func:`memwal_ops.storage.retries.conditional_write`.

        Raises:
            StoreUnavailableError: no response before the deadline; it may have been written.
            ConditionalWriteUnsupportedError: the store refuses the condition itself.
        """
        name = self._checked(path)

        def write() -> bool:
            try:
                metering.put(self._client(writing=True), name, data, mode="create")
            except AlreadyExistsError as exc:
                if is_transient(exc):
                    raise
                return False
            return True

        def read_back() -> bool | None:
            stored = self._content(name, len(data))
            return None if stored is None else stored[0] == data

        return conditional_write(write, read_back, path=path, policy=self._retry)

    def put_back(self, path: str, data: bytes) -> bool:
        """Write an object again that was deleted, if none exists at the path; False if one does."""
        return self.put_if_absent(path, data)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Replace the object if it still has ``e_tag``; False if it has another one or is absent (S4-021).

        Before the first swap, a temporary object is used to verify that the store compares tags;
        see :func:`memwal_ops.storage.entity_tags.accepted_spelling`.

        Raises:
            ConditionalWriteUnsupportedError: the store has no compare-and-swap (local files).
            StoreUnavailableError: no response before the deadline; it may have been written.
        """
        self._checked(path)
        with self._tag_lock:
            if self._tag_spelling is None:
                self._tag_spelling = accepted_spelling(self, self._swap)
        return self._swap(path, data, self._tag_spelling.format(bare(e_tag)))

    def _swap(self, path: str, data: bytes, sent: str) -> bool:
        """One compare-and-swap with the tag spelled as ``sent``."""
        name = self._checked(path)

        def write() -> bool:
            try:
                metering.put(self._client(writing=True), name, data, mode={"e_tag": sent})
            except (PreconditionError, AlreadyExistsError) as exc:
                # obstore reports every 404 of a conditional put as a failed condition, also that of a missing bucket.
                if is_transient(exc) or is_no_table(exc):
                    raise
                return False
            except Exception as exc:
                if isinstance(exc, NotImplementedError) or has_no_swap(exc):
                    raise unsupported(self._root, "has no compare-and-swap") from exc
                raise
            return True

        def read_back() -> bool | None:
            stored = self._content(name, len(data))
            if stored is None:
                return False
            content, current_tag = stored
            if content == data:
                return True
            return None if current_tag == bare(sent) else False

        return conditional_write(write, read_back, path=path, policy=self._retry)

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Delete in batches; an absent object counts as deleted; a failure does not stop the remaining deletions.

        Only if the store itself is unreachable or refuses the credentials, the rest is
        reported as failed without being tried: each request would take a whole deadline.
        """
        return deletes.delete_many(
            paths,
            delete=self._delete,
            check=self._checked,
            batch_size=self._delete_batch,
            policy=self._retry,
            delete_one=self._delete_one,
        )

    @property
    def _delete_one(self) -> Callable[[str], None] | None:
        """A function that deletes one object by another kind of request, if the store may refuse batches."""
        return None

    def _delete(self, names: Sequence[str]) -> None:
        metering.delete(self._client(writing=True), names)

    def _pages(self, folder: str, after: str | None) -> Iterator[ObjectMeta]:
        pages = Pages(self._client, folder, after)
        while True:
            page = call(pages.attempt, path=folder, action="list", policy=self._retry)
            if page is None:
                return
            yield from (meta for meta in page if meta.path != folder)

    def _content(self, name: str, size: int) -> tuple[bytes | None, str | None] | None:
        """Content and entity tag, None if absent; the content is not read if its size differs."""
        try:
            response = metering.get(self._client(), name)
        except Exception as exc:
            if is_absent(exc):
                return None
            raise
        return (bytes(response.bytes()) if response.meta["size"] == size else None), to_meta(response.meta).e_tag

    def _client(self, *, writing: bool = False) -> Client:
        """The client; on local files the root folder is created if ``writing``."""
        del writing
        if self._made_client is None:
            raise InvariantViolatedError(f"{self._root} has no client.")
        return self._made_client

    def _checked(self, path: str) -> str:
        return checked_path(path)

    def _folder(self, prefix: str) -> str:
        return checked_path(prefix.removesuffix("/")) if prefix else ""


# Surrogates represent bytes of a file's name that are not UTF-8.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def checked_path(path: str) -> str:
    """The path itself, if it is relative UTF-8 with no empty, ``.`` or ``..`` segment and no control character.

    Raises:
        InvalidUsageError: it is not; nothing above the root can be named.
    """
    if any(segment in {"", ".", ".."} for segment in path.split("/")):
        raise InvalidUsageError(
            f"{path!r} is not an object path: it must be relative without empty, '.' or '..' parts."
        )
    if _CONTROL_CHARACTER.search(path):
        raise InvalidUsageError(f"{path!r} is not an object path: it contains a control character, or is not UTF-8.")
    return path
