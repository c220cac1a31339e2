"""The store on obstore, for S3, GCS, Azure and memory; :mod:`memwal_ops.storage.local` derives the one on local files.

obstore's stream of a listing cannot be used after an error. Stores list in the order of their keys, so a new
stream that starts after the last object continues where the old one failed, and memory holds
one page. The start of a listing is only a hint to the store: a server may ignore it
(releases of Azurite did), so objects that sort before it are skipped here.

obstore reports one error for a whole batch of deletions, without the objects that failed. A failed batch
is therefore bisected until each failure has a path; k failures among n objects cost
about k * log2(n) further requests. Deleting an absent object again is harmless. If the store refuses
batches with these credentials, the objects are deleted one by one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from memwal_ops.errors import (
    InvalidUsageError,
    InvariantViolatedError,
    MemwalOpsError,
    StorageCredentialsError,
    StoreUnavailableError,
    TableNotFoundError,
)
from memwal_ops.storage import api, errors, metering, probe


class ListingPages:
    """The pages of one recursive listing, in order. :meth:`attempt` may be called again after an error."""

    def __init__(self, client: Callable[[], metering.Client], folder: str, after: str | None = None) -> None:
        """List the objects below ``folder`` that sort after ``after`` (by bytes in UTF-8); empty: below the root.

        ``client`` is called for each new stream.
        """
        self._client = client
        self._folder = folder
        self._stream: Iterator[Sequence[obstore.ObjectMeta]] | None = None
        self._after = after
        self._last: str | None = None
        self._seen: str | None = None
        self._in_order = True

    def attempt(self) -> tuple[api.ObjectMeta, ...] | None:
        """The next page of at most 1,000 objects, possibly empty; None after the last.

        Raises:
            StorageError: a page failed in a listing that is not in order (S3 Express): continuing
                from the last object could skip others, and a file that is not listed would be taken for absent.
            Exception: obstore's own errors, after which this can be called again.
        """
        try:
            if self._stream is None:
                self._stream = self._begin()
            page = [to_meta(entry) for entry in next(self._stream)]
        except StopIteration:
            return None
        except Exception as exc:
            self._stream = None
            if not self._in_order or (self._last is not None and not _same_in_every_order(self._last)):
                raise errors.translate(exc, path=self._folder, action="list") from exc
            raise
        objects = []
        for meta in page:
            self._in_order = self._in_order and (self._seen is None or _sorts_after(meta.path, self._seen))
            self._seen = meta.path
            if self._after is None or _sorts_after(meta.path, self._after):
                self._last = meta.path
                objects.append(meta)
        return tuple(objects)

    def _begin(self) -> Iterator[Sequence[obstore.ObjectMeta]]:
        if self._last is not None:
            self._after = self._last
        self._seen = None
        offset = self._after if self._after is not None and _same_in_every_order(self._after) else None
        return metering.pages(self._client(), self._folder or None, offset)


def _sorts_after(path: str, other: str) -> bool:
    return path.encode() > other.encode()


def _same_in_every_order(path: str) -> bool:
    """Whether the same names sort after it by bytes (S3, GCS) as by UTF-16 units (Azurite).

    The orders differ from U+D800 on. Such a name is never sent as the start of a listing: a store with another
    order would skip objects, and an object that is not listed would be taken for absent.
    """
    return all(character < "\ud800" for character in path)


def to_meta(entry: obstore.ObjectMeta) -> api.ObjectMeta:
    """Convert obstore's metadata of an object."""
    e_tag = entry["e_tag"]
    return api.ObjectMeta(
        path=entry["path"],
        size=entry["size"],
        last_modified=entry["last_modified"],
        e_tag=None if e_tag is None else probe.bare(e_tag),
    )


_CONCURRENT_DELETES = 8  # single deletes in flight
# Failures of the store, not of one object: the next batch would fail in the same way.
_STORE_FAILURES = (StorageCredentialsError, StoreUnavailableError, TableNotFoundError)


