"""Lock writers and register readers by kernel locks on files of the folder, which end with their process."""

from __future__ import annotations

import fcntl
import os
import uuid
from contextlib import suppress
from typing import Self

from memwal_ops.formats.lm_diskann.errors import IndexBusyError, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import io_errors, write_all
from memwal_ops.storage.file_lock import lock_within

WRITER = "writer.lock"
READERS = "readers"
_FRESH = ".new"


class WriterLock:
    """The writer lock, which permits opening the store; acquired within ``wait`` seconds.

    Without ``announce``, nothing is written: for a plan.

    Raises:
        IndexBusyError: another process, or another handle of this one, still has it.
        StorageError: its file cannot be opened.
    """

    def __init__(self, folder: str, wait: float, *, announce: bool = True) -> None:
        with io_errors():
            self._file = os.open(os.path.join(folder, WRITER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        holder = lock_within(self._file, wait, announced=announce)
        if holder is not None:
            os.close(self._file)
            raise IndexBusyError(
                f"Another writer or job has {folder} (process {holder}); waited {wait:g} s for it.",
                remedy=f"Run it again when process {holder} is done; if it is suspended, continue it "
                f"(kill -CONT {holder}) or end it.",
            )

    def release(self) -> None:
        """Release it; the file is kept, since another process may be waiting for it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked process also has the file open
        os.close(self._file)


class Reader:
    """A registered reader: while it exists, versions that a reader at ``epoch`` or later needs are kept.

    Raises:
        StorageError: it cannot be registered: the disk is full, or read-only.
        TableCorruptError: the folder of readers cannot be created.
    """

    def __init__(self, folder: str, epoch: int) -> None:
        self._path, self._process = os.path.join(folder, READERS, uuid.uuid4().hex), os.getpid()
        fresh = self._path + _FRESH
        with io_errors():
            self._file = _created(fresh)
        try:
            # Locked and written before it gets its name: a named file without a lock belongs to a dead process. It is
            # free: only this process locks a file of this name.
            with io_errors():
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.move(epoch)
                os.rename(fresh, self._path)
        except BaseException:
            os.close(self._file)
            with suppress(OSError):
                os.unlink(fresh)
            raise

    def move(self, epoch: int) -> None:
        """Announce another epoch. Raises ``StorageError``."""
        write_all(self._file, epoch.to_bytes(8, "little"), 0)
        self.epoch = epoch

    def close(self) -> None:
        """Unregister it, unless this process was forked from the one that registered it."""
        if self._process == os.getpid():
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        os.close(self._file)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def lowest_reader(folder: str) -> int | None:
    """The lowest epoch announced by a live reader; None if there is none. Dead readers do not count."""
    lowest: int | None = None
    for entry in _entries(folder):
        if entry.name.endswith(_FRESH):
            continue
        try:
            file = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if not _is_locked(file):
                continue
            data = os.pread(file, 8, 0)
        finally:
            os.close(file)
        if len(data) == 8:  # noqa: PLR2004 - an uint64
            epoch = int.from_bytes(data, "little")
            lowest = epoch if lowest is None else min(lowest, epoch)
    return lowest


def dead_readers(folder: str) -> list[str]:
    """The files of readers whose process has ended, relative to the folder."""
    found = []
    for entry in _entries(folder):
        if entry.name.endswith(_FRESH):
            continue  # not even for a moment locked: its reader is about to lock it
        with suppress(FileNotFoundError):
            file = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not _is_locked(file):
                    found.append(f"{READERS}/{entry.name}")
            finally:
                os.close(file)
    return sorted(found)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """The files of readers; none without the folder: gc deletes it with the last file, and copies may lack it."""
    try:
        return [*os.scandir(os.path.join(folder, READERS))]
    except FileNotFoundError:
        return []


def _created(path: str) -> int:
    """A new file of a reader, with its folder if there is none. Raises ``FileNotFoundError`` if there is no index."""
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            folder = os.path.dirname(path)
            try:
                os.mkdir(folder)
            except FileExistsError as error:  # created, and perhaps deleted again, by another process
                if os.path.islink(folder) and not os.path.exists(folder):
                    raise IndexCorruptError(
                        f"{folder} is a symbolic link, and its target is missing: no reader can be registered.",
                        remedy="Delete the link, or create its target.",
                    ) from error


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
