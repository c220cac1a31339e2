"""Run lists of tasks of a job on a Lance table: what compactions, catch-ups and verifications share."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from memwal_ops.core.spark import runner
from memwal_ops.formats.lance.engines.spark.leftovers import log_leftovers

if TYPE_CHECKING:
    from datetime import datetime

    from memwal_ops.core.protocols import Table as AnyTable
    from memwal_ops.formats.lance.table import Table


class TaskRunner(runner.TaskRunner):
    """Logs what lost attempts left. No version names these files; ``expire`` deletes them once they are old enough."""

    def log_leftovers(self, table: AnyTable, began: datetime) -> None:
        """Log the files that are in no version."""
        log_leftovers(cast("Table", table), began)
