"""Determine the columns of WAL entries that other writers put, when a writer replays them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.errors import SchemaProjectionError, UnsupportedFeatureError
from memwal_ops.formats.lance.log.region_columns import stored_columns
from memwal_ops.formats.lance.log.region_files import entry_path
from memwal_ops.formats.lance.retention.schema_history import Flush, SchemaHistory
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.log.region_columns import RegionColumns
    from memwal_ops.formats.lance.log.region_files import WalEntry
    from memwal_ops.formats.lance.retention.schema_history import WriterVersion
    from memwal_ops.formats.lance.table import Table


class LoggedColumns:
    """Finds the columns of entries. Entries with other columns than the writer's become separate generations.

    The same names, types and field ids may be other columns: Lance gives the id of a dropped column to the next one
    where no data file has it. Timeline by these alone: a writer puts ``note`` and is killed; ``note`` is dropped and
    added again; the next writer replays the log and puts notes. One generation has the columns of one time: either
    the dropped values come back, or the new ones are lost.
    """

    def __init__(self, table: Table, region_id: UUID, own: RegionColumns) -> None:
        """Nothing is read before the first entry.

        Args:
            table: the version at which the writer began.
        """
        self._table, self._region_id, self._own = table, region_id, own
        self._history = SchemaHistory(table)
        self._found: dict[tuple[WriterVersion | None, int], RegionColumns] = {}

    def of(self, entry: WalEntry, last: RegionColumns) -> RegionColumns:
        """The columns of an entry.

        Args:
            entry: of another writer.
            last: those of the entry before it, which are returned if they are the same.

        Raises:
            UnsupportedFeatureError: other columns than the table has, and no ids to identify them.
        """
        if _are(self._own, entry):
            key = entry.opened, entry.writer_epoch
            if key not in self._found:
                same = self.is_current(entry_path(self._region_id, entry.entry_id), entry.opened)
                self._found[key] = self._own if same else replace(self._own, opened=entry.opened)
            return self._found[key]
        if _are(last, entry) and last.opened == entry.opened:
            return last
        if entry.field_ids is None:
            raise UnsupportedFeatureError(
                f"WAL entry {entry.entry_id} of region {self._region_id} has the columns {entry.rows.column_names}, "
                "which the table does not have, and no field ids to identify them."
            )
        return stored_columns(entry.rows.schema, entry.field_ids, self._own, entry.opened)

    def is_current(self, path: str, opened: WriterVersion | None = None) -> bool:
        """Whether no column was dropped and added again since the entry at a path was put.

        Args:
            opened: the version that its writer had opened; None: not recorded.
        """
        if opened is not None and opened == self._own.opened:
            return True
        meta = self._table.store.head(path)
        if meta is None:
            return False
        flush = Flush(None, nanoseconds(meta.last_modified), opened)
        ids = [field.id for field in self._table.manifest.manifest.fields]
        try:
            return all(self._history.is_same_field(one, flush, renamed=False) for one in ids)
        except SchemaProjectionError:  # a version that has them is damaged: the merge decides
            return False


def _are(columns: RegionColumns, entry: WalEntry) -> bool:
    return entry.rows.schema == columns.schema and entry.field_ids in {None, columns.ids}
