"""Check an index folder: every block against checksums, map, rows and links; the view against the store. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.own_files import check_own_files
from memwal_ops.core.verification import VerifyReport
from memwal_ops.formats.lm_diskann.locks import WriterLock
from memwal_ops.formats.lm_diskann.verification import verify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import VerifyOptions
    from memwal_ops.formats.lm_diskann.table import Table


def backlog(table: Table) -> Mapping[str, float]:
    """None."""
    del table
    return {}


def plan(table: Table, options: VerifyOptions, context: RunContext) -> VerifyReport:
    """Check everything; every block is read, with --deep or without.

    Raises:
        IndexBusyError: another writer or job has the index.
        TableCorruptError: the store cannot be opened, or is that of another index.
    """
    lock = WriterLock(table.location.uri, options.wait.total_seconds())
    try:
        found = verify(table.location.uri, table.parameters, options.max_findings, context)
    finally:
        lock.release()
    found.findings.extend(check_own_files(table))
    return VerifyReport(table.revision, found.findings, {"blocks": found.blocks})


apply = plan
