"""``LegacyRegionWriter``: the writer of a legacy region, by the state machine (S1-003 to S1-005, S1-015, S1-022 to 27).

Each transition is one version of the table, published as exactly V + 1, with the base table's fragments. After a commit
conflict, a change is planned again on the newest version, where its owner and preconditions are checked again; it fails
if a committed change conflicts with it (:func:`memwal_ops.formats.lance.legacy.states.conflicts`).
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import lance
from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import CommitConflictError, InvalidUsageError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, check_takes_rows
from memwal_ops.formats.lance.files.blobs import stream_bytes
from memwal_ops.formats.lance.files.datasets import lance_errors, lance_options
from memwal_ops.formats.lance.files.version_files import read_version_manifest, transaction_of
from memwal_ops.formats.lance.legacy import states
from memwal_ops.formats.lance.legacy.index import Meanings, find_emptied, mem_wals_of, publish
from memwal_ops.formats.lance.legacy.mem_tables import MemTables
from memwal_ops.formats.lance.legacy.replay import entry_of
from memwal_ops.formats.lance.legacy.states import Change, Other, conflicts
from memwal_ops.formats.lance.options import MergeOptions
from memwal_ops.formats.lance.wire.legacy_index import MemWal, MemWalId, State
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

_INDEPENDENT = frozenset({103, 104, 107, 110, 114})
_MAX_SKIPPED_IDS = 10_000


class LegacyRegionWriter:
    """Writes the MemWALs of one region. It owns the newest generation from the start, by its ``owner_id``."""

    def __init__(
        self, table: Table, region: str, owner_id: str | None = None, *, wal_root: str = "wal", mem_root: str = "mem"
    ) -> None:
        """Claim the region's unflushed MemWALs by changing their owner, and open a generation if none is (S1-023).

        Logs lie at ``{wal_root}/{region}/{generation}``, relative to the table, or at a URI; flushed MemTables likewise
        below ``mem_root``.

        Raises:
            InvalidUsageError: a name that is no folder's; the newest version has no rows because of a state commit.
            UnsupportedFeatureError: no merge could ever bring its rows into the table.
            CommitConflictError: too many commit conflicts in a row.
        """
        if not region or "/" in region or region in {".", ".."}:
            raise InvalidUsageError(f"{region!r} cannot be a region's name here: it names a folder.")
        if (emptied := find_emptied(table)) is not None:
            raise emptied.error("merge")
        check_takes_rows(table)
        probe_conditional_writes(table.store)
        self.region = region
        self.owner_id = owner_id or f"memwal-ops-{uuid.uuid4()}"
        self._table, self._wal_root, self._mem_root = table, wal_root, mem_root
        self._note = CommitNote("legacy-writer")
        if self._claim(mem_wals_of(table)).updated:
            self._commit(self._claim)
        newest = self._newest()
        if newest is None or newest.state > State.OPEN:
            self._advance(newest)

    @property
    def current(self) -> MemWal:
        """The generation that it writes into, by the version that it has read."""
        newest = self._newest()
        if newest is None:
            raise InvalidUsageError(f"Region {self.region!r} has no MemWAL any more.")
        return newest

    def replay(self) -> pa.Table | None:
        """The rows in the log of the current generation, for a new writer's MemTable (S1-027).

        None: the log is empty.

        Raises:
            ObjectNotFoundError, GenerationCorruptError: an entry is missing or damaged.
        """
        with MemTables(self._table, MergeOptions()) as mem_tables:
            mem_wal = self.current
            return mem_tables.replayed(mem_wal).to_table() if mem_wal.wal_entries.count else None

    def append(self, rows: pa.Table) -> int:
        """Put rows as the log's next entry, record it in the index (S1-004, S1-015, S1-026), and return its id.

        The entry's id is the last id + 1, or, if another writer's file exists there, + 2, + 3 and so on; skipped ids
        become holes.

        Raises:
            WriterFencedError: another writer claimed the generation: the entry is not part of the log.
            InvalidUsageError: the generation is not OPEN.
            CommitConflictError: too many conflicts in a row, or 10,000 ids are taken.
        """
        mem_wal = self.current
        data = stream_bytes(rows)
        with MemTables(self._table, MergeOptions()) as mem_tables:
            store = open_store(mem_tables.located(mem_wal.wal_location))
        first = 0 if mem_wal.wal_entries.highest is None else mem_wal.wal_entries.highest + 1
        # Another writer may have used another suffix.
        taken = {entry_of(meta.path) for meta in store.list()}
        for number in range(first, first + _MAX_SKIPPED_IDS):
            self._table.guard.check()
            if number in taken or not store.put_if_absent(f"{number:020}.arrow", data):
                continue
            self._record(mem_wal.id, number)
            return number
        raise CommitConflictError(
            f"{_MAX_SKIPPED_IDS:,} entries of {mem_wal.id} are taken by writers that do not record them."
        )

    def seal(self) -> int:
        """Seal the current generation, open the next one, in one version (S1-018), and return the sealed one.

        Raises ``WriterFencedError``: another writer claimed it.
        """
        mem_wal = self.current
        self._advance(mem_wal)
        return mem_wal.id.generation

    def flush(self) -> tuple[int, ...]:
        """Write each SEALED generation of the region as a dataset at its ``mem_table_location``, and mark it FLUSHED.

        Raises ``WriterFencedError``: another writer claimed one; ``InvalidUsageError``: the table's newest version was
        written before Lance 0.36, by whose meaning FLUSHED states that the rows are in the base table.
        """
        flushed = []
        for mem_wal in self._mine(State.SEALED):
            if (
                Meanings(self._table).of(replace(mem_wal, last_updated_dataset_version=self._table.version)).meaning
                != "unmerged"
            ):
                raise InvalidUsageError(
                    f"{self._table.location.uri} was written by Lance before 0.36, for which FLUSHED means merged.",
                    remedy="Migrate the table: memwal-ops migrate replays what is sealed.",
                )
            with MemTables(self._table, MergeOptions()) as mem_tables:
                place = mem_tables.located(mem_wal.mem_table_location)
                if mem_wal.wal_entries.count:
                    self._table.guard.check()
                    with lance_errors("flush", place.uri):
                        lance.write_dataset(
                            mem_tables.replayed(mem_wal).to_table(), place.uri, mode="overwrite",
                            storage_options=lance_options(place),
                        )  # fmt: skip
            self._mark_flushed(mem_wal.id)
            flushed.append(mem_wal.id.generation)
        return tuple(flushed)

    def _record(self, mem_wal_id: MemWalId, entry_id: int) -> None:
        self._commit(lambda mem_wals: states.append_entry(mem_wals, mem_wal_id, entry_id, self.owner_id))

    def _mark_flushed(self, mem_wal_id: MemWalId) -> None:
        self._commit(lambda mem_wals: states.flush(mem_wals, mem_wal_id, self.owner_id))

    def _claim(self, mem_wals: Sequence[MemWal]) -> Change:
        change = Change()
        for mem_wal in mem_wals:
            if mem_wal.id.region == self.region and mem_wal.state < State.FLUSHED and mem_wal.owner_id != self.owner_id:
                change |= states.set_owner(mem_wals, mem_wal.id, self.owner_id)
        return change

    def _advance(self, newest: MemWal | None) -> None:
        generation = 0 if newest is None else newest.id.generation + 1
        self._commit(
            lambda mem_wals: states.advance(
                mem_wals,
                self.region,
                mem_table_location=f"{self._mem_root}/{self.region}/{generation}",
                wal_location=f"{self._wal_root}/{self.region}/{generation}",
                owner_id=self.owner_id,
                expected_owner_id=None if newest is None else newest.owner_id,
            )
        )

    def _newest(self) -> MemWal | None:
        own = [mem_wal for mem_wal in mem_wals_of(self._table) if mem_wal.id.region == self.region]
        return max(own, key=lambda mem_wal: mem_wal.id, default=None)

    def _mine(self, state: State) -> list[MemWal]:
        mine = [
            mem_wal
            for mem_wal in mem_wals_of(self._table)
            if mem_wal.id.region == self.region and mem_wal.state is state
        ]
        return sorted(mine, key=lambda mem_wal: mem_wal.id)

    def _commit(self, decide: Callable[[Sequence[MemWal]], Change]) -> None:
        """Publish a change on the newest version; planned again after each commit that does not conflict with it."""
        retry = CommitRetry()
        table = self._table.newest()
        while True:
            change = decide(mem_wals_of(table))
            try:
                publish(table, change, self._note)
            except CommitLostError as error:
                before, table = table, retry.conflict(table, error)
                _refuse_conflicts(before, table, change)
            else:
                self._table = retry.landed(table)
                return


def _refuse_conflicts(before: Table, newest: Table, change: Change) -> None:
    """Raise ``CommitConflictError`` where one of the versions since conflicts with the change."""
    for version in range(before.version + 1, newest.version + 1):
        version_manifest = read_version_manifest(newest.store, version, newest.naming)
        transaction = transaction_of(newest.store, version_manifest)
        other, their_change = (Other.DATA, None) if transaction is None else classify(transaction)
        if conflicts(change, other, their_change):
            raise CommitConflictError(
                f"Version {version} of {newest.location.uri} conflicts with a change of "
                f"{', '.join(map(str, sorted(change.ids)))}.",
                remedy="Open the newest version, and repeat the operation.",
            )


def classify(transaction: table_pb2.Transaction) -> tuple[Other, Change | None]:
    """The kind of a transaction with respect to MemWAL states; an unknown operation counts as a change of data."""
    if transaction.HasField("update_mem_wal_state"):
        return Other.STATE, Change.of(transaction.update_mem_wal_state)
    if transaction.HasField("create_index"):
        return Other.INDEPENDENT, None
    numbers = {field.field_number for field in UnknownFieldSet(transaction)}  # type: ignore[attr-defined]  # iterable, the stub forgot
    return (Other.INDEPENDENT, None) if numbers and numbers <= _INDEPENDENT else (Other.DATA, None)
