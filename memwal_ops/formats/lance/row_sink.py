"""Write the rows of another format to a Lance table, and create its MemWAL index.

The record of the migration is in the schema's metadata. The rows of the first run and the record are one version, so a
run that is killed before it leaves files that no version needs, and no table.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from memwal_ops.errors import InvalidUsageError, TableNotFoundError
from memwal_ops.formats.lance.engines.spark.load import SparkTable, bulk_load, running
from memwal_ops.formats.lance.files.datasets import is_one_of, lance_errors, lance_options, open_dataset
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER
from memwal_ops.formats.lance.table import read_table
from memwal_ops.formats.transactions import read_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from memwal_ops.core.anchors import CommitGuard
    from memwal_ops.core.context import Progress
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

RECORD = "memwal_ops.migration"
_KEY = {"lance-schema:unenforced-primary-key": "true"}
_KEYS_PER_DELETE = 1000
# Folders that a first run leaves if it is killed before it commits.
_UNFINISHED = {"data", "_transactions"}
_SAME_ROWS = ("CreateIndex", "Rewrite", "UpdateConfig", "ReserveFragments")


class LanceSink:
    """See :class:`memwal_ops.core.row_sink.RowSink`."""

    def __init__(self, location: Location, store: Store, guard: CommitGuard, source: str) -> None:
        """Open the table if it exists; raises as :meth:`memwal_ops.core.row_sink.ReceivesRows.open_sink`."""
        self._location, self._store, self._guard = location, store, guard
        root = store.list_level("")
        self._dataset: lance.LanceDataset | None = None
        if VERSIONS_FOLDER in root.directories:
            self._refresh()
            self._check(source)
        elif root.objects or not {*root.directories} <= _UNFINISHED:
            raise InvalidUsageError(
                f"{location.uri} is not empty, and has no Lance table.",
                remedy="Give an empty prefix for the new table.",
            )

    @property
    def record(self) -> Mapping[str, Any] | None:
        """See the protocol."""
        if self._dataset is None:
            return None
        found: Mapping[str, Any] = json.loads((self._dataset.schema.metadata or {}).get(RECORD.encode(), b"null"))
        return found

    @property
    def schema(self) -> pa.Schema:
        """See the protocol."""
        return self._opened.schema

    @property
    def version(self) -> int:
        """See the protocol."""
        return 0 if self._dataset is None else int(self._dataset.version)

    def create(self, rows: pa.RecordBatchReader, key: str, record: Mapping[str, Any]) -> None:
        """See the protocol."""
        fields = [
            pa.field(one.name, one.type, nullable=False, metadata=_KEY) if one.name == key else one
            for one in rows.schema
        ]
        schema = pa.schema(fields, metadata={RECORD: json.dumps(record)})
        self._guard.check()
        with lance_errors("write", self._location.uri):
            self._dataset = lance.write_dataset(
                (one.cast(schema) for one in rows),
                self._location.uri,
                schema=schema,
                mode="create",
                storage_options=lance_options(self._location),
            )

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """See the protocol."""
        if fields:
            self._guard.check()
            with lance_errors("add columns to", self._location.uri):
                self._opened.add_columns(pa.schema(fields))
            self._refresh()

    def upsert(self, rows: pa.RecordBatchReader, key: str) -> None:
        """See the protocol."""
        self._guard.check()
        with lance_errors("write", self._location.uri):
            changed = self._opened.merge_insert(key).when_matched_update_all().when_not_matched_insert_all()
            # An index may lack rows that it claims to cover: their keys would be inserted again.
            changed.use_index(use_index=False).execute(rows)
        self._refresh()

    def delete(self, keys: Sequence[str], key: str) -> None:
        """See the protocol."""
        for start in range(0, len(keys), _KEYS_PER_DELETE):
            self._guard.check()
            with lance_errors("delete from", self._location.uri):
                self._opened.delete(is_one_of(key, keys[start : start + _KEYS_PER_DELETE]))
            self._refresh()

    def set_record(self, record: Mapping[str, Any]) -> None:
        """Replace the record; and create the MemWAL index where there is none."""
        if not read_table(self._location, self._store).log.exists:
            self._guard.check()
            with lance_errors("create the MemWAL index of", self._location.uri):
                self._opened.initialize_mem_wal()
            self._refresh()
        if record != self.record:
            self._guard.check()
            with lance_errors("write the schema metadata of", self._location.uri):
                self._opened.update_schema_metadata({RECORD: json.dumps(record)})
            self._refresh()

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """See the protocol."""
        with lance_errors("read", self._location.uri):
            yield from self._opened.scanner(columns=None if columns is None else [*columns]).to_batches()

    def load(self, rows: DataFrame) -> None:
        """See :class:`memwal_ops.core.row_sink.SparkRows`."""
        self._guard.check()
        bulk_load(rows, self._location.uri, storage_options=self._location.lance_options)
        self._refresh()

    @contextmanager
    def on_spark(self, master: str | None, report: Callable[[Progress], None]) -> Iterator[SparkTable]:
        """See the protocol."""
        with running(self, self._location, master, report) as rows:
            yield rows

    @property
    def _opened(self) -> lance.LanceDataset:
        if self._dataset is None:
            raise TableNotFoundError(f"There is no table at {self._location.uri}.")
        return self._dataset

    def _refresh(self) -> None:
        with lance_errors("open", self._location.uri):
            self._dataset = open_dataset(self._location)

    def _operation(self, version: int) -> str | None:
        """The name of the operation that created a version; None if its transaction is gone.

        pylance has no name for what precedes a compaction: it reserves the ids of fragments, and changes none.
        """
        transaction = read_transaction(self._opened, version)
        name = None if transaction is None else type(transaction.operation).__name__
        if name == "BaseOperation" and self._fragments(version - 1) == self._fragments(version):
            return "ReserveFragments"
        return name

    def _fragments(self, version: int) -> list[dict[str, Any]]:
        return [one.metadata.to_json() for one in self._opened.checkout_version(version).get_fragments()]

    def _check(self, source: str) -> None:
        """Refuse a table that this migration did not create, or that others have written since it finished."""
        record, uri = self.record, self._location.uri
        if record is None or record.get("source") != source:
            origin = "no migration created" if record is None else f"was migrated from {record.get('source')}"
            raise InvalidUsageError(
                f"{uri} already has a Lance table that {origin}.", remedy="Give an empty prefix for the new table."
            )
        table = read_table(self._location, self._store)
        if table.regions.region_ids:
            raise _written_by_others(uri, "has regions of MemWAL writers")
        if record.get("finished") is None:
            return
        for version in range(int(record["finished"]) + 1, self.version + 1):
            try:
                operation = self._operation(version)
            except (OSError, ValueError):
                operation = None
            if operation is None:
                raise _written_by_others(uri, f"had a version {version} that cannot be read any more")
            if operation not in _SAME_ROWS:
                raise _written_by_others(uri, f"was changed in version {version} ({operation})")


def _written_by_others(uri: str, what: str) -> InvalidUsageError:
    return InvalidUsageError(
        f"{uri} {what} since the migration finished: another run would undo what others wrote.",
        remedy="The migration is finished: write to the table. To migrate again, give another target.",
    )
