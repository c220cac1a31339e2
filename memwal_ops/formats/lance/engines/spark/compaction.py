"""Execute the tasks of a compaction on Spark: executors rewrite, the driver commits.

Tasks and results are pickled by pylance, in the form of its release; ``check_executors`` refuses another one. No row
passes through Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.spark.runner import Stage
from memwal_ops.formats.lance.engines.spark.runner import TaskRunner
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import lance
    from lance.optimize import CompactionTask, RewriteResult

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.spark.runner import Count
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.locations import Location

_REWRITE = Stage("rewrite", "rewrite groups of fragments", "rewriting")


class SparkExecutor(TaskRunner):
    """One Spark task for each task of the compaction. Arguments as of :class:`TaskRunner`."""

    name = "spark"
    rows_per_commit = 64 << 20

    def __init__(self, master: str | None, context: RunContext) -> None:
        super().__init__(master, context, "memwal-ops compact")

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """See :class:`memwal_ops.formats.lance.engines.merge.compaction.TaskExecutor`.

        Raises:
            SparkUnavailableError: PySpark, pandas or Java is missing, here or on the executors.
            SparkJobFailedError: Spark failed; nothing was published.
        """
        work = _rewriter(table.location.refreshed(), int(dataset.version))
        results, _ = self.run(table, _REWRITE, tasks, work)
        yield from results


def _rewriter(location: Location, version: int) -> Callable[[CompactionTask, Count], RewriteResult]:
    def rewrite(task: CompactionTask, count: Count) -> RewriteResult:
        with lance_errors("write compacted fragments of", location.uri):
            result = task.execute(open_dataset(location, version=version))
        files = [file for one in result.new_fragments for file in one.files]
        rows = sum(one.physical_rows for one in result.new_fragments)
        count(rows, sum(file.file_size_bytes or 0 for file in files))
        return result

    return rewrite
