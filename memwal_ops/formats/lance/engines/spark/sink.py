"""Write and read, on Spark, a Lance table that a migration creates."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memwal_ops.core.context import Progress
from memwal_ops.core.spark.counters import Counters
from memwal_ops.core.spark.faults import between_stages, reported
from memwal_ops.core.spark.session import our_tasks, session
from memwal_ops.core.spark.stages import Stages
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from memwal_ops.core.row_sink import Task
    from memwal_ops.core.spark.stages import StageProgress
    from memwal_ops.storage.locations import Location

_ROWS_PER_BATCH = 8192


class _Table(Protocol):
    """The table that is loaded."""

    @property
    def version(self) -> int: ...

    def load(self, rows: DataFrame) -> None: ...


@dataclass(frozen=True)
class SparkTable:
    """See :class:`memwal_ops.core.row_sink.SparkRows`."""

    spark: SparkSession
    table: _Table
    location: Location
    stages: Stages

    def stage(self, name: str, doing: str) -> AbstractContextManager[None]:
        """Report a stage, with its time; see the protocol."""
        return self.stages.stage(name, doing)

    def task(self, function: Task) -> Task:
        """Wrap a function so that its errors reach the driver; see the protocol."""

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with reported():
                yield from function(batches)

        return run

    def load(self, rows: DataFrame) -> None:
        """Load rows into the table; see the protocol."""
        self.table.load(rows)

    def map_rows(self, function: Task, schema: str) -> DataFrame:
        """Apply a function to the rows of each fragment, on executors; see the protocol."""
        location, version = self.location.refreshed(), self.table.version
        with lance_errors("open", location.uri):
            fragments = [one.fragment_id for one in open_dataset(location, version=version).get_fragments()]

        def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with lance_errors("read", location.uri):
                base = open_dataset(location, version=version)
                for batch in batches:
                    for place in batch.column(0).to_pylist():
                        found = base.get_fragment(fragments[place])
                        assert found is not None  # noqa: S101 - it was listed in the same version
                        yield from base.scanner(fragments=[found], batch_size=_ROWS_PER_BATCH).to_batches()

        return self.spark.range(0, len(fragments), 1, max(1, len(fragments))).mapInArrow(
            self.task(lambda batches: function(rows(batches))), schema
        )


@contextmanager
def running(
    table: _Table, location: Location, master: str | None, report: Callable[[Progress], None]
) -> Iterator[SparkTable]:
    """The table on Spark; see :meth:`memwal_ops.core.row_sink.RowSink.on_spark`."""

    def show(stage: StageProgress) -> None:
        report(Progress(f"migrating: {stage.stage}", "tasks", stage.tasks_done, stage.tasks or None))

    report(Progress("starting Spark", "tasks", 0))
    with session(master, app_name="memwal-ops migrate") as active, between_stages(), our_tasks(active):
        context = active.sparkContext
        counters = Counters.of(context)
        spark = active.newSession()  # the same application, with settings of its own
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(_ROWS_PER_BATCH))
        spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")
        yield SparkTable(spark, table, location, Stages(context, location.uri, counters, show))
