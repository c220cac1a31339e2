"""Publish views: append a frame per commit, and write a new base at times."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import MemwalOpsError, StorageError
from memwal_ops.formats.lm_diskann import files, wire
from memwal_ops.formats.lm_diskann.errors import IndexCorruptError
from memwal_ops.formats.lm_diskann.store import Store
from memwal_ops.formats.lm_diskann.view import NEVER, View, read_current
from memwal_ops.formats.lm_diskann.wire import I8, U4, U8, Changes, Parameters, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


_NONE = 0xFFFFFFFF


def recover(folder: str, parameters: Parameters, store: Store, step: files.Step) -> bool:
    """Publish the view again unless it equals the content of the store; returns whether it was published.

    A writer that was killed between its commit and its frame leaves a view that is behind; one that was killed while
    writing its frame leaves invalid bytes, after which no further frame would be read.
    """
    check_commits(folder, parameters, store)
    store.check_identity()
    step("record a sample of the graph", store.begin_sample)
    try:
        view = View(folder, parameters)
    except MemwalOpsError:
        publish(folder, parameters, store, step)
        return True
    try:
        whole = view.end == os.fstat(view.files[1]).st_size
        if whole and view.state == store.state:
            if read_current(folder, parameters).epoch < view.epoch:
                _reach(folder, parameters, view.number, view.epoch, step)
            return False
        _check_node_ids(store, view.state)
    finally:
        view.close()
    publish(folder, parameters, store, step)
    return True


def check_commits(folder: str, parameters: Parameters, store: Store) -> None:
    """Check that the store has each commit that was published: it is durable there before.

    Timeline of the loss that this prevents: a disk loses the end of the store's log, which DuckDB reads as a commit
    that never ended; the next writer publishes that older state over the view, the only other record of those commits.

    Raises ``TableCorruptError``: it has not.
    """
    published = 0
    with suppress(MemwalOpsError):
        published = read_current(folder, parameters).epoch
        view = View(folder, parameters)
        published = max(published, view.epoch)
        view.close()
    if published > store.state.epoch:
        raise IndexCorruptError(
            f"{store.path} lacks commits: it is at epoch {store.state.epoch}, and epoch {published} was published."
        )


@contextmanager
def locked_store(folder: str, parameters: Parameters, wait: float, *, read_only: bool = True) -> Iterator[Store]:
    """The store with the writer lock, for the time of a block; if ``read_only``, nothing is written.

    Raises as :func:`check_commits`, and ``IndexBusyError``.
    """
    lock = files.WriterLock(folder, wait, announce=not read_only)
    try:
        store = Store(folder, parameters, read_only=read_only)
        try:
            check_commits(folder, parameters, store)
            store.check_identity()
            yield store
        finally:
            store.close()
    finally:
        lock.release()


def check_node_ids(folder: str, parameters: Parameters, store: Store) -> None:
    """Check ``next_node_id`` of the store, before memory is allocated for so many nodes.

    Raises ``TableCorruptError``: neither a block nor the published view has a node that is nearly as high.
    """
    try:
        view = View(folder, parameters)
    except MemwalOpsError:
        return  # ids of reclaimed nodes are recorded nowhere else
    view.close()
    _check_node_ids(store, view.state)


def _check_node_ids(store: Store, published: State) -> None:
    """The view lacks at most one commit, which cannot both allocate nodes and reclaim them."""
    count = store.state.next_node_id
    if count <= published.next_node_id or store.state.epoch > published.epoch + 1:
        return
    [highest] = store.columns(
        "SELECT coalesce(max(node_id), 0) FROM "
        "(SELECT node_id FROM lmd_slots UNION ALL SELECT node_id FROM lmd_delta_blocks)"
    )
    if count > max(int(highest[0]) + 1, published.next_node_id):
        raise IndexCorruptError(
            f"lmd_metadata in {store.path} is damaged: next_node_id is {count}; that of the published view is "
            f"{published.next_node_id}, and the highest node is {highest[0]}."
        )


def catch_up(view: View, store: Store, step: files.Step) -> None:
    """Read new commits: from the log, or from another view if a frame could not be written.

    Raises ``StorageError``: that view cannot be written either; the commits are durable.
    """
    view.refresh()
    if view.epoch == store.state.epoch:
        return
    try:
        recover(view.folder, view.parameters, store, step)
    except StorageError as error:
        raise StorageError(
            f"The commit is durable, but not visible yet. {error}",
            remedy="Free space: the next change, or the next job, makes it visible first.",
        ) from error
    view.refresh()


def append(view: View, changes: Changes, step: files.Step) -> None:
    """Publish a commit: append one frame to the log."""
    moves = np.stack([changes.moved_nodes, changes.moved_epochs, changes.moved_slots], axis=1)
    sections: dict[str, NDArray[Any]] = {
        "state": _state(changes.state), "rows": changes.row_ids.astype(I8), "rownodes": changes.row_nodes.astype(U4),
        "moves": moves.astype(U8), "merged": changes.merged_nodes.astype(U8), "dead": changes.removed.astype(U4),
        "gone": changes.reclaimed.astype(U4), "dnodes": changes.delta_nodes.astype(U8), "blocks": changes.blocks,
    }  # fmt: skip
    sections = {name: values for name, values in sections.items() if len(values)}
    if changes.entries is not None:
        sections["entries"] = changes.entries.astype(U8)
    if changes.codebook is not None:
        sections["codebook"] = changes.codebook[1]
    if changes.followed is not None:
        sections["followed"] = np.frombuffer(changes.followed.encode(), np.uint8)
    data = wire.encode_frame(wire.COMMIT, view.number, changes.state.epoch, view.parameters.uuid, sections)

    def write() -> None:
        with files.open_file(os.path.join(view.folder, files.log_path(view.number))) as file:
            files.write_all(file, data, view.end)

    step("append the commit to the view", write)
    _reach(view.folder, view.parameters, view.number, changes.state.epoch, step)


def _reach(folder: str, parameters: Parameters, number: int, epoch: int, step: files.Step) -> None:
    """Record in ``CURRENT`` that the view's log has this epoch: then readers notice if its end is missing.

    In place, as nothing else has to change: one write within a sector. If it fails, readers only notice less.
    """
    data = wire.encode_frame(wire.CURRENT, number, epoch, parameters.uuid, {})

    def write() -> None:
        with suppress(StorageError), files.open_file(os.path.join(folder, files.CURRENT)) as file:
            files.write_all(file, data, 0)

    step("record the epoch of the view", write)


def settle(view: View, step: files.Step) -> None:
    """Make the view durable: a slot is reused only below the epoch of the view after a machine crash."""

    def act() -> None:
        with files.open_file(os.path.join(view.folder, files.log_path(view.number))) as file:
            files.sync(file)

    step("sync the view", act)


def publish(folder: str, parameters: Parameters, store: Store, step: files.Step) -> int:
    """Publish the whole content of the store as a new base with an empty log, and return its number.

    It has the versions of all epochs that are retained or that a reader holds. A reader that registered while it was
    written, and read the view before, is one of them: then it is published again.
    """
    while True:
        since = min(store.state.retained_from, files.needed_from(folder, store.state.epoch))
        number = _publish(folder, parameters, store, since, step)
        if files.needed_from(folder, since) >= since:
            return number


def _publish(folder: str, parameters: Parameters, store: Store, since: int, step: files.Step) -> int:
    store.check_own()
    with files.io_errors():
        os.makedirs(os.path.join(folder, files.VIEW), exist_ok=True)
    stems = (name.partition(".")[0] for name in os.listdir(os.path.join(folder, files.VIEW)))
    numbers = [int(stem) for stem in stems if stem.isdigit()]
    with suppress(MemwalOpsError):
        numbers.append(read_current(folder, parameters).number)
    number = 1 + max(numbers, default=0)
    data = wire.encode_frame(
        wire.BASE, number, store.state.epoch, parameters.uuid, _base_sections(store, parameters, since)
    )

    def write() -> None:
        # A log that a killed run left under this number would be read as this view's: so it is truncated.
        with files.io_errors(), open(os.path.join(folder, files.log_path(number)), "wb") as file:
            os.fsync(file.fileno())
        files.replace_file(folder, files.base_path(number), [data])

    step("write the base of a view", write)
    current = wire.encode_frame(wire.CURRENT, number, store.state.epoch, parameters.uuid, {})
    step("publish the view", lambda: files.replace_file(folder, files.CURRENT, [current]))
    return number


def stale_files(folder: str, parameters: Parameters) -> list[str]:
    """Files of views that ``CURRENT`` does not name, relative to the folder: lower numbers, and unfinished ones.

    Proof that they are deletable: ``CURRENT`` only rises, a reader with open files keeps them, and one that does not
    find them reads ``CURRENT`` again.
    """
    number = read_current(folder, parameters).number
    kept = {os.path.basename(path) for path in (files.CURRENT, files.base_path(number), files.log_path(number))}
    stale = []
    for name in sorted(os.listdir(os.path.join(folder, files.VIEW))):
        stem, _, kind = name.partition(".")
        known = name == "CURRENT.new" or (stem.isdigit() and kind in {"base", "log", "base.new"})
        if known and name not in kept:
            stale.append(f"{files.VIEW}/{name}")
    return stale


def drop_older(folder: str, parameters: Parameters, keep: int, step: files.Step) -> None:
    """Delete the views before ``keep``; the previous one is kept until gc, for a reader that is just opening it."""
    for path in stale_files(folder, parameters):
        stem = os.path.basename(path).partition(".")[0]
        if stem.isdigit() and int(stem) < keep:

            def remove(path: str = path) -> None:
                with suppress(OSError):  # what is left is gc's
                    os.unlink(os.path.join(folder, path))

            step("remove an older view", remove)


def first_view(folder: str, parameters: Parameters, state: State) -> None:
    """Publish the view of a new index."""
    os.mkdir(os.path.join(folder, files.VIEW))
    data = wire.encode_frame(wire.BASE, 1, state.epoch, parameters.uuid, {"state": _state(state)})
    with open(os.path.join(folder, files.log_path(1)), "wb") as file:
        os.fsync(file.fileno())
    files.replace_file(folder, files.base_path(1), [data])
    files.replace_file(folder, files.CURRENT, [wire.encode_frame(wire.CURRENT, 1, state.epoch, parameters.uuid, {})])
    files.sync_folder(folder)


def _state(state: State) -> NDArray[np.uint64]:
    return np.array(astuple(state), U8)


def _base_sections(store: Store, parameters: Parameters, since: int) -> dict[str, NDArray[Any]]:
    """All sections of a base, with the versions that readers at ``since`` or later read."""
    graph = store.in_graph(since)
    nodes, slots, from_epochs = graph
    store.check_below(store.state.next_node_id, "lmd_slots", nodes)
    mapped = np.full(store.state.next_node_id, _NONE, U4)
    order = np.argsort(from_epochs, kind="stable")
    mapped[nodes[order]] = slots[order]  # the newest one of each node
    # A damaged one is kept, and reported by merge and verify; here only its length must fit.
    [delta, epochs], blocks, _ = store.blocks(
        "SELECT node_id, commit_epoch, data FROM lmd_delta_blocks ORDER BY node_id, commit_epoch",
        parameters.layout.block_size,
    )
    rows, row_nodes = store.columns("SELECT row_id, node_id FROM lmd_lookup ORDER BY row_id, node_id")
    dead, dead_at = store.columns("SELECT node_id, deletion_epoch FROM lmd_tombstoned_nodes ORDER BY node_id")
    entries = store.columns("SELECT node_id, added_epoch, removed_epoch FROM lmd_entry_points ORDER BY 1, 2")
    store.check_below(store.state.next_node_id, "lmd_entry_points", entries[0])
    # NULL is read as the highest value.
    until = np.where(entries[2] == np.iinfo(entries[2].dtype).max, NEVER, entries[2]).astype(U8)
    sections: dict[str, NDArray[Any]] = {
        "state": _state(store.state),
        "slots": mapped,
        "history": _history(graph, delta),
        "from": np.array([since], U8),
        "counts": store.counts_from(since),
        "rows": rows.astype(I8),
        "rownodes": row_nodes.astype(U4),
        "dead": dead.astype(U4),
        "deadat": dead_at.astype(U8),
        "entries": np.stack([entries[0], entries[1], until], axis=1).astype(U8),
    }
    if len(sample := store.sample()):
        sections["sample"] = sample
    if followed := store.followed():
        sections["followed"] = np.frombuffer(followed.encode(), np.uint8)
    if store.state.codebook_id:
        sections["codebook"] = store.codebook()
    if len(delta):
        sections |= {"dnodes": delta.astype(U8), "depochs": epochs.astype(U8), "blocks": blocks.reshape(-1)}
    return sections


def _history(graph: Sequence[NDArray[Any]], delta: NDArray[Any]) -> NDArray[np.uint64]:
    """The versions in the graph of nodes that have several, one of them perhaps in the delta table: [n, 3]."""
    nodes, slots, epochs = graph
    versions = np.bincount(nodes.astype(np.int64))
    several = (versions[nodes.astype(np.int64)] > 1) | np.isin(nodes, delta)
    history = np.stack([nodes, epochs, slots], axis=1).astype(U8)[several]
    return history[np.lexsort((history[:, 1], history[:, 0]))]
