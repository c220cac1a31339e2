"""The interface through which a migration fills a table of another format: formats do not import each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from memwal_ops.core.anchors import CommitGuard
    from memwal_ops.core.context import Progress
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

    Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class SparkRows(Protocol):
    """A table that is filled and read on Spark."""

    @property
    def spark(self) -> SparkSession:
        """The session; its settings are this run's own."""

    def stage(self, name: str, doing: str) -> AbstractContextManager[None]:
        """Name the Spark jobs of the block, report their progress, and raise what a task raised.

        Raises ``SparkJobFailedError``: Spark failed the job.
        """

    def task(self, function: Task) -> Task:
        """Wrap a function for ``mapInArrow``: :meth:`stage` raises what it raised on an executor."""

    def load(self, rows: DataFrame) -> None:
        """Append rows with new keys, as one commit."""

    def map_rows(self, function: Task, schema: str) -> DataFrame:
        """Apply a function, on executors, to all rows of the newest version."""


class RowSink(Protocol):
    """A table that one migration fills. Nothing else writes to it before it is finished.

    Each method is one commit, or several that can be repeated: a migration that was killed begins again, and compares
    what is there.
    """

    @property
    def record(self) -> Mapping[str, Any] | None:
        """What the migration recorded last; None: there is no table yet."""

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""

    @property
    def version(self) -> int:
        """The table's newest version; 0 where there is none."""

    def create(self, rows: pa.RecordBatchReader, key: str, record: Mapping[str, Any]) -> None:
        """Create the table with all these rows, and the record, at once."""

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add columns, which are null in every row."""

    def upsert(self, rows: pa.RecordBatchReader, key: str) -> None:
        """Insert rows, or replace those of the same key."""

    def delete(self, keys: Sequence[str], key: str) -> None:
        """Delete rows by key."""

    def set_record(self, record: Mapping[str, Any]) -> None:
        """Replace the record."""

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows of the newest version."""

    def on_spark(self, master: str | None, report: Callable[[Progress], None]) -> AbstractContextManager[SparkRows]:
        """The same table on Spark: on the session that is active in this process, or on one that is stopped at the end.

        Raises ``SparkUnavailableError``: Spark cannot run here.
        """


@runtime_checkable
class ReceivesRows(Protocol):
    """A format whose tables a migration can fill."""

    def open_sink(self, location: Location, store: Store, guard: CommitGuard, source: str) -> RowSink:
        """Open the table at a location, or prepare to create it there.

        ``source``: identity of what is migrated; the table of another migration is refused.

        Raises:
            InvalidUsageError: something else is there, or others have changed the rows since the migration finished.
        """
