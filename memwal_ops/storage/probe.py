"""Verify that a store enforces conditional writes, before any commit relies on them.

Every commit to a Lance table depends on put-if-absent: if a store accepts the header and ignores it, two writers both
publish version 7, and the second one overwrites the first one's rows. Formats with a single manifest object need
compare-and-swap.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from memwal_ops.errors import ConditionalWriteUnsupportedError, MemwalOpsError, StoreUnavailableError
from memwal_ops.storage import proven_stores
from memwal_ops.storage.errors import translate

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

PROBE_FOLDER = "_mem_wal_ops/probe"
_RIVALS = 8
NO_SWAP = "Use numbered versions by put-if-absent on this store; Lance tables need nothing else."
_proven: set[str] = set()
_lock = threading.Lock()


def probe_conditional_writes(store: Store, *, again: bool = False) -> None:
    """Verify put-if-absent by trying it (S3-044, S3-045): ten writes, two reads, one delete.

    An object is created, then created again with other content (which must be refused and change
    nothing), and then 8 threads create another object concurrently, of which exactly one must succeed.
    On local files a hard link to an existing name must be refused too: the write is made
    exclusive by a link there. The objects are deleted in any case. A success is remembered until the process ends, and
    of a remote store (its service and bucket) for a day, see :mod:`memwal_ops.storage.proven_stores`; a failure
    never is. ``again``: try it, even if a success is remembered.

    Raises:
        ConditionalWriteUnsupportedError: the store does not enforce it.
        ReadOnlyStoreError: the store cannot be written.
    """
    mark = getattr(store, "mark", None)
    if mark is not None:
        mark()  # also if it is proven: a commit that follows may be pylance's, which passes the store by
    service: str | None = getattr(store, "service", None)
    key = service or store.root
    if not again:
        with _lock:
            if key in _proven:
                return
        if service is not None and proven_stores.is_proven(service):
            return
    name = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
    raced = f"{name}-raced"
    written = [name]
    try:
        _refuses_second(store, name, written)
        written.append(raced)
        _has_one_winner(store, raced)
        if store.root.startswith("/"):
            _links_are_exclusive(os.path.join(store.root, name))
    except ConditionalWriteUnsupportedError:
        with _lock:
            _proven.discard(key)
        if service is not None:
            proven_stores.forget(service)
        raise
    finally:
        if written:
            store.delete_many(written)
    with _lock:
        _proven.add(key)
    if service is not None:
        proven_stores.remember(service)


def probe_compare_and_swap(store: Store) -> None:
    """Verify compare-and-swap by trying it (S4-021): of 8 concurrent replacements of one object, one must succeed.

    This also determines how the store expects the entity tag, see
    :func:`memwal_ops.storage.entity_tags.accepted_spelling`. The object is deleted in any case.

    Raises:
        ConditionalWriteUnsupportedError: the store does not enforce it, or has none (local files).
        ReadOnlyStoreError: the store cannot be written.
    """
    name = f"{PROBE_FOLDER}/{uuid.uuid4().hex}-swapped"
    written = [name]
    try:
        create_object(store, name, b"old " + os.urandom(16), written)
        meta = store.head(name)
        tag = meta.e_tag if meta is not None else None
        if tag is None:
            raise ConditionalWriteUnsupportedError(f"{store.root} gives its objects no entity tags.", remedy=NO_SWAP)
        rivals = [f"rival {number} ".encode() + os.urandom(16) for number in range(_RIVALS)]
        with ThreadPoolExecutor(_RIVALS) as pool:
            results = pool.map(lambda data: store.compare_and_swap(name, data, tag), rivals)
            won = [rival for rival, first in zip(rivals, results, strict=True) if first]
        if len(won) != 1 or store.get(name) != won[0]:
            raise ConditionalWriteUnsupportedError(
                f"{store.root} let {len(won)} of {_RIVALS} writers replace one object at the same time.",
                remedy=NO_SWAP,
            )
    finally:
        if written:
            store.delete_many(written)


def create_object(store: Store, name: str, data: bytes, written: list[str]) -> None:
    """Create an object; if the store refuses it, its name is removed from ``written``: there is nothing to delete."""
    try:
        created = store.put_if_absent(name, data)
    except StoreUnavailableError:
        raise  # it may have succeeded
    except MemwalOpsError:
        written.remove(name)
        raise
    if not created:
        raise ConditionalWriteUnsupportedError(f"{store.root} refused to create an object that did not exist.")


def _refuses_second(store: Store, name: str, written: list[str]) -> None:
    first, second = b"first " + os.urandom(16), b"second " + os.urandom(16)
    create_object(store, name, first, written)
    taken = store.put_if_absent(name, second)
    if taken or store.get(name) != first:
        raise ConditionalWriteUnsupportedError(
            f"{store.root} overwrote an object that was to be created only if absent."
        )


def _has_one_winner(store: Store, name: str) -> None:
    rivals = [f"rival {number} ".encode() + os.urandom(16) for number in range(_RIVALS)]
    with ThreadPoolExecutor(_RIVALS) as pool:
        results = pool.map(lambda data: store.put_if_absent(name, data), rivals)
        won = [rival for rival, first in zip(rivals, results, strict=True) if first]
    if len(won) != 1 or store.get(name) != won[0]:
        raise ConditionalWriteUnsupportedError(
            f"{store.root} let {len(won)} of {_RIVALS} writers create one object at the same time."
        )


def _links_are_exclusive(existing: str) -> None:
    other = f"{existing}-link"
    try:
        os.link(existing, other)
        try:
            os.link(existing, other)
        except FileExistsError:
            return
        raise ConditionalWriteUnsupportedError("The file system replaced an existing file by a hard link.")
    except OSError as exc:
        if exc.errno in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            raise ConditionalWriteUnsupportedError(
                "The file system has no hard links, by which a file is created exclusively."
            ) from exc
        raise translate(exc, path=other, action="write") from exc
    finally:
        if os.path.lexists(other):
            os.unlink(other)
