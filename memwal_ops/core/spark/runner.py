"""Run lists of tasks of a job on Spark.

A task only reads, or adds files that no version names, under names of its own: a second attempt (a retry, speculation,
a lost executor) adds others, or the same. The driver publishes what the one successful attempt of each task returned.
What other attempts wrote is in no version: a job that deletes unreferenced files deletes it once it is old enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self, TypeVar

from memwal_ops.core.context import Progress, RunContext
from memwal_ops.core.spark.session import our_tasks, session
from memwal_ops.core.spark.stages import Counters, StageProgress, Stages, between_stages, reported, run_parts
from memwal_ops.text import size_text

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark.sql import SparkSession

    from memwal_ops.core.protocols import Table


Count = Callable[[int, int], None]
_T = TypeVar("_T")
_R = TypeVar("_R")
_FIGURES = ("tasks", "lost_attempts", "executor_seconds")


@dataclass(frozen=True, slots=True)
class SparkStage:
    """A stage of a job. Its name in reports, what it does for Spark's pages, and the activity for the progress bar."""

    name: str
    doing: str
    activity: str


class TaskRunner:
    """Runs the tasks of one job. Starts Spark with the first: the job may find nothing to do.

    ``master``: see :func:`memwal_ops.core.spark.session.session`. ``context``: for progress, figures and stop requests,
    which are heard while a stage runs.
    """

    def __init__(self, master: str | None, context: RunContext, app_name: str) -> None:
        self._master, self._context, self._app_name = master, context, app_name
        self._spark: SparkSession | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, trace)

    @property
    def cores(self) -> int:
        """How many tasks run at a time."""
        return max(1, int(self._session().sparkContext.defaultParallelism))

    def run(
        self, table: Table, stage: SparkStage, tasks: Sequence[_T], work: Callable[[_T, Count], _R]
    ) -> tuple[list[_R], Mapping[str, float]]:
        """Run ``work`` for each task.

        Args:
            table: for messages, and where lost attempts may have left files.
            work: called on an executor with the task and a function that counts rows and bytes for the progress. Of
                credentials, it may hold the table's location.

        Returns:
            The results, in the order of tasks; and figures of the stage, for a report.

        Raises:
            SparkUnavailableError: PySpark, pandas or Java is missing, here or on the executors.
            SparkJobFailedError: Spark failed.
            StopRequested, LeaseLostError: the run is to stop; the stage was cancelled.
        """
        with self.staged(table, stage) as (spark, counters, figures):
            results = run_parts(spark.sparkContext, _task(work, counters), tasks)
        return results, figures

    @contextmanager
    def staged(self, table: Table, stage: SparkStage) -> Iterator[tuple[SparkSession, Counters, dict[str, float]]]:
        """A stage of other than :meth:`run`'s tasks; its figures are there once it has ended. Raises the same."""
        began = datetime.now(UTC)
        spark = self._session()
        figures: dict[str, float] = {}
        with between_stages(), our_tasks(spark):
            counters = Counters.of(spark.sparkContext)
            show = self._shown(stage.activity)
            stages = Stages(spark.sparkContext, table.location.uri, counters, show, self._context.checkpoint)
            try:
                with stages.stage(stage.name, stage.doing):
                    yield spark, counters, figures
            except BaseException:
                stages.settle()
                self.log_leftovers(table, began)
                raise
        self._context.add_phase_seconds(stage.name, stages.seconds[stage.name])
        if stages.metrics["lost_attempts"] or "incomplete" in stages.metrics:
            self.log_leftovers(table, began)
        figures["seconds"] = stages.seconds[stage.name]
        figures |= {name: round(stages.metrics[name], 6) for name in _FIGURES}

    def log_leftovers(self, table: Table, began: datetime) -> None:
        """Log the files that lost attempts may have left since ``began``; formats that can tell them do so."""

    def _session(self) -> SparkSession:
        if self._spark is None:
            self._context.report(Progress("starting Spark", "tasks", 0))
            self._spark = self._exit.enter_context(session(self._master, app_name=self._app_name))
        return self._spark

    def _shown(self, activity: str) -> Callable[[StageProgress], None]:
        def show(stage: StageProgress) -> None:
            detail = f"{stage.rows:,} rows" + (f", {size_text(stage.bytes)}" if stage.bytes else "")
            self._context.report(Progress(activity, "tasks", stage.tasks_done, stage.tasks or None, detail))

        return show


def _task(work: Callable[[Any, Count], Any], counters: Counters) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def run(tasks: Iterable[Any]) -> Iterator[Any]:
        with reported():
            for task in tasks:
                yield work(task, counters.add)

    return run
