"""Copy an index folder consistently while readers, writers and jobs use it, and restore a copy from a store.

The store is copied under the writer lock; the graph, which is most of the folder, after its release. Until it
is copied, a registered reader prevents the reuse of every slot of that epoch. The copy does not retain older epochs:
their slots may have been reused. So it has each node's newest version, checked, and nothing else. The view of the copy
is made from its store. The folder itself is not changed.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann import publishing
from memwal_ops.formats.lm_diskann.changes import Changes
from memwal_ops.formats.lm_diskann.copies import PART_BYTES, read_parts
from memwal_ops.formats.lm_diskann.destinations import Identity, LocalFolder, destination_of
from memwal_ops.formats.lm_diskann.errors import NOT_COPIED, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import GRAPH, METADATA, VIEW, io_error, unguarded
from memwal_ops.formats.lm_diskann.folders import local_path, read_parameters
from memwal_ops.formats.lm_diskann.kernels.checksum import intact
from memwal_ops.formats.lm_diskann.library import WAIT
from memwal_ops.formats.lm_diskann.locks import Reader, WriterLock
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import LOG, NAME, Store
from memwal_ops.formats.lm_diskann.wire.blocks import headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.copies import Copy
    from memwal_ops.formats.lm_diskann.destinations import Destination
    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters

    Advance = Callable[[int], None]  # receives the number of bytes that were copied


def snapshot(
    folder: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    wait: float = WAIT,
    storage_options: Mapping[str, str] | None = None,
) -> int:
    """Copy an index folder, and return the epoch that the copy has.

    Args:
        folder: of the index.
        destination: an empty local path or URI of a store; the copy appears when it is complete.
        wait: seconds to wait for another writer or job.
        storage_options: of the store.

    Raises:
        IndexBusyError: another writer or job has the index.
        InvalidUsageError: something is at the destination.
        TableCorruptError: a block is damaged; nothing was copied.
        StorageError: the disk is full, or the store failed; the destination stays empty.
    """
    path = local_path(folder)
    to = destination_of(os.fspath(destination), storage_options or {}, unguarded)
    parameters = read_parameters(path)
    if to.existing() is not None:
        raise InvalidUsageError(f"{to.uri} exists already.", remedy="Choose another name for the copy.")
    return copy(path, parameters, to, wait, lambda _: None)[0].epoch


def refuse_overlap(path: str, to: Destination) -> None:
    """Check that neither of source and destination contains the other. Raises ``InvalidUsageError``."""
    if isinstance(to, LocalFolder):
        one, other = os.path.realpath(path), os.path.realpath(to.uri)
        if os.path.commonpath([one, other]) in {one, other}:
            raise InvalidUsageError(
                f"One of {path} and the destination {to.uri} contains the other.",
                remedy="Choose a folder next to the index.",
            )


def copy(
    path: str, parameters: Parameters, to: Destination, wait: float, advance: Advance
) -> tuple[Identity, int, int]:
    """Copy a folder to an empty destination; returns the copy's identity, its rows and its bytes."""
    refuse_overlap(path, to)
    with ExitStack() as opened:
        opened.enter_context(to)
        store = _copy_store(path, to.staging, parameters, wait, opened)
        slots = store.state.slot_count
        nodes, places, epochs = store.in_graph(store.state.epoch)
        if len(places) and places[-1] >= slots:
            raise IndexCorruptError(f"Slot {places[-1]} is in the map of {slots} slots of {path}.", remedy=NOT_COPIED)
        publishing.check_node_ids(path, parameters, store)
        # No other process uses the copy, which is not visible yet: none of these writes is a durable step.
        superseded = store.superseded_deltas()
        store.commit(Changes(
            store.raise_retained(store.state.epoch), merged_nodes=superseded[0], merged_versions=superseded[1]
        ))  # fmt: skip
        _check_deltas(store, parameters, path)
        publishing.publish(to.staging, parameters, store, unguarded)
        store.close()
        to.write(GRAPH, _graph(path, parameters, slots, (nodes, places.astype(np.int64), epochs), advance))
        _copy_file(os.path.join(path, METADATA), os.path.join(to.staging, METADATA))  # with it, a folder is an index
        identity = Identity(str(parameters.uuid), store.state.epoch)
        return identity, store.state.live, to.publish(identity, store.state.live)


