"""Local files with a compare-and-swap between processes of memwal-ops, for formats that keep one manifest object.

A file system has no write that is conditional on a tag. A lock file replaces it: a swap takes the lock (``flock``,
which the kernel releases if the process dies), compares the hash of the content, and renames a synced file into place.
It is **safe among processes of memwal-ops on one machine only**: another program that writes the file does not take
the lock, and not every network file system supports locks.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from memwal_ops.errors import BusyError, ObjectNotFoundError
from memwal_ops.storage.errors import translate
from memwal_ops.storage.file_lock import lock_within
from memwal_ops.storage.local import LocalObjectStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

# A swap takes milliseconds. A process that has the lock for longer is suspended, or its disk does not respond.
_wait: ContextVar[float] = ContextVar("swap_wait", default=10.0)
LOCK_PATH = "_mem_wal_ops/swap.lock"
# Names with this suffix are uploads in progress, hidden in listings. The lock allows one writer, so one name is enough.
_UPLOAD = "#0"


@contextmanager
def swaps_wait(wait: timedelta) -> Iterator[None]:
    """In the block, swaps wait that long for another process's swap before they are ``busy``; 0: ten seconds."""
    token = _wait.set(wait.total_seconds() or _wait.get())
    try:
        yield
    finally:
        _wait.reset(token)


class LockedFolder(LocalObjectStore):
    """The files below one local folder. ``compare_and_swap`` compares the hash of the content, under a lock file."""

    def get_with_tag(self, path: str) -> tuple[bytes, str]:
        """The content and its hash. Raises ``ObjectNotFoundError``."""
        data = self.get(path)
        return data, _hash(data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """See the interface; the file is synced, since a synced manifest will refer to it."""
        created = super().put_if_absent(path, data)
        if created:
            with self._translated(path):
                _sync(self._absolute(path))
        return created

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Replace the file if its content still has that hash; False if it has another one, or is absent.

        Killed anywhere: the file has either the old or the new content, and the lock is free.

        Raises:
            BusyError: another process still has the lock after the wait (:func:`swaps_wait`).
        """
        self._checked(path)
        with self._translated(path), self._lock_file():
            try:
                current = self.get(path)
            except ObjectNotFoundError:
                return False
            if _hash(current) != e_tag:
                return False
            target = self._absolute(path)
            with open(target + _UPLOAD, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(target + _UPLOAD, target)
            _sync(os.path.dirname(target))
            return True

    @contextmanager
    def _lock_file(self) -> Iterator[None]:
        lock = self._absolute(LOCK_PATH)
        os.makedirs(os.path.dirname(lock), exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        wait = _wait.get()
        try:
            holder = lock_within(handle, wait)
            if holder is not None:
                raise BusyError(
                    f"Process {holder} is writing to {self._root}, and did not end that within {wait:g} s.",
                    remedy=f"If process {holder} is suspended, continue it (kill -CONT {holder}) or end it, then run "
                    "this again. What was published before stays.",
                )
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translate(error, path=path, action="write") from error


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sync(path: str) -> None:
    with suppress(FileNotFoundError):  # deleted meanwhile
        for target in (path, os.path.dirname(path)):
            handle = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
