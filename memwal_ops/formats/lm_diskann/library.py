"""The library class ``Index``: build, change and search an index folder."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from memwal_ops.core.options import boolean
from memwal_ops.errors import InvalidUsageError, VersionGoneError
from memwal_ops.formats.lm_diskann import files, merging, publishing
from memwal_ops.formats.lm_diskann.graph import insert
from memwal_ops.formats.lm_diskann.kernels.reading import STALE, scratch
from memwal_ops.formats.lm_diskann.kernels.searching import scan, search, search_allowed
from memwal_ops.formats.lm_diskann.source import Filter, read_source, usable
from memwal_ops.formats.lm_diskann.store import Store
from memwal_ops.formats.lm_diskann.transaction import Transaction
from memwal_ops.formats.lm_diskann.vectors import ascending, integers, real, row_ids_of, stored, whole, writable
from memwal_ops.formats.lm_diskann.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import ArrayLike, NDArray

CACHE = 32 << 20
OVERLAY = 256 << 20
DELTA = 16 << 20
WAIT = 30.0
_FEW = 4096
"""Allowed rows up to which comparing all of them is worth it: it is exact."""
_ATTEMPTS = 20
_WIDEST = 16
_TENTH = 0.1
_FACTOR = 8
_COSINE_HALF = 0.5


def _lists(limit: int, share: float) -> tuple[int, int]:
    """The numbers of candidates that a filter allows, and of others, through which a search passes.

    The fewer rows a filter allows, the farther apart they are: more of them are visited. Of others, as many as without
    a filter; more if it allows fewer than a tenth of the rows, as few links then lead to allowed ones.
    """
    allowed = min(_FACTOR, 1 / max(share, 1 / _FACTOR))
    return int(limit * allowed), int(limit * min(_WIDEST, max(1.0, _TENTH / max(share, _TENTH / _WIDEST))))


class Index:
    """An open index. Use it as a context manager; safe from several threads, one call at a time.

    Args:
        read_only: never open the store; any number of processes may read during writes of another one.
        cache_bytes: budget of the block cache.
        wait: seconds to wait for another writer or job.
        step: performs each durable step, given its name and function; that of a job checks its guard first.
        overlay_bytes: budget for the blocks that a transaction changes; 0: transactions are not possible.
        delta_bytes: of changed blocks above which a commit writes them into the graph, once; below, into the store and
            the view, from which merge writes them into the graph.

    Raises:
        IndexBusyError: another writer or job has the writer lock.
        InvalidUsageError: an argument is of another type.
        MemwalOpsError: it does not exist, or is damaged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        read_only: bool = False,
        cache_bytes: int = CACHE,
        wait: float = WAIT,
        step: files.Step = files.unguarded,
        overlay_bytes: int = OVERLAY,
        delta_bytes: int = DELTA,
    ) -> None:
        boolean("read_only", read_only)
        self._process, self._closed = os.getpid(), False
        self._lock = threading.RLock()
        self._transaction: Transaction | None = None
        self._writer: files.WriterLock | None = None
        self._store: Store | None = None
        self._reader: files.Reader | None = None
        self._held: list[files.Reader] = []
        self._overlay_bytes, self._delta_bytes = overlay_bytes, max(0, whole("delta_bytes", delta_bytes))
        self.folder = files.local_path(folder)
        wait, cache_bytes = real("wait", wait), max(0, whole("cache_bytes", cache_bytes))
        self.parameters = files.read_parameters(self.folder)
        self._step = step
        self._filter = Filter(self.folder)
        self._room: tuple[tuple[int, int], Any] | None = None
        try:
            if not read_only:
                self._writer = files.WriterLock(self.folder, wait)
                self._store = Store(self.folder, self.parameters)
                self.republished = publishing.recover(self.folder, self.parameters, self._store, step)
            self.view = self._open_view(cache_bytes, read_only=read_only)
        except BaseException:
            self._release()
            raise

    def _open_view(self, cache_bytes: int, *, read_only: bool) -> View:
        links, overlay = self.parameters.links, self._overlay_bytes // self.parameters.layout.block_size
        most = links * (links + 4) + 2  # blocks that one insert can change
        overlay = 0 if read_only or not self._overlay_bytes else max(overlay, 2 * most)
        view = View(self.folder, self.parameters, cache_bytes, overlay)
        if read_only:
            # Registered first, then read again: so epochs that are no longer retained are noticed.
            self._reader = files.Reader(self.folder, view.epoch)
            view.refresh()
            self._reader.move(view.epoch)
        try:
            if read_only:
                view.check_identity()
            else:
                view.check_graph()
        except BaseException:
            view.close()
            raise
        return view

    def close(self) -> None:
        """Close it; an open transaction is rolled back."""
        with self._lock:
            self._closed = True
            if self._transaction is not None:
                self._transaction.close()
                self._transaction = None
            if hasattr(self, "view"):
                self.view.close()
            self._release()

    def _release(self) -> None:
        for reader in [*self._held, *([] if self._reader is None else [self._reader])]:
            reader.close()
        if self._store is not None:
            self._store.close()
        # Not in a forked process: the lock is that of the process that opened it.
        if self._writer is not None and self._process == os.getpid():
            self._writer.release()
        self._reader = self._store = self._writer = None
        self._held = []

    def __del__(self) -> None:
        # A handle that was never closed would keep its lock, and old epochs, until the process ends.
        if hasattr(self, "_lock"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- properties

    @property
    def epoch(self) -> int:
        """The newest epoch that this handle has read."""
        return self.view.epoch

    @property
    def exact(self) -> bool:
        """Whether every search compares all rows: there are too few for a codebook and a graph."""
        return not self.view.state.codebook_id

    def __len__(self) -> int:
        return self.view.state.live

    # -- changes

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """A transaction: its changes become visible at once, or not at all if the block raises.

        Raises ``InvalidUsageError``: the index is read-only, or a transaction is already open.
        """
        self._refuse_if_following()
        with self.staged():
            yield self

    @contextmanager
    def staged(self) -> Iterator[Transaction]:
        """Like :meth:`transaction`, for jobs: the transaction itself."""
        with self._lock:
            store = self.writable()
            if self._transaction is not None:
                raise InvalidUsageError("A transaction is already open; transactions do not nest.")
            if not self._overlay_bytes:
                raise InvalidUsageError("The index was opened with overlay_bytes 0, so it cannot be changed.")
            publishing.catch_up(self.view, store, self._step)
            horizon = min(store.state.retained_from, files.needed_from(self.folder, store.state.epoch))
            staged = self._transaction = Transaction(self.view, store, horizon, self._step, self._delta_bytes)
            try:
                yield staged
                self._check_open()
                staged.commit()
            finally:
                staged.close()
                self._transaction = None
                if not self._closed:
                    publishing.catch_up(self.view, store, self._step)
            merging.finish_large(self, staged.moved, self._step)

    def insert(self, row_ids: ArrayLike | Iterable[int], vectors: ArrayLike) -> None:
        """Insert rows. An existing row is replaced.

        Args:
            row_ids: int64 [n], all different.
            vectors: float32 [n, d].

        Raises:
            InvalidUsageError: invalid shapes, types or values; nothing was changed.
            StorageError: the disk is full, or failed; nothing was changed, or the message says that it was committed.
        """
        rows = row_ids_of(row_ids)
        given = stored(self.parameters, vectors)
        if len(rows) != len(given):
            raise InvalidUsageError(f"There are {len(rows)} row ids for {len(given)} vectors.")
        if len(np.unique(rows)) != len(rows):
            raise InvalidUsageError("A row id is given twice in one insert.")
        with self._lock:
            if self._transaction is None:
                with self.transaction():
                    self.insert(rows, given)
            elif len(rows):
                with self._transaction.atomic():
                    insert(self._transaction, rows, given)

    def delete(self, row_ids: ArrayLike | Iterable[int]) -> int:
        """Delete rows, and return how many of them existed.

        Raises:
            InvalidUsageError: the index is read-only.
            StorageError: the disk is full, or failed; nothing was changed, or the message says that it was committed.
        """
        rows = np.unique(row_ids_of(row_ids))
        with self._lock:
            if self._transaction is None:
                with self.transaction():
                    return self.delete(rows)
            with self._transaction.atomic():
                return self._transaction.delete(rows)

    def _refuse_if_following(self) -> None:
        source = read_source(self.folder, self.writable().state.followed)
        if source is not None:
            raise InvalidUsageError(
                f"{self.folder} follows the table {source.uri}, so its rows cannot be changed directly.",
                remedy="Change the table; memwal-ops catchup applies its changes to the index.",
            )

    def writable(self) -> Store:
        """The store.

        Raises:
            InvalidUsageError: the index is closed, read-only, or was opened by the process that this was forked from.
            TableReplacedError: the folder was moved or removed.
        """
        self._check_open()
        if self._store is None:
            raise InvalidUsageError(f"{self.folder} is open read-only.", remedy="Open it without read_only.")
        self._store.check_own()
        return self._store

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidUsageError(f"The index {self.folder} is closed.", remedy="Open it again.")

    def merge(self, max_bytes: int = merging.BATCH) -> int:
        """Merge the delta blocks into the graph, like the job: for a writer that never closes its index.

        Returns the number of merged versions; damaged ones are kept, and reported by the job and by verify. One commit
        has ``max_bytes`` of delta blocks.

        Raises:
            InvalidUsageError: the index is read-only, or a transaction is open.
            StorageError: the disk is full, or failed; earlier commits are kept.
        """
        with self._lock:
            store = self.writable()
            most = whole("max_bytes", max_bytes)
            if self._transaction is not None:
                raise InvalidUsageError("A transaction is open; commit it first.")
            publishing.catch_up(self.view, store, self._step)
            merged = sum(batch.versions for batch in merging.merge(self, most, self._step, {}))
            if merged:
                merging.finish(self, self._step)
            return merged

    # -- search

    def search(
        self,
        queries: ArrayLike,
        k: int = 10,
        L: int | None = None,  # noqa: N803 - see create
        allow: ArrayLike | Iterable[int] | None = None,
        as_of: int | None = None,
        beam_width: int = 1,
        where: str | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Search the nearest committed rows of each query.

        Args:
            queries: float32 [m, d], or one query [d].
            k: number of rows per query.
            L: length of the candidate list, at least k; None: that of the index. Longer ones find more and read more.
            allow: int64 [a], or a set: only these rows. Ascending ones need not be sorted by each search.
            as_of: a retained epoch; None: the newest. To read one again and again, :meth:`hold` it.
            beam_width: number of nodes whose blocks are read at once, without a filter.
            where: an SQL expression of columns of the followed table: only rows that match it, in the version of the
                table that the index has. Not with ``allow`` or ``as_of``.

        Returns:
            Row ids int64 [m, k] and distances float32 [m, k], nearest first: squared L2, or 1 - cosine; -1 and
            infinity if fewer are found.

        Raises:
            InvalidUsageError: invalid shapes or values.
            VersionGoneError: ``as_of`` is not retained, or never existed.
            TableCorruptError: a block is damaged.
        """
        if where is not None:
            return self._search_where(where, queries, k, L, beam_width, alone=allow is None and as_of is None)
        given = stored(self.parameters, queries, one=True)
        limit = self.parameters.search_list if L is None else L
        for name, value in (("k", k), ("L", limit), ("beam_width", beam_width)):
            if not 1 <= whole(name, value) <= 1 << 20:
                raise InvalidUsageError(f"{name} must be from 1 to 1048576, not {value}.")
        as_of = None if as_of is None else whole("as_of", as_of)
        wanted = None if allow is None else ascending(integers(allow))
        with self._lock:
            self._check_open()
            self._adopt()
            for attempt in range(_ATTEMPTS):
                results = self._search(given, k, max(limit, k), wanted, as_of, min(beam_width, 64))
                if results is not None:
                    return results
                # A slot was reused since this view was published: a newer view has its current content.
                if not self.view.refresh() and attempt > 2:  # noqa: PLR2004 - a commit may be in progress
                    raise self.view.fail()
                self.view.reload()
        raise self.view.fail()

    def _search_where(
        self, where: str, queries: ArrayLike, k: int, limit: int | None, beam_width: int, *, alone: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if not alone:
            raise InvalidUsageError("where is not given together with allow or as_of.")
        with self._lock, self.hold() as epoch:
            state = self.view.state
            usable(self.folder, state.unusable)
            allowed = self._filter.rows(where, state.followed, self.view.followed)
            return self.search(queries, k, limit, allowed, epoch, beam_width)

    def _search(
        self, queries: NDArray[np.float32], k: int, limit: int, allow: NDArray[np.int64] | None, as_of: int | None,
        width: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:  # fmt: skip
        epoch = self._epoch(as_of)
        ids = np.empty((len(queries), k), np.int64)
        distances = np.empty((len(queries), k), np.float32)
        changed = int(self.view.counts[1])
        self.view.counts[1] = 0  # uncommitted changes of this handle are not visible to searches
        try:
            result = self._run(queries, limit, allow, epoch, width, ids, distances)
        finally:
            self.view.counts[1] = changed
            if self._reader is not None and self._reader.epoch != epoch and not self._holds(epoch):
                self._reader.move(epoch)
        if result < 0:
            return None
        return ids, self.given(distances)

    def given(self, squared: NDArray[np.float32]) -> NDArray[np.float32]:
        """The distances that a search returns, from squared ones of stored vectors."""
        return squared * np.float32(_COSINE_HALF) if self.parameters.metric == "cosine" else squared

    def _epoch(self, as_of: int | None) -> int:
        held = as_of is not None and self._holds(as_of)
        if self._reader is not None:
            if as_of is not None and as_of < self._reader.epoch and not held:
                self._reader.move(max(as_of, 1))  # announced first, then the view is read: see Reader
            self.view.refresh()
        if as_of is None:
            usable(self.folder, self.view.state.unusable)
            return self.view.epoch
        try:
            self._check_retained(as_of, held=held)
        except VersionGoneError:
            if self._reader is not None:
                self._reader.move(self.view.epoch)
            raise
        return as_of

    def _holds(self, epoch: int) -> bool:
        """Whether a held epoch keeps what this one reads: versions are kept from the lowest one on."""
        return any(kept.epoch <= epoch for kept in self._held)

    def _check_retained(self, epoch: int, *, held: bool = False) -> None:
        # What a reader holds is kept, even if a job has stopped retaining it for others.
        lowest = self.view.complete_from if held else self.view.state.retained_from
        if not lowest <= epoch <= self.view.epoch:
            raise VersionGoneError(
                f"Epoch {epoch} of {self.folder} cannot be read.",
                remedy=f"Epochs {self.view.state.retained_from} to {self.view.epoch} are retained now.",
            )

    def _adopt(self) -> None:
        if self._reader is not None and self._process != os.getpid():
            self._reader, self._held, self._process = files.Reader(self.folder, self.view.epoch), [], os.getpid()

    @contextmanager
    def hold(self, epoch: int | None = None) -> Iterator[int]:
        """Keep an epoch readable by ``search(as_of=...)`` of this handle until the block, or the process, ends.

        Meanwhile jobs keep every block that it needs, so that the graph grows by what is changed. Yields the epoch, by
        default the newest.

        Raises:
            VersionGoneError: it is not retained, or never existed.
            StorageError: the reader cannot be registered: the disk is full, for example.
        """
        with self._lock:
            self._check_open()
            self._adopt()
            if self._reader is not None:  # a writer's view is the newest
                self.view.refresh()
            wanted = self.view.epoch if epoch is None else whole("epoch", epoch)
            held = files.Reader(self.folder, min(max(1, wanted), self.view.epoch))
            try:
                if self._reader is not None:
                    self.view.refresh()
                self._check_retained(wanted)
            except BaseException:
                held.close()
                raise
            self._held.append(held)
        try:
            yield wanted
        finally:
            with self._lock:
                if held in self._held:  # it was not closed
                    self._held.remove(held)
                    held.close()
                    if self._reader is not None:
                        self._reader.move(self.view.epoch)

    def _run(
        self, queries: NDArray[np.float32], limit: int, allow: NDArray[np.int64] | None, epoch: int, width: int,
        ids: NDArray[np.int64], distances: NDArray[np.float32],
    ) -> int:  # fmt: skip
        view, layout = self.view, self.parameters.layout
        # Of the epoch, not of the newest one: else the answer at an epoch would change with later commits.
        live, unhealed, count = view.counts_at(epoch)
        allowed = None if allow is None else view.allowed(allow, epoch)
        wanted = live if allowed is None else int(np.count_nonzero(allowed))
        limit, around = (limit, 0) if allowed is None else _lists(limit, wanted / max(1, live))

        def compare(which: NDArray[np.int64]) -> int:
            nodes = np.arange(count) if allowed is None else np.flatnonzero(allowed)
            part, far = np.empty((len(which), ids.shape[1]), np.int64), np.empty((len(which), ids.shape[1]), np.float32)
            result = scan(view.source, layout, nodes, queries[which], epoch, view.dead, view.dead_epochs, part, far)
            ids[which], distances[which] = part, far
            return int(result)

        if allowed is not None and wanted <= max(_FEW, limit + around):
            return compare(np.arange(len(queries)))
        starts = view.starts(epoch)
        if starts is None:
            return STALE
        book, entries = view.book_at(starts, epoch), len(view.entries(epoch))
        if not entries or book is None:
            return compare(np.arange(len(queries)))
        if allowed is None:  # tombstones take up entries of the list
            limit = int(limit * min(_WIDEST, (wanted + unhealed) / max(1, wanted)))
        reach = min(wanted, ids.shape[1])
        left, some, part, far = None, writable(queries), ids, distances
        while True:
            room = self._scratch(limit + around)
            if allowed is None:
                result = search(
                    view.source, layout, room, book, some, limit, width, epoch, starts, view.dead, view.dead_epochs,
                    part, far,
                )  # fmt: skip
            else:
                aside = scratch(around, 0, layout.code_bytes, layout.dimension, 0, collect=False)
                result = search_allowed(
                    view.source, layout, room, aside, book, some, limit, around, epoch, starts, allowed, part, far
                )
            if result < 0:
                return int(result)
            if left is not None:
                ids[left], distances[left] = part, far
            # Search again with longer lists, from all entry points, for queries that found too few.
            few = np.flatnonzero(part[:, reach - 1] < 0) if reach else np.zeros(0, np.int64)
            if not len(few):
                return 0
            left = few if left is None else left[few]
            if limit >= (count if allowed is None else wanted):  # some rows may be unreachable
                return compare(left)
            limit, around = 2 * limit, 2 * around
            starts, some = starts._replace(most=entries), queries[left]
            part, far = np.empty((len(left), ids.shape[1]), np.int64), np.empty((len(left), ids.shape[1]), np.float32)

    def _scratch(self, limit: int) -> Any:
        p, key = self.parameters, (limit, self.view.state.next_node_id.bit_length())
        if self._room is None or self._room[0] != key:
            room = scratch(limit, p.links, p.code_bytes, p.dimension, 1 << key[1], collect=False)
            self._room = (key, room)
        return self._room[1]
