"""The index store: the tables of ``diskann_store.duckdb``, opened by one writer or job at a time, changed by commits.

No table has an index: DuckDB keeps indexes in memory as long as the database is open, and the writer does not need
any: it queries many rows at once, by joins. docs/formats/lm-diskann.md documents every column.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import duckdb
import numpy as np
import pyarrow as pa

from memwal_ops.errors import InvalidUsageError, StorageError, TableReplacedError
from memwal_ops.formats.lm_diskann.errors import IndexBusyError, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import GRAPH, check_identity, check_store_file, headers_in, open_file
from memwal_ops.formats.lm_diskann.wire import TOMBSTONED, U8, Changes, Parameters, State, headers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from numpy.typing import NDArray


NAME = "diskann_store.duckdb"
LOG = f"{NAME}.wal"
_TABLES = """
CREATE TABLE lmd_metadata(index_uuid VARCHAR, epoch UBIGINT, merge_sequence_number UBIGINT, next_node_id UBIGINT,
  slot_count UBIGINT, retained_from UBIGINT, codebook_id UBIGINT, live UBIGINT, healed UBIGINT,
  followed UBIGINT, unusable UBIGINT);
CREATE TABLE lmd_delta_blocks(node_id UBIGINT NOT NULL, version UBIGINT NOT NULL, commit_epoch UBIGINT NOT NULL,
  origin_txn UBIGINT NOT NULL, is_tombstone BOOLEAN NOT NULL, checksum UBIGINT NOT NULL,
  data BLOB NOT NULL USING COMPRESSION uncompressed);
CREATE TABLE lmd_slots(node_id UBIGINT NOT NULL, slot UBIGINT NOT NULL, from_epoch UBIGINT NOT NULL);
CREATE TABLE lmd_lookup(row_id BIGINT NOT NULL, node_id UBIGINT NOT NULL, added_epoch UBIGINT NOT NULL,
  removed_epoch UBIGINT);
CREATE TABLE lmd_tombstoned_nodes(node_id UBIGINT NOT NULL, deletion_epoch UBIGINT NOT NULL);
CREATE TABLE lmd_free_nodes(slot UBIGINT NOT NULL, node_id UBIGINT NOT NULL, from_epoch UBIGINT NOT NULL,
  freed_epoch UBIGINT NOT NULL);
CREATE TABLE lmd_sweep_list(node_id UBIGINT NOT NULL, reason VARCHAR NOT NULL, since_epoch UBIGINT NOT NULL);
CREATE TABLE lmd_heal_list(node_id UBIGINT NOT NULL, reason VARCHAR NOT NULL, since_epoch UBIGINT NOT NULL);
CREATE TABLE lmd_backlink_overflow(target_node_id UBIGINT NOT NULL, referrer_node_id UBIGINT NOT NULL);
CREATE TABLE lmd_entry_points(node_id UBIGINT NOT NULL, added_epoch UBIGINT NOT NULL, removed_epoch UBIGINT);
CREATE TABLE lmd_followed(transaction VARCHAR NOT NULL);
CREATE TABLE lmd_codebooks(codebook_id UBIGINT NOT NULL, kind VARCHAR NOT NULL, data BLOB NOT NULL);
"""
# Stores of earlier releases have no such table.
_SAMPLE = (
    "CREATE TABLE IF NOT EXISTS lmd_graph_sample(node_id UBIGINT NOT NULL, slot UBIGINT NOT NULL, "
    "from_epoch UBIGINT NOT NULL, origin_txn UBIGINT NOT NULL)"
)
_SAMPLED = 16
_STATE = ", ".join(State.__dataclass_fields__)
# A checkpoint rewrites whatever changed of tables with millions of rows: one for 64 MiB of log instead of 16.
_CONFIG = {"threads": 1, "memory_limit": "512MB", "checkpoint_threshold": "64MB"}
_DTYPES = {pa.from_numpy_dtype(np.dtype(name)): np.dtype(name) for name in ("i8", "u8", "i4", "u4", "u2")}
# DuckDB appends the text of the system's error to its own; a file that is too short has none.
_OF_THE_SYSTEM = ("Could not write", "fsync", *(os.strerror(number) for number in (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE,
    errno.ENFILE, errno.ENOMEM, errno.ESTALE,
)))  # fmt: skip
_LOCKED = (
    "Could not set lock", "Conflicting lock", "already attached", "unique file handle", "existing connections",
)  # fmt: skip


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Translate errors of DuckDB. Raises as :class:`Store`."""
    try:
        yield
    except duckdb.Error as error:
        text = str(error)
        if any(words in text for words in _LOCKED):
            raise IndexBusyError(f"{path} is open in another process: {text.splitlines()[0]}") from error
        # Not by its class: a COMMIT that the disk has no space for is a TransactionException, a truncated file an
        # IOException.
        if isinstance(error, duckdb.OutOfMemoryException) or any(words in text for words in _OF_THE_SYSTEM):
            raise StorageError(
                f"DuckDB cannot use {path}: {text}",
                remedy="Fix the reported error (free space, if the disk is full), and run it again: a failed "
                "commit changed nothing.",
            ) from error
        raise IndexCorruptError(f"DuckDB cannot read {path}: {text}") from error


