"""Check an index folder: every block against checksums, map, rows and links; the view against the store. Reads only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from memwal_ops.core.own_files import check_own_files
from memwal_ops.core.verification import Severity, VerifyReport
from memwal_ops.formats.lm_diskann import deep
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.locks import WriterLock
from memwal_ops.formats.lm_diskann.store import NAME, Store
from memwal_ops.formats.lm_diskann.verification import Verified, verify

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import VerifyOptions
    from memwal_ops.formats.lm_diskann.table import Table


def plan(table: Table, options: VerifyOptions, context: RunContext) -> VerifyReport:
    """Check everything; every block is read, with --deep or without.

    With --deep also reachability and recall, unless there are findings already.

    Raises:
        IndexBusyError: another writer or job has the index.
        TableCorruptError: the store cannot be opened, or is that of another index.
    """
    lock = WriterLock(table.location.uri, options.wait.total_seconds())
    try:
        found = verify(table.location.uri, table.parameters, options.max_findings, context)
        checked: dict[str, Any] = {"blocks": found.blocks}
        if options.deep and found.findings.worst is not Severity.ERROR and not found.findings.counts:
            checked["recall"] = _deep(table, found)
    finally:
        lock.release()
    found.findings.extend(check_own_files(table))
    return VerifyReport(table.revision, found.findings, checked)


def _deep(table: Table, found: Verified) -> float | None:
    """Add the findings of --deep, and return the recall."""
    store = Store(
        os.path.join(table.location.uri, NAME), table.parameters.uuid, table.parameters.quantizer, read_only=True
    )
    try:
        with Index(table.location.uri, read_only=True) as index:
            found.add("epoch_beyond_end", deep.late_epochs(store))
            found.add("slot_lost", deep.lost_slots(store))
            found.add("unreachable", (f"no path leads to node {one}" for one in deep.unreachable(index.view, store)))
            return deep.recall(index, store)
    finally:
        store.close()


apply = plan
