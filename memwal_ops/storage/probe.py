"""Proves that a store enforces put-if-absent before anything relies on it.

Every commit rests on it: where a store takes the header and ignores it, two writers both
believe that they published version 7, and the second one's overwrites the first one's rows.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from memwal_ops.errors import ConditionalWriteUnsupportedError
from memwal_ops.storage.errors import translate

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

PROBE_FOLDER = "_mem_wal_ops/probe"
_RIVALS = 8
_proven: set[str] = set()
_lock = threading.Lock()


def probe_conditional_writes(store: Store, *, folder: str = PROBE_FOLDER) -> None:
    """Prove put-if-absent by trying it (S3-044, S3-045): three writes, two reads, one delete.

    An object is created, created again with other content (which must be refused and change
    nothing), and then 8 threads create one other object at once, of which exactly one may win.
    On local files a hard link to an existing name must be refused too: that is how the write is
    made exclusive there. The objects are deleted in any case. A proof holds for the store's
    root until the process ends; a failure is tried again.

    Raises:
        ConditionalWriteUnsupportedError: the store does not enforce it.
        ReadOnlyStoreError: nothing can be written there.
    """
    with _lock:
        if store.root in _proven:
            return
    name = f"{folder}/{uuid.uuid4().hex}"
    raced = f"{name}-raced"
    try:
        _refuses_second(store, name)
        _has_one_winner(store, raced)
        if store.root.startswith("/"):
            _links_are_exclusive(os.path.join(store.root, name))
    finally:
        store.delete_many([name, raced])
    with _lock:
        _proven.add(store.root)


def _refuses_second(store: Store, name: str) -> None:
    first, second = b"first " + os.urandom(16), b"second " + os.urandom(16)
    if not store.put_if_absent(name, first):
        raise ConditionalWriteUnsupportedError(f"{store.root} refused to create an object that did not exist.")
    taken = store.put_if_absent(name, second)
    if taken or store.get(name) != first:
        raise ConditionalWriteUnsupportedError(
            f"{store.root} overwrote an object that was to be created only if absent."
        )


def _has_one_winner(store: Store, name: str) -> None:
    rivals = [f"rival {number} ".encode() + os.urandom(16) for number in range(_RIVALS)]
    with ThreadPoolExecutor(_RIVALS) as pool:
        landed = pool.map(lambda data: store.put_if_absent(name, data), rivals)
        won = [rival for rival, first in zip(rivals, landed, strict=True) if first]
    if len(won) != 1 or store.get(name) != won[0]:
        raise ConditionalWriteUnsupportedError(
            f"{store.root} let {len(won)} of {_RIVALS} writers create one object at the same time."
        )


def _links_are_exclusive(standing: str) -> None:
    other = f"{standing}-link"
    try:
        os.link(standing, other)
        try:
            os.link(standing, other)
        except FileExistsError:
            return
        raise ConditionalWriteUnsupportedError("The file system made a hard link over an existing file.")
    except OSError as exc:
        if exc.errno in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            raise ConditionalWriteUnsupportedError(
                "The file system has no hard links, by which a file is created exclusively."
            ) from exc
        raise translate(exc, path=other, action="write") from exc
    finally:
        if os.path.lexists(other):
            os.unlink(other)