def delete_many(
    paths: Iterable[str],
    *,
    delete: Callable[[Sequence[str]], None],
    check_of_batch: Callable[[], Callable[[str], str]],
    batch_size: int,
    policy: errors.RetryPolicy,
    delete_one: Callable[[str], None] | None = None,
) -> api.DeleteReport:
    """Delete all ``paths``, at most ``batch_size`` in each request.

    Args:
        paths: consumed lazily.
        delete: sends one request; raises if any of its objects could not be deleted.
        check_of_batch: the check of one batch; it raises ``MemwalOpsError`` for a path that must not be deleted.
        policy: for transient errors of one request.
        delete_one: deletes one object by another kind of request, for stores that may refuse batches.

    Memory holds one batch and the failures.
    """
    deleted = 0
    failed: dict[str, str] = {}
    broken: MemwalOpsError | None = None
    remaining = iter(paths)
    while batch := list(dict.fromkeys(islice(remaining, batch_size))):
        allowed, check = [], check_of_batch()
        for path in batch:
            try:
                check(path)
            except MemwalOpsError as exc:
                failed[path] = str(exc)
            else:
                allowed.append(path)
        if broken is None and allowed:
            before = len(failed)
            broken = _delete_batch(allowed, delete, delete_one, policy, failed)
            deleted += len(allowed) - (len(failed) - before)
        else:
            failed.update({path: str(broken) for path in allowed})
    return api.DeleteReport(deleted=deleted, failed=failed)


def _delete_batch(
    batch: list[str],
    delete: Callable[[Sequence[str]], None],
    delete_one: Callable[[str], None] | None,
    policy: errors.RetryPolicy,
    failed: dict[str, str],
) -> MemwalOpsError | None:
    """Delete one batch and add its failures to ``failed``; return the error if it is of the store as a whole."""
    pending = [batch]
    while pending:
        part = pending.pop()
        try:
            taken = errors.call(
                lambda part=part: _taken(delete, part, may_refuse=delete_one is not None),  # type: ignore[misc]
                path=part[0] if len(part) == 1 else f"{part[0]} and {len(part) - 1} more",
                action="delete",
                policy=policy,
            )
        except MemwalOpsError as exc:
            cause = exc.__cause__ or exc
            if len(part) == 1 and errors.is_absent(cause):
                continue
            if isinstance(exc, _STORE_FAILURES):
                failed.update({path: str(exc) for rest in (part, *pending) for path in rest})
                return exc
            if len(part) == 1 or errors.is_whole_request(cause):
                failed.update({path: str(exc) for path in part})
            else:
                middle = len(part) // 2
                pending += [part[middle:], part[:middle]]
        else:
            if not taken and delete_one is not None:
                broken = _delete_singly(part, delete_one, policy, failed)
                if broken is not None:
                    failed.update({path: str(broken) for rest in pending for path in rest})
                    return broken
    return None


def _taken(delete: Callable[[Sequence[str]], None], part: list[str], *, may_refuse: bool) -> bool:
    """Send one batch request; return False if the store refused it because it is a batch: not to be retried."""
    try:
        delete(part)
    except Exception as exc:
        if may_refuse and errors.refuses_batches(exc):
            return False
        raise
    return True


def _delete_singly(
    paths: list[str], delete_one: Callable[[str], None], policy: errors.RetryPolicy, failed: dict[str, str]
) -> MemwalOpsError | None:
    """Delete one by one, up to 8 concurrently; otherwise like :func:`_delete_batch`."""

    def attempt(path: str) -> MemwalOpsError | None:
        try:
            errors.call(lambda: delete_one(path), path=path, action="delete", policy=policy)
        except MemwalOpsError as exc:
            return None if errors.is_absent(exc.__cause__ or exc) else exc
        return None

    for start in range(0, len(paths), _CONCURRENT_DELETES):
        group = paths[start : start + _CONCURRENT_DELETES]
        outcomes = api.results_of(attempt, group, threads=_CONCURRENT_DELETES)
        failed.update({path: str(error) for path, error in zip(group, outcomes, strict=True) if error is not None})
        broken = next((error for error in outcomes if isinstance(error, _STORE_FAILURES)), None)
        if broken is not None:
            failed.update({path: str(broken) for path in paths[start + _CONCURRENT_DELETES :]})
            return broken
    return None


