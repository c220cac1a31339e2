"""Summarize a namespace: backlog metrics of its jobs, and missing objects. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.polling import built_in_backlog
from memwal_ops.core.protocols import Blocked, TableSummary
from memwal_ops.errors import FragmentMissingError
from memwal_ops.formats.zeppelin import history
from memwal_ops.formats.zeppelin.wire.segment import CENTROIDS

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.namespace import Namespace


def summarize(table: Namespace) -> TableSummary:
    """Backlog metrics of all jobs, and the fragments that are missing.

    Raises:
        StorageError: the store failed.
    """
    backlog = built_in_backlog(table)
    reason, blocked = FragmentMissingError.reason, []
    for one in table.missing_fragments() if backlog.get("blocked_fragments") else ():
        detail = f"The fragment {one} is listed, but does not exist."
        entry = {"fragment": one, "reason": reason, "detail": detail, "remedy": FragmentMissingError.remedy}
        blocked.append(Blocked("", reason, detail, entry))
    return TableSummary(table.revision, backlog, len(table.manifest.fragments), tuple(blocked))


def missing_of(table: Namespace, revision: int) -> str | None:
    """A fragment or a segment's centroids that a revision lists and that are missing."""
    if not table.has_revision(revision):
        return None
    found = table.manifest if revision == table.revision else history.read(table, revision)
    keys = [*found.fragment_keys, *(one.prefix + CENTROIDS for one in found.segments if not one.hierarchical)]
    return next((key for key in sorted(keys) if table.store.head(key) is None), None)
