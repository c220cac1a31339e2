"""LM-DiskANN index folders: a graph of vectors on disk, searched with little memory.

``create`` and ``open`` return an :class:`~memwal_ops.formats.lm_diskann.library.Index`. Both need the extra
``lm-diskann``, and raise ``ExtraMissingError`` without it; importing this package needs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from memwal_ops.formats.lm_diskann.library import Index


def create(
    folder: str | os.PathLike[str],
    dimension: int = 128,
    metric: str = "l2",
    R: int = 70,  # noqa: N803 - the paper's words
    alpha: float = 1.2,
    L: int = 100,  # noqa: N803
    quantizer: str = "pq",
) -> Index:
    """Create an empty index folder, and open it for writing; as with :func:`open`, close it after use.

    Args:
        folder: a local path that does not exist, or is an empty folder.
        dimension: floats per vector.
        metric: ``l2`` or ``cosine``.
        R: maximum number of forward links of a node. With fewer than 16, recall falls from the start where vectors are
            noise in many dimensions, and rows may become unreachable when many others change.
        alpha: pruning parameter: a value above 1 also keeps longer links.
        L: length of the candidate list of inserts, and the default for searches.
        quantizer: ``pq`` or ``ternary``.

    Raises:
        ExtraMissingError: the extra is not installed.
        InvalidUsageError: a parameter is of another type, or out of bounds; or the folder is not empty.
        StorageError: the disk is full, or failed.
        UnsupportedFeatureError: the folder is remote.
    """
    from memwal_ops.formats.lm_diskann.errors import need_extra  # noqa: PLC0415 - the extra is checked first

    need_extra()
    from memwal_ops.formats.lm_diskann import library, table  # noqa: PLC0415 - the extra is checked first

    table.create(folder, dimension=dimension, metric=metric, R=R, alpha=alpha, L=L, quantizer=quantizer)
    return library.Index(folder)


def snapshot(
    folder: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
) -> int:
    """Copy an index folder while readers, writers and jobs use it, and return the epoch of the copy.

    Args:
        folder: of the index.
        destination: an empty local path or URI of a store.
        storage_options: of the store, as in ``memwal_ops.open_table``.

    Raises:
        ExtraMissingError: the extra is not installed.
        IndexBusyError: another writer or job has the index; it is needed only while the store is copied.
        InvalidUsageError: something is at the destination.
        TableCorruptError: a block is damaged; nothing was copied.
        StorageError: the disk is full, or the store failed; the destination stays empty.
    """
    from memwal_ops.formats.lm_diskann.errors import need_extra  # noqa: PLC0415 - see create

    need_extra()
    from memwal_ops.formats.lm_diskann.jobs import snapshot  # noqa: PLC0415 - see above

    return snapshot.snapshot(folder, destination, storage_options=storage_options)


def open(  # noqa: A001 - lm_diskann.open, as gzip.open
    folder: str | os.PathLike[str],
    read_only: bool = False,  # noqa: FBT001, FBT002 - positional, as the folder
    *,
    cache_bytes: int | None = None,
    wait: float | None = None,
    delta_bytes: int | None = None,
) -> Index:
    """Open an index folder.

    Args:
        folder: a local path.
        read_only: never open the store; any number of processes may read during writes of another one.
        cache_bytes: budget of the block cache; None: 32 MiB.
        wait: seconds to wait for another writer or job; None: 30.
        delta_bytes: of changed blocks above which a commit writes them once, into the graph; None: 16 MiB. A row
            changes about R blocks: 1 MiB makes commits of 10 rows write less than half, and sync two more files.

    Raises:
        ExtraMissingError: the extra is not installed.
        IndexBusyError: another writer or job has the writer lock.
        MemwalOpsError: it does not exist, or is damaged.
    """
    from memwal_ops.formats.lm_diskann.errors import need_extra  # noqa: PLC0415 - see create

    need_extra()
    from memwal_ops.formats.lm_diskann.library import CACHE, DELTA, WAIT, Index  # noqa: PLC0415

    return Index(
        folder,
        read_only=read_only,
        cache_bytes=CACHE if cache_bytes is None else cache_bytes,
        wait=WAIT if wait is None else wait,
        delta_bytes=DELTA if delta_bytes is None else delta_bytes,
    )
