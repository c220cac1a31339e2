"""Copy an index folder consistently while readers, writers and jobs use it, and restore a copy from a store.

The store is copied under the writer lock; the graph, which is most of the folder, after its release. Until it
is copied, a registered reader prevents the reuse of every slot of that epoch. The copy does not retain older epochs:
their slots may have been reused. So it has each node's newest version, checked, and nothing else. The view of the copy
is made from its store. The folder itself is not changed.
"""

from __future__ import annotations

import enum
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.core.context import Progress, RunContext
from memwal_ops.core.documents import document
from memwal_ops.errors import InvalidUsageError, TableReplacedError
from memwal_ops.formats.lm_diskann import copies, files, publishing
from memwal_ops.formats.lm_diskann.errors import NOT_COPIED, IndexCorruptError
from memwal_ops.formats.lm_diskann.library import WAIT
from memwal_ops.formats.lm_diskann.merging import check_blocks
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import LOG, NAME, Store
from memwal_ops.formats.lm_diskann.wire import Changes, Parameters
from memwal_ops.text import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.specs import IndexSnapshotOptions
    from memwal_ops.formats.lm_diskann.table import Table

    Advance = Callable[[int], None]  # receives the number of bytes that were copied


def snapshot(
    folder: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    wait: float = WAIT,
    storage_options: Mapping[str, str] | None = None,
) -> int:
    """See :func:`memwal_ops.formats.lm_diskann.snapshot`."""
    path = files.local_path(folder)
    to = copies.destination_of(os.fspath(destination), storage_options or {}, files.unguarded)
    parameters = files.read_parameters(path)
    if to.existing() is not None:
        raise InvalidUsageError(f"{to.uri} exists already.", remedy="Choose another name for the copy.")
    return copy(path, parameters, to, wait, lambda _: None)[0].epoch


def refuse_overlap(path: str, to: copies.Destination) -> None:
    """Check that neither of source and destination contains the other. Raises ``InvalidUsageError``."""
    if isinstance(to, copies.LocalFolder):
        source, target = os.path.realpath(path), os.path.realpath(to.uri)
        if os.path.commonpath([source, target]) in {source, target}:
            raise InvalidUsageError(
                f"One of {path} and the destination {to.uri} contains the other.",
                remedy="Choose a folder next to the index.",
            )


def copy(
    path: str, parameters: Parameters, to: copies.Destination, wait: float, advance: Advance
) -> tuple[copies.Identity, int, int]:
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
        publishing.publish(to.staging, parameters, store, files.unguarded)
        store.close()
        to.write(files.GRAPH, _graph(path, parameters, slots, (nodes, places.astype(np.int64), epochs), advance))
        _copy_file(
            os.path.join(path, files.METADATA), os.path.join(to.staging, files.METADATA)
        )  # with it, a folder is an index
        identity = copies.Identity(str(parameters.uuid), store.state.epoch)
        return identity, store.state.live, to.publish(identity, store.state.live)


def restore(table: copies.Copy, to: copies.LocalFolder, advance: Advance) -> int:
    """Restore a copy on a store to a folder; returns its bytes.

    Raises ``TableCorruptError``: a part is missing or damaged; no folder was created.
    """
    manifest = table.manifest

    def reported(parts: Iterator[bytes]) -> Iterator[bytes]:
        for data in parts:
            yield data
            advance(len(data))

    with to:
        for file in sorted(manifest.files, key=lambda file: file.path == files.METADATA):
            to.write(file.path, reported(copies.read_parts(table.store, manifest, file)))
        return to.publish(copies.Identity(manifest.uuid, manifest.epoch), manifest.rows)


