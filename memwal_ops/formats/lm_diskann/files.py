"""Access the files of an index folder; each durable step is passed to a function that may refuse it.

Writers are locked, and readers registered, by kernel locks on files, which end with their process. By these, slots of
the graph that no reader needs are allocated for new versions of blocks: free ones first, ascending, then at its end.

The length of a DuckDB file is checked by its header and its list of free blocks, without opening the database. It has a
header of its own, two headers in turn, of which the one of the higher iteration counts, and blocks of one size. A
checkpoint cuts free blocks off the end after it has written the header, which still counts them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from memwal_ops.core.holds import holds_in_force
from memwal_ops.errors import NotALanceTableError, StorageError, TableNotFoundError, UnsupportedFeatureError
from memwal_ops.formats.lm_diskann import wire
from memwal_ops.formats.lm_diskann.errors import COPY_METADATA, RESTORE, IndexBusyError, IndexCorruptError
from memwal_ops.formats.lm_diskann.wire import HEADER, Parameters
from memwal_ops.storage.api import DiskFullError
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.local import lock_within
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray


METADATA = "metadata.lmd"
GRAPH = "graph.lmd"
VIEW = "view"
CURRENT = f"{VIEW}/CURRENT"

Step = Callable[[str, Callable[[], Any]], Any]
"""Performs a durable step, given its name and action. Raises if the run must not have any further effect."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def unguarded(name: str, act: Callable[[], Any]) -> Any:
    """Run the action without a check: for users of the library, who have no lease."""
    del name
    return act()


def base_path(number: int) -> str:
    """The path of a view's base."""
    return f"{VIEW}/{number:016d}.base"


def log_path(number: int) -> str:
    """The path of a view's log."""
    return f"{VIEW}/{number:016d}.log"


def check_graph(folder: str, length: int, slots: int, block_size: int) -> None:
    """Check that the graph has all slots. Raises ``TableCorruptError``: it is shorter."""
    if length < slots * block_size:
        raise IndexCorruptError(f"{GRAPH} in {folder} has {length:,} bytes, for {slots:,} slots of {block_size:,}.")


def headers_in(graph: int, block_size: int, slots: NDArray[Any]) -> NDArray[Any]:
    """The headers of the blocks in some slots of an open graph; zeros beyond its end. Raises ``StorageError``."""
    heads = bytearray()
    with io_errors():
        for slot in slots.tolist():
            heads += os.pread(graph, HEADER.itemsize, slot * block_size).ljust(HEADER.itemsize, b"\0")
    return np.frombuffer(heads, HEADER)


def check_identity(graph: int, folder: str, block_size: int, sample: NDArray[np.uint64]) -> None:
    """Check that an open graph is that of the index, and not one of the same shape from another index.

    ``sample`` is [n, 4]: node, slot, epoch and ``origin_txn`` of some blocks that it must have.

    Raises ``TableCorruptError``: it has none of them. One that is damaged is found when it is read.
    """
    heads = headers_in(graph, block_size, sample[:, 1])
    columns = zip(("node_id", "creation_epoch", "origin_txn"), sample.T[[0, 2, 3]], strict=True)
    own = np.logical_and.reduce([heads[name] == column for name, column in columns])
    if len(sample) and not own.any():
        raise IndexCorruptError(
            f"{GRAPH} in {folder} is not that of this index: it has none of {len(sample)} blocks that were recorded.",
            remedy=f"If it was put there from another index, put back its own. {RESTORE}",
        )


def write_all(file: int, data: Any, offset: int) -> None:
    """Write all bytes at an offset. Raises ``StorageError``: the disk is full, or failed."""
    view = memoryview(data).cast("B")
    while view:
        with io_errors():
            done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def sync(file: int) -> None:
    """Sync a file to disk. Raises ``StorageError``."""
    with io_errors():
        os.fsync(file)


