"""Read the rows with which a verification compares on Spark: each task some groups of fragments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from memwal_ops.core.spark.runner import Count, SparkStage
from memwal_ops.core.spark.stages import in_parts, part_numbers
from memwal_ops.formats.lance.answers import asked_index
from memwal_ops.formats.lance.engines.spark import indexing
from memwal_ops.formats.lance.files.datasets import lance_errors, open_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from memwal_ops.formats.lance.engines.spark.running import LoggingTaskRunner
    from memwal_ops.formats.lance.table import Table

_R = TypeVar("_R")
# A task may start again, and reads everything once more.
_MOST_ROWS = 64 << 20
_ASK = SparkStage("ask", "compare answers of indexes with rows", "comparing answers")


class SparkReader(asked_index.RowReader):
    """Reads rows by the tasks of a runner, of one version of one table."""

    def __init__(self, table: Table, runner: LoggingTaskRunner, checkpoint: Callable[[], object]) -> None:
        super().__init__(checkpoint)
        self._table, self._runner = table, runner

    def each(
        self,
        pinned: asked_index.Pinned,
        fragments: Sequence[int],
        work: Callable[[asked_index.Pinned, Sequence[int]], _R],
        max_rows: int = asked_index.ROWS,
    ) -> Iterator[_R]:
        """See :meth:`asked_index.RowReader.each`; the results of all groups are there before the first is returned."""
        if not fragments:
            return
        share = -(-sum(pinned.physical(one) for one in fragments) // self._runner.cores)
        groups = pinned.chunks([*fragments], min(max_rows, share))
        sizes = [sum(pinned.physical(one) for one in group) for group in groups]
        tasks = in_parts(groups, part_numbers(sizes, self._runner.cores, _MOST_ROWS))
        location, version = self._table.location.refreshed(), self._table.version

        def compare(part: Sequence[Sequence[int]], count: Count) -> list[_R]:
            with lance_errors("open", location.uri):
                opened = asked_index.Pinned(open_dataset(location, version=version), location.uri)
            results = []
            for group in part:
                results.append(work(opened, group))
                count(sum(opened.fragments[one].physical_rows for one in group), 0)
            return results

        results, figures = self._runner.run(self._table, _ASK, tasks, compare)
        self._add(_ASK.name, figures)
        for one in results:
            yield from one

    def repeated_keys(self, table: Table, columns: Sequence[str]) -> asked_index.Repeated:
        """See :meth:`asked_index.RowReader.repeated_keys`; memory of the driver: none that grows with the table."""
        stage = SparkStage("keys", "count keys of several rows", "counting keys")
        return self._counted(table, stage, indexing.keys_of(table.schema, columns))

    def repeated_row_ids(self, table: Table) -> asked_index.Repeated:
        """See :meth:`asked_index.RowReader.repeated_row_ids`; memory of the driver: none that grows with the table."""
        stage = SparkStage("row ids", "count row ids of several rows", "counting row ids")
        return self._counted(table, stage, indexing.row_ids_of(int(table.manifest.manifest.next_row_id)))

    def _counted(self, table: Table, stage: SparkStage, read: indexing.ReadKeys) -> asked_index.Repeated:
        counts, figures = indexing.count_repeated(self._runner, table, stage, read)
        self._add(stage.name, figures)
        return asked_index.Repeated(*counts)

    def _add(self, name: str, figures: Mapping[str, float]) -> None:
        known: Mapping[str, Any] = self.stages.get(name, {})
        self.stages[name] = {key: round(known.get(key, 0) + value, 6) for key, value in figures.items()}
