"""Execute the tasks of a compaction on Spark: executors rewrite, the driver commits.

Tasks and results are pickled by pylance, in the form of its release; ``check_executors`` refuses another one. No row
passes through Spark.
"""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from memwal_ops.core.context import Progress
from memwal_ops.formats.lance.engines.spark.faults import between_stages, reported
from memwal_ops.formats.lance.engines.spark.leftovers import log_leftovers
from memwal_ops.formats.lance.engines.spark.session import check_executors, quiet, session
from memwal_ops.formats.lance.engines.spark.stages import Stages
from memwal_ops.formats.lance.engines.spark.tasks import Counters
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    import lance
    from lance.optimize import CompactionTask, RewriteResult
    from pyspark.sql import SparkSession

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.engines.merge.api import StageProgress
    from memwal_ops.formats.lance.engines.spark.tasks import Task
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.locations import Location


class SparkExecutor:
    """One Spark task for each task of the compaction. Starts Spark with the first: it may find nothing to do.

    Args:
        master: see :func:`memwal_ops.formats.lance.engines.spark.session.session`.
        context: for progress and figures.
    """

    name = "spark"
    rows_per_commit = 64 << 20

    def __init__(self, master: str | None, context: RunContext) -> None:
        self._master, self._context = master, context
        self._spark: SparkSession | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop Spark if this executor started it."""
        self._exit.__exit__(kind, error, trace)

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """See :class:`memwal_ops.formats.lance.engines.merge.compaction.TaskExecutor`.

        Raises:
            SparkUnavailableError: PySpark, pandas or Java is missing, here or on the executors.
            SparkJobFailedError: Spark failed; nothing was published.
        """
        if self._spark is None:
            self._context.report(Progress("starting Spark", "tasks", 0))
            self._spark = self._exit.enter_context(session(self._master, app_name="memwal-ops compact"))
        began = datetime.now(UTC)
        with quiet(), between_stages():
            check_executors(self._spark)
            made = self._spark.newSession()  # the same application, with settings of its own
            made.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")
            context = made.sparkContext
            counters = Counters(context.accumulator(0), context.accumulator(0))
            stages = Stages(context, table.location.uri, counters, self._show)
            work = _rewriter(table.location.refreshed(), int(dataset.version), tasks, counters)
            try:
                with stages.stage("rewrite", "rewrite groups of fragments"):
                    numbers = made.range(0, len(tasks), 1, len(tasks))
                    rows = numbers.mapInArrow(work, "number bigint, result binary").collect()
            except BaseException:
                stages.settle()
                log_leftovers(table, began)
                raise
        self._context.add_phase_seconds("rewrite", stages.seconds["rewrite"])
        if stages.metrics["lost_attempts"] or "incomplete" in stages.metrics:
            log_leftovers(table, began)
        results = {row["number"]: row["result"] for row in rows}
        yield from (pickle.loads(results[number]) for number in range(len(tasks)))  # noqa: S301 - of our own tasks

    def _show(self, stage: StageProgress) -> None:
        detail = f"{stage.rows:,} rows"
        self._context.report(Progress("rewriting", "tasks", stage.tasks_done, stage.tasks or None, detail))


def _rewriter(location: Location, version: int, tasks: Sequence[CompactionTask], counters: Counters) -> Task:
    """A task from positions (``id``) in ``tasks`` to ``number`` and ``result`` of each."""

    def rewrite(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reported(), lance_errors("write compacted fragments of", location.uri):
            for batch in batches:
                dataset = open_dataset(location, version=version)
                for number in batch.column(0).to_pylist():
                    result = tasks[number].execute(dataset)
                    files = [file for one in result.new_fragments for file in one.files]
                    counters.add(
                        sum(one.physical_rows for one in result.new_fragments),
                        sum(file.file_size_bytes or 0 for file in files),
                    )
                    yield pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]})

    return rewrite