def _copy_store(path: str, staging: str, parameters: Parameters, wait: float, opened: ExitStack) -> Store:
    """Copy the store, and register a reader of their epoch, which stays as long as ``opened``."""
    lock = files.WriterLock(path, wait)
    try:
        for name in (FOLLOW, NAME, LOG):
            if os.path.exists(os.path.join(path, name)):
                _copy_file(os.path.join(path, name), os.path.join(staging, name))
        # Commits of a killed writer are in the log of DuckDB, which replays it when the copy is opened.
        store = Store(staging, parameters)
        opened.callback(store.close)
        publishing.check_commits(path, parameters, store)
        store.check_identity(path)
        graph, wanted = os.path.join(path, files.GRAPH), store.state.slot_count * parameters.layout.block_size
        if os.path.getsize(graph) < wanted:
            raise IndexCorruptError(f"{graph} has fewer bytes than the {wanted:,} of its slots.", remedy=NOT_COPIED)
        opened.enter_context(files.Reader(path, store.state.epoch))
    finally:
        lock.release()
    os.makedirs(os.path.join(staging, files.VIEW))
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
    each = max(1, copies.PART_BYTES // size)
    with open(os.path.join(path, files.GRAPH), "rb") as file:
        for first in range(0, slots, each):
            count = min(each, slots - first)
            # gc may truncate free slots at the end meanwhile.
            data = file.read(count * size).ljust(count * size, b"\0")
            part = slice(*np.searchsorted(places, [first, first + each]))
            blocks = np.frombuffer(data, np.uint8).reshape(-1, size)[places[part] - first]
            check_blocks(blocks, nodes[part], epochs[part], f"{files.GRAPH} in {path}")
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


def _copy_file(source: str, target: str) -> None:
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            while data := old.read(copies.PART_BYTES):
                new.write(data)
            new.flush()
            os.fsync(new.fileno())
    except OSError as error:
        raise files.io_error(error) from error


class CopyDecision(enum.StrEnum):
    """How a run ended."""

    COPIED = "copied"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class CopyReport:
    """The report of a copy; ``bytes`` of all its files, of a dry run about as many. Unchanged: it has this epoch."""

    decision: CopyDecision
    uri: str
    destination: str
    epoch: int
    rows: int
    bytes: int
    seconds: float

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``snapshot --json``."""
        return document(self)

    def describe(self) -> str:
        """The report as text for people."""
        what = f"{counted(self.rows, 'row')} ({size_text(self.bytes)}) to {self.destination}"
        return {
            CopyDecision.COPIED: f"copied: {what}, as epoch {self.epoch}, {self.seconds:.2f} s.",
            CopyDecision.UNCHANGED: f"unchanged: {self.destination} has epoch {self.epoch} already.",
            CopyDecision.DRY_RUN: f"dry_run: would copy {what}; nothing was changed.",
        }[self.decision]


def plan(table: Table | copies.Copy, options: IndexSnapshotOptions, context: RunContext) -> CopyReport:
    """Report what would be copied. Reads only; raises as :func:`apply`."""
    del context
    return _report(table, _destination(table, options))


def apply(table: Table | copies.Copy, options: IndexSnapshotOptions, context: RunContext) -> CopyReport:
    """Copy. Safe to kill and to run again, and concurrently with writers, readers and jobs.

    Raises:
        IndexBusyError: another writer or job has the index, or another snapshot has the destination.
        InvalidUsageError: something else is at the destination.
        TableCorruptError: the index, or the copy, is damaged; nothing is at the destination.
        StorageError: the disk is full, or a store failed; nothing is at the destination.
    """
    started = time.monotonic()
    to = _destination(table, options)
    expected = _report(table, to)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        context.report(Progress("copying", "bytes", done, expected.bytes))
        context.checkpoint()

    if expected.decision is CopyDecision.UNCHANGED:
        to.clean()
        return expected
    if isinstance(table, copies.Copy):
        assert isinstance(to, copies.LocalFolder)  # noqa: S101 - _destination refuses a copy of a copy
        size = restore(table, to, advance)
        epoch, rows = expected.epoch, expected.rows
    else:
        if files.read_parameters(table.location.uri).uuid != table.parameters.uuid:
            raise TableReplacedError(f"{table.location.uri} does not contain the same index as before.")
        wait = options.wait.total_seconds()
        identity, rows, size = copy(table.location.uri, table.parameters, to, wait, advance)
        epoch = identity.epoch
    return CopyReport(CopyDecision.COPIED, table.location.uri, to.uri, epoch, rows, size, time.monotonic() - started)


def _destination(table: Table | copies.Copy, options: IndexSnapshotOptions) -> copies.Destination:
    """The destination. Raises ``InvalidUsageError`` if there is none, or it cannot be one."""
    if not options.destination:
        raise InvalidUsageError(
            "snapshot of an index folder needs a destination.", remedy="Give one: memwal-ops snapshot FOLDER DEST."
        )
    step = table.step if isinstance(table, copies.Copy) else table.durable
    to = copies.destination_of(options.destination, table.location.lance_options, step)
    if not isinstance(table, copies.Copy):
        refuse_overlap(table.location.uri, to)
    elif not isinstance(to, copies.LocalFolder):
        raise InvalidUsageError(
            f"{table.location.uri} is a copy already; it can be restored to a local folder, not to {to.uri}.",
            remedy="Copy the objects with the tools of the store.",
        )
    return to


def _report(table: Table | copies.Copy, to: copies.Destination) -> CopyReport:
    """What a run would do. Raises ``InvalidUsageError``: something else is at the destination."""
    if isinstance(table, copies.Copy):
        manifest = table.manifest
        wanted, rows, size = copies.Identity(manifest.uuid, manifest.epoch), manifest.rows, manifest.size
    else:
        table.check_files()
        # The copy does not retain older epochs, by a commit of its own.
        wanted, rows = copies.Identity(str(table.parameters.uuid), table.revision + 1), table.state.live
        names = (
            files.METADATA,
            FOLLOW,
            NAME,
            LOG,
            files.CURRENT,
            files.base_path(table.view_number),
            files.log_path(table.view_number),
        )
        paths = (os.path.join(table.location.uri, name) for name in names)
        size = table.state.slot_count * table.parameters.layout.block_size
        size += sum(os.path.getsize(path) for path in paths if os.path.exists(path))
    existing = to.existing()
    if existing is not None and existing != wanted:
        raise InvalidUsageError(
            f"{to.uri} exists already: epoch {existing.epoch} of index {existing.uuid}.",
            remedy="Choose another destination; nothing was changed there.",
        )
    decision = CopyDecision.DRY_RUN if existing is None else CopyDecision.UNCHANGED
    return CopyReport(decision, table.location.uri, to.uri, wanted.epoch, rows, size, 0.0)
