"""Execute the tasks of a compaction: here, or where another engine runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import lance
    from lance.optimize import CompactionTask, RewriteResult

    from memwal_ops.formats.lance.table import Table


class TaskExecutor(Protocol):
    """Rewrites groups of fragments. A task only adds files that no version names; the job commits its results."""

    @property
    def name(self) -> str:
        """The value of ``--engine`` that selects it."""

    @property
    def rows_per_commit(self) -> int:
        """A commit holds the old and the new address of every row, to remap the indexes: some 90 bytes per row."""

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """The results of tasks that were planned on ``dataset``, which is ``table``'s version."""


class LocalExecutor:
    """One task after the other, in this process."""

    name = "local"
    rows_per_commit = 8 << 20

    def execute(
        self, table: Table, dataset: lance.LanceDataset, tasks: Sequence[CompactionTask]
    ) -> Iterator[RewriteResult]:
        """See :class:`TaskExecutor`."""
        for task in tasks:
            with lance_errors("write compacted fragments of", table.location.uri):
                result = task.execute(dataset)
            yield result
