"""``RegionWriter``: the single writer of a region in the region layout.

It claims the region by raising its epoch, replays the log after the last flush, appends WAL entries, and flushes them
as generations. A durable write is one PUT and is acknowledged after it; other writes are buffered in memory.
Thread-safe.

Two locks: one for putting an entry, one for flushing a generation. A flush holds the first only while it writes the
buffered rows, so that writes continue while indexes are built.

The next claim fences this writer. It detects that when the id of its next entry is taken, or before it publishes a
manifest. From then on it refuses every call; rows that were not acknowledged may be lost.
"""

from __future__ import annotations

import secrets
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from memwal_ops import errors
from memwal_ops.core.options import boolean
from memwal_ops.formats.lance.generations.region_identity import RegionValues, region_values_of
from memwal_ops.formats.lance.log import memtable, region_files
from memwal_ops.formats.lance.log.background import Background, GroupCommit
from memwal_ops.formats.lance.log.region_columns import RegionColumns, region_columns
from memwal_ops.formats.lance.log.region_log import LoggedColumns, read_log
from memwal_ops.formats.lance.table import Table, open_lance_table
from memwal_ops.formats.lance.wire.names import region_folder
from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration, RegionManifest, RegionStatus
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from uuid import UUID

    import numpy as np
    from numpy.typing import NDArray


_DEFAULT_LIMITS = memtable.WriterLimits()
_MIN_ROWS_PER_BATCH = 500


