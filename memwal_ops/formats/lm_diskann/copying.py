"""Copy an index folder consistently while readers, writers and jobs go on.

Store and view are copied under the writer lock; the graph, which is most of the folder, after its release. Until then a
registered reader keeps every slot of that epoch from being used again. Older epochs are given up in the copy: their
slots may have been.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann import publishing
from memwal_ops.formats.lm_diskann.changes import Changes
from memwal_ops.formats.lm_diskann.files import GRAPH, METADATA, io_error, plainly, sync_folder
from memwal_ops.formats.lm_diskann.folders import local_path, read_parameters
from memwal_ops.formats.lm_diskann.library import WAIT, Index
from memwal_ops.formats.lm_diskann.locks import READERS, WRITER, Reader, WriterLock
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import LOG, NAME

if TYPE_CHECKING:
    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters

_CHUNK = 8 << 20


def snapshot(folder: str | os.PathLike[str], destination: str | os.PathLike[str], *, wait: float = WAIT) -> int:
    """Copy an index folder, and return the epoch that the copy has.

    Args:
        folder: of the index.
        destination: a local path that does not exist; it appears when it is complete.
        wait: seconds to wait for another writer or job.

    Raises:
        IndexBusyError: another writer or job has the index.
        InvalidUsageError: the destination exists.
        StorageError: the disk is full, or failed; nothing is at the destination.
    """
    path, target = local_path(folder), local_path(destination)
    parameters = read_parameters(path)
    fresh = f"{target}.{os.getpid()}.new"
    if os.path.lexists(target):
        raise InvalidUsageError(f"{target} exists already.", remedy="Choose another name for the copy.")
    try:
        os.makedirs(os.path.join(fresh, READERS))
        _copy(path, fresh, parameters, wait)
        with Index(fresh, cache_bytes=0, overlay_bytes=0) as index:
            store = index.writable()
            store.commit(Changes(store.raise_retained(store.state.epoch)))
            publishing.publish(fresh, parameters, store, plainly)
            epoch = store.state.epoch
        sync_folder(fresh)
        os.rename(fresh, target)
    except OSError as error:
        raise io_error(error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    sync_folder(os.path.dirname(target))
    return epoch


def _copy(path: str, fresh: str, parameters: Parameters, wait: float) -> None:
    # Opening the store publishes what a killed writer had committed, and closing it folds its log into the file.
    with Index(path, wait=wait, cache_bytes=0, overlay_bytes=0):
        pass
    lock = WriterLock(path, wait)
    try:
        with Index(path, read_only=True, cache_bytes=0) as index:
            slots = index.view.state.slot_count
            reader = Reader(path, index.epoch)
        for name in (METADATA, FOLLOW, NAME, LOG):
            if os.path.exists(os.path.join(path, name)):
                _copy_file(os.path.join(path, name), os.path.join(fresh, name))
        shutil.copytree(os.path.join(path, "view"), os.path.join(fresh, "view"), copy_function=_copy_file)
        with open(os.path.join(fresh, WRITER), "xb"):
            pass
    except BaseException:
        lock.release()
        raise
    lock.release()
    with reader:
        _copy_file(os.path.join(path, GRAPH), os.path.join(fresh, GRAPH), slots * parameters.layout.block_size)


def _copy_file(source: str, target: str, length: int | None = None) -> str:
    """Copy the first ``length`` bytes of a file, or all, and sync them."""
    with open(source, "rb") as old, open(target, "wb") as new:
        left = os.fstat(old.fileno()).st_size if length is None else length
        while left and (data := old.read(min(left, _CHUNK))):
            new.write(data)
            left -= len(data)
        new.flush()
        os.fsync(new.fileno())
    return target
