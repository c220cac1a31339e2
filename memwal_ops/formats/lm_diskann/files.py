"""Access the files of an index folder; each durable step is passed to a function that may refuse it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import StorageError
from memwal_ops.formats.lm_diskann.errors import RESTORE, IndexCorruptError
from memwal_ops.storage.disk_full import DiskFullError

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
    """Check that the graph has all slots.

    Raises:
        TableCorruptError: it is shorter.
    """
    if length < slots * block_size:
        raise IndexCorruptError(f"{GRAPH} in {folder} has {length:,} bytes, for {slots:,} slots of {block_size:,}.")


def headers_in(graph: int, block_size: int, slots: NDArray[Any]) -> NDArray[Any]:
    """The headers of the blocks in some slots of an open graph; zeros beyond its end. Raises ``StorageError``."""
    from memwal_ops.formats.lm_diskann.wire.blocks import HEADER  # noqa: PLC0415 - needs the extra, which `init` checks

    found = bytearray()
    with io_errors():
        for slot in slots.tolist():
            found += os.pread(graph, HEADER.itemsize, slot * block_size).ljust(HEADER.itemsize, b"\0")
    return np.frombuffer(found, HEADER)


def check_identity(graph: int, folder: str, block_size: int, sample: NDArray[np.uint64]) -> None:
    """Check that an open graph is that of the index, and not one of the same shape from another index.

    Args:
        graph: its file descriptor.
        folder: of the index.
        block_size: of the index.
        sample: [n, 4]: node, slot, epoch and ``origin_txn`` of some blocks that it must have.

    Raises:
        TableCorruptError: it has none of them. One that is damaged is found when it is read.
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
    """Write all bytes at an offset.

    Raises:
        StorageError: the disk is full, or failed.
    """
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
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(file)
    finally:
        os.close(file)


def replace_file(folder: str, path: str, data: Iterable[bytes]) -> None:
    """Write a temporary file, fsync it, and rename it to its name.

    Raises:
        StorageError: the disk is full, or failed; the old file is unchanged.
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