def restore(table: Copy, to: LocalFolder, advance: Advance) -> int:
    """Restore a copy on a store to a folder; returns its bytes.

    Raises:
        TableCorruptError: a part is missing or damaged; no folder was created.
    """
    manifest = table.manifest

    def counted(parts: Iterator[bytes]) -> Iterator[bytes]:
        for data in parts:
            yield data
            advance(len(data))

    with to:
        for file in sorted(manifest.files, key=lambda one: one.path == METADATA):
            to.write(file.path, counted(read_parts(table.store, manifest, file)))
        return to.publish(Identity(manifest.uuid, manifest.epoch), manifest.rows)


def _copy_store(path: str, staging: str, parameters: Parameters, wait: float, opened: ExitStack) -> Store:
    """Copy the store, and register a reader of their epoch, which stays as long as ``opened``."""
    lock = WriterLock(path, wait)
    try:
        for name in (FOLLOW, NAME, LOG):
            if os.path.exists(os.path.join(path, name)):
                _copy_file(os.path.join(path, name), os.path.join(staging, name))
        # Commits of a killed writer are in the log of DuckDB, which replays it when the copy is opened.
        store = Store(staging, parameters)
        opened.callback(store.close)
        publishing.check_commits(path, parameters, store)
        store.check_identity(path)
        graph, wanted = os.path.join(path, GRAPH), store.state.slot_count * parameters.layout.block_size
        if os.path.getsize(graph) < wanted:
            raise IndexCorruptError(f"{graph} has fewer bytes than the {wanted:,} of its slots.", remedy=NOT_COPIED)
        opened.enter_context(Reader(path, store.state.epoch))
    finally:
        lock.release()
    os.makedirs(os.path.join(staging, VIEW))
    return store


def _graph(
    path: str,
    parameters: Parameters,
    slots: int,
    mapped: tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]],
    advance: Advance,
) -> Iterator[bytes]:
    """Yield the slots of the graph in chunks: those with a newest version, checked; all others are zero."""
    size = parameters.layout.block_size
    nodes, places, epochs = mapped
    each = max(1, PART_BYTES // size)
    with open(os.path.join(path, GRAPH), "rb") as file:
        for first in range(0, slots, each):
            count = min(each, slots - first)
            # gc may truncate free slots at the end meanwhile.
            data = file.read(count * size).ljust(count * size, b"\0")
            part = slice(*np.searchsorted(places, [first, first + each]))
            blocks = np.frombuffer(data, np.uint8).reshape(-1, size)[places[part] - first]
            check_blocks(blocks, nodes[part], epochs[part], f"{GRAPH} in {path}")
            kept = np.zeros((count, size), np.uint8)
            kept[places[part] - first] = blocks
            yield kept.tobytes()
            advance(len(data))


def _check_deltas(store: Store, parameters: Parameters, path: str) -> None:
    [nodes, epochs], blocks, fits = store.blocks(
        "SELECT node_id, commit_epoch, data FROM lmd_delta_blocks", parameters.layout.block_size
    )
    if not fits.all():
        raise IndexCorruptError(f"A delta block in {path} has a wrong length.", remedy=NOT_COPIED)
    check_blocks(blocks, nodes, epochs, f"{NAME} in {path}")


def check_blocks(
    blocks: NDArray[np.uint8], nodes: NDArray[np.uint64], epochs: NDArray[np.uint64], where: str,
    remedy: str = NOT_COPIED,
) -> None:  # fmt: skip
    """Check that each block is intact, and has the expected node and version."""
    if not len(blocks):
        return
    head = headers(blocks)
    right = intact(np.ascontiguousarray(blocks).view(np.uint64))
    damaged = np.flatnonzero(~right | (head["node_id"] != nodes) | (head["creation_epoch"] != epochs))
    if len(damaged):
        at = int(damaged[0])
        raise IndexCorruptError(f"The block of node {nodes[at]} (epoch {epochs[at]}) in {where} is damaged.",
                                remedy=remedy)  # fmt: skip


def _copy_file(source: str, target: str) -> None:
    """Copy a file, and sync it."""
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            while data := old.read(PART_BYTES):
                new.write(data)
            new.flush()
            os.fsync(new.fileno())
    except OSError as error:
        raise io_error(error) from error
