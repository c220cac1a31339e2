"""Erase rows of an index folder: what a deleted row leaves in blocks, slots, the store and views, and its proof.

A folder keeps no times: all that was deleted is erased, whenever that was. A free slot keeps its block until it is
reused. A block from which a link was removed keeps the compressed vector of that neighbour behind those that count.
DuckDB keeps deleted rows in free parts of its file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from memwal_ops.core.certificate import NOT_SEEN, CheckReport, Erasure, TableSurvey, run_erasure
from memwal_ops.core.erasure import EraseReport, RowHolder
from memwal_ops.core.holds import holds_in_force
from memwal_ops.core.options import OptionError
from memwal_ops.errors import ObjectNotFoundError, StorageError
from memwal_ops.formats.lm_diskann import files, merging, publishing
from memwal_ops.formats.lm_diskann.errors import IndexCorruptError
from memwal_ops.formats.lm_diskann.jobs import catchup, gc, merge
from memwal_ops.formats.lm_diskann.jobs.catchup import versions_behind
from memwal_ops.formats.lm_diskann.kernels.reading import seal
from memwal_ops.formats.lm_diskann.source import FOLLOW, read_source
from memwal_ops.formats.lm_diskann.specs import (
    IndexCatchupOptions,
    IndexEraseOptions,
    IndexGcOptions,
    IndexMergeOptions,
)
from memwal_ops.formats.lm_diskann.store import LOG, NAME, Slots, Store
from memwal_ops.formats.lm_diskann.view import read_current
from memwal_ops.formats.lm_diskann.wire import U8, Changes, Layout, headers
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.records import decode_record, encode_record
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.table import Table
    from memwal_ops.storage.api import ObjectMeta


STAGED = f"{NAME}.new"
_BATCH = 16 << 20
_REMEDY = "Run memwal-ops verify, and repair the folder or restore it."


@dataclass(frozen=True)
class UncleanBlocks:
    """Nodes whose blocks have bytes in unused parts, their slots and epochs; and free slots that are not zero."""

    nodes: NDArray[np.uint64]
    slots: NDArray[np.int64]
    epochs: NDArray[np.uint64]
    free: NDArray[np.int64]


def unclean(folder: str, store: Store, layout: Layout, horizon: int) -> UncleanBlocks:
    """Read all blocks, and all slots that were freed at ``horizon`` or before."""
    nodes, slots, epochs = store.in_graph(store.state.epoch)
    slots, free, none = slots.astype(np.int64), store.free_slots(horizon), np.zeros(0, bool)
    parts = _read(folder, layout.block_size, slots)
    chosen = np.concatenate([none, *((data != cleaned(data, layout)).any(axis=1) for data in parts)])
    dirty = np.concatenate([none, *(data.any(axis=1) for data in _read(folder, layout.block_size, free))])
    return UncleanBlocks(nodes[chosen], slots[chosen], epochs[chosen], free[dirty])


def _read(folder: str, size: int, slots: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of slots, some at a time: [n, size]; zeros beyond the end of the file."""
    step = max(1, _BATCH // size)
    with open(os.path.join(folder, files.GRAPH), "rb") as graph:
        for first in range(0, len(slots), step):
            part = slots[first : first + step]
            data = np.zeros((len(part), size), np.uint8)
            for at, slot in enumerate(part.tolist()):
                with files.io_errors():
                    os.preadv(graph.fileno(), [data[at]], slot * size)
            yield data


def cleaned(blocks: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
    """Copies of blocks with what the format has where no link counts; their checksums are those of before."""
    clean, heads = blocks.copy(), headers(blocks)
    links, backlinks = heads["num_forward_links"][:, None], heads["num_inline_backlinks"][:, None]
    for at, count, width, used, unused in (
        (layout.at_ids, layout.links, 4, links, 0xFF),
        (layout.at_codes, layout.links, layout.code_bytes, links, 0),
        (layout.at_backlinks, layout.backlinks, 4, backlinks, 0xFF),
    ):
        part = clean[:, at : at + count * width].reshape(len(clean), count, width)
        part[np.arange(count)[None, :] >= used] = unused
        clean[:, at : at + count * width] = part.reshape(len(clean), -1)
    return clean


def scrub(index: Index, step: files.Step) -> tuple[int, int]:
    """Rewrite blocks with bytes in unused parts, then zero the free slots; return how many of each.

    A rewritten block is the same version of its node in another slot, as in a compaction.
    """
    store, layout = index.writable(), index.parameters.layout
    merging.raise_horizon(index, step)
    leftovers = unclean(index.folder, store, layout, _horizon(index))
    size = layout.block_size
    most = max(1, _BATCH // size)
    for first in range(0, len(leftovers.nodes), most):
        part = slice(first, first + most)
        _move(index, leftovers.nodes[part], leftovers.slots[part], leftovers.epochs[part], step)
    if len(leftovers.nodes):
        merging.raise_horizon(index, step)
        leftovers = replace(unclean(index.folder, store, layout, _horizon(index)), nodes=leftovers.nodes)
    publishing.settle(index.view, step)
    for first in range(0, len(leftovers.free), most):
        free = leftovers.free[first : first + most]
        merging.write_blocks(index.folder, size, free, np.zeros((len(free), size), np.uint8), step)
    return len(leftovers.nodes), len(leftovers.free)


def _horizon(index: Index) -> int:
    state = index.writable().state
    return min(state.retained_from, files.needed_from(index.folder, state.epoch))


def _move(
    index: Index, nodes: NDArray[np.uint64], old: NDArray[np.int64], epochs: NDArray[np.uint64], step: files.Step
) -> None:
    store, layout = index.writable(), index.parameters.layout
    (data,) = _read(index.folder, layout.block_size, old)
    merging.check_blocks(data, nodes, epochs, f"{files.GRAPH} in {index.folder}", _REMEDY)
    data = cleaned(data, layout)
    seal(data.view(np.uint64), 0, len(data))
    slots = Slots(store, _horizon(index))
    to = slots.take(len(data))
    publishing.settle(index.view, step)
    merging.write_blocks(index.folder, layout.block_size, to, data, step)
    epoch = store.state.epoch + 1
    over = np.full(len(data), epoch, U8)
    changes = Changes(
        replace(store.state, epoch=epoch, slot_count=slots.count), moved_nodes=nodes, moved_epochs=epochs,
        moved_slots=to.astype(U8), taken=slots.taken, retired=np.stack([old.astype(U8), nodes, over, over], axis=1),
    )  # fmt: skip
    merging.commit(index, changes, step)


def write_store_anew(folder: str, store: Store, step: files.Step) -> None:
    """Replace the file of the store by one that has its living rows alone. Closes ``store``; the caller has the lock.

    Raises ``StorageError``: its log could not be folded into it, as the disk is full; nothing was changed.
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
        with files.io_errors():
            os.replace(staged, path)
        files.sync_folder(folder)

    step("write the store anew", write)
    step("publish the new store", publish)


def _remove(staged: str) -> None:
    for name in (staged, f"{staged}.wal"):
        with files.io_errors(), suppress(FileNotFoundError):
            os.unlink(name)


_OWN = "_mem_wal_ops/"
_RECORD = f"{_OWN}erase/newest.json"
_WAIT = IndexMergeOptions().wait.total_seconds()
_NO_ROWS = "it has no rows"
_WHY = {
    files.GRAPH: "every slot was read: no deleted node, and zeros where no block is",
    NAME: "it was written anew since the last deletion",
    files.METADATA: _NO_ROWS,
    FOLLOW: _NO_ROWS,
    files.WRITER: _NO_ROWS,
    files.CURRENT: _NO_ROWS,
}

__all__ = ["EraseReport", "IndexEraseOptions", "apply", "plan"]


def plan(table: Table, options: IndexEraseOptions, context: RunContext) -> EraseReport | CheckReport:
    """Report what holds deleted rows. Reads only. Raises ``IndexBusyError``: another writer or job has the index."""
    return run_erasure(table, options, partial(_begin, table, options, context), applied=False)


def apply(table: Table, options: IndexEraseOptions, context: RunContext) -> EraseReport | CheckReport:
    """Erase. Safe to kill and to repeat, and concurrently with readers. Raises as the jobs of which it is made."""
    return run_erasure(table, options, partial(_begin, table, options, context), applied=True)


def _begin(table: Table, options: IndexEraseOptions, context: RunContext) -> FolderErasure:
    if options.ttl.column is not None:
        raise OptionError("{ttl} does not apply: an index folder has no column of times.", "ttl")
    table.check_files()
    return FolderErasure(table, options=options, context=context)


@dataclass
class FolderErasure(Erasure):
    """The erasure of rows of an index folder."""

    table: Table
    not_seen: ClassVar[tuple[str, ...]] = (
        *NOT_SEEN,
        "copies of the folder elsewhere (memwal-ops snapshot)",
        "averages in the codebook, until memwal-ops catchup --rebuild trains another one",
    )
    written_in_place: ClassVar[tuple[str, ...]] = (files.GRAPH, NAME, LOG, "view/", files.READERS, files.WRITER, FOLLOW)

    @property
    def before(self) -> datetime | None:
        """See the base class."""
        return self.options.cut(datetime.now(UTC))

    def survey(self) -> TableSurvey:
        """See the base class."""
        self.context.checkpoint()
        self.table = self.table.newest()
        survey = TableSurvey(self.table)
        with publishing.locked_store(self.table.location.uri, self.table.parameters, _WAIT) as store:
            survey.living = 0 if self.options.where is None else len(store.matching(self.options.where))
            survey.holders += self._in_store(store)
            survey.holders += self._in_graph(store)
            if not self._is_recorded(store):
                survey.holders.append(RowHolder("store", NAME, "it may have deleted rows in free parts of its file"))
                survey.holders.append(RowHolder("view", files.CURRENT, "it may list deleted rows"))
            survey.holders += self._kept(store) if survey.holders else ()
        survey.holders += self._source(survey.living)
        for meta in self.table.store.list():
            why, holder = self._classify(meta)
            survey.objects.append((meta, why))
            survey.holders += [] if holder is None else [holder]
        return survey

    def _in_store(self, store: Store) -> Iterator[RowHolder]:
        [dead], [deltas] = (
            store.columns(f"SELECT count(*) FROM {name}") for name in ("lmd_tombstoned_nodes", "lmd_delta_blocks")
        )
        if dead[0]:
            yield RowHolder(
                "node", files.GRAPH, f"{counted(int(dead[0]), 'deleted node')} with its vector in the graph"
            )
        if deltas[0]:
            yield RowHolder("delta block", NAME, f"{counted(int(deltas[0]), 'delta block')} to be merged first")

    def _in_graph(self, store: Store) -> Iterator[RowHolder]:
        folder, layout = self.table.location.uri, self.table.parameters.layout
        leftovers = unclean(folder, store, layout, store.state.epoch)
        if len(leftovers.free):
            yield RowHolder("slot", files.GRAPH, f"{counted(len(leftovers.free), 'free slot')} with a block of before")
        if len(leftovers.nodes):
            yield RowHolder(
                "block", files.GRAPH, f"{counted(len(leftovers.nodes), 'block')} with links of before in unused parts"
            )
        beyond = os.path.getsize(os.path.join(folder, files.GRAPH)) - store.state.slot_count * layout.block_size
        if beyond > 0:
            yield RowHolder("end of the graph", files.GRAPH, f"{beyond:,} bytes beyond its slots")

    def _kept(self, store: Store) -> Iterator[RowHolder]:
        folder, epoch = self.table.location.uri, store.state.epoch
        if files.needed_from(folder, epoch) >= epoch:
            return
        reader = files.lowest_reader(folder)
        if reader is not None and reader < epoch:
            yield RowHolder("reader", f"at epoch {reader}", "its process must read again, or end", blocks=True)
        for hold in holds_in_force(self.table.store, store_time(self.table.store)):
            if min(hold.versions) < epoch:
                yield RowHolder(
                    "hold", f"{hold.number} of epoch {min(hold.versions)}", "it must be released", blocks=True
                )

    def _source(self, living: int) -> Iterator[RowHolder]:
        state = self.table.state
        source = read_source(self.table.location.uri, state.followed)
        if source is None:
            return
        if state.unusable:
            yield RowHolder(
                "table", source.uri, "the index cannot follow it: memwal-ops catchup --rebuild", blocks=True
            )
        elif behind := versions_behind(source, state.followed):
            yield RowHolder("table", source.uri, f"{counted(behind, 'version')} of it are to be followed first")
        if living:
            yield RowHolder("row", f"{living:,}", f"living in {source.uri}: erase them there first", blocks=True)

    def _classify(self, meta: ObjectMeta) -> tuple[str | None, RowHolder | None]:
        path = meta.path
        if path in _WHY:
            return _WHY[path], None
        if path.startswith((_OWN, f"{files.READERS}/")):
            return _NO_ROWS, None
        if path in publishing.stale_files(self.table.location.uri, self.table.parameters):
            return None, RowHolder("view", path, "a view that was replaced, or not finished")
        if path.startswith("view/"):
            return "it was made of that store", None
        if path.startswith((LOG, STAGED)):
            return None, RowHolder("leftover", path, "left by a killed run")
        return None, RowHolder("unrecognized", path, "not a file of the index: move or delete it", blocks=True)

    def erase(self) -> TableSurvey:
        """See the base class."""
        survey = self.survey()
        if survey.living or survey.holders:
            survey = self._work()
        source = read_source(self.table.location.uri, self.table.state.followed)
        if source is not None and not survey.holders:
            source.announce(self.table.parameters.uuid, self.table.location.uri, self.table.state.followed)
        return survey

    def _work(self) -> TableSurvey:
        self._delete()
        self.context.step("catchup")
        healed = catchup.apply(self.table, IndexCatchupOptions(), self.context)
        self.count("nodes_healed", healed.healed)
        self.context.step("merge")
        merged = merge.apply(self.table.newest(), IndexMergeOptions(), self.context)
        self.count("blocks_merged", merged.blocks)
        self.faults += [RowHolder("delta block", str(part.node), part.why, blocks=True) for part in merged.blocked]
        self._collect()
        self._scrub()
        self._collect()
        return self.survey()

    def _delete(self) -> None:
        self.context.step("delete")
        if self.options.where is None or read_source(self.table.location.uri, self.table.state.followed) is not None:
            return
        with self.table.open(_WAIT, changes=True) as index:
            rows = index.writable().matching(self.options.where)
            if len(rows):
                with index.staged() as staged:
                    self.count("rows_deleted", staged.delete(rows))

    def _collect(self) -> None:
        self.context.step("gc")
        report = gc.apply(self.table.newest(), IndexGcOptions(), self.context)
        self.count("objects_deleted", report.deleted_objects)

    def _scrub(self) -> None:
        """Rewrite what keeps bytes of before: blocks, slots, the view and the store."""
        self.context.step("scrub")
        folder, parameters, step = self.table.location.uri, self.table.parameters, self.table.durable
        with self.table.open(_WAIT) as index:
            blocks, slots = scrub(index, step)
            merging.finish(index, step)
        self.count("blocks_rewritten", blocks)
        self.count("slots_zeroed", slots)
        with publishing.locked_store(folder, parameters, _WAIT, read_only=False) as store:
            document = self._state_of(store)
            if document is not None:
                write_store_anew(folder, store, step)
                self.table.store.put(_RECORD, encode_record(document))
                self.count("stores_rewritten", 1)

    def _state_of(self, store: Store) -> dict[str, int] | None:
        """The epoch and the view of a folder of which nothing was changed since its view was made; else None."""
        folder = self.table.location.uri
        current = read_current(folder, self.table.parameters)
        log = os.path.join(folder, files.log_path(current.number))
        if current.epoch != store.state.epoch or not os.path.exists(log) or os.path.getsize(log):
            return None  # without its log, the view is made anew by the next writer
        return {"epoch": store.state.epoch, "view": current.number}

    def _is_recorded(self, store: Store) -> bool:
        """Whether an erasure wrote the store and the view anew, and nothing was committed since."""
        try:
            recorded = decode_record(self.table.store.get(_RECORD), _RECORD)
            return bool(recorded == self._state_of(store))
        except (ObjectNotFoundError, ValueError, IndexCorruptError):
            return False  # it only saves that they are written again