class Store:
    """An open store. Close it: its log is then folded into the file.

    DuckDB itself would do that even if the folder was moved, and delete the log by its name: the log of a folder that
    replaced this one, or, in a forked process, a log with commits of the parent.

    Raises:
        IndexBusyError: another process has it open; or this process has: it inherited it by a fork, or opened it in a
            folder that was moved or removed since.
        TableCorruptError: DuckDB cannot read it; or it is the store of another index.
        StorageError: DuckDB failed for another reason: a full disk, for example.
    """

    def __init__(self, folder: str, parameters: Parameters, *, read_only: bool = False) -> None:
        self._folder, self._parameters, self._read_only = folder, parameters, read_only
        self.path = path = os.path.join(folder, NAME)
        self._process = os.getpid()
        with _errors(self.path):
            # DuckDB would create a missing file, so that all rows of the graph would be lost, and extend a short one.
            check_store_file(path)
            self._check_alone()
            self._db = duckdb.connect(path, read_only=read_only, config=_CONFIG)
            self._file = os.stat(path)
        try:
            if not read_only:
                self._db.execute("PRAGMA disable_checkpoint_on_shutdown")
                self._db.execute(_SAMPLE)
            self.state = self._read_state()
        except BaseException:
            self._db.close()
            raise
        _OPEN.add(self)

    def _check_alone(self) -> None:
        """Check that this process has no database open under that name: DuckDB would return that one."""
        if any(other.path == self.path for other in _OPEN):
            raise IndexBusyError(
                f"This process already has {self.path} open: inherited by a fork, or from a folder that was moved or "
                "removed.",
                remedy="Close that index first, and fork before opening one for writing.",
            )

    @classmethod
    def create(cls, path: str, uuid: UUID) -> None:
        """Create a store, at epoch 1. Raises ``StorageError``."""
        with _errors(path):
            db = duckdb.connect(path, config={"threads": 1})
            try:
                db.execute(_TABLES)
                db.execute(_SAMPLE)
                db.execute("INSERT INTO lmd_metadata VALUES (?, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0)", [str(uuid)])
                db.execute("CHECKPOINT")
            finally:
                db.close()

    @classmethod
    def copied(cls, path: str, to: str) -> None:
        """Write a closed store's rows to a new file, which has nothing else. Raises ``StorageError``."""
        with _errors(to):
            db = duckdb.connect(to, config=_CONFIG)
            try:
                db.execute(_TABLES)
                db.execute(_SAMPLE)
                quoted = path.replace("'", "''")
                db.execute(f"ATTACH '{quoted}' AS old (READ_ONLY)")
                for (name,) in db.execute(
                    "SELECT table_name FROM duckdb_tables() WHERE database_name = 'old' ORDER BY 1"
                ).fetchall():
                    db.execute(f"INSERT INTO {name} SELECT * FROM old.{name}")
                db.execute("DETACH old")
                db.execute("CHECKPOINT")
            finally:
                db.close()

    def matching(self, where: str) -> NDArray[np.int64]:
        """The living rows of which an SQL expression over ``row_id`` is true.

        Raises ``InvalidUsageError``: DuckDB does not understand it.
        """
        [rows] = self.columns("SELECT row_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY row_id")
        # A connection of its own, which has these rows and nothing else.
        with duckdb.connect(config={"threads": 1, "enable_external_access": "false"}) as db:
            db.register("given", pa.table({"row_id": _arrow(rows.astype(np.int64))}))
            try:
                matches = db.sql(f"SELECT row_id FROM given WHERE ({where})").to_arrow_table()
            except duckdb.Error as error:
                raise InvalidUsageError(
                    f"The expression of --where does not apply to an index folder: {str(error).splitlines()[0]}",
                    remedy='Its rows have one column: "row_id IN (17, 18)".',
                ) from error
        return _numpy(matches.column("row_id")).astype(np.int64)

    def close(self) -> None:
        """Close it; in a forked process, nothing is done."""
        if self._process != os.getpid():
            return
        _OPEN.discard(self)
        if not self._read_only and self._is_own and os.path.exists(f"{self.path}.wal"):
            with suppress(duckdb.Error):  # if there is no space, the log is kept, and replayed at the next opening
                self._db.execute("CHECKPOINT")
        self._db.close()

    @property
    def _is_own(self) -> bool:
        """Whether this process opened it, and the file that was opened is still the one of that name."""
        with suppress(FileNotFoundError):
            return self._process == os.getpid() and os.path.samestat(os.stat(self.path), self._file)
        return False

    def check_own(self) -> None:
        """Check that it may be changed by this process. Raises ``InvalidUsageError``, ``TableReplacedError``."""
        if self._process != os.getpid():
            raise InvalidUsageError(
                f"{self.path} was opened by another process, from which this one was forked.",
                remedy="Open the index in the process that changes it.",
            )
        if not self._is_own:
            raise TableReplacedError(
                f"{self.path} is not the file that was opened: the folder was moved or removed.",
                remedy="Close the index, and open the folder again.",
            )

    def _read_state(self) -> State:
        with _errors(self.path):
            rows = self._db.execute(f"SELECT index_uuid, {_STATE} FROM lmd_metadata").fetchall()
        if len(rows) != 1:
            raise IndexCorruptError(f"lmd_metadata in {self.path} has {len(rows)} rows, not one.")
        uuid, *values = rows[0]
        if uuid != str(self._parameters.uuid):
            raise IndexCorruptError(
                f"{self.path} is the store of index {uuid}; metadata.lmd in the folder is of {self._parameters.uuid}.",
                remedy="One of them was put there from another index: put back the one that belongs to the graph.",
            )
        return State.checked(values, f"lmd_metadata in {self.path}")

    # -- queries

    def columns(self, sql: str, **tables: NDArray[Any]) -> list[NDArray[Any]]:
        """The columns of a query's result; each array in ``tables`` is a table of its name with a column ``id``."""
        return [_numpy(column) for column in self._query(sql, tables).columns]

    def blocks(
        self, sql: str, size: int, **tables: NDArray[Any]
    ) -> tuple[list[NDArray[Any]], NDArray[np.uint8], NDArray[np.bool_]]:
        """Like :meth:`columns`, for a query whose last column has node blocks.

        Returns the other columns; the blocks as uint8 [n, size], one of another length cut or filled with zeros; and
        whether each has the length ``size``, as bool [n].
        """
        *plain, data = self._query(sql, tables).columns
        parts = [_matrix(chunk, size) for chunk in data.chunks] or [(np.zeros((0, size), np.uint8), np.zeros(0, bool))]
        whole, fits = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        return [_numpy(column) for column in plain], whole, fits

    def read_all(self) -> None:
        """Read every column of every table: DuckDB checks the blocks of its file when it reads them.

        Raises ``TableCorruptError``: one is damaged.
        """
        for table in self.texts("SELECT table_name FROM duckdb_tables() ORDER BY 1"):
            self.columns(f"SELECT count(*) FROM (SELECT hash({table}) AS h FROM {table}) WHERE h = 0")

    def codebook(self) -> NDArray[np.uint8]:
        """The bytes of the codebook in use; none if there is none."""
        with _errors(self.path):
            row = self._db.execute(
                "SELECT data FROM lmd_codebooks WHERE codebook_id = (SELECT codebook_id FROM lmd_metadata)"
            ).fetchall()
        return np.frombuffer(b"".join(data for (data,) in row), np.uint8)

    def texts(self, sql: str) -> list[str]:
        """The strings of a query with one column."""
        with _errors(self.path):
            return [value for (value,) in self._db.execute(sql).fetchall()]

    def followed(self) -> str:
        """The uuid of the transaction that made the followed version of the table; empty: there is none, or unknown."""
        return next(iter(self.texts("SELECT transaction FROM lmd_followed")), "")

    def in_graph(self, epoch: int) -> list[NDArray[Any]]:
        """Node, slot and epoch of the versions in the graph that a reader at ``epoch`` or later reads, by slot.

        At the newest epoch: each node's newest version, where that is in the graph. The map has an older one until the
        newer one is merged.
        """
        return self.columns(
            "SELECT node_id, slot, from_epoch FROM lmd_slots s WHERE NOT EXISTS (SELECT 1 FROM lmd_delta_blocks d "
            f"WHERE d.node_id = s.node_id AND d.commit_epoch > s.from_epoch AND d.commit_epoch <= {epoch}) UNION ALL "
            f"SELECT node_id, slot, from_epoch FROM lmd_free_nodes WHERE freed_epoch > {epoch} "
            "AND freed_epoch > from_epoch AND (node_id IN (SELECT node_id FROM lmd_slots) "
            "OR node_id IN (SELECT node_id FROM lmd_delta_blocks)) ORDER BY slot"
        )

    def counts_from(self, since: int) -> NDArray[np.uint64]:
        """How many rows and unhealed tombstones there were: [n, 4], ascending, of ``since`` and each later epoch.

        Epoch, live rows, deleted nodes to which links lead, the first node that was added (highest value: none).
        """
        epochs, live, unhealed, first = self.columns(
            f"SELECT greatest(epoch, {since})::UBIGINT AS at, sum(live)::BIGINT, sum(unhealed)::BIGINT, "
            f"min(node) FILTER (epoch > {since}) FROM ("
            "SELECT added_epoch AS epoch, 1 AS live, 0 AS unhealed, node_id AS node FROM lmd_lookup UNION ALL "
            "SELECT removed_epoch, -1, 0, NULL FROM lmd_lookup WHERE removed_epoch IS NOT NULL UNION ALL "
            "SELECT deletion_epoch, 0, 1, NULL FROM lmd_tombstoned_nodes UNION ALL "
            "SELECT since_epoch, 0, -1, NULL FROM lmd_sweep_list WHERE reason = 'healed') GROUP BY 1 ORDER BY 1"
        )
        counts = np.stack([epochs, live.cumsum().astype(U8), unhealed.cumsum().astype(U8), first], axis=1)
        return counts.astype(U8)

    def sample(self) -> NDArray[np.uint64]:
        """Node, slot, epoch and ``origin_txn`` of some blocks that the graph must have: [n, 4], at most 16."""
        if self._read_only and "lmd_graph_sample" not in self.texts("SELECT table_name FROM duckdb_tables()"):
            return np.zeros((0, 4), U8)
        columns = self.columns(
            "SELECT m.node_id, m.slot, m.from_epoch, m.origin_txn FROM lmd_graph_sample m JOIN lmd_slots s "
            "ON s.node_id = m.node_id AND s.slot = m.slot AND s.from_epoch = m.from_epoch ORDER BY m.slot"
        )
        return np.stack(columns, axis=1).astype(U8)

    def check_identity(self, folder: str | None = None) -> None:
        """Check that the graph is that of this index: the one beside the store, or in another folder.

        Raises ``TableCorruptError``: it is another one.
        """
        sample = self.sample()
        if not len(sample):
            return
        with self._graph(folder or self._folder) as graph:
            check_identity(graph, folder or self._folder, self._parameters.layout.block_size, sample)

    def begin_sample(self) -> None:
        """Record a sample of the graph, if there is none: an earlier release wrote the store."""
        with _errors(self.path):
            self._record_sample(self._redrawn(np.zeros((0, 3), U8), np.zeros(0, U8)))

    @contextmanager
    def _graph(self, folder: str) -> Iterator[int]:
        if not os.path.exists(os.path.join(folder, GRAPH)):
            raise IndexCorruptError(f"{GRAPH} in {folder} is missing.")
        with open_file(os.path.join(folder, GRAPH), os.O_RDONLY) as graph:
            yield graph

    def _redrawn(self, written: NDArray[np.uint64], gone: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The sample of the graph after a commit; empty: the recorded one, of which most is left.

        The file of another index of the same shape has blocks of other transactions in these slots. It is drawn before
        the commit begins: DuckDB crashed where tables that a transaction had changed were sampled, or sorted, in it.

        Args:
            written: uint64 [n, 3]: node, slot and epoch of the blocks that the commit adds to the map.
            gone: the nodes whose present blocks leave it.
        """
        if (~np.isin(self.sample()[:, 0], gone)).sum() > _SAMPLED // 2:
            return np.zeros((0, 4), U8)
        mapped = self.columns(f"SELECT node_id, slot, from_epoch FROM lmd_slots ORDER BY hash(slot) LIMIT {_SAMPLED}")
        stay = np.stack(mapped, axis=1).astype(U8)
        random = np.random.default_rng(self.state.epoch)
        drawn = random.permutation(np.concatenate([stay[~np.isin(stay[:, 0], gone)], written]))[:_SAMPLED]
        with self._graph(self._folder) as graph:
            heads = headers_in(graph, self._parameters.layout.block_size, drawn[:, 1])
        own = (heads["node_id"] == drawn[:, 0]) & (heads["creation_epoch"] == drawn[:, 2])
        return np.column_stack([drawn[own], heads["origin_txn"][own]]).astype(U8)

    def _record_sample(self, sample: NDArray[np.uint64]) -> None:
        if len(sample):
            self._db.execute("DELETE FROM lmd_graph_sample")
            self._with(sample, "INSERT INTO lmd_graph_sample SELECT c0, c1, c2, c3 FROM given")

    def superseded_deltas(self) -> list[NDArray[Any]]:
        """Node and version of the delta blocks of which there is a newer version, in the delta table or the graph."""
        return self.columns(
            "SELECT node_id, version FROM lmd_delta_blocks d WHERE EXISTS (SELECT 1 FROM lmd_delta_blocks n "
            "WHERE n.node_id = d.node_id AND n.commit_epoch > d.commit_epoch) OR EXISTS (SELECT 1 FROM lmd_slots s "
            "WHERE s.node_id = d.node_id AND s.from_epoch > d.commit_epoch)"
        )

    def free_slots(self, horizon: int) -> NDArray[np.int64]:
        """The slots that were freed at ``horizon`` or before, ascending. Raises as :meth:`check_below`."""
        [free] = self.columns(f"SELECT slot FROM lmd_free_nodes WHERE freed_epoch <= {horizon} ORDER BY slot")
        self.check_below(self.state.slot_count, "lmd_free_nodes", free)
        return free.astype(np.int64)

    def check_below(self, count: int, table: str, numbers: NDArray[Any]) -> None:
        """Check that nodes or slots of a table, which are used as indices, were allocated.

        Raises ``TableCorruptError``: the highest is ``count`` or more.
        """
        if len(numbers) and numbers.max() >= count:
            raise IndexCorruptError(
                f"{table} in {self.path} is damaged: it has {numbers.max()}, and only {count} were allocated."
            )

    def _query(self, sql: str, tables: Mapping[str, NDArray[Any]]) -> pa.Table:
        with _errors(self.path):
            for name, values in tables.items():
                self._db.register(name, pa.table({"id": _arrow(values)}))
            try:
                return self._db.sql(sql).to_arrow_table()
            finally:
                for name in tables:
                    self._db.unregister(name)

    # -- commits

    def commit(self, changes: Changes) -> None:
        """Commit everything in one transaction; durable when this returns, not visible at all if it raises."""
        self.check_own()
        moved, sample = (changes.moved_nodes, changes.moved_slots, changes.moved_epochs), np.zeros((0, 4), U8)
        if len(changes.moved_nodes) or len(changes.reclaimed):
            sample = self._redrawn(np.stack(moved, axis=1), np.concatenate([changes.moved_nodes, changes.reclaimed]))
        with _errors(self.path):
            self._db.execute("BEGIN TRANSACTION")
            try:
                self._apply(changes)
                self._record_sample(sample)
                self._db.execute("COMMIT")
            except BaseException:
                self._rollback()
                raise
        self.state = changes.state

    def _rollback(self) -> None:
        try:
            self._db.execute("ROLLBACK")
        except duckdb.Error:  # a failed commit has been rolled back already
            return

    def _apply(self, changes: Changes) -> None:
        epoch = changes.state.epoch
        self._slots(changes)
        self._deltas(changes)
        self._rows(changes, epoch)
        self._lists(changes, epoch)
        if changes.entries is not None:
            left = "removed_epoch IS NULL AND node_id NOT IN (SELECT id FROM given)"
            self._with(changes.entries, f"UPDATE lmd_entry_points SET removed_epoch = {epoch} WHERE {left}")
            held = "SELECT node_id FROM lmd_entry_points WHERE removed_epoch IS NULL"
            fresh = f"SELECT id, {epoch}, NULL FROM given WHERE id NOT IN ({held})"
            self._with(changes.entries, f"INSERT INTO lmd_entry_points {fresh}")
        self._with(
            changes.overflow_reset, "DELETE FROM lmd_backlink_overflow WHERE target_node_id IN (SELECT id FROM given)"
        )
        self._with(
            changes.overflow_dropped,
            "DELETE FROM lmd_backlink_overflow USING given WHERE target_node_id = c0 AND referrer_node_id = c1",
        )
        self._with(changes.overflow_added, "INSERT INTO lmd_backlink_overflow SELECT c0, c1 FROM given")
        if changes.codebook is not None:
            number, data = changes.codebook
            self._db.execute(
                "INSERT INTO lmd_codebooks VALUES (?, ?, ?)", [number, self._parameters.quantizer, data.tobytes()]
            )
        if changes.followed is not None:
            self._db.execute("DELETE FROM lmd_followed")
            self._db.execute("INSERT INTO lmd_followed VALUES (?)", [changes.followed])
        names = _STATE.split(", ")
        assigned = ", ".join(f"{name} = {int(getattr(changes.state, name))}" for name in names)
        self._db.execute(f"UPDATE lmd_metadata SET {assigned}")

    def _slots(self, changes: Changes) -> None:
        self._with(changes.taken, "DELETE FROM lmd_free_nodes WHERE slot IN (SELECT id FROM given)")
        self._with(changes.retired, "INSERT INTO lmd_free_nodes SELECT c0, c1, c2, c3 FROM given")
        moved = np.stack([changes.moved_nodes, changes.moved_slots, changes.moved_epochs], axis=1)
        self._with(moved, "DELETE FROM lmd_slots WHERE node_id IN (SELECT c0 FROM given)")
        self._with(moved, "INSERT INTO lmd_slots SELECT c0, c1, c2 FROM given")
        merged = np.stack([changes.merged_nodes, changes.merged_versions], axis=1)
        # Exactly the merged versions: otherwise one that a writer committed meanwhile would be lost.
        self._with(merged, "DELETE FROM lmd_delta_blocks USING given WHERE node_id = c0 AND version = c1")

    def _deltas(self, changes: Changes) -> None:
        if not len(changes.delta_nodes):
            return
        blocks = np.ascontiguousarray(changes.blocks)
        head = headers(blocks)
        data = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(blocks.shape[1]), len(blocks), [None, pa.py_buffer(blocks)]
        )
        table = pa.table(
            {
                "node_id": _arrow(head["node_id"]), "version": _arrow(head["version"]),
                "commit_epoch": _arrow(head["creation_epoch"]), "origin_txn": _arrow(head["origin_txn"]),
                "is_tombstone": _arrow(head["flags"] & TOMBSTONED), "checksum": _arrow(head["checksum"]),
                "data": data.cast(pa.binary()),
            }
        )  # fmt: skip
        self._db.register("given", table)
        try:
            self._db.execute("INSERT INTO lmd_delta_blocks SELECT * FROM given")
        finally:
            self._db.unregister("given")

    def _rows(self, changes: Changes, epoch: int) -> None:
        self._with(changes.unmapped, "DELETE FROM lmd_lookup WHERE node_id IN (SELECT id FROM given)")
        if len(changes.row_ids):
            rows = pa.table({"row_id": _arrow(changes.row_ids), "node_id": _arrow(changes.row_nodes)})
            self._db.register("given", rows)
            try:
                self._db.execute(f"INSERT INTO lmd_lookup SELECT row_id, node_id, {epoch}, NULL FROM given")
            finally:
                self._db.unregister("given")
        self._with(
            changes.unmapped,
            "UPDATE lmd_lookup SET removed_epoch = deletion_epoch FROM lmd_tombstoned_nodes t "
            "WHERE lmd_lookup.node_id = t.node_id AND t.node_id IN (SELECT id FROM given)",
        )
        removed = changes.removed
        self._with(
            removed, f"UPDATE lmd_lookup SET removed_epoch = {epoch} WHERE node_id IN (SELECT id FROM given)"
        )  # fmt: skip
        self._with(removed, f"INSERT INTO lmd_tombstoned_nodes SELECT id, {epoch} FROM given")
        self._with(removed, f"INSERT INTO lmd_sweep_list SELECT id, 'tombstoned', {epoch} FROM given")

    def _lists(self, changes: Changes, epoch: int) -> None:
        self._with(
            changes.healed,
            f"UPDATE lmd_sweep_list SET reason = 'healed', since_epoch = {epoch} "
            "WHERE node_id IN (SELECT id FROM given)",
        )
        for name in ("slots", "lookup", "tombstoned_nodes", "sweep_list", "entry_points"):
            self._with(changes.reclaimed, f"DELETE FROM lmd_{name} WHERE node_id IN (SELECT id FROM given)")
        for column in ("target_node_id", "referrer_node_id"):
            self._with(changes.reclaimed, f"DELETE FROM lmd_backlink_overflow WHERE {column} IN (SELECT id FROM given)")
        self._with(changes.rewired, "DELETE FROM lmd_heal_list WHERE node_id IN (SELECT id FROM given)")
        listed = "SELECT node_id FROM lmd_heal_list"
        self._with(
            changes.to_rewire,
            f"INSERT INTO lmd_heal_list SELECT id, 'unreachable', {epoch} FROM given WHERE id NOT IN ({listed})",
        )

    def _with(self, values: NDArray[Any], sql: str) -> None:
        """Run a statement on a table ``given`` of integers: a column ``id``, or ``c0``, ``c1`` ..."""
        if not len(values):
            return
        values = np.asarray(values, U8)
        columns = {"id": values} if values.ndim == 1 else {f"c{at}": values[:, at] for at in range(values.shape[1])}
        self._db.register("given", pa.table({name: _arrow(column) for name, column in columns.items()}))
        try:
            self._db.execute(sql)
        finally:
            self._db.unregister("given")

    def raise_retained(self, epoch: int) -> State:
        """The state for a commit that stops retaining the epochs below ``epoch``."""
        return replace(self.state, epoch=self.state.epoch + 1, retained_from=max(self.state.retained_from, epoch))


_OPEN: WeakSet[Store] = WeakSet()


def _keep_inherited() -> None:
    """Prevent the destruction of inherited connections: DuckDB would write, or crash without its threads."""
    for store in _OPEN:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._db))  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_keep_inherited)

# pa.array and to_numpy import pandas where it is installed: 40 MiB and 0.2 s. These use the same memory.


def _arrow(values: NDArray[Any]) -> pa.Array:
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _numpy(column: pa.ChunkedArray) -> NDArray[Any]:
    """A column of numbers; NULL becomes the highest value of the type."""
    dtype = _DTYPES[column.type]
    if not len(column):
        return np.zeros(0, dtype)
    whole = column.combine_chunks()
    part = slice(whole.offset, whole.offset + len(whole))
    valid, data = whole.buffers()
    values = np.frombuffer(data, dtype)[part]
    if whole.null_count:
        there = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[part]
        values = np.where(there, values, np.iinfo(dtype).max)
    return values


def _matrix(chunk: pa.BinaryArray, size: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Blobs as uint8 [n, size], one of another length cut or filled with zeros; and whether each has that length."""
    _, places, data = chunk.buffers()
    offsets = np.frombuffer(places, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
    whole = np.frombuffer(data, np.uint8)
    fits = np.diff(offsets) == size
    if fits.all():
        return whole[offsets[0] : offsets[-1]].reshape(-1, size), fits
    blocks = np.zeros((len(chunk), size), np.uint8)
    for row, (first, last) in enumerate(pairwise(offsets.tolist())):
        part = whole[first:last][:size]
        blocks[row, : len(part)] = part
    return blocks, fits


class Slots:
    """The slots that a transaction or a merge allocates.

    Args:
        store: open.
        horizon: slots that were freed at this epoch or before it may be used.
    """

    def __init__(self, store: Store, horizon: int) -> None:
        self._store, self._horizon = store, horizon
        self._free: NDArray[np.int64] | None = None
        self._used = 0
        self.count = store.state.slot_count

    def take(self, count: int) -> NDArray[np.int64]:
        """Allocate that many slots, ascending."""
        if self._free is None:
            self._free = self._store.free_slots(self._horizon)
        reused = self._free[self._used : self._used + count]
        self._used += len(reused)
        fresh = np.arange(self.count, self.count + count - len(reused), dtype=np.int64)
        self.count += len(fresh)
        return np.concatenate([reused, fresh])

    @property
    def taken(self) -> NDArray[np.uint64]:
        """The allocated slots that were on the free list."""
        return np.zeros(0, U8) if self._free is None else self._free[: self._used].astype(U8)

    def superseded(self, nodes: NDArray[np.uint64], epoch: int) -> NDArray[np.uint64]:
        """The current slots of these nodes: [n, 4] of slot, node, epoch of its version, epoch of the next version."""
        if not len(nodes):
            return np.zeros((0, 4), U8)
        # If a version in between is in the delta table, the old slot's version ends at that one's epoch.
        columns = self._store.columns(
            "SELECT slot, node_id, from_epoch, coalesce((SELECT min(commit_epoch) FROM lmd_delta_blocks d "
            f"WHERE d.node_id = s.node_id AND d.commit_epoch > s.from_epoch), {epoch}) "
            "FROM lmd_slots s WHERE node_id IN (SELECT id FROM moved)", moved=nodes.astype(U8),
        )  # fmt: skip
        return np.stack(columns, axis=1).astype(U8)