def sync_folder(folder: str) -> None:
    """Sync a folder's names to disk."""
    with open_file(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
        sync(file)


@contextmanager
def open_file(path: str, flags: int = os.O_WRONLY) -> Iterator[int]:
    """A file, open for the time of a block. Raises ``StorageError``."""
    with io_errors():
        file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def replace_file(folder: str, path: str, data: Iterable[bytes]) -> None:
    """Write a temporary file, fsync it, and rename it to its name.

    Raises ``StorageError``: the disk is full, or failed; the old file is unchanged.
    """
    target = os.path.join(folder, path)
    fresh = f"{target}.new"
    with io_errors():
        with open(fresh, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)
    sync_folder(os.path.dirname(target))


@contextmanager
def io_errors() -> Iterator[None]:
    """Translate errors of the file system. Raises ``StorageError``."""
    try:
        yield
    except OSError as error:
        raise io_error(error) from error


def io_error(error: OSError) -> StorageError:
    """Translate an error of the file system."""
    if error.errno in _FULL:
        return DiskFullError(f"The disk of the index folder is full: {error}.")
    return StorageError(f"The index folder cannot be read or written: {error}.")


def local_path(folder: str | os.PathLike[str]) -> str:
    """The absolute path of a folder. Raises ``UnsupportedFeatureError``: it is on an object store."""
    text = os.fspath(folder)
    if "://" in text and not text.startswith("file://"):
        raise UnsupportedFeatureError(
            f"An LM-DiskANN index cannot be at {text.partition('://')[0]}://...: pages of one file are written in "
            "place and synced, which object stores do not support.",
            remedy="Put the folder on a local disk.",
        )
    return os.path.abspath(os.path.expanduser(text.removeprefix("file://")))


def read_parameters(path: str) -> Parameters:
    """Read the fixed parameters of the index in a folder.

    Raises:
        TableNotFoundError, NotALanceTableError: there is none.
        TableCorruptError, UnsupportedFeatureError: ``metadata.lmd`` cannot be used, or only it is missing.
        StorageError: it cannot be read.
    """
    try:
        with open(os.path.join(path, METADATA), "rb") as file:
            return wire.decode_metadata(file.read())
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.exists(os.path.join(path, GRAPH)):
            raise IndexCorruptError(f"{METADATA} in {path} is missing.", remedy=COPY_METADATA) from error
        if os.path.isfile(path) or (os.path.isdir(path) and os.listdir(path)):
            raise NotALanceTableError(f"{path} is not an index folder: it has no {METADATA}.") from error
        raise TableNotFoundError(f"No index found at {path}.") from error
    except OSError as error:
        raise io_error(error) from error


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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lowest_reader(folder: str) -> int | None:
    """The lowest epoch announced by a live reader; None if there is none. Dead readers do not count."""
    live = (data for _, data in _readers(folder) if data is not None)
    return min((int.from_bytes(data, "little") for data in live if len(data) == 8), default=None)  # noqa: PLR2004 - an uint64


def dead_readers(folder: str) -> list[str]:
    """The files of readers whose process has ended, relative to the folder."""
    return sorted(f"{READERS}/{name}" for name, data in _readers(folder) if data is None)


def _readers(folder: str) -> Iterator[tuple[str, bytes | None]]:
    """The files of readers and what they announce; None: the process has ended.

    None without the folder: gc deletes it with the last file, and copies may lack it.
    """
    entries: list[os.DirEntry[str]] = []
    with suppress(FileNotFoundError):
        entries = [*os.scandir(os.path.join(folder, READERS))]
    for entry in entries:
        if entry.name.endswith(_FRESH):
            continue  # not even for a moment locked: its reader is about to lock it
        with suppress(FileNotFoundError):
            file = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(file, 8, 0) if _is_locked(file) else None
            finally:
                os.close(file)
            yield entry.name, data


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


def needed_from(folder: str, epoch: int) -> int:
    """The lowest epoch that a live reader or a hold needs; ``epoch`` if none needs an older one."""
    needed = [epoch]
    reader = lowest_reader(folder)
    if reader is not None:
        needed.append(reader)
    if os.path.isdir(os.path.join(folder, "_mem_wal_ops", "holds")):
        store = open_store(resolve(folder))
        needed += [version for hold in holds_in_force(store, store_time(store)) for version in hold.versions]
    return min(needed)


_MAGIC, _AT_MAGIC = b"DUCK", 8
_HEADERS, _FIRST_BLOCK = (4096, 8192), 12_288
_FIRST_HEADER = struct.Struct("<8x7Q")  # after a checksum, as in each block
_CHECKSUM, _NUMBER = 8, 8
_NOWHERE = 2**64 - 1
_PER_BLOCK = 64
"""Parts of a block of metadata. A pointer to one is the number of the block, with that of the part in the top byte."""
_BLOCK_SIZES = {1 << power for power in range(14, 19)}
_FORM = 69
"""The only form of files whose list of free blocks is read here; of another one, only the magic is checked."""
_ATTEMPTS = 5


class _Header(NamedTuple):
    iteration: int
    metadata: int
    free: int
    blocks: int
    block_size: int
    vector_size: int
    form: int


def check_store_file(path: str) -> None:
    """Check that a store exists, and that none of its blocks is missing. Reads a few KiB.

    Raises ``StorageError``, and ``TableCorruptError``: it is missing, cut short, or not a DuckDB database.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(_ATTEMPTS):
                header = _header(file, path)
                if header.form != _FORM:
                    return
                used = _used(file, header)
                length = os.fstat(file).st_size
                if length >= used:
                    return
                if _header(file, path) == header:  # else a checkpoint wrote it meanwhile
                    break
        finally:
            os.close(file)
    except FileNotFoundError:
        raise IndexCorruptError(f"{path} is missing.") from None
    except OSError as error:
        raise io_error(error) from error
    raise IndexCorruptError(f"{path} has {length:,} bytes; its blocks need {used:,} at least.")


def _header(file: int, path: str) -> _Header:
    head = os.pread(file, _FIRST_BLOCK, 0)
    if len(head) < _FIRST_BLOCK or head[_AT_MAGIC : _AT_MAGIC + len(_MAGIC)] != _MAGIC:
        raise IndexCorruptError(f"{path} is not a DuckDB database.")
    header = max(_Header(*_FIRST_HEADER.unpack_from(head, at)) for at in _HEADERS)
    if header.form == _FORM and header.block_size not in _BLOCK_SIZES:
        raise IndexCorruptError(f"{path} is damaged: its header has blocks of {header.block_size:,} bytes.")
    return header


def _used(file: int, header: _Header) -> int:
    """The bytes up to the end of the last block that is not free; of what is cut off, as many as are known."""
    part = (header.block_size - _CHECKSUM) // _PER_BLOCK // _NUMBER * _NUMBER
    at, numbers, seen = header.free, bytearray(), set[int]()
    while at != _NOWHERE and at not in seen:
        seen.add(at)
        block, index = at & ((1 << 56) - 1), at >> 56
        end = _FIRST_BLOCK + (block + 1) * header.block_size
        if block >= header.blocks or end > os.fstat(file).st_size:
            return end
        data = os.pread(file, part, end - header.block_size + _CHECKSUM + index * part)
        at = int.from_bytes(data[:_NUMBER], "little")
        numbers += data[_NUMBER:]
    count = int.from_bytes(numbers[:_NUMBER], "little")
    free = {*struct.unpack_from(f"<{min(count, len(numbers) // _NUMBER - 1)}Q", numbers, _NUMBER)} if numbers else set()
    blocks = header.blocks
    while blocks - 1 in free:
        blocks -= 1
    return _FIRST_BLOCK + blocks * header.block_size
