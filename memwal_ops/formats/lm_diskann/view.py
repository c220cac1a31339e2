"""Load and follow the published view, which readers open instead of the store, and resolve versions with it.

A base (the slot map, tombstones, entry points, rows, the codebook) and a log (one frame for each commit since).
``CURRENT`` names both, and is replaced atomically; so a reader reads a complete epoch or the previous one.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memwal_ops.errors import TableNotFoundError
from memwal_ops.formats.lm_diskann import vectors, wire
from memwal_ops.formats.lm_diskann.errors import PUBLISH_AGAIN, RESTORE, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import (
    CURRENT,
    GRAPH,
    base_path,
    check_graph,
    check_identity,
    io_error,
    log_path,
)
from memwal_ops.formats.lm_diskann.kernels import reading
from memwal_ops.formats.lm_diskann.kernels.searching import mark
from memwal_ops.formats.lm_diskann.vectors import writable
from memwal_ops.formats.lm_diskann.wire import I8, U4, U8, Frame, Parameters, State

if TYPE_CHECKING:
    from numpy.typing import NDArray


NEVER = 2**64 - 1
_ATTEMPTS = 100
_TORN_ATTEMPTS, _TORN_PAUSE = 5, 0.002
_ROOM = 1024
_BOOKS = 3


def read_current(folder: str, parameters: Parameters) -> Frame:
    """The frame of the current view: its number, and an epoch that its log has at least.

    Raises:
        StorageError: it cannot be read.
        TableCorruptError: ``CURRENT`` is damaged, or of another index.
        TableNotFoundError: there is none.
    """
    for _ in range(_TORN_ATTEMPTS):
        try:
            with open(os.path.join(folder, CURRENT), "rb") as file:
                data = file.read()
        except FileNotFoundError as error:
            raise TableNotFoundError(f"{folder} has no published view ({CURRENT}).", remedy=PUBLISH_AGAIN) from error
        except OSError as error:
            raise io_error(error) from error
        frame = wire.decode_frame(np.frombuffer(data, np.uint8))
        if frame is not None and frame.kind == wire.CURRENT and frame.uuid == parameters.uuid:
            return frame
        time.sleep(_TORN_PAUSE)  # a writer may be raising its epoch, in place
    raise _unreadable(folder, CURRENT)


def _opened(folder: str, path: str) -> int:
    """A file of the folder, opened for reading. Raises ``OSError``, and ``TableCorruptError`` for another kind."""
    file = os.open(os.path.join(folder, path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise IndexCorruptError(f"{path} in {folder} is not a file.", remedy=_remedy(path))
    return file


def _remedy(path: str) -> str:
    return RESTORE if path == GRAPH else PUBLISH_AGAIN


def _unreadable(folder: str, path: str) -> IndexCorruptError:
    return IndexCorruptError(f"{path} in {folder} is damaged, or belongs to another index.", remedy=PUBLISH_AGAIN)


class View:
    """A published view; :meth:`refresh` reads new commits.

    Args:
        folder: of the index.
        parameters: of the index.
        cache_bytes: budget of the block cache.
        overlay: number of rows for blocks that a transaction changes.

    Raises:
        TableCorruptError: the view is damaged.
        TableNotFoundError: there is none.
    """

    def __init__(self, folder: str, parameters: Parameters, cache_bytes: int = 0, overlay: int = 0) -> None:
        self.folder, self.parameters = folder, parameters
        size = parameters.layout.block_size
        rows = reading.power(max(reading.WAYS, cache_bytes // size // 2 + 1))
        self._pool = reading.pool(rows + overlay, size)
        self._tags, self._stamps = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
        self._overlay = np.zeros(reading.power(2 * overlay + 2), np.int64)
        self.counts = np.zeros(8, np.int64)
        self._files: tuple[int, int, int] | None = None
        self._current = os.path.join(folder, CURRENT)
        self._refreshed = b""
        """The content of ``CURRENT`` before the last refresh."""
        self._chosen: tuple[int, NDArray[Any], NDArray[np.int64]] | None = None
        self._books: dict[int, reading.Codebook] = {}
        self._open()

    def _open(self) -> None:
        """Open the current view; if it is replaced meanwhile, its files are missing, and ``CURRENT`` is read again."""
        for attempt in range(_ATTEMPTS):
            current = read_current(self.folder, self.parameters)
            number = current.number
            opened: list[int] = []
            try:
                opened.extend(_opened(self.folder, path) for path in (GRAPH, log_path(number), base_path(number)))
            except (OSError, IndexCorruptError) as error:
                for file in opened:
                    os.close(file)
                if isinstance(error, IndexCorruptError):
                    raise
                if not isinstance(error, FileNotFoundError):
                    raise io_error(error) from error
                if attempt + 1 == _ATTEMPTS or read_current(self.folder, self.parameters).number == number:
                    raise IndexCorruptError(
                        f"A file of view {number} is missing: {error.filename}.",
                        remedy=_remedy(os.path.basename(error.filename)),
                    ) from error
                continue
            break
        self._close_files()
        self._files, self.number = (opened[0], opened[1], opened[2]), number
        self._log, self._log_stat = os.path.join(self.folder, log_path(number)), os.fstat(opened[1])
        self._load_base()
        self.end = 0
        self._follow(current.epoch)

    def close(self) -> None:
        """Close its files."""
        self._close_files()

    def _close_files(self) -> None:
        if self._files is not None:
            for file in self._files:
                os.close(file)
            self._files = None

    def _load_base(self) -> None:
        base = self.files[reading.BASE]
        size = os.fstat(base).st_size
        if not size:
            raise _unreadable(self.folder, base_path(self.number))
        # A private mapping: it is never written to, but compiled code needs one array type, the writable one.
        mapped = mmap.mmap(base, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        frame = wire.decode_frame(np.frombuffer(mapped, np.uint8))
        if (
            frame is None
            or frame.kind != wire.BASE
            or frame.uuid != self.parameters.uuid
            or frame.number != self.number
        ):
            raise _unreadable(self.folder, base_path(self.number))
        self.state = _state(frame)
        since = frame.array("from", U8)
        self.complete_from = int(since[0]) if len(since) else self.state.retained_from
        """The lowest epoch of which this view has all versions: below ``retained_from`` for a reader that holds it."""
        self.rows, self.row_nodes = frame.array("rows", I8), frame.array("rownodes", U4)
        self._more: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self.dead, self.dead_epochs = (
            frame.array("dead", U4).astype(np.int64),
            frame.array("deadat", U8).astype(np.int64),
        )
        self._entries = frame.array("entries", U8).reshape(-1, 3).copy()
        self._sample = frame.array("sample", U8).reshape(-1, 4)
        self.followed = _text(frame)
        """The uuid of the transaction that made the followed version; empty: unknown, or there is none."""
        self._gone = np.zeros(0, np.int64)
        # Bases of earlier releases have none: as if they were those of all epochs before.
        self._counts: list[list[int]] = frame.array("counts", U8).reshape(-1, 4).tolist() or [self._counted(0, NEVER)]
        self._allowed: tuple[tuple[int, int, bytes], NDArray[np.bool_]] | None = None
        self._starts: tuple[NDArray[np.int64], reading.Starts] | None = None
        self.book = vectors.empty(self.parameters)
        self._take_codebook(frame, self.state.codebook_id)
        self.delta_blocks, self.delta_nodes = 0, set[int]()
        slots = frame.array("slots", U4)
        if len(slots) != self.state.next_node_id:
            raise _unreadable(self.folder, base_path(self.number))
        history = frame.array("history", U8).reshape(-1, 3)
        nodes, epochs = frame.array("dnodes", U8), frame.array("depochs", U8)
        self.counts[:2] = 0
        self._tags[:] = -1
        self._source = self._new_source(slots, frame.epoch, len(history) + len(nodes))
        block_size = self.parameters.layout.block_size
        at = (reading.BASE << reading.FILE_SHIFT) + frame.offsets.get("blocks", 0)
        places = [history[:, 2].astype(np.int64) * block_size, at + block_size * np.arange(len(nodes))]
        versions = np.stack([np.concatenate([history[:, 0], nodes]), np.concatenate([history[:, 1], epochs])])
        order = np.lexsort((versions[1], versions[0]))
        self._add(versions[0, order], versions[1, order], np.concatenate(places)[order])
        self._count_deltas(nodes)

    def _new_source(self, slots: NDArray[Any], epoch: int, versions: int) -> reading.Source:
        room = reading.power(2 * versions + _ROOM)
        return reading.Source(
            np.array(self.files, np.int32), slots, np.array([epoch], np.int64), np.zeros(2 * room, np.int64),
            np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros(room, np.int64),
            self._pool, self._tags, self._stamps, self._overlay, self.counts,
        )  # fmt: skip

    @property
    def source(self) -> reading.Source:
        """The arrays by which compiled code finds blocks."""
        return self._source

    def _add(self, nodes: NDArray[Any], epochs: NDArray[Any], places: NDArray[Any]) -> None:
        """Add versions; per node by ascending epoch."""
        old = self._source
        held = int(self.counts[0])
        if held + len(nodes) > len(old.node):
            self._source = self._new_source(old.slots, int(old.limits[0]), held + len(nodes))
            self.counts[0] = 0
            reading.add_versions(self._source, old.node[:held], old.epoch[:held], old.place[:held])
        arrays = [np.ascontiguousarray(node, np.int64) for node in (nodes, epochs, places)]
        reading.add_versions(self._source, *arrays)

    def add_private(self, nodes: NDArray[Any], epoch: int, slots: NDArray[Any]) -> None:
        """Add versions that a transaction wrote to the graph and did not commit; :meth:`reload` discards them."""
        places = slots.astype(np.int64) * self.parameters.layout.block_size
        self._tags[np.isin(self._tags, places)] = -1
        self._add(nodes, np.full(len(nodes), epoch), places)

    def reload(self) -> None:
        """Read the view again."""
        self._overlay[:] = 0
        self._open()

    def clear_overlay(self) -> None:
        """Discard the blocks that a transaction changed."""
        self._overlay[:] = 0
        self.counts[1] = 0

    @property
    def overlay_rows(self) -> NDArray[np.uint8]:
        """The blocks that a transaction changed: uint8 [n, block_size]."""
        first = len(self._tags)
        rows: NDArray[np.uint8] = self._pool.u8[first : first + int(self.counts[1])]
        return rows

    def refresh(self) -> bool:
        """Read new commits; returns whether there were any. Raises ``TableCorruptError``: the view is damaged."""
        epoch, now, log = self.epoch, self._content(), self._log_now()
        if log is not None and log - self.end < wire.HEADER_BYTES and now and now == self._refreshed:
            return False  # each search asks: a quarter of the time of reading it all
        current = read_current(self.folder, self.parameters)
        if current.number != self.number or log is None:
            self._open()
        else:
            self._follow(current.epoch)
        self._refreshed = now
        return self.epoch != epoch

    def _content(self) -> bytes:
        """The content of ``CURRENT``; empty if it cannot be read."""
        try:
            file = os.open(self._current, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return b""
        try:
            return os.read(file, 1 << 16)
        except OSError:
            return b""
        finally:
            os.close(file)

    def _log_now(self) -> int | None:
        """The size of the log; None without one, or if the folder was replaced by an older copy of that number."""
        try:
            now = os.stat(self._log)
        except OSError:
            return None
        return now.st_size if now.st_size >= self.end and os.path.samestat(now, self._log_stat) else None

    def _follow(self, reached: int) -> None:
        """Apply the commits of the log. Raises ``TableCorruptError`` if it ends before the epoch ``reached``.

        Timeline of the wrong answer that this prevents: rows are deleted; a disk loses the end of the log; a reader
        takes what is left of it for all of it, and returns them.
        """
        self._apply_log()
        if self.epoch < reached:
            raise IndexCorruptError(
                f"{log_path(self.number)} in {self.folder} ends at epoch {self.epoch}; epoch {reached} was published.",
                remedy=PUBLISH_AGAIN,
            )

    def _apply_log(self) -> None:
        log = self.files[reading.LOG]
        size = os.fstat(log).st_size
        while size - self.end >= wire.HEADER_BYTES:
            magic, length = os.pread(log, 8, self.end), int.from_bytes(os.pread(log, 8, self.end + 8), "little")
            if any(magic) and magic != wire.MAGIC:
                raise _unreadable(self.folder, log_path(self.number))
            if not wire.HEADER_BYTES <= length <= size - self.end:
                return
            data = np.frombuffer(os.pread(log, length, self.end), np.uint8)
            frame = wire.decode_frame(data)
            if frame is None or (frame.kind, frame.number, frame.uuid) != (
                wire.COMMIT,
                self.number,
                self.parameters.uuid,
            ):
                # At the end, a killed writer left them, and the next one publishes another view. Elsewhere they are
                # damage: writers append nothing after such bytes, so later commits would be missed silently.
                if self.end + length < size:
                    raise _unreadable(self.folder, log_path(self.number))
                return
            if frame.epoch != self.epoch + 1:
                return
            self._apply(frame, self.end)
            self.end += length

    def _apply(self, frame: Frame, at: int) -> None:
        block_size = self.parameters.layout.block_size
        nodes = frame.array("dnodes", U8)
        if len(nodes):
            start = (reading.LOG << reading.FILE_SHIFT) + at + frame.offsets["blocks"]
            self._add(nodes, np.full(len(nodes), frame.epoch), start + block_size * np.arange(len(nodes)))
            self._count_deltas(nodes)
        moves = frame.array("moves", U8).reshape(-1, 3)
        self._add(moves[:, 0], moves[:, 1], moves[:, 2] * block_size)
        merged = frame.array("merged", U8)
        self.delta_blocks -= len(merged)
        self.delta_nodes -= {*merged.tolist()}
        if len(frame.array("rows", I8)):
            self._more.append((frame.array("rows", I8).copy(), frame.array("rownodes", U4).copy()))
        dead = frame.array("dead", U4).astype(np.int64)
        if len(dead):
            merged_dead = np.concatenate([self.dead, dead])
            order = np.argsort(merged_dead, kind="stable")
            self.dead = merged_dead[order]
            self.dead_epochs = np.concatenate([self.dead_epochs, np.full(len(dead), frame.epoch)])[order]
        gone = frame.array("gone", U4).astype(np.int64)
        if len(gone):
            # Their slots will have other nodes, which a scan of all nodes must not read as these.
            self._add(gone, np.full(len(gone), frame.epoch), np.full(len(gone), -1))
            stays = ~np.isin(self.dead, gone)
            self.dead, self.dead_epochs = self.dead[stays], self.dead_epochs[stays]
            self._gone = np.concatenate([self._gone, gone])
        if "entries" in frame.sections:
            self._take_entries(frame)
        if "followed" in frame.sections:
            self.followed = _text(frame)
        state = _state(frame)
        self._take_codebook(frame, state.codebook_id)
        if state.next_node_id - self.state.next_node_id > len(frame.array("rows", I8)) + len(dead):
            raise _unreadable(self.folder, log_path(self.number))
        self.state = state
        self._counts.append(self._counted(frame.epoch, min(frame.array("rownodes", U4).tolist(), default=NEVER)))

    def _counted(self, epoch: int, first: int) -> list[int]:
        return [epoch, self.state.live, len(self.dead) - self.state.healed, first]

    def counts_at(self, epoch: int) -> tuple[int, int, int]:
        """Of an epoch, the same whenever it is asked: live rows, deleted nodes to which links lead, and node ids."""
        at = max(1, bisect_right(self._counts, epoch, key=itemgetter(0)))
        _, live, unhealed, _ = self._counts[at - 1]
        return live, unhealed, min([self.state.next_node_id, *(first for *_, first in self._counts[at:])])

    def _count_deltas(self, nodes: NDArray[Any]) -> None:
        self.delta_blocks += len(nodes)
        self.delta_nodes |= {*nodes.tolist()}

    def _take_entries(self, frame: Frame) -> None:
        now = frame.array("entries", U8)
        held = self._entries
        stays = np.isin(held[:, 0], now)
        held[:, 2] = np.where((held[:, 2] == NEVER) & ~stays, frame.epoch, held[:, 2])
        fresh = now[~np.isin(now, held[held[:, 2] == NEVER, 0])]
        more = np.stack([fresh, np.full(len(fresh), frame.epoch, U8), np.full(len(fresh), NEVER, U8)], axis=1)
        all_ = np.concatenate([held, more])
        self._entries = all_[np.lexsort((all_[:, 1], all_[:, 0]))]  # as in a base: so a held epoch reads as it did

    def _take_codebook(self, frame: Frame, number: int) -> None:
        if "codebook" in frame.sections and len(frame.sections["codebook"]):
            self.book = vectors.decode(frame.sections["codebook"].copy(), self.parameters)
            self._books = {**dict([*self._books.items()][-_BOOKS:]), number: self.book}

    def book_at(self, starts: reading.Starts, epoch: int) -> reading.Codebook | None:
        """The codebook of the links at an epoch whose entry points these are.

        None: it was replaced before this process opened the index, and published views have the current one only.
        """
        if epoch == self.epoch or not len(starts.nodes):
            return self.book
        number = reading.codebook_of(self.source, self.parameters.layout, starts.nodes[0], epoch)
        return self._books.get(number)

    @property
    def epoch(self) -> int:
        """The epoch of the view."""
        return self.state.epoch

    def entries(self, epoch: int) -> NDArray[np.int64]:
        """The entry points at an epoch; none if there was no graph."""
        table = self._entries  # another array after each change
        if self._chosen is None or self._chosen[0] != epoch or self._chosen[1] is not table:
            there = (table[:, 1] <= epoch) & (table[:, 2] > epoch)
            self._chosen = (epoch, table, table[there, 0].astype(np.int64))
        return self._chosen[2]

    def built_nodes(self, epoch: int) -> int:
        """About how many node ids there were at the last build: it added more entry points than any commit since."""
        table = self._entries
        there = table[(table[:, 1] <= epoch) & (table[:, 2] > epoch)]
        epochs, counts = np.unique(there[:, 1], return_counts=True)
        return int(there[there[:, 1] == epochs[counts.argmax()], 0].max()) + 1 if len(there) else 0

    def starts(self, epoch: int) -> reading.Starts | None:
        """The entry points at an epoch, with their vectors, read when they change; None: a block is unreadable."""
        nodes = self.entries(epoch)
        held = self._starts
        if held is not None and held[0] is nodes:
            return held[1]
        starts = held[1] if held is not None and np.array_equal(held[0], nodes) else read_starts(self, nodes, epoch)
        self._starts = None if starts is None else (nodes, starts)
        return starts

    def allowed(self, row_ids: NDArray[np.int64], epoch: int) -> NDArray[np.bool_]:
        """Which nodes are those of these rows (ascending), by node id, without those that are deleted at the epoch.

        The last result is kept: a filter is often used for one query after the other.
        """
        key = (epoch, self.epoch, xxhash.xxh3_128_digest(row_ids.data))
        if self._allowed is None or self._allowed[0] != key:
            allowed = np.zeros(self.state.next_node_id, np.bool_)
            mark(self.rows, self.row_nodes, writable(row_ids), allowed)
            for rows, nodes in self._more:
                allowed[nodes[np.searchsorted(row_ids, rows, "right") > np.searchsorted(row_ids, rows)]] = True
            allowed[self.dead[self.dead_epochs <= epoch]] = False
            allowed[self._gone] = False
            allowed[self.counts_at(epoch)[2] :] = False
            self._allowed = (key, allowed)
        return self._allowed[1]

    def has_rows(self, row_ids: NDArray[np.int64], nodes: NDArray[np.uint64]) -> bool:
        """Whether it has all of these rows, with these nodes."""
        mapped = np.full(self.state.next_node_id, -1, np.int64)
        for rows, of in [(self.rows, self.row_nodes), *self._more]:
            mapped[of[of < len(mapped)]] = rows[of < len(mapped)]
        known = nodes < len(mapped)
        return bool(known.all() and np.array_equal(mapped[nodes.astype(np.int64)], row_ids))

    def slots_that_differ(
        self, nodes: NDArray[np.uint64], slots: NDArray[np.uint64], epochs: NDArray[np.uint64]
    ) -> list[int]:
        """The nodes whose version of that epoch has another place in this view than in these slots."""
        size = self.parameters.layout.block_size
        differ = []
        for node, slot, epoch in zip(nodes.tolist(), slots.tolist(), epochs.tolist(), strict=True):
            place, _ = reading.place_of(self._source, size, node, epoch)
            if place != slot * size:
                differ.append(node)
        return differ

    @property
    def files(self) -> tuple[int, int, int]:
        """Descriptors of graph, log and base."""
        assert self._files is not None  # noqa: S101 - not called on a closed view
        return self._files

    def check_graph(self) -> None:
        """Check that the graph has all slots of this view. Raises ``TableCorruptError``."""
        length, block_size = os.fstat(self.files[0]).st_size, self.parameters.layout.block_size
        check_graph(self.folder, length, self.state.slot_count, block_size)
        self.check_identity()

    def check_identity(self) -> None:
        """Check that the graph is that of this index. Raises ``TableCorruptError``."""
        size = self.parameters.layout.block_size
        places = self._sample[:, :2].tolist()
        there = [reading.place_of(self._source, size, node, self.epoch)[0] == slot * size for node, slot in places]
        check_identity(self.files[0], self.folder, size, self._sample[np.array(there, np.bool_)])

    def fail(self, graph: str = GRAPH) -> IndexCorruptError:
        """The error for the block that was read last and is damaged."""
        node, place = int(self.counts[5]), int(self.counts[6])
        file, offset = place >> reading.FILE_SHIFT, place & ((1 << reading.FILE_SHIFT) - 1)
        own = log_path(self.number) if file == reading.LOG else base_path(self.number)
        name = graph if file == reading.GRAPH else own
        return IndexCorruptError(f"The block of node {node} at byte {offset} of {name} in {self.folder} is damaged.")


def read_starts(view: View, nodes: NDArray[np.int64], epoch: int) -> reading.Starts | None:
    """Entry points with their vectors, without those that do not exist at the epoch; None: a block is unreadable."""
    nodes, vectors = nodes.copy(), np.empty((len(nodes), view.parameters.dimension), np.float32)
    count = reading.gather(view.source, view.parameters.layout, nodes, epoch, vectors, np.empty(len(nodes), np.int64))
    return None if count < 0 else reading.Starts(nodes[:count], vectors[:count], reading.SEARCH_STARTS)


def _text(frame: Frame) -> str:
    return frame.array("followed", np.uint8).tobytes().decode("ascii", "replace")


def _state(frame: Frame) -> State:
    values = frame.array("state", U8)
    if len(values) != len(State.__dataclass_fields__):
        raise IndexCorruptError(f"The state in a view has {len(values)} numbers.", remedy=PUBLISH_AGAIN)
    return State.checked(values.tolist(), "The state in a view", PUBLISH_AGAIN)