class ObjectStore:
    """An object store under one root. Safe to use from several threads.

    Args:
        client: obstore's client, rooted at ``root``; None if a subclass makes it later.
        root: the root as a URI, without credentials.
        delete_batch: the maximum number of objects in a delete request.

    Attributes:
        service: identifies the service and the bucket for what is remembered of them beyond this process; None: nothing
            is. Set by :func:`memwal_ops.storage.objects.open_store`.
    """

    service: str | None = None

    def __init__(
        self,
        client: metering.Client | None,
        root: str,
        *,
        delete_batch: int = 1000,
        retry: errors.RetryPolicy | None = None,
    ) -> None:
        self._made_client = client
        self._root = root
        self._delete_batch = delete_batch
        self._retry = retry or errors.RetryPolicy()
        self._tag_spelling: str | None = None
        self._tag_lock = threading.Lock()

    @property
    def root(self) -> str:
        """The root as a URI, without credentials."""
        return self._root

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._root!r})"

    def get(self, path: str) -> bytes:
        """The whole object. Raises ``ObjectNotFoundError``."""
        name = self._checked(path)
        return errors.call(
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

        data, tag = errors.call(attempt, path=path, action="read", policy=self._retry)
        if tag is None:
            raise probe.unsupported(self._root, "gives its objects no entity tags")
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
                if errors.starts_beyond_end(exc):
                    return b""
                raise

        return errors.call(attempt, path=path, action="read", policy=self._retry)

    def head(self, path: str) -> api.ObjectMeta | None:
        """Metadata of one object; None if it does not exist."""
        name = self._checked(path)

        def attempt() -> api.ObjectMeta | None:
            try:
                return to_meta(metering.head(self._client(), name))
            except Exception as exc:
                if errors.is_absent(exc):
                    return None
                raise

        return errors.call(attempt, path=path, action="read", policy=self._retry)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[api.ObjectMeta]:
        """All objects below the folder ``prefix``, streamed a page of 1,000 at a time.

        ``after``: only objects with a whole path that sorts after it.

        A failed page is retried from the last object on if the store lists in order; S3 Express does not, and a listing
        there fails as a whole. Raises ``StoreUnavailableError``: a page was not received before the deadline.
        """
        return self._pages(self._folder(prefix), after)

    def list_level(self, prefix: str = "") -> api.Listing:
        """The entries directly in the folder ``prefix``; an absent folder is empty."""
        folder = self._folder(prefix)

        def attempt() -> api.Listing:
            listing = metering.list_with_delimiter(self._client(), folder or None)
            return api.Listing(
                directories=tuple(sorted(listing["common_prefixes"])),
                # A key that ends in "/", as consoles create them, is listed as the folder itself.
                objects=tuple(to_meta(entry) for entry in listing["objects"] if entry["path"] != folder),
            )

        return errors.call(attempt, path=prefix or self._root, action="list", policy=self._retry)

    def put(self, path: str, data: bytes) -> None:
        """Write without condition: for hints only, never for authoritative data."""
        name = self._checked(path)
        errors.call(
            lambda: metering.put(self._client(writing=True), name, data, use_multipart=False),
            path=path,
            action="write",
            policy=self._retry,
        )

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write if no object exists at the path; False if one does (S0-051, S3-045).

        If the store's response is lost, the object is read back: True if it then has exactly
        these bytes. See :func:`memwal_ops.storage.errors.conditional_write`.

        Raises:
            StoreUnavailableError: no response before the deadline; it may have been written.
            ConditionalWriteUnsupportedError: the store refuses the condition itself.
        """
        name = self._checked(path)

        def write() -> bool:
            try:
                metering.put(self._client(writing=True), name, data, mode="create")
            except AlreadyExistsError as exc:
                if errors.is_transient(exc):
                    raise
                return False
            return True

        def read_back() -> bool | None:
            stored = self._content(name, len(data))
            return None if stored is None else stored[0] == data

        return errors.conditional_write(write, read_back, path=path, policy=self._retry)

    def put_back(self, path: str, data: bytes) -> bool:
        """Write an object again that was deleted, if none exists at the path; False if one does."""
        return self.put_if_absent(path, data)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Replace the object if it still has ``e_tag``; False if it has another one or is absent (S4-021).

        Before the first swap, a temporary object is used to verify that the store compares tags;
        see :func:`memwal_ops.storage.probe.accepted_spelling`.

        Raises:
            ConditionalWriteUnsupportedError: the store has no compare-and-swap (local files).
            StoreUnavailableError: no response before the deadline; it may have been written.
        """
        self._checked(path)
        with self._tag_lock:
            if self._tag_spelling is None:
                self._tag_spelling = probe.accepted_spelling(self, self._swap)
        return self._swap(path, data, self._tag_spelling.format(probe.bare(e_tag)))

    def _swap(self, path: str, data: bytes, sent: str) -> bool:
        name = self._checked(path)

        def write() -> bool:
            try:
                metering.put(self._client(writing=True), name, data, mode={"e_tag": sent})
            except (PreconditionError, AlreadyExistsError) as exc:
                # obstore reports every 404 of a conditional put as a failed condition, also that of a missing bucket.
                if errors.is_transient(exc) or errors.is_no_table(exc):
                    raise
                return False
            except Exception as exc:
                if isinstance(exc, NotImplementedError) or errors.has_no_swap(exc):
                    raise probe.unsupported(self._root, "has no compare-and-swap") from exc
                raise
            return True

        def read_back() -> bool | None:
            stored = self._content(name, len(data))
            if stored is None:
                return False
            content, current_tag = stored
            if content == data:
                return True
            return None if current_tag == probe.bare(sent) else False

        return errors.conditional_write(write, read_back, path=path, policy=self._retry)

    def delete_many(self, paths: Iterable[str]) -> api.DeleteReport:
        """Delete in batches; an absent object counts as deleted; a failure does not stop the remaining deletions.

        Only if the store itself is unreachable or refuses the credentials, the rest is
        reported as failed without being tried: each request would take a whole deadline.
        """
        return delete_many(
            paths,
            delete=self._delete,
            check_of_batch=self._check_of_batch,
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

    def _pages(self, folder: str, after: str | None) -> Iterator[api.ObjectMeta]:
        pages = ListingPages(self._client, folder, after)
        while True:
            page = errors.call(pages.attempt, path=folder or self._root, action="list", policy=self._retry)
            if page is None:
                return
            yield from (meta for meta in page if meta.path != folder)

    def _content(self, name: str, size: int) -> tuple[bytes | None, str | None] | None:
        """Content and entity tag, None if absent; the content is not read if its size differs."""
        try:
            response = metering.get(self._client(), name)
        except Exception as exc:
            if errors.is_absent(exc):
                return None
            raise
        return (bytes(response.bytes()) if response.meta["size"] == size else None), to_meta(response.meta).e_tag

    def _client(self, *, writing: bool = False) -> metering.Client:
        """The client; on local files the root folder is created if ``writing``."""
        del writing
        if self._made_client is None:
            raise InvariantViolatedError(f"{self._root} has no client.")
        return self._made_client

    def _checked(self, path: str) -> str:
        return checked_path(path)

    def _check_of_batch(self) -> Callable[[str], str]:
        """:meth:`_checked` for the paths of one batch, which may remember what their paths have in common."""
        return self._checked

    def _folder(self, prefix: str) -> str:
        return checked_path(prefix.removesuffix("/")) if prefix else ""


NO_SEGMENTS = frozenset({"", ".", ".."})
# Surrogates represent bytes of a file's name that are not UTF-8.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def checked_path(path: str) -> str:
    """The path itself, if it is relative UTF-8 with no empty, ``.`` or ``..`` segment and no control character.

    Raises ``InvalidUsageError``: it is not; nothing above the root can be named.
    """
    if not NO_SEGMENTS.isdisjoint(path.split("/")):
        raise InvalidUsageError(
            f"{path!r} is not an object path: it must be relative without empty, '.' or '..' parts."
        )
    if _CONTROL_CHARACTER.search(path):
        raise InvalidUsageError(f"{path!r} is not an object path: it contains a control character, or is not UTF-8.")
    return path
