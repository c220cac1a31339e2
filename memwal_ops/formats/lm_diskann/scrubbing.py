"""Remove what deleted rows left in the bytes of an index folder: free slots, unused parts of blocks, the store's file.

A free slot keeps its block until it is reused. A block from which a link was removed keeps the compressed vector of
that neighbour behind those that count. DuckDB keeps deleted rows in free parts of its file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.errors import StorageError
from memwal_ops.formats.lm_diskann import merging, publishing, reclaiming
from memwal_ops.formats.lm_diskann.changes import U8, Changes
from memwal_ops.formats.lm_diskann.copying import check_blocks
from memwal_ops.formats.lm_diskann.files import GRAPH, io_errors, sync_folder
from memwal_ops.formats.lm_diskann.kernels.checksum import seal
from memwal_ops.formats.lm_diskann.slots import Slots, needed_from
from memwal_ops.formats.lm_diskann.store import LOG, NAME, Store
from memwal_ops.formats.lm_diskann.wire.blocks import headers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.files import Step
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.wire.parameters import Layout

STAGED = f"{NAME}.new"
_BATCH = 16 << 20
_REMEDY = "Run memwal-ops verify, and repair the folder or restore it."


@dataclass(frozen=True)
class Unclean:
    """Nodes whose blocks have bytes in unused parts, their slots and epochs; and free slots that are not zero."""

    nodes: NDArray[np.uint64]
    slots: NDArray[np.int64]
    epochs: NDArray[np.uint64]
    free: NDArray[np.int64]


def unclean(folder: str, store: Store, layout: Layout, horizon: int) -> Unclean:
    """Read all blocks, and all slots that were freed at ``horizon`` or before."""
    nodes, slots, epochs = store.in_graph(store.state.epoch)
    slots = slots.astype(np.int64)
    marks = [has_more(data, layout) for data in _read(folder, layout.block_size, slots)]
    chosen = np.concatenate([np.zeros(0, bool), *marks])
    free = store.free_slots(horizon)
    dirty = [data.any(axis=1) for data in _read(folder, layout.block_size, free)]
    return Unclean(
        nodes[chosen], slots[chosen], epochs[chosen], free[np.concatenate([np.zeros(0, bool), *dirty])]
    )  # fmt: skip


def _read(folder: str, size: int, slots: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of slots, some at a time: [n, size]; zeros beyond the end of the file."""
    step = max(1, _BATCH // size)
    with open(os.path.join(folder, GRAPH), "rb") as graph:
        for first in range(0, len(slots), step):
            part = slots[first : first + step]
            data = np.zeros((len(part), size), np.uint8)
            for at, slot in enumerate(part.tolist()):
                with io_errors():
                    os.preadv(graph.fileno(), [data[at]], slot * size)
            yield data


def has_more(blocks: NDArray[np.uint8], layout: Layout) -> NDArray[np.bool_]:
    """Whether a block has bytes in its unused parts: bool [n]."""
    found: NDArray[np.bool_] = (blocks != cleaned(blocks, layout)).any(axis=1)
    return found


def cleaned(blocks: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
    """Copies of blocks with what the format has where no link counts; their checksums are those of before."""
    found, heads = blocks.copy(), headers(blocks)
    links, backlinks = heads["num_forward_links"][:, None], heads["num_inline_backlinks"][:, None]
    for at, count, width, used, unused in (
        (layout.at_ids, layout.links, 4, links, 0xFF),
        (layout.at_codes, layout.links, layout.code_bytes, links, 0),
        (layout.at_backlinks, layout.backlinks, 4, backlinks, 0xFF),
    ):
        part = found[:, at : at + count * width].reshape(len(found), count, width)
        part[np.arange(count)[None, :] >= used] = unused
        found[:, at : at + count * width] = part.reshape(len(found), -1)
    return found


def scrub(index: Index, step: Step) -> tuple[int, int]:
    """Rewrite blocks with bytes in unused parts, then zero the free slots; return how many of each.

    A rewritten block is the same version of its node in another slot, as in a compaction.
    """
    store, layout = index.writable(), index.parameters.layout
    merging.raise_horizon(index, step)
    found = unclean(index.folder, store, layout, _horizon(index))
    size = layout.block_size
    most = max(1, _BATCH // size)
    for first in range(0, len(found.nodes), most):
        _move(index, _part(found, first, first + most), step)
    if len(found.nodes):
        merging.raise_horizon(index, step)
        found = replace(unclean(index.folder, store, layout, _horizon(index)), nodes=found.nodes)
    publishing.settle(index.view, step)
    for first in range(0, len(found.free), most):
        part = found.free[first : first + most]
        merging.write_blocks(index.folder, size, part, np.zeros((len(part), size), np.uint8), step)
    return len(found.nodes), len(found.free)


def _part(found: Unclean, first: int, last: int) -> Unclean:
    """Some of the blocks."""
    part = slice(first, last)
    return Unclean(found.nodes[part], found.slots[part], found.epochs[part], found.free[:0])


def _horizon(index: Index) -> int:
    state = index.writable().state
    return min(state.retained_from, needed_from(index.folder, state.epoch))


def _move(index: Index, found: Unclean, step: Step) -> None:
    store, layout = index.writable(), index.parameters.layout
    (data,) = _read(index.folder, layout.block_size, found.slots)
    check_blocks(data, found.nodes, found.epochs, f"{GRAPH} in {index.folder}", _REMEDY)
    data = cleaned(data, layout)
    seal(data.view(np.uint64), 0, len(data))
    slots = Slots(store, _horizon(index))
    to = slots.take(len(data))
    publishing.settle(index.view, step)
    merging.write_blocks(index.folder, layout.block_size, to, data, step)
    epoch = store.state.epoch + 1
    over = np.full(len(data), epoch, U8)
    changes = Changes(
        replace(store.state, epoch=epoch, slot_count=slots.count), moved_nodes=found.nodes, moved_epochs=found.epochs,
        moved_slots=to.astype(U8), taken=slots.taken,
        retired=np.stack([found.slots.astype(U8), found.nodes, over, over], axis=1),
    )  # fmt: skip
    reclaiming.commit(index, changes, step)


def write_store_anew(folder: str, store: Store, step: Step) -> None:
    """Replace the file of the store by one that has its living rows alone. Closes ``store``; the caller has the lock.

    Raises:
        StorageError: its log could not be folded into it, as the disk is full; nothing was changed.
    """
    path = os.path.join(folder, NAME)
    staged = os.path.join(folder, STAGED)
    store.close()
    if os.path.exists(os.path.join(folder, LOG)):
        raise StorageError(f"{path} has a log that could not be folded into it.", remedy="Free space on its disk.")

    def write() -> None:
        _remove(staged)
        Store.copied(path, staged)

    def publish() -> None:
        with io_errors():
            os.replace(staged, path)
        sync_folder(folder)

    step("write the store anew", write)
    step("publish the new store", publish)


def _remove(staged: str) -> None:
    for name in (staged, f"{staged}.wal"):
        with io_errors(), suppress(FileNotFoundError):
            os.unlink(name)
