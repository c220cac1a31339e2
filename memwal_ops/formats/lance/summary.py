"""Summarize a Lance table: backlog metrics of its jobs, and blocked regions. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.context import RunContext
from memwal_ops.core.protocols import Blocked, TableSummary
from memwal_ops.core.table_history import built_in_backlog
from memwal_ops.formats.lance.options import InspectOptions

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table


def summarize(table: Table) -> TableSummary:
    """The summary of a table.

    Raises:
        StorageError: the store failed.
    """
    metrics = built_in_backlog(table)
    blocked: tuple[Blocked, ...] = ()
    if metrics.get("blocked_regions"):
        inspection: Any = table.jobs["inspect"].job.plan(table, InspectOptions(), RunContext())
        blocked = tuple(
            Blocked(str(document["region_id"]), fault.error.reason, str(fault.error), document)
            for fault in inspection.faults
            if (document := fault.to_json())
        )
    return TableSummary(table.version, metrics, len(table.regions.region_ids), blocked)