class RegionWriter:
    """Write rows and deletes to one region. A context manager: flushes and closes on exit.

    ``epoch`` is the writer epoch of its claim (S0-044).
    """

    def __init__(
        self,
        table: Table | str | os.PathLike[str],
        region_id: UUID | str | None = None,
        *,
        durable: bool = True,
        indexed: bool = False,
        tombstones: bool = True,
        limits: memtable.WriterLimits = _DEFAULT_LIMITS,
        values: RegionValues | None = None,
        storage_options: Mapping[str, str] | None = None,
        branch: str | None = None,
    ) -> None:
        """Claim the region and replay its log (S0-120 to S0-123); without ``region_id``, create a region (S0-080).

        Args:
            table: the table at any version, or its URI. Columns added later are seen by the next writer.
            durable: whether a write is in the log before the call returns (S0-116). Otherwise a crash loses it until
                ``flush``, ``close`` or a threshold of ``limits`` has written it to the log.
            indexed: whether generations must have all maintained indexes, and the MemTable's key filter every
                acknowledged write (S0-117). Otherwise the filter is updated when it is queried, and an index that
                cannot be built with the base's parameters is skipped and logged (S0-118).
            tombstones: False writes rows without ``_tombstone``; deletes are refused then.
            limits: thresholds at which the writer flushes by itself.
            values: region values of a new region that belongs to a spec; None for a manual one (S0-084).
            storage_options: for a URI, as :func:`memwal_ops.open_table` takes them.
            branch: the same.

        Raises:
            InvalidUsageError: the region is sealed or has other values, pylance writes the table's regions, or the
                region is new and manual and the table has specs.
            WalCorruptError: an entry before the end of the log is missing or unreadable. It may have been acknowledged,
                so it is not skipped.
            WriterFencedError: another writer claimed the region meanwhile.
            CommitConflictError: every attempt conflicted with another writer's claim.
            UnsupportedFeatureError: ``indexed``, and a maintained index cannot be built with the base's parameters; or
                a column has a type that cannot be written to a log.
            StorageError: the store failed. An epoch may have been used up.
        """
        for name, value in {"durable": durable, "indexed": indexed, "tombstones": tombstones}.items():
            boolean(name, value)
        table = table if isinstance(table, Table) else open_lance_table(table, storage_options, branch)
        self.region_id = region_id if isinstance(region_id, uuid.UUID) else region_files.parse_region_id(region_id)
        region_files.refuse_other_layout(table, self.region_id)
        probe_conditional_writes(table.store)
        self._table = table
        self._manifests = table.region(self.region_id)
        self._columns: RegionColumns = region_columns(table, tombstones=tombstones)
        self._indexes = memtable.generation_indexes(table, strict=indexed)
        self._fenced = self._closing = self._closed = False
        self._durable, self._indexed, self._limits = durable, indexed, limits
        self._log = threading.RLock()  # held while an entry is put
        self._flushing = threading.RLock()  # held while a generation is flushed
        self._entering = threading.Lock()  # held while rows are buffered, or close begins
        self._group = GroupCommit(self._log, self._put_group)
        self._background = Background(self, RegionWriter._work_once, limits.wal_interval.total_seconds())
        claimed, self._claim = region_files.claim(table, self.region_id, values)
        self._values = region_values_of(table, claimed)
        self.epoch = claimed.writer_epoch
        replay_after = claimed.replay_after_wal_id or 0
        self._memtable = memtable.MemTable(
            self._columns, generation=claimed.current_generation, replay_after=replay_after
        )
        self._filter = memtable.KeyFilter(self._memtable)
        self._next_entry = replay_after + 1
        self._logged_columns = LoggedColumns(table, self.region_id, self._columns)
        self._replay(claimed)
        self._shown = self._next_entry > 1  # whether the region's log shows the layout of its writers

    def put(self, rows: pa.Table) -> int:
        """Upsert rows; with a durable writer they are in the log when this returns (S0-028, S0-116, S0-129).

        The last row of a key wins. Returns the number of the generation that will contain the rows.

        Raises:
            InvalidUsageError: wrong columns, values that do not fit a column, NULL in a key, or rows of another region;
                nothing was written.
            WriterFencedError: nothing was written.
            StorageError: the rows may or may not be written; put them again.
        """
        return self._append(self._of_region(self._columns.put_rows(rows)))

    def delete(self, keys: pa.Table) -> int:
        """Delete rows by key; missing keys are ignored. Returns and raises as :meth:`put`."""
        return self._append(self._of_region(self._columns.delete_rows(keys)))

    def put_routed(self, rows: pa.Table) -> int:
        """Write rows in stored form, which the caller has routed to this region. Returns as :meth:`put`."""
        return self._append(rows)

    def unflushed(self) -> tuple[pa.Table, ...]:
        """Rows that are not flushed to a generation yet: stored rows of each write, tombstones included (S0-126)."""
        return self._memtable.fragments()

    def in_memory(self) -> memtable.InMemory | None:
        """:meth:`unflushed` for readers of this process; None: closed or fenced; its durable rows are in the log."""
        return None if self._closed or self._fenced else self._memtable.in_memory()

    def may_have(self, keys: pa.Table) -> NDArray[np.bool_]:
        """Per key, whether :meth:`unflushed` may contain a row or a delete of it; False is certain (S0-025, S0-136).

        Raises ``InvalidUsageError``: wrong key columns, or NULL in a key.
        """
        return self._filter.may_have(self._columns.key_columns(keys))

    def fragment_mapping(self) -> dict[int, memtable.WalPosition]:
        """Map each fragment of :meth:`unflushed` that is in the log to its position there (S0-027, S0-124)."""
        return self._memtable.mapping()

    def flush_log(self) -> None:
        """Write buffered rows to the log as one entry (S0-131). A durable writer buffers none.

        Raises:
            WriterFencedError: another writer claimed the region; the buffered rows are lost.
            StorageError: the entry may or may not exist; the rows stay buffered and are put again.
        """
        with self._log:
            self._check_open()
            waiting = self._memtable.waiting
            if waiting:
                self._put(waiting, taken=len(waiting))

    def flush(self) -> int | None:
        """Flush all rows written so far as a generation (S0-144 to S0-151); returns the number of the last one.

        Entries that were written with other columns become generations of their own.

        Raises:
            WriterFencedError: another writer claimed the region; acknowledged durable rows are in the log.
            CommitConflictError: every attempt conflicted with another commit of the region manifest.
            StorageError: the generation may or may not be published; flush again.
        """
        with self._flushing:
            with self._log:
                self.flush_log()
                until = self._next_entry - 1
            before, conflicts = self._memtable.generation, 0
            while True:
                newest = self._newest()
                # Includes an earlier flush whose response was lost. Only this writer flushes in its epoch.
                if self._memtable.published(newest.replay_after_wal_id or 0, newest.current_generation):
                    conflicts = 0
                growing = self._memtable.next_generation(until)
                if growing is None:
                    return newest.current_generation - 1 if newest.current_generation > before else None
                if not self._manifests.commit(self._flushed_manifest(newest, growing)):
                    conflicts += 1
                    if conflicts == region_files.ATTEMPTS:
                        raise self._conflict_error()
                    region_files.wait(conflicts)

    def fence(self) -> None:
        """Put an entry without rows, at whose position an earlier writer detects that it was fenced (S0-210).

        Timeline without it: A wrote entry 3 and stalls; B claims the region, has nothing to write, and seals it; A
        resumes and puts entry 4: it is acknowledged, and no writer ever replays it.
        """
        with self._log:
            self._check_open()
            self._put([self._columns.schema.empty_table()])

    def seal(self) -> None:
        """Flush, close, and seal the region: no writer can write to it any more.

        Used before a table moves to another region spec: the regions of the earlier spec are sealed and merged first.
        Raises as :meth:`flush`.
        """
        if not self._closed:
            self.fence()
        self.close()
        for attempt in range(region_files.ATTEMPTS):
            newest = self._manifests.latest(checked=True)
            if newest.writer_epoch != self.epoch:
                raise self._fenced_error()
            if newest.sealed or self._manifests.commit(replace(newest.next(), status=RegionStatus.SEALED)):
                return
            region_files.wait(attempt)
        raise self._conflict_error()

    def close(self) -> None:
        """Flush and close. A writer that is dropped without it loses no durable row: the next one replays the log."""
        if self._closed:
            return
        if self._memtable.waiting:
            self._check_open()  # a fenced writer must report that its buffered rows are lost
        with self._entering:
            self._closing = True  # no row is buffered after this flush
        try:
            if not self._fenced:
                self.flush()
        except BaseException:
            self._closing = False
            raise
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close; after an error, only write acknowledged rows to the log, without a flush."""
        if error is None:
            self.close()
        else:
            with suppress(errors.MemwalOpsError):
                self.flush_log()
        self._end()

    def _end(self) -> None:
        self._closing = self._closed = True
        self._background.wake()

    # -- replay

    def _replay(self, claimed: RegionManifest) -> None:
        for entry in read_log(self._table.store, claimed):
            if entry.cut:
                self._memtable.add_logged(entry, self._columns, ())
                self._next_entry = entry.entry_id + 1
                # Before any entry is put after it. Timeline otherwise: entry 5 is truncated, 6 is acknowledged, the
                # writer crashes; the next replay finds 5 before the end of the log, and refuses it.
                self.flush()
            else:
                self._add_entry(entry)

    def _add_entry(self, entry: region_files.WalEntry) -> None:
        """Add an entry that another writer put; entries of earlier epochs are valid (S0-208)."""
        if entry.writer_epoch > self.epoch:
            self._newest()
            raise errors.WalCorruptError(
                f"WAL entry {entry.entry_id} of region {self.region_id} is of writer epoch {entry.writer_epoch}, but "
                f"the newest manifest has {self.epoch}.",
                remedy="Keep the file, and restore the region's manifests from a backup: newer versions are missing.",
            )
        columns = self._logged_columns.of(entry, self._memtable.columns_of_last())
        self._memtable.add_logged(entry, columns, (entry.rows.num_rows,))
        self._next_entry = entry.entry_id + 1

    # -- append

    def _of_region(self, rows: pa.Table) -> pa.Table:
        """Return the rows if all belong to this region: a key in two regions may lose its newest row (S0-009)."""
        if self._values is not None:
            others = self._values.other_values(rows)
            if others:
                raise errors.InvalidUsageError(
                    f"Rows with the region values {others[0]} do not belong to region {self.region_id}, which has "
                    f"{self._values.values}.",
                    remedy="Write through RegionRouter, which finds the region of each row.",
                )
        return rows

    def _append(self, rows: pa.Table) -> int:
        self._check_open(to_enter=True)
        if not rows.num_rows:
            return self._memtable.generation
        # Back-pressure: a put that outruns flushes waits for one.
        while self._memtable.flush_is_due(self._limits, times=2):
            self.flush()
        if self._durable:
            generation = self._group.write(rows)
        else:
            # Back-pressure: a put that outruns the store waits for it.
            while not self._memtable.has_room(rows, self._limits):
                self.flush_log()
            with self._entering:
                self._check_open(to_enter=True)
                generation = self._memtable.add_waiting(rows)
        if self._indexed:
            self._filter.refresh()
        self._wake()
        return generation

    def _put_group(self, parts: Sequence[pa.Table]) -> int:
        self._check_open(to_enter=True)
        return self._put(parts)

    def _put(self, parts: Sequence[pa.Table], *, taken: int = 0) -> int:
        """Put rows as the next entry; returns their generation. If its id is taken, the epoch is checked (S0-210)."""
        store, fragments = self._table.store, [rows.num_rows for rows in parts]
        rows = pa.concat_tables(parts)
        if rows.num_rows < _MIN_ROWS_PER_BATCH * len(parts):
            rows = rows.combine_chunks()  # many small batches take longer to encode than to copy
        while True:
            if not self._shown:
                self._refuse_migrated()
            entry = region_files.put_entry(store, self.region_id, self._next_entry, rows, self.epoch, self._columns)
            if entry is None:
                # Put by a newer writer, which fenced this one; by an older one, which has not detected yet that this
                # one fenced it (S0-207); or by this writer, with a lost response.
                self._newest()
                existing = self._existing_entry(self._next_entry)
                if existing is None:
                    continue
                if existing.writer_epoch != self.epoch or not existing.rows.equals(rows):
                    self._add_entry(existing)
                    continue
                entry = existing
            if not self._shown:
                try:
                    self._refuse_migrated()
                except errors.InvalidUsageError as error:
                    raise errors.StorageError(f"{error} The rows may be written.", remedy=error.remedy) from error
                self._shown = True
            self._next_entry += 1
            return self._memtable.add_logged(entry, self._columns, fragments, taken=taken)

    def _existing_entry(self, entry_id: int) -> region_files.WalEntry | None:
        try:
            return region_files.read_entry(self._table.store, self.region_id, entry_id)
        except region_files.WalEntryCutError as error:
            raise errors.StorageError(
                f"The store truncated {region_files.entry_path(self.region_id, entry_id)}: no entry can follow it.",
                remedy="Close this writer and open another one, which skips it; then write the rows again.",
            ) from error

    # -- in the background

    def _wake(self) -> None:
        due = self._memtable.flush_is_due(self._limits) or self._memtable.log_is_due(self._limits, waited=False)
        if due:
            self._background.wake()
        if due or not self._durable:
            self._background.start()

    def _work_once(self) -> bool:
        """Flush what is due, and return whether to continue. A failure is retried, here or by ``flush``."""
        try:
            if self._memtable.log_is_due(self._limits):
                self.flush_log()
            if self._memtable.flush_is_due(self._limits):
                self.flush()
        except errors.WriterFencedError:
            return False
        except errors.MemwalOpsError as error:
            if not self._closed:
                get_logger(__name__).warning("background_flush_failed", region=str(self.region_id), error=str(error))
        return not (self._closed or self._fenced)

    def _refuse_migrated(self) -> None:
        """Raise if the table was migrated since it was opened, and from then on at each call.

        Before and after the region's first entry: a migration leaves a region without one alone, since nothing shows
        what kind of writer has it. It publishes and then lists the log; this writer puts its entry and then reads the
        table: at least one of them sees the other. Nothing is acknowledged before.
        """
        try:
            if region_files.refuse_migrated(self._table, None):
                self._newest()  # it may have been migrated back as well, and the region sealed
        except errors.InvalidUsageError:
            self._fenced = True
            raise

    # -- flush

    def _flushed_manifest(self, newest: RegionManifest, growing: memtable.Growing) -> RegionManifest:
        entries = growing.entries
        manifest = replace(
            newest.next(),
            replay_after_wal_id=growing.last,
            wal_id_last_seen=max(newest.wal_id_last_seen or 0, self._next_entry - 1),
        )
        if not any(entry.rows.num_rows for entry in entries):
            return manifest
        number = newest.current_generation
        # A retry reuses the directory. Its entries are sealed; timeline otherwise: the response to a flush of entries 1
        # to 5 is lost; 6 is put; the second flush lists the first one's directory with replay_after 6: entry 6 is in no
        # generation.
        path = growing.publishable(newest.version)
        if path is None:
            path = growing.path = self._put_generation(number, growing)
        size, rows = (sum(getattr(entry.rows, name) for entry in entries) for name in ("nbytes", "num_rows"))
        listed = FlushedGeneration(number, path, in_memory_bytes=size, physical_rows=rows)
        flushed = (*newest.flushed_generations, listed)
        return replace(manifest, current_generation=number + 1, flushed_generations=flushed)

    def _put_generation(self, number: int, growing: memtable.Growing) -> str:
        """Write the files, and return the directory: a random name, unused by any failed flush (S0-144, S0-151)."""
        table = self._table
        while True:
            path = f"{secrets.token_hex(4)}_gen_{number}"
            if region_files.put_generation(
                table.store, table.location, self.region_id, path, growing.entries, growing.columns
            ):
                memtable.build_indexes(table, f"{region_folder(self.region_id)}/{path}", self._indexes)
                return path

    # -- fencing

    def _newest(self) -> RegionManifest:
        """The newest manifest; raises if this writer is fenced (S0-153, S0-154)."""
        newest = self._manifests.latest(checked=True)
        if newest.writer_epoch != self.epoch or newest.sealed or self._claim.is_replaced(newest):
            raise self._fenced_error()
        return newest

    def _check_open(self, *, to_enter: bool = False) -> None:
        """Raise if the writer is fenced or closed; ``to_enter``: also if close has begun."""
        if self._fenced:
            raise self._fenced_error()
        if self._closed or (to_enter and self._closing):
            raise errors.InvalidUsageError(
                f"The writer of region {self.region_id} is closed.", remedy="Open another one."
            )

    def _fenced_error(self) -> errors.WriterFencedError:
        """Mark the writer as fenced, and return the error that every call raises from now on."""
        self._fenced = True
        return errors.WriterFencedError(
            f"Another writer claimed region {self.region_id}: this writer, of epoch {self.epoch}, is fenced."
        )

    def _conflict_error(self) -> errors.CommitConflictError:
        return errors.CommitConflictError(
            f"Region {self.region_id}: other writers changed its manifest in {region_files.ATTEMPTS} consecutive "
            "attempts."
        )
