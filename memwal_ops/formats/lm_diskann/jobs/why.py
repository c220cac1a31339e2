"""Explain why a deleted node or a file of an index folder is kept or deletable: every gate. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.explanation import Explanation, explain
from memwal_ops.formats.lm_diskann.jobs.gc import opened

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import WhyOptions
    from memwal_ops.formats.lm_diskann.table import Table


def plan(table: Table, options: WhyOptions, context: RunContext | None = None) -> Explanation:
    """Explain ``options.target``: ``nodes/ID``, the end of the graph, or a file of a view or reader.

    Raises:
        IndexBusyError: another writer or job has the index.
        ObjectNotFoundError: there is no such candidate.
    """
    del context
    with opened(table, options) as collectors:
        return explain(table, options.target, collectors)


apply = plan
